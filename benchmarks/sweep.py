"""Exhaustive sweep of plans over the nine cases: what the planner's rules are made from, and what its regret is.

    python -m benchmarks.sweep [--json FILE]

Kernels are compiled by several processes first; Triton's cache on disk hands them to the measuring one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import torch

import swa_torch
from benchmarks.timing import GraphTimer, interleaved
from benchmarks.workloads import NINE, Workload, make_tensors
from swa_plan import Plan, Problem

TILES = (
    (16, 1, 4), (16, 2, 3), (16, 2, 4), (16, 2, 5), (32, 1, 3), (32, 2, 2), (32, 2, 3), (32, 2, 4), (32, 4, 3),
    (64, 2, 2), (64, 4, 2), (64, 4, 3), (128, 4, 2),
)  # fmt: skip
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
PACKS = (1, 2, 4)


def plans(workload: Workload) -> list[Plan]:
    """Return every plan worth trying."""
    problem = Problem(
        workload.requests, workload.kv_heads * workload.group, workload.kv_heads, workload.dim, workload.dim,
        workload.window, workload.block, -(-workload.seq_len // workload.block), workload.query_len,
    )  # fmt: skip
    found = []
    for pack in (pack for pack in PACKS if pack <= workload.query_len and pack * workload.group <= 64):
        for splits in SPLITS:
            for tile, warps, stages in TILES:
                plan = Plan(problem, "portable", pack, splits, tile, warps, stages)
                programs = plan.programs(workload.requests) * splits
                if splits * tile > workload.window or (splits > 1 and programs > 16 * 132):
                    continue
                if plan.rows == 64 and warps < 4:
                    continue
                found.append(plan)
    return found


def compile_share(share: int, shares: int) -> None:
    """Compile every ``shares``-th plan by calling it once."""
    index = 0
    for workload in NINE:
        small = workload._replace(requests=1)
        tensors = make_tensors(small)
        for plan in plans(workload):
            index += 1
            if index % shares == share:
                decode(tensors, plan, 0)


def decode(tensors, plan: Plan, index: int) -> None:
    """Run one call."""
    swa_torch.swa_decode(
        tensors.query, (tensors.key_cache, tensors.value_cache), tensors.tables[index % len(tensors.tables)],
        tensors.seq_lens, window=plan.problem.window, query_len=plan.problem.query_len, gate=tensors.gate,
        out=tensors.output, plan=plan,
    )  # fmt: skip


def measure(workload: Workload, candidates: list[Plan], repeats: int) -> list[tuple[float, Plan]]:
    """Return times in microseconds, best first."""
    tensors = make_tensors(workload)
    calls = max(8, min(32, len(tensors.tables)))
    timed = []
    for plan in candidates:
        timer = GraphTimer(lambda index, plan=plan: decode(tensors, plan, index), calls)
        timed.append((interleaved({"plan": timer}, repeats)["plan"], plan))
    return sorted(timed, key=lambda item: item[0])


def main() -> None:
    """Compile, measure, print the best of each case beside the planner's choice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, default=14)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=compile_share, args=(share, arguments.processes)) for share in range(arguments.processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    results = {}
    for workload in NINE:
        candidates = plans(workload)
        timed = measure(workload, candidates, 5)
        finalists = measure(workload, [plan for _, plan in timed[:6]], 25)
        tensors = make_tensors(workload)
        cache = (tensors.key_cache, tensors.value_cache)
        own = swa_torch.plan_for(
            tensors.query, cache, tensors.tables[0], window=workload.window, query_len=workload.query_len
        )
        own = replace(own, problem=candidates[0].problem)
        mine = measure(workload, [own], 25)[0][0]
        print(f"{workload.name:10s} planner {short(own)} {mine:.2f}; best {finalists[0][0]:.2f}, regret "
              f"{mine / finalists[0][0]:.3f}; " + "; ".join(f"{short(plan)} {time:.2f}" for time, plan in finalists),
              flush=True)  # fmt: skip
        results[workload.name] = [
            (time, plan.pack, plan.splits, plan.tile, plan.warps, plan.stages) for time, plan in timed
        ]
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps(results))


def short(plan: Plan) -> str:
    """Return a plan in a few characters."""
    return f"p{plan.pack} s{plan.splits} {plan.tile}/{plan.warps}/{plan.stages}"


if __name__ == "__main__":
    main()
