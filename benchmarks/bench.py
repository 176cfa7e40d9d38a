"""``swa bench``: what the command does once its options are read."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cases import Case
from benchmarks.contenders.base import Contender, Machine
from benchmarks.results import CaseResult, Run
from benchmarks.suites import SUITES

ROOT = Path(__file__).parent.parent
GPU_METHOD = (
    "GPU times: microseconds a call, medians of {rounds} runs in which all contenders take turns; CUDA graphs and "
    "jitted functions of many calls over rotated block tables; bf16, page 64"
)
CPU_METHOD = (
    "CPU times: microseconds a call on the host's cores, medians of {rounds} runs in which all contenders take turns; "
    "they say nothing about a GPU"
)
_DISTRIBUTIONS = ("torch", "triton", "jax", "numpy")


def default_suite(machine: Machine) -> str:
    """Return the suite that runs unless another is asked for."""
    return "nine" if machine.cuda else "cpu"


def list_cases(cases: Sequence[Case], console: Console) -> None:
    """Print the cases with their shapes and bytes."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("case", no_wrap=True)
    table.add_column("suite")
    table.add_column("MB", justify="right")
    table.add_column("requests x kv heads x group")
    for case in cases:
        table.add_row(case.name, case.suite, f"{case.read_bytes / 1e6:.1f}", case.shape)
    console.print(table)
    console.print()
    for name in dict.fromkeys(case.suite for case in cases):
        about = (SUITES[name].__doc__ or "").removeprefix("Return ")
        console.print(f"{name}: {about}", markup=False, highlight=False, style="dim")


def start_run(absent: dict[str, str], machine: Machine, *, rounds: int) -> Run:
    """Return a run without cases."""
    method = (GPU_METHOD if machine.cuda else CPU_METHOD).format(rounds=rounds)
    return Run(device_words(machine), host_facts(machine), method, rounds, absent)


def device_words(machine: Machine) -> str:
    """Return the device in words."""
    if not machine.cuda:
        return f"CPU, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.name}, sm_{machine.capability}, {properties.multi_processor_count} multiprocessors"


def host_facts(machine: Machine) -> dict[str, str | None]:
    """Return driver, versions, date and commit; None for what cannot be told."""
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if machine.cuda else None
    commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changed = commit and _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    facts: dict[str, str | None] = {
        "driver": driver and driver.splitlines()[0],
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    facts["commit"] = f"{commit} (with changes)" if changed else commit
    for name in _DISTRIBUTIONS:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = None
    facts["cuda"] = torch.version.cuda
    return facts


def measure(
    run: Run, cases: Sequence[Case], contenders: Sequence[Contender], machine: Machine, *, json_file: Path | None,
    console: Console,
) -> None:  # fmt: skip
    """Measure cases into ``run``; the file is written after each, so that a run cut short leaves what it had."""
    from benchmarks.measure import floor_rate, measure_cases
    from benchmarks.report import line

    def save() -> None:
        if json_file is not None:
            partial = json_file.with_name(json_file.name + ".partial")
            partial.write_text(json.dumps(run.to_json(), indent=1, allow_nan=False))
            os.replace(partial, json_file)

    def done(result: CaseResult) -> None:
        run.cases.append(result)
        save()
        console.print(line(result), markup=False, highlight=False, soft_wrap=True)

    if machine.cuda:
        run.floor_tbps.append(floor_rate())
    measure_cases(cases, contenders, machine, rounds=run.rounds, done=done)
    if machine.cuda:
        run.floor_tbps.append(floor_rate())
    save()


def _output(*command: str) -> str | None:
    """Return what a command prints, or None if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
