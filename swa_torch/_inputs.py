"""Checks of the data itself: lengths, tables and rows. They copy it to the host, so they synchronise."""

from __future__ import annotations

import numpy as np
import torch

from swa_plan._checks import check_integer, check_window
from swa_plan._data import check_data
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
    check_data(
        _on_host(block_table), _on_host(seq_lens),
        pages=paged.pages, block=paged.block, window=window, query_len=query_len, tokens=tokens,
        cu_query_lens=None if cu_query_lens is None else _on_host(cu_query_lens),
        kv_start=None if kv_start is None else _on_host(kv_start),
        kv_end=None if kv_end is None else _on_host(kv_end),
    )  # fmt: skip


def _on_host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.int64).numpy()
