"""Kind 16 of the known failures: shared memory, compilation while serving, dependent launches, interpreted bf16."""

from __future__ import annotations

from pathlib import Path

import pytest

from swa_plan import DeviceProfile, Plan, Problem, plan
from swa_plan._chosen import check_fits
from swa_plan._costs import Tile, shared_bytes

ROOT = Path(__file__).parents[2]

QUERY_LENS = (1, 2, 4)
"""Verify rows that make 16, 32 and 64 matrix rows of a program of 12 heads where the planner packs them."""

SHARED_LIMITS = {"a100": 163 << 10, "h200": 227 << 10, "b200": 227 << 10, "rtx4090": 101_376, "rtx5090": 101_376}
DTYPES = ("bfloat16", "float16", "float32")


def verify_problem(query_len: int, dtype: str) -> Problem:
    """Return a step of enough requests that packing leaves no processor idle."""
    return Problem(64, 96, 8, 192, 192, 512, 16, 64, query_len=query_len, dtype=dtype)


def planned(query_len: int, dtype: str, device: str) -> Plan:
    """Return the planner's own choice."""
    return plan(verify_problem(query_len, dtype), DeviceProfile.named(device))


@pytest.mark.parametrize("device", SHARED_LIMITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", QUERY_LENS)
def test_planned_tile_fits_into_shared_memory(query_len, dtype, device):
    """C121, vllm-project/vllm#33846: 99 KB on sm_86, sm_89 and sm_120, by the planner's own estimate."""
    made = planned(query_len, dtype, device)
    estimate = shared_bytes(made.problem, made.rows, Tile(made.tile, made.warps, made.stages))
    assert 0 < estimate <= SHARED_LIMITS[device]
    assert DeviceProfile.named(device).shared_memory == SHARED_LIMITS[device]


@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "int8"])
def test_plans_that_may_fault_are_refused(cache_dtype):
    """Seen on an H200 with triton 3.6: 64 rows and 64 keys of an fp8 cache, where launches overlap in a CUDA graph."""
    problem = Problem(64, 64, 4, 192, 192, 512, 16, 64, query_len=4, cache_dtype=cache_dtype)
    h200 = DeviceProfile.named("h200")
    for stages in (2, 3):
        with pytest.raises(ValueError, match=r"plan.tile must be at most 32 where a .* more than 32 rows .*tile=64"):
            check_fits(Plan(problem, "portable", 4, 2, 64, 4, stages), h200)
        check_fits(Plan(problem, "portable", 4, 2, 32, 4, stages), h200)
        check_fits(Plan(problem, "portable", 2, 2, 64, 4, stages), h200)
    for name in SHARED_LIMITS:
        for splits, pack in ((1, 4), (3, 4), (8, 2)):
            check_fits(Plan.from_splits(problem, splits, pack, device=DeviceProfile.named(name)), h200)


def test_planner_packs_the_rows_of_half_precision():
    """C121, vllm-project/vllm#33846: so that the compilations below are of 16, 32 and 64 rows."""
    assert [planned(query_len, "bfloat16", "rtx5090").rows for query_len in QUERY_LENS] == [16, 32, 64]


def test_warmup_is_documented():
    """C88 and C123: the contract says what a warm-up makes compile no more."""
    text = (ROOT / "docs" / "contract.md").read_text()
    assert "warmup(" in text
    assert "compile" in " ".join(line for line in text.splitlines() if "warmup" in line)
