"""What one eager call costs the host: a decode of ours, and the original's wrapper.

Loops of calls that do not wait for the device, short enough that its queue never fills up, alternating so that drift
meets all alike; medians.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import peers
from benchmarks.bench import device_words, host_facts
from benchmarks.contenders import original
from benchmarks.contenders.base import LoopTimer, this_machine
from benchmarks.contenders.ours_torch import decode, plan_of
from benchmarks.fetch_peers import ORIGINAL_FILES
from benchmarks.suites import select
from benchmarks.tensors import make_tensors

CASES = ("b1h8", "b32h1")
LOOPS, CALLS = 40, 25


def require_gpu() -> None:
    """Refuse to measure where the host does the device's work.

    Raises:
        ValueError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ValueError("--host needs a CUDA device: on a CPU the host does the device's work")


def host_costs() -> list[dict[str, Any]]:
    """Return host microseconds a call of each contender, by case."""
    rows = []
    for case in select(["nine"], CASES):
        t = make_tensors(case, sets=1)
        plan = plan_of(case, t)
        calls: dict[str, Callable[[], Any]] = {
            "swa_decode": lambda case=case, t=t: decode(case, t, 0),
            "swa_decode, plan and out given": lambda case=case, t=t, plan=plan: decode(
                case, t, 0, out=t.output, plan=plan
            ),
        }
        if peers.absent(ORIGINAL_FILES) is None:
            launch = original.launch(case, t)
            calls["original"] = lambda launch=launch: launch(0)
        rows.append({"case": case.name, **host_us(calls, torch.cuda.synchronize)})
    return rows


def host_us(calls: dict[str, Callable[[], Any]], wait: Callable[[], Any]) -> dict[str, float]:
    """Return the median host time of each call."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    timers = {
        name: LoopTimer(lambda index, call=call: call(), CALLS, wait, host_only=True) for name, call in calls.items()
    }
    for _ in range(LOOPS):
        for name, timer in timers.items():
            samples[name].append(timer())
    return {name: statistics.median(times) for name, times in samples.items()}


def print_costs(rows: list[dict[str, Any]], console: Console) -> None:
    """Print a line a case."""
    console.print("host microseconds a call, medians of loops that do not wait for the device", style="dim")
    for row in rows:
        figures = "  ".join(f"{name} {value:.1f}" for name, value in row.items() if name != "case")
        console.print(f"{row['case']}: {figures}", markup=False)


def save_costs(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the figures with the machine they were measured on."""
    machine = this_machine()
    values = {"device": device_words(machine), "host": host_facts(machine), "cases": rows}
    path.write_text(json.dumps(values, indent=1))
