"""Tiles that no cost model chooses: those of fp32, and those of batch-invariant plans.

Measured on an H200 (head size 192, window 512); shared-memory limits of smaller chips shrink the pipeline.
"""

from __future__ import annotations

from swa_plan._costs import WARPGROUP_CAPABILITIES, Tile, padded_rows, shared_bytes
from swa_plan._device import DeviceProfile
from swa_plan._problem import Problem
from swa_plan._shapes import next_power_of_two


def float32_tile(problem: Problem, pack: int, chunk: int, device: DeviceProfile) -> Tile:
    """Return the tile of an fp32 step: products without tensor cores, which at 128 keys spill and take 9 times as long.

    ``chunk`` is the most keys that one program takes.
    """
    rows = padded_rows(problem, pack)
    tile = Tile(16 if problem.quantised else 32, 4, 2) if rows <= 32 else Tile(16, 8, 2)
    return shrunk_to_fit(problem, pack, tile._replace(keys=min(tile.keys, max(16, next_power_of_two(chunk)))), device)


def invariant_tile(problem: Problem, device: DeviceProfile) -> Tile:
    """Return the tile of a batch-invariant plan, from the shape of one row alone."""
    if problem.dtype == "float32":
        return float32_tile(problem, 1, problem.capacity, device)
    rows = padded_rows(problem, 1)
    small = problem.k_dim + problem.v_dim <= 384  # larger accumulators spill, which decides many of these numbers
    if rows > 32:
        roomy = device.capability in WARPGROUP_CAPABILITIES
        tile = Tile(32, 4, 3) if roomy and small else Tile(32 if roomy or small else 16, 8, 3)
    elif rows > 16:
        tile = Tile(32 if small else 16, 4, 3) if problem.quantised else Tile(64, 4, 3)
    else:
        tile = Tile(64, 4, 3) if problem.quantised else Tile(128, 4, 2)
    return shrunk_to_fit(problem, 1, tile, device)


def shrunk_to_fit(problem: Problem, pack: int, tile: Tile, device: DeviceProfile) -> Tile:
    """Return the first of ever smaller tiles that fits: a shallower pipeline first, then fewer keys.

    Raises:
        ValueError: none does.
    """
    rows = padded_rows(problem, pack)
    shallower = [tile._replace(stages=stages) for stages in range(tile.stages - 1, 1, -1)]
    narrower = [Tile(keys, tile.warps, 2) for keys in (64, 32, 16) if keys < tile.keys]
    for each in (tile, *shallower, *narrower):
        if shared_bytes(problem, rows, each) <= device.shared_memory:
            return each
    raise ValueError(
        f"pack must leave room in {device.name}'s {device.shared_memory} bytes of shared memory, got pack={pack}, "
        f"{problem.head_tile} heads a program, k_dim={problem.k_dim}, v_dim={problem.v_dim} and {problem.dtype}"
    )
