"""The plain-operations backend (``cpu``): the same meaning and rounding points in vectorised torch operations.

Visible keys are gathered per request and multiplied in fp32; a few requests at a time, so that memory stays bounded.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from swa_torch._call import DecodeCall

LOG2E = math.log2(math.e)
GATHER_BYTES = 64 << 20
"""Gathered keys and values of the requests that are handled together stay below this."""

FINITE_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
"""Largest magnitudes that ``append`` stores in a quantised cache; others are not clipped."""


class Rows(NamedTuple):
    """Which rows a call computes, as ``[requests, query_len]`` grids; ``live`` marks the cells that are rows."""

    token: torch.Tensor
    live: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


def decode(call: DecodeCall) -> None:
    """Run one call; rows that see nothing are zero, rows of a request over its bound are NaN."""
    call.output.zero_()
    if call.lse is not None:
        call.lse.fill_(-torch.inf)
    if not call.query.shape[0] or not call.block_table.shape[0]:
        return
    rows, over_bound = find_rows(call)
    for token in over_bound:
        call.output[token] = torch.nan
        if call.lse is not None:
            call.lse[token] = torch.nan
    if call.plan.batch_invariant:
        # One row at a time: matrix products of a shape that only the row itself decides.
        for request, row in rows.live.nonzero().tolist():
            cells = Rows(*(grid[request : request + 1, row : row + 1] for grid in rows))
            attend(call, slice(request, request + 1), cells)
        return
    longest = int((rows.high - rows.low + 1).clamp(min=0).amax())
    problem = call.plan.problem
    row_bytes = max(1, (longest + problem.query_len) * problem.kv_heads * (problem.k_dim + problem.v_dim) * 8)
    step = max(1, GATHER_BYTES // row_bytes)
    for start in range(0, rows.token.shape[0], step):
        part = slice(start, start + step)
        attend(call, part, Rows(*(grid[part] for grid in rows)))


def find_rows(call: DecodeCall) -> tuple[Rows, list[slice]]:
    """Return the rows to compute, and the tokens of requests with more rows than the bound."""
    tokens = call.query.shape[0]
    requests = call.seq_lens.shape[0]
    problem = call.plan.problem
    if call.cu_query_lens is None:
        first = torch.arange(requests) * problem.query_len
        count = torch.full((requests,), problem.query_len)
    else:
        edges = call.cu_query_lens.long().clamp(0, tokens)
        first, count = edges[:-1], (edges[1:] - edges[:-1]).clamp(min=0)
    fits = count <= problem.query_len
    over_bound = [slice(int(a), int(a + n)) for a, n in zip(first[~fits], count[~fits], strict=True)]
    index = torch.arange(problem.query_len)
    live = fits[:, None] & (index < count[:, None])
    position = call.seq_lens.long().clamp(min=0)[:, None] - count[:, None] + index
    low = torch.zeros_like(position) if problem.window is None else (position - problem.window + 1).clamp(min=0)
    high = position
    if call.kv_start is not None:
        low = torch.maximum(low, call.kv_start.long()[:, None])
    if call.kv_end is not None:
        high = torch.minimum(high, call.kv_end.long()[:, None] - 1)
    low, high = torch.where(live, low, 0), torch.where(live, high, -1)
    token = torch.where(live, first[:, None] + index, 0)
    return Rows(token, live, low, high), over_bound


def attend(call: DecodeCall, requests: slice, rows: Rows) -> None:
    """Compute the rows of a few requests and write them."""
    problem = call.plan.problem
    dtype, exact = call.query.dtype, accumulate_dtype()
    kv_heads, group = problem.kv_heads, problem.group

    # --- ranges: the keys that the rows of each request see ---
    capacity = problem.block * call.block_table.shape[1]
    sees = rows.live & (rows.low <= rows.high)
    beyond_table = sees & (rows.high >= capacity)
    far = torch.iinfo(torch.int64).max
    low = torch.where(sees, rows.low, far).amin(1)
    high = torch.where(sees, rows.high, -1).amax(1).clamp(max=capacity - 1)
    low = torch.minimum(low, high + 1)
    n = low[:, None] + torch.arange(int((high - low + 1).amax().clamp(min=0)))

    # --- load keys and values; nothing else of table and cache is read ---
    readable = n <= high[:, None]
    column = torch.where(readable, n // problem.block, 0)
    page = call.block_table[requests].gather(1, column).long() if capacity else column
    known = (page >= 0) & (page < call.key_cache.shape[0])
    unknown = readable & ~known
    readable = readable & known
    page, slot = torch.where(readable, page, 0), n % problem.block
    key = gather(call.key_cache, page, slot, readable, dtype).to(exact)
    value = gather(call.value_cache, page, slot, readable, dtype).to(exact)

    # --- attend: [requests, kv_heads, rows x group, keys] ---
    requests_here, row_count = rows.token.shape
    query = call.query[rows.token].view(requests_here, row_count, kv_heads, group, problem.k_dim)
    query = query.permute(0, 2, 1, 3, 4).reshape(requests_here, kv_heads, row_count * group, problem.k_dim)
    logits = (query.to(exact) @ key.permute(0, 2, 3, 1)).float()
    logits = logits.view(requests_here, kv_heads, row_count, group, -1)
    qk_scale = torch.tensor(call.scale * call.k_scale_number, dtype=torch.float32)
    if call.k_scale is not None:
        qk_scale = qk_scale * call.k_scale.reshape(-1, 1, 1, 1)
    logits = logits * qk_scale
    if call.softcap is not None:
        logits = torch.tanh(logits / call.softcap) * call.softcap
    logits = logits.masked_fill(unknown[:, None, None, None, :], torch.nan) * LOG2E
    visible = (n[:, None, :] >= rows.low[..., None]) & (n[:, None, :] <= rows.high[..., None])
    logits = logits.masked_fill(~(visible & sees[..., None])[:, None, :, None, :], -torch.inf)
    top = (
        logits.amax(-1, keepdim=True) if logits.shape[-1] else torch.full_like(logits.sum(-1, keepdim=True), -torch.inf)
    )
    pivot = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp2(logits - pivot)
    total = weights.sum(-1, keepdim=True)
    total = torch.where(beyond_table[:, None, :, None, None], torch.nan, total)
    weights = weights.to(dtype).to(exact).view(requests_here, kv_heads, row_count * group, -1)
    attention = (weights @ value.permute(0, 2, 1, 3)).float()
    attention = attention.view(requests_here, kv_heads, row_count, group, problem.v_dim)
    if call.sinks is not None:
        sink = call.sinks.float().view(1, kv_heads, 1, group, 1) * LOG2E
        factor, top, total = add_sink(top, total, sink)
        attention = attention * factor
    attention = torch.where(total == 0, 0.0, attention / total) * call.v_scale_number
    if call.v_scale is not None:
        attention = attention * call.v_scale.reshape(-1, 1, 1, 1)

    # --- store ---
    live, token = rows.live, rows.token[rows.live]
    attention = attention.permute(0, 2, 1, 3, 4)[live].flatten(1, 2)
    total, top = total.permute(0, 2, 1, 3, 4)[live].flatten(1), top.permute(0, 2, 1, 3, 4)[live].flatten(1)
    gate = None if call.gate is None else call.gate[token]
    call.output[token] = round_and_gate(attention, gate, total == 0, call.output.dtype)
    if call.lse is not None:
        call.lse[token] = torch.where(total == 0, -torch.inf, (top + torch.log2(total)) / LOG2E)


def add_sink(
    top: torch.Tensor, total: torch.Tensor, sink: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add one logit (base 2) to the denominator of rows that saw a key: ``(factor of the sums so far, max, total)``."""
    raised = torch.where(total == 0, top, torch.maximum(top, sink))
    pivot = torch.where(raised == -torch.inf, 0.0, raised)
    factor = torch.exp2(torch.where(top == -torch.inf, pivot, top) - pivot)
    return factor, raised, torch.where(total == 0, total, total * factor + torch.exp2(sink - pivot))


def accumulate_dtype() -> torch.dtype:
    """Return the dtype of matrix products: fp32, or float64 where torch was told that fp32 products may be rounded."""
    try:
        exact = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # torch refuses to name one precision when its settings differ from each other
        exact = False
    mkldnn = getattr(torch.backends.mkldnn, "matmul", None)
    exact = exact and getattr(mkldnn, "fp32_precision", "none") in ("ieee", "none")
    return torch.float32 if exact else torch.float64


def gather(
    cache: torch.Tensor, page: torch.Tensor, slot: torch.Tensor, readable: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``cache[page, slot]`` in the compute dtype, zero where it must not be read."""
    if not cache.shape[0]:
        return torch.zeros(*page.shape, *cache.shape[2:], dtype=dtype)
    # fp8 tensors cannot be indexed or masked on every torch version; their bytes can.
    rows = cache.view(torch.uint8)[page, slot].view(cache.dtype) if cache.itemsize == 1 else cache[page, slot]
    return torch.where(readable[..., None, None], rows.to(dtype), torch.zeros((), dtype=dtype))


def round_and_gate(
    attention: torch.Tensor, gate: torch.Tensor | None, empty: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Round to the output dtype, then multiply by the sigmoid as an unfused gate would; empty rows stay zero."""
    rounded = attention.to(out_dtype)
    if gate is None:
        return rounded
    factor = torch.where(empty, 0.0, torch.sigmoid(gate.float()).to(gate.dtype).float())
    return (rounded.float() * factor[..., None]).to(out_dtype)


def merge(
    outs: torch.Tensor,
    lses: torch.Tensor,
    sinks: torch.Tensor | None,
    gate: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge ``[parts, tokens, heads, v_dim]`` with natural LSEs ``[parts, tokens, heads]``."""
    top = lses.amax(0)
    pivot = torch.where(top == -torch.inf, 0.0, top)
    total, attention = torch.zeros_like(top), torch.zeros_like(outs[0], dtype=torch.float32)
    # One after another, so that parts which saw nothing change no bit wherever they stand.
    for part, part_lse in zip(outs, lses, strict=True):
        weight = torch.exp2((part_lse - pivot) * LOG2E)
        total = total + weight
        attention = attention + torch.where(weight[..., None] == 0, 0.0, part.float() * weight[..., None])
    top = top * LOG2E
    if sinks is not None:
        factor, top, total = add_sink(top, total, sinks.float() * LOG2E)
        attention = attention * factor[..., None]
    empty = total == 0
    attention = torch.where(empty[..., None], 0.0, attention / total[..., None])
    output.copy_(round_and_gate(attention, gate, empty, output.dtype))
    lse.copy_(torch.where(empty, -torch.inf, (top + torch.log2(total)) / LOG2E))


def quantise(x: torch.Tensor, scale: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """Return ``cast(clip(x / scale))`` of ``[rows, kv_heads, dim]``, rounding half to even; NaN stays NaN (int8: 0)."""
    # A tensor, because torch multiplies by the reciprocal of a number on a GPU.
    divisor = scale.reshape(-1, 1) if isinstance(scale, torch.Tensor) else torch.full((), scale, device=x.device)
    quotient = x.float() / divisor
    limit = FINITE_MAX.get(dtype, math.inf)
    clipped = quotient.clamp(-limit, limit)
    if dtype == torch.int8:
        return clipped.round().nan_to_num(0.0).to(dtype)
    return clipped.to(dtype)


def append(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping:
    torch.Tensor,
    k_scale: torch.Tensor | float | None, v_scale: torch.Tensor | float | None,
) -> None:  # fmt: skip
    """Write rows into their slots; scales are None where nothing is divided."""
    pages, block = key_cache.shape[:2]
    rows = min(slot_mapping.shape[0], key.shape[0])
    slot = slot_mapping[:rows].long()
    kept = ((slot >= 0) & (slot < pages * block)).nonzero()[:, 0]
    slot = slot[kept]
    for cache, source, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
        stored = source[kept]
        if scale is not None:
            stored = quantise(stored, scale, cache.dtype)
        target = cache.view(torch.uint8) if cache.itemsize == 1 else cache
        target[slot // block, slot % block] = stored.view(target.dtype)
