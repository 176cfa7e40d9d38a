"""Kind 8 of the known failures: head sizes that need padding, groups of any size, K and V of unequal size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from swa_plan import DeviceProfile, Problem, plan, reference, tolerance
from tests.contract.backends import BACKENDS, decode_gated, plan_for
from tests.failures.probes import KV_HEADS, RUNNERS, assert_exact, count_probe, decode, step


@pytest.mark.parametrize("dim", [0, 127, 128, 191])
@pytest.mark.parametrize("runner", RUNNERS)
def test_each_value_dim_lands_in_its_place(runner, dim):
    """C56, ByteDance-Seed/Triton-distributed#200: 192 is not a power of two; V is one-hot in one dim."""
    inputs = step((40,))
    inputs.query[...] = 0
    inputs.value_cache[...] = 0
    inputs.value_cache[..., dim] = 1
    assert_exact(decode(inputs, runner, splits=2)[0], np.eye(192)[dim])


@pytest.mark.parametrize("runner", RUNNERS)
def test_scores_use_the_last_dims_of_the_keys(runner):
    """C56, ByteDance-Seed/Triton-distributed#200: keys that differ only in dims 128..191."""
    inputs = step((40,))
    inputs.key_cache[..., :128] = 0.5
    out, lse = decode(inputs, runner)
    expected, _ = reference.swa_decode(*inputs.arrays(), window=512, return_lse=True)
    even = reference.swa_decode(np.zeros_like(inputs.query), *inputs.arrays()[1:], window=512)
    assert np.abs(expected - even).max() > 0.1
    if runner != "reference":
        tolerance.assert_close(out, inputs, actual_lse=lse)


@pytest.mark.parametrize("heads, kv_heads", [(48, 2), (40, 2), (80, 4)])
@pytest.mark.parametrize("runner", RUNNERS)
def test_each_query_head_reads_its_kv_head(runner, heads, kv_heads):
    """C57, FlashML-org/FreeToken#177: groups of 24 and 20, where a tile of 16 heads would cross into the next group."""
    inputs = step((40, 513), heads=heads, kv_heads=kv_heads, k_dim=64)
    inputs.query[...] = 0
    inputs.value_cache[...] = (np.arange(kv_heads) + 1)[:, None]
    expected = (np.arange(heads) // (heads // kv_heads) + 1)[:, None]
    for splits in (1, 2):
        assert_exact(decode(inputs, runner, splits=splits)[0], expected)
    if runner != "reference":
        assert_exact(decode_gated(inputs, runner, splits=2), np.broadcast_to(expected, (2, heads, 64)))


@pytest.mark.parametrize("runner", RUNNERS)
def test_group_larger_than_a_program(runner):
    """C57, FlashML-org/FreeToken#177: 80 heads of one kv head, more than the 64 rows that a program takes."""
    inputs = step((40,), heads=160, kv_heads=2, k_dim=32, query_len=2)
    inputs.query[...] = 0
    inputs.value_cache[...] = (np.arange(2) + 1)[:, None]
    assert_exact(decode(inputs, runner)[0], (np.arange(160) // 80 + 1)[:, None])


@pytest.mark.parametrize("heads, kv_heads", [(33, 2), (3, 2), (12, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_that_do_not_divide_are_refused(backend, heads, kv_heads):
    """C59, fla-org/flash-linear-attention#1029: no head is silently left unwritten."""
    inputs = step((8,), heads=heads, kv_heads=1, k_dim=16)
    inputs = replace(inputs, bases=tuple(base.repeat(kv_heads, axis=2) for base in inputs.bases))
    calls = [
        lambda: decode(inputs, backend),
        lambda: decode_gated(inputs, backend, splits=1),
        lambda: plan_for(inputs, backend),
        lambda: plan(Problem(1, heads, kv_heads, 16, 16, 512, 16, 1), DeviceProfile.named("h200")),
        lambda: reference.swa_decode(*inputs.arrays(), window=512),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="heads"):
            call()


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("runner", RUNNERS)
def test_values_narrower_than_keys(runner, splits):
    """C61, vllm-project/vllm#41519: K has 192 dims and V has 128."""
    inputs = step((40, 513), v_dim=128)
    out, lse = decode(inputs, runner, splits=splits)
    assert out.shape == (2, 12 * KV_HEADS, 128)
    if runner != "reference":
        tolerance.assert_close(out, inputs, actual_lse=lse)


@pytest.mark.parametrize("runner", RUNNERS)
def test_values_padded_to_the_size_of_the_keys(runner):
    """C61, vllm-project/vllm#41519: V zero-padded from 128 to 192 gives a result padded with exact zeros."""
    inputs = step((40, 513))
    inputs.value_cache[..., 128:] = 0
    out, lse = decode(inputs, runner)
    assert_exact(out[..., 128:], 0.0)
    if runner != "reference":
        tolerance.assert_close(out, inputs, actual_lse=lse)


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128, 144, 160, 240, 256])
@pytest.mark.parametrize("runner", RUNNERS)
def test_every_multiple_of_16_is_a_head_size(runner, dim):
    """C63, sgl-project/sglang#1281: 80, 96 and the like work through the public call."""
    inputs = step((40, 100), k_dim=dim, kv_heads=min(2, KV_HEADS))
    for splits in (1, 2):
        out, lse = decode(inputs, runner, splits=splits)
        if runner != "reference":
            tolerance.assert_close(out, inputs, actual_lse=lse)
    assert_exact(decode(count_probe(inputs), runner)[0], 1.0)


@pytest.mark.parametrize("dim", [8, 72, 100, 272, 512])
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_head_sizes_are_refused_before_anything_compiles(backend, dim):
    """C63, sgl-project/sglang#1281: one ValueError that says which sizes there are."""
    inputs = step((8,), k_dim=dim, kv_heads=1)
    with pytest.raises(ValueError, match=r"k_dim must be .*(16|256)"):
        decode(inputs, backend)
    with pytest.raises(ValueError, match=r"k_dim must be .*(16|256)"):
        Problem(1, 12, 1, dim, 64, 512, 16, 1)
