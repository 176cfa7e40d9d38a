"""The report of a replay, for a terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from bridge._cli._console import duration, si_bytes
from bridge._replay import ReplayResult

_BAR_WIDTH = 44


def print_report(result: ReplayResult, trace: Path, console: Console) -> None:
    """Print what was replayed, the batch sizes, the plans, and the numbers."""
    settings = result.settings
    console.print()
    console.print(
        f"[bold]{settings['model']}[/]: {settings['heads']} query heads over {settings['kv_heads']} kv heads, "
        f"head size {settings['k_dim']}/{settings['v_dim']}, window {settings['window']}, "
        f"{settings['query_len']} row(s) a request{_features(settings)}"
    )
    console.print(
        f"[dim]{trace.name} · {result.backend} ({result.framework}) on {result.device} · "
        f"{settings['layers']} layer(s) of {settings['layout']!r}, page {settings['block']}, "
        f"{settings['cache_dtype']} cache, seed {settings['seed']}[/]"
    )
    console.print()
    console.print(_batch_histogram(result))
    console.print(_plan_table(result))
    console.print(_numbers(result))


def _features(settings: dict) -> str:
    names = [name for name in ("gate", "sinks") if settings[name]]
    if settings["softcap"] is not None:
        names.append(f"softcap {settings['softcap']:g}")
    return "".join(f", {name}" for name in names)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")


def _batch_histogram(result: ReplayResult) -> Table:
    """One line a batch size, or a range of them where there are many."""
    table = _table("Batch sizes")
    table.add_column("requests", justify="right")
    table.add_column("steps", justify="right")
    table.add_column("")
    sizes = result.batch_sizes
    width = max(1, -(-max(sizes, default=1) // 16))
    bins: dict[int, int] = {}
    for size, steps in sizes.items():
        bins[(size - 1) // width] = bins.get((size - 1) // width, 0) + steps
    most = max(bins.values(), default=1)
    for number in range(max(bins, default=-1) + 1):
        first, steps = number * width + 1, bins.get(number, 0)
        label = str(first) if width == 1 else f"{first}-{first + width - 1}"
        table.add_row(label, str(steps), f"[cyan]{_bar(steps / most)}[/]")
    return table


def _bar(fraction: float) -> str:
    """Return a bar in eighths of a character."""
    eighths = round(fraction * _BAR_WIDTH * 8)
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


def _plan_table(result: ReplayResult) -> Table:
    table = _table("\nPlans (a batch is padded to the next)")
    for name in ("batch", "steps", "kernel", "pack", "splits", "tile", "warps", "stages"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for bucket, plan in result.plans.items():
        numbers = (plan.pack, plan.splits, plan.tile, plan.warps, plan.stages)
        table.add_row(str(bucket), str(result.buckets.get(bucket, 0)), plan.kernel, *map(str, numbers))
    return table


def _numbers(result: ReplayResult) -> Table:
    table = _table("\nReplay")
    table.add_column("", style="dim")
    table.add_column("")
    table.show_header = False
    table.add_row("requests finished", f"{result.finished} of {result.trace_requests}")
    table.add_row("steps, tokens", f"{len(result.steps)} steps, {result.tokens} tokens")
    saved = result.bytes_full / result.bytes_read if result.bytes_read else 1.0
    table.add_row(
        "KV bytes read",
        f"{si_bytes(result.bytes_read)}; full context would read {si_bytes(result.bytes_full)} ({saved:.1f}x)",
    )
    full_pages = result.peak_pages_full
    table.add_row(
        "peak pages",
        f"{result.peak_pages} ({si_bytes(result.peak_pages * result.page_bytes)}); full context would hold "
        f"{full_pages} ({si_bytes(full_pages * result.page_bytes)}); {result.reused_pages} handed out again",
    )
    for name, label in (("step_us", "time a step"), ("attention_us", "  attention"), ("append_us", "  append")):
        _add_times(table, result, name, label)
    table.add_row("  taken by", result.clock)
    _add_times(table, result, "host_us", "host time a step")
    if result.compilation is not None:
        programs, time_s = result.compilation.programs, result.compilation.time_s
        table.add_row("compiled before", f"{programs} programs in {time_s:.1f} s, in none of the times of steps")
    if result.attention_gbps is not None:
        line = f"{result.attention_gbps:.1f} GB/s of keys and values"
        if result.roofline is not None and result.profile is not None:
            line += f": {result.roofline:.0%} of {result.profile.memory_gbps} GB/s ({result.profile.name})"
        table.add_row("attention reads", line)
    table.add_row("wall time", f"{result.wall_s:.1f} s, making data and checking included")
    table.add_row("checks", _checks(result))
    return table


def _add_times(table: Table, result: ReplayResult, name: str, label: str) -> None:
    times = result.times_us(name)
    if times is not None:
        table.add_row(label, f"median {duration(times['median'])}, p90 {duration(times['p90'])}")


def _checks(result: ReplayResult) -> str:
    worst = result.worst_check
    if worst is None:
        return "[yellow]none were asked for[/]"
    rows, misses = sum(check.rows for check in result.checks), sum(not check.ok for check in result.checks)
    verdict = f"[bold red]{misses} MISSED[/]" if misses else "[green]all within the rule[/]"
    compared = f"{rows} rows of {len(result.checks)} requests against float64"
    return f"{compared}: {verdict}; worst error / limit {worst.ratio:.2f}"
