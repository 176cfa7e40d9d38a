"""Checks of the data itself: lengths, tables and rows. They copy it to the host, so they synchronise."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from swa_pallas._cache import Cache, as_paged_cache
from swa_pallas._validate import INDEX_DTYPES, check_array, check_block_table
from swa_plan._checks import check_integer, check_window
from swa_plan._data import check_data


def check_inputs(
    cache: Cache,
    block_table: jax.Array,
    seq_lens: jax.Array,
    *,
    window: int | None,
    query_len: int = 1,
    cu_query_lens: jax.Array | None = None,
    kv_start: jax.Array | None = None,
    kv_end: jax.Array | None = None,
    tokens: int | None = None,
) -> None:
    """Check what the kernels answer with NaN rows: unknown pages, positions beyond the table, too many rows.

    Only table entries that a visible key needs are looked at. Synchronises with the device; not for traced arrays.

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
        TypeError: kinds or dtypes, or a traced array.
        ValueError: shapes, or naming the request, the rule and the value.
    """
    check_window(window)
    check_integer("query_len", query_len, minimum=1)
    paged = as_paged_cache(cache)
    check_block_table(block_table)
    requests = block_table.shape[0]
    for name, array, size in (
        ("seq_lens", seq_lens, requests), ("cu_query_lens", cu_query_lens, requests + 1),
        ("kv_start", kv_start, requests), ("kv_end", kv_end, requests),
    ):  # fmt: skip
        if array is not None or name == "seq_lens":
            check_array(name, array, INDEX_DTYPES, (size,))
    check_data(
        _on_host("block_table", block_table), _on_host("seq_lens", seq_lens),
        pages=paged.pages, block=paged.block, window=window, query_len=query_len, tokens=tokens,
        cu_query_lens=None if cu_query_lens is None else _on_host("cu_query_lens", cu_query_lens),
        kv_start=None if kv_start is None else _on_host("kv_start", kv_start),
        kv_end=None if kv_end is None else _on_host("kv_end", kv_end),
    )  # fmt: skip


def _on_host(name: str, array: Any) -> np.ndarray:
    if isinstance(array, Tracer):
        raise TypeError(f"{name} must be a concrete array, whose data can be read, got a traced {array.aval}")
    return np.asarray(array).astype(np.int64)
