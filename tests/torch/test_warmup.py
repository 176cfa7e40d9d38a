"""``warmup``: harmless anywhere, and on a GPU nothing compiles after it."""

import pytest
import torch

from swa_torch import append, plan_for, swa_decode, warmup
from tests.contract.torch_runner import GPU_BACKENDS
from tests.torch.helpers import make_step, normal, same_bits


def test_it_touches_nothing():
    step = make_step((20, 5, 0, 33), layout="layers pages kv_heads block (kv dim)", layers=2)
    plan = plan_for(*step[:3], window=16, max_requests=64)
    before = [base.clone() for base in step.cache.bases]
    rows = normal(4, 2, 64), normal(4, 2, 64)
    out = torch.full((4, 8, 64), 7.0)
    warmup(
        plan, step.query, step.cache, key=rows[0], value=rows[1], gate=normal(4, 8), sinks=normal(8), return_lse=True,
        softcap=3.0, out=out,
    )  # fmt: skip
    assert all(same_bits(base, old) for base, old in zip(step.cache.bases, before, strict=True))
    assert (out == 7.0).all()


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_ragged_and_ranged_plans(index_dtype):
    step = make_step((20, 5, 0, 33), tokens=9)
    plan = plan_for(*step[:3], window=16, query_len=3, ragged=True)
    edges = torch.tensor([0, 3, 4, 4, 9], dtype=torch.int32)
    warmup(
        plan, step.query, step.cache, cu_query_lens=edges, kv_start=step.seq_lens, kv_end=step.seq_lens,
        index_dtype=index_dtype,
    )  # fmt: skip
    warmup(plan, step.query[:0], step.cache)


def test_a_quantised_cache():
    step = make_step()
    cache = tuple(base.to(torch.float8_e4m3fn) for base in step.cache.bases)
    plan = plan_for(step.query, cache, step.block_table, window=16)
    rows = normal(4, 2, 64), normal(4, 2, 64)
    warmup(plan, step.query, cache, key=rows[0], value=rows[1], k_scale=0.5, v_scale=torch.ones(2))


BATCHES = (1, 2, 3, 8, 15, 16, 17, 32, 64)


@pytest.fixture
def compilations():
    """Collect the names of kernels that Triton compiles or loads from its disk cache."""
    import triton

    seen = []
    hook = triton.knobs.runtime.jit_post_compile_hook

    def record(*args, **kwargs):
        seen.append(kwargs["fn"].name)

    triton.knobs.runtime.jit_post_compile_hook = record
    yield seen
    triton.knobs.runtime.jit_post_compile_hook = hook


FEATURES = {
    "plain": {},
    "gate-lse": {"gate": True, "return_lse": True},
    "softcap-sinks": {"softcap": 30.0, "sinks": True},
    "verify": {"query_len": 2},
    "ragged": {"query_len": 4, "ragged": True},
    "invariant": {"batch_invariant": True},
    "fp8": {"cache_dtype": torch.float8_e4m3fn},
}


@pytest.mark.gpu
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_nothing_compiles_after_warmup(backend, features, compilations):
    features = dict(features)
    query_len, ragged = features.pop("query_len", 1), features.pop("ragged", False)
    invariant, cache_dtype = features.pop("batch_invariant", False), features.pop("cache_dtype", None)
    step = make_step(
        [300] * 64, query_len=query_len, heads=16, kv_heads=2, k_dim=128, v_dim=128, max_blocks=24,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    cache = step.cache.bases if cache_dtype is None else tuple(base.to(cache_dtype) for base in step.cache.bases)
    scales = {} if cache_dtype is None else {"k_scale": 1.0, "v_scale": torch.ones(2, device="cuda")}
    gate = normal(64 * query_len, 16).cuda() if features.pop("gate", False) else None
    sinks = normal(16).cuda() if features.pop("sinks", False) else None
    options = {**features, **scales, "sinks": sinks}
    plan = plan_for(
        step.query, cache, step.block_table, window=200, query_len=query_len, ragged=ragged, batch_invariant=invariant,
        backend=backend,
    )  # fmt: skip
    key, value = (normal(64, 2, 128, seed=seed).cuda().bfloat16() for seed in (1, 2))
    warmup(plan, step.query, cache, key=key, value=value, gate=gate, **options)
    compilations.clear()
    for requests in BATCHES:
        tokens = requests * query_len
        edges = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * query_len if ragged else None
        for columns in (24, 23, 21, 20):
            swa_decode(
                step.query[:tokens], cache, step.block_table[:requests, :columns], step.seq_lens[:requests], window=200,
                query_len=query_len, cu_query_lens=edges, gate=None if gate is None else gate[:tokens], plan=plan,
                **options,
            )  # fmt: skip
        append(cache, key[:requests], value[:requests], step.seq_lens[:requests], **scales)
    # Tensors at odd addresses: slices of a batch need not be aligned.
    swa_decode(
        step.query[query_len:], cache, step.block_table[1:], step.seq_lens[1:], window=200, query_len=query_len,
        gate=None if gate is None else gate[query_len:], plan=plan, **options,
        cu_query_lens=torch.arange(64, dtype=torch.int32, device="cuda") * query_len if ragged else None,
    )  # fmt: skip
    torch.cuda.synchronize()
    assert compilations == []
