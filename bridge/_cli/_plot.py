"""A replay as a picture: batch, bytes and time over steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bridge._replay import ReplayResult

_INK, _MUTED, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_BLUE, _LIGHT_BLUE, _ORANGE, _GREEN = "#2563eb", "#bfdbfe", "#ea580c", "#0f766e"


def draw_replay(result: ReplayResult, path: Path) -> None:
    """Draw a replay into a file; its suffix says the format."""
    figure = Figure(figsize=(9, 7.6), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 1, sharex=True)
    steps = np.array([record.step for record in result.steps])
    _draw_batch(panels[0], steps, result)
    _draw_bytes(panels[1], steps, result)
    _draw_time(panels[2], steps, result)
    panels[2].set_xlabel("decode step", color=_INK)
    settings = result.settings
    figure.suptitle(
        f"{settings['model']}: window {settings['window']}, {settings['heads']}/{settings['kv_heads']} heads, "
        f"{settings['layers']} layer(s), {settings['cache_dtype']} cache · {result.backend} on {result.device}",
        x=0.01,
        ha="left",
        fontsize=11,
        fontweight="bold",
        color=_INK,
    )
    figure.savefig(path)


def _draw_batch(axes: Axes, steps: np.ndarray, result: ReplayResult) -> None:
    running = [record.requests for record in result.steps]
    axes.fill_between(steps, running, step="mid", color=_LIGHT_BLUE, linewidth=0)
    axes.step(steps, running, where="mid", color=_BLUE, linewidth=1.2, label="running")
    padded = [record.bucket for record in result.steps]
    axes.step(steps, padded, where="mid", color=_MUTED, linewidth=0.8, label="padded batch")
    queued = np.array([record.queued or np.nan for record in result.steps])
    if not np.isnan(queued).all():
        axes.step(steps, queued, where="mid", color=_ORANGE, linewidth=1.0, label="waiting")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(axes, "requests")


def _draw_bytes(axes: Axes, steps: np.ndarray, result: ReplayResult) -> None:
    window = np.array([record.bytes_read for record in result.steps]) / 1e6
    full = np.array([record.bytes_full for record in result.steps]) / 1e6
    saved = result.bytes_full / result.bytes_read if result.bytes_read else 1.0
    axes.fill_between(steps, full, step="mid", color="#fed7aa", linewidth=0)
    axes.step(steps, full, where="mid", color=_ORANGE, linewidth=1.0, label="full context")
    axes.fill_between(steps, window, step="mid", color=_LIGHT_BLUE, linewidth=0)
    axes.step(steps, window, where="mid", color=_BLUE, linewidth=1.2, label=f"window ({saved:.1f}x less in all)")
    _finish(axes, "KV read a step (MB)")


def _draw_time(axes: Axes, steps: np.ndarray, result: ReplayResult) -> None:
    times = np.array([record.step_us for record in result.steps])
    unit, factor = ("ms", 1e3) if len(times) and np.median(times) >= 1000 else ("us", 1.0)
    axes.scatter(steps, times / factor, s=5, color=_GREEN, alpha=0.35, linewidths=0, label="append + attention")
    if len(times) >= 5:
        axes.plot(steps, _running_median(times) / factor, color=_GREEN, linewidth=1.4, label="running median")
    _finish(axes, f"time a step ({unit})")
    if len(times):
        # The first steps of a batch size may compile or warm up; they would flatten everything else.
        axes.set_ylim(0, max(1e-9, 1.25 * float(np.percentile(times, 99)) / factor))


def _running_median(values: np.ndarray, width: int = 21) -> np.ndarray:
    padded = np.pad(values, width // 2, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=-1)


def _finish(axes: Axes, label: str) -> None:
    axes.set_ylabel(label, color=_INK)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, labelcolor=_INK, length=3)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_MUTED)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.2)
