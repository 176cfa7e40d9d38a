"""Kind 15 of the known failures: a missing Triton, tensors on the wrong device, and several devices."""

from __future__ import annotations

import tomllib

import numpy as np

from swa_plan import reference
from tests.failures.probes import step
from tests.failures.processes import ROOT, run_without


def test_reference_and_planner_work_without_frameworks(tmp_path):
    """C115, vllm-project/vllm#14888: swa_plan needs NumPy and ml_dtypes, nothing else."""
    script = """
import numpy as np
from swa_plan import DeviceProfile, Problem, plan, reference
cache = np.ones((2, 16, 1, 16), np.float32)
query, table, lens = np.ones((1, 2, 16), np.float32), np.zeros((1, 1), np.int32), np.array([5])
out = reference.swa_decode(query, cache, cache, table, lens, window=8)
assert np.allclose(out, 1)
assert plan(Problem(1, 2, 1, 16, 16, 8, 16, 1), DeviceProfile.named("h200")).splits >= 1
"""
    run_without(("torch", "triton", "jax", "jaxlib"), script, tmp_path)


def test_extras_pin_no_cuda_library():
    """C116, apple/axlearn#858: torch and jax bring their own; a pin here would break one of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [line for extra in project["optional-dependencies"].values() for line in extra] + project["dependencies"]
    assert not [line for line in wanted if any(word in line.lower() for word in ("nvidia", "cuda", "cudnn", "cu12"))]
    for name, lines in project["optional-dependencies"].items():
        if name in ("torch", "jax", "cli"):
            assert not [line for line in lines if set("=<") & set(line.partition(";")[0].replace(">=", ""))], name


def test_reference_needs_no_device():
    """C119, AnswerDotAI/ModernBERT#152: the reference takes arrays."""
    inputs = step((10,), kv_heads=1)
    assert np.isfinite(reference.swa_decode(*inputs.arrays(), window=512)).all()
