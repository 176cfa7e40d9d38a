"""Runs one case's inputs through any backend that is present, NumPy in and NumPy out.

Triton interprets or compiles for the whole life of a process, so a process started with TRITON_INTERPRET=1 tests
``interpret`` and any other tests ``cpu`` and, with a GPU, ``triton``.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import torch

import swa_torch
from swa_plan.cases import Case, Inputs, make_inputs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ("interpret",) if INTERPRETED else ("cpu", "triton") if torch.cuda.is_available() else ("cpu",)

_TORCH_DTYPES = {
    "bfloat16": (np.int16, torch.bfloat16, ml_dtypes.bfloat16),
    "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    "float8_e5m2": (np.uint8, torch.float8_e5m2, ml_dtypes.float8_e5m2),
}


def device_of(backend: str) -> torch.device:
    """Return the device that a backend's tensors live on."""
    return torch.device("cuda" if backend == "triton" else "cpu")


def to_torch(array: np.ndarray | float | None, device: torch.device | str = "cpu") -> Any:
    """Return a tensor with the array's bits; numbers and None as they are."""
    if not isinstance(array, (np.ndarray, np.generic)):
        return array
    array = np.array(array)
    if array.dtype.name in _TORCH_DTYPES:
        carrier, dtype, _ = _TORCH_DTYPES[array.dtype.name]
        return torch.from_numpy(array.view(carrier)).view(dtype).to(device)
    return torch.from_numpy(array).to(device)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return an array with the tensor's bits."""
    tensor = tensor.detach().cpu()
    name = str(tensor.dtype).removeprefix("torch.")
    if name in _TORCH_DTYPES:
        carrier, _, numpy_dtype = _TORCH_DTYPES[name]
        as_carrier = torch.int16 if carrier is np.int16 else torch.uint8
        return tensor.contiguous().view(as_carrier).numpy().view(numpy_dtype)
    return tensor.numpy()


def torch_arguments(inputs: Inputs, device: torch.device) -> tuple[tuple, dict[str, Any]]:
    """Return the positional arguments and options of ``swa_torch.swa_decode``."""
    bases = tuple(to_torch(base, device) for base in inputs.bases)
    cache = swa_torch.PagedCache(
        bases if len(bases) == 2 else bases[0], inputs.layout, k_dim=inputs.k_dim, v_dim=inputs.v_dim
    )
    options = {name: to_torch(value, device) for name, value in inputs.options().items()}
    if "out_dtype" in options:
        options["out_dtype"] = getattr(torch, options["out_dtype"])
    positional = (
        to_torch(inputs.query, device), cache, to_torch(inputs.block_table, device), to_torch(inputs.seq_lens, device)
    )  # fmt: skip
    return positional, options


def inputs_for(case: Case, backend: str, *, dtype: str | None = None, **choices: Any) -> Inputs:
    """Return the case's inputs, with fp16 in place of bf16 where Triton interprets (its bf16 arithmetic is wrong)."""
    dtype = dtype or case.dtype
    if backend == "interpret":
        no_bfloat16 = {"bfloat16": "float16"}
        case = replace(
            case,
            gate_dtype=no_bfloat16.get(case.gate_dtype, case.gate_dtype),
            out_dtype=no_bfloat16.get(case.out_dtype or "", case.out_dtype),
        )
        dtype = no_bfloat16.get(dtype, dtype)
    return make_inputs(case, dtype=dtype, **choices)


def run(inputs: Inputs, backend: str, **overrides: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Return ``(out, lse)``; ``overrides`` are further options, such as ``plan=``."""
    positional, options = torch_arguments(inputs, device_of(backend))
    result = swa_torch.swa_decode(*positional, **{**options, "backend": backend, **overrides})
    out, lse = result if isinstance(result, tuple) else (result, None)
    return to_numpy(out), None if lse is None else to_numpy(lse)


def plan_for(inputs: Inputs, backend: str, *, splits: int | None = None, pack: int | None = None, **choices: Any):
    """Return the planner's plan for these inputs, with splits or pack replaced."""
    (query, cache, table, _), options = torch_arguments(inputs, device_of(backend))
    plan = swa_torch.plan_for(
        query, cache, table,
        window=inputs.window, query_len=inputs.query_len, ragged=inputs.cu_query_lens is not None,
        layer=options.get("layer"), backend=backend, **choices,
    )  # fmt: skip
    return replace(plan, splits=plan.splits if splits is None else splits, pack=plan.pack if pack is None else pack)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are bitwise equal."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
