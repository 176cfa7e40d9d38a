"""Kind 3 of the known failures: the padding of a batch is written as zeros and reads nothing."""

from __future__ import annotations

import numpy as np
import pytest

from swa_plan import tolerance
from tests.contract.backends import BACKENDS, INTERPRETED, PLAIN, decode_gated, plan_for, same_bits
from tests.failures.probes import (
    RUNNERS,
    assert_exact,
    clean,
    decode,
    step,
    subset,
    with_free_page_0,
)

NAN = float("nan")


@pytest.mark.parametrize("query_len, splits", [(1, 1), (1, 8), (4, 1), (4, 2 if INTERPRETED else 8)])
@pytest.mark.parametrize("runner", RUNNERS)
def test_padding_requests_are_zero_and_read_no_page(runner, query_len, splits):
    """C24, vllm-project/vllm#43682: graph padding has length 0 and a table of -1."""
    inputs = step((17, 513, 1, 0, 0), query_len=query_len)
    inputs.block_table[3:] = -1
    plan = {} if runner == "reference" else {"plan": plan_for(inputs, runner, splits=splits)}
    out, lse = decode(inputs, runner, **plan)
    assert_exact(out[3 * query_len :], 0.0)
    assert (lse[3 * query_len :] == -np.inf).all()
    real = subset(inputs, (0, 1, 2))
    alone, alone_lse = decode(real, runner, **plan)
    if runner in PLAIN:  # their matrix products have the batch's shape
        tolerance.assert_close(out[: 3 * query_len], real, actual_lse=lse[: 3 * query_len])
    else:
        assert same_bits(out[: 3 * query_len], alone)
        assert same_bits(lse[: 3 * query_len], alone_lse)
    if runner != "reference":
        tolerance.assert_close(alone, real, actual_lse=alone_lse)


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_element_of_the_output_is_written(backend, splits):
    """C25, vllm-project/vllm#37442: a padding row is zero, and its NaN gate changes nothing."""
    lengths = (0, 0, 5, 0, 600, 0, 0, 1)
    inputs = step(lengths)
    empty = np.array(lengths) == 0
    inputs.gate = np.where(empty[:, None], np.nan, 0.25).repeat(inputs.query.shape[1], axis=1).astype(np.float32)
    for out in (decode(inputs, backend, splits=splits)[0], decode_gated(inputs, backend, splits=splits)):
        assert (out[empty] == 0).all()
        assert np.isfinite(out.astype(np.float32)).all()
        tolerance.assert_close(out, inputs)


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_rows_between_ragged_rows_are_written(backend, splits):
    """C25, vllm-project/vllm#37442, for rows after the last request's."""
    inputs = step((600, 0, 5), query_len=4, tokens=12)
    inputs.cu_query_lens = np.array([0, 4, 4, 5], np.int32)
    inputs.gate = np.full(inputs.query.shape[:2], np.nan, np.float32)
    inputs.gate[:5] = 1.0
    out, _ = decode(inputs, backend, splits=splits)
    assert (out[5:] == 0).all()
    tolerance.assert_close(out, inputs)


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("runner", RUNNERS)
def test_trash_page_of_padding_rows_leaks_nowhere(runner, splits):
    """C27, huggingface/transformers#46765: padding shares page 0, which is all NaN."""
    inputs = with_free_page_0(step((20, 0, 300, 0)))
    inputs.block_table[[1, 3]] = 0
    expected = decode(clean(inputs), runner, splits=splits)
    for base in inputs.bases:
        base[0] = NAN
    out, lse = decode(inputs, runner, splits=splits)
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])
    assert np.isfinite(out.astype(np.float64)).all()
    assert_exact(out[[1, 3]], 0.0)
