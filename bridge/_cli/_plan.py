"""``swa plan``: what the planner chooses for a shape, what that is predicted to take, how windows fall on programs."""

from __future__ import annotations

import json as json_text
from typing import Annotated, Any

import typer
from rich.console import Console

from bridge._cli import _frameworks, _models, _prediction
from bridge._cli._console import print_json, stderr, stdout, usage_errors
from bridge._cli._picture import picture, row_tiles
from swa_plan import DeviceProfile, Plan, Problem, plan, swa_decode_plan

FALLBACK_DEVICE = "h200"


def plan_command(
    model: _models.Model = "step5",
    tp: _models.Tp = 1,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Requests of the step.")] = 16,
    block: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens in a page.")] = 64,
    max_seq: Annotated[int, typer.Option(metavar="N", min=1, help="Keys that the block table can hold.")] = 8192,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="bfloat16, float16 or float32.")] = "bfloat16",
    cache_dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="As --dtype, or float8_e4m3fn, float8_e5m2, int8.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="auto, or h200, h100, a100, b200, rtx4090, rtx5090, cpu.")
    ] = "auto",
    backend: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"{_frameworks.HELP}; auto: the kernel of --device."),
    ] = _frameworks.AUTO,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Results that do not depend on the batch.")
    ] = False,
    seq_lens: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Lengths to draw (default: around the window).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    heads: _models.Heads = None,
    kv_heads: _models.KvHeads = None,
    k_dim: _models.KDim = None,
    v_dim: _models.VDim = None,
    window: _models.Window = None,
    query_len: _models.QueryLen = None,
) -> None:
    """Explain the plan of a decode step; needs no GPU and no framework."""
    with usage_errors():
        shape = _models.model_shape(
            model, tp, heads=heads, kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim, window=window, query_len=query_len
        )
        problem = Problem(
            batch,
            shape.heads,
            shape.kv_heads,
            shape.k_dim,
            shape.v_dim,
            shape.window,
            block,
            -(-max_seq // block),
            query_len=shape.query_len,
            dtype=dtype,
            cache_dtype=cache_dtype,
        )
        kernel = _frameworks.kernel_of(backend)
        profile = _profile(device, kernel)
        if kernel == "portable" and not profile.capability:
            raise ValueError(f"--backend {backend} needs a GPU, got --device {device}")
        planned = {
            launch: plan(problem, profile, kernel=kernel, batch_invariant=batch_invariant, dependent_launch=launch)
            for launch in (True, False)
        }
        chosen = planned[_frameworks.dependent_launch(backend)]
        lengths = _lengths(seq_lens, problem)
    compared = _prediction.compare(chosen, profile, dependent_launch=_frameworks.dependent_launch(backend))
    num_sms = profile.num_sms if profile.capability else DeviceProfile.named(FALLBACK_DEVICE).num_sms
    original = swa_decode_plan(
        batch * shape.query_len, shape.kv_heads, problem.group, shape.query_len, num_sms, shape.window
    )
    backends = {
        package: name
        for package, name in _frameworks.backends_of(chosen.kernel, backend).items()
        if planned[_frameworks.dependent_launch(name)] == chosen
    }
    apart = planned[False] if planned[False] != planned[True] else None
    if json:
        waiting = None if apart is None else json_text.loads(apart.to_json())
        print_json(
            {
                "backends": backends,
                **_as_json(chosen, original, lengths),
                **_prediction.to_json(compared),
                "plan_of_swa_pallas": waiting,
            }
        )
    else:
        _print(chosen, original, backends, stdout())
        _prediction.print_costs(compared, profile, stdout())
        _draw(chosen, lengths, stdout())
        if _frameworks.framework_of(backend) is None and apart is not None:
            stdout().print(
                f"\nXLA launches each kernel after the one before has ended: --backend pallas_triton plans splits "
                f"{apart.splits}, tile {apart.tile}, {apart.warps} warps, {apart.stages} stages",
                markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip


def _profile(device: str, kernel: str | None) -> DeviceProfile:
    """Return the profile of a name; ``auto`` is what a kernel runs on: the CPU, this machine's GPU, or the fallback."""
    if device != "auto":
        return DeviceProfile.named(device)
    if kernel in ("ops", "interpret"):
        return DeviceProfile.named("cpu")
    found = _frameworks.this_gpu()
    if found is not None:
        return found
    stderr().print(f"[dim]no CUDA device here: planning for {FALLBACK_DEVICE} (choose with --device)[/]")
    return DeviceProfile.named(FALLBACK_DEVICE)


def _lengths(text: str | None, problem: Problem) -> list[int]:
    """Parse ``--seq-lens``; without it, take lengths below, at and beyond the window."""
    if text is None:
        keys = problem.row_keys
        return sorted({min(length, problem.capacity) for length in (keys // 6 + 1, keys, keys * 2 + keys // 3)})
    lengths = []
    for part in text.split(","):
        if not (part.strip().isascii() and part.strip().isdigit()) or int(part) > problem.capacity:
            raise ValueError(f"--seq-lens must be integers from 0 to {problem.capacity} with commas, got {part!r}")
        lengths.append(int(part))
    return lengths


def _as_json(chosen: Plan, original: tuple[int, int], lengths: list[int]) -> dict[str, Any]:
    return {
        "plan": json_text.loads(chosen.to_json()),
        "explain": chosen.explain().splitlines(),
        "workspace_bytes": chosen.workspace_bytes,
        "original": {"pack": original[0], "splits": original[1]},
        "requests": [
            {
                "seq_len": seq_len,
                "row_tiles": [
                    {
                        "windows": [list(window) for window in tile.windows],
                        "live": [tile.low, tile.high],
                        "chunks": [list(chunk) for chunk in tile.chunks],
                    }
                    for tile in row_tiles(chosen, seq_len)
                ],
            }
            for seq_len in lengths
        ],
    }


def _print(chosen: Plan, original: tuple[int, int], backends: dict[str, str], console: Console) -> None:
    console.print("[bold]Plan[/]")
    console.print(chosen.explain(), markup=False)
    served = ", ".join(f"backend '{name}' of {package}" for package, name in backends.items())
    console.print(f"run by {served}", markup=False)
    console.print(
        f"[dim]the original planner: pack {original[0]}, splits {original[1]} (here: pack {chosen.pack}, "
        f"splits {chosen.splits})[/]"
    )


def _draw(chosen: Plan, lengths: list[int], console: Console) -> None:
    console.print("\n[bold]How windows fall on programs[/] [dim](first and last key included; one shade a split)[/]")
    for seq_len in lengths:
        console.print(picture(chosen, seq_len, columns=console.width), no_wrap=True, overflow="ellipsis")
