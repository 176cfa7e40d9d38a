"""Which backends are present, and one step through any of them: NumPy in, NumPy out.

Each framework has a module here (``_torch``, ``_jax``) with the same functions, imported only when one of its backends
is asked for.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from bridge._versions import check_versions
from swa_plan import DeviceProfile, Plan, reference
from swa_plan._choose import choose_tile
from swa_plan._dtypes import numpy_dtype
from swa_plan._hopper import hopper_shared_bytes, hopper_warps
from swa_plan.cases import Inputs

REFERENCE = "float64"
"""The float64 reference, rounded to the output's dtype: what is left of an error when nothing but that rounds."""

DIRECT = {
    "cpu": "torch",
    "triton": "torch",
    "gluon": "torch",
    "interpret": "torch",
    "jax-xla": "jax",
    "jax-interpret": "jax",
    "jax-pallas_triton": "jax",
}
"""Backends of one framework, and which."""

CROSSED = ("torch>jax", "jax>torch")
"""Ways through both: arrays of the first, the kernel of the second, the result an array of the first again."""

INTERPRETERS = ("interpret", "jax-interpret")
"""Backends that run a GPU's kernels on the CPU, about a second a case."""

BACKENDS = (REFERENCE, *DIRECT, *CROSSED)

OWN_PROCESS = "Triton interprets only in a process that is started with TRITON_INTERPRET=1"
"""Why ``interpret`` is absent where it could be present."""


class Result(NamedTuple):
    """What a step computes.

    Attributes:
        out: ``[tokens, heads, v_dim]``.
        lse: fp32 ``[tokens, heads]``, or None where it was not asked for.
    """

    out: np.ndarray
    lse: np.ndarray | None


def backends() -> tuple[str, ...]:
    """Return the names of the backends that can run in this process.

    ``float64`` is the reference; ``cpu``, ``triton``, ``gluon`` and ``interpret`` are PyTorch's, ``jax-xla``,
    ``jax-interpret`` and ``jax-pallas_triton`` JAX's; ``torch>jax`` and ``jax>torch`` cross from one to the other. This
    imports the frameworks that are installed.
    """
    return tuple(backend for backend in BACKENDS if why_absent(backend) is None)


def absent() -> dict[str, str]:
    """Return the backends that cannot run in this process, and why."""
    reasons = {backend: why_absent(backend) for backend in BACKENDS}
    return {backend: reason for backend, reason in reasons.items() if reason is not None}


def why_absent(backend: str) -> str | None:
    """Return why a backend cannot run in this process; None if it can.

    Raises:
        ValueError: no such backend.
    """
    if backend == REFERENCE:
        return None
    if backend in CROSSED:
        missing = [framework for framework in ("torch", "jax") if find_spec(framework) is None]
        if missing:
            return f"{' and '.join(missing)}: not installed, and it needs both frameworks"
        try:
            check_versions()
        except NotImplementedError as error:
            return str(error)
        # Its arrays are made as for the other framework's backend on the same device.
        for needed in map(crossed_kernel, CROSSED):
            reason = why_absent(needed)
            if reason is not None:
                return f"it needs {needed}: {reason}"
        return None
    framework = _framework_of(backend)
    if find_spec(framework) is None:
        return f"{framework} is not installed: pip install 'swa-decode[{framework}]'"
    if backend != "interpret" and _interprets():
        # What holds of JAX beside Triton's interpreter is tested nowhere, and torch's own kernels cannot compile.
        return "Triton interprets in this process (TRITON_INTERPRET), which then runs backend 'interpret' alone"
    try:
        runner = runner_of(backend)
    except ImportError as error:
        return f"{framework} cannot be imported: {error}"
    return runner.why_absent(backend)


def crossed_kernel(way: str) -> str:
    """Return the backend whose kernel a crossed way runs, without its crossing.

    That is the GPU's where both frameworks have one that they can share, else the CPU's.
    """
    on_gpu = why_absent("triton") is None and why_absent("jax-pallas_triton") is None
    target = way.partition(">")[2]
    return {"torch": ("cpu", "triton"), "jax": ("jax-xla", "jax-pallas_triton")}[target][on_gpu]


def runner_of(backend: str) -> ModuleType:
    """Return the module of a backend's framework.

    Raises:
        ImportError: its framework is not installed, or does not start.
        ValueError: the backend is not one of a single framework.
    """
    return importlib.import_module(f"bridge.parity._{_framework_of(backend)}")


def arguments(inputs: Inputs, backend: str) -> tuple[tuple, dict[str, Any]]:
    """Return a step as its framework's arrays, on the device that the backend runs on.

    Args:
        inputs: the step, in NumPy.
        backend: a backend of one framework, such as ``cpu`` or ``jax-xla``.

    Returns:
        ``(query, cache, block_table, seq_lens)`` with a ``PagedCache`` of ``swa_torch`` or ``swa_pallas``, and the
        keyword arguments of ``swa_decode``, ``window`` and ``query_len`` always among them.

    Raises:
        ValueError: the backend is not one of a single framework.
    """
    return runner_of(backend).arguments(inputs, backend)


def run(inputs: Inputs, backend: str, **overrides: Any) -> Result:
    """Run a step.

    Args:
        inputs: the step, in NumPy.
        backend: one of ``backends()``.
        **overrides: further options of ``swa_decode``, such as ``plan=``; a backend of one framework only.

    Raises:
        ValueError: no such backend, or an option that it does not take.
    """
    if backend in (REFERENCE, *CROSSED) and overrides:
        raise ValueError(f"backend {backend!r} takes no further options, got {', '.join(overrides)}")
    if backend == REFERENCE:
        return _run_reference(inputs)
    if backend in CROSSED:
        from bridge.parity._crossed import run_crossed

        return run_crossed(inputs, backend).result
    runner = runner_of(backend)
    with runner.scope(*vars(inputs).values()):
        positional, options = runner.arguments(inputs, backend)
        options = {**options, "backend": runner.name_of(backend), **overrides}
        return to_result(runner.api.swa_decode(*positional, **options), runner.to_numpy)


def plan_for(
    inputs: Inputs, backend: str, *, splits: int | None = None, pack: int | None = None, **choices: Any
) -> Plan:
    """Return the planner's plan for these inputs, or with the splits or the pack that are given."""
    runner = runner_of(backend)
    with runner.scope(*vars(inputs).values()):
        (query, cache, table, _), options = runner.arguments(inputs, backend)
        plan = runner.api.plan_for(
            query, cache, table,
            window=inputs.window, query_len=inputs.query_len, ragged=inputs.cu_query_lens is not None,
            layer=options.get("layer"), backend=runner.name_of(backend), **choices,
        )  # fmt: skip
    chunks: int = plan.splits if splits is None else splits
    if plan.runs_hopper:
        return _hopper_plan(plan, chunks, plan.pack if pack is None else pack)
    if pack is None or pack == plan.pack or plan.batch_invariant:
        return replace(plan, splits=chunks, pack=plan.pack if pack is None else pack)
    # Another packing needs another tile: more rows take more shared memory.
    tile = choose_tile(plan.problem, pack, chunks, DeviceProfile.named("rtx4090"))
    return Plan(plan.problem, plan.kernel, pack, chunks, *tile, device=plan.device)


def _hopper_plan(plan: Plan, splits: int, pack: int) -> Plan:
    """Return a plan of the Hopper kernel with another cut, and the longest ring up to the planner's that fits."""
    limit = DeviceProfile.named("h200").shared_memory
    rings = range(plan.stages, 1, -1)
    ring = next(each for each in rings if hopper_shared_bytes(plan.problem, pack, splits, each) <= limit)
    return replace(plan, splits=splits, pack=pack, stages=ring, warps=hopper_warps(plan.problem, pack, splits))


def to_result(returned: Any, to_numpy: Any) -> Result:
    """Return what ``swa_decode`` returned, an output or an output and its LSE, in NumPy."""
    out, lse = returned if isinstance(returned, tuple) else (returned, None)
    return Result(to_numpy(out), None if lse is None else to_numpy(lse))


def _run_reference(inputs: Inputs) -> Result:
    dtype = numpy_dtype(inputs.out_dtype or inputs.query.dtype)
    out, lse = reference.swa_decode(*inputs.arrays(), **inputs.reference_options(), return_lse=True)
    with np.errstate(over="ignore", invalid="ignore"):
        return Result(out.astype(dtype), lse.astype(np.float32) if inputs.return_lse else None)


def _framework_of(backend: str) -> str:
    if backend not in DIRECT:
        if backend in BACKENDS:
            raise ValueError(f"backend must be of one framework: {', '.join(DIRECT)}, got {backend!r}")
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return DIRECT[backend]


def _interprets() -> bool:
    """Whether Triton interprets in this process."""
    if find_spec("torch") is None:
        return False
    try:
        from swa_torch._device import interpreter_is_on
    except ImportError:
        return False
    return interpreter_is_on()
