"""``check_inputs`` and ``validate=True``: data that would give NaN rows is named instead."""

import pytest
import torch

from swa_torch import check_inputs, swa_decode
from tests.torch.helpers import make_step

PAGES = 14  # of a step of 4 requests with 3 pages each, and two to spare


@pytest.fixture
def step():
    return make_step((20, 5, 0, 33))


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def check(step, **changed):
    """Check a step with ``check_inputs``, then the same with ``validate=True``; the messages must agree."""
    arguments = {"block_table": step.block_table, "seq_lens": step.seq_lens, "window": 16, **changed}
    outcomes = []
    for call in (check_inputs, decode):
        try:
            call(step, **dict(arguments))
            outcomes.append("")
        except ValueError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    return outcomes[0]


def decode(step, *, block_table, seq_lens, **options):
    out = torch.full_like(step.query, 7.0)
    try:
        swa_decode(step.query, step.cache, block_table, seq_lens, out=out, validate=True, **options)
    except ValueError:
        assert (out == 7.0).all()
        raise


check_inputs_of = check_inputs


def check_inputs(step, *, block_table, seq_lens, **options):
    check_inputs_of(step.cache, block_table, seq_lens, tokens=len(step.query), **options)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_valid_data_pass(step, index_dtype):
    assert check(step, block_table=step.block_table.to(index_dtype), seq_lens=step.seq_lens.to(index_dtype)) == ""


@pytest.mark.parametrize("page", [-1, PAGES, 10**6, 2**31 - 1])
def test_an_unknown_page_names_request_and_block(step, page):
    step.block_table[3, 1] = page
    assert check(step) == f"block_table must hold pages in [0, {PAGES}): request 3, block 1, got {page}"


def test_entries_that_nothing_sees_may_hold_anything(step):
    step.block_table[0, 0:1] = step.block_table[0, 0]
    step.block_table[0, 2] = -1  # 20 keys reach into block 1
    step.block_table[1, 1:] = 10**6
    step.block_table[2] = -7
    step.block_table[3, 0] = 2**31 - 1  # keys 17 to 32 start in block 1
    assert check(step) == ""
    assert "request 3, block 0" in check(step, window=18)


def test_a_length_beyond_the_table_names_the_request(step):
    step.seq_lens[1] = 49
    message = check(step)
    assert (
        message
        == "block_table must reach every visible position: request 1 sees position 48, got 3 blocks of 16 positions"
    )


def test_negative_lengths_count_as_zero(step):
    assert check(step, seq_lens=i32(-1, -(2**31), 0, 5)) == ""


def test_ranges_hide_what_is_wrong(step):
    step.block_table[3, 2] = -1
    assert "request 3, block 2, got -1" in check(step)
    assert check(step, kv_end=i32(99, 99, 99, 32)) == ""
    assert "request 3, block 2" in check(step, kv_end=i32(99, 99, 99, 33))
    step.block_table[0, 0] = -1
    step.block_table[3, 2] = 0
    assert "request 0, block 0" in check(step)
    assert check(step, kv_start=i32(16, 0, 0, 0)) == ""


@pytest.mark.parametrize(
    ("edges", "says"),
    [
        ((1, 2, 3, 4, 4), "cu_query_lens must start at 0, got 1"),
        ((0, 2, 1, 3, 4), "cu_query_lens must not decrease: request 1 has -1 rows"),
        ((0, 1, 4, 4, 4), "query_len=2 bounds the rows of each request: request 1 has 3"),
        ((0, 1, 2, 3, 5), "cu_query_lens must end within the query's 4 tokens, got 5"),
    ],
)
def test_ragged_rows(step, edges, says):
    assert check(step, cu_query_lens=i32(*edges), query_len=2) == says


def test_requests_without_rows_need_no_pages(step):
    step.block_table[3] = -1
    assert check(step, cu_query_lens=i32(0, 1, 2, 4, 4), query_len=2) == ""


def test_verify_rows_see_further_back():
    step = make_step((20, 33), query_len=3)
    step.block_table[1, 0] = -1
    assert check(step, query_len=3, window=14) == ""  # rows at 30, 31 and 32 see 17 to 32
    assert "request 1, block 0" in check(step, query_len=3, window=16)


def test_no_requests():
    step = make_step(())
    assert check(step) == ""
