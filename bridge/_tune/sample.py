"""Which plans are measured: a few shapes, and of each the plans from which every cost can be told.

Shapes differ in head size, window, rows, dtype and number of programs, from less than one wave to many, because costs
that grow alike in one shape part in another. Plans of a shape share their kernels where only the batch differs, so that
most of the time goes into measuring and not into compiling.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from swa_plan import DeviceProfile, Plan, Problem, plan, predict
from swa_plan._choose import MAX_PACKED_ROWS
from swa_plan._costs import CANDIDATE_TILES, fits
from swa_plan._shapes import ceil_div

MEASURED_SMS = 132
"""The multiprocessors for which the batches below are meant; other devices get as many programs for each of theirs."""

SPLITS = (1, 2, 3, 4, 6, 8, 11, 16, 24)
_MOST_PROGRAMS = 6
_BLOCK = 64


class Shape(NamedTuple):
    """Problems that differ in their batch only."""

    kv_heads: int
    group: int
    dim: int
    window: int
    query_len: int
    cache_dtype: str
    batches: tuple[int, ...]


SHAPES = (
    Shape(8, 8, 192, 512, 1, "bfloat16", (1, 6, 40, 150)),
    Shape(8, 4, 128, 4096, 1, "bfloat16", (2, 12)),
    Shape(8, 8, 64, 128, 1, "bfloat16", (60, 600)),
    Shape(1, 16, 192, 512, 4, "bfloat16", (16, 120)),
    # 64 rows, which some chips and the largest heads need eight warps for.
    Shape(1, 16, 128, 512, 4, "bfloat16", (60,)),
    Shape(1, 16, 256, 512, 4, "bfloat16", (40,)),
    Shape(8, 8, 192, 512, 1, "float8_e4m3fn", (6, 80)),
)
"""From 3 to 470 MB of keys and values on an H200."""


class Timed(NamedTuple):
    """A plan, and what a call took with as many requests as it was made for."""

    plan: Plan
    time_us: float


def problems(device: DeviceProfile) -> list[Problem]:
    """Return the problems whose plans are measured."""
    return [
        Problem(
            max(1, round(batch * device.num_sms / MEASURED_SMS)), shape.kv_heads * shape.group, shape.kv_heads,
            shape.dim, shape.dim, shape.window, _BLOCK, ceil_div(shape.window + shape.query_len - 1, _BLOCK),
            query_len=shape.query_len, cache_dtype=shape.cache_dtype,
        )
        for shape in SHAPES
        for batch in shape.batches
    ]  # fmt: skip


def plans(problem: Problem, device: DeviceProfile) -> list[Plan]:
    """Return the planner's own choice, and the plans predicted best with each tile and with each number of splits."""
    ranked = sorted(_candidates(problem, device), key=lambda candidate: _time(candidate, device))
    chosen = [plan(problem, device)]
    for feature in (_tile_of, _cut_of):
        firsts: dict[tuple[int, ...], Plan] = {}
        for candidate in ranked:
            firsts.setdefault(feature(candidate), candidate)
        chosen += firsts.values()
    return list(dict.fromkeys(chosen))


def kernel_of(plan: Plan) -> tuple[object, ...]:
    """Return what a compiled kernel depends on: neither the batch nor the number of splits, if there are several."""
    problem = plan.problem
    return (
        problem.kv_heads, problem.group, problem.query_len, problem.k_dim, problem.v_dim, problem.window, problem.block,
        problem.dtype, problem.stored_dtype, plan.pack, plan.tile, plan.warps, plan.stages, plan.chunk,
        plan.splits == 1,
    )  # fmt: skip


def distinct_kernels(plans: Iterable[Plan]) -> list[Plan]:
    """Return one plan of each kernel."""
    return list({kernel_of(plan): plan for plan in plans}.values())


def _candidates(problem: Problem, device: DeviceProfile) -> list[Plan]:
    """Return plans that fit the device, fill every chunk and have no more programs than make sense."""
    found = []
    for pack in sorted({1, problem.query_len}):
        if pack * problem.group > MAX_PACKED_ROWS:
            continue
        for tile in CANDIDATE_TILES:
            tiles = ceil_div(problem.row_keys + pack - 1, tile.keys)
            if not fits(problem, pack, tile, device.capability, device.shared_memory):
                continue
            for splits in SPLITS:
                candidate = Plan(problem, "portable", pack, splits, *tile, device=device.name)
                programs = candidate.programs(problem.max_requests) * splits
                if ceil_div(tiles, ceil_div(tiles, splits)) != splits:
                    continue
                if splits == 1 or programs <= _MOST_PROGRAMS * device.num_sms:
                    found.append(candidate)
    return found


def _time(candidate: Plan, device: DeviceProfile) -> float:
    time_us = predict(candidate, device).time_us
    assert time_us is not None, candidate
    return time_us


def _tile_of(candidate: Plan) -> tuple[int, ...]:
    return candidate.tile, candidate.warps, candidate.stages


def _cut_of(candidate: Plan) -> tuple[int, ...]:
    return candidate.pack, candidate.splits
