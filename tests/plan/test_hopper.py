"""Plans for the Hopper kernel: which problems it takes, what its plans may be, and what is handed over and why."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swa_plan import DeviceProfile, Plan, Problem, plan
from swa_plan._chosen import check_fits
from swa_plan._hopper import hopper_shared_bytes, why_not_hopper
from swa_plan._shapes import ceil_div

H200 = DeviceProfile.named("h200")
PROBLEM = Problem(16, 64, 8, 192, 192, 512, 64, 128)

HANDED_OVER = {
    "an fp8 cache": ({"cache_dtype": "float8_e4m3fn"}, "not float8_e4m3fn"),
    "an int8 cache": ({"cache_dtype": "int8"}, "not int8"),
    "fp32": ({"dtype": "float32", "cache_dtype": "float32"}, "not float32"),
    "narrow keys": ({"k_dim": 48}, "not 48/192"),
    "narrow values": ({"v_dim": 32}, "not 192/32"),
    "pages of 24": ({"block": 24}, "not 24"),
    "pages of 1": ({"block": 1}, "not 1"),
}
TAKEN = {
    "fp16": {"dtype": "float16", "cache_dtype": "float16"},
    "narrowest heads": {"k_dim": 64, "v_dim": 64},
    "heads of no whole piece": {"k_dim": 80, "v_dim": 112},
    "widest heads": {"k_dim": 256, "v_dim": 256},
    "pages of 16": {"block": 16},
    "pages of 528": {"block": 528},
    "pages of 256": {"block": 256},
    "full attention": {"window": None},
    "many heads a kv head": {"heads": 96, "kv_heads": 1},
}


def problem_with(**fields):
    return replace(PROBLEM, max_tokens=None, **fields)


@pytest.mark.parametrize("fields, words", HANDED_OVER.values(), ids=HANDED_OVER)
def test_what_it_does_not_take_is_planned_for_the_portable_kernel(fields, words):
    problem = problem_with(**fields)
    made = plan(problem, H200, kernel="hopper")
    assert words in why_not_hopper(problem)
    assert made.why_handed_over == why_not_hopper(problem)
    assert not made.runs_hopper
    assert replace(made, kernel="portable") == plan(problem, H200, kernel="portable")
    check_fits(made, H200)
    first = made.explain().splitlines()[0]
    assert first == f"kernel hopper on h200, which hands this plan to the portable kernel: {made.why_handed_over}"


@pytest.mark.parametrize("fields", TAKEN.values(), ids=TAKEN)
def test_what_it_takes_is_planned_for_it(fields):
    problem = problem_with(**fields)
    made = plan(problem, H200, kernel="hopper")
    assert why_not_hopper(problem) is None
    assert made.why_handed_over is None
    assert made.runs_hopper
    assert made.tile == 64
    check_fits(made, H200)
    assert made.explain().splitlines()[0] == "kernel hopper on h200"
    assert Plan.from_json(made.to_json()) == made


def test_batch_invariant_plans_are_the_portable_kernels():
    made = plan(PROBLEM, H200, kernel="hopper", batch_invariant=True)
    assert made.batch_invariant
    assert made.why_handed_over == "it does not cut chunks at absolute positions"
    assert replace(made, kernel="portable") == plan(PROBLEM, H200, kernel="portable", batch_invariant=True)


def test_the_planner_does_not_choose_it_unasked():
    assert plan(PROBLEM, H200).kernel == "portable"
    assert plan(PROBLEM, H200).why_handed_over is None


# What was fastest on an H200, or at most 1% slower: requests, kv heads, group, rows; and pack, splits, warps, ring.
MEASURED = {
    "few programs": ((1, 8, 8, 1), (1, 8, 4, 4)),
    "few programs, 16 rows": ((8, 1, 16, 1), (1, 8, 4, 4)),
    "chunks of three tiles": ((32, 1, 16, 1), (1, 4, 4, 3)),
    "one program a multiprocessor, 16 rows": ((128, 1, 16, 1), (1, 1, 4, 3)),
    "one program a multiprocessor": ((16, 8, 8, 1), (1, 1, 4, 3)),
    "four programs a multiprocessor": ((64, 8, 8, 1), (1, 1, 4, 3)),
    "a queue": ((256, 8, 8, 1), (1, 1, 4, 2)),
    "32 rows": ((32, 8, 8, 4), (4, 1, 8, 3)),
    "32 rows of short chunks": ((16, 1, 16, 4), (2, 4, 4, 3)),
}


@pytest.mark.parametrize("shape, chosen", MEASURED.values(), ids=MEASURED)
def test_what_was_measured_is_chosen(shape, chosen):
    requests, kv_heads, group, query_len = shape
    problem = Problem(requests, kv_heads * group, kv_heads, 192, 192, 512, 64, 16, query_len=query_len)
    made = plan(problem, H200, kernel="hopper")
    assert (made.pack, made.splits, made.warps, made.stages) == chosen


def test_a_queue_of_programs_has_a_shorter_ring_only_where_one_more_fits():
    queue = problem_with(max_requests=512, query_len=4)
    rings = [hopper_shared_bytes(queue, 4, 1, stages) + 1024 for stages in (2, 3)]
    assert [H200.shared_per_sm // ring for ring in rings] == [2, 2]
    assert plan(queue, H200, kernel="hopper").stages == 3


@pytest.mark.parametrize("name", ["a100", "b200", "rtx4090", "rtx5090", "cpu"])
def test_other_chips_are_refused(name):
    with pytest.raises(ValueError, match=f"kernel 'hopper' needs an sm_90 GPU, got device '{name}'"):
        plan(PROBLEM, DeviceProfile.named(name), kernel="hopper")


@given(
    requests=st.sampled_from([1, 2, 7, 16, 128, 1024]),
    kv_heads=st.sampled_from([1, 2, 8]),
    group=st.sampled_from([1, 3, 8, 12, 16, 48, 64, 96]),
    k_dim=st.sampled_from([64, 80, 128, 192, 256]),
    v_dim=st.sampled_from([64, 112, 128, 256]),
    window=st.sampled_from([None, 1, 16, 17, 128, 512, 529, 1024, 4096]),
    block=st.sampled_from([16, 32, 48, 64, 128, 528]),
    query_len=st.integers(1, 8),
)
def test_every_plan_fits_and_leaves_nothing_out(requests, kv_heads, group, k_dim, v_dim, window, block, query_len):
    problem = Problem(requests, kv_heads * group, kv_heads, k_dim, v_dim, window, block, 64, query_len=query_len)
    made = plan(problem, H200, kernel="hopper")
    check_fits(made, H200)
    assert made.row_tiles * made.pack >= query_len
    assert made.row_tiles == -(-query_len // made.pack)
    assert made.pack == 1 or made.pack * group <= 64
    # No split of a full window would be without keys.
    keys = max(1, problem.row_keys + made.pack - 1)
    chunk = ceil_div(ceil_div(keys, made.granule), made.splits) * made.granule
    assert (made.splits - 1) * chunk < keys


WRONG = {
    "tile": ({"tile": 128}, "plan.tile must be 64 for kernel 'hopper', got 128"),
    "half a warpgroup": ({"warps": 2}, "plan.warps must be 4 for kernel 'hopper' with 8 rows, got 2"),
    "a warpgroup without rows": ({"warps": 8}, "plan.warps must be 4 for kernel 'hopper' with 8 rows, got 8"),
    "too long a ring": ({"stages": 16}, "plan.stages=16"),
}


@pytest.mark.parametrize("fields, words", WRONG.values(), ids=WRONG)
def test_a_plan_by_hand_that_cannot_run_is_refused(fields, words):
    made = plan(PROBLEM, H200, kernel="hopper")
    assert (made.pack, made.warps) == (1, 4)
    with pytest.raises(ValueError, match=words):
        check_fits(replace(made, **fields), H200)


def test_shared_memory_is_told_in_both_sizes():
    made = replace(plan(PROBLEM, H200, kernel="hopper"), stages=16)
    needed = hopper_shared_bytes(PROBLEM, made.pack, made.splits, 16)
    with pytest.raises(ValueError, match=f"need up to {needed} bytes of shared memory: h200 has {H200.shared_memory}"):
        check_fits(made, H200)


def test_two_warpgroups_may_share_enough_rows():
    verify = problem_with(query_len=4)
    made = replace(plan(verify, H200, kernel="hopper"), pack=4)
    for warps in (4, 8, 16):
        check_fits(replace(made, warps=warps), H200)
    with pytest.raises(ValueError, match=r"plan\.warps must be 4 or 8 or 16 for kernel 'hopper' with 32 rows, got 32"):
        check_fits(replace(made, warps=32), H200)


def test_a_plan_that_is_handed_over_is_held_to_the_portable_rules():
    made = plan(problem_with(dtype="float32", cache_dtype="float32"), H200, kernel="hopper")
    with pytest.raises(ValueError, match="bytes of shared memory"):
        check_fits(replace(made, tile=256, stages=4), H200)


def test_explaining_counts_its_own_rows_and_chunks():
    made = replace(plan(PROBLEM, H200, kernel="hopper"), splits=3)
    text = made.explain()
    assert "= 8 of 8 matrix rows" in text
    assert "about 176 keys a program" in text  # 512 keys are 32 granules of 16, and 11 of them a third
    assert "= 8 of 16 matrix rows" in replace(made, kernel="portable").explain()
    assert json.loads(made.to_json())["kernel"] == "hopper"
