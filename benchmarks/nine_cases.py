"""The nine-case table: the original kernel, ours with its plan, ours with our plan, and the read floor, in one run.

python -m benchmarks.nine_cases [--json FILE] [--fp8]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
import triton

import swa_torch
from benchmarks.peers import original_kernel
from benchmarks.timing import GraphTimer, floor_timers, interleaved
from benchmarks.workloads import NINE, Tensors, Workload, make_tensors
from swa_plan import swa_decode_plan


def original_options(workload: Workload) -> dict:
    """Return the arguments that the original engine would pass, with the original planner's choice."""
    tokens = workload.requests * workload.query_len
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    pack, splits = swa_decode_plan(tokens, workload.kv_heads, workload.group, workload.query_len, sms, workload.window)
    return {
        "scale": workload.dim**-0.5, "window": workload.window, "query_len": workload.query_len, "splits": splits,
        "pack": pack,
    }  # fmt: skip


def timers(workload: Workload, t: Tensors) -> dict[str, GraphTimer]:
    """Return a timer for each contender."""
    calls = max(8, len(t.tables))
    options = original_options(workload)
    shared = (t.query, t.key_cache, t.value_cache)
    contenders = {}

    def gated(function):
        def launch(index):
            function(*shared, t.tables[index % len(t.tables)], t.seq_lens, t.gate, t.output, **options)

        return GraphTimer(launch, calls)

    original = original_kernel()
    if original is not None:
        contenders["original"] = gated(original)
    contenders["ours, original plan"] = gated(swa_torch.swa_decode_gated)

    def ours(index):
        swa_torch.swa_decode(
            t.query, (t.key_cache, t.value_cache), t.tables[index % len(t.tables)], t.seq_lens,
            window=workload.window, query_len=workload.query_len, gate=t.gate, out=t.output,
        )  # fmt: skip

    contenders["ours"] = GraphTimer(ours, calls)
    return contenders


def fp8_timer(workload: Workload) -> GraphTimer:
    """Return a timer of our decode on an fp8 e4m3 cache."""
    t = make_tensors(workload, cache_dtype=torch.float8_e4m3fn)

    def launch(index):
        swa_torch.swa_decode(
            t.query, (t.key_cache, t.value_cache), t.tables[index % len(t.tables)], t.seq_lens,
            window=workload.window, query_len=workload.query_len, gate=t.gate, out=t.output, k_scale=1.0, v_scale=1.0,
        )  # fmt: skip

    return GraphTimer(launch, max(8, len(t.tables)))


def measure(workload: Workload, *, fp8: bool, rounds: int = 3) -> dict:
    """Return medians of ``rounds`` interleaved runs, in microseconds."""
    tensors = make_tensors(workload)
    contenders = timers(workload, tensors)
    if fp8:
        contenders["ours, fp8"] = fp8_timer(workload)
    floors = floor_timers(workload.read_bytes)
    runs = [interleaved({**contenders, **floors}) for _ in range(rounds)]
    times = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    result = {name: times[name] for name in contenders}
    result["floor"] = min(times[name] for name in floors)
    return {"case": workload.name, "megabytes": workload.read_bytes / 1e6, **result}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--fp8", action="store_true", help="also time an fp8 e4m3 cache")
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name(0)
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}; microseconds a call")
    rows = []
    for workload in NINE:
        row = measure(workload, fp8=arguments.fp8)
        rows.append(row)
        figures = "  ".join(f"{name} {value:8.2f}" for name, value in row.items() if name != "case")
        print(f"{row['case']:10s} {figures}  floor/ours {row['floor'] / row['ours']:.3f}", flush=True)
        torch.cuda.empty_cache()
    if "original" in rows[0]:
        for name in ("ours, original plan", "ours"):
            ratios = [row["original"] / row[name] for row in rows]
            print(f"original / {name}: geometric mean {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}")
    else:
        print("original: absent (python -m benchmarks.fetch_peers)")
    if arguments.json:
        versions = {"device": device, "torch": torch.__version__, "triton": triton.__version__}
        arguments.json.write_text(json.dumps({**versions, "cases": rows}, indent=1))


if __name__ == "__main__":
    main()
