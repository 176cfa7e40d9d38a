"""One decode call as its backends see it: checked tensors, plain numbers and a plan."""

from __future__ import annotations

from typing import NamedTuple

import torch

from swa_plan import Plan


class DecodeCall(NamedTuple):
    """Everything one call of a backend needs; absent tensors are None, and every argument has been checked."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    gate: torch.Tensor | None
    cu_query_lens: torch.Tensor | None
    kv_start: torch.Tensor | None
    kv_end: torch.Tensor | None
    sinks: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    scale: float
    k_scale_number: float
    v_scale_number: float
    softcap: float | None
    output: torch.Tensor
    lse: torch.Tensor | None
    workspace: torch.Tensor | None
    plan: Plan
