"""Kind 7 of the known failures: pages of any size, larger or smaller than a tile and not a power of two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import swa_torch
from swa_plan import tolerance
from tests.contract.backends import plan_for, same_bits
from tests.contract.torch_runner import GPU_BACKENDS, torch_arguments
from tests.failures.probes import decode, step, with_invisible


@pytest.mark.gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_nan_in_the_next_page_stays_there(backend):
    """C54, vllm-project/vllm#39810: block 528, tile 64; the page after each used one is NaN, eager and in a graph."""
    lengths = (528, 1056, 600)
    inputs = step(lengths, block=528)
    # Pages of the requests at even numbers, a page of NaN after each.
    pages = len(inputs.key_cache)
    spread = tuple(np.zeros((2 * pages, *base.shape[1:]), base.dtype) for base in inputs.bases)
    for wide, base in zip(spread, inputs.bases, strict=True):
        wide[::2] = base
    inputs = with_invisible(replace(inputs, bases=spread, block_table=inputs.block_table * 2), 0.0)
    plan = replace(plan_for(inputs, backend), tile=64)
    expected, _ = decode(inputs, backend, plan=plan)
    tolerance.assert_close(expected, inputs)
    poisoned = with_invisible(inputs, float("nan"))
    assert np.isnan(poisoned.key_cache[1::2].astype(np.float32)).all()
    out, _ = decode(poisoned, backend, plan=plan)
    assert same_bits(out, expected)
    positional, _ = torch_arguments(poisoned, torch.device("cuda"))
    result = torch.empty_like(positional[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        swa_torch.swa_decode(*positional, window=512, out=result, plan=plan)
    for _ in range(3):
        result.fill_(float("nan"))
        graph.replay()
        assert torch.equal(result.float().cpu(), torch.from_numpy(expected.astype(np.float32)))
