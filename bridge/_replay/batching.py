"""Continuous batching on the host: which request sits in which row, and which pages its window still needs.

Rows ``0 .. running - 1`` are always the occupied ones, so that a step is padded to the next bucket and no further. A
request holds the pages of the keys that its next rows can see and no others: pages that fall behind the window are
freed at the end of the step that moved it, and their table entries become -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bridge._replay.allocator import PagePool
from bridge._replay.trace import Request

NO_PAGE = -1


def bucket_size(requests: int, max_batch: int) -> int:
    """Return the padded batch: 1, 2, 4, 8, then multiples of 8, so that few plans (and graphs) serve every batch.

    For runners to which one more padded batch is cheap.
    """
    padded = 1 << max(0, requests - 1).bit_length() if requests <= 8 else -(-requests // 8) * 8
    return min(padded, max_batch)


def pages_per_request(window: int | None, query_len: int, block: int, max_blocks: int) -> int:
    """Return the most pages that one request holds: ``window + query_len - 1`` keys at the worst offset."""
    if window is None:
        return max_blocks
    return min(max_blocks, (window + query_len - 3) // block + 2)


@dataclass
class Running:
    """A request in the batch.

    Attributes:
        request: the request.
        length: tokens whose keys and values are final; the next step's first row has this position.
        generated: tokens accepted so far.
        first_block: first table column that still holds a page.
        end_block: one past the last column that does.
    """

    request: Request
    length: int
    first_block: int
    end_block: int
    generated: int = 0

    @property
    def remaining(self) -> int:
        """Tokens still to generate."""
        return self.request.generated - self.generated


class Batch:
    """The running requests, their block table and their pages.

    Attributes:
        table: int32 ``[max_batch, max_blocks]`` on the host, -1 where there is no page.
        running: requests by row.
        dirty_rows: rows of the table that changed since they were last cleared.
    """

    def __init__(
        self, pool: PagePool, *, max_batch: int, max_blocks: int, block: int, window: int | None, query_len: int
    ) -> None:
        self.pool = pool
        self.block = block
        self.window = window
        self.query_len = query_len
        self.max_batch = max_batch
        self.table = np.full((max_batch, max_blocks), NO_PAGE, np.int32)
        self.running: list[Running] = []
        self.dirty_rows: set[int] = set()

    @property
    def full(self) -> bool:
        """Whether no row is left."""
        return len(self.running) == self.max_batch

    def admit(self, request: Request) -> np.ndarray:
        """Give a request the next row and the pages of the context that its first row sees.

        Returns:
            The slots (page * block + offset) that its prefill has to fill: visible positions only.
        """
        row = len(self.running)
        first = self._first_visible(request.context)
        entry = Running(request, request.context, first // self.block, first // self.block)
        self.running.append(entry)
        self._extend(row, request.context)
        return self._slots(row, first, request.context)

    def extend(self) -> None:
        """Allocate the pages of every request's next ``query_len`` tokens."""
        for row, entry in enumerate(self.running):
            self._extend(row, entry.length + self.query_len)

    def slot_mapping(self, bucket: int) -> np.ndarray:
        """Return int32 ``[bucket * query_len]``: where the next tokens go; -1 for padding rows."""
        slots = np.full((bucket, self.query_len), NO_PAGE, np.int32)
        for row, entry in enumerate(self.running):
            slots[row] = self._slots(row, entry.length, entry.length + self.query_len)
        return slots.reshape(-1)

    def seq_lens(self, bucket: int) -> np.ndarray:
        """Return int32 ``[bucket]``: keys in the cache, the next tokens included; 0 for padding rows."""
        lengths = np.zeros(bucket, np.int32)
        lengths[: len(self.running)] = [entry.length + self.query_len for entry in self.running]
        return lengths

    def accept(self, accepted: np.ndarray) -> tuple[list[Request], list[int]]:
        """Advance every request by the tokens accepted of it, and let go of what is no longer needed.

        Args:
            accepted: tokens per running row, 1 to ``query_len``; a request takes no more than it has left.

        Returns:
            The requests that finished and the pages that were freed.
        """
        freed: list[int] = []
        finished: list[Request] = []
        for row in range(len(self.running) - 1, -1, -1):
            entry = self.running[row]
            count = min(int(accepted[row]), entry.remaining)
            entry.length += count
            entry.generated += count
            if entry.remaining:
                freed += self._release(row, self._first_visible(entry.length) // self.block)
            else:
                freed += self._release(row, entry.end_block)
                finished.append(entry.request)
                self._close_gap(row)
        self.pool.free(freed)
        return finished, freed

    def pages_of(self, row: int) -> tuple[int, np.ndarray]:
        """Return a row's first live column and its pages from there."""
        entry = self.running[row]
        return entry.first_block, self.table[row, entry.first_block : entry.end_block].copy()

    def visible_keys(self) -> int:
        """Return the keys that the next step reads: each request's live range once."""
        return sum(entry.length + self.query_len - self._first_visible(entry.length) for entry in self.running)

    def full_keys(self) -> int:
        """Return the keys that full-context attention would read."""
        return sum(entry.length + self.query_len for entry in self.running)

    def full_pages(self) -> int:
        """Return the pages that a cache without a window would hold now."""
        return sum(-(-(entry.length + self.query_len) // self.block) for entry in self.running)

    def _first_visible(self, position: int) -> int:
        return 0 if self.window is None else max(0, position - self.window + 1)

    def _extend(self, row: int, length: int) -> None:
        entry = self.running[row]
        end = -(-length // self.block)
        if end > entry.end_block:
            self.table[row, entry.end_block : end] = self.pool.allocate(end - entry.end_block)
            entry.end_block = end
            self.dirty_rows.add(row)

    def _release(self, row: int, first_block: int) -> list[int]:
        entry = self.running[row]
        first_block = min(first_block, entry.end_block)
        pages = self.table[row, entry.first_block : first_block].tolist()
        if pages:
            self.table[row, entry.first_block : first_block] = NO_PAGE
            self.dirty_rows.add(row)
        entry.first_block = first_block
        return pages

    def _close_gap(self, row: int) -> None:
        """Move the last request into a row that became free."""
        last = len(self.running) - 1
        if row != last:
            self.running[row] = self.running[last]
            self.table[row] = self.table[last]
            self.table[last] = NO_PAGE
            self.dirty_rows.update((row, last))
        self.running.pop()

    def _slots(self, row: int, start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        return (self.table[row, positions // self.block] * self.block + positions % self.block).astype(np.int32)
