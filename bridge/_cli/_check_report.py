"""The report of ``swa check``: a line a backend, the rows that miss, and what it comes to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bridge.parity import Outcome
from swa_plan.cases import Case


def to_json(
    outcomes: Sequence[Outcome], random: Sequence[Case], absent: dict[str, str], *, seed: int
) -> dict[str, Any]:
    """Return everything as values that JSON has; an infinite error, or one of nothing computed, is null."""
    return {
        "ok": all(outcome.ok for outcome in outcomes),
        "seed": seed,
        "random": {case.name: repr(case) for case in random},
        "backends": {name: _summary(rows) for name, rows in _by_backend(outcomes).items()},
        "absent": absent,
        "outcomes": [outcome.to_json() for outcome in outcomes],
    }


def print_report(
    outcomes: Sequence[Outcome],
    absent: dict[str, str],
    console: Console,
    *,
    brief: Sequence[str],
    all_rows: bool,
    wall_s: float,
) -> None:
    """Print the report.

    Args:
        outcomes: every row.
        absent: backends that could not run, and why.
        console: where to.
        brief: interpreters, which ran fewer named cases.
        all_rows: whether to print the rows that do not miss too.
        wall_s: how long it took.
    """
    console.print(_backend_table(outcomes))
    console.print(
        "[dim]error, bound, ulps: of the case where error / bound is largest. bits: equal to a second run without "
        "poison; for a crossed way, to the same kernel not crossed. memory: cache and arguments have one address in "
        "both.[/]"
    )
    for reason in dict.fromkeys(absent.values()):
        names = ", ".join(name for name, why in absent.items() if why == reason)
        console.print(f"[dim]absent: {names} ({escape(reason)})[/]")
    if brief:
        console.print(f"[dim]{' and '.join(brief)} ran few of the named cases; --backend NAME runs all[/]")
    shown = outcomes if all_rows else [outcome for outcome in outcomes if not outcome.ok]
    if shown:
        console.print()
        console.print(_row_table(shown))
    console.print()
    console.print(_verdict(outcomes, wall_s))


def _by_backend(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    rows: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault(outcome.backend, []).append(outcome)
    return rows


def _worst(outcomes: Sequence[Outcome]) -> Outcome:
    return max(outcomes, key=lambda outcome: outcome.ratio)


def _summary(rows: Sequence[Outcome]) -> dict[str, Any]:
    worst = _worst(rows).to_json()
    crossed = [row.same_memory for row in rows if row.same_memory is not None]
    return {
        "cases": len(rows),
        "misses": sum(not row.ok for row in rows),
        **{name: worst[name] for name in ("error", "bound", "ratio", "ulps")},
        "worst_case": worst["case"],
        "bitwise": sum(row.bitwise for row in rows),
        "same_memory": sum(crossed) if crossed else None,
    }


def _backend_table(outcomes: Sequence[Outcome]) -> Table:
    table = _table("backend", "cases", "miss", "error", "bound", "ratio", "ulps", "bits", "memory", "worst case")
    for name, rows in _by_backend(outcomes).items():
        worst, summary = _worst(rows), _summary(rows)
        misses = f"[bold red]{summary['misses']}[/]" if summary["misses"] else "0"
        memory = "" if summary["same_memory"] is None else _share(summary["same_memory"], len(rows))
        table.add_row(
            name, str(len(rows)), misses, *_numbers(worst), _share(summary["bitwise"], len(rows)), memory, worst.case
        )
    return table


def _row_table(outcomes: Sequence[Outcome]) -> Table:
    table = _table("backend", "dtype", "cache", "error", "bound", "ratio", "ulps", "bits", "memory", "case")
    for row in outcomes:
        memory = "" if row.same_memory is None else _equal(row.same_memory)
        name = row.backend if row.ok else f"[bold red]{row.backend}[/]"
        dtypes = (_short(row.dtype), _short(row.cache_dtype))
        table.add_row(name, *dtypes, *_numbers(row), _equal(row.bitwise), memory, row.case)
    return table


def _table(*columns: str) -> Table:
    """Return a table in which only the last column, the name of a case, gives way to a narrow terminal."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in columns:
        number = name in ("cases", "miss", "error", "bound", "ratio", "ulps")
        table.add_column(name, justify="right" if number else "left", no_wrap=name != columns[-1], overflow="fold")
    return table


def _numbers(row: Outcome) -> tuple[str, str, str, str]:
    return _number(row.error, ".1e"), _number(row.bound, ".1e"), _number(row.ratio, ".2f"), _number(row.ulps, ".3g")


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "inf"


def _share(count: int, total: int) -> str:
    return "equal" if count == total else f"[bold red]{count}/{total}[/]"


def _equal(value: bool) -> str:
    return "equal" if value else "[bold red]differ[/]"


def _short(dtype: str) -> str:
    return dtype.replace("float8_", "").replace("bfloat", "bf").replace("float", "fp")


def _verdict(outcomes: Sequence[Outcome], wall_s: float) -> str:
    misses = sum(not outcome.ok for outcome in outcomes)
    worst = _worst(outcomes)
    verdict = f"[bold red]{misses} MISSED[/]" if misses else "[green]all within the rule[/]"
    cases, backends = len({outcome.case for outcome in outcomes}), len(_by_backend(outcomes))
    return (
        f"{verdict}: {len(outcomes)} runs of {cases} cases on {backends} backends in {wall_s:.0f} s; "
        f"worst error / bound {_number(worst.ratio, '.2f')} ({worst.backend}, {worst.case})"
    )
