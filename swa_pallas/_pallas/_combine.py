"""The combine kernel: merge partial attentions, add the sink, apply the gate, round.

Serves the splits of one call (base-2 LSEs ``[tokens, parts, heads]``) and ``merge_states`` (natural LSEs ``[parts,
tokens, heads]``). Partials are summed one after another in order, so that partials which saw nothing change no bit
wherever they stand. Sections, names and order are those of ``swa_torch._triton._combine``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from swa_pallas._pallas._backend import load, program_id, store
from swa_pallas._pallas._pieces import (
    LN2,
    LOG2E,
    Pieces,
    add_sink,
    load_pieces,
    log_sum_exp,
    reciprocal,
    round_and_gate,
    scale_pieces,
    sigmoid,
    store_pieces,
    zero_pieces,
)
from swa_plan._shapes import head_pieces

UNROLLED_PARTS = 16
"""Up to this many parts every load is issued before any arithmetic; more go through a loop."""


def add_part(
    partial: Pieces, lse: jax.Array, pivot: jax.Array, accumulator: Pieces, total: jax.Array, to_base_2: float
) -> tuple[Pieces, jax.Array]:
    """Add one part, weighted by ``2 ** (lse - pivot)``; a part of weight 0 adds nothing, whatever its memory holds."""
    weight = jnp.exp2((lse - pivot) * to_base_2)
    products = tuple(each.astype(jnp.float32) * weight[:, None] for each in partial)
    summed = tuple(
        sums + jnp.where(weight[:, None] == 0.0, 0.0, product)
        for sums, product in zip(accumulator, products, strict=True)
    )
    return summed, total + weight


def swa_decode_combine(
    partial: Any, partial_lse: Any, sinks: Any, gate: Any, outputs: tuple[Any, Any], *, natural: bool, interpret: bool
) -> None:
    """Merge the parts of one (token, head); grid ``(tokens, heads)``."""
    # --- ids ---
    output, lse_output = outputs
    to_base_2 = LOG2E if natural else 1.0
    token = program_id(0)
    head = program_id(1)
    parts = partial.shape[0 if natural else 1]
    v_dim = output.shape[2]
    v_piece, v_pieces = head_pieces(v_dim)
    one = jnp.ones((1,), jnp.bool_)
    heads = jnp.full((1,), head, jnp.int32)

    def load_part(part: Any) -> Pieces:
        at = (part, token) if natural else (token, part)
        return load_pieces(partial, lambda d: (*at, heads[:, None], d), one[:, None], v_dim, v_piece, v_pieces)

    def load_lse(part: Any) -> jax.Array:
        at = (part, token) if natural else (token, part)
        return load(partial_lse, (*at, heads), one)

    # --- merge ---
    running_max = jnp.full((1,), -jnp.inf, jnp.float32)
    total = jnp.zeros((1,), jnp.float32)
    accumulator = zero_pieces(1, v_piece, v_pieces)
    if parts <= UNROLLED_PARTS:
        partials = [load_part(part) for part in range(parts)]
        lses = [load_lse(part) for part in range(parts)]
        for lse in lses:
            running_max = jnp.maximum(running_max, lse)
        pivot = jnp.where(running_max == -jnp.inf, 0.0, running_max)
        for each, lse in zip(partials, lses, strict=True):
            accumulator, total = add_part(each, lse, pivot, accumulator, total, to_base_2)
    else:
        running_max = lax.fori_loop(
            jnp.int32(0), jnp.int32(parts), lambda part, top: jnp.maximum(top, load_lse(part)), running_max
        )
        pivot = jnp.where(running_max == -jnp.inf, 0.0, running_max)
        accumulator, total = lax.fori_loop(
            jnp.int32(0),
            jnp.int32(parts),
            lambda part, sums: add_part(load_part(part), load_lse(part), pivot, sums[0], sums[1], to_base_2),
            (accumulator, total),
        )

    # --- store ---
    running_max = running_max * to_base_2
    factor = jnp.ones((1,), jnp.float32)
    if sinks is not None:
        sink = load(sinks, (heads,), one).astype(jnp.float32) * LOG2E
        factor, running_max, total = add_sink(running_max, total, sink)
    attention = scale_pieces(accumulator, (factor * reciprocal(total, interpret=interpret))[:, None])
    gate_factor = None
    if gate is not None:
        logit = load(gate, (token, heads), one)
        gate_factor = jnp.where(total == 0.0, 0.0, sigmoid(logit, interpret=interpret))[:, None]
    attention = round_and_gate(attention, gate_factor, output.dtype)
    store_pieces(output, lambda d: (token, heads[:, None], d), attention, one[:, None], v_dim, v_piece)
    if lse_output is not None:
        store(lse_output, (token, heads), log_sum_exp(running_max, total) * LN2, one)
