"""``swa_torch``: in a CUDA graph, with either kernel; called eagerly, with the original's plan, on an fp8 cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

import swa_torch
from benchmarks.cases import Case
from benchmarks.contenders.base import NO_CUDA, TOLERANCE, LoopTimer, Machine, Way, graph_way
from benchmarks.tensors import Tensors
from swa_plan import Plan, swa_decode_plan
from swa_torch._device import why_no_gluon

EAGER_CALLS = {"cuda": 64, "cpu": 3}


def decode(case: Case, t: Tensors, index: int, **options) -> torch.Tensor:
    """Run one call on rotation ``index``."""
    out = swa_torch.swa_decode(
        t.query, (t.key_cache, t.value_cache), t.tables[index % len(t.tables)], t.seq_lens,
        window=case.window, query_len=case.query_len, gate=t.gate, sinks=t.sinks, softcap=case.softcap, **options,
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out


def plan_of(case: Case, t: Tensors, backend: str | None = None) -> Plan:
    """Return the planner's choice."""
    cache = (t.key_cache, t.value_cache)
    return swa_torch.plan_for(
        t.query, cache, t.tables[0], window=case.window, query_len=case.query_len, backend=backend
    )


def words(plan: Plan) -> str:
    """Return a plan in a few words."""
    return f"{plan.kernel}: pack {plan.pack}, splits {plan.splits}, tile {plan.tile}/{plan.warps}/{plan.stages}"


def waiter(t: Tensors) -> Callable[[], object]:
    """Return what waits for the device that the tensors are on."""
    return torch.cuda.synchronize if t.query.is_cuda else lambda: None


class TorchGraph:
    """``swa_decode`` with the planner's plan, in a CUDA graph."""

    name, default, tolerance = "torch graph", True, TOLERANCE

    def absent(self, machine: Machine) -> str | None:
        """It needs a GPU."""
        return None if machine.cuda else NO_CUDA

    def unfit(self, case: Case) -> str | None:
        """It does every case."""
        return None

    def prepare(self, case: Case, tensors: Tensors) -> dict[str, Way]:
        """Return the one way."""

        def launch(index: int) -> None:
            decode(case, tensors, index, out=tensors.output)

        return {"graph": graph_way(launch, tensors, words(plan_of(case, tensors)))}


class TorchGluon(TorchGraph):
    """``swa_decode`` with the Hopper kernel and its plan, in a CUDA graph."""

    name = "torch gluon"

    def absent(self, machine: Machine) -> str | None:
        """It needs an sm_90, and a Triton in whose Gluon the kernel is written."""
        if not machine.cuda:
            return NO_CUDA
        import triton

        return why_no_gluon(machine.capability, triton.__version__)

    def prepare(self, case: Case, tensors: Tensors) -> dict[str, Way]:
        """Return the one way."""
        plan = plan_of(case, tensors, "gluon")

        def launch(index: int) -> None:
            decode(case, tensors, index, out=tensors.output, plan=plan)

        return {"graph": graph_way(launch, tensors, words(plan))}


class TorchEager(TorchGraph):
    """``swa_decode`` called one by one, planning included; the host's share is timed apart on a GPU."""

    name = "torch eager"

    def absent(self, machine: Machine) -> str | None:
        """It runs anywhere."""
        return None

    def prepare(self, case: Case, tensors: Tensors) -> dict[str, Way]:
        """Return the one way."""
        wait, calls = waiter(tensors), EAGER_CALLS[tensors.query.device.type]

        def timer(host_only: bool = False) -> LoopTimer:
            return LoopTimer(lambda index: decode(case, tensors, index), calls, wait, host_only=host_only)

        host = (lambda: timer(host_only=True)) if tensors.query.is_cuda else None
        return {"eager": Way(timer, lambda: decode(case, tensors, 0), host, words(plan_of(case, tensors)))}


class OriginalPlan(TorchGraph):
    """``swa_decode`` with the numbers that the original's planner gives, in a CUDA graph."""

    name, default = "torch original plan", False

    def prepare(self, case: Case, tensors: Tensors) -> dict[str, Way]:
        """Return the one way."""
        pack, splits = original_plan(case)
        own = plan_of(case, tensors)
        plan = Plan.from_splits(own.problem, splits, pack, device=swa_torch_profile())

        def launch(index: int) -> None:
            decode(case, tensors, index, out=tensors.output, plan=plan)

        return {"graph": graph_way(launch, tensors, words(plan))}


class Fp8(TorchGraph):
    """``swa_decode`` on a cache of fp8 e4m3, in a CUDA graph; its values are others, so it agrees less."""

    name, default, tolerance = "torch fp8", False, 0.5

    def prepare(self, case: Case, tensors: Tensors) -> dict[str, Way]:
        """Return the one way; the cache is a copy."""
        stored = tensors._replace(
            key_cache=tensors.key_cache.to(torch.float8_e4m3fn), value_cache=tensors.value_cache.to(torch.float8_e4m3fn)
        )

        def launch(index: int) -> None:
            decode(case, stored, index, out=tensors.output, k_scale=1.0, v_scale=1.0)

        return {"graph": graph_way(launch, stored, words(plan_of(case, stored)))}


def original_plan(case: Case) -> tuple[int, int]:
    """Return the original planner's ``(pack, splits)`` on this GPU."""
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return swa_decode_plan(case.tokens, case.kv_heads, case.group, case.query_len, sms, case.window)


def swa_torch_profile():
    """Return the profile of this GPU."""
    from swa_torch._device import cuda_profile

    return cuda_profile(torch.cuda.current_device())
