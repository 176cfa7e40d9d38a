"""TMA descriptors of caches, built on the host from addresses, shapes and strides alone.

Remembered, because building one takes longer than a launch; what is remembered holds no tensor, so that it keeps no
cache alive. The descriptor itself travels with the launch, by value: a captured graph has its own.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from swa_plan._hopper import HOPPER_PIECE, box_of

REMEMBERED_DESCRIPTORS = 4096
ALIGNMENT = 16
"""Bytes that TMA wants addresses and strides to be multiples of."""


class Memory(NamedTuple):
    """Where a descriptor's tensor lies, and its dtype: all that a launch asks of it."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


def why_not_described(cache: torch.Tensor) -> str | None:
    """Return why TMA cannot address a cache ``[pages, block, kv_heads, dim]``, None if it can."""
    if not cache.numel():
        return "a cache without pages has no memory to address"
    if cache.data_ptr() % ALIGNMENT:
        return f"a cache must start at a multiple of {ALIGNMENT} bytes, not at {cache.data_ptr()}"
    strides = [stride for size, stride in zip(cache.shape, cache.stride()[:3], strict=False) if size > 1]
    if any(stride <= 0 or stride * cache.itemsize % ALIGNMENT for stride in strides):
        return f"a cache's strides must be positive multiples of {ALIGNMENT} bytes, not {strides} elements"
    return None


def describe(cache: torch.Tensor) -> TensorDescriptor:
    """Return the descriptor of a cache ``[pages, block, kv_heads, dim]`` by boxes of a page."""
    return _describe(cache.data_ptr(), cache.dtype, tuple(cache.shape), cache.stride()[:3])


@functools.lru_cache(maxsize=REMEMBERED_DESCRIPTORS)
def _describe(address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorDescriptor:
    pages, block, kv_heads, dim = shape
    # The stride of an axis of one is never used, and may be anything.
    page, slot, head = (HOPPER_PIECE if size == 1 else stride for size, stride in zip(shape, strides, strict=False))
    box = box_of(block)
    if box == block:
        sizes, steps, boxed = [pages, block, kv_heads, dim], [page, slot, head, 1], [1, box, 1, HOPPER_PIECE]
    else:
        sizes, steps = [pages, block // box, box, kv_heads, dim], [page, box * slot, slot, head, 1]
        boxed = [1, 1, box, 1, HOPPER_PIECE]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(boxed))
    return TensorDescriptor(Memory(address, dtype), sizes, steps, boxed, layout)
