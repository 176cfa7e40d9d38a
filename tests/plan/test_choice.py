"""What the cost model must make of a problem: laws that hold whatever its constants are, and the measured times."""

import subprocess
import sys
import timeit
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swa_plan import DeviceProfile, Problem, plan, predict
from swa_plan._costs import Tile, fits, shared_bytes
from swa_plan._shapes import ceil_div

GPUS = ("a100", "h100", "h200", "b200", "rtx4090", "rtx5090")
H200 = DeviceProfile.named("h200")

# kv heads, group, head size, window, rows: the nine cases' two shards and their verify steps, and other models'.
SHAPES = (
    (8, 8, 192, 512, 1), (1, 16, 192, 512, 1), (8, 8, 192, 512, 4), (1, 16, 192, 512, 4), (8, 8, 64, 128, 1),
    (8, 4, 128, 4096, 1), (2, 8, 128, 1024, 2), (4, 4, 256, 4096, 1), (8, 1, 80, 768, 3), (1, 128, 256, 512, 1),
)  # fmt: skip
BATCHES = (1, 2, 5, 8, 16, 24, 40, 64, 100, 256, 512)
DTYPES = (("bfloat16", None), ("bfloat16", "float8_e4m3fn"), ("float16", "int8"), ("float32", None))


def problem_of(requests, kv_heads, group, dim, window, query_len, dtype="bfloat16", cache_dtype=None):
    return Problem(
        requests, kv_heads * group, kv_heads, dim, dim, window, 64, ceil_div(window + query_len, 64) + 1,
        query_len=query_len, dtype=dtype, cache_dtype=cache_dtype,
    )  # fmt: skip


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_every_choice_fits_the_device(device, dtypes):
    profile = DeviceProfile.named(device)
    for shape, requests in product(SHAPES, BATCHES):
        chosen = plan(problem_of(requests, *shape, *dtypes), profile)
        tile = Tile(chosen.tile, chosen.warps, chosen.stages)
        assert shared_bytes(chosen.problem, chosen.rows, tile) <= profile.shared_memory


@pytest.mark.parametrize("device", GPUS)
def test_no_choice_of_a_known_head_size_spills(device):
    profile = DeviceProfile.named(device)
    for shape, requests in product(SHAPES[:8], BATCHES):
        chosen = plan(problem_of(requests, *shape), profile)
        tile = Tile(chosen.tile, chosen.warps, chosen.stages)
        assert fits(chosen.problem, chosen.pack, tile, profile.capability, profile.shared_memory)


@settings(max_examples=300)
@given(
    shape=st.sampled_from(SHAPES), requests=st.integers(0, 600), device=st.sampled_from(GPUS),
    dtypes=st.sampled_from(DTYPES[:3]), launch=st.booleans(),
)  # fmt: skip
def test_no_chunk_is_empty(shape, requests, device, dtypes, launch):
    problem = problem_of(requests, *shape, *dtypes)
    chosen = plan(problem, DeviceProfile.named(device), dependent_launch=launch)
    tiles = ceil_div(problem.row_keys + chosen.pack - 1, chosen.tile)
    assert ceil_div(tiles, ceil_div(tiles, chosen.splits)) == chosen.splits


def test_splits_are_no_powers_of_two_and_not_at_most_eight():
    splits = {
        plan(problem_of(requests, *shape), H200).splits for shape, requests in product(SHAPES, range(1, 65))
    }  # fmt: skip
    assert splits - {1 << power for power in range(17)}
    assert max(splits) > 8


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_many_more_requests_never_get_more_splits(shape, device):
    """Twice as many may get one or two more, where those fill the last wave."""
    profile = DeviceProfile.named(device)
    splits = [plan(problem_of(requests, *shape), profile).splits for requests in (1, 8, 64, 512, 4096)]
    assert splits == sorted(splits, reverse=True)
    assert splits[-1] == 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_slower_memory_makes_no_plan_faster(shape):
    h100 = DeviceProfile.named("h100")
    for requests in BATCHES:
        problem = problem_of(requests, *shape)
        assert predict(plan(problem, h100), h100).time_us >= predict(plan(problem, H200), H200).time_us


# Microseconds of the best plan of each, on an H200.
NINE = {
    "b1h8": ((1, 8, 8, 192, 512, 1), 5.6),
    "b8h1": ((8, 1, 16, 192, 512, 1), 5.8),
    "b32h1": ((32, 1, 16, 192, 512, 1), 8.5),
    "b128h1": ((128, 1, 16, 192, 512, 1), 18.0),
    "b16h8": ((16, 8, 8, 192, 512, 1), 17.4),
    "b64h8": ((64, 8, 8, 192, 512, 1), 51.8),
    "b256h8": ((256, 8, 8, 192, 512, 1), 189.6),
    "mtp_b32h8": ((32, 8, 8, 192, 512, 4), 34.2),
    "mtp_b16h1": ((16, 1, 16, 192, 512, 4), 9.3),
}


@pytest.mark.parametrize("name", NINE)
def test_the_nine_cases_are_predicted(name):
    shape, measured_us = NINE[name]
    predicted_us = predict(plan(problem_of(*shape), H200), H200).time_us
    assert predicted_us == pytest.approx(measured_us, rel=0.25)


def test_planning_and_predicting_need_no_framework():
    script = (
        "import sys; sys.modules.update(torch=None, jax=None, triton=None)\n"
        "from swa_plan import DeviceProfile, Problem, alternatives, plan, predict\n"
        "device = DeviceProfile.for_cuda('NVIDIA H200', 90, 132)\n"
        "problem = Problem(16, 64, 8, 192, 192, 512, 64, 32)\n"
        "assert predict(plan(problem, device), device).time_us > 1\n"
        "assert len(alternatives(problem, device)) > 1\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_planning_takes_no_longer_for_a_wide_table():
    """Every new batch is planned during a step, so the work must not grow with the keys that a table can hold."""
    times = {}
    for blocks in (1 << 6, 1 << 22):
        problem = Problem(4, 64, 8, 192, 192, None, 64, blocks)
        times[blocks] = min(timeit.repeat(lambda problem=problem: plan(problem, H200), number=1, repeat=3))
    assert times[1 << 22] < 20 * times[1 << 6]
