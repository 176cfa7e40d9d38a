"""``swa_torch`` for ``tests.contract.backends`` and for tests of PyTorch alone."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

import swa_torch
from bridge.parity import backends
from bridge.parity._backends import DIRECT, why_absent
from bridge.parity._torch import device_of as device_of
from bridge.parity._torch import to_array as to_array
from bridge.parity._torch import to_numpy as to_numpy
from bridge.parity._torch import to_torch as to_torch
from bridge.parity._torch import torch_arguments as torch_arguments
from swa_plan.cases import Inputs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = tuple(backend for backend in backends() if DIRECT.get(backend) == "torch")

NO_GLUON = why_absent("gluon")
GPU_BACKENDS = (
    "triton",
    pytest.param("gluon", marks=pytest.mark.skipif(NO_GLUON is not None, reason=f"the Hopper kernel: {NO_GLUON}")),
)
"""For tests that are marked as in need of a GPU."""


def decode_gated(inputs: Inputs, gate: np.ndarray, backend: str, *, splits: int, pack: int) -> np.ndarray:
    """Return what ``swa_decode_gated`` writes into an output that held NaN."""
    (query, cache, table, lens), _ = torch_arguments(inputs, device_of(backend))
    output = torch.full((*query.shape[:2], inputs.v_dim), float("nan"), dtype=query.dtype, device=query.device)
    swa_torch.swa_decode_gated(
        query, cache.key_cache, cache.value_cache, table, lens, to_array(gate, backend), output,
        scale=inputs.k_dim**-0.5 if inputs.scale is None else inputs.scale,
        window=1 << 30 if inputs.window is None else inputs.window,
        query_len=inputs.query_len, splits=splits, pack=pack,
    )  # fmt: skip
    return to_numpy(output)


def merge(outs: np.ndarray, lses: np.ndarray, backend: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return what ``merge_states`` makes of partial attentions."""
    arrays = {name: to_array(value, backend) for name, value in options.items()}
    out, lse = swa_torch.merge_states(to_array(outs, backend), to_array(lses, backend), **arrays)
    return to_numpy(out), to_numpy(lse)
