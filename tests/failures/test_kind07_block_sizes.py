"""Kind 7 of the known failures: pages of any size, larger or smaller than a tile and not a power of two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import swa_torch
from swa_plan import tolerance
from swa_plan.cases import Inputs
from tests.contract.backends import INTERPRETED, plan_for, same_bits, torch_arguments
from tests.failures.probes import RUNNERS, assert_exact, count_probe, decode, live, place, step, with_invisible

LONG = (1, 527, 529) if INTERPRETED else (1, 527, 528, 529, 1700)


def repaged(inputs: Inputs, block: int) -> Inputs:
    """Return the same visible keys and values in pages of another size, everything else 0."""
    owned = [-(-int(length) // block) for length in inputs.seq_lens]
    rng = np.random.default_rng(block)
    free = iter(rng.permutation(sum(owned) + 1))
    table = np.zeros((len(owned), max(owned)), np.int32)
    for request, count in enumerate(owned):
        table[request, :count] = [next(free) for _ in range(count)]
    bases = tuple(np.zeros((sum(owned) + 1, block, *base.shape[2:]), base.dtype) for base in inputs.bases)
    moved = replace(inputs, bases=bases, block_table=table)
    for request in range(len(owned)):
        positions = live(inputs, request)
        for new, old in zip(bases, inputs.bases, strict=True):
            new[place(moved, request, positions)] = old[place(inputs, request, positions)]
    return moved


@pytest.mark.parametrize("block", [528, 544, 784, 96, 24])
@pytest.mark.parametrize("runner", RUNNERS)
def test_pages_that_are_no_power_of_two(runner, block):
    """C51, ROCm/aiter#2190: a page of 544 is not a tile of 544."""
    inputs = step(LONG)
    out, lse = decode(repaged(inputs, block), runner)
    expected, expected_lse = decode(inputs, runner)
    if runner == "reference":
        np.testing.assert_allclose(out, expected, rtol=1e-12)
    else:
        tolerance.assert_close(out, inputs, actual_lse=lse)
        assert same_bits(out, expected)
        assert same_bits(lse, expected_lse)


@pytest.mark.parametrize("block", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("runner", RUNNERS)
def test_pages_smaller_than_a_tile(runner, block):
    """C53, tenstorrent/tt-metal#38004: what fills up a tile gets no weight, not even exp(0)."""
    inputs = step((1, 3, 63, 64, 65) if INTERPRETED else (1, 3, 63, 64, 65, 513), block=64)
    small = repaged(inputs, block)
    out, lse = decode(small, runner)
    expected, _ = decode(inputs, runner)
    if runner == "reference":
        np.testing.assert_allclose(out, expected, rtol=1e-12)
    else:
        tolerance.assert_close(out, small, actual_lse=lse)
        assert same_bits(out, expected)
    assert_exact(decode(count_probe(small), runner)[0], 1.0)


@pytest.mark.gpu
def test_nan_in_the_next_page_stays_there():
    """C54, vllm-project/vllm#39810: block 528, tile 64; the page after each used one is NaN, eager and in a graph."""
    lengths = (528, 1056, 600)
    inputs = step(lengths, block=528)
    # Pages of the requests at even numbers, a page of NaN after each.
    pages = len(inputs.key_cache)
    spread = tuple(np.zeros((2 * pages, *base.shape[1:]), base.dtype) for base in inputs.bases)
    for wide, base in zip(spread, inputs.bases, strict=True):
        wide[::2] = base
    inputs = with_invisible(replace(inputs, bases=spread, block_table=inputs.block_table * 2), 0.0)
    plan = replace(plan_for(inputs, "triton"), tile=64)
    expected, _ = decode(inputs, "triton", plan=plan)
    tolerance.assert_close(expected, inputs)
    poisoned = with_invisible(inputs, float("nan"))
    assert np.isnan(poisoned.key_cache[1::2].astype(np.float32)).all()
    out, _ = decode(poisoned, "triton", plan=plan)
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
