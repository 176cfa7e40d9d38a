"""Failures that no public report names, but that this kind of system can have."""

from __future__ import annotations

import pytest
import torch

import swa_torch
from tests.contract.torch_runner import BACKENDS, device_of, torch_arguments
from tests.failures.probes import step


@pytest.mark.gpu
def test_partials_beyond_two_to_the_31_elements():
    """D1: 14,600 tokens in 8 splits of 96 heads are 2.15e9 fp32 partials, 8.6 GB."""
    device, tokens = torch.device("cuda"), 14_600
    assert tokens * 8 * 96 * 192 > 2**31
    value = (
        torch.arange(1, 65, device=device).to(torch.bfloat16)[:, None, None, None].expand(64, 16, 8, 192).contiguous()
    )
    key = torch.randn(64, 16, 8, 192, device=device, dtype=torch.bfloat16)
    query = torch.zeros(tokens, 96, 192, device=device, dtype=torch.bfloat16)
    owner = torch.arange(tokens, device=device) % 64
    table = owner[:, None].expand(tokens, 32).int().contiguous()
    lens = torch.full((tokens,), 512, dtype=torch.int32, device=device)
    problem = swa_torch.plan_for(query, (key, value), table, window=512).problem
    split = swa_torch.Plan.from_splits(problem, 8, 1)
    assert split.workspace_bytes > 8 * 2**30
    out = swa_torch.swa_decode(query, (key, value), table, lens, window=512, plan=split)
    assert ((out != value[owner, 0, 0, 0][:, None, None]).sum()).item() == 0
    # Real scores for the rows at both ends of the buffer.
    query[:50].normal_()
    query[-50:].normal_()
    out = swa_torch.swa_decode(query, (key, key), table, lens, window=512, plan=split)
    single = swa_torch.swa_decode(
        query, (key, key), table, lens, window=512, plan=swa_torch.Plan.from_splits(problem, 1, 1)
    )
    for rows in (slice(0, 50), slice(-50, None)):
        assert (out[rows].float() - single[rows].float()).abs().amax() <= 2e-2
    del out, single
    torch.cuda.empty_cache()


@pytest.mark.parametrize("backend", BACKENDS)
def test_too_many_packed_rows_write_nothing(backend):
    """D3: 6 rows of 12 heads are 72, more than a program takes: an error, and nothing is written."""
    inputs = step((40,), kv_heads=1, query_len=6, k_dim=16)
    (query, cache, table, lens), _ = torch_arguments(inputs, device_of(backend))
    output = torch.full_like(query, 7.0)
    gate = torch.zeros(query.shape[:2], device=query.device)
    with pytest.raises(ValueError, match="pack"):
        swa_torch.swa_decode_gated(
            query, *cache.bases, table, lens, gate, output, scale=1.0, window=512, query_len=6, splits=1, pack=6
        )
    with pytest.raises(ValueError, match="multiple of pack"):
        swa_torch.swa_decode_gated(
            query, *cache.bases, table, lens, gate, output, scale=1.0, window=512, query_len=6, splits=1, pack=4
        )
    assert (output == 7.0).all()
