"""Kind 9 of the known failures: quantised caches, large logits, non-finite slots, and the gate's arithmetic."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from swa_plan import tolerance
from swa_plan._dtypes import numpy_dtype
from tests.contract.backends import BACKENDS, INTERPRETED, decode_gated, merge, same_bits
from tests.failures.probes import (
    RUNNERS,
    assert_exact,
    clean,
    decode,
    step,
    with_free_page_0,
    with_invisible,
)

INF = float("inf")
WIDE_RANGE = ("float32",) if INTERPRETED else ("float32", "bfloat16")
"""Dtypes whose range holds products of hundreds."""


def quantised(lengths, dtype=ml_dtypes.float8_e4m3fn, **scales):
    """Return a step whose cache holds ``dtype``."""
    inputs = step(lengths, **scales)
    inputs.bases = tuple(base.astype(np.float32).astype(dtype) for base in inputs.bases)
    return inputs


@pytest.mark.parametrize("runner", RUNNERS)
def test_scales_of_a_quantised_cache_are_applied(runner):
    """C64, sgl-project/sglang#18882: k_scale and v_scale are not 1."""
    inputs = quantised((8,), k_scale=0.5, v_scale=2.0)
    out, lse = decode(inputs, runner)
    if runner != "reference":
        tolerance.assert_close(out, inputs, actual_lse=lse)
    inputs.query[...] = 0
    inputs.value_cache[...] = 1
    assert_exact(decode(inputs, runner, splits=1)[0], 2.0)
    assert_exact(decode(inputs, runner, splits=2)[0], 2.0)


@pytest.mark.parametrize("kind", ["scalar", "head"])
@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_read_on_the_device(backend, dtype, kind):
    """C64, sgl-project/sglang#18882: as tensors, one or one per kv head, for every quantised dtype."""
    shape = (2,) if kind == "head" else ()
    k_scale, v_scale = (np.full(shape, scale, np.float32) for scale in (0.5, 2.0))
    if kind == "head":
        k_scale[1], v_scale[1] = 0.25, 3.0
    inputs = quantised((20, 100), dtype, kv_heads=2, k_scale=k_scale, v_scale=v_scale)
    out, lse = decode(inputs, backend)
    tolerance.assert_close(out, inputs, actual_lse=lse)
    inputs.query[...] = 0
    inputs.value_cache[...] = 1
    assert_exact(decode(inputs, backend)[0], np.repeat(np.broadcast_to(v_scale, 2), 12)[:, None])


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantised_bytes_are_never_read_as_numbers(backend):
    """C64, sgl-project/sglang#18882: scales are required, and uint8 is not guessed to be fp8."""
    inputs = quantised((8,), k_scale=0.5, v_scale=2.0)
    for missing in ("k_scale", "v_scale"):
        with pytest.raises(ValueError, match=missing):
            decode(replace(inputs, **{missing: None}), backend)
    raw = replace(inputs, bases=tuple(base.view(np.uint8) for base in inputs.bases))
    with pytest.raises(TypeError, match=r"uint8.*view.*float8_e4m3fn|view.*float8_e4m3fn.*uint8"):
        decode(raw, backend)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("dtype", WIDE_RANGE)
@pytest.mark.parametrize("runner", RUNNERS)
def test_huge_logits_do_not_overflow(runner, dtype, splits):
    """C65, vllm-project/vllm#56578: scores of +138564 for key 7 and -138564 for all others."""
    inputs = step((64,), dtype=dtype)
    inputs.query[...] = 100
    inputs.key_cache[...] = -100
    page = inputs.block_table[0, 0]
    inputs.key_cache[page, 7] = 100
    out, lse = decode(inputs, runner, splits=splits)
    assert_exact(out[0], np.repeat(inputs.value_cache[page, 7].astype(np.float64), 12, axis=0))
    np.testing.assert_allclose(lse, 1920000 * 192**-0.5, rtol=2**-23)


@pytest.mark.parametrize("value", [float("nan"), INF, -INF])
@pytest.mark.parametrize("runner", RUNNERS)
def test_tail_of_the_last_page_leaks_nowhere(runner, value):
    """C67, Dao-AILab/flash-attention#2374: 0 * NaN is NaN, so the tail's loads are masked, not only its weights."""
    inputs = with_free_page_0(step((1, 15, 17, 513)))
    expected, expected_lse = decode(clean(inputs), runner)
    for tensors in ({"keys": False}, {"values": False}, {}) if value == INF or not INTERPRETED else ({},):
        out, lse = decode(with_invisible(inputs, value, **tensors), runner)
        assert same_bits(out, expected), tensors
        assert same_bits(lse, expected_lse), tensors
    assert np.isfinite(out.astype(np.float64)).all()


GATES = np.array([-INF, -20.0, 0.0, 2.0, 20.0, INF])
SIGMOIDS = np.array([0.0, 2.0611536e-9, 0.5, 0.88079708, 1.0, 1.0])


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("gate_dtype", ["float32", "float16" if INTERPRETED else "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16" if INTERPRETED else "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gate_is_a_sigmoid_in_fp32(backend, dtype, gate_dtype, splits):
    """C71, sgl-project/sglang#27630: the sigmoid is fp32, then rounded once to the gate's and the output's dtype."""
    inputs = step((64,), dtype=dtype)
    inputs.query[...] = 0
    inputs.value_cache[...] = 1
    heads = inputs.query.shape[1]
    inputs.gate = np.resize(GATES, (1, heads)).astype(numpy_dtype(gate_dtype))
    expected = np.resize(SIGMOIDS, heads).astype(np.float32).astype(inputs.gate.dtype).astype(np.float32)
    out, _ = decode(inputs, backend, splits=splits)
    if dtype == "float32" == gate_dtype:
        np.testing.assert_allclose(out[0], np.broadcast_to(expected[:, None], out[0].shape), rtol=1e-6, atol=0)
    else:
        assert_exact(out[0], expected.astype(out.dtype)[:, None])
    assert (out[0, ::6] == 0).all()
    tolerance.assert_close(out, inputs)
    tolerance.assert_close(decode_gated(inputs, backend, splits=splits), inputs)
    ones, empty = np.ones((1, 1, heads, 16), np.float32), np.zeros((1, 1, heads), np.float32)
    merged, _ = merge(ones, empty, backend, gate=inputs.gate)
    np.testing.assert_allclose(merged[0, :, 0], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("dtype", WIDE_RANGE)
@pytest.mark.parametrize("runner", RUNNERS)
def test_masked_keys_lose_to_any_visible_score(runner, dtype, splits):
    """C72, vllm-project/vllm#4405: real scores of -138564 lie below a finite mask constant such as -10000."""
    inputs = step((520,), dtype=dtype)
    inputs.query[...] = 100
    inputs.key_cache[...] = -100
    inputs.value_cache[...] = 1
    masked = with_invisible(with_invisible(inputs, 0.0, values=False), 7.0, keys=False)
    assert (masked.value_cache == 7).any()
    out, _ = decode(masked, runner, splits=splits)
    if dtype == "float32":
        np.testing.assert_allclose(out, 1.0, rtol=1e-6)
    else:
        assert_exact(out, 1.0)
