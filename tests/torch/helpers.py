"""Small decode steps as tensors: one place where the tests of this folder get caches, tables and lengths from."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from swa_torch import PagedCache


class Step(NamedTuple):
    """One decode step: ``swa_decode(*step, window=...)``."""

    query: torch.Tensor
    cache: PagedCache
    block_table: torch.Tensor
    seq_lens: torch.Tensor


def make_step(
    seq_lens: list[int] | tuple[int, ...] = (20, 5, 0, 33),
    *,
    query_len: int = 1,
    tokens: int | None = None,
    heads: int = 8,
    kv_heads: int = 2,
    k_dim: int = 64,
    v_dim: int = 64,
    block: int = 16,
    max_blocks: int = 3,
    layout: str = "pages block kv_heads dim",
    layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Step:
    """Return a step with random data, each request owning ``max_blocks`` shuffled pages, and two pages to spare."""
    generator = torch.Generator().manual_seed(seed)
    requests = len(seq_lens)
    pages = requests * max_blocks + 2
    cache = PagedCache.empty(
        layout, pages=pages, block=block, kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim, layers=layers, dtype=dtype,
        device=device,
    )  # fmt: skip
    for base in cache.bases:
        base.copy_(normal(*base.shape, generator=generator))
    query = normal(requests * query_len if tokens is None else tokens, heads, k_dim, generator=generator)
    table = torch.randperm(pages, generator=generator)[: requests * max_blocks].view(requests, max_blocks)
    return Step(
        query.to(device, dtype), cache, table.to(device, torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
    )  # fmt: skip


def normal(*shape: int, generator: torch.Generator | None = None, seed: int = 0) -> torch.Tensor:
    """Return fp32 normal numbers that depend on the seed alone."""
    return torch.randn(*shape, generator=generator or torch.Generator().manual_seed(seed))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers, so that NaN equals NaN and 0 does not equal -0."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(integers[tensor.itemsize])


def same_bits(a: Any, b: Any) -> bool:
    """Whether two tensors, or two tuples of them, are bitwise equal."""
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same_bits(one, other) for one, other in zip(a, b, strict=True))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
