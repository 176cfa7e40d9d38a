"""A case's tensors, with block tables in rotation so that no call finds its keys in the L2 cache.

The pool holds the pages of live keys only, as an engine's does once a window has moved on, in random order; all other
entries of a table are pages of the pool too, chosen at random, so that no contender can fault on one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from benchmarks.cases import Case

ROTATED_BYTES = 400_000_000
"""Inputs in rotation exceed this, several times any L2 cache, as long as few sets do."""

FEW_SETS, LEAST_ROTATED_BYTES, MOST_SETS = 64, 150_000_000, 4096
"""Small inputs are rotated in more sets than a few only until they exceed this; H200's L2 cache has 60 MB."""


class Tensors(NamedTuple):
    """A case's tensors; ``tables[i]`` is the block table of rotation ``i``.

    Where keys and values have one head size, both caches are halves of one ``kv pages block kv_heads dim`` tensor.
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    tables: torch.Tensor
    seq_lens: torch.Tensor
    gate: torch.Tensor | None
    output: torch.Tensor
    sinks: torch.Tensor | None = None


def rotations(read_bytes: int) -> int:
    """Return over how many sets inputs of this size rotate."""
    enough, least = -(-ROTATED_BYTES // read_bytes), -(-LEAST_ROTATED_BYTES // read_bytes)
    return enough if enough <= FEW_SETS else min(MOST_SETS, max(FEW_SETS, least))


def live_pages(case: Case) -> int:
    """Return the pages that hold a live key, of all requests."""
    return sum(last - first for first, last in _live_columns(case))


def block_tables(case: Case, sets: int, pages: int, seed: int = 0) -> np.ndarray:
    """Return int32 ``[sets, requests, max_blocks]``: live columns get pages of their own while there are enough.

    Args:
        case: the shape.
        sets: rotations.
        pages: pages of the pool; fewer than ``sets * live_pages(case)`` are used again by later rotations.
        seed: of the order.
    """
    random = np.random.default_rng(seed)
    tables = random.integers(0, pages, (sets, case.requests, case.max_blocks), np.int32)
    order, used = random.permutation(pages).astype(np.int32), 0
    for table in tables:
        for row, (first, last) in zip(table, _live_columns(case), strict=True):
            row[first:last] = np.take(order, range(used, used + last - first), mode="wrap")
            used += last - first
    return tables


def make_tensors(
    case: Case,
    *,
    device: str = "cuda",
    cache_dtype: torch.dtype = torch.bfloat16,
    sets: int | None = None,
    seed: int = 0,
) -> Tensors:
    """Return random tensors; never zeros, because a GPU draws less power for them and runs faster."""
    generator = torch.Generator(device).manual_seed(seed)
    sets = rotations(case.read_bytes) if sets is None else sets
    pages = sets * live_pages(case)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(generator=generator)

    shape = (pages, case.block, case.kv_heads)
    if case.k_dim == case.v_dim:
        caches = normal(2, *shape, case.k_dim).to(cache_dtype)
        key_cache, value_cache = caches[0], caches[1]
    else:
        key_cache, value_cache = (normal(*shape, dim).to(cache_dtype) for dim in (case.k_dim, case.v_dim))
    return Tensors(
        query=normal(case.tokens, case.heads, case.k_dim),
        key_cache=key_cache,
        value_cache=value_cache,
        tables=torch.from_numpy(block_tables(case, sets, pages, seed)).to(device),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        gate=normal(case.tokens, case.heads) if case.gate else None,
        output=torch.empty(case.tokens, case.heads, case.v_dim, dtype=torch.bfloat16, device=device),
        sinks=normal(case.heads) if case.sinks else None,
    )


def _live_columns(case: Case) -> list[tuple[int, int]]:
    """Return of each request the first live column of its table and one past the last."""
    before = case.query_len + case.window - 1
    return [(max(0, seq_len - before) // case.block, -(-seq_len // case.block)) for seq_len in case.seq_lens]
