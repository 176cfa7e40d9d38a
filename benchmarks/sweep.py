"""Exhaustive sweep of plans: what the planner's costs are made from, and what its regret is.

    python -m benchmarks.sweep [--only NAME ...] [--random N --seed S] [--json FILE] [--limit SECONDS]

Without options: the nine cases. ``--only`` takes their names and those of ``sweep_cases.OTHERS``. ``--random`` draws
shapes that no cost was fitted to. Kernels are compiled by several processes first; Triton's cache on disk hands
them to the measuring one. Kernels that spill registers are left out. The best plans of each shape and the planner's own
are measured once more, in turn; *regret* is the time of ours over the best of that run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from benchmarks.sweep_cases import DEFAULT, OTHERS, Variant, plans, random_variants
from benchmarks.timing import GraphTimer, interleaved
from benchmarks.workloads import Tensors, make_tensors
from bridge._tune.compiling import Spills, compile_plans, default_processes, runs
from bridge._tune.tensors import decode
from swa_plan import DeviceProfile, Plan
from swa_plan import plan as make_plan
from swa_torch._device import cuda_profile

REPLAY_BYTES = 200_000_000
"""A replay reads at least this much, which is more than any L2 cache keeps."""

FINALISTS, REPEATS, FINAL_REPEATS = 8, 3, 21
FEWEST_PLANS = 8
"""A shape of which fewer were measured before the time limit is left out."""
COMPILED_AHEAD = 6
"""Shapes whose kernels are compiled before they are measured; few, so that a time limit leaves results."""


class Timed(NamedTuple):
    """A plan and its time."""

    time_us: float
    plan: Plan


class Swept(NamedTuple):
    """One shape's result.

    Attributes:
        variant: the shape.
        times: plans that were measured, fastest first.
        best: the best of them when measured in turn.
        ours: the planner's, or None where it does not run.
        left: plans that the time limit left no time for; a regret against the others says less.
    """

    variant: Variant
    times: list[Timed]
    best: Timed
    ours: Timed | None
    left: int = 0

    @property
    def regret(self) -> float | None:
        """Our time over the best."""
        return None if self.ours is None else self.ours.time_us / self.best.time_us

    def to_json(self) -> dict[str, Any]:
        """Return the result as an object."""
        return {
            "workload": self.variant.workload._asdict(),
            "dtype": self.variant.dtype,
            "cache_dtype": self.variant.cache_dtype,
            "best": _row(self.best),
            "ours": None if self.ours is None else _row(self.ours),
            "regret": self.regret,
            "left": self.left,
            "times": [_row(each) for each in self.times],
        }


def variant_tensors(variant: Variant) -> Tensors:
    """Return a variant's tensors."""
    compute = getattr(torch, variant.dtype)
    tensors = make_tensors(variant.workload, cache_dtype=getattr(torch, variant.cache_dtype))
    assert tensors.gate is not None
    return tensors._replace(
        query=tensors.query.to(compute), gate=tensors.gate.to(compute), output=tensors.output.to(compute)
    )


def timer_of(tensors: Tensors, plan: Plan, read_bytes: int) -> GraphTimer | None:
    """Return a plan's timer; None where its kernel does not fit the GPU."""
    if not runs(lambda: decode(tensors, plan, 0)):
        return None
    calls = max(8, min(len(tensors.tables), -(-REPLAY_BYTES // read_bytes)))
    return GraphTimer(lambda index: decode(tensors, plan, index), calls)


def sweep(variant: Variant, profile: DeviceProfile, spills: Spills, end: float) -> Swept | None:
    """Measure every plan of a shape, then the best ones beside ours; None where nothing runs.

    Where time is up the best of those that were measured stand for all, or there is None if they are few.
    """
    tensors, read_bytes = variant_tensors(variant), variant.workload.read_bytes
    candidates, times, left = plans(variant, profile), [], 0
    for number, plan in enumerate(candidates):
        if time.monotonic() > end:
            left = len(candidates) - number
            print(f"the time limit is reached within {variant.name}, after {number} of {len(candidates)} plans"
                  f"{': it is left out' * (len(times) < FEWEST_PLANS)}", flush=True)  # fmt: skip
            if len(times) < FEWEST_PLANS:
                return None
            break
        timer = timer_of(tensors, plan, read_bytes)
        spilled = spills.of(plan)  # asked for all, so that no kernel is taken for another plan's
        if timer is not None and not spilled:
            times.append(Timed(interleaved({"plan": timer}, REPEATS)["plan"], plan))
    times.sort(key=lambda each: each.time_us)
    ours = make_plan(variant.problem, profile)
    finalists = dict.fromkeys([*(each.plan for each in times[:FINALISTS]), ours])
    timers = {plan: timer for plan in finalists if (timer := timer_of(tensors, plan, read_bytes)) is not None}
    if not timers:
        return None
    names = {str(number): plan for number, plan in enumerate(timers)}
    medians = interleaved({name: timers[plan] for name, plan in names.items()}, FINAL_REPEATS)
    final = {names[name]: time_us for name, time_us in medians.items()}
    best = min((Timed(time_us, plan) for plan, time_us in final.items()), key=lambda each: each.time_us)
    known = {each.plan: each.time_us for each in times} | final
    return Swept(
        variant,
        sorted((Timed(time_us, plan) for plan, time_us in known.items()), key=lambda each: each.time_us),
        best,
        Timed(final[ours], ours) if ours in final else None,
        left,
    )


def sweep_all(variants: Sequence[Variant], profile: DeviceProfile, processes: int, end: float) -> Iterator[Swept]:
    """Yield the results that there is time for."""
    spills = Spills()
    for first in range(0, len(variants), COMPILED_AHEAD):
        group = variants[first : first + COMPILED_AHEAD]
        started = time.monotonic()
        ours = [make_plan(variant.problem, profile) for variant in group]
        kernels = compile_plans([*ours, *(plan for each in group for plan in plans(each, profile))], processes)
        print(f"{kernels} kernels compiled in {time.monotonic() - started:.0f} s", flush=True)
        for variant in group:
            if time.monotonic() > end:
                print(f"the time limit is reached before {variant.name}", flush=True)
                return
            swept = sweep(variant, profile, spills, end)
            torch.cuda.empty_cache()
            if swept is not None:
                yield swept


def regrets_of(results: Sequence[Swept]) -> list[float]:
    """Return the regrets of the shapes that were measured to the end."""
    return [each.regret for each in results if each.regret is not None and not each.left]


def summary(regrets: Sequence[float]) -> dict[str, float | int | None]:
    """Return the geometric mean and the largest of regrets."""
    if not regrets:
        return {"shapes": 0, "geometric_mean": None, "largest": None}
    mean = math.exp(sum(map(math.log, regrets)) / len(regrets))
    return {"shapes": len(regrets), "geometric_mean": mean, "largest": max(regrets)}


def chosen(names: Sequence[str] | None, random_count: int, seed: int) -> list[Variant]:
    """Return the variants to sweep.

    Raises:
        ValueError: no variant has that name.
    """
    known = {variant.name: variant for variant in (*DEFAULT, *OTHERS)}
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"--only must be some of {', '.join(known)}, got {', '.join(unknown)}")
    named = [known[name] for name in names] if names else [] if random_count else list(DEFAULT)
    return [*named, *random_variants(random_count, seed)]


def report(swept: Swept) -> str:
    """Return one line for a person."""
    start = f"{swept.variant.name:38s} {len(swept.times):4d} plans, best {short(swept.best)}"
    rate = swept.variant.workload.read_bytes / swept.best.time_us / 1e6
    if swept.ours is None:
        return f"{start} ({rate:.2f} TB/s); OURS DOES NOT RUN"
    least = f" at least: {swept.left} plans were not measured" if swept.left else ""
    return f"{start} ({rate:.2f} TB/s); ours {short(swept.ours)}, regret {swept.regret:.3f}{least}"


def short(timed: Timed) -> str:
    """Return a plan and its time in a few characters."""
    plan = timed.plan
    return f"p{plan.pack} s{plan.splits} {plan.tile}/{plan.warps}/{plan.stages} {timed.time_us:.2f}"


def _row(timed: Timed) -> list[float]:
    plan = timed.plan
    return [timed.time_us, plan.pack, plan.splits, plan.tile, plan.warps, plan.stages]


def _write(path: Path, results: Sequence[Swept], header: dict[str, Any]) -> None:
    """Write everything, whole or not at all."""
    found = {
        **header,
        "summary": summary(regrets_of(results)),
        "cases": {each.variant.name: each.to_json() for each in results},
    }
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(found))
    os.replace(temporary, path)


def main() -> None:
    """Compile, measure, print the best of each shape beside the planner's choice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="names of cases")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="random shapes (instead of the nine cases)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the random shapes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here, anew after each shape")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="stop measuring after this")
    parser.add_argument("--processes", type=int, default=default_processes(), metavar="N", help="that compile")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.limit
    try:
        variants = chosen(arguments.only, arguments.random, arguments.seed)
    except ValueError as error:
        parser.error(str(error))
    device = torch.cuda.current_device()
    profile = cuda_profile(device)
    header = {
        "device": torch.cuda.get_device_name(device), "torch": torch.__version__, "triton": triton.__version__,
        "profile": profile.name, "seed": arguments.seed,
    }  # fmt: skip
    results: list[Swept] = []
    for swept in sweep_all(variants, profile, arguments.processes, end):
        results.append(swept)
        print(report(swept), flush=True)
        if arguments.json:
            _write(arguments.json, results, header)
    found = summary(regrets_of(results))
    if found["shapes"]:
        print(f"{found['shapes']} shapes: regret {found['geometric_mean']:.3f} in the geometric mean, "
              f"{found['largest']:.3f} at most")  # fmt: skip


if __name__ == "__main__":
    main()
