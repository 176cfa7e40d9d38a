"""The report of a replay, for a terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from bridge._cli._console import duration, si_bytes
from bridge._replay import ReplayResult, Sharing
from swa_plan import Plan

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
    if result.sharing is not None:
        console.print(_bridge(result, result.sharing))


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
        table.add_row(str(bucket), str(result.buckets.get(bucket, 0)), plan.kernel, *_plan_numbers(plan))
        of_jax = None if result.sharing is None else result.sharing.jax_plans[bucket]
        if of_jax not in (None, plan):
            table.add_row("", "JAX's", of_jax.kernel, *_plan_numbers(of_jax))
    return table


def _plan_numbers(plan: Plan) -> list[str]:
    return [str(number) for number in (plan.pack, plan.splits, plan.tile, plan.warps, plan.stages)]


def _named(title: str) -> Table:
    """Return a table of names and what they are."""
    table = _table(title)
    table.add_column("", style="dim")
    table.add_column("")
    table.show_header = False
    return table


def _numbers(result: ReplayResult) -> Table:
    table = _named("\nReplay")
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


def _bridge(result: ReplayResult, sharing: Sharing) -> Table:
    """Tell where the cache was for either framework, whose step each was, and how far the two are apart."""
    table = _named("\nOne cache, two frameworks")
    for when, addresses in (("cache at the start", sharing.at_start), ("cache at the end", sharing.at_end)):
        for torch, jax in addresses:
            verdict = "[green]the same[/]" if torch == jax else "[bold red]NOT THE SAME[/]"
            table.add_row(when, f"torch {torch:#x}, JAX {jax:#x}: {verdict}")
    if sharing.at_start != sharing.at_end:
        table.add_row("", "[bold red]it moved[/]")
    for name, backend in sharing.backends.items():
        steps, times = sharing.decoded_by.count(name), result.times_us("attention_us", name)
        taken = "" if times is None else f", median {duration(times['median'])}, p90 {duration(times['p90'])}"
        table.add_row(f"decoded by {name}", f"{steps} steps ({backend}){taken}")
    if result.differences:
        values = sum(found.values for found in result.differences)
        table.add_row(
            "decoded by both",
            f"{len(result.differences)} steps, from the same bytes: {result.equal_share:.2%} of {values} values are "
            f"equal bit by bit, the others at most {result.largest_ulps:g} ulp of their row's largest apart",
        )
    table.add_row("versions", sharing.versions)
    return table


def _add_times(table: Table, result: ReplayResult, name: str, label: str) -> None:
    times = result.times_us(name)
    if times is not None:
        table.add_row(label, f"median {duration(times['median'])}, p90 {duration(times['p90'])}")


def _checks(result: ReplayResult) -> str:
    worst = result.worst_check
    if worst is None:
        return "[yellow]none were asked for[/]"
    misses = sum(not check.ok for check in result.checks)
    verdict = f"[bold red]{misses} MISSED[/]" if misses else "[green]all within the rule[/]"
    # Where both frameworks decoded a request's rows, each has a record of its own.
    rows = {(check.step, check.request, check.layer): check.rows for check in result.checks}
    compared = f"{sum(rows.values())} rows of {len(rows)} requests against float64"
    if result.sharing is not None:
        compared += ", as decoded by torch and by jax"
    return f"{compared}: {verdict}; worst error / limit {worst.ratio:.2f}"
