"""Measuring cases: every contender checked once, then timed in turn with the others, so that drift meets all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.cases import Case
from benchmarks.contenders.base import Contender, Machine, Timer, Way, disagreement
from benchmarks.contenders.ours_torch import decode
from benchmarks.results import (
    FAILED,
    FLOOR_BYTES,
    MEASURED,
    UNFIT,
    WRONG,
    CaseResult,
    Outcome,
    terabytes_per_second,
)
from benchmarks.tensors import Tensors, make_tensors

SAMPLES = {"cuda": 15, "cpu": 3}
"""Samples of each timer in one interleaved run."""

CPU_SETS = 2


class Entry(NamedTuple):
    """A contender's ways that gave the right result, with their timers."""

    ways: dict[str, tuple[Way, Timer]]
    host: dict[str, Timer]
    error: float | None


def measure_case(case: Case, contenders: Sequence[Contender], machine: Machine, *, rounds: int) -> CaseResult:
    """Return every contender's outcome in one case."""
    try:
        tensors = make_tensors(case, device=machine.device, sets=None if machine.cuda else CPU_SETS)
        expected = decode(case, tensors, 0)
    except Exception as error:  # out of memory, say: the other cases still run
        return CaseResult(case, {each.name: Outcome(FAILED, f"ours: {reason(error)}") for each in contenders})
    outcomes: dict[str, Outcome] = {}
    entries: dict[str, Entry] = {}
    for contender in contenders:
        why = contender.unfit(case)
        entered = Outcome(UNFIT, why) if why is not None else enter(contender, case, tensors, expected)
        if isinstance(entered, Entry):
            entries[contender.name] = entered
            outcomes[contender.name] = Outcome(MEASURED)
        else:
            outcomes[contender.name] = entered
    timers = {
        (name, part, way): timer
        for name, entry in entries.items()
        for part, found in (("time", {way: timer for way, (_, timer) in entry.ways.items()}), ("host", entry.host))
        for way, timer in found.items()
    }
    samples = take(timers, rounds=rounds, count=SAMPLES[machine.device])
    for name, entry in entries.items():
        medians = {way: median_of_runs(samples[name, "time", way]) for way in entry.ways}
        best = min(medians, key=lambda way: medians[way])
        host = samples.get((name, "host", best))
        outcomes[name] = Outcome(
            MEASURED,
            entry.ways[best][0].note,
            time_us=medians[best],
            spread=spread(samples[name, "time", best]),
            host_us=None if host is None else median_of_runs(host),
            plan=entry.ways[best][0].plan,
            error=entry.error,
        )
    return CaseResult(case, outcomes)


def enter(contender: Contender, case: Case, tensors: Tensors, expected: torch.Tensor) -> Entry | Outcome:
    """Run each way of a contender once and make the timers of those that agree with ``expected``.

    Returns:
        The entry, or what became of the contender: ``wrong`` only if a way ran and none agreed.
    """
    ways: dict[str, tuple[Way, Timer]] = {}
    host: dict[str, Timer] = {}
    errors: list[float] = []
    wrong: list[str] = []
    failed: list[str] = []
    try:
        prepared = contender.prepare(case, tensors)
    except Exception as error:  # a rival may refuse a case in any way it likes, and the others still run
        return Outcome(FAILED, reason(error))
    for name, way in prepared.items():
        try:
            if way.result is not None:
                difference = disagreement(way.result(), expected)
                if difference > contender.tolerance:
                    wrong.append(f"{name} differs by {difference:.2g} of a row's largest value")
                    continue
                errors.append(difference)
            timer = way.timer()
            if way.host is not None:
                host[name] = way.host()
            ways[name] = way, timer
        except Exception as error:
            failed.append(f"{name}: {reason(error)}")
    if ways:
        return Entry(ways, host, max(errors, default=None))
    return Outcome(WRONG if wrong else FAILED, "; ".join(wrong + failed))


def reason(error: Exception) -> str:
    """Return an error in one line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}"


def take(timers: dict[tuple, Timer], *, rounds: int, count: int) -> dict[tuple, list[list[float]]]:
    """Return each timer's samples: ``rounds`` runs of ``count``, in turn."""
    samples: dict[tuple, list[list[float]]] = {key: [] for key in timers}
    for _ in range(rounds):
        for runs in samples.values():
            runs.append([])
        for _ in range(count):
            for key, timer in timers.items():
                samples[key][-1].append(timer())
    return samples


def median_of_runs(runs: list[list[float]]) -> float:
    """Return the median of the runs' medians."""
    return statistics.median(statistics.median(run) for run in runs)


def spread(runs: list[list[float]]) -> float:
    """Return (90th - 10th percentile) / median of all samples."""
    low, middle, high = np.percentile([sample for run in runs for sample in run], (10, 50, 90))
    return float((high - low) / middle)


def floor_rate(*, rounds: int = 3) -> float:
    """Return the read floor of 805 MB in TB/s."""
    from benchmarks.timing import floor_timers

    timers = {(name,): timer.measure for name, timer in floor_timers(FLOOR_BYTES).items()}
    samples = take(timers, rounds=rounds, count=SAMPLES["cuda"])
    return terabytes_per_second(FLOOR_BYTES, min(map(median_of_runs, samples.values())))


def measure_cases(
    cases: Sequence[Case],
    contenders: Sequence[Contender],
    machine: Machine,
    *,
    rounds: int,
    done: Callable[[CaseResult], None],
) -> None:
    """Measure one case after the other and hand each result to ``done`` at once."""
    for case in cases:
        done(measure_case(case, contenders, machine, rounds=rounds))
        if machine.cuda:
            torch.cuda.empty_cache()
