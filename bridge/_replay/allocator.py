"""Pages of a paged cache: a free list that hands the page freed last out first.

Last in, first out, because that reuses a page at once: a table entry or a kernel that still holds a freed page then
meets another request's data on the very next step, and memory that was never needed stays untouched.
"""

from __future__ import annotations

from collections.abc import Iterable


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free."""


class PagePool:
    """Owns the page ids ``0 .. pages - 1``.

    Attributes:
        pages: pages of the pool.
        peak: most pages that were in use at one time.
        reused: pages handed out that had an owner before.

    Raises:
        ValueError: ``pages`` is negative.
    """

    def __init__(self, pages: int) -> None:
        if pages < 0:
            raise ValueError(f"pages must be at least 0, got {pages}")
        self.pages = pages
        self.peak = 0
        self.reused = 0
        self._free = list(range(pages - 1, -1, -1))
        self._in_use = bytearray(pages)
        self._had_owner = bytearray(pages)

    @property
    def free_pages(self) -> int:
        """Pages that can still be handed out."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages in use."""
        return self.pages - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` pages, or none at all.

        Raises:
            OutOfPagesError: fewer are free.
            ValueError: ``count`` is negative.
        """
        if count < 0:
            raise ValueError(f"count must be at least 0, got {count}")
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages asked for, {len(self._free)} of {self.pages} free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._in_use[page] = 1
            self.reused += self._had_owner[page]
            self._had_owner[page] = 1
        self.peak = max(self.peak, self.used)
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Take pages back, all of them or none.

        Raises:
            ValueError: a page is out of range, not in use (a double free), or named twice.
        """
        returned = list(pages)
        for page in returned:
            if not 0 <= page < self.pages:
                raise ValueError(f"page must be in [0, {self.pages}), got {page}")
            if not self._in_use[page]:
                raise ValueError(f"page {page} is freed twice")
        if len(set(returned)) != len(returned):
            raise ValueError(f"pages must be named once in one free, got {returned}")
        for page in returned:
            self._in_use[page] = 0
            self._free.append(page)
