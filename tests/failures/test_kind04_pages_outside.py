"""Kind 4 of the known failures: what lies outside the window, in the cache and in the table, is never read."""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract.backends import same_bits
from tests.failures.probes import (
    RUNNERS,
    clean,
    decode,
    live,
    step,
    with_free_page_0,
    with_invisible,
    with_unused_entries,
)

NAN = float("nan")


@pytest.fixture(params=[1, 2])
def splits(request):
    return request.param


@pytest.mark.parametrize("runner", RUNNERS)
def test_nan_left_of_the_window_leaks_nowhere(runner, splits):
    """C30, vllm-project/vllm#30887: pages 0..53 and the head of page 54 are NaN in K and V."""
    inputs = with_free_page_0(step((1000,), window=128))
    assert live(inputs, 0)[0] == 872
    expected, expected_lse = decode(clean(inputs), runner, splits=splits)
    out, lse = decode(with_invisible(inputs, NAN), runner, splits=splits)
    assert same_bits(out, expected)
    assert same_bits(lse, expected_lse)
    assert np.isfinite(out.astype(np.float64)).all()


@pytest.mark.parametrize("entry", [-1, 0, 2**31 - 1, 10**6])
@pytest.mark.parametrize("runner", RUNNERS)
def test_trimmed_table_entries_are_never_followed(runner, splits, entry):
    """C32, kekzl/imp#924: holes of -1, a null page of NaN, or numbers beyond the pool."""
    inputs = with_free_page_0(step((1000,), window=128))
    expected, expected_lse = decode(clean(inputs), runner, splits=splits)
    holes = with_unused_entries(with_invisible(inputs, NAN), entry)
    assert (holes.block_table[0, :54] == entry).all()
    out, lse = decode(holes, runner, splits=splits)
    assert same_bits(out, expected)
    assert same_bits(lse, expected_lse)
    assert np.isfinite(out.astype(np.float64)).all()


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_longer_table_than_the_request_needs_is_not_followed(runner):
    """C32, kekzl/imp#924, to the right of the request."""
    inputs = step((40, 1000), window=128)
    expected, _ = decode(clean(inputs), runner)
    for entry in (-1, 10**6):
        out, _ = decode(with_unused_entries(with_invisible(inputs, NAN), entry), runner)
        assert same_bits(out, expected)
