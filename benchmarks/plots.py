"""A run as pictures: latency and fraction of the floor over batch size, ratios to each rival, time over context."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from benchmarks.report import PEERS, verdict
from benchmarks.results import FLOOR, OURS, CaseResult, Run

_INK, _MUTED, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
COLOURS = {
    FLOOR: "#9aa5b1", OURS: "#2563eb", "torch gluon": "#0891b2", "torch eager": "#93c5fd", "jax jit": "#0f766e",
    "jax single": "#5eead4", "original": "#ea580c", "unified": "#65a30d", "fa3 + gate": "#be123c",
    "xla gather": "#7c3aed",
}  # fmt: skip


def draw(run: Run, folder: Path) -> list[Path]:
    """Draw what a run has figures for.

    Returns:
        The files: ``latency.png``, ``floor.png``, ``ratios.png``, ``context.png``; fewer if there is nothing to draw.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, picture in (
        ("latency", draw_latency),
        ("floor", draw_floor),
        ("ratios", draw_ratios),
        ("context", draw_context),
    ):
        figure = picture(run)
        if figure is not None:
            path = folder / f"{name}.png"
            figure.savefig(path)
            drawn.append(path)
    return drawn


def families(run: Run) -> dict[str, list[CaseResult]]:
    """Return lines of a plot over batch size: cases that differ in nothing else, two or more."""
    found: dict[str, list[CaseResult]] = {}
    for result in run.cases:
        if result.case.family and result.case.suite != "context":
            found.setdefault(f"{result.case.suite}: {result.case.family}", []).append(result)
    return {
        name: sorted(results, key=lambda result: result.case.requests)
        for name, results in found.items()
        if len({result.case.requests for result in results}) > 1
    }


def draw_latency(run: Run) -> Figure | None:
    """Draw microseconds over batch size, one panel a family."""
    found = families(run)
    if not found:
        return None
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    figure = _figure(run, "microseconds a call over requests", (4.2 * columns + 1, 3.2 * rows + 1))
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (name, results) in zip(panels, found.items(), strict=False):
        for contender in run.contenders:
            _line(axes, results, contender, lambda result, contender=contender: result.time(contender))
        axes.set_title(name, fontsize=9, color=_INK, loc="left")
        _finish_axes(axes, "requests", "us", log=True)
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    panels[0].legend(frameon=False, fontsize=7)
    return figure


def draw_floor(run: Run) -> Figure | None:
    """Draw the fraction of the read floor over batch size, one line a family."""
    found = {
        name: results for name, results in families(run).items() if any(each.ratio(FLOOR) for each in results)
    }  # fmt: skip
    if not found:
        return None
    figure = _figure(run, "read floor / ours: the fraction of what memory allows", (8, 4.5))
    axes = figure.subplots()
    for number, (name, results) in enumerate(found.items()):
        _line(axes, results, name, lambda result: result.ratio(FLOOR), colour=to_hex(colormaps["tab20"](number % 20)))
    axes.axhline(1, color=_MUTED, linewidth=0.8)
    axes.set_ylim(0, 1.1)
    axes.set_xscale("log", base=2)
    _finish_axes(axes, "requests", "fraction of the read floor")
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def draw_ratios(run: Run) -> Figure | None:
    """Draw each rival's time over ours, case by case."""
    rivals = [name for name in PEERS if any(result.ratio(name) for result in run.cases)]
    if not rivals:
        return None
    figure = _figure(run, "time of a rival / ours: right of 1 ours is faster", (7, 1.5 + 0.22 * len(run.cases)))
    axes = figure.subplots()
    for name in rivals:
        points = [(ratio, row) for row, result in enumerate(run.cases) if (ratio := result.ratio(name))]
        axes.scatter(*zip(*points, strict=True), s=22, color=COLOURS[name], label=name, alpha=0.85)
    axes.axvline(1, color=_INK, linewidth=0.8)
    axes.set_yticks(range(len(run.cases)), [result.case.name for result in run.cases], fontsize=7)
    axes.set_ylim(len(run.cases) - 0.4, -0.6)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 16]))
    _finish_axes(axes, "ratio", "")
    axes.legend(frameon=False, fontsize=7)
    return figure


def draw_context(run: Run) -> Figure | None:
    """Draw microseconds over context, the window being fixed."""
    results = sorted(run.suites().get("context", ()), key=lambda result: max(result.case.seq_lens))
    if len(results) < 2:
        return None
    figure = _figure(run, "microseconds a call over keys a request, window 512", (6, 4))
    axes = figure.subplots()
    for contender in run.contenders:
        _line(axes, results, contender, lambda result, contender=contender: result.time(contender), over=_context)
    _finish_axes(axes, "keys a request", "us", log=True)
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _requests(result: CaseResult) -> float:
    return result.case.requests


def _context(result: CaseResult) -> float:
    return max(result.case.seq_lens)


def _line(
    axes: Axes, results: list[CaseResult], name: str, value: Callable[[CaseResult], float | None], *,
    over: Callable[[CaseResult], float] = _requests, colour: str | None = None,
) -> None:  # fmt: skip
    """Draw one line in a colour, by default the contender's own."""
    points = [(over(result), figure) for result in results if (figure := value(result)) is not None]
    if points:
        colour = colour or COLOURS.get(name)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.3, label=name, color=colour)


def _figure(run: Run, title: str, size: tuple[float, float]) -> Figure:
    figure = Figure(figsize=size, dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    warning = f" {verdict(run)}" if not run.counts else ""
    figure.suptitle(
        f"{title}\n{run.device}{warning}", x=0.01, ha="left", fontsize=9, color=_INK if run.counts else "#b91c1c"
    )  # fmt: skip
    return figure


def _finish_axes(axes: Axes, across: str, up: str, *, log: bool = False) -> None:
    axes.set_xlabel(across, color=_INK, fontsize=8)
    axes.set_ylabel(up, color=_INK, fontsize=8)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_locator(NullLocator())
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, labelcolor=_INK, length=3, labelsize=8)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_MUTED)
