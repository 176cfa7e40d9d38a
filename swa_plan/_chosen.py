"""Which plan a call runs, as both frameworks decide it: plans remembered, and a caller's choice checked."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from swa_plan._costs import Tile, faults, shared_bytes
from swa_plan._device import DeviceProfile
from swa_plan._hopper import HOPPER_TILE, hopper_rows, hopper_shared_bytes
from swa_plan._plan import Plan
from swa_plan._plan import plan as make_plan
from swa_plan._problem import Problem

REMEMBERED_PLANS = 4096

cached_plan = functools.lru_cache(maxsize=REMEMBERED_PLANS)(make_plan)
"""``plan``, made once for each problem and device."""


class SplitsAndPack(NamedTuple):
    """What a caller of ``swa_decode_gated`` chose instead of a plan."""

    splits: int
    pack: int


@functools.lru_cache(maxsize=REMEMBERED_PLANS)
def plan_from_splits(problem: Problem, chosen: SplitsAndPack, kernel: str, device: DeviceProfile | None) -> Plan:
    """Return the plan of ``swa_decode_gated``; its tile fits every GPU where ``device`` is none."""
    profile = device if device is not None and device.capability else None
    return replace(Plan.from_splits(problem, *chosen, device=profile), kernel=kernel)


def check_chosen(
    plan: object, problem: Problem, *, backend: str | None, backends: Mapping[str, str], batch_invariant: bool
) -> None:
    """Check a caller's plan against the call; ``backends`` maps a framework's backend names to plans' kernels.

    Raises:
        TypeError: not a plan.
        ValueError: made for another problem, another backend or without batch invariance.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan or None, got {type(plan).__name__}")
    plan.check_serves(problem)
    if backend is not None and backends.get(backend, backend) != plan.kernel:
        raise ValueError(f"backend {backend!r} conflicts with plan.kernel={plan.kernel!r}")
    if batch_invariant and not plan.batch_invariant:
        raise ValueError("batch_invariant=True conflicts with a plan made without it (plan.chunk=0)")
    if plan.kernel not in backends.values():
        raise ValueError(f"plan.kernel must be one of {', '.join(backends.values())} here, got {plan.kernel!r}")


def check_fits(plan: Plan, profile: DeviceProfile) -> None:
    """Check that a plan's programs fit into a device's shared memory, and are of a form that its kernel has.

    Raises:
        ValueError: naming the plan's fields and both sizes, or the rule.
    """
    if plan.kernel not in ("portable", "hopper"):
        return
    if plan.runs_hopper:
        _check_hopper_form(plan)
        _check_shared(plan, hopper_shared_bytes(plan.problem, plan.pack, plan.splits, plan.stages), profile)
        return
    tile = Tile(plan.tile, plan.warps, plan.stages)
    if faults(plan.problem, plan.rows, tile):
        raise ValueError(
            f"plan.tile must be at most 32 where a {plan.problem.cache_dtype} cache meets more than 32 rows a program "
            f"(larger ones may fault), got plan.tile={plan.tile} with plan.pack={plan.pack}"
        )
    _check_shared(plan, shared_bytes(plan.problem, plan.rows, tile), profile)


def _check_hopper_form(plan: Plan) -> None:
    """Check tile and warps: products have 64 keys, and each warpgroup at least 8 of a program's rows."""
    rows = hopper_rows(plan.problem, plan.pack)
    if plan.tile != HOPPER_TILE:
        raise ValueError(f"plan.tile must be {HOPPER_TILE} for kernel 'hopper', got {plan.tile}")
    if plan.warps % 4 or plan.warps * 2 > rows:
        choices = " or ".join(str(warps) for warps in (4, 8, 16, 32) if warps * 2 <= rows)
        raise ValueError(f"plan.warps must be {choices} for kernel 'hopper' with {rows} rows, got {plan.warps}")


def _check_shared(plan: Plan, needed: int, profile: DeviceProfile) -> None:
    if needed > profile.shared_memory:
        raise ValueError(
            f"plan.tile={plan.tile}, plan.stages={plan.stages}, plan.pack={plan.pack} (made for {plan.device!r}) need "
            f"up to {needed} bytes of shared memory: {profile.name} has {profile.shared_memory}"
        )
