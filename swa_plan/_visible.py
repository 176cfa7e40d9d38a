"""Which keys each query row sees and where they lie: one walk for the reference, the tolerance rule and the cases.

It follows the semantics of the contract to the letter and dereferences a table entry only where a visible key needs it,
because the other entries may hold anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Row:
    """One query row and the keys ``low <= position < high`` that it sees.

    Attributes:
        request: the request that the row belongs to.
        row: its number within the request.
        token: its number in ``query``.
        position: its own position in the sequence; negative where the sequence is shorter than its rows.
        low: first visible position.
        high: one past the last; ``high == low`` where nothing is visible.
        pages: int64 ``[keys]``, page of each visible key that can be read.
        offsets: int64 ``[keys]``, slot within that page.
        is_nan: a visible key cannot be read, or the request has more rows than its bound: the row's result is NaN.
    """

    request: int
    row: int
    token: int
    position: int
    low: int
    high: int
    pages: np.ndarray
    offsets: np.ndarray
    is_nan: bool

    @property
    def is_keyless(self) -> bool:
        """Whether the row sees nothing, so that its output is 0 and its LSE -inf."""
        return not self.is_nan and self.low == self.high


def visible_rows(
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    *,
    pages: int,
    block: int,
    window: int | None,
    query_len: int,
    cu_query_lens: np.ndarray | None = None,
    kv_start: np.ndarray | None = None,
    kv_end: np.ndarray | None = None,
) -> Iterator[Row]:
    """Yield every row that belongs to a request, in order; padding rows after ``cu_query_lens[-1]`` are not yielded.

    Args:
        block_table: integers ``[requests, max_blocks]``.
        seq_lens: integers ``[requests]``; negative counts as 0.
        pages: pages of the cache; a page id outside ``[0, pages)`` makes the rows that see it NaN.
        block: slots in a page.
        window: keys a row sees, its own included, or None.
        query_len: rows of each request, or their upper bound where ``cu_query_lens`` is given.
        cu_query_lens: integers ``[requests + 1]``, or None for uniform rows.
        kv_start: first visible position of each request ``[requests]``, or None.
        kv_end: one past the last, likewise.
    """
    nothing = np.zeros(0, np.int64)
    for request, entries in enumerate(block_table):
        seq_len = max(int(seq_lens[request]), 0)
        if cu_query_lens is None:
            first, rows = request * query_len, query_len
        else:
            first, rows = int(cu_query_lens[request]), int(cu_query_lens[request + 1]) - int(cu_query_lens[request])
        for row in range(rows):
            position = seq_len - rows + row
            if rows > query_len:
                yield Row(request, row, first + row, position, 0, 0, nothing, nothing, is_nan=True)
                continue
            low = 0 if window is None else max(0, position - window + 1)
            high = position + 1
            if kv_start is not None:
                low = max(low, int(kv_start[request]))
            if kv_end is not None:
                high = min(high, int(kv_end[request]))
            high = max(low, high)
            keys = np.arange(low, max(low, min(high, len(entries) * block)), dtype=np.int64)
            key_pages = entries[keys // block].astype(np.int64)
            readable = (key_pages >= 0) & (key_pages < pages)
            is_nan = len(keys) < high - low or not readable.all()
            yield Row(
                request, row, first + row, position, low, high, key_pages[readable], keys[readable] % block, is_nan
            )
