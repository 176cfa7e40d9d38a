"""FlashAttention 3 as vLLM 0.24.0 builds it, with the gate as operators of its own, in a CUDA graph.

It is run in each way that an engine might, and the fastest counts: with the scheduler's metadata made beforehand, once
for all layers of a step, and room for 32 splits (vLLM under full CUDA graphs); with the library's own heuristic; and
unsplit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import peers
from benchmarks.cases import Case
from benchmarks.contenders.base import NO_CUDA, TOLERANCE, Machine, Way, apply_gate, graph_way
from benchmarks.fetch_peers import FA3_FILES
from benchmarks.tensors import Tensors

GRAPH_SPLITS = 32
"""What vLLM makes room for under CUDA graphs."""


def metadata(operators: Any, case: Case, t: Tensors, first_rows: torch.Tensor) -> torch.Tensor:
    """Return the scheduler's metadata of a step."""
    return operators.get_scheduler_metadata(
        case.requests,
        case.query_len,
        max(case.seq_lens),
        case.heads,
        case.kv_heads,
        case.k_dim,
        case.v_dim,
        t.query.dtype,
        t.seq_lens,
        first_rows,
        None,  # cu_seqlens_k
        None,  # cu_seqlens_k_new
        None,  # seqused_q
        None,  # leftpad_k
        case.block,
        0,  # max_seqlen_k_new
        True,  # is_causal
        case.window - 1,
        0,  # window_size_right
        case.softcap is not None,
        GRAPH_SPLITS,
        None,  # pack_gqa
        0,  # sm_margin
    )


def attention(
    operators: Any, case: Case, t: Tensors, first_rows: torch.Tensor, table: torch.Tensor,
    scheduled: torch.Tensor | None, splits: int,
) -> None:  # fmt: skip
    """Run one attention into ``t.output``."""
    operators.fwd(
        t.query,
        t.key_cache,
        t.value_cache,
        None,  # k_new
        None,  # v_new
        None,  # q_v
        t.output,
        first_rows,
        None,  # cu_seqlens_k
        None,  # cu_seqlens_k_new
        None,  # seqused_q
        t.seq_lens,
        case.query_len,
        max(case.seq_lens),
        table,
        None,  # kv_batch_idx
        None,  # leftpad_k
        None,  # rotary_cos
        None,  # rotary_sin
        None,  # seqlens_rotary
        None,  # q_descale
        None,  # k_descale
        None,  # v_descale
        case.k_dim**-0.5,
        True,  # is_causal
        case.window - 1,
        0,  # window_size_right
        case.softcap or 0.0,
        True,  # is_rotary_interleaved
        scheduled,
        splits,
        None,  # pack_gqa
        0,  # sm_margin
        t.sinks,
        1,  # cp_world_size
        0,  # cp_rank
        None,  # cp_tot_seqused_k
    )


def launches(case: Case, t: Tensors) -> dict[str, Callable[[int], None]]:
    """Return the calls on a rotation, by way."""
    operators = peers.flash_attention_3()
    first_rows = torch.arange(case.requests + 1, dtype=torch.int32, device=t.query.device) * case.query_len

    @functools.cache  # made at the first call, which is outside any graph
    def scheduled() -> torch.Tensor:
        return metadata(operators, case, t, first_rows)

    def run(index: int, with_metadata: bool, splits: int) -> None:
        table = t.tables[index % len(t.tables)]
        attention(operators, case, t, first_rows, table, scheduled() if with_metadata else None, splits)
        apply_gate(t.output, t.gate)

    return {
        "scheduled": partial(run, with_metadata=True, splits=GRAPH_SPLITS),
        "heuristic": partial(run, with_metadata=False, splits=0),
        "unsplit": partial(run, with_metadata=False, splits=1),
    }


class FlashAttention3:
    """See the module."""

    name, default, tolerance = "fa3 + gate", True, TOLERANCE

    def absent(self, machine: Machine) -> str | None:
        """It needs a Hopper GPU and its library."""
        if not machine.cuda:
            return NO_CUDA
        if machine.capability // 10 != 9:
            return f"needs an sm_90 GPU, got sm_{machine.capability}"
        return peers.absent(FA3_FILES)

    def unfit(self, case: Case) -> str | None:
        """It is asked for every case; what it refuses is told as its failure."""
        return None

    def prepare(self, case: Case, tensors: Tensors) -> dict[str, Way]:
        """Return its ways."""
        return {name: graph_way(launch, tensors, name) for name, launch in launches(case, tensors).items()}
