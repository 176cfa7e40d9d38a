"""The ``xla`` backend: the same meaning and rounding points in plain JAX operations.

Visible keys are gathered per request straight from the cache's base and multiplied in fp32; a few requests at a time,
so that memory stays bounded. Rounding to 16 bits is arithmetic in fp32, because XLA drops a conversion there and back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from swa_pallas._call import Append, Operands, Statics, clamp_position
from swa_plan import Plan
from swa_plan._layout import PACKED
from swa_plan._problem import MAX_POSITIONS

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
GATHER_BYTES = 64 << 20
"""Gathered keys and values of the requests that are handled together stay below this."""

WIDENED_ON_CPU = ("float8_e4m3fn", "float8_e5m2") if jax.__version_info__ >= (0, 11) else (
    "bfloat16", "float8_e4m3fn", "float8_e5m2"
)  # fmt: skip
"""Dtypes that XLA scatters on the CPU by converting the whole operand to a wider one and back.

Their bits are scattered as integers instead. XLA then copies the cache there and back, which is ten to a thousand times
faster but still a copy: it has no way to write these dtypes in place.
"""


class Rows(NamedTuple):
    """Rows of the requests as grids ``[requests, query_len]``; a cell that is no row sees the empty range."""

    token: jax.Array
    low: jax.Array
    high: jax.Array


class Sums(NamedTuple):
    """Unnormalised attention of some rows, fp32, and the base-2 maximum and total of their weights."""

    attention: jax.Array
    top: jax.Array
    total: jax.Array


def decode(operands: Operands, *, plan: Plan, statics: Statics) -> tuple[jax.Array, jax.Array | None]:
    """Return the output and its LSE or None; rows that see nothing are zero, rows over a request's bound are NaN."""
    problem = plan.problem
    tokens = operands.query.shape[0]
    rows = find_rows(operands, problem.window, problem.query_len)
    query = operands.query[rows.token]
    if plan.batch_invariant:
        # One row at a time: matrix products of a shape that only the row itself decides.
        table = jnp.repeat(operands.block_table, problem.query_len, axis=0)
        flat = (table, *(grid.reshape(-1, 1, *grid.shape[2:]) for grid in (query, rows.low, rows.high)))
        sums = lax.map(lambda each: attend(operands, each, plan, statics), flat)
        sums = Sums(*(grid.reshape(*rows.token.shape, *grid.shape[2:]) for grid in sums))
    else:
        requests = (operands.block_table, query, rows.low, rows.high)
        keys = problem.nominal_keys
        request_bytes = max(1, keys * problem.kv_heads * (problem.k_dim + problem.v_dim) * 8)
        step = max(1, GATHER_BYTES // request_bytes)
        sums = lax.map(lambda each: attend(operands, each, plan, statics), requests, batch_size=step)

    # --- one row a token ---
    if operands.cu_query_lens is None:
        sums = Sums(*(grid.reshape(tokens, *grid.shape[2:]) for grid in sums))
    else:
        edges = jnp.clip(operands.cu_query_lens, 0, tokens).astype(jnp.int32)
        token = jnp.arange(tokens, dtype=jnp.int32)
        request = jnp.searchsorted(edges, token, side="right").astype(jnp.int32) - 1
        request = jnp.clip(request, 0, edges.shape[0] - 2)
        over_bound = (edges[request + 1] - edges[request] > problem.query_len) & (token < edges[-1])
        row = jnp.clip(token - edges[request], 0, problem.query_len - 1)
        sums = Sums(*(grid[request, row] for grid in sums))
        used = (token < edges[-1])[:, None]
        total = jnp.where(used, sums.total, 0.0)
        sums = sums._replace(total=jnp.where(over_bound[:, None], jnp.float32(jnp.nan), total))

    # --- store ---
    def finish(each: tuple[Sums, jax.Array | None]) -> tuple[jax.Array, jax.Array | None]:
        sums, gate = each
        v_scale = jnp.repeat(per_head(operands.v_scale, statics.v_scale, problem.kv_heads), problem.group)
        return finish_rows(sums, operands.sinks, gate, statics.out_dtype, v_scale)

    rows_and_gates = (sums, operands.gate)
    out, lse = lax.map(finish, rows_and_gates) if plan.batch_invariant else finish(rows_and_gates)
    return out, lse if statics.return_lse else None


def finish_rows(
    sums: Sums, sinks: jax.Array | None, gate: jax.Array | None, out_dtype: str, v_scale: jax.Array | float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Return output and LSE of rows ``[..., heads]``: sink, normalisation, gate and rounding."""
    attention, top, total = sums
    factor = 1.0
    if sinks is not None:
        factor, top, total = add_sink(top, total, sinks.astype(jnp.float32) * LOG2E)
    normaliser = factor * jnp.where(total == 0.0, 0.0, 1.0 / total) * v_scale
    attention = jnp.where(total[..., None] == 0.0, 0.0, attention * normaliser[..., None])
    out = round_and_gate(attention, gate, total == 0.0, out_dtype)
    return out, jnp.where(total == 0.0, -jnp.inf, (top + jnp.log2(total)) / LOG2E)


def find_rows(operands: Operands, window: int | None, query_len: int) -> Rows:
    """Return the rows of every request and the positions that each sees."""
    tokens, requests = operands.query.shape[0], operands.block_table.shape[0]
    index = jnp.arange(query_len, dtype=jnp.int32)[None, :]
    if operands.cu_query_lens is None:
        first = jnp.arange(requests, dtype=jnp.int32)[:, None] * query_len
        count = jnp.full((requests, 1), query_len, jnp.int32)
    else:
        edges = jnp.clip(operands.cu_query_lens, 0, tokens).astype(jnp.int32)[:, None]
        first, count = edges[:-1], edges[1:] - edges[:-1]
    live = (index < count) & (count <= query_len)
    position = jnp.maximum(clamp_position(operands.seq_lens), 0)[:, None] - count + index
    low = jnp.zeros_like(position) if window is None else jnp.maximum(position - (window - 1), 0)
    high = position
    if operands.kv_start is not None:
        low = jnp.maximum(low, clamp_position(operands.kv_start)[:, None])
    if operands.kv_end is not None:
        high = jnp.minimum(high, clamp_position(operands.kv_end)[:, None] - 1)
    token = jnp.clip(first + index, 0, max(0, tokens - 1))
    return Rows(token, jnp.where(live, low, 0), jnp.where(live, high, -1))


def attend(
    operands: Operands, request: tuple[jax.Array, jax.Array, jax.Array, jax.Array], plan: Plan, statics: Statics
) -> Sums:
    """Compute the rows of one request: ``(table row, query [rows, heads, k_dim], low [rows], high [rows])``."""
    table, query, low, high = request
    problem = plan.problem
    kv_heads, group = problem.kv_heads, problem.group
    row_count = query.shape[0]

    # --- ranges: the keys that the rows see ---
    capacity = statics.max_blocks * problem.block
    sees = low <= high
    beyond_table = sees & (high >= capacity)
    last = jnp.minimum(jnp.max(jnp.where(sees, high, -1)), capacity - 1)
    start = jnp.minimum(jnp.min(jnp.where(sees, low, MAX_POSITIONS)), last + 1)
    keys = max(1, min(problem.row_keys + row_count - 1, capacity))
    n = start + jnp.arange(keys, dtype=jnp.int32)

    # --- load keys and values; nothing else of table and cache is read ---
    in_range = n <= last
    page = table[jnp.where(in_range, n // problem.block, 0)]
    layer, layer_exists = statics.existing_layer(
        None if operands.layer is None else operands.layer[0], operands.bases[0]
    )
    known = (page >= 0) & (page < statics.pages) & layer_exists
    readable = in_range & known
    page, slot = jnp.where(readable, page, 0).astype(jnp.int32), n % problem.block
    key, value = (
        jnp.where(readable[:, None, None], gather(operands.bases, statics, kv, page, slot, layer), 0.0) for kv in (0, 1)
    )

    # --- attend: [kv_heads, rows x group, keys] ---
    query = query.astype(jnp.float32).reshape(row_count, kv_heads, group, problem.k_dim)
    query = query.transpose(1, 0, 2, 3).reshape(kv_heads, row_count * group, problem.k_dim)
    logits = matmul(query, key, (((2,), (2,)), ((0,), (1,)))).reshape(kv_heads, row_count, group, keys)
    scale = statics.scale if operands.scale is None else operands.scale[0]
    qk_scale = (
        jnp.full((kv_heads,), scale * statics.k_scale, jnp.float32)
        if operands.k_scale is None
        else scale * per_head(operands.k_scale, statics.k_scale, kv_heads)
    )
    logits = logits * qk_scale[:, None, None, None]
    softcap = statics.softcap if operands.softcap is None else operands.softcap[0]
    if softcap is not None:
        logits = jnp.tanh(logits / softcap) * softcap
    # An unknown page makes the logits of the rows that see it NaN.
    logits = jnp.where(in_range & ~known, jnp.float32(jnp.nan), logits * LOG2E)
    visible = (n >= low[:, None]) & (n <= jnp.minimum(high, last)[:, None])
    logits = jnp.where(visible[None, :, None, :], logits, -jnp.inf)
    top = jnp.max(logits, axis=-1)
    pivot = jnp.where(top == -jnp.inf, 0.0, top)
    weights = exp2(logits - pivot[..., None])
    total = jnp.where(beyond_table[None, :, None], jnp.float32(jnp.nan), jnp.sum(weights, axis=-1))
    weights = rounded(weights, operands.query.dtype).reshape(kv_heads, row_count * group, keys)
    attention = matmul(weights, value, (((2,), (0,)), ((0,), (1,))))
    attention = attention.reshape(kv_heads, row_count, group, problem.v_dim)
    # [kv_heads, rows, group, ...] -> [rows, heads, ...]
    return Sums(
        *(
            jnp.swapaxes(each, 0, 1).reshape(row_count, problem.heads, *each.shape[3:])
            for each in (attention, top, total)
        )
    )


def matmul(a: jax.Array, b: jax.Array, dimensions: Any) -> jax.Array:
    """Return an fp32 product with full fp32 precision, whatever JAX's global setting says."""
    return lax.dot_general(a, b, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def gather(
    bases: tuple[jax.Array, ...], statics: Statics, kv: int, page: jax.Array, slot: jax.Array, layer: Any
) -> jax.Array:
    """Return fp32 ``[keys, kv_heads, dim]`` of K or V, read from the base by one gather."""
    base = bases[-1 if kv else 0]
    starts, windows = slot_windows(statics, base.shape, kv, page, slot, layer)
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=(1, 2),
        collapsed_slice_dims=tuple(i for i in range(base.ndim) if i not in kept_axes(statics)),
        start_index_map=tuple(range(base.ndim)),
    )
    found = lax.gather(base, starts, dimensions, windows, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    return found.astype(jnp.float32)


def slot_windows(
    statics: Statics, shape: tuple[int, ...], kv: int, page: jax.Array, slot: jax.Array, layer: Any
) -> tuple[jax.Array, tuple[int, ...]]:
    """Return where each slot's ``[kv_heads, dim]`` window starts in a base, ``[slots, axes]``, and its sizes."""
    dim = statics.v_dim if kv else statics.k_dim
    first = {"pages": page, "block": slot, "kv_heads": 0, "kv": kv, "layers": layer, "dim": 0}
    first[PACKED] = statics.k_dim if kv else 0
    axes = statics.layout.axes
    starts = jnp.stack([jnp.broadcast_to(jnp.asarray(first[axis], jnp.int32), page.shape) for axis in axes], axis=1)
    sizes = {"kv_heads": shape[axes.index("kv_heads")], "dim": dim, PACKED: dim}
    return starts, tuple(sizes.get(axis, 1) for axis in axes)


def kept_axes(statics: Statics) -> tuple[int, ...]:
    """Return the axes that a slot's window has whole."""
    return tuple(i for i, axis in enumerate(statics.layout.axes) if axis in ("kv_heads", "dim", PACKED))


def exp2(x: jax.Array) -> jax.Array:
    """Return ``2 ** x`` to one unit in the last place; XLA's own is off by up to six on the CPU."""
    whole = jnp.maximum(jnp.round(x), -200.0)  # -inf stays 0, NaN stays NaN
    return jnp.ldexp(jnp.exp((x - whole) * LN2), whole.astype(jnp.int32))


def per_head(scale: jax.Array | None, number: float, kv_heads: int) -> jax.Array:
    """Return a scale as fp32 ``[kv_heads]``."""
    if scale is None:
        return jnp.full((kv_heads,), number, jnp.float32)
    return jnp.broadcast_to(scale, (kv_heads,)) * jnp.float32(number)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Round fp32 values to a 16-bit dtype, half to even, and keep them as fp32."""
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    if dtype == jnp.float16:
        # reduce_precision flushes fp16's subnormals, which are multiples of 2**-24.
        subnormal = jnp.round(x * 2.0**24) * 2.0**-24
        return jnp.where(jnp.abs(x) < 2.0**-14, subnormal, lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10))
    return x


def add_sink(top: jax.Array, total: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Add one logit (base 2) to the denominator of rows that saw a key: ``(factor of the sums so far, max, total)``."""
    seen = total != 0.0
    raised = jnp.where(seen, jnp.maximum(top, sink), top)
    pivot = jnp.where(raised == -jnp.inf, 0.0, raised)
    factor = exp2(top - pivot)
    return factor, raised, jnp.where(seen, total * factor + exp2(sink - pivot), total)


def round_and_gate(attention: jax.Array, gate: jax.Array | None, empty: jax.Array, out_dtype: Any) -> jax.Array:
    """Round to the output dtype, then multiply by the sigmoid as an unfused gate would; empty rows stay zero."""
    dtype = jnp.dtype(out_dtype)
    result = rounded(attention, dtype)
    if gate is not None:
        factor = rounded(1.0 / (1.0 + jnp.exp(-gate.astype(jnp.float32))), gate.dtype)
        result = rounded(result * jnp.where(empty, 0.0, factor)[..., None], dtype)
    return result.astype(dtype)


def merge(
    outs: jax.Array, lses: jax.Array, sinks: jax.Array | None, gate: jax.Array | None, out_dtype: str
) -> tuple[jax.Array, jax.Array]:
    """Merge ``[parts, tokens, heads, v_dim]`` with natural LSEs, one part after another."""
    top = jnp.max(lses, axis=0)
    pivot = jnp.where(top == -jnp.inf, 0.0, top)
    top = top * LOG2E
    total, attention = jnp.zeros_like(top), jnp.zeros(outs.shape[1:], jnp.float32)
    for part, lse in zip(outs, lses, strict=True):
        weight = exp2((lse - pivot) * LOG2E)
        product = part.astype(jnp.float32) * weight[..., None]
        # A part of weight 0 adds nothing, whatever its memory holds.
        attention, total = attention + jnp.where(weight[..., None] == 0.0, 0.0, product), total + weight
    return finish_rows(Sums(attention, top, total), sinks, gate, out_dtype)


def append(operands: Append, *, statics: Statics, limit: float | None) -> tuple[jax.Array, ...]:
    """Write rows of keys and values into their slots by one scatter each."""
    rows = operands.slot_mapping.shape[0]
    block = operands.bases[0].shape[statics.layout.axes.index("block")]
    layer, layer_exists = statics.existing_layer(
        None if operands.layer is None else operands.layer[0], operands.bases[0]
    )
    position = operands.slot_mapping
    written = (position >= 0) & layer_exists
    # A slot outside the cache goes to a page that does not exist, and the scatter drops it.
    page = jnp.where(written, jnp.minimum(position // block, statics.pages), statics.pages).astype(jnp.int32)
    slot = jnp.where(written, position % block, 0).astype(jnp.int32)
    writes = []
    for kv, source, scale, number in (
        (0, operands.key, operands.k_scale, statics.k_scale), (1, operands.value, operands.v_scale, statics.v_scale)
    ):  # fmt: skip
        base = operands.bases[-1 if kv else 0]
        if limit is not None:
            source = narrow(source, per_head(scale, number, source.shape[1]), limit, base.dtype)
        starts, _ = slot_windows(statics, base.shape, kv, page, slot, layer)
        writes.append((starts, source[:rows]))
    kept = kept_axes(statics)

    def write(bases: Sequence[jax.Array], writes: Sequence[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, ...]:
        bases = list(bases)
        for which, (starts, updates) in zip((0, -1), writes, strict=True):
            bases[which] = scatter(bases[which], starts, updates, kept)
        return tuple(bases)

    if operands.bases[0].dtype.name not in WIDENED_ON_CPU:
        return write(operands.bases, writes)
    return lax.platform_dependent(
        operands.bases, writes, cpu=lambda *given: from_bits(write(*as_bits(given)), operands.bases), default=write
    )


def scatter(base: jax.Array, starts: jax.Array, updates: jax.Array, kept: Sequence[int]) -> jax.Array:
    """Write ``[rows, kv_heads, dim]`` at ``starts``, which no two rows share; one outside the base writes nothing."""
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2),
        inserted_window_dims=tuple(i for i in range(base.ndim) if i not in kept),
        scatter_dims_to_operand_dims=tuple(range(base.ndim)),
    )
    drop = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(base, starts, updates, dimensions, mode=drop, unique_indices=True)


def as_bits(tree: Any) -> Any:
    """Return a tree's floating-point arrays as integers of their size."""
    integers = {1: jnp.int8, 2: jnp.int16, 4: jnp.int32}
    return jax.tree.map(
        lambda x: (
            lax.bitcast_convert_type(x, integers[x.dtype.itemsize]) if jnp.issubdtype(x.dtype, jnp.floating) else x
        ),
        tree,
    )


def from_bits(bits: tuple[jax.Array, ...], like: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Return integers as the floating-point arrays that they are the bits of."""
    return tuple(lax.bitcast_convert_type(each, base.dtype) for each, base in zip(bits, like, strict=True))


def narrow(x: jax.Array, scale: jax.Array, limit: float, dtype: Any) -> jax.Array:
    """Return ``cast(clip(x / scale))``, rounded half to even; clipping first, because casts differ on overflow."""
    x = x.astype(jnp.float32)
    # Divided by the scale alone, XLA would multiply by its reciprocal, which rounds differently.
    quotient = x / jnp.where(jnp.isnan(x), 1.0, scale[None, :, None])
    clipped = jnp.clip(quotient, -limit, limit)
    if dtype == jnp.int8:
        return jnp.where(jnp.isnan(quotient), 0.0, jnp.round(clipped)).astype(jnp.int8)
    return clipped.astype(dtype)
