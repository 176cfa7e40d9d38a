"""``append`` against the reference, bit for bit, over every backend present."""

import ml_dtypes
import numpy as np
import pytest
import torch

import swa_torch
from swa_plan import CacheLayout, reference
from swa_plan._dtypes import numpy_dtype
from swa_torch import PagedCache
from tests.contract.appends import BLOCK, DIM, KV_HEADS, PAGES, SLOTS, make_bases, make_rows
from tests.contract.backends import same_bits
from tests.contract.torch_runner import BACKENDS, device_of, to_numpy, to_torch

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

LAYOUTS = {
    "pages block kv_heads dim": None,
    "pages kv_heads block dim": None,
    "kv pages block kv_heads dim": None,
    "pages kv block kv_heads dim": None,
    "pages kv_heads block (kv dim)": None,
    "pages block kv_heads (kv dim)": None,
    "layers pages kv_heads block (kv dim)": 2,
    "pages layers block kv_heads dim": 0,
    "layers kv pages block kv_heads dim": 1,
}
QUANTISED = ("float8_e4m3fn", "float8_e5m2", "int8")


def check(backend, layout, bases, key, value, slots, *, k_dim=DIM, v_dim=DIM, layer=None, **scales):
    """Append on the backend and in the reference; every bit of every base must agree."""
    expected = tuple(base.copy() for base in bases)
    views = CacheLayout.parse(layout).views(expected, k_dim=k_dim, v_dim=v_dim, layer=layer)
    written = reference.append(*views, key, value, slots, **scales)
    for view, new in zip(views, written, strict=True):
        view[...] = new
    device = device_of(backend)
    tensors = tuple(to_torch(base, device) for base in bases)
    cache = PagedCache(tensors if len(tensors) == 2 else tensors[0], layout, k_dim=k_dim, v_dim=v_dim)
    scales = {name: to_torch(scale, device) for name, scale in scales.items()}
    result = swa_torch.append(
        cache, to_torch(key, device), to_torch(value, device), to_torch(slots, device), layer=layer, **scales
    )
    assert result is None
    for tensor, array in zip(tensors, expected, strict=True):
        assert difference(to_numpy(tensor), array, any_nan=bool(scales)) == ""
    return expected


def difference(actual, expected, *, any_nan=False):
    """Return where two arrays first differ in a bit, or an empty text; the bits of a converted NaN are anyone's."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    integers = f"u{expected.dtype.itemsize}"
    differs = np.ascontiguousarray(actual).view(integers) != np.ascontiguousarray(expected).view(integers)
    if any_nan:
        differs &= ~(np.isnan(actual.astype(np.float32)) & np.isnan(expected.astype(np.float32)))
    places = np.argwhere(differs)
    if not len(places):
        return ""
    first = tuple(places[0].tolist())
    return f"{len(places)} differ, first at {first}: {actual[first]!r} instead of {expected[first]!r}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_copies_into_every_layout(layout, dtype, backend):
    slots = np.array([0, 7, 19, 4, 11, 12], np.int32)
    bases = make_bases(layout, dtype)
    expected = check(backend, layout, bases, *make_rows(dtype), slots, layer=LAYOUTS[layout])
    assert not any(same_bits(new, old) for new, old in zip(expected, bases, strict=True))


@pytest.mark.parametrize("layout", ["pages block kv_heads dim", "pages kv_heads block (kv dim)"])
@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("kind", ["float", "scalar", "head"])
def test_quantises_with_every_kind_of_scale(kind, dtype, source, layout, backend):
    k_scale = {"float": 0.37, "scalar": np.array(0.37, np.float32), "head": np.array([0.37, 0.021], np.float32)}[kind]
    v_scale = {"float": 0.011, "scalar": np.array(0.5, np.float32), "head": np.array([3.0, 0.07], np.float32)}[kind]
    slots = np.array([3, -1, 8, 19, 0, 5], np.int64)
    check(
        backend, layout, make_bases(layout, dtype), *make_rows(source), slots, k_scale=k_scale, v_scale=v_scale
    )  # fmt: skip


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_slots_outside_the_cache_write_nothing(index_dtype, backend):
    slots = np.array([-1, SLOTS, 2, -7, SLOTS + 5, SLOTS - 1], index_dtype)
    layout = "pages kv_heads block (kv dim)"
    check(backend, layout, make_bases(layout, "float32"), *make_rows("float32"), slots)


@pytest.mark.parametrize("far", [2**31, 2**40, -(2**40), 2**63 - 1, -(2**63)])
def test_absurd_64_bit_slots_write_nothing(far, backend):
    slots = np.array([far, 3, far + (1 if far < 0 else -1)], np.int64)
    layout = "pages block kv_heads dim"
    check(backend, layout, make_bases(layout, "float32"), *make_rows("float32"), slots)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_rows_beyond_the_slot_mapping_are_ignored(count, backend):
    slots = np.arange(count, dtype=np.int32) + 2
    layout = "pages kv_heads block dim"
    check(backend, layout, make_bases(layout, "float16"), *make_rows("float16"), slots)


def test_no_rows_and_no_pages(backend):
    layout = "pages block kv_heads dim"
    check(backend, layout, make_bases(layout, "float32"), *make_rows("float32", rows=0), np.zeros(0, np.int32))
    device = device_of(backend)
    empty = PagedCache.empty(layout, pages=0, block=4, kv_heads=2, k_dim=32, dtype=torch.float32, device=device)
    key, value = (to_torch(rows, device) for rows in make_rows("float32"))
    swa_torch.append(empty, key, value, torch.zeros(6, dtype=torch.int32, device=device))


@pytest.mark.parametrize(("k_dim", "v_dim"), [(192, 128), (80, 48), (16, 256)])
def test_unequal_head_sizes(k_dim, v_dim, backend):
    for layout in ("pages kv_heads block (kv dim)", "pages block kv_heads dim"):
        bases = make_bases(layout, "float16", k_dim=k_dim, v_dim=v_dim)
        rows = make_rows("float16", k_dim=k_dim, v_dim=v_dim)
        check(backend, layout, bases, *rows, np.array([1, 18, 9], np.int32), k_dim=k_dim, v_dim=v_dim)


def special_values(dtype):
    """Return NaN, infinities, overflow, ties between neighbours, subnormals and signed zeros, as ``[rows, 2, 32]``."""
    target = numpy_dtype(dtype)
    if dtype == "int8":
        exact = np.arange(-130, 131).astype(np.float32)
    else:
        exact = np.arange(256, dtype=np.uint8).view(target).astype(np.float32)
        exact = np.sort(exact[np.isfinite(exact)])
    ties = (exact[1:] + exact[:-1]) / 2
    nudged = np.concatenate([np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    odd = [
        np.nan,
        -np.nan,
        np.inf,
        -np.inf,
        1e38,
        -1e38,
        0.0,
        -0.0,
        1e-30,
        -1e-30,
        448.0,
        464.0,
        465.0,
        57344.0,
        61440.0,
    ]
    values = np.concatenate([exact, ties, nudged, np.array(odd, np.float32)]).astype(np.float32)
    return np.resize(values, (-(-len(values) // 64), 2, 32))


@pytest.mark.parametrize("dtype", QUANTISED)
def test_every_tie_and_special_value(dtype, backend):
    key = special_values(dtype)
    value = key[::-1].copy()
    block = -(-len(key) // PAGES)
    cache = tuple(np.zeros((PAGES, block, KV_HEADS, DIM), numpy_dtype(dtype)) for _ in range(2))
    slots = np.arange(len(key), dtype=np.int32)
    check(backend, "pages block kv_heads dim", cache, key, value, slots, k_scale=1.0, v_scale=1.0)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_nan_stays_nan_and_is_zero_in_int8(dtype, backend):
    device = device_of(backend)
    key = torch.full((1, KV_HEADS, DIM), torch.nan, device=device)
    cache = tuple(torch.ones(1, 1, KV_HEADS, DIM, device=device).to(getattr(torch, dtype)) for _ in range(2))
    swa_torch.append(cache, key, -key, torch.zeros(1, dtype=torch.int32, device=device), k_scale=0.5, v_scale=0.5)
    for stored in cache:
        assert (stored.float() == 0).all() if dtype == "int8" else stored.float().isnan().all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_unquantised_caches_keep_every_bit(dtype, backend):
    key = np.resize(np.array([np.nan, np.inf, -np.inf, -0.0, 1e-40, 6e4]), (6, KV_HEADS, DIM)).astype(
        numpy_dtype(dtype)
    )
    layout = "pages block kv_heads dim"
    check(backend, layout, make_bases(layout, dtype), key, key[::-1].copy(), np.arange(6, dtype=np.int32))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_scales_divide_in_an_unquantised_cache_too(dtype, backend):
    layout = "pages block kv_heads dim"
    check(
        backend, layout, make_bases(layout, dtype), *make_rows(dtype), np.arange(6, dtype=np.int32),
        k_scale=0.37, v_scale=np.array([0.37, 3.0], np.float32),
    )  # fmt: skip


def test_infinity_survives_a_scaled_unquantised_cache(backend):
    layout = "pages block kv_heads dim"
    key = np.resize(np.array([np.inf, -np.inf, np.nan, 1.0], np.float32), (4, KV_HEADS, DIM))
    check(backend, layout, make_bases(layout, "float32"), key, key, np.arange(4, dtype=np.int32), k_scale=0.5)


def test_strided_rows_and_padded_pages(backend):
    device = device_of(backend)
    key, value = make_rows("float32")
    fused = torch.zeros(6, 3 * KV_HEADS * DIM, device=device)
    fused[:, : KV_HEADS * DIM] = to_torch(key, device).flatten(1)
    fused[:, KV_HEADS * DIM : 2 * KV_HEADS * DIM] = to_torch(value, device).flatten(1)
    sliced = [fused[:, i * KV_HEADS * DIM : (i + 1) * KV_HEADS * DIM].view(6, KV_HEADS, DIM) for i in range(2)]
    padded = torch.full((PAGES, 2, BLOCK + 1, KV_HEADS, DIM + 16), 7.0, device=device)
    views = tuple(padded[:, kv, :BLOCK, :, :DIM] for kv in range(2))
    slots = torch.tensor([[0, 5], [7, 5], [19, 5], [-1, 5]], device=device)[:, 0].contiguous()
    expected = reference.append(*(to_numpy(view) for view in views), key, value, to_numpy(slots))
    swa_torch.append(views, *sliced, slots)
    for view, array in zip(views, expected, strict=True):
        assert difference(to_numpy(view), array) == ""
    padded[:, :, :BLOCK, :, :DIM] = 7.0
    assert (padded == 7.0).all(), "memory between the pages was written"


@pytest.mark.parametrize("dtype", QUANTISED)
def test_what_is_appended_is_what_is_read(dtype, backend):
    device = device_of(backend)
    key, value = (to_torch(rows, device) for rows in make_rows("float32", rows=1))
    layout = "pages kv_heads block (kv dim)"
    base = torch.zeros(PAGES, KV_HEADS, BLOCK, 2 * DIM, device=device).to(getattr(torch, dtype))
    scales = {"k_scale": torch.tensor([0.04, 0.06], device=device), "v_scale": 0.05}
    cache = PagedCache(base, layout)
    swa_torch.append(cache, key, value, torch.tensor([9], device=device), **scales)
    out = swa_torch.swa_decode(
        torch.zeros(1, 4, DIM, device=device), cache, torch.tensor([[2]], device=device),
        torch.tensor([2], device=device), window=1, backend=backend, **scales,
    )  # fmt: skip
    stored = reference.quantise(to_numpy(value), np.float32(0.05), numpy_dtype(dtype)).astype(np.float32)
    expected = np.repeat(stored * np.float32(0.05), 2, axis=1)
    assert difference(to_numpy(out), expected) == ""


def test_fp8_limits_are_the_formats_own(backend):
    assert float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max) == 448.0
    assert float(ml_dtypes.finfo(ml_dtypes.float8_e5m2).max) == 57344.0
