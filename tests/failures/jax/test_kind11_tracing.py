"""Kind 11 of the known failures, in JAX's words: tracing, recompilation, and what a call may mutate."""

from __future__ import annotations

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import swa_pallas
from swa_plan import DeviceProfile
from tests.contract.backends import plan_for, same_bits
from tests.contract.jax_runner import BACKENDS, arguments, device_of, name_of, to_array, to_numpy
from tests.failures.probes import decode, step, weight_probe


def compile_events(backend: str, **call):
    """Return a jitted decode and the list that each of its traces is noted in."""
    traces: list[int] = []

    @jax.jit
    def decoded(query, cache, table, lens):
        traces.append(len(traces))
        return swa_pallas.swa_decode(
            query, cache, table, lens, window=512, return_lse=True, backend=name_of(backend), **call
        )

    return decoded, traces


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_call_gets_the_window(backend):
    """C11, EricLBuehler/mistral.rs#2094, through jax.jit: 600 keys, window 512."""
    inputs = weight_probe(step((600,), kv_heads=1, k_dim=16), [[0, 87, 88]])
    decoded, _ = compile_events(backend)
    out = to_numpy(decoded(*arguments(inputs, backend)[0])[0])
    np.testing.assert_array_equal(out[0, 0, :3].astype(np.float64), [0.0, 0.0, 1 / 512])
    assert same_bits(out, decode(inputs, backend)[0])


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_step_follows_the_lengths(backend, splits):
    """C80, sgl-project/sglang#26019: neither splits nor lengths are frozen where the step was traced."""
    inputs = step([600] * 4, kv_heads=1, k_dim=64)
    decoded, traces = compile_events(backend, plan=plan_for(inputs, backend, splits=splits))
    for lengths in ([1] * 4, [1, 17, 513, 0], [0] * 4, [600] * 4):
        inputs.seq_lens = np.array(lengths, np.int32)
        out, lse = decoded(*arguments(inputs, backend)[0])
        expected, expected_lse = decode(inputs, backend, splits=splits)
        assert same_bits(to_numpy(out), expected), lengths
        assert same_bits(to_numpy(lse), expected_lse), lengths
    assert len(traces) == 1


def test_plan_depends_on_shapes_alone():
    """C83, vllm-project/vllm#51119: arrays, their shapes and tracers of them have one plan."""
    inputs = step((80, 80), kv_heads=8, max_blocks=500)
    (query, cache, table, _), _ = arguments(inputs, "jax-xla")
    h200 = DeviceProfile.named("h200")
    plans = []

    def plan(query, cache, table):
        plans.append(swa_pallas.plan_for(query, cache, table, window=512, device=h200))
        return query

    plan(query, cache, table)
    jax.jit(plan)(query, cache, table)
    plan(*jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), (query, cache, table)))
    assert len(plans) == 3
    assert len(set(plans)) == 1
    assert plans[0].splits > 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_mutates_nothing(backend):
    """C84, ROCm/aiter#2780: a call that claims to change its inputs costs a copy of the cache."""
    inputs = step((40, 3), kv_heads=2, k_dim=64)
    positional, _ = arguments(inputs, backend)
    before = jax.tree.map(to_numpy, positional)
    decoded, _ = compile_events(backend)
    lowered = decoded.lower(*positional).as_text()
    assert "tf.aliasing_output" not in lowered
    assert "jax.buffer_donor" not in lowered
    jax.block_until_ready(decoded(*positional))
    assert all(map(same_bits, jax.tree.leaves(before), map(to_numpy, jax.tree.leaves(positional))))


@pytest.mark.parametrize("backend", BACKENDS)
def test_append_leaves_the_old_cache_unless_it_is_donated(backend):
    """C84, ROCm/aiter#2780: without donation a pure function; with it only the cache is given away."""
    inputs = step((40, 3), kv_heads=2, k_dim=64)
    (query, cache, _, _), _ = arguments(inputs, backend)
    rows, slots = query[:, :2], to_array(np.array([5, -1], np.int32), backend)

    def appended(cache, rows, slots):
        return swa_pallas.append(cache, rows, rows, slots, backend=name_of(backend))

    new = jax.jit(appended)(cache, rows, slots)
    for old, base, array in zip(cache.bases, new.bases, inputs.bases, strict=True):
        assert same_bits(to_numpy(old), array)
        expected = array.copy()
        expected.reshape(-1, 2, 64)[5] = to_numpy(rows)[0]
        assert same_bits(to_numpy(base), expected)
    donating = jax.jit(appended, donate_argnums=0).lower(cache, rows, slots).as_text()
    assert donating.count("tf.aliasing_output") == len(cache.bases)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_without_running(backend):
    """C86, Lightning-AI/lightning-thunder#2530: abstract arrays trace, and nothing runs."""
    inputs = step((40, 3), kv_heads=1, k_dim=16, v_dim=32)
    positional, _ = arguments(inputs, backend)
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), positional)
    out, lse = jax.eval_shape(compile_events(backend)[0], *shapes)
    assert (out.shape, out.dtype) == ((2, 12, 32), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 12), jnp.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_batches_compile_nothing_after_the_warmup(backend):
    """C88, vllm-project/vllm-ascend#13637: batches of 1 to 8 requests, padded to 8, are one compiled variant."""
    inputs = step([100] * 8, kv_heads=1, k_dim=48)
    plan = plan_for(inputs, backend)
    # Not `arguments`: it commits arrays to a device, and XLA compiles once more for arrays that are.
    with jax.default_device(device_of(backend)):
        query, table = jnp.asarray(inputs.query), jnp.asarray(inputs.block_table)
        cache = swa_pallas.PagedCache.from_kv(*map(jnp.asarray, inputs.bases))
        batches = [jnp.where(jnp.arange(8) < requests, 100, 0).astype(jnp.int32) for requests in (1, 2, 3, 7, 8)]
        swa_pallas.warmup(plan, query, cache)
        compiled = compilations(
            lambda: [swa_pallas.swa_decode(query, cache, table, lens, window=512, plan=plan) for lens in batches]
        )
        assert compiled == []
        another = {"window": 511, "backend": name_of(backend)}
        assert compilations(lambda: swa_pallas.swa_decode(query, cache, table, batches[0], **another)) != []


def compilations(call) -> list[str]:
    """Return what XLA compiles in a call."""
    compiled = []

    def note(event: str, seconds: float, **details: object) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(str(details))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        jax.block_until_ready(call())
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    return compiled
