"""Integer arithmetic of tiles, shared by the planner and by both frameworks' launch code."""

from __future__ import annotations

import functools


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient rounded up."""
    return -(-numerator // denominator)


def next_power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least ``value``."""
    return 1 << max(0, value - 1).bit_length()


@functools.cache
def head_pieces(dim: int) -> tuple[int, int]:
    """Cut a head size into equal power-of-two pieces: ``(piece, pieces)``.

    Triton and Pallas need power-of-two tiles. Equal pieces let one gather address serve them all; 192 is 3 x 64 and
    wastes nothing, where padding to 256 would waste a quarter. Of the cuts into at most four pieces of at most 64, the
    one that pads least is taken, then the one with the fewest pieces.
    """
    cuts = [(next_power_of_two(ceil_div(dim, pieces)), pieces) for pieces in (1, 2, 3, 4)]
    return min((cut for cut in cuts if cut[0] <= 64), key=lambda cut: (cut[0] * cut[1], cut[1]))
