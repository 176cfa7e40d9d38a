"""``swa_pallas`` behind the interface of ``tests.contract.backends``.

``jax-xla`` and ``jax-interpret`` run on the CPU on every machine, so that they test the same lowering everywhere.
``jax-pallas_triton`` is there where JAX sees a CUDA device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import jax
import numpy as np

import swa_pallas
from swa_plan.cases import Inputs

HAS_GPU = jax.default_backend() == "gpu"
BACKENDS = ("jax-xla", "jax-interpret", "jax-pallas_triton") if HAS_GPU else ("jax-xla", "jax-interpret")

api = swa_pallas


def name_of(backend: str) -> str:
    """Return what ``backend=`` takes."""
    return backend.removeprefix("jax-")


def device_of(backend: str) -> jax.Device:
    """Return the device that a backend's arrays live on."""
    return jax.local_devices(backend="cuda" if backend == "jax-pallas_triton" else "cpu")[0]


def to_array(array: Any, backend: str) -> Any:
    """Return an array committed to the backend's device, which then decides where a call runs; else what was given."""
    if not isinstance(array, (np.ndarray, np.generic)):
        return array
    # A copy: on the CPU JAX may keep NumPy's memory, which tests write to.
    return jax.device_put(np.array(array), device_of(backend))


def to_numpy(array: jax.Array) -> np.ndarray:
    """Return a copy of an array."""
    return np.array(array)


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


def decode_gated(inputs: Inputs, gate: np.ndarray, backend: str, *, splits: int, pack: int) -> np.ndarray:
    """Return what ``swa_decode_gated`` returns.

    It takes no backend: on the CPU it is ``jax-xla``. ``jax-interpret`` runs the plan that it would run.
    """
    (query, cache, table, lens), _ = arguments(inputs, backend)
    scale = inputs.k_dim**-0.5 if inputs.scale is None else inputs.scale
    window = 1 << 30 if inputs.window is None else inputs.window
    call = {"scale": scale, "window": window, "query_len": inputs.query_len}
    if backend == "jax-interpret":
        problem = swa_pallas.plan_for(query, cache, table, window=window, query_len=inputs.query_len).problem
        plan = replace(swa_pallas.Plan.from_splits(problem, splits, pack), kernel="interpret")
        out = swa_pallas.swa_decode(query, cache, table, lens, gate=to_array(gate, backend), plan=plan, **call)
    else:
        out = swa_pallas.swa_decode_gated(
            query, *cache.bases, table, lens, to_array(gate, backend), splits=splits, pack=pack, **call
        )
    return to_numpy(out)


def merge(outs: np.ndarray, lses: np.ndarray, backend: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return what ``merge_states`` makes of partial attentions."""
    arrays = {name: to_array(value, backend) for name, value in options.items()}
    out, lse = swa_pallas.merge_states(
        to_array(outs, backend), to_array(lses, backend), backend=name_of(backend), **arrays
    )
    return to_numpy(out), to_numpy(lse)
