"""The split kernel: one kv head, ``pack`` rows of a request, one chunk of its live keys.

With one split it writes the final output, else fp32 partials and their base-2 LSEs. Absent operands are ``None`` and
trace to nothing. Sections, names and order are those of ``swa_torch._triton._split``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from swa_pallas._call import Operands, Statics, clamp_position
from swa_pallas._pallas._addressing import cache_index, load_number
from swa_pallas._pallas._backend import load, load_one, program_id, store
from swa_pallas._pallas._pieces import (
    LN2,
    LOG2E,
    add_sink,
    arange,
    divide_down,
    load_pieces,
    log_sum_exp,
    query_key,
    reciprocal,
    remainder,
    round_and_gate,
    scale_pieces,
    sigmoid,
    softmax_step,
    store_pieces,
    weigh_values,
    zero_pieces,
)
from swa_plan import Plan
from swa_plan._shapes import head_pieces


def ragged_rows(cu_query_lens: Any, request: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Return ``(first token, rows)`` of a request, never beyond the query's tokens."""
    first_token = jnp.clip(load_one(cu_query_lens, request), 0, tokens).astype(jnp.int32)
    end = jnp.clip(load_one(cu_query_lens, request + 1), 0, tokens).astype(jnp.int32)
    return first_token, jnp.maximum(end, first_token) - first_token


def fill_token(
    outputs: tuple[Any, Any], plan: Plan, token: jax.Array, head: jax.Array, live: jax.Array, value: float, lse: float,
    split: jax.Array,
) -> None:  # fmt: skip
    """Write one token that no program computes: ``value`` and ``lse``, or their partial form.

    ``token`` differs where ``live`` does not hold: interpreted, a masked store writes old values back, and those must
    not meet the new ones.
    """
    output, lse_output = outputs
    v_piece, v_pieces = head_pieces(plan.problem.v_dim)
    rows = head.shape[0]
    fill_lse = jnp.full((rows,), lse, jnp.float32)
    if plan.splits == 1:
        filled = tuple(jnp.full((rows, v_piece), value, jnp.float32) for _ in range(v_pieces))
        store_pieces(
            output, lambda d: (token[:, None], head[:, None], d), filled, live[:, None], plan.problem.v_dim, v_piece
        )
        if lse_output is not None:
            store(lse_output, (token, head), fill_lse, live)
    else:
        store(lse_output, (token, split, head), fill_lse, live)


def swa_decode_split(
    operands: Operands, outputs: tuple[Any, Any], *, plan: Plan, statics: Statics, native_fp8: bool, interpret: bool
) -> None:
    """Attend ``pack`` rows x ``head_tile`` heads to one chunk.

    The grid is ``(requests * row tiles * kv heads * head tiles, splits)``. ``outputs`` are the output and its LSE (or
    None) with one split, else the partials and their LSEs.
    """
    problem = plan.problem
    output, lse_output = outputs
    group, head_tile, head_tiles = problem.group, problem.head_tile, problem.head_tiles
    kv_heads, query_len, pack, block = problem.kv_heads, problem.query_len, plan.pack, problem.block
    window, splits, chunk_keys, tile_keys, tile_rows = problem.window, plan.splits, plan.chunk, plan.tile, plan.rows
    k_dim, v_dim = problem.k_dim, problem.v_dim
    k_piece, k_pieces = head_pieces(k_dim)
    v_piece, v_pieces = head_pieces(v_dim)
    dtype = operands.query.dtype
    tokens, requests, pages = operands.query.shape[0], operands.block_table.shape[0], statics.pages

    # --- ids ---
    program = program_id(0)
    split = program_id(1)
    head_tile_id = remainder(program, head_tiles)
    kv_head = remainder(divide_down(program, head_tiles), kv_heads)
    row_tile = remainder(divide_down(program, head_tiles * kv_heads), plan.row_tiles)
    request = divide_down(program, head_tiles * kv_heads * plan.row_tiles)
    m = arange(tile_rows)
    row = divide_down(m, head_tile)
    head_in_group = head_tile_id * head_tile + remainder(m, head_tile)
    head = kv_head * group + head_in_group

    # --- ranges: the request's rows, the keys they see, this program's chunk of those ---
    if operands.cu_query_lens is not None:
        first_token, rows = ragged_rows(operands.cu_query_lens, request, tokens)
    else:
        first_token = request * query_len
        rows = jnp.int32(query_len)
    seq_len = jnp.maximum(clamp_position(load_one(operands.seq_lens, request)), 0)
    first_row = row_tile * pack
    count = jnp.minimum(rows - first_row, pack)
    if operands.cu_query_lens is not None:
        count = jnp.where(rows <= query_len, count, 0)
    first = seq_len - rows + first_row
    low = jnp.int32(0)
    if window is not None:
        low = jnp.maximum(first - (window - 1), 0)
    capacity = statics.max_blocks * block
    high = jnp.where(count > 0, first + count - 1, -1)
    row_low = jnp.zeros((tile_rows,), jnp.int32)
    row_high = first + row
    if window is not None:
        row_low = row_high - (window - 1)
    if operands.kv_start is not None:
        kv_start = clamp_position(load_one(operands.kv_start, request))
        low = jnp.maximum(low, kv_start)
        row_low = jnp.maximum(row_low, kv_start)
    if operands.kv_end is not None:
        kv_last = clamp_position(load_one(operands.kv_end, request)) - 1
        high = jnp.minimum(high, kv_last)
        row_high = jnp.minimum(row_high, kv_last)
    # A row that sees a position beyond the table is NaN.
    beyond_table = (row_high >= capacity) & (row_low <= row_high)
    high = jnp.minimum(high, capacity - 1)
    if chunk_keys > 0:
        start = (divide_down(low, chunk_keys) + split) * chunk_keys
        end = jnp.minimum(start + chunk_keys, high + 1)
    else:
        tiles = divide_down(jnp.maximum(high + 1 - low, 0) + (tile_keys - 1), tile_keys)
        chunk = divide_down(tiles + (splits - 1), splits) * tile_keys
        start = low + split * chunk
        end = jnp.minimum(start + chunk, high + 1)

    # --- load the query ---
    # 64 rows leave few registers: addresses of 32-bit offsets made sm_120 spill.
    tall = tile_rows > 32
    live = (row < count) & (head_in_group < group)
    token = first_token + first_row + row
    query = load_pieces(
        operands.query, lambda d: (token[:, None], head[:, None], d), live[:, None], k_dim, k_piece, k_pieces,
        wide_offsets=tall,
    )  # fmt: skip

    # --- loop over the chunk's tiles ---
    qk_scale = load_number(operands.scale, statics.scale) * load_number(operands.k_scale, statics.k_scale, kv_head)
    softcap = statics.softcap if operands.softcap is None else load_one(operands.softcap, 0)
    if softcap is None:
        qk_scale = qk_scale * LOG2E
    qk_scale = jnp.asarray(qk_scale, jnp.float32)
    given_layer = None if operands.layer is None else load_one(operands.layer, 0)
    layer, layer_exists = statics.existing_layer(given_layer, operands.bases[0])

    def is_in_chunk(n: jax.Array) -> jax.Array:
        """Whether keys belong to the chunk; one cut at absolute positions may begin before the first live key."""
        return (n < end) & (n >= low) if chunk_keys > 0 else n < end

    def load_pages(n: jax.Array) -> jax.Array:
        """Load the page ids of the chunk's keys; no other entry of the table is read."""
        return load(operands.block_table, (request, divide_down(n, block)), is_in_chunk(n))

    def attend_tile(
        i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, ...]]
    ) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, ...]]:
        page, running_max, total, accumulator = carry
        n = start + i * tile_keys + arange(tile_keys)
        in_chunk = is_in_chunk(n)
        # A page id is loaded a tile ahead: were it loaded where it is used, the pipeline would spend its stages on the
        # table and hold one tile of keys and values, however many it is given.
        next_page = load_pages(n + tile_keys)
        known = (page >= 0) & (page < pages) & layer_exists
        readable = (in_chunk & known)[:, None]
        page = page.astype(jnp.int32)[:, None]
        slot = remainder(n, block)[:, None]
        key_at = cache_index(statics, 0, page, slot, kv_head, layer)
        key = load_pieces(operands.bases[0], key_at, readable, k_dim, k_piece, k_pieces, wide_offsets=tall)
        # An unknown page makes the logits of the rows that see it NaN.
        logits = query_key(query, key, native_fp8=native_fp8) * jnp.where(known, qk_scale, jnp.nan)[None, :]
        if softcap is not None:
            logits = jnp.tanh(logits / softcap) * (softcap * LOG2E)
        visible = in_chunk[None, :]
        if pack > 1:
            visible = visible & (n[None, :] >= row_low[:, None]) & (n[None, :] <= row_high[:, None])
        logits = jnp.where(visible, logits, -jnp.inf)
        weights, alpha, running_max, total = softmax_step(logits, running_max, total)
        value_at = cache_index(statics, 1, page, slot, kv_head, layer)
        value = load_pieces(operands.bases[-1], value_at, readable, v_dim, v_piece, v_pieces, wide_offsets=tall)
        accumulator = weigh_values(weights, value, accumulator, alpha, dtype, native_fp8=native_fp8)
        return next_page, running_max, total, accumulator

    _, running_max, total, accumulator = lax.fori_loop(
        jnp.int32(0),
        divide_down(jnp.maximum(end - start, 0) + (tile_keys - 1), tile_keys),
        attend_tile,
        (
            load_pages(start + arange(tile_keys)),
            jnp.full((tile_rows,), -jnp.inf, jnp.float32),
            jnp.where(beyond_table, jnp.float32(jnp.nan), 0.0),
            zero_pieces(tile_rows, v_piece, v_pieces),
        ),
    )

    # --- store ---
    v_scale = load_number(operands.v_scale, statics.v_scale, kv_head)
    if splits == 1:
        factor = jnp.ones((tile_rows,), jnp.float32)
        if operands.sinks is not None:
            sink = load(operands.sinks, (head,), live).astype(jnp.float32) * LOG2E
            factor, running_max, total = add_sink(running_max, total, sink)
        normaliser = factor * reciprocal(total, interpret=interpret) * v_scale
        attention = scale_pieces(accumulator, normaliser[:, None])
        gate_factor = None
        if operands.gate is not None:
            gate = load(operands.gate, (token, head), live)
            # A row that saw nothing is zero even if its gate is NaN.
            gate_factor = jnp.where(total == 0.0, 0.0, sigmoid(gate, interpret=interpret))[:, None]
        attention = round_and_gate(attention, gate_factor, output.dtype)
        store_pieces(output, lambda d: (token[:, None], head[:, None], d), attention, live[:, None], v_dim, v_piece)
        if lse_output is not None:
            store(lse_output, (token, head), log_sum_exp(running_max, total) * LN2, live)
    else:
        normaliser = reciprocal(total, interpret=interpret) * v_scale
        attention = scale_pieces(accumulator, normaliser[:, None])
        store_pieces(
            output, lambda d: (token[:, None], split, head[:, None], d), attention, live[:, None], v_dim, v_piece
        )
        store(lse_output, (token, split, head), log_sum_exp(running_max, total), live)

    # --- rows that no program computes: a request with too many rows, and padding after the last request ---
    if operands.cu_query_lens is not None:
        first_token, rows = ragged_rows(operands.cu_query_lens, request, tokens)
        one_row = (row == 0) & (head_in_group < group)

        def fill_over_bound(extra: jax.Array, _: None) -> None:
            fill_token(outputs, plan, first_token + extra + row, head, one_row, jnp.nan, jnp.nan, split)

        over_bound = (rows > query_len) & (row_tile == 0)
        lax.fori_loop(jnp.int32(0), jnp.where(over_bound, rows, 0), fill_over_bound, None)

        step = requests * plan.row_tiles
        used = jnp.clip(load_one(operands.cu_query_lens, requests), 0, tokens).astype(jnp.int32)
        padding = used + request * plan.row_tiles + row_tile

        def fill_padding(i: jax.Array, _: None) -> None:
            fill_token(outputs, plan, padding + i * step + row, head, one_row, 0.0, -jnp.inf, split)

        paddings = divide_down(jnp.maximum(tokens - padding, 0) + (step - 1), step)
        lax.fori_loop(jnp.int32(0), paddings, fill_padding, None)
