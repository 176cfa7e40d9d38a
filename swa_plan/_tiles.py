"""Tile, warps and pipeline depth of the portable kernel.

Measured on an H200 (bf16, head size 192, window 512); shared-memory limits of smaller chips shrink the pipeline.
"""

from __future__ import annotations

from typing import NamedTuple

from swa_plan._device import DeviceProfile
from swa_plan._problem import ITEM_BYTES, Problem
from swa_plan._shapes import ceil_div, head_pieces, next_power_of_two


class Tile(NamedTuple):
    """Keys of a tile, warps of a program and stages of its pipeline."""

    keys: int
    warps: int
    stages: int


def choose_tile(problem: Problem, pack: int, splits: int, device: DeviceProfile, *, invariant: bool = False) -> Tile:
    """Return the tile for a packing and split, within the device's shared memory.

    Few programs want one wide tile each, whose loads are all in flight at once; a GPU that is full many times over wants
    many small programs (4.32 TB/s of 4.48 at 2048 programs).
    """
    rows = max(16, next_power_of_two(pack * min(problem.group, 64)))
    row_tiles = problem.max_requests * ceil_div(problem.query_len, pack)
    programs = row_tiles * problem.kv_heads * splits
    chunk = ceil_div(problem.row_keys + pack - 1, splits)
    if rows > 32:
        tile = Tile(32, 8, 3)  # with 4 warps the accumulators spill on sm_80 and sm_120
    elif rows > 16:
        tile = Tile(64, 4, 3)
    elif invariant or programs < 2 * device.num_sms:
        tile = Tile(128, 4, 2)
    elif programs < 8 * device.num_sms:
        tile = Tile(64, 2, 2)
    else:
        tile = Tile(16, 2, 4)
    if not invariant:
        tile = tile._replace(keys=min(tile.keys, max(16, next_power_of_two(chunk))))
    for smaller in (tile, *_shrunk(tile)):
        if shared_bytes(problem, rows, smaller) <= device.shared_memory:
            return smaller
    return Tile(16, tile.warps, 1)


def _shrunk(tile: Tile) -> list[Tile]:
    """Return ever smaller tiles: a shallower pipeline first, then fewer keys."""
    shallower = [tile._replace(stages=stages) for stages in range(tile.stages - 1, 1, -1)]
    narrower = [Tile(keys, tile.warps, 2) for keys in (64, 32, 16) if keys < tile.keys]
    return shallower + narrower


def shared_bytes(problem: Problem, rows: int, tile: Tile) -> int:
    """Return an upper estimate of a program's shared memory: query, pipelined keys and values, and a converted copy."""
    k_width, v_width = (piece * pieces for piece, pieces in (head_pieces(problem.k_dim), head_pieces(problem.v_dim)))
    assert problem.cache_dtype is not None
    stored, computed = ITEM_BYTES[problem.cache_dtype], ITEM_BYTES[problem.dtype]
    buffers = max(1, tile.stages - 1)
    keys = tile.keys * (k_width + v_width)
    return rows * k_width * computed + keys * stored * buffers + (keys * computed if stored != computed else 0)
