"""Checks of the data itself: lengths, tables and rows. They copy it to the host, so they synchronise."""

from __future__ import annotations

import numpy as np
import torch

from swa_plan._checks import check_integer, check_window
from swa_torch._cache import Cache, as_paged_cache
from swa_torch._validate import INDEX_DTYPES, check_block_table, check_tensor


def check_inputs(
    cache: Cache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    window: int | None,
    query_len: int = 1,
    cu_query_lens: torch.Tensor | None = None,
    kv_start: torch.Tensor | None = None,
    kv_end: torch.Tensor | None = None,
    tokens: int | None = None,
) -> None:
    """Check what the kernels answer with NaN rows: unknown pages, positions beyond the table, too many rows.

    Only table entries that a visible key needs are looked at. Synchronises with the device.

    Args:
        cache: the cache that the table points into.
        block_table: ``[requests, max_blocks]``.
        seq_lens: ``[requests]``.
        window: keys a row sees, its own included; None for full causal attention.
        query_len: rows of each request, or their upper bound.
        cu_query_lens: ``[requests + 1]`` cumulative rows.
        kv_start: ``[requests]`` first visible positions.
        kv_end: ``[requests]`` ends of the visible positions.
        tokens: query rows of the call, to check ``cu_query_lens`` against.

    Raises:
        TypeError: kinds or dtypes.
        ValueError: shapes, or naming the request, the rule and the value.
    """
    check_window(window)
    check_integer("query_len", query_len, minimum=1)
    paged = as_paged_cache(cache)
    check_block_table(block_table, like=block_table, unit_stride=False)
    requests = block_table.shape[0]
    for name, tensor, size in (
        ("seq_lens", seq_lens, requests), ("cu_query_lens", cu_query_lens, requests + 1),
        ("kv_start", kv_start, requests), ("kv_end", kv_end, requests),
    ):  # fmt: skip
        if tensor is not None or name == "seq_lens":
            check_tensor(name, tensor, INDEX_DTYPES, (size,), like=block_table, unit_stride=False)
    table, lengths = _on_host(block_table), np.maximum(_on_host(seq_lens), 0)
    starts = None if kv_start is None else _on_host(kv_start)
    ends = None if kv_end is None else _on_host(kv_end)
    rows = np.full(len(lengths), query_len)
    if cu_query_lens is not None:
        edges = _on_host(cu_query_lens)
        _check_edges(edges, query_len, tokens)
        rows = np.diff(edges)
    for request, length in enumerate(lengths.tolist()):
        count = int(rows[request])
        low = 0 if window is None else max(0, length - count - window + 1)
        high = length - 1
        if starts is not None:
            low = max(low, int(starts[request]))
        if ends is not None:
            high = min(high, int(ends[request]) - 1)
        if not count or low > high:
            continue
        capacity = table.shape[1] * paged.block
        if high >= capacity:
            raise ValueError(
                f"block_table must reach every visible position: request {request} sees position {high}, "
                f"got {table.shape[1]} blocks of {paged.block} positions"
            )
        columns = np.arange(low // paged.block, high // paged.block + 1)
        for column, page in zip(columns, table[request, columns], strict=True):
            if not 0 <= page < paged.pages:
                raise ValueError(
                    f"block_table must hold pages in [0, {paged.pages}): request {request}, block {column}, got {page}"
                )


def _check_edges(edges: np.ndarray, query_len: int, tokens: int | None) -> None:
    if edges[0] != 0:
        raise ValueError(f"cu_query_lens must start at 0, got {edges[0]}")
    for request, count in enumerate(np.diff(edges).tolist()):
        if count < 0:
            raise ValueError(f"cu_query_lens must not decrease: request {request} has {count} rows")
        if count > query_len:
            raise ValueError(f"query_len={query_len} bounds the rows of each request: request {request} has {count}")
    if tokens is not None and edges[-1] > tokens:
        raise ValueError(f"cu_query_lens must end within the query's {tokens} tokens, got {edges[-1]}")


def _on_host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.int64).numpy()
