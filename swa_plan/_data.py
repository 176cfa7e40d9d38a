"""Checks of a step's data on the host: what the kernels answer with NaN rows is an error that names the request."""

from __future__ import annotations

import numpy as np


def check_data(
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    *,
    pages: int,
    block: int,
    window: int | None,
    query_len: int,
    tokens: int | None = None,
    cu_query_lens: np.ndarray | None = None,
    kv_start: np.ndarray | None = None,
    kv_end: np.ndarray | None = None,
) -> None:
    """Look for unknown pages, positions beyond the table and too many rows; shapes have been checked.

    Only table entries that a visible key needs are looked at.

    Raises:
        ValueError: naming the request, the rule and the value.
    """
    lengths = np.maximum(seq_lens, 0)
    rows = np.full(len(lengths), query_len)
    if cu_query_lens is not None:
        _check_edges(cu_query_lens, query_len, tokens)
        rows = np.diff(cu_query_lens)
    for request, length in enumerate(lengths.tolist()):
        count = int(rows[request])
        low = 0 if window is None else max(0, length - count - window + 1)
        high = length - 1
        if kv_start is not None:
            low = max(low, int(kv_start[request]))
        if kv_end is not None:
            high = min(high, int(kv_end[request]) - 1)
        if not count or low > high:
            continue
        capacity = block_table.shape[1] * block
        if high >= capacity:
            raise ValueError(
                f"block_table must reach every visible position: request {request} sees position {high}, "
                f"got {block_table.shape[1]} blocks of {block} positions"
            )
        columns = np.arange(low // block, high // block + 1)
        for column, page in zip(columns, block_table[request, columns], strict=True):
            if not 0 <= page < pages:
                raise ValueError(
                    f"block_table must hold pages in [0, {pages}): request {request}, block {column}, got {page}"
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
