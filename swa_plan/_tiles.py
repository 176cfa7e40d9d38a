"""Tile, warps and pipeline depth of the portable kernel.

Measured on an H200 (bf16, head size 192, window 512); shared-memory limits of smaller chips shrink the pipeline.
"""

from __future__ import annotations

from typing import NamedTuple

from swa_plan._device import DeviceProfile
from swa_plan._problem import ITEM_BYTES, Problem
from swa_plan._shapes import ceil_div, head_pieces, next_power_of_two

_MANY_WAVES = 8
_WARPGROUP_CAPABILITIES = (90, 100, 103)


class Tile(NamedTuple):
    """Keys of a tile, warps of a program and stages of its pipeline."""

    keys: int
    warps: int
    stages: int


def choose_tile(
    problem: Problem,
    pack: int,
    splits: int,
    device: DeviceProfile,
    *,
    invariant: bool = False,
    dependent_launch: bool = True,
) -> Tile:
    """Return the tile for a packing and a split, within the device's shared memory.

    Few programs want one wide tile each, whose loads are all in flight at once; a GPU that is full many times over
    wants many small programs (4.3 TB/s of 4.48 at 2048 programs). Where no program starts while the launch before it
    ends, only a chunk that is one wide tile is read as such, others as smaller ones, three deep (H200, 256 programs of
    256 keys: 20.7 us against 22.3; with dependent launch the wide tile is ahead, 21.8 against 22.5).
    """
    rows = max(16, next_power_of_two(pack * problem.head_tile))
    programs = problem.max_requests * ceil_div(problem.query_len, pack) * problem.kv_heads * splits
    waves = 0 if invariant else programs // device.num_sms
    chunk = ceil_div(problem.row_keys + pack - 1, splits)
    small = problem.k_dim + problem.v_dim <= 384  # larger accumulators spill, which decides many of these numbers
    if problem.dtype == "float32":
        # Products without tensor cores; at 128 keys they spill and take 9 times as long.
        tile = Tile(16 if problem.quantised else 32, 4, 2) if rows <= 32 else Tile(16, 8, 2)
    elif rows > 32:
        roomy = device.capability in _WARPGROUP_CAPABILITIES
        tile = Tile(32, 4, 3) if roomy and small else Tile(32 if roomy or small else 16, 8, 3)
    elif rows > 16:
        tile = Tile(32 if small else 16, 4, 3) if problem.quantised else Tile(64, 4, 3)
    elif problem.quantised:
        # Conversion costs instructions: one warp does not repeat them, where there are programs enough.
        one_warp = waves >= _MANY_WAVES and device.capability == 90 and small
        tile = Tile(32, 1, 3) if one_warp else Tile(64, 2, 2) if pack > 1 and small else Tile(64, 4, 3)
    elif waves >= _MANY_WAVES:
        tile = Tile(16, 2, 4)
    elif waves >= 2 and problem.row_keys > 128:
        tile = Tile(64, 2, 2) if _key_bytes(problem) < 1024 else Tile(32, 2, 3)
    elif not (dependent_launch or 64 < chunk <= 128) and device.capability in _WARPGROUP_CAPABILITIES:
        tile = Tile(64, 4, 3)  # measured on an H200; spills on an A100
    else:
        tile = Tile(128, 4, 2) if invariant or chunk <= 256 or _key_bytes(problem) <= 512 else Tile(64, 4, 2)
    if not invariant:
        tile = tile._replace(keys=min(tile.keys, max(16, next_power_of_two(chunk))))
    fitting = (each for each in (tile, *_shrunk(tile)) if shared_bytes(problem, rows, each) <= device.shared_memory)
    chosen = next(fitting, None)
    if chosen is None:
        raise ValueError(
            f"pack must leave room in {device.name}'s {device.shared_memory} bytes of shared memory, got pack={pack}, "
            f"{problem.head_tile} heads a program, k_dim={problem.k_dim}, v_dim={problem.v_dim} and {problem.dtype}"
        )
    return chosen


def _key_bytes(problem: Problem) -> int:
    return problem.key_bytes // problem.kv_heads


def _shrunk(tile: Tile) -> list[Tile]:
    """Return ever smaller tiles: a shallower pipeline first, then fewer keys."""
    shallower = [tile._replace(stages=stages) for stages in range(tile.stages - 1, 1, -1)]
    narrower = [Tile(keys, tile.warps, 2) for keys in (64, 32, 16) if keys < tile.keys]
    return shallower + narrower


def shared_bytes(problem: Problem, rows: int, tile: Tile) -> int:
    """Return an upper estimate of a program's shared memory.

    Query, pipelined keys and values, a converted copy of one of them, and scratch for the softmax's reductions.
    """
    k_width, v_width = (piece * pieces for piece, pieces in (head_pieces(problem.k_dim), head_pieces(problem.v_dim)))
    stored, computed = ITEM_BYTES[problem.stored_dtype], ITEM_BYTES[problem.dtype]
    pipelined = tile.keys * (k_width + v_width) * stored * (tile.stages - 1)
    converted = tile.keys * max(k_width, v_width) * computed if problem.quantised else 0
    return rows * k_width * computed + pipelined + converted + rows * tile.keys * 4 + 1024
