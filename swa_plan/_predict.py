"""What a plan is predicted to take, in parts that a reader can follow, and the plans that it was chosen before.

The same cost model as the planner's: a prediction is not a second opinion, it is the reason of a choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swa_plan._choose import choices, terms_on
from swa_plan._costs import COST_NAMES, Tile, program_of, tile_cost
from swa_plan._device import DeviceProfile
from swa_plan._plan import Plan
from swa_plan._plan import plan as make_plan
from swa_plan._problem import Problem
from swa_plan._shapes import ceil_div

_GROUPS = {
    "launch": ("launch",),
    "start": ("start", "program"),
    "tiles": tuple(name for name in COST_NAMES if name.startswith("tile_")),
    "reading": ("stream", "shallow", "tall"),
    "arithmetic": ("softmax", "convert_tile", "convert"),
    "combine": ("combine", "waiting", "split", "late_split", "partial"),
    "writing": ("rows",),
}

PARTS = {
    "launch": "the call, whatever it does",
    "start": "programs, until their first keys are there",
    "tiles": "steps of the loop that wait for one another",
    "reading": "keys and values through the busiest multiprocessor",
    "arithmetic": "softmax, and conversion of a one-byte cache",
    "combine": "the second kernel, and the partials that it merges",
    "writing": "the output",
}
"""The parts of a prediction, and what each is."""


@dataclass(frozen=True)
class Prediction:
    """What the cost model says of a plan.

    Attributes:
        time_us: one call, in microseconds; None where the model does not know such plans.
        parts: microseconds by the names of ``PARTS``, which add up to ``time_us``; those that are 0 are left out.
        programs: programs of the split kernel at ``max_requests``.
        waves: turns that the device's multiprocessors take until every program ran.
        bytes: bytes of keys and values that programs read at most; what several of them read counts for each.
    """

    time_us: float | None
    parts: Mapping[str, float]
    programs: int
    waves: int
    bytes: int


def predict(plan: Plan, device: DeviceProfile, *, dependent_launch: bool = True) -> Prediction:
    """Predict what a full batch of a plan takes on a device.

    Args:
        plan: the plan.
        device: whose costs are taken.
        dependent_launch: whether a kernel starts while the one before it ends, as for ``swa_plan.plan``.

    Returns:
        The prediction. Its time is None for plans that nothing was measured for: fp32, batch-invariant plans, kernels
        other than ``portable``, a CPU, and tiles that the model has no cost for.
    """
    problem, tile = plan.problem, Tile(plan.tile, plan.warps, plan.stages)
    programs = plan.programs(problem.max_requests) * plan.splits
    # Rows that are packed share their reads; rows of other programs read the same keys again.
    keys = (problem.row_keys + plan.pack - 1) * plan.row_tiles * problem.head_tiles
    size = problem.max_requests * keys * problem.key_bytes
    residents = program_of(problem, plan.pack, tile).residents(tile, device.shared_per_sm)
    waves = ceil_div(programs, device.num_sms * residents)
    if not is_modelled(plan, device):
        return Prediction(None, {}, programs, waves, size)
    terms = terms_on(problem, plan.pack, plan.splits, tile, device, dependent_launch=dependent_launch)
    times = {
        group: sum(terms.get(name, 0.0) * getattr(device.costs, name) for name in names)
        for group, names in _GROUPS.items()
    }
    return Prediction(
        sum(times.values()), {group: time for group, time in times.items() if time}, programs, waves, size
    )


def is_modelled(plan: Plan, device: DeviceProfile) -> bool:
    """Whether the cost model was made for plans like this one."""
    return (
        device.capability > 0
        and plan.kernel == "portable"
        and not plan.batch_invariant
        and plan.problem.dtype != "float32"
        and tile_cost(Tile(plan.tile, plan.warps, plan.stages)) in COST_NAMES
    )


def alternatives(
    problem: Problem, device: DeviceProfile, *, dependent_launch: bool = True, limit: int = 8
) -> list[tuple[Plan, Prediction]]:
    """Return the plans that the planner compares, best first, with what each is predicted to take.

    Args:
        problem: the step's shape.
        device: what the step runs on.
        dependent_launch: as for ``swa_plan.plan``.
        limit: most plans.

    Returns:
        Of each packing and number of splits the plan with the best tile. The first is what ``swa_plan.plan`` returns;
        where the model does not know the problem (fp32, a CPU) it is the only one, without a time.

    Raises:
        ValueError: ``limit`` is not positive.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    best = make_plan(problem, device, dependent_launch=dependent_launch)
    plans = {(best.pack, best.splits): best}
    if is_modelled(best, device):
        for pack, splits, tile, _ in choices(problem, device, dependent_launch=dependent_launch):
            if len(plans) == limit:
                break
            if (pack, splits) not in plans:
                plans[pack, splits] = Plan(problem, best.kernel, pack, splits, *tile, device=device.name)
    return [(plan, predict(plan, device, dependent_launch=dependent_launch)) for plan in plans.values()]
