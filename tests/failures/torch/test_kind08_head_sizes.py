"""Kind 8 of the known failures: head sizes that need padding, groups of any size, K and V of unequal size."""

from __future__ import annotations

import pytest
import torch

import swa_torch
from tests.contract.torch_runner import BACKENDS, device_of, torch_arguments
from tests.failures.probes import step


@pytest.mark.parametrize("heads, kv_heads", [(33, 2), (3, 2), (12, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_that_do_not_divide_write_nothing(backend, heads, kv_heads):
    """C59, fla-org/flash-linear-attention#1029: no head is silently left unwritten."""
    inputs = step((8,), heads=heads, kv_heads=1, k_dim=16)
    device = device_of(backend)
    (query, cache, table, lens), _ = torch_arguments(inputs, device)
    bases = tuple(base.expand(-1, -1, kv_heads, -1) if kv_heads else base[:, :, :0] for base in cache.bases)
    output, gate = torch.full_like(query, 7.0), torch.zeros(query.shape[:2], device=device)
    calls = [
        lambda: swa_torch.swa_decode(query, bases, table, lens, window=512, out=output, backend=backend),
        lambda: swa_torch.swa_decode_gated(
            query, *bases, table, lens, gate, output, scale=1.0, window=512, query_len=1, splits=1
        ),
        lambda: swa_torch.plan_for(query, bases, table, window=512),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="heads"):
            call()
    assert (output == 7.0).all()
