"""``merge_states``: against the reference, and shards that add up to the whole."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from swa_plan import cases, reference, tolerance
from swa_torch import merge_states, swa_decode
from tests.contract.backends import inputs_for
from tests.contract.torch_runner import BACKENDS, device_of, to_numpy, torch_arguments
from tests.torch.helpers import make_step, normal, same_bits

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


TOKENS, HEADS = 3, 4


def make_states(parts, backend, *, tokens=TOKENS, heads=HEADS, v_dim=64, dtype=torch.float32, seed=0):
    device = device_of(backend)
    outs = normal(parts, tokens, heads, v_dim, seed=seed).to(device, dtype)
    return outs, (3 * normal(parts, tokens, heads, seed=seed + 1)).to(device)


def ulps_of_fp32(actual, expected):
    """Return the worst error in units of fp32's last place at each row's maximum."""
    largest = np.abs(expected).max(axis=-1, keepdims=True).astype(np.float32)
    return float((np.abs(actual.astype(np.float64) - expected) / np.spacing(np.maximum(largest, 1e-30))).max())


def lse_ulps(lse, expected, lses):
    """Return the worst error of an LSE in units of fp32's last place at the largest number that it is made of."""
    made_of = np.maximum(np.abs(to_numpy(lses)).max(axis=0), 1).astype(np.float32)
    return float((np.abs(to_numpy(lse).astype(np.float64) - expected) / np.spacing(made_of)).max())


# 1 is a copy, 2 and 16 are unrolled, 17 and 40 go through the loop.
@pytest.mark.parametrize(("parts", "v_dim"), [(1, 64), (2, 80), (3, 192), (16, 64), (17, 80), (40, 64)])
def test_merges_as_the_reference(parts, v_dim, backend):
    outs, lses = make_states(parts, backend, v_dim=v_dim)
    out, lse = merge_states(outs, lses)
    expected, expected_lse = reference.merge_states(to_numpy(outs), to_numpy(lses))
    # Each weight is an exponential, and each part adds a product and a sum: a few ulps, plus one for every part.
    assert ulps_of_fp32(to_numpy(out), expected) <= 8 + parts
    assert lse_ulps(lse, expected_lse, lses) <= 8


@pytest.mark.parametrize("parts", [2, 17])
def test_sinks_and_gate_are_added_once(parts, backend):
    device = device_of(backend)
    outs, lses = make_states(parts, backend)
    sinks, gate = normal(HEADS, seed=5).to(device), normal(TOKENS, HEADS, seed=6).to(device)
    out, lse = merge_states(outs, lses, sinks=sinks, gate=gate)
    expected, expected_lse = reference.merge_states(
        to_numpy(outs), to_numpy(lses), sinks=to_numpy(sinks), gate=to_numpy(gate)
    )
    assert ulps_of_fp32(to_numpy(out), expected) <= 12 + parts
    assert lse_ulps(lse, expected_lse, lses) <= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype, out_dtype, backend):
    if backend == "interpret" and torch.bfloat16 in (dtype, out_dtype):
        pytest.skip("Triton's interpreter truncates conversions to bfloat16 instead of rounding them")
    outs, lses = make_states(3, backend, dtype=dtype)
    out, lse = merge_states(outs, lses, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or dtype)
    assert lse.dtype == torch.float32
    exact, _ = merge_states(outs.float(), lses)
    assert same_bits(out, exact.to(out.dtype)), "partials are widened exactly and the result rounded once"


@pytest.mark.parametrize("parts", [2, 17])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 3e38])
def test_a_part_that_saw_nothing_changes_no_bit(parts, garbage, backend):
    outs, lses = make_states(parts, backend)
    expected = merge_states(outs, lses)
    for place in (0, 1, parts):
        more_outs = torch.cat([outs[:place], torch.full_like(outs[:1], garbage), outs[place:]])
        more_lses = torch.cat([lses[:place], torch.full_like(lses[:1], -torch.inf), lses[place:]])
        # From 16 parts on the loads are in a loop, whose sums are in the same order.
        assert same_bits(merge_states(more_outs, more_lses), expected)


@pytest.mark.parametrize("options", [False, True])
def test_a_row_without_any_keys_is_zero(options, backend):
    outs, lses = make_states(3, backend)
    outs[:, 2], lses[:, 2] = torch.nan, -torch.inf
    sinks = normal(HEADS).to(outs.device) if options else None
    gate = torch.full((TOKENS, HEADS), torch.nan, device=outs.device) if options else None
    out, lse = merge_states(outs, lses, sinks=sinks, gate=gate)
    assert (out[2] == 0).all()
    assert (lse[2] == -torch.inf).all()
    others = [0, 1]
    assert out[others].isnan().all() if options else out[others].isfinite().all()
    assert lse[others].isfinite().all()


def test_nan_reaches_its_own_row_only(backend):
    outs, lses = make_states(3, backend)
    expected = merge_states(outs, lses)
    lses[1, 2, 3] = torch.nan
    out, lse = merge_states(outs, lses)
    assert out[2, 3].isnan().all()
    assert lse[2, 3].isnan()
    out[2, 3], lse[2, 3] = expected[0][2, 3], expected[1][2, 3]
    assert same_bits((out, lse), expected)


@pytest.mark.parametrize("shift", [-1e4, 1e4, 1e30])
def test_large_lses_neither_overflow_nor_vanish(shift, backend):
    outs, lses = make_states(3, backend)
    lses = lses + shift
    out, lse = merge_states(outs, lses)
    expected, expected_lse = reference.merge_states(to_numpy(outs), to_numpy(lses))
    assert ulps_of_fp32(to_numpy(out), expected) <= 16
    assert lse_ulps(lse, expected_lse, lses) <= 8


def test_one_part_is_returned_as_it_is(backend):
    outs, lses = make_states(1, backend)
    out, lse = merge_states(outs, lses)
    assert same_bits(out, outs[0])
    assert lse_ulps(lse, to_numpy(lses[0]).astype(np.float64), lses) <= 1


def test_strided_states(backend):
    outs, lses = make_states(4, backend)
    gate = normal(TOKENS, HEADS, seed=6).to(outs.device)
    expected = merge_states(outs, lses, gate=gate)
    tokens_first = outs.transpose(0, 1).contiguous().transpose(0, 1)
    padded = torch.full((4, TOKENS, HEADS, 80), torch.nan, device=outs.device)
    padded[..., :64] = outs
    lses_last = lses.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    for one, other in ((tokens_first, lses), (padded[..., :64], lses_last), (outs, lses_last)):
        assert same_bits(merge_states(one, other, gate=gate.t().contiguous().t()), expected)


def test_no_tokens(backend):
    outs, lses = make_states(3, backend, tokens=0)
    out, lse = merge_states(outs, lses)
    assert out.shape == (0, HEADS, 64)
    assert lse.shape == (0, HEADS)


# --- context shards: cut by kv_start and kv_end, merged, they are the whole ---


@pytest.mark.parametrize("cuts", [(17,), (1, 16, 40), (0, 5, 200)])
@pytest.mark.parametrize("name", ["window-edge", "verify-gate", "sinks-short", "ragged", "softcap", "verify-sinks"])
def test_merged_shards_are_the_whole(name, cuts, backend):
    inputs = inputs_for(cases.by_name(name), backend, seed=8, dtype="float32")
    positional, options = torch_arguments(inputs, device_of(backend))
    sinks, gate = options.pop("sinks", None), options.pop("gate", None)
    options.update(return_lse=True, out_dtype=torch.float32, backend=backend)
    lengths = positional[3]
    edges = (-(2**31), *cuts, 2**31 - 1)
    shards = []
    for low, high in pairwise(edges):
        start, end = (torch.full_like(lengths, edge, dtype=torch.int32) for edge in (low, high))
        shards.append(swa_decode(*positional, **options, kv_start=start, kv_end=end))
    out, lse = merge_states(
        torch.stack([shard[0] for shard in shards]), torch.stack([shard[1] for shard in shards]), sinks=sinks, gate=gate
    )
    tolerance.assert_close(to_numpy(out), inputs, out_dtype="float32", actual_lse=to_numpy(lse))


def test_a_shared_prefix_is_attended_once(backend):
    """A cascade: the prefix through one table row for all, the rest through each request's own."""
    device = device_of(backend)
    step = make_step((40, 47, 33), device=device)
    step.block_table[:, 0] = step.block_table[0, 0]
    whole = swa_decode(*step, window=None, return_lse=True)
    prefix = swa_decode(
        step.query, step.cache, step.block_table, step.seq_lens, window=None, return_lse=True,
        kv_end=torch.full_like(step.seq_lens, 16),
    )  # fmt: skip
    rest = swa_decode(*step, window=None, return_lse=True, kv_start=torch.full_like(step.seq_lens, 16))
    merged = merge_states(torch.stack([prefix[0], rest[0]]), torch.stack([prefix[1], rest[1]]))
    for actual, expected in zip(merged, whole, strict=True):
        worst = (actual - expected).abs().max() / expected.abs().max()
        assert worst <= 16 * torch.finfo(torch.float32).eps
