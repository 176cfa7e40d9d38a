"""Kind 10 of the known failures: several rows of a request, as speculative decoding verifies them."""

from __future__ import annotations

import numpy as np
import pytest

from swa_plan import tolerance
from tests.contract.backends import BACKENDS, decode_gated, plan_for
from tests.failures.probes import (
    DTYPE,
    RUNNERS,
    assert_exact,
    count_probe,
    decode,
    even_weights,
    id_probe,
    step,
    weight_probe,
)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("pack", [1, 2, 4])
@pytest.mark.parametrize("runner", RUNNERS)
def test_each_verify_row_has_its_own_window(runner, pack, splits):
    """C73, flashinfer-ai/flashinfer#4137: row r of 600 keys starts at key 85 + r."""
    edges = [range(84, 90)]
    inputs = weight_probe(step((600,), query_len=4), edges)
    out, _ = decode(inputs, runner, pack=pack, splits=splits)
    assert_exact(out, even_weights(inputs, edges))
    shown = out[:, 0, :6].astype(np.float64)
    assert (shown[:, 0] == 0).all()
    assert (shown[:, 1] > 0).tolist() == [True, False, False, False]
    assert (shown[:, 4] > 0).all()
    if runner != "reference":
        assert_exact(decode_gated(inputs, runner, pack=pack, splits=splits), even_weights(inputs, edges))


@pytest.mark.parametrize("runner", RUNNERS)
def test_tokens_that_do_not_divide_are_refused(runner):
    """C75, vllm-project/vllm-ascend#9136: 13 tokens of 4 requests are not 4 rows each."""
    inputs = step((40, 40, 40, 40), query_len=4, tokens=13)
    with pytest.raises(ValueError, match=r"query.*13"):
        decode(inputs, runner)
    inputs.cu_query_lens = np.array([0, 4, 8, 12, 13], np.int32)
    out, lse = decode(id_probe(inputs), runner)
    assert_exact(out, np.repeat([1, 2, 3, 4], [4, 4, 4, 1])[:, None, None])
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("counts", [(4, 4, 4, 1), (2, 2, 0, 0), (0, 1, 0, 3)])
@pytest.mark.parametrize("runner", RUNNERS)
def test_ragged_rows_belong_to_their_requests(runner, counts, splits):
    """C75, vllm-project/vllm-ascend#9136: padded to 4 a request, and with fewer tokens than that."""
    tokens = sum(counts) if counts == (2, 2, 0, 0) else 16
    inputs = step((30, 41, 52, 63), query_len=4, tokens=tokens)
    inputs.cu_query_lens = np.cumsum((0, *counts)).astype(np.int32)
    out, lse = decode(inputs, runner, splits=splits)
    if runner != "reference":
        tolerance.assert_close(out, inputs, actual_lse=lse)
    shown, _ = decode(id_probe(inputs), runner, splits=splits)
    owner = np.repeat(np.arange(4) + 1, counts)
    assert_exact(shown[: len(owner)], owner[:, None, None])
    assert_exact(shown[len(owner) :], 0.0)


@pytest.mark.parametrize("runner", RUNNERS)
def test_uniform_rows_are_aligned_to_the_end(runner):
    """C75, vllm-project/vllm-ascend#9136: 16 tokens padded from 13: a request's real row is its last."""
    inputs = step((1,), query_len=4)
    out, lse = decode(id_probe(inputs), runner)
    assert_exact(out[:3], 0.0)
    assert (lse[:3] == -np.inf).all()
    assert_exact(out[3], 1.0)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", DTYPE])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gate_of_every_row_and_head_of_a_packed_tile(backend, dtype, splits):
    """C76, NVIDIA/TensorRT-LLM#15739: not only the first row's gates are read."""
    inputs = count_probe(step((64,), query_len=4, dtype=dtype))
    tokens, heads = inputs.query.shape[:2]
    inputs.gate = (0.01 * np.arange(tokens * heads).reshape(tokens, heads) - 2).astype(np.float32)
    expected = (1 / (1 + np.exp(-inputs.gate.astype(np.float64))))[..., None]
    rounded = expected.astype(np.float32).astype(inputs.query.dtype).astype(np.float64)
    limit = 1e-6 if dtype == "float32" else 0.0
    out, _ = decode(inputs, backend, pack=4, splits=splits)
    for actual in (out, decode_gated(inputs, backend, pack=4, splits=splits)):
        np.testing.assert_allclose(actual.astype(np.float64), np.broadcast_to(rounded, out.shape), rtol=limit, atol=0)


@pytest.mark.parametrize("pack", [1, 4])
@pytest.mark.parametrize("runner", RUNNERS)
def test_verify_rows_do_not_see_the_next_token(runner, pack):
    """C78, vllm-project/vllm-ascend#8057: row r sees draft tokens up to its own."""
    drafts = [[297, 298, 299]]
    inputs = weight_probe(step((300,), query_len=4, window=128), drafts)
    out, _ = decode(inputs, runner, pack=pack)
    assert_exact(out[:, 0, :3], np.tril(np.ones((4, 3)), -1) / 128)


@pytest.mark.parametrize("planned, called", [(1, 4), (4, 1)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_plan_for_other_rows_is_refused(backend, planned, called):
    """C79, sgl-project/sglang#22679: a plan made for plain decode does not silently serve a verify step."""
    plan = plan_for(step((600,), query_len=planned), backend)
    inputs = step((600,), query_len=called)
    with pytest.raises(ValueError, match=f"query_len={planned}, got {called}"):
        decode(inputs, backend, plan=plan)
    for query_len in (planned, called):
        inputs = step((600,), query_len=query_len)
        out, _ = decode(inputs, backend, plan=plan_for(inputs, backend))
        tolerance.assert_close(out, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_row_of_each_request_is_not_a_verify_step(backend):
    """C75, vllm-project/vllm-ascend#9136: 4 tokens of 4 requests with rows [2, 2, 0, 0] need cu_query_lens."""
    inputs = step((30, 41, 52, 63), query_len=4, tokens=4)
    with pytest.raises(ValueError, match="cu_query_lens"):
        decode(inputs, backend)
    inputs.cu_query_lens = np.array([0, 2, 4, 4, 4], np.int32)
    out, lse = decode(inputs, backend)
    tolerance.assert_close(out, inputs, actual_lse=lse)
