"""Exhaustive sweep of plans: what the planner's rules are made from, and what its regret is.

    python -m benchmarks.sweep [--json FILE] [--only CASE ...]

Kernels are compiled by several processes first; Triton's cache on disk hands them to the measuring one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from pathlib import Path

import torch
import triton

import swa_torch
from benchmarks.timing import GraphTimer, interleaved
from benchmarks.workloads import NINE, Tensors, Workload, make_tensors
from swa_plan import Plan, Problem
from swa_plan import plan as make_plan
from swa_torch._device import cuda_profile

TILES = (
    (16, 1, 4), (16, 2, 4), (32, 1, 2), (32, 1, 3), (32, 1, 4), (32, 2, 2), (32, 2, 3), (32, 4, 3), (32, 8, 3),
    (64, 1, 2), (64, 1, 3), (64, 2, 2), (64, 4, 2), (64, 4, 3), (64, 8, 2), (64, 8, 3), (128, 4, 2), (128, 8, 2),
)  # fmt: skip
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
PACKS = (1, 2, 4)

VARIANTS = (
    *((workload, "bfloat16", "bfloat16") for workload in NINE),
    # Rows of 64: 16 query heads a kv head and four verify rows.
    (Workload("mtp_b64h1", 64, 1, 16, 4), "bfloat16", "bfloat16"),
    (Workload("mtp_b16h4", 16, 4, 16, 4), "bfloat16", "bfloat16"),
    (Workload("mtp_b128h4", 128, 4, 16, 4), "bfloat16", "bfloat16"),
    (Workload("fp8_b16h8", 16, 8, 8), "bfloat16", "float8_e4m3fn"),
    (Workload("fp8_b256h8", 256, 8, 8), "bfloat16", "float8_e4m3fn"),
    (Workload("fp8_mtp_b16h4", 16, 4, 16, 4), "bfloat16", "float8_e4m3fn"),
    (Workload("fp8_mtp_b32h8", 32, 8, 8, 4), "bfloat16", "float8_e4m3fn"),
    (Workload("int8_b256h8", 256, 8, 8), "bfloat16", "int8"),
    (Workload("fp32_b16h8", 16, 8, 8), "float32", "float32"),
    # Other windows and head sizes of published models.
    (Workload("w128_b64", 64, 8, 8, 1, 2048, 128, 64, 64), "bfloat16", "bfloat16"),
    (Workload("w1024_b16", 16, 8, 2, 1, 2048, 1024, 64, 256), "bfloat16", "bfloat16"),
    (Workload("w4096_b8", 8, 8, 4, 1, 8192, 4096, 64, 128), "bfloat16", "bfloat16"),
)


def plans(workload: Workload, dtype: str, cache_dtype: str) -> list[Plan]:
    """Return every plan worth trying."""
    problem = Problem(
        workload.requests, workload.kv_heads * workload.group, workload.kv_heads, workload.dim, workload.dim,
        workload.window, workload.block, -(-workload.seq_len // workload.block), workload.query_len, dtype, cache_dtype,
    )  # fmt: skip
    found = []
    for pack in (pack for pack in PACKS if pack <= workload.query_len and pack * workload.group <= 64):
        for splits in SPLITS:
            for tile, warps, stages in TILES:
                plan = Plan(problem, "portable", pack, splits, tile, warps, stages)
                programs = plan.programs(workload.requests) * splits
                if splits * tile > workload.window or (splits > 1 and programs > 8 * 132) or programs < 16:
                    continue
                if (plan.rows == 64 and warps < 4) or (warps == 8 and plan.rows < 64 and tile < 128):
                    continue
                if dtype == "float32" and (tile > 64 or plan.rows > 32):
                    continue
                found.append(plan)
    return found


def chosen(names: list[str] | None) -> list[tuple[Workload, str, str]]:
    """Return the variants to sweep."""
    return [variant for variant in VARIANTS if not names or variant[0].name in names]


def compile_share(names: list[str] | None, share: int, shares: int) -> None:
    """Compile every ``shares``-th plan by calling it once."""
    index = 0
    for workload, dtype, cache_dtype in chosen(names):
        tensors = variant_tensors(workload._replace(requests=1), dtype, cache_dtype, small=True)
        for plan in plans(workload, dtype, cache_dtype):
            index += 1
            if index % shares == share:
                try_decode(tensors, plan)


def variant_tensors(workload: Workload, dtype: str, cache_dtype: str, *, small: bool = False) -> Tensors:
    """Return a variant's tensors; ``small`` makes one rotation only."""
    compute = getattr(torch, dtype)
    tensors = make_tensors(workload, cache_dtype=getattr(torch, cache_dtype), sets=1 if small else None)
    return tensors._replace(
        query=tensors.query.to(compute), gate=tensors.gate.to(compute), output=tensors.output.to(compute)
    )


def try_decode(tensors: Tensors, plan: Plan) -> bool:
    """Run one call; return whether the plan fits the device at all."""
    try:
        decode(tensors, plan, 0)
    except triton.runtime.errors.OutOfResources:
        return False
    return True


def decode(tensors: Tensors, plan: Plan, index: int) -> None:
    """Run one call."""
    scale = 1.0 if plan.problem.quantised else None
    swa_torch.swa_decode(
        tensors.query, (tensors.key_cache, tensors.value_cache), tensors.tables[index % len(tensors.tables)],
        tensors.seq_lens, window=plan.problem.window, query_len=plan.problem.query_len, gate=tensors.gate,
        out=tensors.output, plan=plan, k_scale=scale, v_scale=scale,
    )  # fmt: skip


def measure(tensors: Tensors, candidates: list[Plan], repeats: int) -> list[tuple[float, Plan]]:
    """Return times in microseconds, best first."""
    calls = max(8, min(32, len(tensors.tables)))
    timed = []
    for plan in candidates:
        if try_decode(tensors, plan):
            timer = GraphTimer(lambda index, plan=plan: decode(tensors, plan, index), calls)
            timed.append((interleaved({"plan": timer}, repeats)["plan"], plan))
    return sorted(timed, key=lambda item: item[0])


def main() -> None:
    """Compile, measure, print the best of each case beside the planner's choice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--only", nargs="*", help="names of cases")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    shares = arguments.processes
    workers = [context.Process(target=compile_share, args=(arguments.only, share, shares)) for share in range(shares)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    results = {}
    device = cuda_profile(0)
    for workload, dtype, cache_dtype in chosen(arguments.only):
        candidates = plans(workload, dtype, cache_dtype)
        tensors = variant_tensors(workload, dtype, cache_dtype)
        timed = measure(tensors, candidates, 5)
        finalists = measure(tensors, [plan for _, plan in timed[:6]], 25)
        own = measure(tensors, [make_plan(candidates[0].problem, device)], 25)[0]
        print(f"{workload.name:10s} planner {short(own[1])} {own[0]:.2f}; best {finalists[0][0]:.2f}, regret "
              f"{own[0] / finalists[0][0]:.3f}; " + "; ".join(f"{short(plan)} {time:.2f}" for time, plan in finalists),
              flush=True)  # fmt: skip
        results[workload.name] = [
            (time, plan.pack, plan.splits, plan.tile, plan.warps, plan.stages) for time, plan in timed
        ]
        del tensors
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps(results))


def short(plan: Plan) -> str:
    """Return a plan in a few characters."""
    return f"p{plan.pack} s{plan.splits} {plan.tile}/{plan.warps}/{plan.stages}"


if __name__ == "__main__":
    main()
