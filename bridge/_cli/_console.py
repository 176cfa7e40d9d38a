"""Where output goes: reports to stdout, or one JSON object there; progress and notes to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console


def stdout() -> Console:
    """Return a console on stdout, as it is now."""
    return Console(highlight=False)


def stderr() -> Console:
    """Return a console on stderr, as it is now."""
    return Console(stderr=True, highlight=False)


def print_json(value: dict[str, Any]) -> None:
    """Print one object; a NaN or infinity would not be JSON and is an error here."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextmanager
def usage_errors() -> Iterator[None]:
    """Report what a wrong option or file raises as wrong usage (exit code 2)."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        raise typer.BadParameter(str(error)) from error


def si_bytes(count: float) -> str:
    """Return a number of bytes for a person."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def duration(time_us: float) -> str:
    """Return a time in microseconds for a person."""
    if time_us < 1000:
        return f"{time_us:.1f} us"
    return f"{time_us / 1e3:.2f} ms" if time_us < 1e6 else f"{time_us / 1e6:.2f} s"
