"""``swa check``: cases through every backend present, judged by the tolerance rule."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bridge import parity
from bridge._cli import _frameworks
from bridge._cli._check_report import print_report, to_json
from bridge._cli._console import print_json, stderr, stdout, usage_errors
from bridge._cli._interpreter import Interpreter
from bridge.parity._backends import BACKENDS, INTERPRETERS, OWN_PROCESS
from bridge.parity._cases import DEFAULT_SEED
from swa_plan.cases import Case, by_name

DEFAULT_RANDOM = 3
SHOWN_MISSES = 20
LUCK = 2.0
"""Ratios of honest misses were below this: the largest that was measured is 1.64 (docs/parity.md)."""


def check(
    case: Annotated[
        list[str] | None, typer.Argument(metavar="CASE", help="Named cases (default: all).", show_default=False)
    ] = None,
    cases: Annotated[
        int | None,
        typer.Option(
            "--cases",
            metavar="N",
            min=0,
            help=f"Random cases beside the named ones (default: {DEFAULT_RANDOM}, none where a CASE is given).",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Of the random cases and of all data.")] = DEFAULT_SEED,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"One of {', '.join(BACKENDS)}; may be given again (default: all that are present).",
            show_default=False,
        ),
    ] = None,
    all_rows: Annotated[bool, typer.Option("--all", "-v", help="Show every row, not only those that miss.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Compare every backend with float64, and the ways that cross from one framework to the other with both."""
    start = time.perf_counter()
    with usage_errors():
        named = [by_name(name) for name in dict.fromkeys(case or ())]
        here, interpreted, absent = _choose(list(dict.fromkeys(backend or ())))
    count = cases if cases is not None else 0 if named else DEFAULT_RANDOM
    random = parity.random_cases(count, seed=seed)

    def cases_of(name: str) -> list[Case]:
        # A backend that is asked for by name runs everything.
        brief = name in INTERPRETERS and not backend
        return [*(named or (parity.BRIEF if brief else parity.CASES)), *random]

    jobs = [(each, name) for name in here for each in cases_of(name)]
    outcomes = _run(jobs, Interpreter(cases_of("interpret"), seed=seed) if interpreted else None, seed=seed)
    if json:
        print_json(to_json(outcomes, random, absent, seed=seed))
    else:
        brief = [name for name in INTERPRETERS if name not in absent] if not (backend or named) else []
        print_report(outcomes, absent, stdout(), brief=brief, all_rows=all_rows, wall_s=time.perf_counter() - start)
    misses = [outcome for outcome in outcomes if not outcome.ok]
    if misses:
        _name_misses(misses, {drawn.name: drawn for drawn in random}, seed=seed)
        raise typer.Exit(1)


def _choose(asked: list[str]) -> tuple[list[str], bool, dict[str, str]]:
    """Return the backends that run in this process, whether ``interpret`` runs in one of its own, and the absent.

    Raises:
        ValueError: a backend that is asked for does not exist or cannot run.
    """
    for name in asked:
        if name not in BACKENDS:
            raise ValueError(f"--backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    with _frameworks.small_jax():
        present, absent = parity.backends(), parity.absent()
    own_process = absent.get("interpret") == OWN_PROCESS
    if own_process:
        del absent["interpret"]
    for name in asked:
        if name in absent:
            raise ValueError(f"--backend {name} cannot run here: {absent[name]}")
    wanted = asked or BACKENDS
    return [name for name in present if name in wanted], own_process and "interpret" in wanted, absent


def _name_misses(misses: list[parity.Outcome], random: dict[str, Case], *, seed: int) -> None:
    """Say on stderr where each miss is, and all that a random case needs to run again."""
    console = stderr()
    for miss in misses[:SHOWN_MISSES]:
        console.print(f"MISS {miss.backend}, {miss.case}: {miss.message}", markup=False, soft_wrap=True)
        if miss.case in random:
            again = f"parity.check(parity.{random[miss.case]!r}, {miss.backend!r}, seed={seed})"
            console.print(f"     {again}", markup=False, soft_wrap=True)
    if len(misses) > SHOWN_MISSES:
        console.print(f"and {len(misses) - SHOWN_MISSES} more")
    if all(1 < miss.ratio < LUCK and miss.bitwise and miss.same_memory is not False for miss in misses):
        console.print(
            "A ratio just above 1 can be the draw's luck: see whether it comes again with another seed (--seed for "
            "named cases; for a random one, which --seed draws, the call above)."
        )


def _run(jobs: list[tuple[Case, str]], interpreter: Interpreter | None, *, seed: int) -> list[parity.Outcome]:
    """Run everything under a progress bar on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr(), transient=True) as progress:
        if interpreter is None:
            return _run_here(jobs, progress, seed=seed)
        with interpreter:
            total = len(interpreter.cases)
            task = progress.add_task("interpret, in a process of its own", total=None)
            outcomes = _run_here(jobs, progress, seed=seed)
            outcomes += interpreter.outcomes()
            progress.update(task, total=total, completed=total)
    return sorted(outcomes, key=lambda outcome: BACKENDS.index(outcome.backend))


def _run_here(jobs: list[tuple[Case, str]], progress: Progress, *, seed: int) -> list[parity.Outcome]:
    outcomes = []
    task = progress.add_task("check", total=len(jobs))
    for case, backend in jobs:
        progress.update(task, description=f"{backend}, {case.name}")
        outcomes.append(_attempt(case, backend, seed=seed))
        progress.advance(task)
    return outcomes


def _attempt(case: Case, backend: str, *, seed: int) -> parity.Outcome:
    try:
        return parity.check(case, backend, seed=seed)
    except Exception as error:  # that a backend fails is what a check is to find, and the other cases still run
        return parity.Outcome.failed(case, backend, f"{type(error).__name__}: {error}")
