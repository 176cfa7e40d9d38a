"""``PagedCache``: what it says of itself, and its views."""

import pytest
import torch

from swa_plan import LAYOUTS, CacheLayout
from swa_torch import PagedCache


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layers", [None, "front", "after-pages"])
def test_sizes_and_views(layout, layers):
    if layers == "front":
        layout = f"layers {layout}"
    elif layers == "after-pages":
        layout = layout.replace("pages", "pages layers")
    v_dim = 64 if " kv " in f" {layout.split('(')[0]} " else 32
    cache = PagedCache.empty(
        layout, pages=5, block=3, kv_heads=2, k_dim=64, v_dim=v_dim, layers=4 if layers else None, dtype=torch.float16
    )
    assert (cache.pages, cache.block, cache.kv_heads, cache.k_dim, cache.v_dim) == (5, 3, 2, 64, v_dim)
    assert cache.layers == (4 if layers else None)
    assert (cache.dtype, cache.device) == (torch.float16, torch.device("cpu"))
    assert cache.layout == CacheLayout(layout)
    assert not cache.is_views
    for layer in range(4) if layers else [None]:
        key_cache, value_cache = cache.views(layer)
        assert key_cache.shape == (5, 3, 2, 64)
        assert value_cache.shape == (5, 3, 2, v_dim)
        assert key_cache.stride(-1) == value_cache.stride(-1) == 1
        key_cache.fill_(1 + (layer or 0))
        value_cache.fill_(-1 - (layer or 0))
    assert sum(float(base.float().sum()) for base in cache.bases) == (10 if layers else 1) * 30 * (64 - v_dim)
    if layers:
        with pytest.raises(ValueError, match="layer must be given"):
            _ = cache.key_cache
    else:
        assert cache.key_cache.data_ptr() == cache.views()[0].data_ptr()
        assert cache.value_cache.shape[3] == v_dim


def test_it_keeps_the_tensors_it_was_given():
    base = torch.zeros(5, 2, 3, 128)
    cache = PagedCache(base, "pages kv_heads block (kv dim)")
    assert cache.bases == (base,)
    assert cache.bases[0] is base
    pair = (torch.zeros(5, 3, 2, 64), torch.zeros(5, 3, 2, 32))
    assert all(a is b for a, b in zip(PagedCache(pair, LAYOUTS[0]).bases, pair, strict=True))
    assert all(a is b for a, b in zip(PagedCache(list(pair), LAYOUTS[0]).bases, pair, strict=True))


def test_unequal_packed_sizes_need_a_name():
    base = torch.zeros(5, 2, 3, 320)
    for dims in ({"k_dim": 192}, {"v_dim": 128}, {"k_dim": 192, "v_dim": 128}):
        cache = PagedCache(base, "pages kv_heads block (kv dim)", **dims)
        assert (cache.k_dim, cache.v_dim) == (192, 128)
        assert cache.value_cache.storage_offset() == 192


def test_from_kv_guesses_no_base():
    base = torch.zeros(2, 5, 3, 2, 64)
    cache = PagedCache.from_kv(base[0], base[1])
    assert cache.is_views
    assert cache.layout.spec == "pages block kv_heads dim"
    assert len(cache.bases) == 2


def test_it_says_what_it_is():
    text = repr(PagedCache(torch.zeros(5, 2, 3, 128), "pages kv_heads block (kv dim)"))
    for word in ("pages kv_heads block (kv dim)", "(5, 2, 3, 128)", "torch.float32", "cpu"):
        assert word in text


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bfloat16])
def test_empty_in_every_dtype(dtype):
    cache = PagedCache.empty(LAYOUTS[4], pages=2, block=4, kv_heads=1, k_dim=64, dtype=dtype)
    assert cache.key_cache.dtype == cache.dtype == dtype
    assert PagedCache.empty(LAYOUTS[0], pages=0, block=4, kv_heads=1, k_dim=64).pages == 0


def test_a_cache_on_the_meta_device():
    cache = PagedCache.empty(LAYOUTS[2], pages=10**9, block=16, kv_heads=8, k_dim=128, device="meta")
    assert cache.key_cache.shape == (10**9, 16, 8, 128)
