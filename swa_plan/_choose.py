"""Choosing a plan: every packing, split and tile that makes sense, by what the device's cost model says it takes.

Deciding reads shapes and a profile, never device memory: it works inside a graph capture and while JAX traces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from swa_plan._costs import CANDIDATE_TILES, FEWEST_KEYS_TILE, Tile, fits, terms_of
from swa_plan._device import DEPENDENT_LAUNCH_CAPABILITY, DeviceProfile
from swa_plan._problem import Problem
from swa_plan._shapes import ceil_div
from swa_plan._tiles import float32_tile, shrunk_to_fit

MAX_PACKED_ROWS = 64
"""The original kernel's rule for packed query rows times heads."""

_MAX_CHOSEN_SPLITS = 64
_MOST_WAVES = 6
_SPARE_STAGES, _LEAST_DEEP = 2, 3
_FLOAT32_GRANULE, _FLOAT32_LONGEST_CHUNK = 64, 256


class Choice(NamedTuple):
    """A way to run a step, and its predicted time where the model knows it."""

    pack: int
    splits: int
    tile: Tile
    time_us: float | None


def choices(problem: Problem, device: DeviceProfile, *, dependent_launch: bool = True) -> list[Choice]:
    """Return the candidates, best first; at least one.

    ``dependent_launch`` says whether a kernel starts while the one before it ends, as Triton's do and XLA's do not.
    """
    if problem.dtype == "float32":
        return [_float32_choice(problem, device)]
    found = []
    for pack in _packs(problem):
        for tile in _tiles(problem, pack, device):
            for splits in _splits(problem, pack, tile, device):
                time_us = predicted_us(problem, pack, splits, tile, device, dependent_launch=dependent_launch)
                found.append(Choice(pack, splits, tile, time_us))
    # Of equal times the simpler plan: fewer splits, then a smaller tile.
    return sorted(found, key=lambda choice: (choice.time_us, choice.splits, choice.tile))


def choose_tile(problem: Problem, pack: int, splits: int, device: DeviceProfile) -> Tile:
    """Return the best tile for a packing and a split that the caller chose."""
    if problem.dtype == "float32":
        return float32_tile(problem, pack, ceil_div(problem.row_keys + pack - 1, splits), device)
    return min(
        _tiles(problem, pack, device), key=lambda tile: (predicted_us(problem, pack, splits, tile, device), tile)
    )


def predicted_us(
    problem: Problem, pack: int, splits: int, tile: Tile, device: DeviceProfile, *, dependent_launch: bool = True
) -> float:
    """Return the model's time of one call."""
    return device.costs.time_us(terms_on(problem, pack, splits, tile, device, dependent_launch=dependent_launch))


def terms_on(
    problem: Problem, pack: int, splits: int, tile: Tile, device: DeviceProfile, *, dependent_launch: bool
) -> dict[str, float]:
    """Return what a plan needs of each of a device's costs; chips before sm_90 have no dependent launch."""
    return terms_of(
        problem, pack, splits, tile, num_sms=device.num_sms, shared_per_sm=device.shared_per_sm,
        dependent_launch=dependent_launch and device.capability >= DEPENDENT_LAUNCH_CAPABILITY,
    )  # fmt: skip


def _packs(problem: Problem) -> list[int]:
    """Return the packings: one row a program, or as many as are cut evenly into the fewest row tiles that fit."""
    # Converting a one-byte cache costs more, the more rows a program's products have.
    rows = 16 if problem.quantised and problem.group <= 8 else MAX_PACKED_ROWS
    most = min(problem.query_len, max(1, rows // problem.group))
    packs = {ceil_div(problem.query_len, ceil_div(problem.query_len, pack)) for pack in (1, ceil_div(most, 2), most)}
    return sorted(packs)


def _tiles(problem: Problem, pack: int, device: DeviceProfile) -> list[Tile]:
    """Return the tiles that fit the device without spilling and are not wider than all the keys there are."""
    keys = problem.row_keys + pack - 1
    tiles = (FEWEST_KEYS_TILE,) if keys <= FEWEST_KEYS_TILE.keys else CANDIDATE_TILES
    fitting = [tile for tile in tiles if fits(problem, pack, tile, device.capability, device.shared_memory)]
    return (
        [tile for tile in fitting if tile.keys < 2 * keys]
        or fitting[:1]
        or [shrunk_to_fit(problem, pack, Tile(16, 8, 2), device)]
    )


def _splits(problem: Problem, pack: int, tile: Tile, device: DeviceProfile) -> Iterator[int]:
    """Yield each number of splits that cuts the tiles into other chunks, so that no tail is shorter than it must be."""
    bases = problem.max_requests * ceil_div(problem.query_len, pack) * problem.kv_heads * problem.head_tiles
    tiles = max(1, ceil_div(problem.row_keys + pack - 1, tile.keys))
    for splits in range(1, min(tiles, _MAX_CHOSEN_SPLITS) + 1):
        steps = ceil_div(tiles, splits)
        if tile.stages > max(steps + _SPARE_STAGES, _LEAST_DEEP):
            return  # fewer stages do as well in less shared memory
        if splits > 1 and bases * splits > _MOST_WAVES * device.num_sms:
            return
        if ceil_div(tiles, steps) == splits:
            yield splits


def _float32_choice(problem: Problem, device: DeviceProfile) -> Choice:
    """Split an fp32 step until its programs fill two waves, or four where chunks would be long.

    Rows are not packed: without tensor cores, wider products cost more than the reads that they save.
    """
    programs = max(1, problem.max_requests * problem.query_len * problem.kv_heads * problem.head_tiles)
    chunks = max(1, ceil_div(problem.row_keys, _FLOAT32_GRANULE))
    splits = 1
    for waves in (2, 4):
        splits = max(1, min(chunks, waves * device.num_sms // programs, _MAX_CHOSEN_SPLITS))
        if ceil_div(problem.row_keys, splits) <= _FLOAT32_LONGEST_CHUNK:
            break
    splits = ceil_div(chunks, ceil_div(chunks, splits))
    return Choice(1, splits, float32_tile(problem, 1, ceil_div(problem.row_keys, splits), device), None)
