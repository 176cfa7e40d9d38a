"""The tolerance rule accepts another honest implementation and refuses planted faults."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from swa_plan import cases, reference, tolerance

BF16 = np.dtype(ml_dtypes.bfloat16)
INTERPRETER_DTYPES = ("bfloat16", "float16", "float32")


def dtype_of(name):
    return BF16 if name == "bfloat16" else np.dtype(name)


def flash_decode(inputs, *, tile=16, splits=3, off_by=0):
    """Decode as a kernel would: tiles, a running maximum, splits, a merge; own index arithmetic, BLAS sums.

    ``off_by`` plants a wrong window.
    """
    f32 = np.float32
    key_cache, value_cache = inputs.key_cache, inputs.value_cache
    pages, block, kv_heads, _ = key_cache.shape
    tokens, heads, k_dim = inputs.query.shape
    group, compute = heads // kv_heads, inputs.query.dtype
    out_type = dtype_of(inputs.out_dtype or compute.name)
    scale = f32(k_dim**-0.5 if inputs.scale is None else inputs.scale)
    k_scale = np.broadcast_to(f32(1 if inputs.k_scale is None else inputs.k_scale), (kv_heads,))
    v_scale = np.broadcast_to(f32(1 if inputs.v_scale is None else inputs.v_scale), (kv_heads,))
    out, lse = np.zeros((tokens, heads, inputs.v_dim), out_type), np.full((tokens, heads), -np.inf, f32)
    requests = len(inputs.seq_lens)
    cu = inputs.cu_query_lens
    cu = np.arange(requests + 1) * inputs.query_len if cu is None else cu
    for request in range(requests):
        rows, seq_len = cu[request + 1] - cu[request], max(0, inputs.seq_lens[request])
        for token in range(cu[request], cu[request + 1]):
            if rows > inputs.query_len:
                out[token], lse[token] = np.nan, np.nan
                continue
            high = seq_len - rows + (token - cu[request]) + 1
            low = 0 if inputs.window is None else max(0, high - inputs.window - off_by)
            if inputs.kv_start is not None:
                low, high = max(low, inputs.kv_start[request]), min(high, inputs.kv_end[request])
            if high <= low:
                continue
            if high > inputs.block_table.shape[1] * block or any(
                not 0 <= inputs.block_table[request, column] < pages
                for column in range(low // block, (high - 1) // block + 1)
            ):
                out[token], lse[token] = np.nan, np.nan
                continue
            span = -(-(high - low) // (splits * tile)) * tile
            for head in range(heads):
                kv = head // group
                states = []
                for start in range(low, low + splits * span, span):
                    peak, total, mixed = f32(-np.inf), f32(0), np.zeros(inputs.v_dim, f32)
                    for first in range(start, min(start + span, high), tile):
                        positions = np.arange(first, min(first + tile, start + span, high))
                        page, offset = inputs.block_table[request, positions // block], positions % block
                        keys = key_cache[page, offset, kv].astype(f32)
                        values = value_cache[page, offset, kv].astype(f32)
                        logits = keys @ inputs.query[token, head].astype(f32) * (scale * k_scale[kv])
                        if inputs.softcap is not None:
                            logits = f32(inputs.softcap) * np.tanh(logits / f32(inputs.softcap))
                        logits *= f32(1.4426950408889634)
                        new_peak = max(peak, logits.max())
                        powers, carry = np.exp2(logits - new_peak), np.exp2(peak - new_peak)
                        mixed = mixed * carry + powers.astype(compute).astype(f32) @ values
                        total, peak = total * carry + powers.sum(), new_peak
                    if total > 0:
                        states.append((mixed / total, (peak + np.log2(total)) * f32(np.log(2))))
                sink = f32(-np.inf) if inputs.sinks is None else inputs.sinks[head]
                peak = max(sink, *(state[1] for state in states))
                total = sum(np.exp(state[1] - peak) for state in states) + np.exp(sink - peak)
                merged = sum(state[0] * np.exp(state[1] - peak) for state in states) / total * v_scale[kv]
                lse[token, head] = peak + np.log(total)
                if inputs.gate is None:
                    out[token, head] = merged.astype(out_type)
                    continue
                sigmoid = f32(1) / (f32(1) + np.exp(-inputs.gate[token, head].astype(f32)))
                factor = sigmoid.astype(inputs.gate.dtype).astype(f32)
                out[token, head] = (merged.astype(out_type).astype(f32) * factor).astype(out_type)
    return out, lse


@pytest.mark.parametrize("dtype", INTERPRETER_DTYPES)
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_an_honest_kernel_passes_every_case(case, dtype):
    inputs = cases.make_inputs(case, dtype=dtype)
    out, lse = flash_decode(inputs)
    tolerance.assert_close(out, inputs, actual_lse=lse)


@pytest.mark.parametrize("dtype", INTERPRETER_DTYPES)
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_the_emulation_passes_itself(case, dtype):
    inputs = cases.make_inputs(case, dtype=dtype)
    out, lse = tolerance.emulate(*inputs.arrays(), **inputs.reference_options(), out_dtype=inputs.out_dtype)
    report = tolerance.compare(out, inputs, actual_lse=lse)
    assert report.ok
    assert report.ratio <= 0.5


@pytest.mark.parametrize("dtype", INTERPRETER_DTYPES)
@pytest.mark.parametrize("name", ["window-edge", "window-edge-512", "window-mid-page", "verify-4", "gpt-oss-tp4"])
@pytest.mark.parametrize("off_by", [-1, 1])
def test_a_window_off_by_one_fails(name, dtype, off_by):
    inputs = cases.make_inputs(cases.by_name(name), dtype=dtype)
    out, lse = flash_decode(inputs, off_by=off_by)
    assert not tolerance.compare(out, inputs).ok
    right = reference.swa_decode(*inputs.arrays(), **inputs.reference_options())
    assert not tolerance.compare(right, inputs, actual_lse=lse).ok


@pytest.mark.parametrize("dtype", INTERPRETER_DTYPES)
@pytest.mark.parametrize(
    "fault",
    [
        {"window": 30},
        {"scale": 0.126},
        {"sinks": None},
        {"gate": None},
        {"softcap": 2.1},
        {"k_scale": 1.0},
        {"v_scale": 1.0},
        {"kv_end": np.array([39, 17], np.int32)},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_a_wrong_argument_fails(fault, dtype):
    case = dataclasses.replace(
        cases.by_name("fp8-softcap"), name="all", seq_lens=(40, 17), window=32, gate=True, kv_range=((0, 40), (0, 17))
    )
    inputs = cases.make_inputs(case, dtype=dtype)
    out, lse = flash_decode(inputs)
    assert tolerance.compare(out, inputs, actual_lse=lse).ok
    out, lse = flash_decode(dataclasses.replace(inputs, **fault))
    report = tolerance.compare(out, inputs, actual_lse=lse)
    assert not report.ok
    with pytest.raises(AssertionError, match="misses the tolerance rule at token"):
        tolerance.assert_close(out, inputs, actual_lse=lse)


@pytest.mark.parametrize("dtype", INTERPRETER_DTYPES)
@pytest.mark.parametrize(
    "wrong",
    [
        lambda sigmoid, gate: sigmoid * sigmoid,
        lambda sigmoid, gate: sigmoid * gate,
        lambda sigmoid, gate: 1 / (1 + np.exp2(-gate)),
        lambda sigmoid, gate: np.roll(sigmoid, 1, axis=0),
        lambda sigmoid, gate: np.roll(sigmoid, 1, axis=1),
        lambda sigmoid, gate: np.repeat(sigmoid[::4], 4, axis=0),
    ],
    ids=["twice", "silu", "base-2", "next-row", "next-head", "first-row-only"],
)
def test_a_wrong_gate_rule_fails(wrong, dtype):
    inputs = cases.make_inputs(cases.by_name("verify-gate"), dtype=dtype)
    attention, _ = flash_decode(dataclasses.replace(inputs, gate=None))
    sigmoid = 1 / (1 + np.exp(-inputs.gate.astype(np.float64)))
    for factor, ok in ((sigmoid, True), (wrong(sigmoid, inputs.gate.astype(np.float64)), False)):
        out = (attention.astype(np.float64) * factor[..., None]).astype(attention.dtype)
        assert tolerance.compare(out, inputs).ok == ok


def test_a_gate_rounded_to_the_wrong_dtype_fails():
    # A gate that is rounded to bfloat16 although it is float32 is off by up to 2**-9.
    inputs = cases.make_inputs(cases.by_name("out-fp32-gate"))
    gate = inputs.gate.astype(BF16)
    assert not tolerance.compare(flash_decode(dataclasses.replace(inputs, gate=gate))[0], inputs).ok


def test_fp32_results_rounded_to_bf16_fail():
    inputs = cases.make_inputs(cases.by_name("out-fp32"), dtype="float32")
    out, _ = flash_decode(inputs)
    assert tolerance.compare(out, inputs).ok
    assert not tolerance.compare(out.astype(BF16), inputs).ok
    assert tolerance.compare(out.astype(BF16), inputs, out_dtype="bfloat16").ok


def test_gate_rounding_points_are_the_contracts():
    """Bit for bit: an unfused attention, then ``attn * sigmoid(gate)`` in the gate's dtype."""
    inputs = cases.make_inputs(dataclasses.replace(cases.by_name("verify-gate"), gate_dtype="bfloat16"))
    options = inputs.reference_options()
    gate = options.pop("gate").astype(np.float32)
    attention, _ = tolerance.emulate(*inputs.arrays(), **options)
    sigmoid = (1 / (1 + np.exp(-gate))).astype(BF16)
    right = (attention.astype(BF16) * sigmoid[..., None]).astype(np.float64)
    fused, _ = tolerance.emulate(*inputs.arrays(), **inputs.reference_options())
    np.testing.assert_array_equal(fused, right)


class TestNonFinite:
    def inputs(self):
        return cases.make_inputs(cases.by_name("invalid-page"), dtype="float32")

    def test_a_missing_nan_fails(self):
        inputs = self.inputs()
        out, lse = flash_decode(inputs)
        bad = np.argwhere(np.isnan(out))[5]
        out[tuple(bad)] = 0.0
        report = tolerance.compare(out, inputs, actual_lse=lse)
        assert not report.ok
        assert report.worst_error == np.inf
        assert report.worst_at == tuple(bad)
        assert "actual 0, expected nan" in report.message

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_an_extra_nan_or_infinity_fails(self, value):
        inputs = self.inputs()
        out, _ = flash_decode(inputs)
        out[2, 1, 3] = value
        assert tolerance.compare(out, inputs).worst_at == (2, 1, 3)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -1e30, 0.0])
    def test_a_keyless_lse_must_be_minus_infinity(self, value):
        inputs = cases.make_inputs(cases.by_name("empty-requests"), dtype="float32")
        out, lse = flash_decode(inputs)
        lse[0, 2] = value
        report = tolerance.compare(out, inputs, actual_lse=lse)
        assert not report.ok
        assert report.worst_at == (0, 2)
        assert report.message.startswith("lse misses")

    def test_a_keyless_output_must_be_zero(self):
        inputs = cases.make_inputs(cases.by_name("empty-requests"), dtype="float32")
        out, _ = flash_decode(inputs)
        out[0, 0, 0] = 1e-30
        assert not tolerance.compare(out, inputs).ok

    def test_a_base_two_lse_fails(self):
        inputs = cases.make_inputs(cases.by_name("window-edge"), dtype="float32")
        out, lse = flash_decode(inputs)
        assert not tolerance.compare(out, inputs, actual_lse=lse / np.log(2)).ok


@pytest.mark.parametrize(
    "dtype, value, ulp",
    [
        ("bfloat16", 1.0, 2**-7),
        ("bfloat16", 0.999, 2**-8),
        ("float16", 1.5, 2**-10),
        ("float16", 0.0, 2**-24),
        ("float32", 138564.06, 2**-6),
        ("float32", 1e-45, 2**-149),
    ],
)
def test_ulp(dtype, value, ulp):
    assert tolerance._ulp(np.array([value]), dtype_of(dtype)) == [ulp]


def test_wrong_shapes_and_dtypes_are_errors():
    inputs = cases.make_inputs(cases.by_name("sinks"))
    with pytest.raises(ValueError, match=r"out must have shape \(3, 4, 64\), got \(3, 4, 63\)"):
        tolerance.compare(np.zeros((3, 4, 63)), inputs)
    inputs.query = inputs.query.astype(np.float64)
    with pytest.raises(TypeError, match=r"query must be .*float64"):
        tolerance.emulate(*inputs.arrays(), window=4)
    inputs.query = inputs.query.astype(np.float16)
    with pytest.raises(TypeError, match=r"key_cache must have .*float16.*bfloat16"):
        tolerance.emulate(*inputs.arrays(), window=4)


def test_nothing_to_compare():
    inputs = cases.make_inputs(dataclasses.replace(cases.by_name("ragged-no-rows"), padding_rows=0))
    report = tolerance.compare(np.zeros((0, 4, 64)), inputs, actual_lse=np.zeros((0, 4)))
    assert report.ok
    assert report.worst_at == ()
