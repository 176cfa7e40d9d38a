"""What a case fixes, and the arrays that it becomes.

A ``Case`` is plain values: its ``repr`` is all that is needed to run it again. ``Inputs`` holds NumPy arrays (ml_dtypes
for bfloat16 and fp8), which every framework can take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from swa_plan._layout import CacheLayout

ScaleKind = Literal["float", "scalar", "head"]


@dataclass(frozen=True)
class Case:
    """One decode step, without its data.

    Attributes:
        name: unique among ``CASES``.
        why: what would go wrong unnoticed without it.
        seq_lens: keys of each request, its query tokens included.
        window: keys a row sees, its own included, or None.
        query_len: rows of each request, or their bound where ``row_counts`` is given.
        row_counts: rows of each request where they are ragged, else None.
        padding_rows: rows after the last request's, ragged only.
        heads: query heads.
        kv_heads: heads of the cache.
        k_dim: head size of queries and keys.
        v_dim: head size of values and outputs.
        block: slots in a page.
        max_blocks: columns of the block table.
        dtype: name of the query's dtype; ``make_inputs(case, dtype=...)`` overrides it.
        cache_dtype: name of a quantised cache dtype; None means the query's.
        layout: axis names of the cache, see ``CacheLayout``.
        layers: size of the layout's ``layers`` axis, or None.
        layer: the layer that the step reads, or None.
        gate: whether the output is gated.
        gate_dtype: name of the gate's dtype.
        sinks: whether each head has a sink.
        softcap: cap of the logits, or None.
        scale: factor of the logits; None means the default.
        k_scale: how the key scale of a quantised cache is given: a Python float, a 0-d array or one per kv head.
        v_scale: likewise for values.
        kv_range: ``(kv_start, kv_end)`` of each request, or None.
        lse: whether the LSE is asked for.
        out_dtype: name of the output's dtype; None means the query's.
        index_dtype: name of the dtype of the table, the lengths and the offsets.
        invalid_pages: ``(request, column, page id)`` of table entries that a visible key needs and that name no page.
        query_gain: factor of the query, for large logits.
    """

    name: str
    why: str
    seq_lens: tuple[int, ...]
    window: int | None
    max_blocks: int
    query_len: int = 1
    row_counts: tuple[int, ...] | None = None
    padding_rows: int = 0
    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 64
    v_dim: int = 64
    block: int = 16
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    layout: str = "pages block kv_heads dim"
    layers: int | None = None
    layer: int | None = None
    gate: bool = False
    gate_dtype: str = "float32"
    sinks: bool = False
    softcap: float | None = None
    scale: float | None = None
    k_scale: ScaleKind = "float"
    v_scale: ScaleKind = "float"
    kv_range: tuple[tuple[int, int], ...] | None = None
    lse: bool = True
    out_dtype: str | None = None
    index_dtype: str = "int32"
    invalid_pages: tuple[tuple[int, int, int], ...] = ()
    query_gain: float = 1.0

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.seq_lens)

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.heads // self.kv_heads

    @property
    def ragged(self) -> bool:
        """Whether rows come with ``cu_query_lens``."""
        return self.row_counts is not None

    @property
    def tokens(self) -> int:
        """Query rows, padding included."""
        return self.requests * self.query_len if self.row_counts is None else sum(self.row_counts) + self.padding_rows

    def __str__(self) -> str:
        return self.name


def sized(
    name: str, why: str, seq_lens: tuple[int, ...], window: int | None, *, dim: int | None = None, **fields: Any
) -> Case:
    """Return a case with a table one column wider than its longest request needs, unless ``max_blocks`` is given.

    ``dim`` sets ``k_dim`` and ``v_dim``; ``fields`` are the case's others.
    """
    if dim is not None:
        fields.update(k_dim=dim, v_dim=dim)
    fields.setdefault("max_blocks", -(-max(seq_lens) // fields.get("block", 16)) + 1)
    return Case(name, why, seq_lens, window, **fields)


@dataclass
class Inputs:
    """The arrays of one decode step.

    Attributes:
        query: ``[tokens, heads, k_dim]``.
        bases: the cache's one or two arrays, shaped by ``layout``.
        layout: axis names of the bases.
        k_dim: head size of keys.
        v_dim: head size of values.
        block_table: int32 or int64 ``[requests, max_blocks]``.
        seq_lens: int32 or int64 ``[requests]``.
        window: keys a row sees, or None.
        gate: ``[tokens, heads]`` or None.
        scale: factor of the logits, or None for the default.
        query_len: rows of each request, or their bound.
        cu_query_lens: ``[requests + 1]`` or None.
        kv_start: ``[requests]`` or None.
        kv_end: ``[requests]`` or None.
        sinks: float32 ``[heads]`` or None.
        softcap: cap of the logits, or None.
        k_scale: a float, float32 0-d or float32 ``[kv_heads]``, or None.
        v_scale: likewise.
        layer: layer of the bases, or None.
        return_lse: whether the LSE is asked for.
        out_dtype: name of the output's dtype, or None for the query's.
    """

    query: np.ndarray
    bases: tuple[np.ndarray, ...]
    layout: str
    k_dim: int
    v_dim: int
    block_table: np.ndarray
    seq_lens: np.ndarray
    window: int | None
    gate: np.ndarray | None = None
    scale: float | None = None
    query_len: int = 1
    cu_query_lens: np.ndarray | None = None
    kv_start: np.ndarray | None = None
    kv_end: np.ndarray | None = None
    sinks: np.ndarray | None = None
    softcap: float | None = None
    k_scale: float | np.ndarray | None = None
    v_scale: float | np.ndarray | None = None
    layer: int | None = None
    return_lse: bool = False
    out_dtype: str | None = None

    @property
    def key_cache(self) -> np.ndarray:
        """The keys as a view ``[pages, block, kv_heads, k_dim]``."""
        return self._views()[0]

    @property
    def value_cache(self) -> np.ndarray:
        """The values as a view ``[pages, block, kv_heads, v_dim]``."""
        return self._views()[1]

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the reference's positional arguments: query, key_cache, value_cache, block_table, seq_lens."""
        return (self.query, *self._views(), self.block_table, self.seq_lens)

    def reference_options(self) -> dict[str, Any]:
        """Return the keyword arguments that say what is computed, for ``reference.swa_decode`` and ``emulate``.

        ``window`` is always among them; others only where they are not None.
        """
        names = ("gate", "scale", "cu_query_lens", "kv_start", "kv_end", "sinks", "softcap", "k_scale", "v_scale")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {"window": self.window, "query_len": self.query_len, **given}

    def options(self) -> dict[str, Any]:
        """Return a backend's keyword arguments: the reference's and, where they are asked for, the way it is computed.

        ``layer`` and ``out_dtype`` (a dtype's name) are there only where they are not None, ``return_lse`` only if
        true.
        """
        options = self.reference_options()
        if self.layer is not None:
            options["layer"] = self.layer
        if self.out_dtype is not None:
            options["out_dtype"] = self.out_dtype
        if self.return_lse:
            options["return_lse"] = True
        return options

    def _views(self) -> tuple[np.ndarray, np.ndarray]:
        return CacheLayout.parse(self.layout).views(self.bases, k_dim=self.k_dim, v_dim=self.v_dim, layer=self.layer)
