"""What ``swa plan`` says of costs: the parts of a plan's predicted time, and the plans it was chosen before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from bridge._cli._console import si_bytes
from swa_plan import DeviceProfile, Plan, Prediction, alternatives, predict
from swa_plan._predict import PARTS

SHOWN = 8
"""Plans in the table, the chosen one included."""

NOT_MODELLED = (
    "predicted time: not modelled (the cost model is of the portable kernel's bf16 and fp16 steps on a GPU, not "
    "batch-invariant)"
)

Choices = Sequence[tuple[Plan, Prediction]]


def compare(chosen: Plan, device: DeviceProfile, *, dependent_launch: bool) -> Choices:
    """Return the chosen plan and, where the model knows it, the alternatives, best first."""
    prediction = predict(chosen, device, dependent_launch=dependent_launch)
    if prediction.time_us is None:
        return [(chosen, prediction)]
    return alternatives(chosen.problem, device, dependent_launch=dependent_launch, limit=SHOWN)


def to_json(compared: Choices) -> dict[str, Any]:
    """Return the prediction of the chosen plan and of the alternatives; times that are not modelled are null."""
    best = compared[0][1].time_us
    return {
        "prediction": asdict(compared[0][1]),
        "alternatives": [
            {
                "plan": json.loads(plan.to_json()),
                **asdict(prediction),
                "slower": None if best is None or prediction.time_us is None else prediction.time_us / best - 1,
            }
            for plan, prediction in compared[1:]
        ],
    }


def print_costs(compared: Choices, device: DeviceProfile, console: Console) -> None:
    """Print what the chosen plan's time is made of, and the table of alternatives."""
    best = compared[0][1]
    console.print(f"\n[bold]Why this plan[/] [dim](predicted for {device.name}, a full batch)[/]")
    if best.time_us is None:
        console.print(NOT_MODELLED, markup=False)
        return
    console.print(_parts(best))
    console.print(
        f"[dim]{best.programs} programs in {best.waves} wave{'s' * (best.waves != 1)}; they read "
        f"{si_bytes(best.bytes)} of keys and values, {best.bytes / best.time_us / 1e3:.0f} GB/s[/]"
    )
    if len(compared) > 1:
        console.print("\n[bold]Alternatives[/] [dim](the best tile of each packing and split)[/]")
        console.print(_alternatives(compared))
    else:
        console.print("[dim]there is no other packing or split to choose[/]")


def _parts(best: Prediction) -> Table:
    assert best.time_us is not None
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "right", "left"):
        table.add_column("", justify=justify)
    for name, time in best.parts.items():
        table.add_row(name, f"{time:.2f} us", f"[dim]{PARTS[name]}[/]")
    table.add_row("[bold]together[/]", f"[bold]{best.time_us:.2f} us[/]", "")
    return table


def _alternatives(compared: Choices) -> Table:
    best = compared[0][1].time_us
    assert best is not None
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("pack", "splits", "tile", "warps", "stages", "programs", "waves", "time", "slower"):
        table.add_column(name, justify="right")
    for plan, prediction in compared:
        time = prediction.time_us
        assert time is not None
        numbers = (plan.pack, plan.splits, plan.tile, plan.warps, plan.stages, prediction.programs, prediction.waves)
        table.add_row(
            *map(str, numbers),
            f"{time:.2f} us",
            "[dim]chosen[/]" if plan == compared[0][0] else f"{time / best - 1:+.1%}",
        )
    return table
