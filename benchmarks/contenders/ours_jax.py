"""``swa_pallas`` on the memory of torch's tensors: many calls in one jitted function, or one jitted call at a time."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.contenders.base import NO_CUDA, TOLERANCE, LoopTimer, Machine, Way
from benchmarks.contenders.ours_torch import words
from benchmarks.tensors import Tensors

JITTED_BYTES, LEAST_CALLS, MOST_CALLS = 100_000_000, 16, 64
"""A jitted function reads at least so many bytes, more than any L2 cache, in so many calls: more compile too long."""

SINGLE_CALLS = {"cuda": 64, "cpu": 3}


def absent(machine: Machine) -> str | None:
    """Return why JAX cannot take part, or None."""
    if find_spec("jax") is None:
        return "jax is not installed"
    import jax

    if machine.cuda and jax.default_backend() != "gpu":
        return f"JAX sees no GPU (its backend is {jax.default_backend()!r})"
    return None


def jitted_calls(case: Case) -> int:
    """Return how many calls one jitted function makes."""
    return max(LEAST_CALLS, min(MOST_CALLS, -(-JITTED_BYTES // case.read_bytes)))


def warm(case: Case, calls: int) -> str:
    """Return what is to be said of a function whose keys stay in the L2 cache, or ""."""
    read_bytes = calls * case.read_bytes
    return "" if read_bytes >= JITTED_BYTES else f"warm: its {calls} calls read {read_bytes / 1e6:.0f} MB in all"


def imported(tensors: Tensors) -> dict[str, Any]:
    """Return everything but the block tables as JAX arrays, on the same memory."""
    from jax import dlpack

    if tensors.query.is_cuda:
        torch.cuda.synchronize()
    names = ("query", "key_cache", "value_cache", "seq_lens", "gate", "sinks")
    given = {name: getattr(tensors, name) for name in names}
    return {name: None if each is None else dlpack.from_dlpack(each) for name, each in given.items()}


def imported_tables(tensors: Tensors, count: int) -> list[Any]:
    """Return a table of its own for each call: XLA computes calls with equal operands once."""
    from jax import dlpack

    return [dlpack.from_dlpack(tensors.tables[index % len(tensors.tables)].clone()) for index in range(count)]


def program(case: Case, calls: int, backend: str | None) -> Callable[[dict[str, Any], list[Any]], tuple]:
    """Return a jitted function of ``calls`` decode steps that returns every output."""
    import jax

    import swa_pallas

    def steps(arrays: dict[str, Any], tables: list[Any]) -> tuple:
        return tuple(
            swa_pallas.swa_decode(
                arrays["query"], (arrays["key_cache"], arrays["value_cache"]), tables[index], arrays["seq_lens"],
                window=case.window, query_len=case.query_len, gate=arrays["gate"], sinks=arrays["sinks"],
                softcap=case.softcap, backend=backend,
            )
            for index in range(calls)
        )  # fmt: skip

    return jax.jit(steps)


class Jitted:
    """Many calls in one jitted function, queued back to back.

    Args:
        name: the contender's name.
        backend: of ``swa_pallas``; None takes the device's own.
    """

    default, tolerance = True, TOLERANCE

    def __init__(self, name: str, backend: str | None = None) -> None:
        self.name, self.backend = name, backend

    def absent(self, machine: Machine) -> str | None:
        """It needs JAX on a GPU."""
        return NO_CUDA if not machine.cuda else absent(machine)

    def unfit(self, case: Case) -> str | None:
        """It does every case."""
        return None

    def prepare(self, case: Case, tensors: Tensors) -> dict[str, Way]:
        """Return the one way; it compiles when the result is asked for."""
        from benchmarks.jax_timing import JaxTimer

        calls = jitted_calls(case)
        arrays, tables = imported(tensors), imported_tables(tensors, calls)
        run = program(case, calls, self.backend)
        way = Way(
            lambda: JaxTimer(lambda: run(arrays, tables), calls).measure,
            lambda: torch.from_dlpack(run(arrays, tables)[0]).clone(),
            plan=f"{calls} calls; {jax_plan(case, arrays, tables[0], self.backend)}",
            note=warm(case, calls),
        )
        return {"jit": way}


class Single:
    """One jitted call at a time, wall time: what a caller outside a jitted step pays."""

    name, default, tolerance = "jax single", True, TOLERANCE

    def absent(self, machine: Machine) -> str | None:
        """It needs JAX, on a GPU if torch has one."""
        return absent(machine)

    def unfit(self, case: Case) -> str | None:
        """It does every case."""
        return None

    def prepare(self, case: Case, tensors: Tensors) -> dict[str, Way]:
        """Return the one way."""
        import jax

        calls = SINGLE_CALLS[tensors.query.device.type]
        arrays, tables = imported(tensors), imported_tables(tensors, min(calls, len(tensors.tables)))
        run = program(case, 1, None)
        started: list[Any] = []

        def launch(index: int) -> None:
            started.append(run(arrays, [tables[index % len(tables)]]))

        def wait() -> None:
            jax.block_until_ready(started)  # of all: on a CPU they may end in any order
            started.clear()

        way = Way(
            lambda: LoopTimer(launch, calls, wait),
            lambda: torch.from_dlpack(run(arrays, [tables[0]])[0]).clone(),
            plan=jax_plan(case, arrays, tables[0], None),
        )
        return {"single": way}


def jax_plan(case: Case, arrays: dict[str, Any], table: Any, backend: str | None) -> str:
    """Return the plan that such a call runs, in words."""
    import swa_pallas

    cache = (arrays["key_cache"], arrays["value_cache"])
    return words(
        swa_pallas.plan_for(
            arrays["query"], cache, table, window=case.window, query_len=case.query_len, backend=backend
        )
    )
