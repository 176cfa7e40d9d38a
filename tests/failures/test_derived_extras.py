"""Failures that no public report names, but that this kind of system can have."""

from __future__ import annotations

import pytest

from swa_plan import DeviceProfile, Plan, Problem, plan, swa_decode_plan, swa_decode_splits
from tests.contract.backends import BACKENDS, decode_gated
from tests.failures.probes import step


@pytest.mark.parametrize("window, splits", [(100, 1), (127, 1), (128, 2), (255, 2), (256, 4), (512, 8)])
def test_chunks_of_the_original_planner_keep_64_keys(window, splits):
    """D2: a window of 100 is not split, one of 128 is."""
    if splits <= 2:
        assert swa_decode_plan(8, 8, 12, 1, 132, window) == (1, splits)
    assert swa_decode_splits(1, 132, window) == splits


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_rows_than_a_program_takes_are_not_packed(backend):
    """D3: 6 rows of 12 heads are 72; the planner does not pack all of them, and by hand it is an error."""
    assert swa_decode_plan(48, 8, 12, 6, 132, 512)[0] == 1
    assert swa_decode_plan(40, 8, 12, 5, 132, 512)[0] == 5
    problem = Problem(64, 96, 8, 192, 192, 512, 16, 64, query_len=6)
    made = plan(problem, DeviceProfile.named("h200"))
    assert made.pack * 12 <= 64
    with pytest.raises(ValueError, match=r"pack \* group must be at most 64.*pack=6.*group=12"):
        Plan.from_splits(problem, 1, 6)
    inputs = step((40,), kv_heads=1, query_len=6, k_dim=16)
    with pytest.raises(ValueError, match="pack"):
        decode_gated(inputs, backend, splits=1, pack=6)
    with pytest.raises(ValueError, match="multiple of pack"):
        decode_gated(inputs, backend, splits=1, pack=4)
