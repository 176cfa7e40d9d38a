"""Runs one case's inputs through any backend of any framework that is present, NumPy in and NumPy out.

``cpu``, ``triton`` and ``interpret`` are PyTorch's backends, ``jax-xla``, ``jax-interpret`` and ``jax-pallas_triton``
JAX's. Each framework has a runner with the same functions; one that is not installed is not imported. A process in
which Triton interprets (TRITON_INTERPRET=1) tests PyTorch's ``interpret`` alone.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np

from swa_plan import Plan
from swa_plan.cases import Case, Inputs, make_inputs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _runners() -> dict[str, ModuleType]:
    """Return each backend's runner."""
    modules = []
    if find_spec("torch"):
        from tests.contract import torch_runner

        modules.append(torch_runner)
    if find_spec("jax") and not INTERPRETED:
        from tests.contract import jax_runner

        modules.append(jax_runner)
    return {backend: module for module in modules for backend in module.BACKENDS}


_RUNNERS = _runners()
BACKENDS = tuple(_RUNNERS)
PLAIN = ("cpu", "jax-xla")
"""Backends of plain operations: they do not split, and their matrix products have the batch's shape."""


def api_of(backend: str) -> Any:
    """Return the package that has the backend: ``swa_torch`` or ``swa_pallas``."""
    return _RUNNERS[backend].api


def name_of(backend: str) -> str:
    """Return what the package's ``backend=`` takes for the backend."""
    return _RUNNERS[backend].name_of(backend)


def to_array(array: Any, backend: str) -> Any:
    """Return the framework's array with a NumPy array's bits, where the backend runs; what is no array as it is."""
    return _RUNNERS[backend].to_array(array, backend)


def to_numpy(array: Any, backend: str) -> np.ndarray:
    """Return a NumPy array with the bits of a framework's array."""
    return _RUNNERS[backend].to_numpy(array)


def arguments(inputs: Inputs, backend: str) -> tuple[tuple, dict[str, Any]]:
    """Return the positional arguments and the options of the package's ``swa_decode``."""
    return _RUNNERS[backend].arguments(inputs, backend)


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
    runner = _RUNNERS[backend]
    with runner.scope(*vars(inputs).values()):
        positional, options = arguments(inputs, backend)
        options = {**options, "backend": name_of(backend), **overrides}
        result = runner.api.swa_decode(*positional, **options)
        out, lse = result if isinstance(result, tuple) else (result, None)
        return runner.to_numpy(out), None if lse is None else runner.to_numpy(lse)


def plan_for(
    inputs: Inputs, backend: str, *, splits: int | None = None, pack: int | None = None, **choices: Any
) -> Plan:
    """Return the planner's plan for these inputs, with splits or pack replaced."""
    runner = _RUNNERS[backend]
    with runner.scope(*vars(inputs).values()):
        (query, cache, table, _), options = arguments(inputs, backend)
        plan = runner.api.plan_for(
            query, cache, table,
            window=inputs.window, query_len=inputs.query_len, ragged=inputs.cu_query_lens is not None,
            layer=options.get("layer"), backend=name_of(backend), **choices,
        )  # fmt: skip
    return replace(plan, splits=plan.splits if splits is None else splits, pack=plan.pack if pack is None else pack)


def decode_gated(inputs: Inputs, backend: str, *, splits: int, pack: int = 1) -> np.ndarray:
    """Return what ``swa_decode_gated`` computes; no gate means a neutral one of +30."""
    gate = np.full(inputs.query.shape[:2], 30.0, np.float32) if inputs.gate is None else inputs.gate
    return _RUNNERS[backend].decode_gated(inputs, gate, backend, splits=splits, pack=pack)


def merge(outs: np.ndarray, lses: np.ndarray, backend: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(out, lse)`` of ``merge_states``."""
    return _RUNNERS[backend].merge(outs, lses, backend, **options)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are bitwise equal."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
