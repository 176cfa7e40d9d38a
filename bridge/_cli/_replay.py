"""``swa replay`` and ``swa demo``: options in, a replay, a report out."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bridge._cli import _frameworks, _models
from bridge._cli._console import print_json, stderr, stdout, usage_errors
from bridge._cli._report import print_report
from bridge._replay import Engine, Geometry, ReplayConfig, Runner, bundled_trace, read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge._replay import ReplayResult, Request

DEFAULT_LAYOUT = "pages kv_heads block (kv dim)"
DEFAULT_STEPS = 800

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, everything else on stderr.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", dir_okay=False, help="Draw the replay into a file.")
]


def replay(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens (default: the bundled one)", show_default=False
        ),
    ] = None,
    model: _models.Model = "step5",
    tp: _models.Tp = 1,
    steps: Annotated[int, typer.Option(metavar="N", min=0, help="Stop after N steps; 0: run it all.")] = DEFAULT_STEPS,
    backend: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"{_frameworks.REPLAY_HELP}; auto: PyTorch where it is installed, else JAX; "
            "the GPU where there is one.",
        ),
    ] = _frameworks.AUTO,
    max_batch: Annotated[int, typer.Option(metavar="N", min=1, help="Most requests that run at once.")] = 16,
    step_ms: Annotated[float, typer.Option(metavar="MS", help="Simulated time of a step.")] = 20.0,
    speed: Annotated[float, typer.Option(metavar="X", help="Requests arrive X times faster.")] = 1.0,
    layers: Annotated[int, typer.Option(metavar="N", min=1, help="Layers decoded a step.")] = 1,
    layout: Annotated[str, typer.Option(metavar="AXES", help="Cache layout; layers are put in front if needed.")] = (
        DEFAULT_LAYOUT
    ),
    block: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens in a page.")] = 64,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="bfloat16, float16 or float32 (default: bfloat16; interpret: float16)."),
    ] = None,
    cache_dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="As --dtype, or float8_e4m3fn, float8_e5m2, int8.")
    ] = None,
    k_scale: Annotated[float | None, typer.Option(help="Scale of stored keys, quantised caches only.")] = None,
    v_scale: Annotated[float | None, typer.Option(help="Scale of stored values, quantised caches only.")] = None,
    check_every: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Check every N steps; 0: never (default: 10; crossed: 9, for turns of both)."
        ),
    ] = None,
    check_requests: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Requests compared in a checked step (default: 2; crossed: 1, decoded by both)."
        ),
    ] = None,
    poison: Annotated[bool, typer.Option("--poison/--no-poison", help="Fill unused and freed pages with NaN.")] = False,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of data, accepted drafts and samples.")] = 0,
    json: Json = False,
    plot: Plot = None,
    heads: _models.Heads = None,
    kv_heads: _models.KvHeads = None,
    k_dim: _models.KDim = None,
    v_dim: _models.VDim = None,
    window: _models.Window = None,
    query_len: _models.QueryLen = None,
    gate: _models.Gate = None,
    sinks: _models.Sinks = None,
    softcap: _models.Softcap = None,
) -> None:
    """Decode a request trace, step after step, and check sampled rows against float64."""
    path = bundled_trace() if trace is None else trace
    with usage_errors():
        shape = _models.model_shape(
            model,
            tp,
            heads=heads,
            kv_heads=kv_heads,
            k_dim=k_dim,
            v_dim=v_dim,
            window=window,
            query_len=query_len,
            gate=gate,
            sinks=sinks,
            softcap=softcap,
        )
        _check_plot(plot)
        requests = read_trace(path)
        framework, backend = _prepare_backend(backend)
        if dtype is None:
            dtype = "float16" if backend == "interpret" else "bfloat16"
        if backend == "interpret" and dtype == "bfloat16":
            raise ValueError("--dtype bfloat16 is wrong in Triton's interpreter (its tl.dot): use float16 or float32")
        if backend == "interpret" and (cache_dtype or "").startswith("float8"):
            # Where rounding carries into the exponent, its cast drops the carry: 31.5 is stored as 16.
            raise ValueError("--cache-dtype float8 is wrong in Triton's interpreter (its cast): use int8")
        crossed = framework == _frameworks.CROSSED
        config = ReplayConfig(
            model=shape,
            layers=layers,
            layout=f"layers {layout}" if layers > 1 and "layers" not in layout.split() else layout,
            block=block,
            dtype=dtype,
            cache_dtype=None if cache_dtype == dtype else cache_dtype,
            k_scale=k_scale,
            v_scale=v_scale,
            max_batch=max_batch,
            max_steps=steps or None,
            step_ms=step_ms,
            speed=speed,
            check_every=(9 if crossed else 10) if check_every is None else check_every,
            check_requests=(1 if crossed else 2) if check_requests is None else check_requests,
            poison=poison,
            seed=seed,
        )
        runner = make_runner(config, Geometry.of(requests, config), framework, backend)
    _run(requests, config, runner, path, json=json, plot=plot)


def demo(json: Json = False, plot: Plot = None) -> None:
    """Replay the bundled trace: on one cache of both frameworks in turn where both are installed."""
    both = all(_frameworks.installed(name) for name in _frameworks.KERNELS)
    replay(backend=_frameworks.CROSSED if both else _frameworks.AUTO, json=json, plot=plot)


def make_runner(config: ReplayConfig, geometry: Geometry, framework: str, backend: str) -> Runner:
    """Return the runner of a framework's backend."""
    if framework == _frameworks.CROSSED:
        with _frameworks.small_jax():  # the cache is torch's
            from bridge._replay.crossed_runner import CrossedRunner

            return CrossedRunner(config, geometry)
    if framework == "jax":
        from bridge._replay.jax_runner import JaxRunner

        return JaxRunner(config, geometry, backend)
    from bridge._replay.torch_runner import TorchRunner

    return TorchRunner(config, geometry, backend)


def _run(
    requests: Sequence[Request], config: ReplayConfig, runner: Runner, path: Path, *, json: bool, plot: Path | None
) -> None:
    engine = Engine(requests, config, runner)
    _step_through(engine, config)
    result = engine.result()
    if plot is not None:
        from bridge._cli._plot import draw_replay

        draw_replay(result, plot)
        stderr().print(f"plot written to {plot}")
    if json:
        print_json({"trace": str(path), **result.to_json()})
    else:
        print_report(result, path, stdout())
    if not result.ok:
        _name_misses(result)
        raise typer.Exit(1)


def _name_misses(result: ReplayResult) -> None:
    console = stderr()
    if result.sharing is not None and not result.sharing.same_memory:
        console.print("MISS: torch and JAX had the cache at different addresses")
    for check in [check for check in result.checks if not check.ok][:5]:
        where = f"step {check.step}, request {check.request}, layer {check.layer}, decoded by {check.decoded_by}"
        console.print(f"MISS at {where}: {check.message}", markup=False)


def _step_through(engine: Engine, config: ReplayConfig) -> None:
    """Run all steps under a progress bar on stderr."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests · {task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr(), transient=True) as progress:
        task = progress.add_task(f"replay {config.model.name}", total=engine.trace_requests, state="")
        finished = 0
        for record in engine.steps():
            finished += record.finished
            state = f"step {record.step + 1} · {record.requests} running · {record.queued} queued"
            progress.update(task, completed=finished, state=state)


def _prepare_backend(backend: str) -> tuple[str, str]:
    """Return framework and backend that serve, with what they need in place.

    Raises:
        ValueError: no such backend, or its framework is missing.
    """
    framework = _frameworks.require(backend)
    if backend == "interpret":
        _frameworks.interpret()
    if backend == _frameworks.AUTO:
        if framework == "jax":
            from bridge._replay.jax_runner import choose_backend
        else:
            from bridge._replay.torch_runner import choose_backend
        backend = choose_backend()
    return framework, backend


def _check_plot(plot: Path | None) -> None:
    """Refuse a plot that could not be written, before minutes of work.

    Raises:
        ValueError: matplotlib or the folder is missing.
    """
    if plot is None:
        return
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'swa-decode[cli]'")
    if not plot.parent.is_dir():
        raise ValueError(f"--plot must name a file in an existing folder, got {plot}")
