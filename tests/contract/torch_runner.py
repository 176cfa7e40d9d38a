"""``swa_torch`` behind the interface of ``tests.contract.backends``.

Triton interprets or compiles for the whole life of a process, so a process started with TRITON_INTERPRET=1 tests
``interpret`` and any other tests ``cpu`` and, with a GPU, ``triton``.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import torch

import swa_torch
from swa_plan.cases import Inputs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ("interpret",) if INTERPRETED else ("cpu", "triton") if torch.cuda.is_available() else ("cpu",)

api = swa_torch

_TORCH_DTYPES = {
    "bfloat16": (np.int16, torch.bfloat16, ml_dtypes.bfloat16),
    "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    "float8_e5m2": (np.uint8, torch.float8_e5m2, ml_dtypes.float8_e5m2),
}


def name_of(backend: str) -> str:
    """Return what ``backend=`` takes."""
    return backend


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


def to_array(array: Any, backend: str) -> Any:
    """Return a tensor where the backend's tensors live; what is no array as it is."""
    return to_torch(array, device_of(backend))


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


def arguments(inputs: Inputs, backend: str) -> tuple[tuple, dict[str, Any]]:
    """Return the positional arguments and options of ``swa_decode``."""
    return torch_arguments(inputs, device_of(backend))


def scope(*arrays: Any) -> AbstractContextManager[None]:
    """Return the context in which arrays like these are used: torch needs none."""
    return nullcontext()


def decode_gated(inputs: Inputs, gate: np.ndarray, backend: str, *, splits: int, pack: int) -> np.ndarray:
    """Return what ``swa_decode_gated`` writes into an output that held NaN."""
    (query, cache, table, lens), _ = arguments(inputs, backend)
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
