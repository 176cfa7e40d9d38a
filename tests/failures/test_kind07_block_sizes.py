"""Kind 7 of the known failures: pages of any size, larger or smaller than a tile and not a power of two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from swa_plan import tolerance
from swa_plan.cases import Inputs
from tests.contract.backends import INTERPRETED, same_bits
from tests.failures.probes import RUNNERS, assert_exact, count_probe, decode, live, place, step

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
