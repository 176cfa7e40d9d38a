"""The steps of a request trace's replay as shapes: continuous batching without a cache and without decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bridge._replay import Compilation, Engine, ReplayConfig, read_trace
from bridge._replay.runner import RowsSeen, StepTimes
from swa_plan import DeviceProfile, Plan, Problem
from swa_plan.models import ModelShape


class LengthRecorder:
    """A replay's runner that keeps the lengths of each step and computes nothing.

    Attributes:
        steps: the lengths of each step's requests, in order.
    """

    backend = framework = device = clock = "none"
    profile: DeviceProfile | None = None

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.steps: list[list[int]] = []
        # Which plan serves does not matter: one stands for all.
        self._plan = Plan(Problem(1, 1, 1, 16, 16, 1, 16, 1), "ops", 1, 1, 16, 1, 2)

    def padded(self, requests: int) -> int:
        """Return ``requests``: nothing is padded."""
        return requests

    def plan(self, bucket: int) -> Plan:
        """Return a plan that nobody runs."""
        return self._plan

    def step(self, slot_mapping: np.ndarray, seq_lens: np.ndarray) -> Callable[[], StepTimes]:
        """Keep the lengths."""
        self.steps.append(seq_lens.tolist())
        return lambda: (0.0, 0.0)

    def compilation(self) -> Compilation | None:
        """Return None."""

    def sharing(self) -> None:
        """Return None."""

    def compare(self, requests: int) -> None:
        """Return None."""

    def set_table(self, rows: np.ndarray, entries: np.ndarray) -> None:
        """Do nothing."""

    def prefill(self, slots: np.ndarray) -> None:
        """Do nothing."""

    def poison(self, pages: np.ndarray) -> None:
        """Do nothing."""

    def rows_seen(self, row: int, pages: np.ndarray, layer: int) -> RowsSeen:
        """Nothing is checked in such a replay."""
        raise NotImplementedError

    def padding_is_zero(self, requests: int) -> bool:
        """Return True."""
        return True

    def finish(self) -> None:
        """Do nothing."""


def replayed_lengths(
    trace: Path,
    *,
    query_len: int,
    window: int = 512,
    max_batch: int = 16,
    speed: float = 1.0,
    max_steps: int | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Replay a trace with continuous batching; return each step's lengths, query rows included.

    Args:
        trace: a file as ``swa replay`` takes it.
        query_len: rows of each request; a step accepts 1 to ``query_len`` of them, drawn from ``seed``.
        window: keys a row sees; only the pages of the simulated cache depend on it.
        max_batch: most requests that run at once.
        speed: factor by which requests arrive faster.
        max_steps: steps after which the replay stops, or None.
        seed: of accepted drafts.

    Raises:
        TraceError: the trace cannot be read.
    """
    requests, recorder = read_trace(trace), LengthRecorder()
    model = ModelShape("lengths", 1, 1, 16, 16, window, query_len)
    config = ReplayConfig(model, max_batch=max_batch, speed=speed, max_steps=max_steps, seed=seed, check_every=0)
    for _ in Engine(requests, config, recorder).steps():
        pass
    return recorder.steps
