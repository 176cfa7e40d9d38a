"""Either framework may be imported first, with JAX's preallocation or without it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOTH = find_spec("torch") is not None and find_spec("jax") is not None
ORDERS = [("torch", "jax"), ("jax", "torch")]
pytestmark = pytest.mark.skipif(not BOTH, reason="needs PyTorch and JAX")

STEP = """
import sys
device, *order = sys.argv[1:]
for name in order:  # each has worked before the other is imported
    if name == "torch":
        import torch
        assert torch.ones(4, device=device).sum().item() == 4
    else:
        import jax.numpy
        assert float(jax.numpy.ones(4).sum()) == 4
from bridge import Session
x = torch.zeros(64, device=device)
with Session({"x": x}, copy=device == "cpu") as session:
    step = session.jax_step(lambda buffers: (buffers["x"].sum(), {"x": buffers["x"] + 1}), updates="x")
    assert [step().item() for _ in range(3)] == [0, 64, 128]
    assert x.sum().item() == 192
"""


def run(device, order, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_PYTHON_CLIENT_PREALLOCATE"}
    command = [sys.executable, "-c", STEP, device, *order]
    result = subprocess.run(
        command, env={**inherited, **environment}, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("order", ORDERS, ids=" then ".join)
def test_on_the_cpu(order):
    run("cpu", order, JAX_PLATFORMS="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("environment", [{}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}], ids=["preallocated", "not"])
@pytest.mark.parametrize("order", ORDERS, ids=" then ".join)
def test_on_a_gpu(order, environment):
    run("cuda", order, **environment)
