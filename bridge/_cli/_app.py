"""The typer application: its commands, one module each."""

from __future__ import annotations

from typing import Annotated

import typer

from bridge._cli import _bench, _check, _doctor, _plan, _replay, _tune
from swa_plan import __version__

app = typer.Typer(
    help="Sliding-window GQA decode: replay a trace, explain a plan, check and measure backends, look at this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("demo")(_replay.demo)
app.command("replay")(_replay.replay)
app.command("plan")(_plan.plan_command)
app.command("doctor")(_doctor.doctor)
app.command("check")(_check.check)
app.command("bench")(_bench.bench)
app.command("tune")(_tune.tune)
