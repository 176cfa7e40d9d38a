"""``merge_states`` against float64: the identity, NaN of weight 0, sinks and gate once, many parts, real partials."""

import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from swa_pallas import merge_states, swa_decode
from swa_plan import reference, tolerance
from swa_plan._dtypes import numpy_dtype
from swa_plan.cases import by_name
from tests.contract.backends import inputs_for
from tests.contract.jax_runner import arguments
from tests.jax.helpers import BACKENDS, same_bits

TOKENS, HEADS, DIM = 5, 4, 48  # three pieces of 16

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def make_parts(parts, dtype="float32", seed=0):
    """Return random partials, with parts that saw nothing and a token that no part saw."""
    rng = np.random.default_rng(seed)
    outs = rng.standard_normal((parts, TOKENS, HEADS, DIM), np.float32).astype(numpy_dtype(dtype))
    lses = (4 * rng.standard_normal((parts, TOKENS, HEADS))).astype(np.float32)
    lses[rng.random(lses.shape) < 0.2] = -np.inf
    lses[:, 2] = -np.inf
    return outs, lses


def merge(outs, lses, backend, **options):
    arrays = {name: jnp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    out, lse = merge_states(jnp.asarray(outs), jnp.asarray(lses), backend=backend, **arrays)
    return np.asarray(out), np.asarray(lse)


def check(outs, lses, backend, *, out_dtype="float32", sinks=None, gate=None):
    """Compare with float64: fp32 sums of ``parts`` terms, then the roundings to the output's dtype."""
    out, lse = merge(outs, lses, backend, out_dtype=out_dtype, sinks=sinks, gate=gate)
    expected, expected_lse = reference.merge_states(outs, lses, sinks=sinks, gate=gate)
    assert out.dtype.name == out_dtype
    magnitude = np.abs(outs.astype(np.float64)).max(axis=0, where=~np.isneginf(lses)[..., None], initial=0)
    steps = 4 + len(outs)
    error = steps * np.finfo(np.float32).eps * magnitude
    # One rounding of the attention, and with a gate one of its factor and one of their product.
    error += (2 if gate is not None else 1) * float(ml_dtypes.finfo(out.dtype).eps) * magnitude
    error += 0 if gate is None else float(ml_dtypes.finfo(gate.dtype).eps) * magnitude
    assert (np.abs(out.astype(np.float64) - expected) <= error).all()
    np.testing.assert_allclose(lse, expected_lse, rtol=steps * 2e-7, atol=steps * 2e-7)
    return out, lse


# 16 parts are unrolled in the kernel, 17 go through its loop.
@pytest.mark.parametrize("parts", [1, 2, 3, 16, 17])
@pytest.mark.parametrize("options", ["plain", "sinks", "gate", "both"])
def test_any_number_of_parts(parts, options, backend):
    outs, lses = make_parts(parts, seed=parts)
    rng = np.random.default_rng(99)
    given = {
        "sinks": rng.standard_normal(HEADS).astype(np.float32) if options in ("sinks", "both") else None,
        "gate": rng.standard_normal((TOKENS, HEADS)).astype(np.float32) if options in ("gate", "both") else None,
    }
    out, lse = check(outs, lses, backend, **given)
    assert not out[2].any()
    assert np.isneginf(lse[2]).all()


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_dtype(dtype, out_dtype, backend):
    outs, lses = make_parts(3, dtype)
    gate = np.random.default_rng(1).standard_normal((TOKENS, HEADS)).astype(numpy_dtype(dtype))
    check(outs, lses, backend, out_dtype=out_dtype)
    check(outs, lses, backend, out_dtype=out_dtype, gate=gate)
    assert merge(outs, lses, backend)[0].dtype.name == dtype


# XLA compiles each number of parts by itself and fuses as it likes, so that the last bit may differ between them.
ULPS = {"rtol": 1e-6, "atol": 1e-6}


def close(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, **ULPS)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_minus_infinity_is_the_identity_wherever_it_stands(place, backend):
    outs, lses = make_parts(2)
    lses = np.insert(lses, place, -np.inf, axis=0)
    zero, *fillers = (
        merge(np.insert(outs, place, np.float32(filler), axis=0), lses, backend) for filler in (0, np.nan, np.inf, 1e38)
    )
    assert all(same_bits(filled, zero) for filled in fillers)
    close(zero, merge(outs, np.delete(lses, place, axis=0), backend))


def test_a_part_too_small_to_weigh_adds_nothing_whatever_it_holds(backend):
    outs, lses = make_parts(2)
    lses = np.where(np.isneginf(lses), np.float32(0), lses)
    lses[1] = lses[0] - 200
    expected = merge(outs, lses, backend)
    outs[1] = np.nan
    assert same_bits(merge(outs, lses, backend), expected)
    close(expected, merge(outs[:1], lses[:1], backend))


def test_rows_that_saw_nothing_stay_zero_with_sinks_and_a_nan_gate(backend):
    outs, lses = make_parts(3)
    gate = np.zeros((TOKENS, HEADS), np.float32)
    gate[2] = np.nan
    out, lse = merge(outs, lses, backend, sinks=np.full(HEADS, 3.0, np.float32), gate=gate)
    assert not out[2].any()
    assert np.isneginf(lse[2]).all()


def test_nan_reaches_its_own_row_only(backend):
    outs, lses = make_parts(3)
    expected = merge(outs, lses, backend)
    lses[1, 0, 1] = np.nan
    out, lse = merge(outs, lses, backend)
    assert np.isnan(out[0, 1]).all()
    assert np.isnan(lse[0, 1])
    others = np.ones((TOKENS, HEADS), bool)
    others[0, 1] = False
    assert same_bits((out[others], lse[others]), tuple(each[others] for each in expected))


@pytest.mark.parametrize("large", [300.0, -300.0])
def test_large_lses_neither_overflow_nor_vanish(large, backend):
    outs, lses = make_parts(3)
    moved = merge(outs, (lses + np.float32(large)), backend)
    expected, expected_lse = reference.merge_states(outs, lses + np.float32(large))
    np.testing.assert_allclose(moved[0], expected, rtol=1e-3, atol=1e-4)  # an fp32 LSE of 300 has an ulp of 3e-5
    np.testing.assert_allclose(moved[1], expected_lse, rtol=1e-6)


def test_a_sink_above_everything(backend):
    outs, lses = make_parts(2)
    check(outs, lses, backend, sinks=np.full(HEADS, 80.0, np.float32))


def test_no_tokens(backend):
    outs, lses = np.zeros((2, 0, HEADS, DIM), np.float32), np.zeros((2, 0, HEADS), np.float32)
    out, lse = merge(outs, lses, backend)
    assert (out.shape, lse.shape) == ((0, HEADS, DIM), (0, HEADS))


@pytest.mark.parametrize("parts", [2, 5])
@pytest.mark.parametrize("name", ["window-edge", "verify-sinks", "softcap", "fp8-e4m3"])
def test_partials_by_key_range_merge_to_the_whole(name, parts, backend):
    """Context shards: each part sees the keys of its range; sinks and gate are added by the merge."""
    inputs = inputs_for(by_name(name), "jax-" + backend, seed=3)
    positional, options = arguments(inputs, "jax-" + backend)
    once = {option: options.pop(option, None) for option in ("sinks", "gate")}
    options = {**options, "return_lse": True, "out_dtype": "float32", "backend": backend}
    longest = int(inputs.seq_lens.max())
    edges = np.linspace(0, longest, parts + 1).astype(np.int32)
    partials = []
    for low, high in itertools.pairwise(edges):
        bounds = {"kv_start": jnp.full(len(inputs.seq_lens), low), "kv_end": jnp.full(len(inputs.seq_lens), high)}
        partials.append(swa_decode(*positional, **options, **bounds))
    outs, lses = (jnp.stack(each) for each in zip(*partials, strict=True))
    out_dtype = inputs.out_dtype or inputs.query.dtype
    out, lse = merge_states(outs, lses, out_dtype=out_dtype, backend=backend, **once)
    tolerance.assert_close(np.asarray(out), inputs, actual_lse=np.asarray(lse))
