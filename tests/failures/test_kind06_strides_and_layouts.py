"""Kind 6 of the known failures: layouts are named, wrong ones are refused, zero sizes need no launch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from swa_plan import DeviceProfile, Problem, plan, reference, swa_decode_plan
from swa_plan.cases import Inputs
from tests.contract.backends import BACKENDS, api_of, arguments, decode_gated, merge, same_bits
from tests.failures.probes import KV_HEADS, decode, step

HEADS = KV_HEADS * 12


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def heads_first(inputs: Inputs) -> tuple[np.ndarray, ...]:
    """Return the step's cache with kv heads before slots."""
    return tuple(np.ascontiguousarray(base.swapaxes(1, 2)) for base in inputs.bases)


def test_heads_first_storage(backend):
    """C42, LMCache/LMCache#2826: HND storage by the name of its layout."""
    inputs = step((200, 33), kv_heads=2)
    stored = replace(inputs, bases=heads_first(inputs), layout="pages kv_heads block dim")
    out, lse = decode(stored, backend)
    expected, expected_lse = decode(inputs, backend)
    assert same_bits(out, expected)
    assert same_bits(lse, expected_lse)


def test_heads_first_storage_read_as_slots_first_is_refused_where_it_shows(backend):
    """C42, LMCache/LMCache#2826: 36 heads do not divide into the 16 that the wrong reading gives."""
    inputs = step((40,), kv_heads=3)
    with pytest.raises(ValueError, match=r"heads.*36.*16"):
        decode(replace(inputs, bases=heads_first(inputs)), backend)


def without_tokens(inputs: Inputs, *, requests: int) -> Inputs:
    """Return the step of no query rows."""
    return replace(
        inputs,
        query=inputs.query[:0], block_table=inputs.block_table[:requests], seq_lens=inputs.seq_lens[:requests],
    )  # fmt: skip


def test_no_tokens_no_launch(backend):
    """C49, triton-lang/triton#10464: an empty batch returns an empty result."""
    inputs = step((0,), max_blocks=4)
    nothing = without_tokens(inputs, requests=0)
    out, lse = decode(nothing, backend)
    assert out.shape == (0, HEADS, 192)
    assert lse.shape == (0, HEADS)
    ragged = replace(without_tokens(inputs, requests=1), cu_query_lens=np.zeros(2, np.int32))
    assert decode(ragged, backend)[0].shape == (0, HEADS, 192)
    assert decode_gated(nothing, backend, splits=8).shape == (0, HEADS, 192)
    merged, _ = merge(np.zeros((2, 0, 4, 16), np.float32), np.zeros((2, 0, 4), np.float32), backend)
    assert merged.shape == (0, 4, 16)
    (_, cache, _, lens), _ = arguments(nothing, backend)
    api_of(backend).append(cache, cache.bases[0][0, :0], cache.bases[1][0, :0], lens)


def test_no_tokens_over_an_empty_pool(backend):
    """C49, triton-lang/triton#10464: nor does an empty pool need a launch when nobody reads it."""
    inputs = step((0,), max_blocks=4)
    out, lse = decode(replace(inputs, bases=tuple(base[:0] for base in inputs.bases)), backend)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_one_request_with_no_tokens_is_an_error_unless_ragged(backend):
    """C49, triton-lang/triton#10464: 0 tokens for a table of one row, without cu_query_lens."""
    inputs = without_tokens(step((0,), max_blocks=4), requests=1)
    with pytest.raises(ValueError, match=r"query.*requests \* query_len"):
        decode(inputs, backend)
    with pytest.raises(ValueError, match="query"):
        reference.swa_decode(*inputs.arrays(), window=512)


def test_no_rows_per_request_is_an_error(backend):
    """C49, triton-lang/triton#10464: query_len=0 is not a way to say "nothing"."""
    inputs = replace(without_tokens(step((8, 8)), requests=2), query_len=0)
    with pytest.raises(ValueError, match="query_len must be at least 1"):
        decode(inputs, backend)
    with pytest.raises(ValueError, match="query_len"):
        reference.swa_decode(*inputs.arrays(), window=512, query_len=0)


@pytest.mark.parametrize("device", ["h200", "a100", "cpu"])
def test_planner_of_no_tokens(device):
    """C49, triton-lang/triton#10464: no division by zero, and a legal plan."""
    assert swa_decode_plan(0, 8, 12, 1, 132, 512) == (1, 8)
    for query_len in (1, 4):
        made = plan(Problem(0, 96, 8, 192, 192, 512, 16, 4, query_len=query_len), DeviceProfile.named(device))
        assert made.splits >= 1
        assert 1 <= made.pack <= query_len
        assert made.workspace_bytes == 0


def test_reference_takes_strides_as_they_come():
    """C40 and C43 in the reference."""
    inputs = step((1, 17, 200), kv_heads=2)
    expected = reference.swa_decode(*inputs.arrays(), window=512)
    key, value = np.moveaxis(np.stack((inputs.key_cache, inputs.value_cache), 1), 1, 0)
    query = np.concatenate((inputs.query, inputs.query), axis=1)[:, :24]
    assert not key.flags.c_contiguous
    assert same_bits(expected, reference.swa_decode(query, key, value, *inputs.arrays()[3:], window=512))
