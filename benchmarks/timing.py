"""How kernels are timed: CUDA-graph replays over rotated inputs larger than the L2 cache, medians, and a read floor.

The floor is a plain streaming kernel that reads as many bytes, the best of several shapes, measured in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from benchmarks.tensors import rotations

_STREAM_SHAPES = ((4096, 1, 4, 1), (4096, 4, 4, 4), (8192, 4, 8, 4), (4096, 8, 4, 4), (2048, 8, 4, 4), (4096, 16, 4, 4))


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


def interleaved(timers: dict[str, GraphTimer], repeats: int = 15) -> dict[str, float]:
    """Return each timer's median, measured in turn so that drift meets all alike."""
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(repeats):
        for name, timer in timers.items():
            samples[name].append(timer.measure())
    return {name: statistics.median(values) for name, values in samples.items()}


@triton.jit
def _stream(X, Out, n, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr, STAGES: tl.constexpr):
    program = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.range(0, ITERATIONS, num_stages=STAGES):
        offset = (program.to(tl.int64) * ITERATIONS + i) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(X + offset, offset < n, other=0.0)
    tl.store(Out + program, tl.sum(total, 0))


def floor_timers(read_bytes: int) -> dict[str, GraphTimer]:
    """Return timers of the streaming kernel's shapes for one size; the least of their medians is the floor."""
    count = read_bytes // 4
    sets = rotations(read_bytes)
    data = torch.empty(sets, count, device="cuda").normal_()
    out = torch.empty(1 << 20, device="cuda")
    timers = {}
    for block, iterations, warps, stages in _STREAM_SHAPES:
        grid = (triton.cdiv(count, block * iterations),)

        def launch(index, grid=grid, block=block, iterations=iterations, warps=warps, stages=stages):
            row = data[index % sets]
            _stream[grid](row, out, count, block, iterations, stages, num_warps=warps, enable_fp_fusion=True)

        timers[f"stream {block}x{iterations}"] = GraphTimer(launch, max(sets, 8))
    return timers
