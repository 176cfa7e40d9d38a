"""Predictions: their parts add up, alternatives are in order, and what was not measured gets no number."""

from collections import Counter
from dataclasses import FrozenInstanceError, replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swa_plan import DeviceProfile, Plan, Problem, alternatives, plan, predict
from swa_plan._costs import COST_NAMES, Costs
from swa_plan._predict import _GROUPS, PARTS

GPUS = ("a100", "h100", "h200", "b200", "rtx4090", "rtx5090")
H200 = DeviceProfile.named("h200")


@st.composite
def problems(draw):
    kv_heads, group = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 4, 8, 16, 96]))
    dtype = draw(st.sampled_from(["bfloat16", "float16"]))
    return Problem(
        draw(st.integers(0, 600)), kv_heads * group, kv_heads, draw(st.sampled_from([64, 128, 192, 256])), 128,
        draw(st.sampled_from([128, 512, 4096])), 64, 80, query_len=draw(st.integers(1, 6)), dtype=dtype,
        cache_dtype=draw(st.sampled_from([dtype, "float8_e4m3fn", "int8"])),
    )  # fmt: skip


def test_every_cost_belongs_to_one_part():
    assert Counter(name for names in _GROUPS.values() for name in names) == Counter(COST_NAMES)
    assert list(PARTS) == list(_GROUPS)


@given(problem=problems(), device=st.sampled_from(GPUS), launch=st.booleans())
def test_parts_add_up_and_alternatives_are_in_order(problem, device, launch):
    profile = DeviceProfile.named(device)
    found = alternatives(problem, profile, dependent_launch=launch, limit=5)
    assert 1 <= len(found) <= 5
    assert found[0][0] == plan(problem, profile, dependent_launch=launch)
    assert len({(each.pack, each.splits) for each, _ in found}) == len(found)
    times = [prediction.time_us for _, prediction in found]
    assert times == pytest.approx(sorted(times))
    for each, prediction in found:
        assert prediction == predict(each, profile, dependent_launch=launch)
        assert sum(prediction.parts.values()) == pytest.approx(prediction.time_us)
        assert set(prediction.parts) <= set(PARTS)
        assert min(prediction.parts.values()) > 0
        assert ("combine" in prediction.parts) == (each.splits > 1)
        assert prediction.programs == each.programs(problem.max_requests) * each.splits


@pytest.mark.parametrize("cost", COST_NAMES)
def test_every_cost_is_in_the_time(cost):
    """A cost that is raised makes the plans that have it slower by as much as their part grows."""
    dearer = replace(H200, costs=replace(Costs(), **{cost: getattr(Costs(), cost) + 1}))
    grown = 0
    for requests, query_len, cache_dtype in ((1, 4, "bfloat16"), (64, 1, "float8_e4m3fn")):
        problem = Problem(requests, 64, 8, 192, 192, 512, 64, 32, query_len=query_len, cache_dtype=cache_dtype)
        for (keys, warps, stages), splits in product(_tiles(), (4, 20)):
            made = Plan(problem, "portable", query_len, splits, keys, warps, stages)
            before, after = (predict(made, each, dependent_launch=False) for each in (H200, dearer))
            assert after.time_us >= before.time_us
            grown += after.time_us > before.time_us
            if after.time_us > before.time_us:
                (part,) = [name for name, costs in _GROUPS.items() if cost in costs]
                assert after.parts[part] > before.parts.get(part, 0)
    assert grown


def _tiles():
    for name in COST_NAMES:
        words = name.split("_")
        if words[0] == "tile":
            yield int(words[1]), int(words[2]), 3 if words[-1] == "deep" else 2


def test_waves_and_bytes():
    problem = Problem(256, 64, 8, 192, 192, 512, 64, 32)
    whole = predict(plan(problem, H200), H200)
    assert whole.bytes == 256 * 512 * problem.key_bytes
    assert whole.waves > 1
    verify = replace(problem, query_len=4, max_tokens=None)
    packed, alone = (predict(Plan(verify, "portable", pack, 1, 64, 4, 3), H200) for pack in (4, 1))
    assert packed.bytes == 256 * 515 * problem.key_bytes
    assert alone.bytes == 4 * whole.bytes
    assert predict(plan(replace(problem, max_requests=1, max_tokens=None), H200), H200).waves == 1


NOT_MODELLED = {
    "fp32": plan(Problem(4, 8, 1, 64, 64, 128, 16, 16, dtype="float32"), H200),
    "fp32 with an fp8 cache": plan(
        Problem(4, 8, 1, 64, 64, 128, 16, 16, dtype="float32", cache_dtype="float8_e5m2"), H200
    ),
    "batch-invariant": plan(Problem(4, 8, 1, 64, 64, 128, 16, 16), H200, batch_invariant=True),
    "ops": plan(Problem(4, 8, 1, 64, 64, 128, 16, 16), H200, kernel="ops"),
    "interpret": plan(Problem(4, 8, 1, 64, 64, 128, 16, 16), H200, kernel="interpret"),
    "an unknown tile": Plan(Problem(4, 8, 1, 64, 64, 128, 16, 16), "portable", 1, 1, 256, 4, 3),
}


@pytest.mark.parametrize("name", NOT_MODELLED)
def test_what_was_not_measured_gets_no_number(name):
    prediction = predict(NOT_MODELLED[name], H200)
    assert (prediction.time_us, prediction.parts) == (None, {})
    assert prediction.programs >= 1


@pytest.mark.parametrize("dtype, device", [("float32", "h200"), ("bfloat16", "cpu")])
def test_a_problem_that_is_not_modelled_has_one_plan(dtype, device):
    profile = DeviceProfile.named(device)
    problem = Problem(16, 64, 8, 192, 192, 512, 64, 32, dtype=dtype)
    ((only, prediction),) = alternatives(problem, profile)
    assert only == plan(problem, profile)
    assert prediction.time_us is None


def test_a_limit_must_leave_the_plan():
    problem = Problem(16, 64, 8, 192, 192, 512, 64, 32)
    assert len(alternatives(problem, H200, limit=1)) == 1
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        alternatives(problem, H200, limit=0)


def test_predictions_are_frozen():
    prediction = predict(plan(Problem(16, 64, 8, 192, 192, 512, 64, 32), H200), H200)
    with pytest.raises(FrozenInstanceError):
        prediction.time_us = 0.0
