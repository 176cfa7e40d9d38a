"""How kernels are timed: CUDA-graph replays over rotated inputs larger than the L2 cache, medians, and a read floor.

The floor is a plain streaming kernel that reads as many bytes, the best of several shapes, measured in the same run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from benchmarks.tensors import rotations
from bridge._tune.replays import GraphTimer as GraphTimer
from bridge._tune.replays import interleaved as interleaved

_STREAM_SHAPES = ((4096, 1, 4, 1), (4096, 4, 4, 4), (8192, 4, 8, 4), (4096, 8, 4, 4), (2048, 8, 4, 4), (4096, 16, 4, 4))


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
