"""What ``sweep`` runs: shapes, of each every plan worth trying, and random shapes that no constant was fitted to."""

from __future__ import annotations

import random
from typing import NamedTuple

from benchmarks.workloads import NINE, Workload
from swa_plan import DeviceProfile, Plan, Problem
from swa_plan._choose import MAX_PACKED_ROWS
from swa_plan._chosen import check_fits
from swa_plan._costs import CANDIDATE_TILES, Tile, faults
from swa_plan._shapes import ceil_div

OUTSIDE_TILES = (
    Tile(16, 1, 4), Tile(16, 4, 4), Tile(32, 1, 3), Tile(32, 2, 6), Tile(32, 4, 2), Tile(64, 2, 4), Tile(64, 4, 6),
    Tile(64, 8, 2), Tile(128, 8, 2), Tile(128, 8, 4),
)  # fmt: skip
"""Tiles that the planner leaves out, to see whether it should."""

TILES = tuple(dict.fromkeys((*CANDIDATE_TILES, *OUTSIDE_TILES)))
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 24, 32)
_MOST_WAVES, _FEW_PROGRAMS = 6, 20
_LEAST_BYTES, _MOST_BYTES = 1.5e6, 9e8


class Variant(NamedTuple):
    """A workload and its dtypes."""

    workload: Workload
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """The workload's name."""
        return self.workload.name

    @property
    def problem(self) -> Problem:
        """The planner's view."""
        w = self.workload
        return Problem(
            w.requests, w.kv_heads * w.group, w.kv_heads, w.dim, w.dim, w.window, w.block,
            ceil_div(w.seq_len, w.block), w.query_len, self.dtype, self.cache_dtype,
        )  # fmt: skip


DEFAULT = tuple(Variant(workload) for workload in NINE)

OTHERS = (
    # Rows of 64: 16 query heads a kv head and four verify rows.
    Variant(Workload("mtp_b64h1", 64, 1, 16, 4)),
    Variant(Workload("mtp_b16h4", 16, 4, 16, 4)),
    Variant(Workload("mtp_b128h4", 128, 4, 16, 4)),
    Variant(Workload("fp8_b16h8", 16, 8, 8), cache_dtype="float8_e4m3fn"),
    Variant(Workload("fp8_b256h8", 256, 8, 8), cache_dtype="float8_e4m3fn"),
    Variant(Workload("fp8_mtp_b16h4", 16, 4, 16, 4), cache_dtype="float8_e4m3fn"),
    Variant(Workload("fp8_mtp_b32h8", 32, 8, 8, 4), cache_dtype="float8_e4m3fn"),
    Variant(Workload("int8_b256h8", 256, 8, 8), cache_dtype="int8"),
    Variant(Workload("fp32_b16h8", 16, 8, 8), "float32", "float32"),
    # Other windows and head sizes of published models.
    Variant(Workload("w128_b64", 64, 8, 8, 1, 2048, 128, 64, 64)),
    Variant(Workload("w1024_b16", 16, 8, 2, 1, 2048, 1024, 64, 256)),
    Variant(Workload("w4096_b8", 8, 8, 4, 1, 8192, 4096, 64, 128)),
)
"""Swept where they are named."""


def random_variants(count: int, seed: int) -> list[Variant]:
    """Return shapes drawn from the whole range that the planner serves, by the bytes of their keys and values."""
    draw = random.Random(seed)
    found: list[Variant] = []
    while len(found) < count:
        dim, group = draw.choice((64, 80, 96, 128, 160, 192, 256)), draw.choice((1, 2, 3, 4, 6, 8, 12, 16))
        kv_heads, window = draw.choice((1, 2, 4, 8)), draw.choice((128, 256, 512, 768, 1024, 2048, 4096))
        query_len, block = draw.choice((1, 1, 1, 2, 3, 4)), draw.choice((16, 64, 128))
        requests = int(2 ** draw.uniform(0, 9))
        name = f"r{len(found)}_d{dim}g{group}h{kv_heads}w{window}q{query_len}p{block}b{requests}"
        workload = Workload(name, requests, kv_heads, group, query_len, max(2048, 2 * window), window, block, dim)
        if _LEAST_BYTES < workload.read_bytes < _MOST_BYTES:
            found.append(Variant(workload))
    return found


def plans(variant: Variant, profile: DeviceProfile) -> list[Plan]:
    """Return every plan worth trying: no empty chunk, no idle GPU that could be split further, no endless pipeline."""
    problem = variant.problem
    found = []
    for pack in sorted({1, min(2, problem.query_len), problem.query_len}):
        if pack > 1 and pack * problem.group > MAX_PACKED_ROWS:
            continue
        for tile in TILES:
            keys = problem.row_keys + pack - 1
            tiles = ceil_div(keys, tile.keys)
            for splits in SPLITS:
                plan = Plan(problem, "portable", pack, splits, *tile, device=profile.name)
                steps, programs = ceil_div(tiles, splits), plan.programs(problem.max_requests) * splits
                few = programs < _FEW_PROGRAMS and 2 * splits <= tiles
                many = splits > 1 and programs > _MOST_WAVES * profile.num_sms
                if few or many or ceil_div(tiles, steps) != splits or tile.stages > steps + 2:
                    continue
                if tile.keys < 2 * keys and _is_compilable(plan) and _fits(plan, profile):
                    found.append(plan)
    return found


def _is_compilable(plan: Plan) -> bool:
    """Whether registers have a chance (ptxas takes minutes over hopeless kernels) and no fault is known."""
    if faults(plan.problem, plan.rows, Tile(plan.tile, plan.warps, plan.stages)):
        return False
    if plan.problem.dtype == "float32" and (plan.tile > 64 or plan.rows > 32):
        return False
    return plan.warps >= (4 if plan.rows > 32 else 2 if plan.rows > 16 else 1)


def _fits(plan: Plan, profile: DeviceProfile) -> bool:
    try:
        check_fits(plan, profile)
    except ValueError:
        return False
    return True
