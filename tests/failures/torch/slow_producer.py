"""A kernel that lets its successor start early, sleeps, and only then writes.

A successor launched with programmatic dependent launch that reads before it waits finds the old contents.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _copy_late(Target, Source, count, SLEEPS: tl.constexpr, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(Source + offset, offset < count)
    for _ in tl.static_range(SLEEPS):
        # About 50 us: far longer than it takes to launch the next kernel.
        value = tl.inline_asm_elementwise(
            "{ nanosleep.u32 50000; mov.b32 $0, $1; }", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.store(Target + offset, value, offset < count)


def copy_late(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``target`` (contiguous, alike, whole 4-byte words), about 50 us after being launched."""
    words = target.view(-1).view(torch.int32)
    block = 128
    _copy_late[(triton.cdiv(words.numel(), block),)](
        words, source.view(-1).view(torch.int32), words.numel(), SLEEPS=1, BLOCK=block, num_warps=4
    )
