"""Kind 3 of the known failures: the padding of a batch is written as zeros and reads nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import swa_torch
from swa_plan import tolerance
from tests.contract.backends import decode_gated, plan_for
from tests.contract.torch_runner import BACKENDS, GPU_BACKENDS, device_of, torch_arguments
from tests.failures.probes import (
    step,
)

NAN = float("nan")


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_element_of_the_output_is_written(backend, splits):
    """C25, vllm-project/vllm#37442: no stale NaN survives in the output, and a padding row's NaN gate adds none."""
    lengths = (0, 0, 5, 0, 600, 0, 0, 1)
    inputs = step(lengths)
    empty = np.array(lengths) == 0
    inputs.gate = np.where(empty[:, None], np.nan, 0.25).repeat(inputs.query.shape[1], axis=1).astype(np.float32)
    positional, options = torch_arguments(replace(inputs, return_lse=False), device_of(backend))
    stale = torch.full(
        (*inputs.query.shape[:2], inputs.v_dim), NAN, dtype=positional[0].dtype, device=positional[0].device
    )
    plan = plan_for(inputs, backend, splits=splits)
    returned = swa_torch.swa_decode(*positional, **options, out=stale, plan=plan)
    assert returned is stale
    for out in (stale.float().cpu().numpy(), decode_gated(inputs, backend, splits=splits)):
        assert (out[empty] == 0).all()
        assert np.isfinite(out).all()
        tolerance.assert_close(out, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_rows_between_ragged_rows_are_written(backend):
    """C25, vllm-project/vllm#37442, for rows after the last request's."""
    inputs = step((600, 0, 5), query_len=4, tokens=12)
    inputs.cu_query_lens = np.array([0, 4, 4, 5], np.int32)
    inputs.gate = np.full(inputs.query.shape[:2], np.nan, np.float32)
    inputs.gate[:5] = 1.0
    for splits in (1, 8):
        positional, options = torch_arguments(replace(inputs, return_lse=False), device_of(backend))
        stale = torch.full_like(positional[0], NAN)
        swa_torch.swa_decode(*positional, **options, out=stale, plan=plan_for(inputs, backend, splits=splits))
        assert (stale[5:] == 0).all()
        tolerance.assert_close(stale.float().cpu().numpy(), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_graph_of_a_bucket_serves_fewer_requests(backend, splits):
    """C29, xLLM-AI/xllm#1939: captured for 112 requests, replayed with 100 and with 1."""
    rng = np.random.default_rng(0)
    inputs = step([512] * 112)
    lengths = rng.integers(1, 513, 112).astype(np.int32)
    inputs.seq_lens = lengths.copy()
    (query, cache, table, lens), _ = torch_arguments(inputs, torch.device("cuda"))
    plan = plan_for(inputs, backend, splits=splits)
    out = torch.full_like(query, NAN)
    swa_torch.swa_decode(query, cache, table, lens, window=512, out=out, plan=plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        swa_torch.swa_decode(query, cache, table, lens, window=512, out=out, plan=plan)
    whole_table = table.clone()
    for real in (100, 1, 112, 37):
        table.copy_(whole_table)
        lens.copy_(torch.from_numpy(rng.permutation(lengths)))
        table[real:] = -1
        lens[real:] = 0
        out.fill_(NAN)
        graph.replay()
        eager = swa_torch.swa_decode(
            query[:real], cache, table[:real].contiguous(), lens[:real].contiguous(), window=512, plan=plan
        )
        assert torch.equal(out[:real], eager)
        assert (out[real:] == 0).all()
