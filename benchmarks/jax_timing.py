"""How a jitted function is timed: queued back to back, so that the host's share is hidden as in serving."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax

QUEUED_US = 20_000
"""Calls are queued for about this long."""


class JaxTimer:
    """A jitted function of ``calls`` decode steps; ``measure`` returns microseconds a call."""

    def __init__(self, run: Callable[[], tuple], calls: int) -> None:
        self.run = run
        self.calls = calls
        for _ in range(3):
            jax.block_until_ready(run())
        start = time.perf_counter()
        jax.block_until_ready(run())
        self.repeats = max(1, round(QUEUED_US / max(1.0, (time.perf_counter() - start) * 1e6)))

    def measure(self) -> float:
        """Queue the function ``repeats`` times and wait once.

        Outputs are dropped before the next call, so that it gets their memory: at other addresses XLA would have to
        rewrite its graph, which a step that keeps its activations inside does not.
        """
        start = time.perf_counter()
        for _ in range(self.repeats - 1):
            self.run()
        jax.block_until_ready(self.run())
        return (time.perf_counter() - start) * 1e6 / (self.repeats * self.calls)
