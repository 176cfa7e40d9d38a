"""Measuring cases: every contender checked once, then timed in turn with the others, so that drift meets all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.cases import Case
from benchmarks.contenders.base import TOLERANCE, Contender, Machine, Timer, Way, disagreement
from benchmarks.contenders.ours_torch import TorchGraph, decode
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
from swa_plan import reference

SAMPLES = {"cuda": 15, "cpu": 3}
"""Samples of each timer in one interleaved run."""

CPU_SETS = 2

CHECKED_ROWS = 4
"""Rows of our own result that are compared with the float64 reference; all of it is what the others are compared with.
"""


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
        error = reference_error(case, tensors, expected)
    except Exception as error:  # out of memory, say: the other cases still run
        return CaseResult(case, {each.name: Outcome(FAILED, f"ours: {reason(error)}") for each in contenders})
    if error > TOLERANCE:
        why = f"ours differs from the float64 reference by {error:.2g} of a row's largest value"
        nothing = Outcome(FAILED, f"nothing to compare with: {why}")
        ours = {each.name for each in contenders if isinstance(each, TorchGraph)}
        return CaseResult(
            case, {each.name: Outcome(WRONG, why) if each.name in ours else nothing for each in contenders}
        )
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
    samples, failed = take(timers, rounds=rounds, count=SAMPLES[machine.device])
    for name, entry in entries.items():
        medians = {
            way: median_of_runs(samples[name, "time", way]) for way in entry.ways if (name, "time", way) in samples
        }
        if not medians:
            why = (f"{way}: {failed[name, 'time', way]}" for way in entry.ways)
            outcomes[name] = Outcome(FAILED, f"while it was timed: {'; '.join(why)}")
            continue
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


def reference_error(case: Case, tensors: Tensors, output: torch.Tensor) -> float:
    """Return how far a result of rotation 0 is from float64, in the measure of ``disagreement``.

    A few rows are checked, from the first to the last, each as a request of its own, and only the pages that they see
    are copied to the host.
    """
    rows = sorted({round(row) for row in np.linspace(0, case.tokens - 1, CHECKED_ROWS)})
    requests = [row // case.query_len for row in rows]
    table = np.full((len(rows), case.max_blocks), -1, np.int32)
    seq_lens, pages = [], []
    for row, request, columns in zip(rows, requests, table, strict=True):
        seq_len = case.seq_lens[request] - case.query_len + row % case.query_len + 1
        live = slice(max(0, seq_len - case.window) // case.block, -(-seq_len // case.block))
        own = tensors.tables[0, request, live]
        columns[live] = range(sum(map(len, pages)), sum(map(len, pages)) + len(own))
        seq_lens.append(seq_len)
        pages.append(own)
    used = torch.cat(pages).long()

    def host(tensor: torch.Tensor | None, index: torch.Tensor | list[int] | None = None) -> np.ndarray | None:
        if tensor is None:
            return None
        return (tensor if index is None else tensor[index]).float().cpu().numpy()

    expected = reference.swa_decode(
        host(tensors.query, rows), host(tensors.key_cache, used), host(tensors.value_cache, used), table,
        np.array(seq_lens, np.int32), window=case.window, gate=host(tensors.gate, rows), sinks=host(tensors.sinks),
        softcap=case.softcap,
    )  # fmt: skip
    assert isinstance(expected, np.ndarray)
    return disagreement(output[rows].cpu(), torch.from_numpy(expected))


def reason(error: Exception) -> str:
    """Return an error in one line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}"


def take(
    timers: dict[tuple, Timer], *, rounds: int, count: int
) -> tuple[dict[tuple, list[list[float]]], dict[tuple, str]]:
    """Return each timer's samples, ``rounds`` runs of ``count``, in turn; and why others have none.

    A timer that fails is not asked again, and the others go on.
    """
    samples: dict[tuple, list[list[float]]] = {key: [] for key in timers}
    failed: dict[tuple, str] = {}
    for _ in range(rounds):
        for runs in samples.values():
            runs.append([])
        for _ in range(count):
            for key in list(samples):
                try:
                    samples[key][-1].append(timers[key]())
                except Exception as error:
                    failed[key] = reason(error)
                    del samples[key]
    return samples, failed


def median_of_runs(runs: list[list[float]]) -> float:
    """Return the median of the runs' medians."""
    return statistics.median(statistics.median(run) for run in runs)


def spread(runs: list[list[float]]) -> float:
    """Return (90th - 10th percentile) / median of all samples."""
    low, middle, high = np.percentile([sample for run in runs for sample in run], (10, 50, 90))
    return float((high - low) / middle)


def floor_rate(*, rounds: int = 3) -> float:
    """Return the read floor of 805 MB in TB/s.

    Raises:
        RuntimeError: it cannot be measured.
    """
    from benchmarks.timing import floor_timers

    timers = {(name,): timer.measure for name, timer in floor_timers(FLOOR_BYTES).items()}
    samples, failed = take(timers, rounds=rounds, count=SAMPLES["cuda"])
    if failed:
        raise RuntimeError(f"the read floor cannot be measured: {next(iter(failed.values()))}")
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
