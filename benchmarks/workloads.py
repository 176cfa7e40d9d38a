"""The shapes that are measured, and their tensors, rotated so that no call finds its keys in the L2 cache."""

from __future__ import annotations

from typing import NamedTuple

import torch

from benchmarks.timing import ROTATED_BYTES


class Workload(NamedTuple):
    """One decode step: head size 192, window 512, page 64, as the original kernel was made for."""

    name: str
    requests: int
    kv_heads: int
    group: int
    query_len: int = 1
    seq_len: int = 2048
    window: int = 512
    block: int = 64
    dim: int = 192

    @property
    def read_bytes(self) -> int:
        """Bytes of bf16 keys and values that the step must read."""
        return self.requests * (self.window + self.query_len - 1) * self.kv_heads * self.dim * 2 * 2


NINE = (
    Workload("b1h8", 1, 8, 8),
    Workload("b8h1", 8, 1, 16),
    Workload("b32h1", 32, 1, 16),
    Workload("b128h1", 128, 1, 16),
    Workload("b16h8", 16, 8, 8),
    Workload("b64h8", 64, 8, 8),
    Workload("b256h8", 256, 8, 8),
    Workload("mtp_b32h8", 32, 8, 8, 4),
    Workload("mtp_b16h1", 16, 1, 16, 4),
)
"""Tensor-parallel shards of a 64-head model from batch 1 to 256, and two steps of speculative decoding."""


class Tensors(NamedTuple):
    """A workload's tensors; ``tables[i]`` is the block table of rotation ``i``."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    tables: torch.Tensor
    seq_lens: torch.Tensor
    gate: torch.Tensor
    output: torch.Tensor


def make_tensors(
    workload: Workload,
    *,
    cache_dtype: torch.dtype = torch.bfloat16,
    ragged: bool = False,
    sets: int | None = None,
    seed: int = 0,
) -> Tensors:
    """Return random tensors; ``ragged`` draws lengths between the window and ``seq_len``, else all are alike."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    columns = -(-workload.seq_len // workload.block)
    sets = sets or max(1, min(64, -(-ROTATED_BYTES // workload.read_bytes)))
    pages = workload.requests * columns * sets
    heads, tokens = workload.kv_heads * workload.group, workload.requests * workload.query_len
    shape = (2, pages, workload.block, workload.kv_heads, workload.dim)
    caches = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator).to(cache_dtype)
    tables = torch.randperm(pages, generator=generator, device="cuda").to(torch.int32)
    seq_lens = torch.full((workload.requests,), workload.seq_len, dtype=torch.int32, device="cuda")
    if ragged:
        least = workload.window + workload.query_len
        seq_lens.random_(least, workload.seq_len + 1, generator=generator)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device="cuda").to(torch.bfloat16)

    query = normal(tokens, heads, workload.dim)
    return Tensors(
        query, caches[0], caches[1], tables.view(sets, workload.requests, columns), seq_lens, normal(tokens, heads),
        torch.empty_like(query),
    )  # fmt: skip
