"""What a contender is: whether it is here, whether it can do a case, and the ways in which it runs one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from benchmarks.cases import Case
from benchmarks.tensors import Tensors

Timer = Callable[[], float]
"""Measures once; microseconds a call."""


class Machine(NamedTuple):
    """What contenders may run on.

    Attributes:
        cuda: whether torch sees a CUDA device.
        capability: its compute capability times ten, or 0.
    """

    cuda: bool
    capability: int

    @property
    def device(self) -> str:
        """Where tensors are made."""
        return "cuda" if self.cuda else "cpu"


def this_machine() -> Machine:
    """Look at torch's current device."""
    if not torch.cuda.is_available():
        return Machine(False, 0)
    major, minor = torch.cuda.get_device_capability()
    return Machine(True, major * 10 + minor)


NO_CUDA = "needs a CUDA device, and torch sees none"


@dataclass(frozen=True)
class Way:
    """One way to run a case.

    Attributes:
        timer: makes what measures it; called only if the result agrees.
        result: runs rotation 0 and returns the output; None where there is nothing to compare.
        host: makes what measures the host's share, or None.
        plan: what runs, in words.
        note: what has to be known of its time, or "".
    """

    timer: Callable[[], Timer]
    result: Callable[[], torch.Tensor] | None
    host: Callable[[], Timer] | None = None
    plan: str = ""
    note: str = ""


class Contender(Protocol):
    """One line of the bench.

    Attributes:
        name: as it is printed and asked for.
        default: whether it runs unless others are asked for.
        tolerance: largest difference to our result, relative to the row's largest value.
    """

    name: str
    default: bool
    tolerance: float

    def absent(self, machine: Machine) -> str | None:
        """Return why it cannot run on this machine at all, or None."""
        ...

    def unfit(self, case: Case) -> str | None:
        """Return why it cannot do a case, or None."""
        ...

    def prepare(self, case: Case, tensors: Tensors) -> Mapping[str, Way]:
        """Return the ways to run a case, by name; the fastest that agrees counts."""
        ...


TOLERANCE = 0.02
"""Of a row's largest value: bf16 results of any order of summation differ by less, another computation by more."""


def disagreement(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, each row's relative to its largest expected value; infinity for a NaN."""
    if result.shape != expected.shape:
        return float("inf")
    largest = expected.float().abs().amax(-1).clamp_min(1e-6)
    ratio = (result.float() - expected.float()).abs().amax(-1) / largest
    return float(ratio.max()) if bool(ratio.isfinite().all()) else float("inf")


class LoopTimer:
    """A loop of ``calls`` calls.

    Args:
        launch: called with the number of the call.
        calls: calls of a loop; few enough that a device's queue does not fill up.
        wait: waits for the device.
        host_only: stop the clock before waiting.
    """

    def __init__(
        self, launch: Callable[[int], Any], calls: int, wait: Callable[[], Any], *, host_only: bool = False
    ) -> None:
        self.launch, self.calls, self.wait, self.host_only = launch, calls, wait, host_only
        for index in range(min(calls, 3)):
            launch(index)
        wait()

    def __call__(self) -> float:
        """Measure once."""
        start = time.perf_counter()
        for index in range(self.calls):
            self.launch(index)
        queued = time.perf_counter()
        self.wait()
        end = queued if self.host_only else time.perf_counter()
        return (end - start) * 1e6 / self.calls


def graph_timer(launch: Callable[[int], Any], tensors: Tensors) -> Timer:
    """Return a timer of a CUDA graph of one rotation."""
    from benchmarks.timing import GraphTimer

    return GraphTimer(launch, max(8, len(tensors.tables))).measure


def graph_way(launch: Callable[[int], Any], tensors: Tensors, plan: str = "") -> Way:
    """Return the way of a launch into ``tensors.output`` that is replayed in a CUDA graph."""

    def result() -> torch.Tensor:
        tensors.output.fill_(float("nan"))
        launch(0)
        return tensors.output.clone()

    return Way(lambda: graph_timer(launch, tensors), result, plan=plan)


def apply_gate(output: torch.Tensor, gate: torch.Tensor | None) -> None:
    """Apply the gate the way an engine does after an attention that has none: operators of their own."""
    if gate is not None:
        output.mul_(torch.sigmoid(gate)[..., None])
