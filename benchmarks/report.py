"""A run's tables, for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.results import FAILED, FLOOR, MEASURED, OURS, SLOWER, WRONG, CaseResult, Outcome, Run, geometric_mean

PEERS = ("original", "unified", "fa3 + gate", "xla gather")
OWN = ("jax jit", "torch original plan", "torch fp8")
NAMED_CASES = 4
UNSTEADY = 0.05
"""A spread above this is told."""


def print_report(run: Run, console: Console) -> None:
    """Print what was measured, the times, the ratios and what is to be known of them."""
    facts = ", ".join(f"{name} {value}" for name, value in run.host.items() if value is not None)
    console.print(f"\n[bold]{escape(run.device)}[/]")
    console.print(f"[dim]{escape(facts)}[/]")
    console.print(f"[dim]{escape(run.method)}[/]")
    if run.floor_tbps:
        rates = " and ".join(f"{rate:.2f}" for rate in run.floor_tbps)
        console.print(f"read floor at 805 MB: {rates} TB/s" + ("" if run.counts else f" [bold red]{verdict(run)}[/]"))
    console.print()
    console.print(times_table(run))
    if OURS in run.contenders:
        console.print()
        console.print(ratios_table(run))
        console.print()
        console.print(means_table(run))
    for text in notes(run):
        console.print(text, markup=False, highlight=False)


def verdict(run: Run) -> str:
    """Return what a run is worth whose floor is too low, or "" for one that counts."""
    return "" if run.counts else f"- this run does not count: below {run.least_tbps} TB/s"


def times_table(run: Run) -> Table:
    """Return microseconds a call of every contender."""
    table = _table("Microseconds a call")
    table.add_column("case", no_wrap=True)
    table.add_column("KV MB", justify="right")
    for name in run.contenders:
        table.add_column(name, justify="right", style="bold" if name == OURS else None)
    for result in run.cases:
        cells = (time_cell(result.outcomes.get(name)) for name in run.contenders)
        table.add_row(result.case.name, f"{result.case.read_bytes / 1e6:.1f}", *cells)
    return table


def time_cell(outcome: Outcome | None) -> str:
    """Return a time, with the host's share in brackets, or what there is instead."""
    if outcome is None:
        return ""
    if outcome.time_us is None:
        return f"[red]{outcome.status}[/]" if outcome.status in (WRONG, FAILED) else f"[dim]{outcome.status}[/]"
    host = "" if outcome.host_us is None else f" ({number(outcome.host_us)})"
    return number(outcome.time_us) + host


def ratios_table(run: Run) -> Table:
    """Return how ours stands to the floor and to each rival."""
    others = [name for name in (*OWN, *PEERS) if name in run.contenders]
    table = _table(f"Ratios to ours ({OURS}); above 1 ours is faster, red: slower by more than 3 %")
    table.add_column("case", no_wrap=True)
    table.add_column("of floor", justify="right")
    for name in others:
        table.add_column(f"{name} / ours", justify="right")
    table.add_column("spread", justify="right")
    table.add_column("plan", style="dim", no_wrap=True)
    for result in run.cases:
        ours = result.outcomes.get(OURS)
        spread = None if ours is None else ours.spread
        table.add_row(
            result.case.name,
            ratio_cell(result.ratio(FLOOR)),
            *(ratio_cell(result.ratio(name), bad=result.slower_than(name)) for name in others),
            "" if spread is None else f"{spread:.1%}",
            "" if ours is None else ours.plan,
        )
    return table


def means_table(run: Run) -> Table:
    """Return geometric means of each suite and of all, with the least ratio in brackets."""
    others = [name for name in (*OWN, *PEERS) if name in run.contenders]
    table = _table("Geometric means (least)")
    table.add_column("suite")
    for name in ("cases", "of floor", *(f"{name} / ours" for name in others)):
        table.add_column(name, justify="right")
    suites = run.suites()
    for suite, results in (*suites.items(), *((("all", run.cases),) if len(suites) > 1 else ())):
        ratios = ([result.ratio(name) for result in results] for name in (FLOOR, *others))
        table.add_row(suite, str(len(results)), *map(mean_cell, ratios))
    return table


def mean_cell(ratios: list[float | None]) -> str:
    """Return a geometric mean with the least of the ratios in brackets."""
    mean = geometric_mean(ratios)
    if mean is None:
        return ""
    return f"{mean:.3f} ({min(ratio for ratio in ratios if ratio is not None):.2f})"


def notes(run: Run) -> list[str]:
    """Return what the tables do not say: who was absent, what went wrong, unsteady times, where ours is slower."""
    lines = [f"absent: {name} ({why})" for name, why in run.absent.items()]
    for result in run.cases:
        for name, outcome in result.outcomes.items():
            if outcome.status != MEASURED or outcome.why:
                status = "note" if outcome.status == MEASURED else outcome.status
                lines.append(f"{status}: {name} at {result.case.name} ({outcome.why})")
            if outcome.spread is not None and outcome.spread > UNSTEADY:
                lines.append(f"unsteady: {name} at {result.case.name} (spread {outcome.spread:.1%})")
    for name in ("torch original plan", *PEERS):
        worse = [result for result in run.cases if result.slower_than(name)]
        if worse:
            cases = ", ".join(f"{result.case.name} {result.ratio(OURS, name):.2f}x" for result in worse)
            lines.append(f"slower than {name} by more than {SLOWER - 1:.0%}: {cases}")
    return ["", *_merged(lines)] if lines else []


def line(result: CaseResult) -> str:
    """Return one case in a line, for whoever watches."""
    figures = (f"{name} {time_cell_plain(outcome)}" for name, outcome in result.outcomes.items())
    return f"{result.case.name}: {', '.join(figures)}"


def time_cell_plain(outcome: Outcome) -> str:
    """Return a time, or what there is instead, without mark-up."""
    return outcome.status if outcome.time_us is None else number(outcome.time_us)


def ratio_cell(ratio: float | None, *, bad: bool = False) -> str:
    """Return a ratio with two digits."""
    if ratio is None:
        return ""
    return f"[red]{ratio:.2f}[/]" if bad else f"{ratio:.2f}"


def number(time_us: float) -> str:
    """Return microseconds with the digits that mean something."""
    return f"{time_us:.2f}" if time_us < 100 else f"{time_us:.1f}" if time_us < 1000 else f"{time_us:.0f}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")


def _merged(lines: list[str]) -> list[str]:
    """Say once what one contender has to say of several cases: ``n/a: original at a, b (why)``."""
    merged: dict[tuple[str, str], list[str]] = {}
    for text in lines:
        head, at, rest = text.partition(" at ")
        if text.startswith(("n/a: ", "note: ")) and at:
            case, _, why = rest.partition(" (")
            merged.setdefault((head, f" ({why}"), []).append(case)
        else:
            merged[text, ""] = []
    return [head + _some(cases) + tail for (head, tail), cases in merged.items()]


def _some(cases: list[str]) -> str:
    """Return names of cases, the first few where there are many."""
    if not cases:
        return ""
    rest = len(cases) - NAMED_CASES
    return f" at {', '.join(cases[:NAMED_CASES])}" + (f" and {rest} more" if rest > 0 else "")
