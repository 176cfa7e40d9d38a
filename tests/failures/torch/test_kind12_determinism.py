"""Kind 12 of the known failures: a request's result does not depend on its neighbours, nor on the run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import swa_torch
from swa_plan import tolerance
from tests.contract.backends import plan_for
from tests.contract.torch_runner import GPU_BACKENDS, torch_arguments
from tests.failures.probes import step
from tests.failures.torch.graphs import same


@pytest.mark.gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_thousand_runs_give_the_same_bits(backend):
    """C91, ROCm/FlyDSL#776: no race between splits and combine, with another stream hogging the memory."""
    lengths = np.random.default_rng(0).integers(4, 5001, 7)
    inputs = step(lengths, query_len=4)
    positional, _ = torch_arguments(inputs, torch.device("cuda"))
    call = {"window": 512, "query_len": 4, "plan": plan_for(inputs, backend, splits=8)}
    first = swa_torch.swa_decode(*positional, **call).clone()
    source = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    hog = torch.cuda.Stream()
    hog.wait_stream(torch.cuda.current_stream())
    equal = torch.ones((), dtype=torch.bool, device="cuda")
    for run in range(1000):
        if run % 4 == 0:
            with torch.cuda.stream(hog):
                target.copy_(source)
        equal &= same(swa_torch.swa_decode(*positional, **call), first)
    torch.cuda.synchronize()
    assert equal.item()
    tolerance.assert_close(first.float().cpu().numpy(), inputs)
