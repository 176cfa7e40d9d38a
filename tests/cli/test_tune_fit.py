"""What `swa tune` measures determines the costs; a fit finds planted ones and refuses nonsense. No GPU is needed."""

import json
from dataclasses import astuple, replace
from itertools import product

import numpy as np
import pytest

from bridge._tune import fit as fitting
from bridge._tune import sample
from bridge._tune.fit import FitError, fit, nonnegative_least_squares
from bridge._tune.sample import Timed
from bridge._tune.tuning import tune
from swa_plan import DeviceProfile, Problem, plan, predict
from swa_plan._costs import CANDIDATE_TILES, COST_NAMES, fits, tile_cost
from swa_plan._device import DEPENDENT_LAUNCH_CAPABILITY
from tests.cli.fake_gpu import A100, H200, FakeBench, planted, quiet

GPUS = ("a100", "h100", "h200", "b200", "rtx4090", "rtx5090")


def plans_of(profile):
    return [each for problem in sample.problems(profile) for each in sample.plans(problem, profile)]


def timed_by(device, costs, noise=0.03, seed=0):
    return FakeBench(device, costs, noise=noise, seed=seed).each(plans_of(device.shipped), lambda: None)


# --- what is measured ---


@pytest.mark.parametrize("name", GPUS)
def test_the_sample_determines_every_cost(name):
    profile = DeviceProfile.named(name)
    plans = plans_of(profile)
    assert 150 <= len(plans) <= 330
    rows = np.array([fitting._row(Timed(each, 1.0), profile) for each in plans])
    if profile.capability < DEPENDENT_LAUNCH_CAPABILITY:
        _, rows = fitting._without_waiting(np.array(astuple(profile.costs)), rows)
    rows /= np.array([predict(each, profile).time_us for each in plans])[:, None]
    measured = rows.any(axis=0)
    # XLA's launches pay it, which nothing here measures; the others are of tiles that fit in no problem on this chip.
    unmeasured = {cost for cost, is_measured in zip(COST_NAMES, measured, strict=True) if not is_measured}
    assert "waiting" in unmeasured
    assert unmeasured - {"waiting"} <= {cost for cost in COST_NAMES if cost.startswith("tile_")} - fitting_costs(
        profile
    )
    assert np.linalg.matrix_rank(rows[:, measured]) == measured.sum()


def fitting_costs(profile):
    """Costs of the tiles that a program of some head size, dtype and rows can have."""
    found = set()
    for dim, group, cache_dtype in product((64, 128, 192, 256), (8, 64), ("bfloat16", "float8_e4m3fn")):
        problem = Problem(1, group, 1, dim, dim, 512, 64, 8, cache_dtype=cache_dtype)
        found |= {
            tile_cost(tile)
            for tile in CANDIDATE_TILES
            if fits(problem, 1, tile, profile.capability, profile.shared_memory)
        }
    return found


def test_the_sample_covers_what_plans_differ_in():
    profile = H200.shipped
    plans = plans_of(profile)
    assert {each.splits for each in plans} >= {1, 2, 3, 4, 6, 8, 11, 16}
    assert {each.problem.stored_dtype for each in plans} == {"bfloat16", "float8_e4m3fn"}
    assert {each.rows for each in plans} >= {16, 64}
    waves = [predict(each, profile).waves for each in plans]
    assert min(waves) == 1
    assert max(waves) > 4
    for problem in sample.problems(profile):
        assert plan(problem, profile) in sample.plans(problem, profile)
    assert len(sample.distinct_kernels(plans)) < 200, "compiling would take too long"


def test_a_kernel_depends_on_neither_batch_nor_splits():
    first, *_ = plans_of(H200.shipped)
    larger = replace(first, problem=replace(first.problem, max_requests=7, max_blocks=99, max_tokens=None))
    assert sample.kernel_of(larger) == sample.kernel_of(first)
    assert sample.kernel_of(replace(first, splits=2)) == sample.kernel_of(replace(first, splits=3))
    assert sample.kernel_of(replace(first, splits=1)) != sample.kernel_of(replace(first, splits=2))
    assert sample.kernel_of(replace(first, stages=7)) != sample.kernel_of(first)


# --- the fit ---


@pytest.mark.parametrize("seed", range(4))
def test_a_fit_finds_planted_costs(seed):
    costs = planted(seed)
    found = fit(timed_by(H200, costs, seed=seed), H200.shipped)
    assert found.error_after < 0.03 < found.error_before
    for name in ("start", "stream"):
        assert getattr(found.costs, name) == pytest.approx(getattr(costs, name), rel=0.15), name
    assert found.costs.waiting == H200.shipped.costs.waiting
    # Costs that grow alike are told apart badly, which spoils no prediction: of batches that were not measured either.
    tuned, truth = (replace(H200.shipped, costs=each) for each in (found.costs, costs))
    for problem in sample.problems(H200.shipped):
        measured, true = (predict(plan(problem, tuned), each) for each in (tuned, truth))
        for part, time_us in true.parts.items():
            assert measured.parts.get(part, 0) == pytest.approx(time_us, abs=0.1 * true.time_us), part
        other = replace(problem, max_requests=3 * problem.max_requests + 1, max_tokens=None)
        chosen = plan(other, tuned)
        assert predict(chosen, tuned).time_us == pytest.approx(predict(chosen, truth).time_us, rel=0.12)
        assert predict(chosen, truth).time_us <= 1.1 * predict(plan(other, truth), truth).time_us


def test_a_fit_of_exact_times_is_exact():
    costs = planted(5)
    found = fit(timed_by(H200, costs, noise=0), H200.shipped)
    assert found.error_after < 0.005
    unchanged = fit(timed_by(H200, H200.shipped.costs, noise=0), H200.shipped)
    assert astuple(unchanged.costs) == pytest.approx(astuple(H200.shipped.costs), abs=1e-5)


def test_before_sm_90_every_launch_waits():
    assert fit(timed_by(A100, planted(1, A100)), A100.shipped).costs.waiting == 0
    shipped = A100.shipped.costs
    exact = fit(timed_by(A100, shipped, noise=0), A100.shipped)
    assert exact.error_before == pytest.approx(0, abs=1e-9)
    assert exact.error_after < 1e-6
    assert exact.costs.combine == pytest.approx(shipped.combine + shipped.waiting, abs=1e-5)


def test_costs_are_never_negative():
    cheap = replace(H200.shipped.costs, **{name: 0.0 for name in COST_NAMES if name.startswith("tile_")})
    found = fit(timed_by(H200, cheap, noise=0.1), H200.shipped)
    assert min(astuple(found.costs)) >= 0


@pytest.mark.parametrize("seed", range(20))
def test_least_squares_without_negatives(seed):
    """Against the conditions that only the best non-negative solution meets."""
    random = np.random.default_rng(seed)
    matrix, target = random.normal(size=(30, 8)), random.normal(size=30)
    solution = nonnegative_least_squares(matrix, target)
    gain = matrix.T @ (target - matrix @ solution)
    assert (solution >= 0).all()
    assert (gain <= 1e-8).all()
    assert np.abs(gain[solution > 0]).max(initial=0) < 1e-8


def nonsense():
    timed = timed_by(H200, H200.shipped.costs)
    random = np.random.default_rng(0)
    yield "few", timed[:99], "at least 100 plans"
    yield "one shape", [each for each in timed * 20 if each.plan.problem == timed[0].plan.problem], "5 shapes"
    yield "zero", [*timed[:-1], Timed(timed[-1].plan, 0.0)], "times must be positive, got 0.0"
    yield "NaN", [*timed[:-1], Timed(timed[-1].plan, float("nan"))], "times must be positive, got nan"
    noise = random.lognormal(0, 2, len(timed))
    yield "noise", [Timed(each.plan, t) for each, t in zip(timed, noise, strict=True)], "the times fit no costs"


@pytest.mark.parametrize("timed, words", [pytest.param(*case[1:], id=case[0]) for case in nonsense()])
def test_a_fit_refuses_nonsense(timed, words):
    with pytest.raises(FitError, match=words):
        fit(timed, H200.shipped)


# --- a tuning ---


def test_a_tuning_chooses_better_plans():
    costs = replace(H200.shipped.costs, combine=4.0, start=6.0, partial=3.0)
    bench = FakeBench(H200, costs)
    tuning = tune(H200, bench, quiet)
    assert tuning.regret_after <= tuning.regret_before
    assert not tuning.is_worse
    assert tuning.regret_after < 1.02
    assert len(tuning.regrets) == len(sample.problems(H200.shipped))
    for each in tuning.regrets:
        assert each.best.time_us <= min(each.before.time_us, each.after.time_us)
        assert each.before.plan in bench.compiled
        assert each.after.plan in bench.compiled
    json.dumps(tuning.to_json(), allow_nan=False)


def test_a_problem_without_times_is_passed_over():
    first, *others = sample.problems(H200.shipped)

    class Small(FakeBench):
        def together(self, plans, advance):
            return [each for each in super().together(plans, advance) if each.plan.problem != first]

    tuning = tune(H200, Small(H200, H200.shipped.costs), quiet)
    assert [each.problem for each in tuning.regrets] == others


def test_a_plan_that_does_not_run_is_not_stored():
    class Choosy(FakeBench):
        def together(self, plans, advance):
            slowest = {}
            for each in sorted(super().together(plans, advance), key=lambda each: each.time_us):
                slowest[each.plan.problem] = each
            return list(slowest.values())

    with pytest.raises(FitError, match="a plan that does not run here"):
        tune(H200, Choosy(H200, H200.shipped.costs), quiet)
