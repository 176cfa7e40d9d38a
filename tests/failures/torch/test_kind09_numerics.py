"""Kind 9 of the known failures: quantised caches, large logits, non-finite slots, and the gate's arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swa_plan import tolerance
from tests.contract.backends import plan_for, same_bits
from tests.contract.torch_runner import BACKENDS, device_of
from tests.failures.probes import (
    KV_HEADS,
    decode,
    step,
)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gate_is_not_read_beyond_its_heads(backend, splits):
    """C70, fla-org/flash-linear-attention#1165: 4 rows of 12 heads fill 48 of 64 lanes; beyond the gate lies NaN."""
    inputs = step((300,), query_len=4)
    heads, tokens = 12 * KV_HEADS, 4
    gate = np.random.default_rng(0).standard_normal((tokens, heads), np.float32)
    inputs.gate = gate
    plan = plan_for(inputs, backend, splits=splits, pack=4)
    expected, _ = decode(inputs, backend, plan=plan)
    buffer = torch.full((64 + tokens * heads + 64,), float("nan"), device=device_of(backend))
    inside = buffer[64 : 64 + tokens * heads].view(tokens, heads)
    inside.copy_(torch.from_numpy(gate))
    out, _ = decode(inputs, backend, plan=plan, gate=inside)
    assert np.isfinite(out.astype(np.float64)).all()
    assert same_bits(out, expected)
    tolerance.assert_close(out, inputs)
