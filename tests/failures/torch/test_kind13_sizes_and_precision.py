"""Kind 13 of the known failures, its torch part: grids beyond 65535 rows, and fp32 products that stay fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

import swa_torch
from swa_plan import tolerance
from tests.contract.backends import plan_for
from tests.contract.torch_runner import BACKENDS, GPU_BACKENDS
from tests.failures.probes import decode


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("tokens", [65536, 70000])
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_more_tokens_than_a_grid_axis_may_have(backend, tokens, splits):
    """C99, jax-ml/jax#18361: tokens do not lie on an axis that ends at 65535."""
    device = torch.device("cuda")
    query = torch.zeros(tokens, 96, 192, dtype=torch.bfloat16, device=device)
    numbers = torch.arange(1, 65, device=device).to(torch.bfloat16)
    value = numbers[:, None, None, None].expand(64, 16, 8, 192).contiguous()
    table = (torch.arange(tokens, device=device) * 7 % 64).int()[:, None]
    lens = torch.ones(tokens, dtype=torch.int32, device=device)
    plan = swa_torch.plan_for(query[:64], (value, value), table, window=512, max_requests=tokens, backend=backend)
    gate = torch.full((tokens, 96), 30.0, device=device)
    out = torch.full_like(query, float("nan"))
    swa_torch.swa_decode(
        query, (value, value), table, lens,
        window=512, gate=gate, out=out, plan=replace(plan, splits=splits),
    )  # fmt: skip
    wrong = (out != numbers[table[:, 0].long()][:, None, None]).sum()
    assert wrong.item() == 0
    del query, out, gate
    torch.cuda.empty_cache()


def set_precision(name: str) -> None:
    torch.set_float32_matmul_precision(name)


def allow_tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed


def set_backend(backend: object, precision: str) -> None:
    backend.fp32_precision = precision


# torch has an older and a newer way to say it, and raises when asked for the old answer after the new way was used.
SWITCHES = {
    "highest": lambda: set_precision("highest"),
    "high": lambda: set_precision("high"),
    "medium": lambda: set_precision("medium"),
    "tf32-allowed": lambda: allow_tf32(True),
    "tf32-forbidden": lambda: allow_tf32(False),
    "high-but-forbidden": lambda: (set_precision("high"), allow_tf32(False)),
    "medium-and-allowed": lambda: (set_precision("medium"), allow_tf32(True)),
    "cuda-tf32": lambda: set_backend(torch.backends.cuda.matmul, "tf32"),
    "cpu-bf16": lambda: set_backend(torch.backends.mkldnn.matmul, "bf16"),
    "all-tf32": lambda: set_backend(torch.backends, "tf32"),
}


@pytest.fixture
def switch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set one of torch's global switches; put all of them back afterwards."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends)
    before = [backend.fp32_precision for backend in backends]
    SWITCHES[request.param]()
    yield
    torch.set_float32_matmul_precision("highest")
    for backend, precision in zip(backends, before, strict=True):
        backend.fp32_precision = precision


@pytest.mark.usefixtures("switch")
@pytest.mark.parametrize("switch", SWITCHES, indirect=True)
@pytest.mark.parametrize("backend", BACKENDS)
def test_fp32_stays_fp32_whatever_torch_was_told(backend, fp32_step):
    """C101, jax-ml/jax#23182: TF32 or bf16 products would err by 1e-3; no global switch lets them in."""
    inputs, expected = fp32_step
    out, lse = decode(inputs, backend, plan=plan_for(inputs, backend, splits=2))
    assert np.abs(out - expected).max() <= 2e-5
    tolerance.assert_close(out, inputs, actual_lse=lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tf32_would_be_noticed(backend, fp32_step):
    """C101, jax-ml/jax#23182: inputs rounded to TF32's 10 bits miss the bound, so the test above can fail."""
    inputs, expected = fp32_step
    rounded = replace(inputs, query=inputs.query.astype(np.float16).astype(np.float32))
    assert np.abs(decode(rounded, backend)[0] - expected).max() > 2e-5
