"""From times to costs: weighted least squares that stays near the costs it starts from where times say nothing.

The cost model is linear. With ``x`` the terms of a plan, ``t`` its time and ``s`` the shipped costs, the costs are

    argmin over c >= 0 of  sum w**2 * (x @ c / t - 1)**2  +  pull * sum d * (c - s)**2

``w`` weighs a plan by how near it is to the best of its shape, because there plans are told apart; ``d`` is the
diagonal of the first sum's matrix, so that the pull is as strong for every cost, whatever its unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from bridge._tune.sample import Timed
from swa_plan import DeviceProfile, Problem
from swa_plan._choose import terms_on
from swa_plan._costs import COST_NAMES, Costs, Tile
from swa_plan._device import DEPENDENT_LAUNCH_CAPABILITY

PULL = 0.01
"""Times outvote the shipped costs by far, but not where they cannot tell two costs apart."""

LEAST_PLANS, LEAST_SHAPES = 100, 5
WORST_ERROR = 0.25
"""A median error beyond this is no noise: the model does not describe such a device, or the times are wrong."""


class FitError(RuntimeError):
    """Times that no costs explain."""


@dataclass(frozen=True)
class Fit:
    """Costs, and how well they and the ones before describe the plans that were measured.

    Attributes:
        costs: the new costs.
        plans: plans measured.
        error_before: median of ``|predicted / measured - 1|`` with the costs before.
        error_after: the same with the new ones.
    """

    costs: Costs
    plans: int
    error_before: float
    error_after: float


def fit(timed: Sequence[Timed], device: DeviceProfile) -> Fit:
    """Fit a device's costs to times that its kernels took, launched as PyTorch does.

    Args:
        timed: plans and their times.
        device: the profile whose costs are the start.

    Returns:
        The fit. ``waiting``, which only XLA's launches pay, stays as it was; before sm_90 it is 0, because there
        every launch waits, and ``combine`` holds it.

    Raises:
        FitError: too few times, impossible ones, or none that the model describes.
    """
    times = np.array([each.time_us for each in timed], float)
    if len(times) < LEAST_PLANS or len({each.plan.problem for each in timed}) < LEAST_SHAPES:
        raise FitError(f"a fit needs at least {LEAST_PLANS} plans of {LEAST_SHAPES} shapes, got {len(times)} plans")
    if not (np.isfinite(times) & (times > 0)).all():
        raise FitError(f"times must be positive, got {times[~(np.isfinite(times) & (times > 0))][0]} us")
    before = np.array(astuple(device.costs), float)
    terms = np.array([_row(each, device) for each in timed])
    error_before = _median_error(terms, before, times)
    if device.capability < DEPENDENT_LAUNCH_CAPABILITY:
        before, terms = _without_waiting(before, terms)
    weights = _weights(timed)
    relative = terms / times[:, None]
    rows = relative * weights[:, None]
    pull = np.sqrt(PULL * np.maximum((rows**2).sum(axis=0), 1e-9))
    after = nonnegative_least_squares(np.concatenate([rows, np.diag(pull)]), np.concatenate([weights, pull * before]))
    untouched = ~terms.any(axis=0)
    after[untouched] = before[untouched]
    error_after = _median_error(terms, after, times)
    if not error_after <= WORST_ERROR:
        raise FitError(
            f"the times fit no costs: half of {len(times)} plans are more than {error_after:.0%} off "
            f"(limit {WORST_ERROR:.0%}); is something else running on this GPU?"
        )
    return Fit(Costs(*(round(float(cost), 6) for cost in after)), len(times), error_before, error_after)


def nonnegative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return ``argmin |matrix @ x - target|`` over ``x >= 0`` (Lawson and Hanson, "Solving Least Squares Problems")."""
    solution = np.zeros(matrix.shape[1])
    free = np.zeros(matrix.shape[1], bool)
    tolerance = 1e-10 * np.abs(matrix.T @ target).max(initial=1e-300)
    for _ in range(10 * matrix.shape[1]):
        gain = np.where(free, -np.inf, matrix.T @ (target - matrix @ solution))
        if not gain.max(initial=-np.inf) > tolerance:
            break
        free[int(gain.argmax())] = True
        while True:
            trial = np.zeros_like(solution)
            trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            negative = free & (trial <= 0)
            if not negative.any():
                solution = trial
                break
            # Go only as far as the first one that reaches zero, and hold it there.
            step = (solution[negative] / (solution[negative] - trial[negative])).min()
            solution = solution + step * (trial - solution)
            free &= solution > 1e-14
            solution[~free] = 0.0
    return solution


def _row(each: Timed, device: DeviceProfile) -> list[float]:
    plan = each.plan
    tile = Tile(plan.tile, plan.warps, plan.stages)
    terms = terms_on(plan.problem, plan.pack, plan.splits, tile, device, dependent_launch=True)
    return [terms.get(name, 0.0) for name in COST_NAMES]


def _without_waiting(costs: np.ndarray, terms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Move ``waiting`` into ``combine``: where every launch waits, times cannot tell the two apart."""
    combine, waiting = COST_NAMES.index("combine"), COST_NAMES.index("waiting")
    costs, terms = costs.copy(), terms.copy()
    costs[combine] += costs[waiting]
    costs[waiting] = 0.0
    terms[:, waiting] = 0.0
    return costs, terms


def _median_error(terms: np.ndarray, costs: np.ndarray, times: np.ndarray) -> float:
    return float(np.median(np.abs(terms @ costs / times - 1)))


def _weights(timed: Sequence[Timed]) -> np.ndarray:
    """Return ``best / time`` of each plan within its problem."""
    best: dict[Problem, float] = {}
    for plan, time_us in timed:
        best[plan.problem] = min(time_us, best.get(plan.problem, time_us))
    return np.array([best[plan.problem] / time_us for plan, time_us in timed])
