"""The tolerance rule: how far from float64 a result may be, without a hand-picked number.

Per (token, head), the largest error of an output row against the float64 reference is at most twice that of a fixed
dense emulation of the contract's rounding points, plus one ulp of the output dtype at the row's largest expected
magnitude. NaN and infinities must stand where the reference has them.

The emulation is the same for every framework and device because a bound derived from the code under test would move
with its bugs. It runs in three fixed orders of summation and a row's bound comes from the one that errs most: on the
named cases in float32, one order was lucky enough to refuse an honest tiled kernel in 4% of the steps, three in none.
The LSE is judged by the same rule with float32 ulps; its row is the whole step, because the error of a single number is
0 by luck often enough to make a bound from it meaningless.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from swa_plan import reference
from swa_plan._arguments import Arguments, check_arguments
from swa_plan._dtypes import is_compute, is_quantised, numpy_dtype
from swa_plan._visible import Row
from swa_plan.cases import Inputs

Order = Literal["forward", "backward", "interleaved"]

SUM_ORDERS: tuple[Order, ...] = ("forward", "backward", "interleaved")
"""The fixed orders in which the emulation sums; a row's bound comes from the one that errs most."""

LOG2_E = np.float32(np.log2(np.e))
LN_2 = np.float32(np.log(2.0))


@dataclass(frozen=True)
class Report:
    """What ``compare`` found; "worst" is where error / limit is largest, or a misplaced NaN or infinity.

    Attributes:
        ok: whether the result is within the rule.
        worst_error: |actual - expected| there; infinite for a misplaced NaN or infinity.
        worst_limit: the row's limit there.
        worst_at: ``(token, head, dim)`` in the output, ``(token, head)`` in the LSE; empty where there are no values.
        ratio: worst_error / worst_limit.
        ulps: worst_error in ulps at the row's largest expected magnitude.
        message: one line for a person, also when ok.
    """

    ok: bool
    worst_error: float
    worst_limit: float
    worst_at: tuple[int, ...]
    ratio: float
    ulps: float
    message: str


def compare(
    actual: ArrayLike, inputs: Inputs, *, out_dtype: DTypeLike | None = None, actual_lse: ArrayLike | None = None
) -> Report:
    """Judge a result by the rule.

    Args:
        actual: the output, ``[tokens, heads, v_dim]``, any floating dtype.
        inputs: what it was computed from.
        out_dtype: dtype (or name) that the output was rounded to; None means ``inputs.out_dtype``, then the query's.
        actual_lse: the LSE, ``[tokens, heads]``, or None to leave it out.

    Returns:
        The report of the output or of the LSE, whichever is worse.

    Raises:
        ValueError: a shape is not the expected one.
    """
    dtype = numpy_dtype(out_dtype or inputs.out_dtype or inputs.query.dtype)
    options = inputs.reference_options()
    expected, expected_lse = reference.swa_decode(*inputs.arrays(), **options, return_lse=True)
    emulations = [emulate(*inputs.arrays(), **options, out_dtype=dtype, order=order) for order in SUM_ORDERS]
    emulated, emulated_lse = zip(*emulations, strict=True)
    report = _judge("out", actual, expected, emulated, dtype, row_axes=(2,))
    if actual_lse is not None:
        lse_report = _judge("lse", actual_lse, expected_lse, emulated_lse, np.dtype(np.float32), row_axes=(0, 1))
        report = max(report, lse_report, key=lambda candidate: candidate.ratio)
    return report


def assert_close(
    actual: ArrayLike, inputs: Inputs, *, out_dtype: DTypeLike | None = None, actual_lse: ArrayLike | None = None
) -> None:
    """Raise an ``AssertionError`` with place, error and limit if ``compare`` is not ok; arguments as there."""
    report = compare(actual, inputs, out_dtype=out_dtype, actual_lse=actual_lse)
    if not report.ok:
        raise AssertionError(report.message)


def emulate(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    *,
    window: int | None,
    out_dtype: DTypeLike | None = None,
    order: Order = "forward",
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute ``reference.swa_decode`` with the contract's rounding points: dense, in NumPy, one row at a time.

    The compute dtype is the query's. Products of its values are accumulated in float32, softmax is float32 in base 2,
    and powers relative to the row's maximum are rounded to it for PV, while the denominator sums them unrounded.

    In the orders other than "forward" the sum of powers is divided out through the float32 LSE, as a merge of splits
    does.

    Args:
        query: ``[tokens, heads, k_dim]``, bfloat16, float16 or float32.
        key_cache: ``[pages, block, kv_heads, k_dim]`` of the query's dtype, or fp8 or int8.
        value_cache: ``[pages, block, kv_heads, v_dim]`` of the same dtype.
        block_table: ``[requests, max_blocks]``.
        seq_lens: ``[requests]``.
        window: visible keys, or None.
        out_dtype: dtype (or name) of the output; None means the query's.
        order: in which products are summed: "forward", "backward", or "interleaved", the even terms before the odd.
        **options: as in ``reference.swa_decode``.

    Returns:
        The output, rounded to ``out_dtype``, and the LSE, float32; both as float64 arrays.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape or range is wrong.
    """
    args = check_arguments(query, key_cache, value_cache, block_table, seq_lens, window=window, **options)
    compute, cache = args.query.dtype, args.key_cache.dtype
    if not is_compute(compute):
        raise TypeError(f"query must be bfloat16, float16 or float32, got {compute.name}")
    if cache != compute and not is_quantised(cache):
        raise TypeError(f"key_cache must have the query's dtype {compute.name}, or be fp8 or int8, got {cache.name}")
    out_type = compute if out_dtype is None else numpy_dtype(out_dtype)
    out = np.zeros((args.tokens, args.heads, args.v_dim))
    lse = np.full((args.tokens, args.heads), -np.inf)
    with np.errstate(all="ignore"):
        for row in args.rows():
            if row.is_nan:
                out[row.token], lse[row.token] = np.nan, np.nan
            elif not row.is_keyless:
                attention, row_lse = _emulate_row(args, row, order)
                rounded = attention.astype(out_type)
                if args.gate is not None:
                    rounded = _gated(rounded, args.gate[row.token])
                out[row.token] = np.where(np.isneginf(row_lse)[:, None], 0, rounded).astype(np.float64)
                lse[row.token] = row_lse
    return out, lse


def _emulate_row(args: Arguments, row: Row, order: Order) -> tuple[np.ndarray, np.ndarray]:
    """Return one row's float32 attention ``[heads, v_dim]`` and LSE ``[heads]``."""
    f32 = np.float32
    keys = args.key_cache[row.pages, row.offsets].astype(f32)  # [keys, kv_heads, k_dim]; exact in the compute dtype
    values = args.value_cache[row.pages, row.offsets].astype(f32)
    logits = _matmul(args.grouped_query(row.token, f32), keys.transpose(1, 2, 0), order)  # [kv_heads, group, keys]
    logits = logits * (f32(args.scale) * args.k_scale)[:, None, None]
    if args.softcap is not None:
        cap = f32(args.softcap)
        logits = cap * np.tanh(logits / cap)
    logits = logits * LOG2_E
    row_max = logits.max(axis=-1, keepdims=True)
    nothing = np.isneginf(row_max)
    row_max = np.where(nothing, f32(0), row_max)
    powers = np.exp2(logits - row_max)
    total = powers.sum(axis=-1, keepdims=True)
    rounded_powers = powers.astype(args.query.dtype).astype(f32)
    attention = _matmul(rounded_powers, values.transpose(1, 0, 2), order)  # [kv_heads, group, v_dim]
    if args.sinks is not None:
        # A sink above every logit becomes the maximum, or its power could overflow.
        sinks = args.sinks.astype(f32).reshape(row_max.shape) * LOG2_E
        largest = np.maximum(row_max, sinks)
        rescale = np.exp2(row_max - largest)
        total = np.where(nothing, f32(0), total * rescale + np.exp2(sinks - largest))
        attention, row_max = attention * rescale, largest
    lse = row_max + np.log2(total)  # base 2
    attention = attention / total if order == "forward" else attention * np.exp2(row_max - lse)
    attention = attention * args.v_scale[:, None, None]
    row_lse = np.where(nothing, f32(-np.inf), lse * LN_2)
    return attention.reshape(args.heads, -1), row_lse.reshape(args.heads)


def _matmul(left: np.ndarray, right: np.ndarray, order: Order) -> np.ndarray:
    """Return ``left @ right`` in float32, summed one product after the other.

    The order is fixed by hand because a BLAS chooses its own by processor and shape, and the rule must be one rule.
    """
    total = np.zeros((*left.shape[:-1], right.shape[-1]), np.float32)
    terms = range(left.shape[-1])
    for i in {"forward": terms, "backward": terms[::-1], "interleaved": (*terms[::2], *terms[1::2])}[order]:
        total += left[..., i, None] * right[..., i, None, :]
    return total


def _gated(rounded: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """Return ``round_out(round_out(attention) * round_gate(sigmoid_fp32(gate)))``."""
    sigmoid = np.float32(1) / (np.float32(1) + np.exp(-gate.astype(np.float32)))
    factor = sigmoid.astype(gate.dtype).astype(np.float32)
    return (rounded.astype(np.float32) * factor[:, None]).astype(rounded.dtype)


def _judge(
    name: str,
    actual: ArrayLike,
    expected: np.ndarray,
    emulated: tuple[np.ndarray, ...],
    dtype: np.dtype,
    row_axes: tuple[int, ...],
) -> Report:
    """Apply the rule; ``row_axes`` of ``expected`` are a row."""
    actual = np.asarray(actual).astype(np.float64)
    if actual.shape != expected.shape:
        raise ValueError(f"{name} must have shape {expected.shape}, got {actual.shape}")
    if not actual.size:
        return Report(True, 0.0, 0.0, (), 0.0, 0.0, f"{name}: nothing to compare")
    with np.errstate(invalid="ignore", over="ignore"):
        expected_rounded = expected.astype(dtype).astype(np.float64)
        same = (actual == expected_rounded) | (np.isnan(actual) & np.isnan(expected_rounded))
        judged = np.isfinite(actual) & np.isfinite(expected_rounded)
        error = np.where(judged, np.abs(actual - expected), np.where(same, 0.0, np.inf))
        deviations = np.abs(np.stack(emulated) - expected)
        emulated_error = np.where(np.isfinite(deviations) & judged, deviations, 0.0).max(axis=0)
        magnitude = np.where(np.isfinite(expected), np.abs(expected), 0.0).max(axis=row_axes, keepdims=True)
        ulp = _ulp(magnitude, dtype)
        limit = np.broadcast_to(2.0 * emulated_error.max(axis=row_axes, keepdims=True) + ulp, error.shape)
        ratio = error / limit
    at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    ulps = float(np.broadcast_to(error / ulp, error.shape)[at])
    ok = bool(ratio[at] <= 1.0)
    place = ", ".join(f"{axis} {int(i)}" for axis, i in zip(("token", "head", "dim"), at, strict=False))
    message = (
        f"{name} {'is within' if ok else 'misses'} the tolerance rule at {place}: "
        f"actual {actual[at]:.9g}, expected {expected[at]:.9g}, error {error[at]:.3g}, limit {limit[at]:.3g} "
        f"(ratio {ratio[at]:.3g}, {ulps:.3g} ulp of {dtype.name}); "
        f"{int((ratio > 1.0).sum())} of {ratio.size} values miss, "
        f"{int(np.isinf(error).sum())} of them a NaN or infinity out of place"
    )
    return Report(ok, float(error[at]), float(limit[at]), tuple(map(int, at)), float(ratio[at]), ulps, message)


def _ulp(magnitude: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the distance between neighbouring values of ``dtype`` in the binade of each finite ``magnitude``."""
    info = ml_dtypes.finfo(dtype)
    normal = np.maximum(magnitude, float(info.smallest_normal))
    exponent = np.frexp(normal)[1] - 1  # normal = m * 2**exponent with 1 <= m < 2
    return np.ldexp(1.0, exponent - int(info.nmant))
