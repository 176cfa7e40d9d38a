"""Kinds 1, 2 and 12 of the known failures, in JAX: what shows only over many keys, many steps or many runs."""

from __future__ import annotations

import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swa_pallas
from swa_plan import tolerance
from tests.contract.backends import plan_for
from tests.contract.jax_runner import HAS_GPU, arguments, to_numpy
from tests.failures.probes import BF16_TOLERANCE, step

NEEDS_JAX_GPU = pytest.mark.skipif(not HAS_GPU, reason="JAX sees no CUDA device")
GPU = "jax-pallas_triton"


def long_table(length: int, requests: int):
    """Return requests of so many keys; pages outside the window are never read, so they repeat."""
    inputs = step((1024,) * requests)
    table = np.random.default_rng(0).integers(0, len(inputs.key_cache), (requests, length // 16)).astype(np.int32)
    table[:, -64:] = inputs.block_table[:, -64:]
    return replace(inputs, block_table=table, seq_lens=np.full(requests, length, np.int32))


@jax.jit
def windowed(query, cache, table, lens):
    return swa_pallas.swa_decode(query, cache, table, lens, window=512)


def test_work_does_not_grow_with_the_context():
    """C10, vllm-project/vllm#49588: a window bounds what is read, not only what is scored."""
    flops = {}
    for length in (16384, 1024):
        inputs = long_table(length, 1)
        positional, _ = arguments(inputs, "jax-xla")
        flops[length] = windowed.lower(*positional).compile().cost_analysis()["flops"]
        tolerance.assert_close(to_numpy(windowed(*positional)), inputs)
    assert 0 < flops[16384] <= 1.01 * flops[1024], flops


@pytest.mark.gpu
@NEEDS_JAX_GPU
def test_time_does_not_grow_with_the_context():
    """C10, vllm-project/vllm#49588, on the clock."""
    times = {}
    for length in (131072, 1024):
        inputs = long_table(length, 16)
        positional, _ = arguments(inputs, GPU)
        tolerance.assert_close(to_numpy(windowed(*positional)), inputs)
        seconds = []
        for _ in range(200):
            start = time.perf_counter()
            windowed(*positional).block_until_ready()
            seconds.append(time.perf_counter() - start)
        times[length] = float(np.median(seconds))
    assert times[131072] <= 1.3 * times[1024], times


@pytest.mark.gpu
@NEEDS_JAX_GPU
def test_planned_splits_never_give_nan_as_requests_grow():
    """C21, pytorch/torchtitan#3235: 700 decode steps from the first token on, in a cache full of NaN."""
    for requests in (1, 2, 3, 5, 8, 17, 33, 64):
        grow(requests, 700)


def grow(requests: int, steps: int) -> None:
    """Decode ``steps`` tokens of each request with the planner's splits and with one, in a loop on the device."""
    rng = np.random.default_rng(0)
    columns = -(-steps // 16)
    cache = swa_pallas.PagedCache.from_kv(
        *(jnp.full((requests * columns, 16, 8, 192), jnp.nan, jnp.bfloat16) for _ in range(2))
    )
    table = jnp.asarray(rng.permutation(requests * columns).reshape(requests, columns).astype(np.int32))
    query, key, value = (
        jnp.asarray(rng.standard_normal((requests, heads, 192), np.float32), jnp.bfloat16) for heads in (96, 8, 8)
    )
    plan = swa_pallas.plan_for(query, cache, table, window=512)
    single = replace(plan, splits=1)

    @jax.jit
    def decode_all(cache):
        def one(position, carry):
            cache, bad, drift = carry
            rows = jnp.roll(key, position, axis=2), jnp.roll(value, position, axis=2)
            slots = table[:, position // 16] * 16 + position % 16
            cache = swa_pallas.append(cache, *rows, slots)
            lens = jnp.full((requests,), position + 1, jnp.int32)
            out, other = (
                swa_pallas.swa_decode(query, cache, table, lens, window=512, plan=each).astype(jnp.float32)
                for each in (plan, single)
            )
            return cache, bad + jnp.isnan(out).sum(), jnp.maximum(drift, jnp.abs(out - other).max())

        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(steps), one, (cache, jnp.int32(0), jnp.float32(0)))[1:]

    bad, drift = decode_all(cache)
    assert int(bad) == 0, requests
    assert float(drift) <= BF16_TOLERANCE, requests


@pytest.mark.parametrize("requests", [1, 3])
def test_growing_requests_never_give_nan(requests):
    """C21, pytorch/torchtitan#3235, the first 40 steps on any machine."""
    grow(requests, 40)


@pytest.mark.gpu
@NEEDS_JAX_GPU
def test_thousand_runs_give_the_same_bits():
    """C91, ROCm/FlyDSL#776: no race between splits and combine."""
    lengths = np.random.default_rng(0).integers(4, 5001, 7)
    inputs = step(lengths, query_len=4)
    positional, _ = arguments(inputs, GPU)
    plan = plan_for(inputs, GPU, splits=8)

    @jax.jit
    def differs(positional, first):
        out = swa_pallas.swa_decode(*positional, window=512, query_len=4, plan=plan)
        return out, (jax.lax.bitcast_convert_type(out, jnp.uint16) != first).any()

    first, _ = differs(positional, jnp.zeros((28, 96, 192), jnp.uint16))
    bits = jax.lax.bitcast_convert_type(first, jnp.uint16)
    assert not any(bool(wrong) for wrong in [differs(positional, bits)[1] for _ in range(1000)])
    tolerance.assert_close(to_numpy(first), inputs)
