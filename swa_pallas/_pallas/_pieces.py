"""Arithmetic that the kernels share: head-dim pieces, one online-softmax step, sink, gate and rounding.

A head size is handled as equal power-of-two pieces (``swa_plan`` chooses them), held as tuples, so that 192 = 3 x 64
costs no padding and one gather address serves all pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from swa_pallas._pallas._backend import divide, dot, load, store

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

Pieces = tuple[jax.Array, ...]
Index = Callable[[jax.Array], tuple[Any, ...]]
"""Completes an index with that of the last axis, ``d[1, piece]``."""


def arange(size: int) -> jax.Array:
    """Return ``0 .. size - 1`` as int32, whether or not JAX is in 64-bit mode."""
    return jnp.arange(size, dtype=jnp.int32)


def divide_down(a: jax.Array, b: int) -> jax.Array:
    """Return ``a // b`` of integers that are not negative, in ``a``'s dtype: JAX's 64-bit mode would widen ``b``."""
    return lax.div(a, jnp.asarray(b, a.dtype))


def remainder(a: jax.Array, b: int) -> jax.Array:
    """Return ``a % b``, likewise."""
    return lax.rem(a, jnp.asarray(b, a.dtype))


def piece_mask(mask: jax.Array, i: int, dim: int, piece: int, pieces: int) -> jax.Array:
    """Return ``mask[rows, 1]`` for piece ``i``, without the padding."""
    mask = jnp.broadcast_to(mask, (mask.shape[0], piece))
    return mask if piece * pieces == dim else mask & (i * piece + arange(piece)[None, :] < dim)


def load_pieces(
    reference: Any, at: Index, mask: jax.Array, dim: int, piece: int, pieces: int, *, wide_offsets: bool = False
) -> Pieces:
    """Load ``[rows, dim]`` at ``reference[at(d)]`` as a tuple of pieces; masked rows and padding are zero."""
    d = arange(piece)[None, :]
    masks = [piece_mask(mask, i, dim, piece, pieces) for i in range(pieces)]
    return tuple(load(reference, at(i * piece + d), masks[i], wide_offsets=wide_offsets) for i in range(pieces))


def store_pieces(reference: Any, at: Index, values: Pieces, mask: jax.Array, dim: int, piece: int) -> None:
    """Store a tuple of pieces at ``reference[at(d)]``, without the padding."""
    d = arange(piece)[None, :]
    for i, value in enumerate(values):
        store(reference, at(i * piece + d), value.astype(reference.dtype), piece_mask(mask, i, dim, piece, len(values)))


def zero_pieces(rows: int, piece: int, pieces: int) -> Pieces:
    """Return fp32 zeros ``[rows, piece * pieces]`` as pieces."""
    return tuple(jnp.zeros((rows, piece), jnp.float32) for _ in range(pieces))


def scale_pieces(pieces: Pieces, factor: jax.Array) -> Pieces:
    """Multiply every row by ``factor[rows, 1]``."""
    return tuple(each * factor for each in pieces)


def widen_byte(byte: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Convert bits of fp8 e4m3, held as int16 in 0..255, to the compute dtype, exactly and without fp8 hardware."""
    magnitude = byte & 0x7F
    # Shifted into fp16's fields the value is 2**-8 of what is meant, because the biases are 7 and 15.
    bits = ((byte & 0x80) << 8) | (magnitude << 7)
    half = jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 256.0
    return jnp.where(magnitude == 0x7F, jnp.nan, half).astype(dtype)


def widen(stored: jax.Array, dtype: jnp.dtype, *, native_fp8: bool) -> jax.Array:
    """Convert stored values to the compute dtype exactly; fp8 goes through fp16, the native way."""
    if stored.dtype == dtype:
        return stored
    if stored.dtype == jnp.int8:
        return stored.astype(jnp.float32).astype(dtype)
    if stored.dtype == jnp.float8_e4m3fn and not native_fp8:
        # Chips before sm_89 cannot convert e4m3.
        byte = jax.lax.bitcast_convert_type(stored, jnp.int8).astype(jnp.int16) & 0xFF
        return widen_byte(byte, dtype)
    return stored.astype(jnp.float16).astype(dtype)


def query_key(query: Pieces, key: Pieces, *, native_fp8: bool) -> jax.Array:
    """Return fp32 ``query @ key.T`` ``[rows, keys]``, with full fp32 products where the inputs are fp32."""
    scores = jnp.zeros((query[0].shape[0], key[0].shape[0]), jnp.float32)
    for i in range(len(query)):
        scores += dot(query[i], widen(key[i], query[i].dtype, native_fp8=native_fp8), transpose=True)
    return scores


def weigh_values(
    weights: jax.Array, value: Pieces, accumulator: Pieces, alpha: jax.Array, dtype: jnp.dtype, *, native_fp8: bool
) -> Pieces:
    """Return ``accumulator * alpha + weights @ value`` in fp32, weights rounded to the compute dtype."""
    weights = weights.astype(dtype)
    return tuple(
        accumulator[i] * alpha[:, None] + dot(weights, widen(value[i], dtype, native_fp8=native_fp8))
        for i in range(len(value))
    )


def softmax_step(
    logits: jax.Array, running_max: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One step of the online softmax in base 2: ``(weights, alpha, running_max, total)``.

    A row that has seen no key yet keeps ``-inf``; its pivot is 0 so that no ``(-inf) - (-inf)`` arises.
    """
    new_max = jnp.maximum(running_max, jnp.max(logits, axis=1))
    pivot = jnp.where(new_max == -jnp.inf, 0.0, new_max)
    alpha = jnp.exp2(running_max - pivot)
    weights = jnp.exp2(logits - pivot[:, None])
    return weights, alpha, new_max, total * alpha + jnp.sum(weights, axis=1)


def add_sink(running_max: jax.Array, total: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Add one logit (base 2) to the denominator of rows that saw a key: ``(factor of the sums so far, max, total)``."""
    seen = total != 0.0
    new_max = jnp.where(seen, jnp.maximum(running_max, sink), running_max)
    pivot = jnp.where(new_max == -jnp.inf, 0.0, new_max)
    factor = jnp.exp2(running_max - pivot)
    return factor, new_max, jnp.where(seen, total * factor + jnp.exp2(sink - pivot), total)


def reciprocal(total: jax.Array, *, interpret: bool) -> jax.Array:
    """Return ``1 / total``; 0 for rows that saw nothing, so that they are written as zeros."""
    return jnp.where(total == 0.0, 0.0, divide(jnp.ones_like(total), total, interpret=interpret))


def log_sum_exp(running_max: jax.Array, total: jax.Array) -> jax.Array:
    """Return the base-2 log-sum-exp; ``-inf`` for rows that saw nothing."""
    return jnp.where(total == 0.0, -jnp.inf, running_max + jnp.log(total) * LOG2E)


def sigmoid(gate: jax.Array, *, interpret: bool) -> jax.Array:
    """Return ``1 / (1 + exp(-gate))`` computed in fp32 and rounded to the gate's dtype, as fp32."""
    x = gate.astype(jnp.float32)
    denominator = 1.0 + jnp.exp(-x)
    rounded = divide(jnp.ones_like(x), denominator, interpret=interpret).astype(gate.dtype)
    return rounded.astype(jnp.float32)


def round_and_gate(pieces: Pieces, gate_factor: jax.Array | None, dtype: jnp.dtype) -> Pieces:
    """Round the attention to the output dtype and apply the gate as an unfused multiplication in that dtype would."""
    rounded = tuple(each.astype(dtype) for each in pieces)
    if gate_factor is None:
        return rounded
    return tuple((each.astype(jnp.float32) * gate_factor).astype(dtype) for each in rounded)
