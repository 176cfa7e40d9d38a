"""The named cases, in suites: what is measured, and what each suite is to show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.cases import Case
from benchmarks.trace_steps import replayed_lengths
from benchmarks.workloads import NINE, case_of
from bridge._replay import bundled_trace
from swa_plan.models import MODELS, ModelShape

SEED = 0
MODEL_BATCHES = (1, 16, 128)
MODEL_TP = {"step5": 8}
"""The second number of tensor-parallel ranks; 4 for the others."""

TRACE_QUANTILES = (0.25, 0.5, 0.9)
"""Of the batch sizes of a replay: the steps that become cases."""

TRACE_OPTIONS = {"max_batch": 256, "speed": 20.0, "max_steps": 800}
"""Arrivals 20 times faster than in the trace, or a bundled trace would never fill a GPU."""


def nine(trace: Path) -> list[Case]:
    """Return the nine cases of ``workloads``: a 64-head model's shards from batch 1 to 256, and two verify steps."""
    return [case_of(workload, suite="nine") for workload in NINE]


def models(trace: Path) -> list[Case]:
    """Return the shapes of published models, whole and sharded, at three batch sizes."""
    return [
        _model_case(model.shard(tp), tp, batch)
        for model in MODELS.values()
        for tp in (1, MODEL_TP.get(model.name, 4))
        for batch in MODEL_BATCHES
    ]


def _model_case(shape: ModelShape, tp: int, batch: int) -> Case:
    return Case(
        f"{shape.name}_tp{tp}_b{batch}", "models", (max(2048, 2 * shape.window),) * batch, shape.kv_heads,
        shape.heads // shape.kv_heads, shape.k_dim, shape.v_dim, shape.window, shape.query_len,
        gate=shape.gate, sinks=shape.sinks, softcap=shape.softcap, family=f"{shape.name}, tp {tp}",
    )  # fmt: skip


def traces(trace: Path) -> list[Case]:
    """Return steps of a trace's replay, with the length of each request: small, middle and large batches."""
    cases = []
    for query_len in (1, 4):
        steps = sorted(replayed_lengths(trace, query_len=query_len, **TRACE_OPTIONS), key=len)
        for quantile in TRACE_QUANTILES:
            seq_lens = tuple(steps[round(quantile * (len(steps) - 1))])
            for kv_heads, group in ((8, 8), (1, 16)):
                name = f"trace_p{quantile * 100:.0f}_q{query_len}_b{len(seq_lens)}h{kv_heads}"
                cases.append(Case(name, "traces", seq_lens, kv_heads, group, query_len=query_len))
    return cases


def short(trace: Path) -> list[Case]:
    """Return requests that have not filled their window yet."""
    mixed = tuple(np.random.default_rng(SEED).integers(16, 257, 256).tolist())
    return [
        Case("short16_b32h8", "short", (16,) * 32, 8, 8),
        Case("short64_b32h8", "short", (64,) * 32, 8, 8),
        Case("short128_b128h1", "short", (128,) * 128, 1, 16),
        Case("short256_b64h8", "short", (256,) * 64, 8, 8),
        Case("shortmix_b256h8", "short", mixed, 8, 8),
    ]


def ragged(trace: Path) -> list[Case]:
    """Return the nine's sizes from 50 MB up, with lengths drawn between one window and four."""
    cases = []
    for w in NINE:
        if w.query_len == 1 and w.read_bytes > 50_000_000:
            drawn = np.random.default_rng(SEED).integers(w.window, 4 * w.window + 1, w.requests)
            cases.append(Case(f"ragged_{w.name}", "ragged", tuple(drawn.tolist()), w.kv_heads, w.group))
    return cases


def windows(trace: Path) -> list[Case]:
    """Return other windows and head sizes, small and large: window 128 (head 64), 1024 (256) and 4096 (128)."""
    cases = []
    for window, head, small, large in (
        (128, 64, (8, 8, 8), (256, 8, 8)),
        (1024, 256, (1, 2, 2), (16, 8, 2)),
        (4096, 128, (1, 2, 4), (8, 8, 4)),
    ):
        for requests, kv_heads, group in (small, large):
            name = f"w{window}_b{requests}h{kv_heads}"
            lengths = (max(2048, 2 * window),) * requests
            cases.append(Case(name, "windows", lengths, kv_heads, group, head, head, window, gate=False))
    return cases


def mtp(trace: Path) -> list[Case]:
    """Return steps of speculative decoding: 2 to 8 rows a request."""
    shapes = ((32, 8, 8, (2, 3, 4, 5, 6, 7, 8)), (16, 1, 16, (2, 4, 8)))
    return [
        Case(f"mtp{rows}_b{requests}h{kv_heads}", "mtp", (2048,) * requests, kv_heads, group, query_len=rows)
        for requests, kv_heads, group, every in shapes
        for rows in every
    ]


def context(trace: Path) -> list[Case]:
    """Return one step at contexts from 1024 to 131072 keys, whose time is to be flat: the window is 512."""
    return [
        Case(f"context{keys}_b16h8", "context", (keys,) * 16, 8, 8, family="context")
        for keys in (1024, 8192, 131072)
    ]  # fmt: skip


def cpu(trace: Path) -> list[Case]:
    """Return small cases for a machine without a GPU."""
    shape = partial(Case, suite="cpu", kv_heads=2, group=4, k_dim=64, v_dim=64, window=128, block=16)
    return [
        shape("cpu_b1h2", seq_lens=(400,), family="cpu"),
        shape("cpu_b8h2", seq_lens=(400,) * 8, family="cpu"),
        shape("cpu_ragged_b4h2", seq_lens=(9, 128, 300, 512)),
        shape("cpu_mtp_b4h2", seq_lens=(400,) * 4, query_len=4),
    ]


SUITES: dict[str, Callable[[Path], list[Case]]] = {
    each.__name__: each for each in (nine, models, traces, short, ragged, windows, mtp, context, cpu)
}
ALL = "all"
CHOICES = (*SUITES, ALL)


def select(suites: Sequence[str], globs: Sequence[str] = (), *, trace: Path | None = None) -> list[Case]:
    """Return the cases of suites, those whose names match one of ``globs`` where there are any.

    Args:
        suites: names of ``SUITES``, or ``all`` for every one but ``cpu``.
        globs: shell patterns of names.
        trace: the request trace that ``traces`` replays; None takes the bundled one.

    Raises:
        ValueError: no such suite, or no case matches a pattern.
    """
    for name in suites:
        if name not in CHOICES:
            raise ValueError(f"--suite must be one of {', '.join(CHOICES)}, got {name!r}")
    chosen = [name for name in SUITES if name in suites or (ALL in suites and name != "cpu")]
    cases = [case for name in chosen for case in SUITES[name](trace or bundled_trace())]
    for glob in globs:
        if not any(fnmatchcase(case.name, glob) for case in cases):
            names = ", ".join(case.name for case in cases)
            raise ValueError(
                f"--case must match a case of the suites {', '.join(chosen)}, got {glob!r}; they are {names}"
            )
    return [case for case in cases if not globs or any(fnmatchcase(case.name, glob) for glob in globs)]
