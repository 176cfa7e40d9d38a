"""Arithmetic that the kernels share: head-dim pieces, one online-softmax step, sink, gate and rounding.

A head size is handled as equal power-of-two pieces (``swa_plan`` chooses them), held as tuples, so that 192 = 3 x 64
costs no padding and one gather address serves all pieces.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def load_pieces(base, mask, DIM: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """Load ``[rows, DIM]`` at row pointers ``base[rows, 1]`` as a tuple of pieces; masked rows and padding are zero."""
    d = tl.arange(0, PIECE)[None, :]
    pieces = ()
    for i in tl.static_range(PIECES):
        if PIECE * PIECES == DIM:
            pieces = pieces + (tl.load(base + i * PIECE + d, mask, other=0.0),)
        else:
            pieces = pieces + (tl.load(base + i * PIECE + d, mask & (i * PIECE + d < DIM), other=0.0),)
    return pieces


@triton.jit
def store_pieces(base, pieces, mask, DIM: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """Store a tuple of pieces at row pointers ``base[rows, 1]``, without the padding."""
    d = tl.arange(0, PIECE)[None, :]
    dtype = base.dtype.element_ty
    for i in tl.static_range(PIECES):
        if PIECE * PIECES == DIM:
            tl.store(base + i * PIECE + d, pieces[i].to(dtype), mask)
        else:
            tl.store(base + i * PIECE + d, pieces[i].to(dtype), mask & (i * PIECE + d < DIM))


@triton.jit
def zero_pieces(ROWS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """Return fp32 zeros ``[ROWS, PIECE * PIECES]`` as pieces."""
    pieces = ()
    for _ in tl.static_range(PIECES):
        pieces = pieces + (tl.zeros((ROWS, PIECE), tl.float32),)
    return pieces


@triton.jit
def scale_pieces(pieces, factor, PIECES: tl.constexpr):
    """Multiply every row by ``factor[rows, 1]``."""
    scaled = ()
    for i in tl.static_range(PIECES):
        scaled = scaled + (pieces[i] * factor,)
    return scaled


@triton.jit
def widen_byte(byte, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Convert stored bytes held as int16 in 0..255 to the compute dtype, exactly and without 8-bit registers."""
    if FORMAT == "int8":
        return ((byte << 8) >> 8).to(tl.float32).to(DTYPE)
    elif FORMAT == "e5m2" or FORMAT == "e5m2x2":
        return (byte << 8).to(tl.float16, bitcast=True).to(DTYPE)
    else:
        magnitude = byte & 0x7F
        # Shifted into fp16's fields the value is 2**-8 of what is meant, because the biases are 7 and 15.
        half = (((byte & 0x80) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True) * 256.0
        return tl.where(magnitude == 0x7F, float("nan"), half).to(DTYPE)


@triton.jit
def widen(stored, DTYPE: tl.constexpr):
    """Convert stored values to the compute dtype exactly; fp8 goes through fp16, the native way."""
    if stored.dtype == DTYPE:
        return stored
    elif stored.dtype == tl.uint8:
        # Chips before sm_89 cannot convert e4m3, so the launch passes its bits.
        return widen_byte(stored.to(tl.int16), "e4m3", DTYPE)
    elif stored.dtype == tl.int8:
        return stored.to(tl.float32).to(DTYPE)
    else:
        return stored.to(tl.float16).to(DTYPE)


@triton.jit
def query_key(query, key, DTYPE: tl.constexpr, PIECES: tl.constexpr):
    """Return fp32 ``query @ key.T`` ``[rows, keys]``, with full fp32 products where the inputs are fp32."""
    scores = tl.zeros((query[0].shape[0], key[0].shape[0]), tl.float32)
    for i in tl.static_range(PIECES):
        scores = tl.dot(query[i], tl.trans(widen(key[i], DTYPE)), scores, input_precision="ieee")
    return scores


@triton.jit
def weigh_values(weights, value, accumulator, alpha, DTYPE: tl.constexpr, PIECES: tl.constexpr):
    """Return ``accumulator * alpha + weights @ value`` in fp32, weights rounded to the compute dtype."""
    summed = ()
    for i in tl.static_range(PIECES):
        rescaled = accumulator[i] * alpha[:, None]
        summed = summed + (tl.dot(weights.to(DTYPE), widen(value[i], DTYPE), rescaled, input_precision="ieee"),)
    return summed


def pairs_ptx(pair_type: str, finish: str) -> str:
    """Return PTX that converts two 16-bit pairs of fp8 to fp16 in hardware, ``a`` and ``b``, then finishes them."""
    return f"""{{
        .reg .b16 key0, key1, h<4>;
        .reg .b32 a, b;
        .reg .f32 f<4>;
        mov.b32 {{key0, key1}}, $2;
        cvt.rn.f16x2.{pair_type} a, key0;
        cvt.rn.f16x2.{pair_type} b, key1;
        {finish}
    }}"""


REGROUP = "prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632;"
REGROUP_AS_BF16 = """mov.b32 {h0, h1}, a; mov.b32 {h2, h3}, b;
        cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3;
        cvt.rn.bf16x2.f32 $0, f2, f0; cvt.rn.bf16x2.f32 $1, f3, f1;"""
E4M3_TO_FP16: tl.constexpr = tl.constexpr(pairs_ptx("e4m3x2", REGROUP))
E4M3_TO_BF16: tl.constexpr = tl.constexpr(pairs_ptx("e4m3x2", REGROUP_AS_BF16))
E5M2_TO_FP16: tl.constexpr = tl.constexpr(pairs_ptx("e5m2x2", REGROUP))
E5M2_TO_BF16: tl.constexpr = tl.constexpr(pairs_ptx("e5m2x2", REGROUP_AS_BF16))


@triton.jit
def pairs_to_bf16(pairs, PTX: tl.constexpr):
    """Run a PTX conversion to bf16: ``(even, odd)``."""
    return tl.inline_asm_elementwise(PTX, "=&r,=&r,r", [pairs], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)


@triton.jit
def pairs_to_fp16(pairs, PTX: tl.constexpr):
    """Run a PTX conversion to fp16: ``(even, odd)``."""
    return tl.inline_asm_elementwise(PTX, "=&r,=&r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def widen_pairs(pairs, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Convert pairs of stored bytes to ``(even, odd)`` in the compute dtype; ``x2`` formats have hardware for it."""
    if FORMAT == "e4m3x2" and DTYPE == tl.bfloat16:
        return pairs_to_bf16(pairs, E4M3_TO_BF16)
    elif FORMAT == "e4m3x2" and DTYPE == tl.float16:
        return pairs_to_fp16(pairs, E4M3_TO_FP16)
    elif FORMAT == "e5m2x2" and DTYPE == tl.bfloat16:
        return pairs_to_bf16(pairs, E5M2_TO_BF16)
    elif FORMAT == "e5m2x2" and DTYPE == tl.float16:
        return pairs_to_fp16(pairs, E5M2_TO_FP16)
    else:
        return widen_byte(pairs & 0xFF, FORMAT, DTYPE), widen_byte((pairs >> 8) & 0xFF, FORMAT, DTYPE)


@triton.jit
def weigh_pairs(
    weights, pairs, accumulator, alpha, FORMAT: tl.constexpr, DTYPE: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """Like ``weigh_values`` for values read as 16-bit pairs; the accumulator holds even and odd dims in turn.

    A tensor core wants neighbouring keys side by side. Transposing 16-bit elements is one instruction for many,
    transposing bytes is a load of each.
    """
    rounded = weights.to(DTYPE)
    summed = ()
    for i in tl.static_range(PIECES):
        even, odd = widen_pairs(pairs[i], FORMAT, DTYPE)
        summed = summed + (
            tl.dot(rounded, even, accumulator[2 * i] * alpha[:, None], input_precision="ieee"),
            tl.dot(rounded, odd, accumulator[2 * i + 1] * alpha[:, None], input_precision="ieee"),
        )
    return summed


@triton.jit
def interleave_pieces(halves, PIECES: tl.constexpr):
    """Put even and odd dims back into order."""
    pieces = ()
    for i in tl.static_range(PIECES):
        pieces = pieces + (tl.interleave(halves[2 * i], halves[2 * i + 1]),)
    return pieces


@triton.jit
def softmax_step(logits, running_max, total):
    """One step of the online softmax in base 2: ``(weights, alpha, running_max, total)``.

    A row that has seen no key yet keeps ``-inf``; its pivot is 0 so that no ``(-inf) - (-inf)`` arises.
    """
    new_max = tl.maximum(running_max, tl.max(logits, 1))
    pivot = tl.where(new_max == -float("inf"), 0.0, new_max)
    alpha = tl.exp2(running_max - pivot)
    weights = tl.exp2(logits - pivot[:, None])
    return weights, alpha, new_max, total * alpha + tl.sum(weights, 1)


@triton.jit
def add_sink(running_max, total, sink):
    """Add one logit (base 2) to the denominator of rows that saw a key: ``(factor of the sums so far, max, total)``."""
    seen = total != 0.0
    new_max = tl.where(seen, tl.maximum(running_max, sink), running_max)
    pivot = tl.where(new_max == -float("inf"), 0.0, new_max)
    factor = tl.exp2(running_max - pivot)
    return factor, new_max, tl.where(seen, total * factor + tl.exp2(sink - pivot), total)


@triton.jit
def reciprocal(total):
    """Return ``1 / total``; 0 for rows that saw nothing, so that they are written as zeros."""
    return tl.where(total == 0.0, 0.0, tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total))


@triton.jit
def log_sum_exp(running_max, total):
    """Return the base-2 log-sum-exp; ``-inf`` for rows that saw nothing."""
    return tl.where(total == 0.0, -float("inf"), running_max + tl.log2(total))


@triton.jit
def exp(x):
    """Exponential with the rounding error of ``x * log2(e)`` compensated; the plain one loses 1e-6 at x = 20."""
    product = x * LOG2E
    error = tl.fma(x, tl.full(x.shape, LOG2E, tl.float32), -product) + x * 1.925963033500e-08
    power = tl.exp2(product)
    # An infinite product has no error to compensate: inf * 0 would be NaN.
    return tl.where(tl.abs(product) < 128.0, power + power * (error * LN2), power)


@triton.jit
def sigmoid(gate):
    """Return ``1 / (1 + exp(-gate))`` computed in fp32 and rounded to the gate's dtype, as fp32."""
    x = gate.to(tl.float32)
    denominator = 1.0 + exp(-x)
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), denominator).to(gate.dtype).to(tl.float32)


@triton.jit
def tanh(x):
    """Hyperbolic tangent from exp2; a series below 0.25, where ``1 - exp(-2x)`` would cancel."""
    square = x * x
    series = x * (1.0 + square * (-0.33333333 + square * (0.13333333 + square * (-0.053968254 + square * 0.021869488))))
    power = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    ratio = tl.div_rn(1.0 - power, 1.0 + power)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -ratio, ratio))


@triton.jit
def round_and_gate(pieces, gate_factor, DTYPE: tl.constexpr, GATED: tl.constexpr, PIECES: tl.constexpr):
    """Round the attention to the output dtype and apply the gate as an unfused multiplication in that dtype would."""
    finished = ()
    for i in tl.static_range(PIECES):
        rounded = pieces[i].to(DTYPE)
        if GATED:
            rounded = (rounded.to(tl.float32) * gate_factor).to(DTYPE)
        finished = finished + (rounded,)
    return finished
