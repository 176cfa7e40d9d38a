"""``swa tune``: measures what plans cost on this GPU, and stores it where that makes plans better."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bridge._cli import _tune_report
from bridge._cli._console import print_json, stderr, stdout, usage_errors
from bridge._tune.compiling import default_processes
from bridge._tune.device import Device, this_device
from bridge._tune.fit import FitError
from bridge._tune.tuning import Measurer
from bridge._tune.tuning import tune as run
from swa_plan._profiles import CONFIG_VARIABLE, config_folder, forget_profile, prepare_folder, store_profile


def tune(
    show: Annotated[bool, typer.Option("--show", help="Only print the profile in use and where it is from.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Only delete what was stored for this GPU.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and print, store nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Store even where plans would become slower.")] = False,
    processes: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Processes that compile (default: cores but one).", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Measure this GPU for the planner of both frameworks: two or three minutes, which need torch and Triton."""
    with usage_errors():
        _check_options(show=show, forget=forget, dry_run=dry_run, force=force)
        device = this_device()
        if device is None:
            raise ValueError("tune needs a CUDA device that torch or jax sees, and there is none here")
        if not (show or forget):
            _check_can_measure(store=not dry_run)
    if show:
        _show(device, json=json)
    elif forget:
        _forget(device, json=json)
    else:
        _tune(device, processes or default_processes(), dry_run=dry_run, force=force, json=json)


def make_measurer(device: Device, processes: int) -> Measurer:
    """Return what takes times on this machine's GPU."""
    from bridge._tune.measure import Bench

    return Bench(device, processes, lambda text: stderr().print(text, markup=False, soft_wrap=True))


def _tune(device: Device, processes: int, *, dry_run: bool, force: bool, json: bool) -> None:
    console = stderr()
    if device.stored is not None:
        console.print(f"[dim]a stored profile is in use until this run is done ({device.file})[/]", soft_wrap=True)
    try:
        with _progress() as stage:
            tuning = run(device, make_measurer(device, processes), stage)
    except FitError as error:
        console.print(f"nothing is stored: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    refused = tuning.is_worse and not (force or dry_run)
    if not json:
        _tune_report.print_tuning(tuning, stdout())
    stored = failure = None
    if not (dry_run or refused):
        try:
            stored = store_profile(tuning.to_store())
        except (OSError, ValueError) as error:  # what was measured is still reported
            failure = error
    if json:
        print_json({**tuning.to_json(), "stored": None if stored is None else str(stored)})
    if failure is not None:
        console.print(f"nothing is stored: {failure}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from failure
    if refused:
        console.print(
            "nothing is stored: with the measured costs plans would be slower than with the shipped ones (--force "
            "stores them anyway)",
            soft_wrap=True,
        )
        raise typer.Exit(1)
    console.print(
        "nothing is stored: --dry-run" if stored is None else f"stored: {stored}", markup=False, soft_wrap=True
    )


def _show(device: Device, *, json: bool) -> None:
    profile, stored = device.profile, device.stored
    if json:
        print_json(
            {
                "device": device._asdict(),
                "source": "shipped" if stored is None else "stored",
                "file": None if stored is None else str(device.file),
                "profile": asdict(profile),
                "provenance": None if stored is None else asdict(stored.provenance),
            }
        )
    else:
        _tune_report.print_profile(device, profile, stored, stdout())


def _forget(device: Device, *, json: bool) -> None:
    try:
        with usage_errors():
            path = forget_profile(*device.key)
    except OSError as error:
        stderr().print(f"nothing is deleted: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    if json:
        print_json({"deleted": None if path is None else str(path)})
    else:
        text = f"nothing is stored for {device.name}" if path is None else f"deleted: {path}"
        stdout().print(text, markup=False, soft_wrap=True)


def _check_options(**options: bool) -> None:
    """Refuse options that exclude one another.

    Raises:
        ValueError: naming them.
    """
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if len(given) > 1:
        raise ValueError(f"only one of --show, --forget, --dry-run and --force may be given, got {', '.join(given)}")


def _check_can_measure(*, store: bool) -> None:
    """Refuse before minutes of work what could not be done or not be stored.

    Raises:
        ValueError: torch, Triton or the config folder is missing, or nothing can be written there.
    """
    missing = [name for name in ("torch", "triton") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"tuning measures PyTorch's kernels and needs torch and triton, and {' and '.join(missing)} cannot be "
            "imported: pip install 'swa-decode[torch]' (the stored profile serves JAX too, without torch)"
        )
    if not store:
        return
    folder = config_folder()
    if folder is None:
        raise ValueError(f"{CONFIG_VARIABLE} is set and empty, so that nothing is stored: unset it, or use --dry-run")
    try:
        prepare_folder()
    except OSError as error:
        raise ValueError(
            f"{CONFIG_VARIABLE} must name a folder that a profile can be written to (--dry-run writes none), "
            f"got {folder}: {error}"
        ) from error


@contextmanager
def _progress() -> Iterator[Callable[[str, int], Any]]:
    """Show stages on stderr; yields what ``tuning.tune`` calls a stage."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr(), transient=True) as progress:

        @contextmanager
        def stage(name: str, steps: int) -> Iterator[Callable[[], None]]:
            task = progress.add_task(name, total=steps or None)
            yield lambda: progress.advance(task)
            progress.remove_task(task)

        yield stage
