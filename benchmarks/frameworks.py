"""Pallas beside Triton on the nine cases: the same bytes, in one process and one run.

Triton runs in a CUDA graph, Pallas in a jitted function (XLA's command buffer) of as many calls, which returns every
output; both rotate over block tables so that no call finds its keys in the L2 cache. Three times are given:

* ``wall``: the graph replayed, or the function queued back to back, host work hidden behind the device's;
* ``span``: from the start of the first kernel to the end of the last, as CUPTI records them;
* ``kernels``: the durations of the kernels, summed. Under dependent launch (Triton) a duration holds the wait for the
  kernel before, so these are taken with it off on both sides.

Each framework runs its own plan (XLA has no dependent launch, which the planner knows); ``same plan`` gives Triton's
figures with Pallas's plan.

XLA_PYTHON_CLIENT_PREALLOCATE=false python -m benchmarks.frameworks [--json FILE] [CASE ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import torch
from jax import dlpack
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import swa_pallas
import swa_torch
from benchmarks.jax_timing import JaxTimer
from benchmarks.timing import GraphTimer, floor_timers
from benchmarks.workloads import NINE, Tensors, Workload, make_tensors
from swa_torch import _repeat
from swa_torch._triton import _launch


def torch_launch(workload: Workload, t: Tensors, plan: swa_torch.Plan, calls: int) -> Callable[[int], None]:
    """Return a launch of one rotation; each call has an output of its own, as in JAX."""
    outputs = [torch.empty_like(t.output) for _ in range(calls)]

    def launch(index: int) -> None:
        swa_torch.swa_decode(
            t.query, (t.key_cache, t.value_cache), t.tables[index % len(t.tables)], t.seq_lens,
            window=workload.window, query_len=workload.query_len, gate=t.gate, out=outputs[index], plan=plan,
        )  # fmt: skip

    return launch


def jax_program(workload: Workload, t: Tensors, plan: swa_pallas.Plan, calls: int) -> Callable[[], tuple]:
    """Return a jitted function of ``calls`` steps over the same memory as the torch tensors."""
    base = t.key_cache._base
    assert base is not None
    arrays = [dlpack.from_dlpack(each) for each in (t.query, base, t.seq_lens, t.gate)]
    # An array of its own for each call: XLA computes calls with equal operands once.
    tables = [dlpack.from_dlpack(t.tables[index % len(t.tables)].clone()) for index in range(calls)]

    @jax.jit
    def steps(query, cache_base, seq_lens, gate, tables):
        cache = swa_pallas.PagedCache(cache_base, "kv pages block kv_heads dim")
        return tuple(
            swa_pallas.swa_decode(
                query, cache, tables[index], seq_lens,
                window=workload.window, query_len=workload.query_len, gate=gate, plan=plan,
            )
            for index in range(calls)
        )  # fmt: skip

    return lambda: steps(*arrays, tables)


def device_times(run: Callable[[], object], calls: int) -> tuple[float, float, float]:
    """Return ``(span, durations of split, of combine)`` of the kernels of one run, in microseconds a call."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
        run()
        torch.cuda.synchronize()
    kernels = [
        (event.time_range, "split" in event.name)
        for event in record.events() or ()
        if event.device_type == DeviceType.CUDA and "swa_decode" in event.name
    ]
    span = max(time.end for time, _ in kernels) - min(time.start for time, _ in kernels)
    split, combine = (
        sum(time.end - time.start for time, is_split in kernels if is_split == wanted) for wanted in (True, False)
    )
    return span / calls, split / calls, combine / calls


def without_dependent_launch(launch: Callable[[int], None], calls: int) -> GraphTimer:
    """Return a graph of launches that each wait for the one before to end."""
    capability, _launch.DEPENDENT_LAUNCH_CAPABILITY = _launch.DEPENDENT_LAUNCH_CAPABILITY, 10_000
    _repeat._remembered.clear()  # kernels that start early would be launched again
    try:
        return GraphTimer(launch, calls)
    finally:
        _launch.DEPENDENT_LAUNCH_CAPABILITY = capability
        _repeat._remembered.clear()


def ulp_histogram(workload: Workload, t: Tensors, plan: swa_pallas.Plan) -> dict[str, int]:
    """Return how many outputs differ by how many units in the last place (of bf16)."""
    ours = swa_torch.swa_decode(
        t.query, (t.key_cache, t.value_cache), t.tables[0], t.seq_lens,
        window=workload.window, query_len=workload.query_len, gate=t.gate, plan=plan,
    )  # fmt: skip
    ours = ours.view(torch.int16).cpu().numpy().astype(np.int32)
    theirs = np.asarray(jax_program(workload, t, plan, 1)()[0])
    assert theirs.dtype == ml_dtypes.bfloat16
    bits = theirs.view(np.int16).astype(np.int32)
    ordered = [np.where(each < 0, -(each & 0x7FFF), each) for each in (ours, bits)]
    values, counts = np.unique(np.abs(ordered[0] - ordered[1]), return_counts=True)
    return {str(value): int(count) for value, count in zip(values, counts, strict=True)}


def measure(workload: Workload, rounds: int) -> dict:
    """Return medians of ``rounds`` interleaved rounds, in microseconds."""
    t = make_tensors(workload, ragged=False)
    own = swa_torch.plan_for(
        t.query, (t.key_cache, t.value_cache), t.tables[0], window=workload.window, query_len=workload.query_len
    )
    query, keys, values, table = map(dlpack.from_dlpack, (t.query, t.key_cache, t.value_cache, t.tables[0]))
    plan = swa_pallas.plan_for(query, (keys, values), table, window=workload.window, query_len=workload.query_len)
    calls = max(16, min(32, len(t.tables)))
    program = jax_program(workload, t, plan, calls)
    launch, same_launch = torch_launch(workload, t, own, calls), torch_launch(workload, t, plan, calls)
    graph, same_graph = GraphTimer(launch, calls), GraphTimer(same_launch, calls)
    timers = {"triton": graph, "triton, same plan": same_graph, "pallas": JaxTimer(program, calls)}
    timers |= floor_timers(workload.read_bytes)
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            samples[name].append(timer.measure())
    times = {name: statistics.median(values) for name, values in samples.items()}
    triton_span, *_ = device_times(graph.graph.replay, calls)
    same_span, *_ = device_times(same_graph.graph.replay, calls)
    plain_span, *triton_kernels = device_times(without_dependent_launch(launch, calls).graph.replay, calls)
    _, *same_kernels = device_times(without_dependent_launch(same_launch, calls).graph.replay, calls)
    pallas_span, *pallas_kernels = device_times(lambda: jax.block_until_ready(program()), calls)
    return {
        "case": workload.name,
        "megabytes": workload.read_bytes / 1e6,
        "triton plan": f"{own.splits}x{own.tile}/{own.warps}/{own.stages}",
        "pallas plan": f"{plan.splits}x{plan.tile}/{plan.warps}/{plan.stages}",
        "floor": min(time for name, time in times.items() if name.startswith("stream")),
        "triton wall": times["triton"],
        "triton wall, same plan": times["triton, same plan"],
        "pallas wall": times["pallas"],
        "triton span": triton_span,
        "triton span, same plan": same_span,
        "triton span, no PDL": plain_span,
        "pallas span": pallas_span,
        "triton split": triton_kernels[0],
        "triton combine": triton_kernels[1],
        "triton kernels, same plan": sum(same_kernels),
        "pallas split": pallas_kernels[0],
        "pallas combine": pallas_kernels[1],
        "wall ratio": times["pallas"] / times["triton"],
        "span ratio": pallas_span / triton_span,
        "kernels ratio": sum(pallas_kernels) / sum(triton_kernels),
        "wall ratio, same plan": times["pallas"] / times["triton, same plan"],
        "span ratio, same plan": pallas_span / same_span,
        "kernels ratio, same plan": sum(pallas_kernels) / sum(same_kernels),
        "ulps": ulp_histogram(workload, t, plan),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("cases", nargs="*", help="names of cases; all without")
    arguments = parser.parse_args()
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "jax": jax.__version__}
    print(", ".join(versions.values()), "- microseconds a call")
    rows = []
    for workload in NINE:
        if arguments.cases and workload.name not in arguments.cases:
            continue
        row = measure(workload, arguments.rounds)
        rows.append(row)
        figures = (
            f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
        )
        print("  ".join(figures), flush=True)
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps({**versions, "cases": rows}, indent=1))


if __name__ == "__main__":
    main()
