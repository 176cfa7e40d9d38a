"""How calls are timed on a GPU: replays of a CUDA graph that holds many of them, and medians.

Serves ``swa tune`` and, in a checkout, the benchmarks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

Key = TypeVar("Key")


class GraphTimer:
    """A graph of ``calls`` launches; ``measure`` replays it once and returns microseconds a call."""

    def __init__(self, launch: Callable[[int], object], calls: int) -> None:
        self.calls = calls
        self.launch = launch  # keeps the tensors that the graph works on
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for index in range(min(calls, 3)):
                launch(index)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for index in range(calls):
                launch(index)
        for _ in range(3):
            self.graph.replay()

    def measure(self) -> float:
        """Replay once."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self.calls


def interleaved(timers: Mapping[Key, GraphTimer], repeats: int = 15) -> dict[Key, float]:
    """Return each timer's median, measured in turn so that drift meets all alike."""
    samples: dict[Key, list[float]] = {name: [] for name in timers}
    for _ in range(repeats):
        for name, timer in timers.items():
            samples[name].append(timer.measure())
    return {name: statistics.median(values) for name, values in samples.items()}
