"""Kind 5 of the known failures: offsets beyond 2**31 elements. Small pools never see them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import swa_torch
from tests.contract.torch_runner import GPU_BACKENDS

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _release_memory():
    yield
    torch.cuda.empty_cache()


def random_like(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=CUDA, dtype=torch.bfloat16)


def index(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=CUDA)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_high_pages_of_an_interleaved_pool(backend, splits):
    """C34, vllm-project/vllm#47671: page * page stride wraps at page 43691."""
    pool = torch.zeros(43700, 2, 16, 8, 192, dtype=torch.bfloat16, device=CUDA)
    assert pool.stride(0) * 43691 > 2**31 - 1
    data = random_like((4, *pool.shape[1:]), 0)
    pool[:4], pool[43696:] = data, data
    cache = swa_torch.PagedCache(pool, "pages kv block kv_heads dim")
    query = random_like((1, 96, 192), 1)
    table, lens = index([[0, 1, 2, 3]]), index([64])
    plan = replace(swa_torch.plan_for(query, cache, table, window=512, backend=backend), splits=splits)
    low = swa_torch.swa_decode(query, cache, table, lens, window=512, plan=plan)
    high = swa_torch.swa_decode(query, cache, table + 43696, lens, window=512, plan=plan)
    assert low.abs().amax() > 0
    assert torch.equal(low, high)
    key, value = random_like((1, 8, 192), 2), random_like((1, 8, 192), 3)
    swa_torch.append(cache, key, value, index([43699 * 16 + 15]))
    assert torch.equal(pool[43699, :, 15], torch.stack((key[0], value[0])))
    assert torch.equal(pool[3], data[3])


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_high_pages_of_a_packed_pool(backend):
    """C36, vllm-project/vllm#50427: with K and V in one last axis the page stride spans both."""
    pool = torch.full((43700, 16, 8, 384), 1e4, dtype=torch.bfloat16, device=CUDA)
    assert pool.stride() == (49152, 3072, 384, 1)
    pool[43696:] = random_like((4, 16, 8, 384), 0)
    cache = swa_torch.PagedCache(pool, "pages block kv_heads (kv dim)")
    query, lens = random_like((1, 96, 192), 1), index([64])
    out = swa_torch.swa_decode(query, cache, index([list(range(43696, 43700))]), lens, window=512, backend=backend)
    contiguous = (pool[43696:, ..., :192].contiguous(), pool[43696:, ..., 192:].contiguous())
    expected = swa_torch.swa_decode(query, contiguous, index([[0, 1, 2, 3]]), lens, window=512, backend=backend)
    assert out.abs().amax() < 100
    assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_late_rows_of_a_fused_projection(backend):
    """C38, thu-ml/SageAttention#387: a row stride of 21504 wraps at row 99865."""
    tokens, rows = 100_000, slice(99_800, 100_000)
    projection = random_like((tokens, (96 + 16) * 192), 0)
    query = projection[:, : 96 * 192].view(tokens, 96, 192)
    assert query.stride(0) * 99_865 > 2**31 - 1
    cache = (random_like((64, 16, 8, 192), 1), random_like((64, 16, 8, 192), 2))
    table = (torch.arange(tokens, device=CUDA) % 64).int()[:, None]
    lens = torch.ones(tokens, dtype=torch.int32, device=CUDA)
    plan = swa_torch.plan_for(query, cache, table, window=512, backend=backend)
    out = swa_torch.swa_decode(query, cache, table, lens, window=512, plan=plan)[rows].clone()
    few = query[rows].contiguous()
    expected = swa_torch.swa_decode(
        few, cache, table[rows].contiguous(), lens[rows].contiguous(), window=512, plan=plan
    )
    assert torch.equal(out, expected)
    # With one key the query decides nothing; with 16 it decides every weight.
    out = swa_torch.swa_decode(query, cache, table, lens * 16, window=512, plan=plan)[rows].clone()
    expected = swa_torch.swa_decode(
        few, cache, table[rows].contiguous(), lens[rows].contiguous() * 16, window=512, plan=plan
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_high_pages_of_a_pool_of_all_layers(backend):
    """C39, vllm-project/vllm-xpu-kernels#445: 48 layers in a page wrap at page 911."""
    pool = torch.zeros(920, 48, 2, 16, 8, 192, dtype=torch.bfloat16, device=CUDA)
    assert pool.stride(0) * 911 > 2**31 - 1
    pool[915:, 47] = random_like((5, 2, 16, 8, 192), 0)
    query, lens = random_like((1, 96, 192), 1), index([80])
    views = (pool[:, 47, 0], pool[:, 47, 1])
    cache = swa_torch.PagedCache(pool, "pages layers kv block kv_heads dim")
    table = index([[915, 917, 916, 919, 918]])
    out = swa_torch.swa_decode(query, views, table, lens, window=512, backend=backend)
    from_base = swa_torch.swa_decode(query, cache, table, lens, window=512, layer=47, backend=backend)
    contiguous = tuple(view[915:].contiguous() for view in views)
    expected = swa_torch.swa_decode(query, contiguous, table - 915, lens, window=512, backend=backend)
    assert expected.abs().amax() > 0
    assert torch.equal(out, expected)
    assert torch.equal(from_base, expected)
