"""What a replay yields: one record a step, one a check, and the sums that a report or a plot needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bridge._replay.crossing import Addresses, Difference, Sharing
from bridge._replay.runner import Compilation
from swa_plan import DeviceProfile, Plan


@dataclass(frozen=True)
class StepRecord:
    """One decode step.

    Attributes:
        step: number, from 0.
        clock_s: simulated time after the trace's start.
        requests: running requests.
        bucket: padded batch.
        queued: requests that have arrived and wait.
        finished: requests that this step finished.
        tokens: tokens accepted.
        longest: most keys of a request.
        bytes_read: keys and values inside the windows, all layers, each request's live range once.
        bytes_full: what full-context attention would read.
        pages: pages in use.
        pages_full: pages that a cache without a window would hold.
        host_us: host time to enqueue the step (on a CPU, and with JAX: to run it).
        append_us: time of append, all layers; NaN until the replay is over.
        attention_us: time of attention, all layers; NaN until the replay is over.
    """

    step: int
    clock_s: float
    requests: int
    bucket: int
    queued: int
    finished: int
    tokens: int
    longest: int
    bytes_read: int
    bytes_full: int
    pages: int
    pages_full: int
    host_us: float
    append_us: float = float("nan")
    attention_us: float = float("nan")

    @property
    def step_us(self) -> float:
        """Append and attention together."""
        return self.append_us + self.attention_us


@dataclass(frozen=True)
class CheckRecord:
    """One request's rows of one step and layer against float64.

    Attributes:
        step: the step.
        request: number of the request in the trace.
        layer: the layer.
        decoded_by: framework that decoded the rows.
        rows: query rows compared.
        ratio: worst error as a fraction of its limit; above 1 is a miss.
        error: the worst error.
        limit: the limit there.
        ok: whether all was as it has to be.
        message: what was wrong, or "".
    """

    step: int
    request: int
    layer: int
    decoded_by: str
    rows: int
    ratio: float
    error: float
    limit: float
    ok: bool
    message: str


@dataclass(frozen=True)
class ReplayResult:
    """A whole replay.

    Attributes:
        settings: what was replayed, ready for JSON.
        backend: what ran.
        framework: its framework and version in words.
        device: the device in words.
        profile: the device for the roofline, or None.
        clock: how times were taken, in words.
        compilation: what was compiled, outside all times of steps; None where that is not counted.
        plans: plan of each padded batch.
        steps: one record a step.
        checks: one record a check.
        sharing: what two frameworks on one cache have shared, or None where there is but one.
        differences: between the two, one record a step.
        wall_s: host time of the whole replay, checks and data making included.
        trace_requests: requests in the trace.
        peak_pages: most pages in use.
        pool_pages: pages of the cache.
        reused_pages: pages handed out that had an owner before.
        page_bytes: bytes of a page, all layers.
    """

    settings: dict[str, Any]
    backend: str
    framework: str
    device: str
    profile: DeviceProfile | None
    clock: str
    compilation: Compilation | None
    plans: dict[int, Plan]
    steps: tuple[StepRecord, ...]
    checks: tuple[CheckRecord, ...]
    sharing: Sharing | None
    differences: tuple[Difference, ...]
    wall_s: float
    trace_requests: int
    peak_pages: int
    pool_pages: int
    reused_pages: int
    page_bytes: int

    @property
    def ok(self) -> bool:
        """Whether every check passed, and two frameworks had one cache."""
        return all(check.ok for check in self.checks) and (self.sharing is None or self.sharing.same_memory)

    @property
    def finished(self) -> int:
        """Requests that finished."""
        return sum(step.finished for step in self.steps)

    @property
    def tokens(self) -> int:
        """Tokens accepted."""
        return sum(step.tokens for step in self.steps)

    @property
    def bytes_read(self) -> int:
        """Bytes of keys and values inside the windows."""
        return sum(step.bytes_read for step in self.steps)

    @property
    def bytes_full(self) -> int:
        """Bytes that full-context attention would have read."""
        return sum(step.bytes_full for step in self.steps)

    @property
    def peak_pages_full(self) -> int:
        """Most pages that a cache without a window would have held."""
        return max((step.pages_full for step in self.steps), default=0)

    @property
    def batch_sizes(self) -> dict[int, int]:
        """Steps by number of running requests."""
        return dict(sorted(Counter(step.requests for step in self.steps).items()))

    @property
    def buckets(self) -> dict[int, int]:
        """Steps by padded batch."""
        return dict(sorted(Counter(step.bucket for step in self.steps).items()))

    @property
    def attention_gbps(self) -> float | None:
        """Bytes read per second of attention time in GB/s over all steps, or None without a step."""
        time_us = sum(step.attention_us for step in self.steps)
        return self.bytes_read / time_us / 1e3 if time_us > 0 else None

    @property
    def roofline(self) -> float | None:
        """Fraction of the device's memory bandwidth that attention reached, or None where that is not known."""
        if self.profile is None or not self.profile.memory_gbps or self.attention_gbps is None:
            return None
        return self.attention_gbps / self.profile.memory_gbps

    @property
    def worst_check(self) -> CheckRecord | None:
        """The check nearest to its limit, or furthest over it."""
        misses = [check for check in self.checks if not check.ok]
        return max(misses or self.checks, key=lambda check: check.ratio, default=None)

    @property
    def equal_share(self) -> float | None:
        """Share of values that two frameworks decoded to the same bits, or None where none were compared."""
        values = sum(found.values for found in self.differences)
        return sum(found.equal for found in self.differences) / values if values else None

    @property
    def largest_ulps(self) -> float | None:
        """Largest difference between two frameworks, in ulps at the row's largest magnitude, or None as above."""
        return max((found.ulps for found in self.differences), default=None)

    def times_us(self, name: str, decoded_by: str | None = None) -> dict[str, float] | None:
        """Return median and p90 of a time of the steps: ``step_us``, ``attention_us``, ``append_us`` or ``host_us``.

        Args:
            name: which.
            decoded_by: only of the steps of this framework, where two take turns; None means of all.
        """
        steps = self.steps
        if decoded_by is not None and self.sharing is not None:
            steps = [step for step, by in zip(steps, self.sharing.decoded_by, strict=True) if by == decoded_by]
        times = [getattr(step, name) for step in steps]
        return {"median": float(np.median(times)), "p90": float(np.percentile(times, 90))} if times else None

    def to_json(self) -> dict[str, Any]:
        """Return the summary as values that JSON has, records left out."""
        worst = self.worst_check
        return {
            "ok": self.ok,
            "settings": self.settings,
            "backend": self.backend,
            "framework": self.framework,
            "device": self.device,
            "steps": len(self.steps),
            "requests": {"trace": self.trace_requests, "finished": self.finished},
            "tokens": self.tokens,
            "rows": sum(step.requests for step in self.steps) * self.settings["query_len"],
            "batch_sizes": {str(size): count for size, count in self.batch_sizes.items()},
            "plans": {
                str(bucket): {**_plan(plan), "steps": self.buckets.get(bucket, 0)}
                for bucket, plan in sorted(self.plans.items())
            },
            "kv_bytes": {
                "read": self.bytes_read,
                "full_context": self.bytes_full,
                "saved_factor": self.bytes_full / self.bytes_read if self.bytes_read else None,
            },
            "pages": {
                "peak": self.peak_pages,
                "peak_full_context": self.peak_pages_full,
                "pool": self.pool_pages,
                "reused": self.reused_pages,
                "page_bytes": self.page_bytes,
            },
            "clock": self.clock,
            "compiled": None if self.compilation is None else asdict(self.compilation),
            "time_us": {name: self.times_us(name) for name in ("step_us", "attention_us", "append_us", "host_us")},
            "wall_s": self.wall_s,
            "attention_gbps": self.attention_gbps,
            "roofline": self.roofline,
            "checks": {
                "count": len(self.checks),
                "rows": sum(check.rows for check in self.checks),
                "misses": sum(not check.ok for check in self.checks),
                "worst": None if worst is None else _finite(asdict(worst)),
            },
            "bridge": None if self.sharing is None else self._bridge(self.sharing),
        }

    def _bridge(self, sharing: Sharing) -> dict[str, Any]:
        def addresses(pairs: Addresses) -> list[dict[str, str]]:
            return [{"torch": hex(torch), "jax": hex(jax)} for torch, jax in pairs]

        return {
            "same_memory": sharing.same_memory,
            "cache": {"at_start": addresses(sharing.at_start), "at_end": addresses(sharing.at_end)},
            "versions": sharing.versions,
            "decoded_by": {
                name: {
                    "backend": backend,
                    "steps": sharing.decoded_by.count(name),
                    "attention_us": self.times_us("attention_us", name),
                }
                for name, backend in sharing.backends.items()
            },
            "jax_plans": {str(bucket): _plan(plan) for bucket, plan in sorted(sharing.jax_plans.items())},
            "both_ways": _finite(
                {
                    "steps": len(self.differences),
                    "values": sum(found.values for found in self.differences),
                    "equal_share": self.equal_share,
                    "largest_ulps": self.largest_ulps,
                }
            ),
        }


def _plan(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in ("kernel", "pack", "splits", "tile", "warps", "stages")}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Turn numbers that JSON lacks into strings."""
    return {
        name: str(value) if isinstance(value, float) and not np.isfinite(value) else value
        for name, value in values.items()
    }
