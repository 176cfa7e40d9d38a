"""The nine shapes that the planner's rules were made from, and their tensors.

A workload is a case whose requests are all alike; see ``cases`` and ``tensors``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from benchmarks.cases import Case
from benchmarks.tensors import Tensors as Tensors
from benchmarks.tensors import make_tensors as make_case_tensors


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


def case_of(workload: Workload, *, suite: str = "", ragged: bool = False, seed: int = 0) -> Case:
    """Return a workload as a case; ``ragged`` draws lengths between the window and ``seq_len``, else all are alike."""
    w = workload
    seq_lens = (w.seq_len,) * w.requests
    if ragged:
        drawn = np.random.default_rng(seed).integers(w.window + w.query_len, w.seq_len + 1, w.requests)
        seq_lens = tuple(drawn.tolist())
    return Case(
        w.name, suite, seq_lens, w.kv_heads, w.group, w.dim, w.dim, w.window, w.query_len, w.block,
        family=f"{w.kv_heads} x {w.group}" if w.query_len == 1 else "",
    )  # fmt: skip


def make_tensors(
    workload: Workload,
    *,
    cache_dtype: torch.dtype = torch.bfloat16,
    ragged: bool = False,
    sets: int | None = None,
    seed: int = 0,
) -> Tensors:
    """Return random tensors on the GPU; with a gate, without sinks."""
    case = case_of(workload, ragged=ragged, seed=seed)
    return make_case_tensors(case, cache_dtype=cache_dtype, sets=sets, seed=seed)
