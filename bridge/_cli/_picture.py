"""Which keys each program of a plan takes, and a picture of it in text.

The cut is the kernels' own (live range, whole granules), redone here in plain Python so that it can be shown without a
GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.text import Text

from swa_plan import Plan

_INDENT = 9
_SHOWN_CHUNKS = 4
_SHADES = (("█", "cyan"), ("▒", "magenta"), ("▓", "green"), ("░", "yellow"))


@dataclass(frozen=True)
class RowTile:
    """Rows that one program packs, and the chunks that its splits take of their keys.

    Attributes:
        windows: ``(first, last)`` key of each row's window; ``(0, -1)`` for a row that sees nothing.
        low: first key of the live range.
        high: last key of it; below ``low`` where nothing is live.
        chunks: ``(first, last)`` key of each split; empty splits have ``last < first``.
    """

    windows: tuple[tuple[int, int], ...]
    low: int
    high: int
    chunks: tuple[tuple[int, int], ...]


def row_tiles(plan: Plan, seq_len: int) -> list[RowTile]:
    """Return the row tiles of a request with ``seq_len`` keys."""
    problem = plan.problem
    tiles = []
    for first_row in range(0, problem.query_len, plan.pack):
        count = min(plan.pack, problem.query_len - first_row)
        first = seq_len - problem.query_len + first_row
        windows = tuple(_window(first + row, problem.window) for row in range(count))
        low = 0 if problem.window is None else max(0, first - problem.window + 1)
        high = min(first + count, problem.capacity) - 1
        tiles.append(RowTile(windows, low, high, tuple(_chunk(plan, low, high, split) for split in range(plan.splits))))
    return tiles


def _window(position: int, window: int | None) -> tuple[int, int]:
    if position < 0:
        return 0, -1
    return (0 if window is None else max(0, position - window + 1)), position


def _chunk(plan: Plan, low: int, high: int, split: int) -> tuple[int, int]:
    """Return the first and last key of a split, as the split kernel computes them."""
    if plan.chunk:
        start = (low // plan.chunk + split) * plan.chunk
        return max(low, start), min(start + plan.chunk - 1, high)
    granules = -(-max(high + 1 - low, 0) // plan.granule)
    size = -(-granules // plan.splits) * plan.granule
    start = low + split * size
    return start, min(start + size - 1, high)


def picture(plan: Plan, seq_len: int, *, columns: int = 80) -> Text:
    """Draw one request: per row tile the windows of its rows, and under them the live range in shades, one a split.

    Args:
        plan: the plan.
        seq_len: keys of the request.
        columns: width of the terminal.
    """
    width = max(16, min(columns, 100) - _INDENT - 1)
    text = Text()
    tiles = row_tiles(plan, seq_len)
    live = [tile for tile in tiles if tile.high >= tile.low]
    text.append(f"seq_len {seq_len}", style="bold")
    if not live:
        text.append("  sees nothing: zeros are written\n", style="dim")
        return text
    low, high = min(tile.low for tile in live), max(tile.high for tile in live)
    text.append(f"  keys {low}..{high} are live", style="dim")
    text.append(f", {low} behind the window\n" if low else "\n", style="dim")

    def column(key: int) -> int:
        return (key - low) * width // (high - low + 1)

    first_row = 0
    for tile in tiles:
        for number, (start, end) in enumerate(tile.windows, first_row):
            if end >= start:
                left, right = column(start), column(end)
                line = " " * left + "├" + "─" * max(0, right - left - 1) + ("┤" if right > left else "")
                text.append(f"  row {number:<3}{line}\n", style="dim")
            else:
                text.append(f"  row {number:<3}sees nothing\n", style="dim")
        first_row += len(tile.windows)
        text.append("  keys   ")
        text.append_text(_bar(tile, column, width))
        text.append(f"\n{' ' * _INDENT}{_chunk_list(tile)}\n", style="dim")
    return text


def _chunk_list(tile: RowTile) -> str:
    taken = [f"{start}..{end}" for start, end in tile.chunks if end >= start]
    idle = len(tile.chunks) - len(taken)
    if len(taken) > _SHOWN_CHUNKS:
        taken[_SHOWN_CHUNKS - 1 : -1] = ["..."]
    return " | ".join(taken) + (f"  ({idle} idle)" if idle else "")


def _bar(tile: RowTile, column: Callable[[int], int], width: int) -> Text:
    """Shade each column by the split that takes the key at its left edge."""
    cells: list[tuple[str, str]] = [(" ", "")] * width
    for split, (start, end) in enumerate(tile.chunks):
        if end >= start:
            for place in range(column(start), max(column(start), column(end)) + 1):
                cells[place] = _SHADES[split % len(_SHADES)]
    bar = Text()
    for character, style in cells:
        bar.append(character, style=style)
    bar.rstrip()
    return bar
