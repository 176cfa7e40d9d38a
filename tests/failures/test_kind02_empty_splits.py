"""Kind 2 of the known failures: splits without keys, and the merge of partial results by their log-sum-exps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from swa_plan import Plan, reference, tolerance
from tests.contract.backends import BACKENDS, merge, plan_for, run, same_bits
from tests.failures.probes import (
    KV_HEADS,
    RUNNERS,
    assert_exact,
    count_probe,
    decode,
    even_weights,
    step,
    weight_probe,
)

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("fill", [NAN, 0.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_merge_of_empty_parts_is_empty(backend, fill):
    """C12, flashinfer-ai/flashinfer#4051: (-inf) - (-inf) must not become NaN."""
    outs, lses = np.full((2, 3, 4, 32), fill, np.float32), np.full((2, 3, 4), -INF, np.float32)
    for options in ({}, {"sinks": np.ones(4, np.float32)}, {"gate": np.full((3, 4), NAN, np.float32)}):
        out, lse = merge(outs, lses, backend, **options)
        assert (out == 0).all()
        assert (lse == -INF).all()


@pytest.mark.parametrize("fill", [NAN, 0.0])
def test_reference_merge_of_empty_parts_is_empty(fill):
    """C12, flashinfer-ai/flashinfer#4051, in the reference."""
    out, lse = reference.merge_states(np.full((2, 3, 4, 32), fill), np.full((2, 3, 4), -np.inf))
    assert (out == 0).all()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize("runner", RUNNERS)
def test_requests_of_no_one_and_many_keys(runner, splits):
    """C13, vllm-project/vllm#39148: a merge in which all, some or no parts are empty."""
    inputs = step((0, 1, 513), out_dtype="float32")
    inputs.gate = np.full(inputs.query.shape[:2], 0.5, np.float32)
    out, lse = decode(inputs, runner, splits=splits)
    assert np.isfinite(out.astype(np.float64)).all()
    assert_exact(out[0], 0.0)
    assert (lse[0] == -np.inf).all()
    if runner != "reference":
        tolerance.assert_close(out, inputs, actual_lse=lse)
        single, _ = decode(inputs, runner, splits=1)
        np.testing.assert_allclose(out, single, atol=2e-3 * np.abs(single).max())
    page, offset = inputs.block_table[1, 0], 0
    value = np.repeat(inputs.value_cache[page, offset].astype(np.float64), 12, axis=0)
    np.testing.assert_allclose(out[1].astype(np.float64), value / (1 + np.exp(-0.5)), rtol=1e-2)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("runner", RUNNERS)
def test_rows_without_keys_have_no_finite_lse(runner, splits):
    """C15, flashinfer-ai/flashinfer#4452: a masked row's LSE is -inf, not a mask constant."""
    inputs = step((2,), query_len=4)
    out, lse = decode(inputs, runner, splits=splits)
    assert_exact(out[:2], 0.0)
    assert (lse[:2] == -np.inf).all()
    page = inputs.block_table[0, 0]
    assert_exact(out[2], np.repeat(inputs.value_cache[page, 0].astype(np.float64), 12, axis=0))
    assert np.isfinite(lse[2:]).all()
    if runner != "reference":
        tolerance.assert_close(out, inputs, actual_lse=lse)


@pytest.mark.parametrize("tile", [None, 64])
@pytest.mark.parametrize("length", [33, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_splits_without_keys_add_nothing(backend, length, tile):
    """C16, pegainfer-project/pegainfer#21: one chunk has all the keys, seven have none."""
    inputs = step((length,))
    plan = plan_for(inputs, backend, splits=8)
    if tile is not None:
        plan = Plan.from_json(plan.to_json().replace(f'"tile": {plan.tile}', f'"tile": {tile}'))
        assert plan.tile == tile
    out, lse = decode(inputs, backend, plan=plan)
    tolerance.assert_close(out, inputs, actual_lse=lse)
    counted, _ = decode(count_probe(inputs), backend, plan=plan)
    assert_exact(counted, 1.0)


@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize("runner", RUNNERS)
def test_chunks_cover_the_keys_of_all_packed_rows(runner, splits):
    """C19, flashinfer-ai/flashinfer#4972: four rows see 515 keys together, not 512."""
    inputs = step((4096,), query_len=4)
    shown = np.zeros((4, 4096))
    for first in range(3579, 4096, inputs.v_dim):
        positions = [range(first, min(first + inputs.v_dim, 4096))]
        out, _ = decode(weight_probe(inputs, positions), runner, splits=splits, pack=4)
        assert_exact(out, even_weights(inputs, positions))
        shown[:, positions[0].start : positions[0].stop] = out[:, 0, : len(positions[0])]
    for row in range(4):
        assert np.flatnonzero(shown[row]).tolist() == list(range(3581 + row, 4093 + row))
    assert np.allclose(shown[shown > 0], 1 / 512)


@pytest.mark.parametrize("backend", BACKENDS)
def test_merge_reads_natural_logarithms(backend):
    """C22, sgl-project/sglang#33064: base e on both sides; mixed with base 2 this gives 7.2330."""
    outs = np.broadcast_to(np.array([0.0, 10.0], np.float32)[:, None, None, None], (2, 1, 1, 16))
    lses = np.log(np.array([2.0, 8.0], np.float32))[:, None, None]
    for out, lse in (merge(outs, lses, backend), reference.merge_states(outs, lses)):
        np.testing.assert_allclose(out, 8.0, rtol=1e-6)
        np.testing.assert_allclose(lse, np.log(10.0), rtol=1e-6)


@pytest.mark.parametrize("runner", RUNNERS)
def test_lse_is_a_natural_logarithm(runner):
    """C22, sgl-project/sglang#33064: four scores of 0 have LSE ln 4."""
    inputs = step((4,))
    inputs.query[...] = 0
    _, lse = decode(inputs, runner, splits=1)
    np.testing.assert_allclose(lse, np.log(4.0), rtol=1e-6)
    _, lse = decode(inputs, runner, splits=4)
    np.testing.assert_allclose(lse, np.log(4.0), rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_halves_of_the_keys_merge_into_the_whole(backend):
    """C22, sgl-project/sglang#33064: what a decode call reports is what the merge expects."""
    inputs = step((300,), kv_heads=min(2, KV_HEADS), dtype="float32")
    parts = []
    for low, high in ((0, 100), (100, 300)):
        bounds = {"kv_start": np.array([low], np.int32), "kv_end": np.array([high], np.int32)}
        parts.append(run(replace(inputs, **bounds), backend))
    outs, lses = (np.stack(part) for part in zip(*parts, strict=True))
    out, lse = merge(outs, lses, backend)
    whole, whole_lse = run(inputs, backend)
    np.testing.assert_allclose(out, whole, atol=2e-5)
    np.testing.assert_allclose(lse, whole_lse, atol=2e-5)
    assert not same_bits(lse, lses[0])
