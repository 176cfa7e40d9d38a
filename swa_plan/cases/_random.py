"""Random legal cases: combinations that nobody thought of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from swa_plan._layout import LAYOUTS, CacheLayout
from swa_plan._problem import QUANTISED_DTYPES, QUERY_DTYPES
from swa_plan.cases._case import Case

_WINDOWS = (1, 5, 16, 20, 33, 64, 100, None)
_DIMS = (16, 32, 48, 64, 80, 96, 128)
_BLOCKS = (1, 3, 8, 16, 24, 64)
_MAX_SEQ_LEN = 120


def random_case(rng: np.random.Generator) -> Case:
    """Draw a legal combination of features, small enough for an interpreter.

    The case's ``repr`` runs it again: its name seeds its data.
    """

    def chance(probability: float) -> bool:
        return bool(rng.random() < probability)

    def pick(choices: Sequence[Any]) -> Any:
        return choices[int(rng.integers(len(choices)))]

    requests = int(rng.integers(1, 5))
    query_len = int(rng.integers(1, 6))
    seq_lens = tuple(0 if chance(0.1) else int(rng.integers(0, _MAX_SEQ_LEN)) for _ in range(requests))
    block = pick(_BLOCKS)
    row_counts = None
    if chance(0.4):
        over = int(chance(0.15))
        row_counts = tuple(int(rng.integers(0, query_len + over + 1)) for _ in range(requests))
    layout = pick(LAYOUTS)
    k_dim = pick(_DIMS)
    v_dim = k_dim if "kv" in CacheLayout(layout).axes or chance(0.7) else pick(_DIMS)
    layers = int(rng.integers(1, 4)) if chance(0.3) else None
    kv_heads = int(rng.integers(1, 4))
    quantised = chance(0.4)
    columns = max(1, -(-max(seq_lens) // block)) + int(rng.integers(0, 3))
    if chance(0.05) and columns > 1:
        columns -= 1  # may leave the longest sequence beyond the table
    kv_range = None
    if chance(0.25):
        bounds = rng.integers(-4, _MAX_SEQ_LEN + 8, (requests, 2))
        kv_range = tuple((int(low), int(high)) for low, high in np.sort(bounds, axis=1))
    return Case(
        name=f"random-{int(rng.integers(2**32)):08x}",
        why="a random combination of features",
        seq_lens=seq_lens,
        window=pick(_WINDOWS),
        max_blocks=columns,
        query_len=query_len,
        row_counts=row_counts,
        padding_rows=int(rng.integers(0, 3)) if row_counts is not None else 0,
        heads=kv_heads * pick((1, 2, 3, 5, 8)),
        kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        block=block,
        dtype=pick(QUERY_DTYPES),
        cache_dtype=pick(QUANTISED_DTYPES) if quantised else None,
        layout=layout if layers is None else pick(_with_layers(layout)),
        layers=layers,
        layer=None if layers is None else int(rng.integers(layers)),
        gate=chance(0.5),
        gate_dtype=pick(("bfloat16", "float32")),
        sinks=chance(0.3),
        softcap=pick((1.0, 20.0, 50.0)) if chance(0.25) else None,
        scale=pick((0.0, 0.05, 0.2)) if chance(0.2) else None,
        k_scale=pick(("float", "scalar", "head")),
        v_scale=pick(("float", "scalar", "head")),
        kv_range=kv_range,
        lse=chance(0.5),
        out_dtype="float32" if chance(0.25) else None,
        index_dtype=pick(("int32", "int64")),
        query_gain=1000.0 if chance(0.1) else 1.0,
    )


def _with_layers(layout: str) -> tuple[str, ...]:
    """Return ``layout`` with ``layers`` in front and, where pages come first, after them."""
    front = f"layers {layout}"
    return (front, layout.replace("pages", "pages layers")) if layout.startswith("pages") else (front,)
