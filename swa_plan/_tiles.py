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
    """Return the tile for a packing and split, within the device's shared memory."""
    rows = max(16, next_power_of_two(pack * min(problem.group, 64)))
    programs = problem.max_requests * ceil_div(problem.query_len, pack) * problem.kv_heads * splits
    if invariant:
        tile = Tile(32, 2, 3) if rows <= 32 else Tile(32, 4, 3)
    elif rows > 16:
        tile = Tile(64, 4, 2) if rows <= 32 else Tile(32, 4, 3)
    elif programs >= 8 * device.num_sms:
        tile = Tile(16, 2, 4)
    else:
        tile = Tile(32, 2, 3)
    while shared_bytes(problem, rows, tile) > device.shared_memory and (tile.stages > 1 or tile.keys > 16):
        tile = (
            tile._replace(stages=tile.stages - 1) if tile.stages > 2 else Tile(max(16, tile.keys // 2), tile.warps, 2)
        )
        if tile.keys == 16 and tile.stages == 2 and shared_bytes(problem, rows, tile) > device.shared_memory:
            tile = tile._replace(stages=1)
    return tile


def shared_bytes(problem: Problem, rows: int, tile: Tile) -> int:
    """Return an upper estimate of a program's shared memory: query, pipelined keys and values, and a converted copy."""
    k_width, v_width = (piece * pieces for piece, pieces in (head_pieces(problem.k_dim), head_pieces(problem.v_dim)))
    assert problem.cache_dtype is not None
    stored, computed = ITEM_BYTES[problem.cache_dtype], ITEM_BYTES[problem.dtype]
    buffers = max(1, tile.stages - 1)
    keys = tile.keys * (k_width + v_width)
    return rows * k_width * computed + keys * stored * buffers + (keys * computed if stored != computed else 0)
