"""Request traces: CSV files with the columns TIMESTAMP, ContextTokens, GeneratedTokens.

The columns are those of the public Azure LLM inference traces, whose timestamps have seven fractional digits. Other
columns are ignored. A bad cell is an error that names file, line and column, because such files have thousands of
lines.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

MAX_TOKENS = 1 << 24
"""Longest context or generation that is believed: more is a damaged file, and no block table would be that wide."""


class TraceError(ValueError):
    """A trace file that cannot be read; the message says where."""


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        number: position in the file, from 0.
        arrival_s: seconds after the trace's first request.
        context: tokens of the prompt, whose keys and values are in the cache when decoding starts.
        generated: tokens to generate.
    """

    number: int
    arrival_s: float
    context: int
    generated: int

    @property
    def total(self) -> int:
        """Tokens at the end."""
        return self.context + self.generated


def bundled_trace() -> Path:
    """Return the small trace that comes with the package (made by ``benchmarks/make_trace.py``)."""
    return Path(str(resources.files("bridge") / "_data" / "trace.csv"))


def read_trace(path: Path) -> list[Request]:
    """Read a trace, in order of arrival.

    Raises:
        TraceError: the file is missing or unreadable, a column is missing, a cell is bad or there is no request.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            rows = list(_rows(path, csv.reader(lines, strict=True)))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    if not rows:
        raise TraceError(f"{path}: holds no requests")
    start = min(arrival for arrival, _, _ in rows)
    requests = [
        Request(number, (arrival - start).total_seconds(), context, generated)
        for number, (arrival, context, generated) in enumerate(rows)
    ]
    return sorted(requests, key=lambda request: request.arrival_s)


def _rows(path: Path, reader: Iterator[list[str]]) -> Iterator[tuple[datetime, int, int]]:
    """Yield (arrival, context, generated) of each line."""
    line = 0
    try:
        for cells in reader:
            line = reader.line_num  # type: ignore[attr-defined]
            if not cells:
                continue
            break
        else:
            raise TraceError(f"{path}: is empty; its first line must name the columns {', '.join(COLUMNS)}")
        header = [cell.strip() for cell in cells]
        missing = [column for column in COLUMNS if column not in header]
        if missing:
            raise TraceError(f"{path}:{line}: column {missing[0]} is missing; the line names {', '.join(header)}")
        places = [header.index(column) for column in COLUMNS]
        for cells in reader:
            line = reader.line_num  # type: ignore[attr-defined]
            if not cells:
                continue
            if len(cells) != len(header):
                raise TraceError(
                    f"{path}:{line}: must have {len(header)} columns like the first line, got {len(cells)}"
                )
            timestamp, context, generated = (cells[place].strip() for place in places)
            yield (
                _timestamp(path, line, timestamp),
                _tokens(path, line, COLUMNS[1], context, minimum=0),
                _tokens(path, line, COLUMNS[2], generated, minimum=1),
            )
    except csv.Error as error:
        raise TraceError(f"{path}:{line + 1}: is not CSV ({error})") from error


def _timestamp(path: Path, line: int, text: str) -> datetime:
    """Parse a timestamp; one without a zone is taken as UTC, so that all can be compared."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise TraceError(
            f"{path}:{line}: column TIMESTAMP must be like 2023-11-16 18:15:46.6805900, got {text!r}"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _tokens(path: Path, line: int, column: str, text: str, *, minimum: int) -> int:
    """Parse a number of tokens."""
    if not (text.isascii() and text.isdigit() and len(text) < 12 and minimum <= int(text) <= MAX_TOKENS):
        raise TraceError(
            f"{path}:{line}: column {column} must be an integer from {minimum} to {MAX_TOKENS}, got {text!r}"
        )
    return int(text)
