"""``swa_torch`` as ``bridge.parity._backends`` uses it.

Triton interprets or compiles for the whole life of a process, so a process started with TRITON_INTERPRET=1 has
``interpret`` and any other ``cpu`` and, with a GPU, ``triton``, on an sm_90 ``gluon`` too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np
import torch

import swa_torch
from bridge._versions import interpreter_fault
from bridge.parity._backends import OWN_PROCESS
from swa_plan.cases import Inputs
from swa_torch._device import GPU_BACKENDS, cuda_profile, interpreter_is_on, require_hopper

api = swa_torch

_AS_CARRIER = {
    "bfloat16": (np.int16, torch.int16, torch.bfloat16, ml_dtypes.bfloat16),
    "float8_e4m3fn": (np.uint8, torch.uint8, torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    "float8_e5m2": (np.uint8, torch.uint8, torch.float8_e5m2, ml_dtypes.float8_e5m2),
}
"""Dtypes that torch and NumPy exchange as integers: the integers of both, then the dtypes of both."""


def why_absent(backend: str) -> str | None:
    """Return why a backend cannot run in this process; None if it can."""
    if backend == "cpu":
        return None
    if find_spec("triton") is None:
        return "triton is not installed: pip install 'triton>=3.6'"
    if backend == "interpret":
        import triton

        return interpreter_fault(triton.__version__, np.__version__) or (None if interpreter_is_on() else OWN_PROCESS)
    if torch.version.hip is None and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not torch.cuda.is_available():
        return "torch sees no device"
    try:
        cuda_profile(torch.cuda.current_device())
        if backend == "gluon":
            require_hopper(torch.device("cuda"))
    except NotImplementedError as error:
        return str(error)
    return None


def name_of(backend: str) -> str:
    """Return what ``backend=`` takes."""
    return backend


def device_of(backend: str) -> torch.device:
    """Return the device that a backend's tensors live on."""
    return torch.device("cuda" if backend in GPU_BACKENDS else "cpu")


def to_torch(array: Any, device: torch.device | str = "cpu") -> Any:
    """Return a tensor of torch's own memory with an array's bits; what is no array as it is."""
    if not isinstance(array, (np.ndarray, np.generic)):
        return array
    array = np.array(array)
    if array.dtype.name in _AS_CARRIER:
        carrier, _, dtype, _ = _AS_CARRIER[array.dtype.name]
        tensor = torch.from_numpy(array.view(carrier)).view(dtype)
    else:
        tensor = torch.from_numpy(array)
    # A copy: torch aligns what it allocates to 64 bytes, which JAX asks of memory that it shares; NumPy to 16.
    return tensor.to(device, copy=True)


def to_array(array: Any, backend: str) -> Any:
    """Return a tensor where the backend's tensors live; what is no array as it is."""
    return to_torch(array, device_of(backend))


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return an array with the tensor's bits."""
    tensor = tensor.detach().cpu()
    name = str(tensor.dtype).removeprefix("torch.")
    if name in _AS_CARRIER:
        _, carrier, _, dtype = _AS_CARRIER[name]
        return tensor.contiguous().view(carrier).numpy().view(dtype)
    return tensor.numpy()


def to_dtype(name: str) -> torch.dtype:
    """Return what ``out_dtype=`` takes."""
    return getattr(torch, name)


def address(tensor: torch.Tensor) -> int:
    """Return where a tensor's memory is."""
    return tensor.data_ptr()


def torch_arguments(inputs: Inputs, device: torch.device) -> tuple[tuple, dict[str, Any]]:
    """Return the positional arguments and options of ``swa_torch.swa_decode``."""
    bases = tuple(to_torch(base, device) for base in inputs.bases)
    cache = swa_torch.PagedCache(
        bases if len(bases) == 2 else bases[0], inputs.layout, k_dim=inputs.k_dim, v_dim=inputs.v_dim
    )
    options = {name: to_torch(value, device) for name, value in inputs.options().items()}
    if "out_dtype" in options:
        options["out_dtype"] = to_dtype(options["out_dtype"])
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
