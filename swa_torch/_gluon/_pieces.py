"""Arithmetic of the Gluon kernel, named as in ``swa_torch._triton._pieces``: sink, gate, rounding, stores.

Stated again because a Triton function cannot be called from Gluon, whose tensors carry layouts. A head size is handled
in pieces of 64 elements, the 128 bytes that a swizzled row of shared memory holds; the last one may be padding in part.
Tensors of products are transposed: ``[keys or dims, rows]``, one query row a column.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
LN2: gl.constexpr = gl.constexpr(0.6931471805599453)
PIECE: gl.constexpr = gl.constexpr(64)

# Names that Triton changed after 3.6.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@gluon.jit
def zero_pieces(ROWS: gl.constexpr, PIECES: gl.constexpr, LAYOUT: gl.constexpr):
    """Return fp32 zeros ``[PIECE, ROWS]`` for each piece."""
    pieces = ()
    for _ in gl.static_range(PIECES):
        pieces = pieces + (gl.zeros([PIECE, ROWS], gl.float32, layout=LAYOUT),)
    return pieces


@gluon.jit
def scale_pieces(pieces, factor, PIECES: gl.constexpr):
    """Multiply every row by ``factor[1, rows]``."""
    scaled = ()
    for i in gl.static_range(PIECES):
        scaled = scaled + (pieces[i] * factor,)
    return scaled


@gluon.jit
def store_pieces(base, pieces, live, DIM: gl.constexpr, PIECES: gl.constexpr, LAYOUT: gl.constexpr):
    """Store pieces ``[PIECE, rows]`` at row pointers ``base[rows, 1]`` in ``LAYOUT``, without the padding."""
    d = gl.arange(0, PIECE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    dtype: gl.constexpr = base.dtype.element_ty
    for i in gl.static_range(PIECES):
        rows = gl.convert_layout(gl.permute(pieces[i].to(dtype), (1, 0)), LAYOUT)
        gl.store(base + i * PIECE + d, rows, live[:, None] & (i * PIECE + d < DIM))


@gluon.jit
def store_columns(base, pieces, live, DIM: gl.constexpr, PIECES: gl.constexpr, LAYOUT: gl.constexpr):
    """Store fp32 pieces at row pointers ``base[1, rows]`` from where the products left them.

    Eight lanes write 32 bytes of a row: whole sectors, so that transposing them first would only take time.
    """
    d = gl.arange(0, PIECE, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    for i in gl.static_range(PIECES):
        gl.store(base + i * PIECE + d, pieces[i], live[None, :] & (i * PIECE + d < DIM))


@gluon.jit
def add_sink(running_max, total, sink):
    """Add one logit (base 2) to the denominator of rows that saw a key: ``(factor of the sums so far, max, total)``."""
    seen = total != 0.0
    new_max = gl.where(seen, gl.maximum(running_max, sink), running_max)
    pivot = gl.where(new_max == -float("inf"), 0.0, new_max)
    factor = gl.exp2(running_max - pivot)
    return factor, new_max, gl.where(seen, total * factor + gl.exp2(sink - pivot), total)


@gluon.jit
def reciprocal(total):
    """Return ``1 / total``; 0 for rows that saw nothing, so that they are written as zeros."""
    return gl.where(total == 0.0, 0.0, gl.div_rn(gl.full_like(total, 1.0), total))


@gluon.jit
def log_sum_exp(running_max, total):
    """Return the base-2 log-sum-exp; ``-inf`` for rows that saw nothing."""
    return gl.where(total == 0.0, -float("inf"), running_max + gl.log2(total))


@gluon.jit
def exp(x):
    """Exponential with the rounding error of ``x * log2(e)`` compensated; the plain one loses 1e-6 at x = 20."""
    product = x * LOG2E
    error = gl.fma(x, gl.full_like(x, LOG2E), -product) + x * 1.925963033500e-08
    power = gl.exp2(product)
    # An infinite product has no error to compensate: inf * 0 would be NaN.
    return gl.where(gl.abs(product) < 128.0, power + power * (error * LN2), power)


@gluon.jit
def sigmoid(gate):
    """Return ``1 / (1 + exp(-gate))`` computed in fp32 and rounded to the gate's dtype, as fp32."""
    x = gate.to(gl.float32)
    denominator = 1.0 + exp(-x)
    return gl.div_rn(gl.full_like(x, 1.0), denominator).to(gate.dtype).to(gl.float32)


@gluon.jit
def tanh(x):
    """Hyperbolic tangent from exp2; a series below 0.25, where ``1 - exp(-2x)`` would cancel."""
    square = x * x
    series = x * (1.0 + square * (-0.33333333 + square * (0.13333333 + square * (-0.053968254 + square * 0.021869488))))
    power = gl.exp2(gl.abs(x) * (-2.0 * LOG2E))
    ratio = gl.div_rn(1.0 - power, 1.0 + power)
    return gl.where(gl.abs(x) < 0.25, series, gl.where(x < 0, -ratio, ratio))


@gluon.jit
def round_and_gate(pieces, gate_factor, DTYPE: gl.constexpr, GATED: gl.constexpr, PIECES: gl.constexpr):
    """Round the attention to the output dtype and apply the gate as an unfused multiplication in that dtype would."""
    finished = ()
    for i in gl.static_range(PIECES):
        rounded = pieces[i].to(DTYPE)
        if GATED:
            rounded = (rounded.to(gl.float32) * gate_factor).to(DTYPE)
        finished = finished + (rounded,)
    return finished
