"""Traces: the public format is read, and a bad cell is named by file, line and column."""

import runpy
from pathlib import Path

import pytest

from bridge._replay import TraceError, bundled_trace, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:15:46.6805900,374,44\n"


def write(folder, text):
    path = folder / "trace.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_seven_fractional_digits(tmp_path):
    requests = read_trace(write(tmp_path, HEADER + ROW + "2023-11-16 18:15:50.9951690,396,109\n"))
    assert [(r.number, r.context, r.generated) for r in requests] == [(0, 374, 44), (1, 396, 109)]
    assert requests[0].arrival_s == 0
    assert requests[1].arrival_s == pytest.approx(4.314579, abs=1e-6)


def test_other_columns_blank_lines_order_and_a_byte_order_mark_do_not_matter(tmp_path):
    text = "\ufeffGeneratedTokens,Extra,TIMESTAMP,ContextTokens\r\n\r\n5,x,2024-01-01 00:00:02+00:00,7\r\n"
    text += "6,,2024-01-01 00:00:01,8\r\n"
    requests = read_trace(write(tmp_path, text))
    assert [(r.number, r.arrival_s, r.context, r.generated) for r in requests] == [(1, 0, 8, 6), (0, 1, 7, 5)]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is empty"),
        (HEADER, "holds no requests"),
        ("TIMESTAMP,ContextTokens\n", ":1: column GeneratedTokens is missing"),
        (ROW, ":1: column TIMESTAMP is missing"),
        (HEADER + ROW + "yesterday,1,2\n", ":3: column TIMESTAMP must be like .* got 'yesterday'"),
        (HEADER + ROW + ROW.replace("374", "3.5"), ":3: column ContextTokens .* got '3.5'"),
        (HEADER + ROW + "\n" + ROW.replace("374", "-1"), ":4: column ContextTokens .* got '-1'"),
        (HEADER + ROW.replace("44", ""), ":2: column GeneratedTokens .* got ''"),
        (HEADER + ROW.replace("44", "0"), ":2: column GeneratedTokens must be an integer from 1"),
        (HEADER + ROW.replace("44", "9" * 11), ":2: column GeneratedTokens .* to 16777216"),
        (HEADER + ROW.replace("44", "٤"), ":2: column GeneratedTokens"),
        (HEADER + ROW + "2023-11-16 18:15:46,1\n", ":3: must have 3 columns like the first line, got 2"),
        (HEADER + ROW + '2023-11-16 18:15:46,1,"2\n', ":3: is not CSV"),
        (HEADER.encode() + b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_errors_say_where(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_a_trace_error(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.csv")


def test_the_bundled_trace_is_what_its_script_makes(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "make_trace.py"
    if not script.exists():
        pytest.skip("benchmarks are not part of this installation")
    runpy.run_path(str(script))["main"](tmp_path / "trace.csv")
    assert (tmp_path / "trace.csv").read_bytes() == bundled_trace().read_bytes()
    assert len(read_trace(bundled_trace())) == 200
