"""What tests run over every backend of any framework that is present, NumPy in and NumPy out.

``bridge.parity`` runs steps through them. ``cpu``, ``triton`` and ``interpret`` are PyTorch's backends, ``jax-xla``,
``jax-interpret`` and ``jax-pallas_triton`` JAX's. A framework that is not installed is not imported. A process in which
Triton interprets (TRITON_INTERPRET=1) tests PyTorch's ``interpret`` alone. What only tests call (``swa_decode_gated``,
``merge_states``) is in a module of each framework.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import numpy as np

from bridge import parity
from bridge.parity import arguments as arguments
from bridge.parity import run as run
from bridge.parity import same_bits as same_bits
from bridge.parity._backends import DIRECT, runner_of
from bridge.parity._backends import plan_for as plan_for
from swa_plan.cases import Case, Inputs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = tuple(backend for backend in parity.backends() if backend in DIRECT)
PLAIN = ("cpu", "jax-xla")
"""Backends of plain operations: they do not split, and their matrix products have the batch's shape."""


def api_of(backend: str) -> Any:
    """Return the package that has the backend: ``swa_torch`` or ``swa_pallas``."""
    return runner_of(backend).api


def name_of(backend: str) -> str:
    """Return what the package's ``backend=`` takes for the backend."""
    return runner_of(backend).name_of(backend)


def to_array(array: Any, backend: str) -> Any:
    """Return the framework's array with a NumPy array's bits, where the backend runs; what is no array as it is."""
    return runner_of(backend).to_array(array, backend)


def to_numpy(array: Any, backend: str) -> np.ndarray:
    """Return a NumPy array with the bits of a framework's array."""
    return runner_of(backend).to_numpy(array)


def inputs_for(case: Case, backend: str, *, seed: int = 0, poison: bool = False, dtype: str | None = None) -> Inputs:
    """Return the case's inputs, with fp16 in place of bf16 where Triton interprets (its bf16 arithmetic is wrong)."""
    return parity.inputs(case, backend, seed=seed, poison=poison, dtype=dtype)


def decode_gated(inputs: Inputs, backend: str, *, splits: int, pack: int = 1) -> np.ndarray:
    """Return what ``swa_decode_gated`` computes; no gate means a neutral one of +30."""
    gate = np.full(inputs.query.shape[:2], 30.0, np.float32) if inputs.gate is None else inputs.gate
    return _tests_of(backend).decode_gated(inputs, gate, backend, splits=splits, pack=pack)


def merge(outs: np.ndarray, lses: np.ndarray, backend: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(out, lse)`` of ``merge_states``."""
    return _tests_of(backend).merge(outs, lses, backend, **options)


def _tests_of(backend: str) -> ModuleType:
    return importlib.import_module(f"tests.contract.{DIRECT[backend]}_runner")
