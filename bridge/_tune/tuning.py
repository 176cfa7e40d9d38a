"""A tuning: plans measured, costs fitted, and what the new costs are worth, told by the plans they choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

from bridge._tune import sample
from bridge._tune.device import Device, driver_version, versions
from bridge._tune.fit import Fit, FitError, fit
from bridge._tune.sample import Timed
from swa_plan import DeviceProfile, Plan, Problem, plan
from swa_plan._profiles import Provenance, StoredProfile

NOISE = 0.003
"""A regret that grows by less is noise of the clock."""

_RIVALS = 2


class Measurer(Protocol):
    """What takes times; ``measure.Bench`` on a GPU."""

    def compile(self, plans: Sequence[Plan]) -> int:
        """Compile kernels ahead."""
        ...

    def each(self, plans: Sequence[Plan], advance: Callable[[], None]) -> list[Timed]:
        """Time plans one after the other, leaving out those that do not fit or spill."""
        ...

    def together(self, plans: Sequence[Plan], advance: Callable[[], None]) -> list[Timed]:
        """Time the plans of each problem in turn."""
        ...


Stage = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Shows a stage's name and number of steps while it runs; yields what each step calls."""


class Regret(NamedTuple):
    """One problem: the best time measured, and those of the plans that either costs choose."""

    problem: Problem
    best: Timed
    before: Timed
    after: Timed


@dataclass(frozen=True)
class Tuning:
    """What was measured and fitted, and whether it chooses better."""

    device: Device
    shipped: DeviceProfile
    tuned: DeviceProfile
    fit: Fit
    regrets: tuple[Regret, ...]

    @property
    def regret_before(self) -> float:
        """Geometric mean of (time of the plan that the shipped costs choose) / (best time measured)."""
        return _geometric_mean([each.before.time_us / each.best.time_us for each in self.regrets])

    @property
    def regret_after(self) -> float:
        """The same for the measured costs."""
        return _geometric_mean([each.after.time_us / each.best.time_us for each in self.regrets])

    @property
    def is_worse(self) -> bool:
        """Whether plans would become slower."""
        return self.regret_after > self.regret_before * (1 + NOISE)

    def to_store(self) -> StoredProfile:
        """Return the profile with its provenance, as of now."""
        provenance = Provenance(
            device=self.device.name,
            driver=driver_version(),
            versions=versions(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            plans=self.fit.plans,
            median_error=round(self.fit.error_after, 4),
        )
        return StoredProfile(**{**asdict(self.tuned), "costs": self.tuned.costs}, provenance=provenance)

    def to_json(self) -> dict[str, Any]:
        """Return everything as an object."""
        return {
            "device": self.device._asdict(),
            "plans": self.fit.plans,
            "costs": {"shipped": asdict(self.shipped.costs), "measured": asdict(self.tuned.costs)},
            "median_error": {"shipped": self.fit.error_before, "measured": self.fit.error_after},
            "regret": {"shipped": self.regret_before, "measured": self.regret_after},
            "shapes": [
                {
                    "problem": asdict(each.problem),
                    "best": _timed_json(each.best),
                    "shipped": _timed_json(each.before),
                    "measured": _timed_json(each.after),
                }
                for each in self.regrets
            ],
        }


def tune(device: Device, measurer: Measurer, stage: Stage) -> Tuning:
    """Measure, fit, and measure once more what the fitted costs choose.

    Raises:
        FitError: no costs describe the times.
    """
    shipped = device.shipped
    plans = [each for problem in sample.problems(shipped) for each in sample.plans(problem, shipped)]
    with stage("compiling", 0):
        measurer.compile(plans)
    with stage("measuring", len(plans)) as advance:
        timed = measurer.each(plans, advance)
    fitted = fit(timed, shipped)
    tuned = replace(shipped, costs=fitted.costs)
    finalists = _finalists(timed, shipped, tuned)
    with stage("compiling what the new costs choose", 0):
        measurer.compile([each for each in finalists if each not in plans])
    with stage("comparing", len(finalists)) as advance:
        final = measurer.together(finalists, advance)
    regrets = _regrets(dict.fromkeys(each.problem for each in finalists), final, shipped, tuned)
    return Tuning(device, shipped, tuned, fitted, regrets)


def _finalists(timed: Sequence[Timed], shipped: DeviceProfile, tuned: DeviceProfile) -> list[Plan]:
    """Return of each problem what either costs choose, and the plans that were measured best."""
    found: dict[Plan, None] = {}
    for problem in dict.fromkeys(each.plan.problem for each in timed):
        mine = sorted((each for each in timed if each.plan.problem == problem), key=lambda each: each.time_us)
        best = [each.plan for each in mine[:_RIVALS]]
        found.update(dict.fromkeys([plan(problem, shipped), plan(problem, tuned), *best]))
    return list(found)


def _regrets(
    problems: Iterable[Problem], timed: Sequence[Timed], shipped: DeviceProfile, tuned: DeviceProfile
) -> tuple[Regret, ...]:
    times = {each.plan: each for each in timed}
    measured = {each.plan.problem for each in timed}
    regrets = []
    for problem in problems:
        if problem not in measured:
            continue  # there was no memory for it: its best plans did run before
        before, after = (times.get(plan(problem, profile)) for profile in (shipped, tuned))
        if after is None:
            raise FitError(f"the measured costs choose a plan that does not run here: {plan(problem, tuned)}")
        if before is not None:
            best = min((each for each in timed if each.plan.problem == problem), key=lambda each: each.time_us)
            regrets.append(Regret(problem, best, before, after))
    if not regrets:
        raise FitError("none of the plans that the shipped costs choose runs here")
    return tuple(regrets)


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _timed_json(timed: Timed) -> dict[str, Any]:
    plan = timed.plan
    return {
        "pack": plan.pack, "splits": plan.splits, "tile": plan.tile, "warps": plan.warps, "stages": plan.stages,
        "time_us": timed.time_us,
    }  # fmt: skip
