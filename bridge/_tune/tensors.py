"""Tensors of a problem: block tables in rotation, so that no call finds its keys in the L2 cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import swa_torch
from swa_plan import Plan, Problem

_LEAST_CALLS, _LEAST_SETS, _MOST_SETS = 8, 2, 64
_L2_FACTOR = 4
"""Keys and values in rotation are about this many times the L2 cache."""


class Tensors(NamedTuple):
    """Inputs of a full batch; ``tables[i]`` is the block table of rotation ``i``."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    tables: torch.Tensor
    seq_lens: torch.Tensor
    gate: torch.Tensor
    output: torch.Tensor

    @property
    def calls(self) -> int:
        """Calls that a replay makes, each rotation once at least."""
        return max(_LEAST_CALLS, len(self.tables))


def rotations(read_bytes: int, l2_bytes: int) -> int:
    """Return how many sets of keys and values of this size leave the L2 cache nothing to keep."""
    return max(_LEAST_SETS, min(_MOST_SETS, -(-_L2_FACTOR * l2_bytes // max(1, read_bytes))))


def make_tensors(problem: Problem, *, requests: int, sets: int, device: str = "cuda") -> Tensors:
    """Return random tensors (a GPU runs faster on zeros) whose requests fill the whole block table."""
    generator = torch.Generator(device).manual_seed(0)
    compute, stored = getattr(torch, problem.dtype), getattr(torch, problem.stored_dtype)
    tokens, pages = requests * problem.query_len, sets * requests * problem.max_blocks

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=compute, device=device).normal_(generator=generator)

    shape = (pages, problem.block, problem.kv_heads)
    tables = torch.randperm(pages, generator=generator, device=device)
    return Tensors(
        query=normal(tokens, problem.heads, problem.k_dim),
        key_cache=normal(*shape, problem.k_dim).to(stored),
        value_cache=normal(*shape, problem.v_dim).to(stored),
        tables=tables.to(torch.int32).view(sets, requests, problem.max_blocks),
        seq_lens=torch.full((requests,), problem.capacity, dtype=torch.int32, device=device),
        gate=normal(tokens, problem.heads),
        output=torch.empty(tokens, problem.heads, problem.v_dim, dtype=compute, device=device),
    )


def decode(tensors: Any, plan: Plan, rotation: int) -> None:
    """Run one call; ``tensors`` has the fields of ``Tensors``, as those of the benchmarks have."""
    problem = plan.problem
    scale = 1.0 if problem.quantised else None
    swa_torch.swa_decode(
        tensors.query, (tensors.key_cache, tensors.value_cache), tensors.tables[rotation % len(tensors.tables)],
        tensors.seq_lens, window=problem.window, query_len=problem.query_len, gate=tensors.gate, out=tensors.output,
        plan=plan, k_scale=scale, v_scale=scale,
    )  # fmt: skip
