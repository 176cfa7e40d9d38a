"""The reports of ``swa tune`` for a person."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bridge._tune.device import Device
from bridge._tune.sample import Timed
from bridge._tune.tuning import Tuning
from swa_plan import DeviceProfile, Problem
from swa_plan._profiles import StoredProfile


def print_tuning(tuning: Tuning, console: Console) -> None:
    """Print both costs, what plans they choose, and how good they are."""
    console.print(f"[bold]{escape(tuning.device.name)}[/] [dim]{tuning.fit.plans} plans measured[/]")
    console.print(_costs(tuning))
    console.print()
    console.print(_shapes(tuning))
    console.print()
    summary = _table("", "shipped", "measured")
    summary.add_row("median error of a prediction", f"{tuning.fit.error_before:.1%}", f"{tuning.fit.error_after:.1%}")
    summary.add_row("chosen plans over the best measured", f"{tuning.regret_before:.3f}", f"{tuning.regret_after:.3f}")
    console.print(summary)


def print_profile(device: Device, profile: DeviceProfile, stored: StoredProfile | None, console: Console) -> None:
    """Print the profile in use, where it comes from, and its costs."""
    console.print(
        f"[bold]{escape(profile.name)}[/] [dim]for {escape(device.name)}, sm_{device.capability}, "
        f"{device.num_sms} SMs[/]"
    )
    console.print(device.source, markup=False, soft_wrap=True)
    if stored is not None:
        found = stored.provenance
        versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
        console.print(f"driver {found.driver or 'unknown'}, {versions}", style="dim", markup=False, soft_wrap=True)
    console.print(
        f"{profile.shared_memory} bytes of shared memory a block, {profile.l2_bytes / 2**20:.0f} MiB of L2 cache, "
        f"{profile.memory_gbps} GB/s"
    )
    shipped = asdict(device.shipped.costs)
    table = _table("cost", "in use", "shipped")
    for name, cost in asdict(profile.costs).items():
        table.add_row(name, f"{cost:.3f}", f"{shipped[name]:.3f}")
    console.print(table)


def _costs(tuning: Tuning) -> Table:
    table = _table("cost", "shipped", "measured")
    measured = asdict(tuning.tuned.costs)
    for name, cost in asdict(tuning.shipped.costs).items():
        table.add_row(name, f"{cost:.3f}", f"{measured[name]:.3f}")
    return table


def _shapes(tuning: Tuning) -> Table:
    table = _table("shape", "best", "shipped", "measured", "plan")
    for each in tuning.regrets:
        times = [f"{timed.time_us:.1f} us" for timed in (each.best, each.before, each.after)]
        table.add_row(_shape(each.problem), *times, _plan(each.after))
    return table


def _shape(problem: Problem) -> str:
    rows = f", {problem.query_len} rows" if problem.query_len > 1 else ""
    return (
        f"{problem.max_requests} x {problem.kv_heads} x {problem.group}{rows}, head {problem.k_dim}, "
        f"window {problem.window}{', ' + problem.stored_dtype if problem.quantised else ''}"
    )


def _plan(timed: Timed) -> str:
    plan = timed.plan
    return f"pack {plan.pack}, splits {plan.splits}, tile {plan.tile}/{plan.warps}/{plan.stages}"


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number == 0 or name == "plan" else "right")
    return table
