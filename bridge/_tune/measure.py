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
from bridge._tune.sample import Timed
from bridge._tune.tensors import Tensors, decode, make_tensors, rotations
from swa_plan import Plan, Problem

_WARM_S = 0.3
_REPLAYS, _FINAL_REPLAYS = 7, 21


class Replay:
    """A captured graph of calls; ``measure`` replays it once and returns microseconds a call."""

    def __init__(self, tensors: Tensors, plan: Plan) -> None:
        self.tensors = tensors  # the graph works on them
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for rotation in range(3):
                decode(tensors, plan, rotation)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for rotation in range(tensors.calls):
                decode(tensors, plan, rotation)
        for _ in range(2):
            self.graph.replay()

    def measure(self) -> float:
        """Replay once."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self.tensors.calls


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
        samples: dict[Plan, list[float]] = {plan: [] for plan in replays}
        for _ in range(_FINAL_REPLAYS):
            for plan, replay in replays.items():
                samples[plan].append(replay.measure())
        return [Timed(plan, statistics.median(times)) for plan, times in samples.items()]

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
