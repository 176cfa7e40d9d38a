"""``swa_pallas`` for ``tests.contract.backends`` and for tests of JAX alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

import swa_pallas
from bridge.parity import backends
from bridge.parity._backends import DIRECT
from bridge.parity._jax import arguments as arguments
from bridge.parity._jax import device_of as device_of
from bridge.parity._jax import name_of as name_of
from bridge.parity._jax import to_array as to_array
from bridge.parity._jax import to_numpy as to_numpy
from swa_plan.cases import Inputs

HAS_GPU = jax.default_backend() == "gpu"
BACKENDS = tuple(backend for backend in backends() if DIRECT.get(backend) == "jax")


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
