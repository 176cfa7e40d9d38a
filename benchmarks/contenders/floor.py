"""The read floor: plain streaming kernels that read as many bytes as a case does."""

from __future__ import annotations

from benchmarks.cases import Case
from benchmarks.contenders.base import NO_CUDA, Machine, Way
from benchmarks.tensors import Tensors

FLOOR = "floor"


class Floor:
    """The best of several shapes, in the same run; see ``timing.floor_timers``."""

    name, default, tolerance = FLOOR, True, 0.0

    def absent(self, machine: Machine) -> str | None:
        """It needs a GPU."""
        return None if machine.cuda else NO_CUDA

    def unfit(self, case: Case) -> str | None:
        """Every case has one."""
        return None

    def prepare(self, case: Case, tensors: Tensors) -> dict[str, Way]:
        """Return a way for each shape of the kernel."""
        from benchmarks.timing import floor_timers

        timers = floor_timers(case.read_bytes)
        return {name: Way(lambda timer=timer: timer.measure, None, plan=name) for name, timer in timers.items()}
