"""Kind 2 of the known failures: splits without keys, and the merge of partial results by their log-sum-exps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import swa_torch
from swa_plan import tolerance
from tests.contract.backends import plan_for
from tests.contract.torch_runner import BACKENDS, GPU_BACKENDS, device_of
from tests.failures.probes import (
    BF16_TOLERANCE,
    assert_exact,
    count_probe,
    decode,
    step,
)
from tests.failures.torch.workspace import aligned_workspace

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_request_ignores_stale_workspace(backend):
    """C12, flashinfer-ai/flashinfer#4051: the combine kernel itself, over partials that held NaN before."""
    inputs = step((0,), max_blocks=2)
    plan = plan_for(inputs, backend, splits=2)
    out, lse = decode(inputs, backend, plan=plan, workspace=aligned_workspace(plan.workspace_bytes, device_of(backend)))
    assert_exact(out, 0.0)
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("tile", [None, 64])
@pytest.mark.parametrize("length", [33, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_splits_without_keys_add_nothing(backend, length, tile):
    """C16, pegainfer-project/pegainfer#21: one chunk has all the keys, seven have none."""
    inputs = step((length,))
    plan = plan_for(inputs, backend, splits=8)
    if tile is not None:
        plan = swa_torch.Plan.from_json(plan.to_json().replace(f'"tile": {plan.tile}', f'"tile": {tile}'))
        assert plan.tile == tile
    workspace = aligned_workspace(plan.workspace_bytes, device_of(backend))
    out, lse = decode(inputs, backend, plan=plan, workspace=workspace)
    tolerance.assert_close(out, inputs, actual_lse=lse)
    if backend != "cpu":  # plain operations do not split
        offset, needed = plan.workspace_layout(1)
        partials, partial_lses = workspace[:offset].view(torch.float32), workspace[offset:needed].view(torch.float32)
        assert torch.isfinite(partials).all()
        assert not torch.isnan(partial_lses).any()
        assert not (partial_lses == INF).any()
    counted, _ = decode(count_probe(inputs), backend, plan=plan)
    assert_exact(counted, 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_planned_splits_never_give_nan_as_requests_grow(backend):
    """C21, pytorch/torchtitan#3235: 700 decode steps from the first token on, in a cache full of NaN."""
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    for requests in (1, 2, 3, 5, 8, 17, 33, 64):
        cache = swa_torch.PagedCache.empty(
            "pages block kv_heads dim", pages=requests * 44, block=16, kv_heads=8, k_dim=192, device=device
        )
        for base in cache.bases:
            base.fill_(NAN)
        table = torch.randperm(requests * 44, generator=generator, device=device).view(requests, 44).int()
        rows = torch.randn(3, requests, 96, 192, generator=generator, device=device, dtype=torch.bfloat16)
        plan = swa_torch.plan_for(rows[0], cache, table, window=512, backend=backend)
        single = swa_torch.Plan.from_splits(plan.problem, 1, 1)
        bad = torch.zeros((), dtype=torch.int64, device=device)
        drift = torch.zeros((), device=device)
        for position in range(700):
            key, value = rows[1, :, position % 12 :: 12], rows[2, :, position % 12 :: 12]
            slots = table[:, position // 16] * 16 + position % 16
            swa_torch.append(cache, key, value, slots)
            lens = torch.full((requests,), position + 1, dtype=torch.int32, device=device)
            out = swa_torch.swa_decode(rows[0], cache, table, lens, window=512, plan=plan)
            other = swa_torch.swa_decode(rows[0], cache, table, lens, window=512, plan=single)
            bad += torch.isnan(out).sum()
            drift = torch.maximum(drift, (out.float() - other.float()).abs().max())
        assert bad.item() == 0, requests
        assert drift.item() <= BF16_TOLERANCE, requests
