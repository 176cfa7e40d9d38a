"""The attention of a whole request trace: ours and the original kernel on every step of its replay, added up.

    python -m benchmarks.trace_time [TRACE.csv] [--json FILE]

The trace (default: the bundled one) is replayed with continuous batching; each step gives the lengths of the requests
in its batch. Of the steps whose padded batch is the same a few are timed, evenly chosen, each with its own lengths, and
stand for the others: the sums say what attention of one layer would take over the whole trace. Both kernels run in
CUDA graphs over rotated block tables, on the same tensors, each with its own planner, in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers
from benchmarks.bench import device_words, host_facts
from benchmarks.cases import Case
from benchmarks.contenders import original
from benchmarks.contenders.base import TOLERANCE, Timer, disagreement, graph_timer, this_machine
from benchmarks.contenders.ours_torch import decode
from benchmarks.fetch_peers import ORIGINAL_FILES
from benchmarks.tensors import make_tensors
from benchmarks.trace_steps import replayed_lengths
from bridge._replay import bundled_trace
from bridge._replay.batching import bucket_size
from swa_plan.models import MODELS, ModelShape

SHAPES = {
    "step5, tp 8": MODELS["step5"].shard(8),
    "64 heads over 8": ModelShape("nine", 64, 8, 192, 192, 512, gate=True),
}
"""Both are shapes that the original kernel takes."""

SAMPLES = 9


@dataclass(frozen=True)
class Sample:
    """A timed step.

    Attributes:
        seq_lens: the lengths of its requests.
        steps: steps of the trace that it stands for, itself included; a fraction where a bucket divides unevenly.
    """

    seq_lens: tuple[int, ...]
    steps: float


def sample(steps: Sequence[Sequence[int]], most: int) -> list[Sample]:
    """Choose at most ``most`` steps of each padded batch size, evenly; together they stand for all steps."""
    buckets: dict[int, list[Sequence[int]]] = {}
    for step in steps:
        buckets.setdefault(bucket_size(len(step), len(step) + 8), []).append(step)
    chosen = []
    for _, members in sorted(buckets.items()):
        count = min(most, len(members))
        picked = [members[(2 * number + 1) * len(members) // (2 * count)] for number in range(count)]
        chosen += [Sample(tuple(step), len(members) / count) for step in picked]
    return chosen


def step_case(shape: ModelShape, seq_lens: tuple[int, ...], columns: int = 0) -> Case:
    """Return a step of a replay as a case; ``columns`` is the width of the whole trace's block table."""
    return Case(
        f"b{len(seq_lens)}", "trace", seq_lens, shape.kv_heads, shape.heads // shape.kv_heads, shape.k_dim, shape.v_dim,
        shape.window, shape.query_len, columns=columns,
    )  # fmt: skip


def step_times(case: Case) -> dict[str, float]:
    """Return microseconds of ours and of the original in one step.

    Raises:
        RuntimeError: the two disagree.
    """
    torch.cuda.empty_cache()  # of the step before: sizes differ from step to step
    t = make_tensors(case)

    def ours(index: int) -> None:
        decode(case, t, index, out=t.output)

    launches: dict[str, Callable[[int], Any]] = {"ours": ours, "original": original.launch(case, t)}
    outputs = {}
    for name, launch in launches.items():
        t.output.fill_(float("nan"))
        launch(0)
        outputs[name] = t.output.clone()
    if (error := disagreement(outputs["original"], outputs["ours"])) > TOLERANCE:
        raise RuntimeError(f"ours and the original differ by {error:.2g} of a row's largest value at {case.shape}")
    timers: dict[str, Timer] = {name: graph_timer(launch, t) for name, launch in launches.items()}
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(SAMPLES):
        for name, timer in timers.items():
            times[name].append(timer())
    return {name: statistics.median(values) for name, values in times.items()}


def trace_times(
    samples: Sequence[Sample], shape: ModelShape, time_step: Callable[[Case], dict[str, float]] = step_times
) -> dict[str, Any]:
    """Return each kernel's time over a whole trace, in milliseconds of one layer, their ratio, and each sample."""
    # One width for all: the original compiles anew for each.
    columns = max(step_case(shape, each.seq_lens).max_blocks for each in samples)
    rows = []
    for each in samples:
        case = step_case(shape, each.seq_lens, columns)
        rows.append({"requests": case.requests, "steps": each.steps, "bytes": case.read_bytes, **time_step(case)})
    total = {name: sum(row["steps"] * row[name] for row in rows) / 1e3 for name in ("ours", "original")}
    return {
        "ours_ms": total["ours"],
        "original_ms": total["original"],
        "original / ours": total["original"] / total["ours"],
        "steps": round(sum(each.steps for each in samples)),
        "timed": len(samples),
        "samples": rows,
    }


def summary(name: str, shape: ModelShape, found: dict[str, Any], wall_s: float) -> str:
    """Return what was found of one shape, in a line."""
    return (
        f"{name} ({shape.heads} heads over {shape.kv_heads}, {shape.query_len} row(s)): ours {found['ours_ms']:.2f}, "
        f"original {found['original_ms']:.2f}, original / ours {found['original / ours']:.3f}; "
        f"{found['timed']} of {found['steps']} steps timed, {wall_s:.0f} s"
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, default=bundled_trace(), help="default: the bundled trace")
    parser.add_argument("--max-batch", type=int, default=256, help="most requests that run at once")
    parser.add_argument("--speed", type=float, default=20.0, help="factor by which requests arrive faster")
    parser.add_argument("--steps", type=int, default=0, help="stop the replay after so many steps; 0: never")
    parser.add_argument("--each", type=int, default=4, help="most steps timed of one padded batch size")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parsed = parser.parse_args(arguments)
    if parsed.each < 1:
        parser.error(f"--each must be at least 1, got {parsed.each}")
    return parsed


def main() -> None:
    """Replay, measure and print."""
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        raise SystemExit("trace_time needs a CUDA device, and torch sees none")
    if (why := peers.absent(ORIGINAL_FILES)) is not None:
        raise SystemExit(f"the original kernel was {why}")
    machine = this_machine()
    print(f"{device_words(machine)}; {arguments.trace.name}, at most {arguments.max_batch} requests, arrivals x "
          f"{arguments.speed:g}; milliseconds of attention, one layer")  # fmt: skip
    results = {}
    for name, shape in SHAPES.items():
        start = time.perf_counter()
        steps = replayed_lengths(
            arguments.trace, query_len=shape.query_len, window=shape.window, max_batch=arguments.max_batch,
            speed=arguments.speed, max_steps=arguments.steps or None,
        )  # fmt: skip
        results[name] = found = trace_times(sample(steps, arguments.each), shape)
        print(summary(name, shape, found, time.perf_counter() - start), flush=True)
    if arguments.json:
        values = {"device": device_words(machine), "host": host_facts(machine), "trace": arguments.trace.name}
        options = {name: getattr(arguments, name) for name in ("max_batch", "speed", "steps", "each")}
        arguments.json.write_text(json.dumps({**values, **options, "shapes": results}, indent=1))


if __name__ == "__main__":
    main()
