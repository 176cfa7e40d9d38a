"""What a run of the bench yields, as JSON and back, and the arithmetic of its report."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases import Case

OURS, FLOOR = "torch graph", "floor"
SLOWER = 1.03
"""A time is slower than another if it is more than 3 % above it: less is within the spread of runs."""

FLOOR_BYTES = 256 * 512 * 8 * (192 + 192) * 2
"""805 MB, the largest of the nine cases: the read floor that tells whether a GPU was in order."""

LEAST_TBPS = {"H200": 4.4}
"""By a word of the device's name: what that floor must reach for a run to count."""

MEASURED, UNFIT, WRONG, FAILED = "measured", "n/a", "wrong", "failed"


@dataclass(frozen=True)
class Outcome:
    """What one contender did in one case.

    Attributes:
        status: ``measured``, ``n/a`` (it cannot do the case), ``wrong`` (its result differs) or ``failed``.
        why: for all but ``measured``; there, what has to be known of the time, if anything.
        time_us: median of the runs' medians, a call.
        spread: (90th - 10th percentile) / median of all samples.
        host_us: the host's share, where it was timed apart.
        plan: what ran, in words.
        error: largest difference to our result, relative to a row's largest value; None where nothing is compared.
    """

    status: str
    why: str = ""
    time_us: float | None = None
    spread: float | None = None
    host_us: float | None = None
    plan: str = ""
    error: float | None = None


@dataclass(frozen=True)
class CaseResult:
    """One case with every contender's outcome."""

    case: Case
    outcomes: dict[str, Outcome]

    def time(self, name: str) -> float | None:
        """Return a contender's time, or None if it has none."""
        outcome = self.outcomes.get(name)
        return None if outcome is None else outcome.time_us

    def ratio(self, name: str, base: str = OURS) -> float | None:
        """Return ``time(name) / time(base)``, or None if either is missing."""
        above, below = self.time(name), self.time(base)
        return None if above is None or below is None else above / below

    def slower_than(self, name: str) -> bool:
        """Tell whether ours is slower than a contender, by the rule of ``SLOWER``."""
        ratio = self.ratio(OURS, name)
        return ratio is not None and ratio > SLOWER


@dataclass
class Run:
    """A run of the bench.

    Attributes:
        device: in words.
        host: facts of the machine and the checkout, by name: driver, versions, date, commit.
        method: how times were taken, in a sentence.
        rounds: interleaved runs.
        absent: why contenders that were asked for did not run, by name.
        floor_tbps: read floor of 805 MB in TB/s, before the first case and after the last.
        cases: in the order they were measured.
    """

    device: str
    host: dict[str, str | None]
    method: str
    rounds: int
    absent: dict[str, str] = field(default_factory=dict)
    floor_tbps: list[float] = field(default_factory=list)
    cases: list[CaseResult] = field(default_factory=list)

    @property
    def least_tbps(self) -> float | None:
        """What the floor must reach on this device, or None where that is not known."""
        words = re.findall(r"\w+", self.device)  # GH200 and H200 are two chips
        return next((least for word, least in LEAST_TBPS.items() if word in words), None)

    @property
    def counts(self) -> bool:
        """Whether every floor reached what it must."""
        return self.least_tbps is None or (bool(self.floor_tbps) and min(self.floor_tbps) >= self.least_tbps)

    @property
    def contenders(self) -> list[str]:
        """Names of those that took part, in order."""
        return list(dict.fromkeys(name for result in self.cases for name in result.outcomes))

    def suites(self) -> dict[str, list[CaseResult]]:
        """Return the cases by suite."""
        found: dict[str, list[CaseResult]] = {}
        for result in self.cases:
            found.setdefault(result.case.suite, []).append(result)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        cases = [
            {"case": each.case.to_json(), "outcomes": {name: asdict(one) for name, one in each.outcomes.items()}}
            for each in self.cases
        ]
        own = {name: getattr(self, name) for name in ("device", "host", "method", "rounds", "absent", "floor_tbps")}
        return {**own, "counts": self.counts, "cases": cases}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Run:
        """Return the run that ``to_json`` wrote.

        Raises:
            ValueError: something is missing.
        """
        try:
            cases = [
                CaseResult(
                    Case.from_json(each["case"]), {name: Outcome(**one) for name, one in each["outcomes"].items()}
                )
                for each in values["cases"]
            ]
            own = {name: values[name] for name in ("device", "host", "method", "rounds", "absent", "floor_tbps")}
        except (KeyError, TypeError) as error:
            raise ValueError(f"a file of `swa bench --json` is needed, got {type(error).__name__}: {error}") from error
        return cls(**own, cases=cases)


def load(path: Path) -> Run:
    """Return a run that was saved.

    Raises:
        ValueError: the file cannot be read or is no such run.
    """
    try:
        values = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no file of `swa bench --json`: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is no file of `swa bench --json`: it holds a {type(values).__name__}")
    return Run.from_json(values)


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    """Return the geometric mean of those that are there, or None if none is."""
    found = [ratio for ratio in ratios if ratio is not None]
    return statistics.geometric_mean(found) if found else None


def terabytes_per_second(read_bytes: int, time_us: float) -> float:
    """Return a read rate."""
    return read_bytes / time_us / 1e6
