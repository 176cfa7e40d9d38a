"""``swa_pallas`` as ``bridge.parity._backends`` uses it.

``jax-xla`` and ``jax-interpret`` run on the CPU on every machine, so that they test the same lowering everywhere.
``jax-pallas_triton`` is there where JAX sees a CUDA device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

import swa_pallas
from swa_pallas._device import has_pallas_triton, local_profile
from swa_plan.cases import Inputs

api = swa_pallas


def why_absent(backend: str) -> str | None:
    """Return why a backend cannot run in this process; None if it can."""
    if backend != "jax-xla" and not has_pallas_triton():
        return f"jax {jax.__version__} has no jax.experimental.pallas.triton"
    try:
        if backend != "jax-pallas_triton":
            jax.local_devices(backend="cpu")
        elif jax.default_backend() != "gpu" or local_profile() is None:
            return "JAX sees no CUDA device"
    except (RuntimeError, NotImplementedError) as error:  # no such platform; a GPU that is too old
        return str(error)
    return None


def name_of(backend: str) -> str:
    """Return what ``backend=`` takes."""
    return backend.removeprefix("jax-")


def device_of(backend: str) -> Any:
    """Return the device that a backend's arrays live on."""
    return jax.local_devices(backend="cuda" if backend == "jax-pallas_triton" else "cpu")[0]


def to_array(array: Any, backend: str) -> Any:
    """Return an array committed to the backend's device, which then decides where a call runs; else what was given."""
    if not isinstance(array, (np.ndarray, np.generic)):
        return array
    # A copy: on the CPU JAX may keep NumPy's memory, which a caller writes to.
    return jax.device_put(np.array(array), device_of(backend))


def to_numpy(array: jax.Array) -> np.ndarray:
    """Return a copy of an array."""
    return np.array(array)


def to_dtype(name: str) -> str:
    """Return what ``out_dtype=`` takes."""
    return name


def address(array: jax.Array) -> int:
    """Return where an array's memory is."""
    return array.unsafe_buffer_pointer()


def arguments(inputs: Inputs, backend: str) -> tuple[tuple, dict[str, Any]]:
    """Return the positional arguments and options of ``swa_decode``."""
    bases = tuple(to_array(base, backend) for base in inputs.bases)
    cache = swa_pallas.PagedCache(
        bases if len(bases) == 2 else bases[0], inputs.layout, k_dim=inputs.k_dim, v_dim=inputs.v_dim
    )
    options = {name: to_array(value, backend) for name, value in inputs.options().items()}
    positional = (
        to_array(inputs.query, backend), cache, to_array(inputs.block_table, backend),
        to_array(inputs.seq_lens, backend),
    )  # fmt: skip
    return positional, options


def scope(*arrays: Any) -> AbstractContextManager[Any]:
    """Return the context in which arrays of these dtypes are used: 64 bits are there only under x64."""
    wide = any(isinstance(array, np.ndarray) and array.dtype in (np.int64, np.float64) for array in arrays)
    return jax.enable_x64(True) if wide else nullcontext()
