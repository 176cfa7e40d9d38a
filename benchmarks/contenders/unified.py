"""vLLM 0.33.0's general Triton kernel, ``unified_attention``, with the gate as operators of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks import peers
from benchmarks.cases import Case
from benchmarks.contenders.base import NO_CUDA, TOLERANCE, Machine, Way, apply_gate, graph_way
from benchmarks.fetch_peers import UNIFIED_FILES
from benchmarks.tensors import Tensors

LEAST_PROGRAMS, SEGMENTS, MOST_SPLIT_ROWS = 128, 16, 8
"""vLLM's constants: it splits the keys while there are fewer programs than this, in so many segments."""


def scratch(case: Case, device: torch.device) -> dict[str, Any]:
    """Return the split's settings and buffers as vLLM's backend makes them."""
    threshold = LEAST_PROGRAMS // case.kv_heads
    rows = (threshold * min(case.query_len, MOST_SPLIT_ROWS), case.heads, SEGMENTS)
    padded = 1 << (case.k_dim - 1).bit_length()
    return {
        "seq_threshold_3D": threshold,
        "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": torch.empty(*rows, padded, dtype=torch.float32, device=device),
        "softmax_segm_max": torch.empty(rows, dtype=torch.float32, device=device),
        "softmax_segm_expsum": torch.empty(rows, dtype=torch.float32, device=device),
    }


def launch(case: Case, t: Tensors) -> Callable[[int], None]:
    """Return a call on a rotation."""
    attention = peers.unified_attention()
    assert attention is not None
    first_rows = torch.arange(case.requests + 1, dtype=torch.int32, device=t.query.device) * case.query_len
    options: dict[str, Any] = {
        "cu_seqlens_q": first_rows,
        "max_seqlen_q": case.query_len,
        "seqused_k": t.seq_lens,
        "max_seqlen_k": max(case.seq_lens),
        "softmax_scale": case.k_dim**-0.5,
        "causal": True,
        "window_size": (case.window - 1, 0),
        "softcap": case.softcap or 0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        "sinks": t.sinks,
        "kv_quant_mode": 0,
        **scratch(case, t.query.device),
    }

    def run(index: int) -> None:
        table = t.tables[index % len(t.tables)]
        attention(q=t.query, k=t.key_cache, v=t.value_cache, out=t.output, block_table=table, **options)
        apply_gate(t.output, t.gate)

    return run


class Unified:
    """See the module."""

    name, default, tolerance = "unified", True, TOLERANCE

    def absent(self, machine: Machine) -> str | None:
        """It needs a GPU and its files."""
        return NO_CUDA if not machine.cuda else peers.absent(UNIFIED_FILES)

    def unfit(self, case: Case) -> str | None:
        """It has one head size for keys and values."""
        return None if case.k_dim == case.v_dim else f"head size {case.k_dim}/{case.v_dim}: it has one for both"

    def prepare(self, case: Case, tensors: Tensors) -> dict[str, Way]:
        """Return the one way."""
        split = case.requests * -(-case.query_len // max(1, 16 // case.group)) <= LEAST_PROGRAMS // case.kv_heads
        plan = f"{SEGMENTS if split else 1} segments"
        return {"graph": graph_way(launch(case, tensors), tensors, plan)}
