"""The bench's cases: exactly the bytes that a step reads, and tensors that hold them."""

import numpy as np
import pytest

from benchmarks import results, suites
from benchmarks.cases import Case
from benchmarks.tensors import block_tables, live_pages, make_tensors, rotations


def test_bytes_are_those_of_the_keys_that_some_row_sees():
    case = Case("x", "", (3, 40, 700), 2, 4, 192, 128, window=100, query_len=3, block=16)
    seen = 0
    for seq_len in case.seq_lens:
        keys = set()
        for row in range(case.query_len):
            position = seq_len - case.query_len + row
            keys |= set(range(max(0, position - case.window + 1), position + 1))
        seen += len(keys)
    assert case.live_keys == seen
    assert case.read_bytes == seen * 2 * (192 + 128) * 2


def test_bytes_of_known_cases():
    sizes = {case.name: case.read_bytes for case in suites.select(["nine"])}
    assert sizes["b1h8"] == 512 * 8 * 192 * 2 * 2
    assert sizes["b256h8"] == results.FLOOR_BYTES == 805_306_368
    assert sizes["mtp_b32h8"] == 32 * 515 * 8 * 192 * 2 * 2


def test_a_case_holds_its_query_rows():
    with pytest.raises(ValueError, match="at least query_len=4"):
        Case("x", "", (3,), 1, 1, query_len=4)


def test_tables_give_every_live_page_one_owner_and_no_entry_leaves_the_pool():
    case = Case("x", "", (3, 40, 693), 2, 4, 64, 64, window=100, query_len=3, block=16)
    first = [max(0, seq_len - 102) // 16 for seq_len in case.seq_lens]
    last = [-(-seq_len // 16) for seq_len in case.seq_lens]
    assert live_pages(case) == sum(last) - sum(first)
    tables = block_tables(case, 3, 3 * live_pages(case))
    assert tables.shape == (3, 3, 44)
    assert tables.dtype == np.int32
    live = [page for table in tables for row, a, b in zip(table, first, last, strict=True) for page in row[a:b]]
    assert sorted(live) == list(range(3 * live_pages(case)))
    assert tables.min() >= 0
    assert tables.max() < 3 * live_pages(case)
    tensors = make_tensors(case, device="cpu", sets=3)
    assert tensors.key_cache.shape == (3 * live_pages(case), 16, 2, 64)
    assert tensors.key_cache.count_nonzero() > 0.99 * tensors.key_cache.numel()


def test_suites():
    cases = suites.select(["all"])
    assert len({case.name for case in cases}) == len(cases)
    assert {case.suite for case in cases} == set(suites.SUITES) - {"cpu"}
    by_suite = {name: [case for case in cases if case.suite == name] for name in suites.SUITES}
    assert [case.name for case in by_suite["nine"]] == [workload.name for workload in suites.NINE]
    assert all(max(case.seq_lens) <= case.window // 2 for case in by_suite["short"])
    assert all(case.window <= min(case.seq_lens) < max(case.seq_lens) <= 4 * case.window for case in by_suite["ragged"])
    assert sorted({round(case.read_bytes / 1e6) for case in by_suite["ragged"]}) == [50, 201, 805]
    assert {case.window for case in by_suite["windows"]} == {128, 1024, 4096}
    assert max(case.read_bytes for case in by_suite["windows"] if case.window == 128) > 50e6
    assert {case.query_len for case in by_suite["mtp"]} == set(range(2, 9))
    assert len({case.read_bytes for case in by_suite["context"]}) == 1
    assert [max(case.seq_lens) for case in by_suite["context"]] == [1024, 8192, 131072]
    assert {case.requests for case in by_suite["models"]} == {1, 16, 128}
    assert any(len(set(case.seq_lens)) > 10 for case in by_suite["traces"])
    # Less would stay in the L2 cache.
    assert min(case.read_bytes * rotations(case.read_bytes) for case in cases) >= 150_000_000


def test_a_suite_of_a_trace_is_the_same_each_time_and_depends_on_the_file(tmp_path):
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2024-01-01 12:00:00.{number:03d},{700 + number},{20 + number % 7}" for number in range(40)]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(lines))
    found = suites.select(["traces"], trace=trace)
    assert found == suites.select(["traces"], trace=trace)
    assert found != suites.select(["traces"])
    assert max(case.requests for case in found) == 40
    assert all(700 <= min(case.seq_lens) <= max(case.seq_lens) < 780 for case in found)
