"""Helpers of the tests that capture graphs or count what Triton compiles. They need a CUDA device to run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch


def capture(call: Callable[[], object], *, pool=None) -> torch.cuda.CUDAGraph:
    """Return a graph of ``call``, which runs once before, so that everything is compiled."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        call()
    return graph


@contextlib.contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """Collect the kernels that Triton compiles, or loads from its cache on disk, for the first time in this process."""
    import triton

    seen: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook

    def hook(*args, **details):
        seen.append(str(details.get("repr", args)))

    triton.knobs.runtime.jit_post_compile_hook = hook
    try:
        yield seen
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return, on the device, whether two bf16 or fp32 tensors are bitwise equal."""
    integer = torch.int16 if a.itemsize == 2 else torch.int32
    return (a.view(integer) == b.view(integer)).all()
