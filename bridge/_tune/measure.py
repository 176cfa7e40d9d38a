"""Times of plans: replays of a CUDA graph of calls over rotated block tables, and medians of them.

Needs a GPU, torch and Triton, and is imported only where they are.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from bridge._tune.compiling import Spills, compile_plans, is_out_of_memory, runs
from bridge._tune.device import Device
from bridge._tune.replays import GraphTimer, interleaved
from bridge._tune.sample import Timed
from bridge._tune.tensors import Tensors, decode, make_tensors, rotations
from swa_plan import Plan, Problem

_WARM_S = 0.3
_REPLAYS, _FINAL_REPLAYS = 7, 21


class Replay(GraphTimer):
    """A plan's timer."""

    def __init__(self, tensors: Tensors, plan: Plan) -> None:
        super().__init__(lambda rotation: decode(tensors, plan, rotation), tensors.calls)


class Bench:
    """Measures plans on this process's current GPU.

    Args:
        device: that GPU.
        processes: how many compile.
        note: told of each problem that is left out.
    """

    def __init__(self, device: Device, processes: int, note: Callable[[str], object] = print) -> None:
        self.note = note
        self.l2_bytes = device.l2_bytes or device.shipped.l2_bytes
        self.processes = processes
        self.spills = Spills()
        self._is_warm = False

    def compile(self, plans: Sequence[Plan]) -> int:
        """Compile the kernels of plans; return how many there are."""
        return compile_plans(plans, self.processes)

    def each(self, plans: Sequence[Plan], advance: Callable[[], None]) -> list[Timed]:
        """Return the time of each plan that fits the GPU and does not spill, measured one after the other.

        A problem for which memory does not suffice is left out.
        """
        return self._problems(plans, advance, self._one_by_one)

    def together(self, plans: Sequence[Plan], advance: Callable[[], None]) -> list[Timed]:
        """Return the time of each plan, those of one problem measured in turn so that drift meets all alike.

        A problem for which memory does not suffice is left out.
        """
        return self._problems(plans, advance, self._in_turn)

    def _problems(
        self,
        plans: Sequence[Plan],
        advance: Callable[[], None],
        measure: Callable[[Tensors, list[Plan], Callable[[], None]], list[Timed]],
    ) -> list[Timed]:
        timed = []
        for problem, mine in _by_problem(plans).items():
            try:
                timed += measure(self._tensors(problem), mine, advance)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self.note(f"left out, because the GPU's memory does not suffice: {problem}")
            torch.cuda.empty_cache()
        return timed

    def _one_by_one(self, tensors: Tensors, plans: list[Plan], advance: Callable[[], None]) -> list[Timed]:
        timed = []
        for plan in plans:
            advance()
            fits = runs(lambda plan=plan: decode(tensors, plan, 0))
            spilled = self.spills.of(plan)  # asked for all, so that no kernel is taken for another plan's
            if spilled or not fits:
                continue
            replay = Replay(tensors, plan)
            if not self._is_warm:
                _warm_up(replay)
                self._is_warm = True
            timed.append(Timed(plan, statistics.median(replay.measure() for _ in range(_REPLAYS))))
        return timed

    def _in_turn(self, tensors: Tensors, plans: list[Plan], advance: Callable[[], None]) -> list[Timed]:
        replays = {}
        for plan in plans:
            advance()
            if runs(lambda plan=plan: decode(tensors, plan, 0)):
                replays[plan] = Replay(tensors, plan)
        return [Timed(plan, time_us) for plan, time_us in interleaved(replays, _FINAL_REPLAYS).items()]

    def _tensors(self, problem: Problem) -> Tensors:
        size = problem.max_requests * problem.row_keys * problem.key_bytes
        return make_tensors(problem, requests=problem.max_requests, sets=rotations(size, self.l2_bytes))


def _warm_up(replay: Replay) -> None:
    """Let the GPU reach its working clock."""
    end = time.monotonic() + _WARM_S
    while time.monotonic() < end:
        replay.measure()


def _by_problem(plans: Sequence[Plan]) -> dict[Problem, list[Plan]]:
    found: dict[Problem, list[Plan]] = {}
    for plan in dict.fromkeys(plans):
        found.setdefault(plan.problem, []).append(plan)
    return found
