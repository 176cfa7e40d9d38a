"""``swa bench``: options in, a run of ``benchmarks`` (which only a checkout has), tables, plots and a file out."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bridge._cli import _frameworks
from bridge._cli._console import stderr, stdout, usage_errors

if TYPE_CHECKING:
    from benchmarks.results import Run

WIDE = 250
"""Columns where output goes into a file: tables are as wide as they need."""


def bench(
    suite: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="nine, models, traces, short, ragged, windows, mtp, context, cpu or all; may be given again, or with "
            "commas (default: nine; cpu without a GPU).",
            show_default=False,
        ),
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Only cases whose name matches.", show_default=False)
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="torch-graph, torch-gluon, torch-eager, jax-jit, jax-single, floor, original, unified, fa3-gate, "
            "xla-gather (these are default), torch-original-plan, torch-fp8 (default: all that are present).",
            show_default=False,
        ),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="Print the cases with shapes and bytes, measure nothing.")
    ] = False,
    host: Annotated[
        bool, typer.Option("--host", help="Only what an eager call costs the host, ours and the original's.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE.csv", dir_okay=False, help="What suite traces replays (default: the bundled trace)."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Interleaved runs, whose median counts.")] = 3,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", dir_okay=False, help="Write everything here, anew after each case."),
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="FOLDER", file_okay=False, help="Draw the results into this folder.")
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", dir_okay=False, help="Show (and draw) such a file, measure nothing."),
    ] = None,
) -> None:
    """Measure decode steps beside rivals and the read floor (from a checkout of the repository)."""
    saved: Run | None = None
    with usage_errors():
        _check(json, plots)
        if from_ is not None:
            from benchmarks.results import load

            saved = load(from_)
        elif not _frameworks.installed("torch"):
            raise ValueError("bench needs torch: pip install 'swa-decode[torch]'")
    if saved is not None:
        _show(saved, plots)
        return
    # Before JAX is imported: else it takes most of the GPU's memory when it starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if host:
        _host(json)
    else:
        _measure(_split(suite), _split(case), _split(contender), trace, rounds, json, plots, only_list=list_)


def _measure(
    suites: list[str], globs: list[str], names: list[str], trace: Path | None, rounds: int, json: Path | None,
    plots: Path | None, *, only_list: bool,
) -> None:  # fmt: skip
    from benchmarks import bench as work
    from benchmarks.contenders import choose
    from benchmarks.contenders.base import this_machine
    from benchmarks.suites import select

    machine = this_machine()
    with usage_errors():
        cases = select(suites or [work.default_suite(machine)], globs, trace=trace)
        contenders, absent = ([], {}) if only_list else choose(names, machine)
    if only_list:
        work.list_cases(cases, _wide(stdout()))
        return
    run = work.start_run(absent, machine, rounds=rounds)
    console = stderr()
    if not machine.cuda:
        console.print("[bold]no CUDA device: these are times of the CPU, and of nothing else[/]")
    for name, why in absent.items():
        console.print(f"absent: {name} ({why})", markup=False, soft_wrap=True)
    work.measure(run, cases, contenders, machine, json_file=json, console=console)
    _show(run, plots)


def _show(run: Run, plots: Path | None) -> None:
    from benchmarks.report import print_report

    print_report(run, _wide(stdout()))
    if plots is not None:
        from benchmarks.plots import draw

        drawn = draw(run, plots)
        stderr().print("drawn: " + (", ".join(map(str, drawn)) or "nothing, for want of figures"), soft_wrap=True)


def _host(json: Path | None) -> None:
    from benchmarks.host_cost import host_costs, print_costs, require_gpu, save_costs

    with usage_errors():
        require_gpu()
    rows = host_costs()
    print_costs(rows, _wide(stdout()))
    if json is not None:
        save_costs(rows, json)


def _check(json: Path | None, plots: Path | None) -> None:
    """Refuse what could only fail later.

    Raises:
        ValueError: the checkout, matplotlib or a folder is missing.
    """
    found = find_spec("benchmarks")
    folders = found.submodule_search_locations if found is not None else None
    if not any((Path(folder) / "bench.py").is_file() for folder in folders or ()):
        raise ValueError(
            "bench needs a checkout of the repository: the package `benchmarks` is not part of the installed one "
            "(run it in the checkout, as PYTHONPATH=. python -m bridge._cli bench)"
        )
    if plots is not None and find_spec("matplotlib") is None:
        raise ValueError("--plots needs matplotlib: pip install 'swa-decode[cli]'")
    if json is not None and not json.parent.is_dir():
        raise ValueError(f"--json must name a file in an existing folder, got {json}")


def _split(values: list[str] | None) -> list[str]:
    """Return the parts of options that may be given again or with commas."""
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]


def _wide(console: Console) -> Console:
    """Return a console that is as wide as tables need where no terminal shows them."""
    return console if console.is_terminal else Console(highlight=False, width=WIDE)
