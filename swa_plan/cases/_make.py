"""From a case to its arrays.

The whole cache is filled first, as a cache in use would be, and poisoned last: both kinds of inputs come from one
stream of random numbers, so that their visible data are the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from swa_plan._dtypes import numpy_dtype
from swa_plan._layout import CacheLayout
from swa_plan._visible import Row, visible_rows
from swa_plan.cases._case import Case, Inputs, ScaleKind
from swa_plan.reference import quantise

SPARE_PAGES = 2
"""Pages that no request owns."""

ABSURD_ENTRIES = (-1, 2**31 - 1, 10**6)
"""What a poisoned table holds where no visible key needs an entry."""

# Scales that spread values of about 4 standard deviations over most of a dtype's range.
_SCALE = {"float8_e4m3fn": 4 / 448, "float8_e5m2": 4 / 57344, "int8": 4 / 127}


def make_inputs(case: Case, *, seed: int = 0, poison: bool = False, dtype: str | None = None) -> Inputs:
    """Return the arrays of ``case``.

    Queries, keys, values and gates are standard normal, pages lie in random order, and every slot holds such data, also
    those that nothing sees. With ``poison`` the slots that no row of their request sees, all other layers and the pages
    that no request owns hold NaN (int8: 127), table entries that no visible key needs are absurd, and query and gate of
    rows that see nothing are NaN.

    Args:
        case: the step.
        seed: of the random numbers.
        poison: whether to spoil all that must not be read.
        dtype: name of the query's dtype, instead of the case's.
    """
    rng = np.random.default_rng([seed, *case.name.encode()])
    query_dtype = numpy_dtype(dtype or case.dtype)
    index_dtype = np.dtype(case.index_dtype)
    query = (case.query_gain * rng.standard_normal((case.tokens, case.heads, case.k_dim))).astype(query_dtype)
    gate = rng.standard_normal((case.tokens, case.heads)).astype(numpy_dtype(case.gate_dtype))
    sinks = rng.standard_normal(case.heads).astype(np.float32)
    block_table, pages = _block_table(case, rng)
    k_scale = _scale(case, case.k_scale, rng)
    v_scale = _scale(case, case.v_scale, rng)
    cache_dtype = query_dtype if case.cache_dtype is None else numpy_dtype(case.cache_dtype)
    bases = _bases(case, rng, pages, cache_dtype, k_scale, v_scale)
    starts, ends = zip(*case.kv_range, strict=True) if case.kv_range else (None, None)
    counts = case.row_counts
    inputs = Inputs(
        query=query,
        bases=bases,
        layout=case.layout,
        k_dim=case.k_dim,
        v_dim=case.v_dim,
        block_table=block_table.astype(index_dtype),
        seq_lens=np.array(case.seq_lens, index_dtype),
        window=case.window,
        gate=gate if case.gate else None,
        scale=case.scale,
        query_len=case.query_len,
        cu_query_lens=None if counts is None else np.cumsum([0, *counts]).astype(np.int32),
        kv_start=None if starts is None else np.array(starts, np.int32),
        kv_end=None if ends is None else np.array(ends, np.int32),
        sinks=sinks if case.sinks else None,
        softcap=case.softcap,
        k_scale=k_scale,
        v_scale=v_scale,
        layer=case.layer,
        return_lse=case.lse,
        out_dtype=case.out_dtype,
    )
    if poison:
        _poison(inputs)
    return inputs


def _block_table(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Return a table int64 ``[requests, max_blocks]`` in which each request owns its pages, and the number of pages."""
    owned = [min(-(-max(seq_len, 0) // case.block), case.max_blocks) for seq_len in case.seq_lens]
    pages = sum(owned) + SPARE_PAGES
    free = iter(rng.permutation(pages))
    table = np.zeros((case.requests, case.max_blocks), np.int64)
    for request, count in enumerate(owned):
        table[request, :count] = [next(free) for _ in range(count)]
    for request, column, page in case.invalid_pages:
        table[request, column] = page
    return table, pages


def _scale(case: Case, kind: ScaleKind, rng: np.random.Generator) -> float | np.ndarray | None:
    """Return a scale of a quantised cache in the way that ``kind`` says; a 0-d array and a float are one float32."""
    if case.cache_dtype is None:
        return None
    scales = (_SCALE[case.cache_dtype] * rng.uniform(0.75, 1.5, case.kv_heads)).astype(np.float32)
    if kind == "head":
        return scales
    return float(scales[0]) if kind == "float" else np.array(scales[0])


def _bases(
    case: Case,
    rng: np.random.Generator,
    pages: int,
    dtype: np.dtype,
    k_scale: float | np.ndarray | None,
    v_scale: float | np.ndarray | None,
) -> tuple[np.ndarray, ...]:
    """Return the cache's arrays, every slot of every layer filled."""
    layout = CacheLayout.parse(case.layout)
    sizes = {"pages": pages, "block": case.block, "kv_heads": case.kv_heads, "k_dim": case.k_dim, "v_dim": case.v_dim}
    bases = tuple(np.zeros(shape, dtype) for shape in layout.shape(**sizes, layers=case.layers))
    for layer in range(case.layers or 1):
        views = layout.views(bases, k_dim=case.k_dim, v_dim=case.v_dim, layer=None if case.layers is None else layer)
        for view, scale in zip(views, (k_scale, v_scale), strict=True):
            factor = np.asarray(1.0 if scale is None else scale, np.float32).reshape(-1, 1)  # [kv_heads or 1, 1]
            view[...] = quantise(rng.standard_normal(view.shape, np.float32), factor, dtype)
    return bases


def _poison(inputs: Inputs) -> None:
    """Spoil, in place, everything that the contract says is never read."""
    clean_keys, clean_values = inputs.key_cache.copy(), inputs.value_cache.copy()
    pages, block = clean_keys.shape[:2]
    needed = np.zeros(inputs.block_table.shape, bool)
    visible = np.zeros((pages, block), bool)
    keyless = np.ones(len(inputs.query), bool)
    for row in _rows(inputs):
        visible[row.pages, row.offsets] = True
        needed[row.request, row.low // block : -(-row.high // block)] |= row.high > row.low
        keyless[row.token] = row.is_keyless
    for base in inputs.bases:
        base[...] = 127 if base.dtype == np.int8 else np.nan
    inputs.key_cache[visible] = clean_keys[visible]
    inputs.value_cache[visible] = clean_values[visible]
    absurd = np.resize(np.array(ABSURD_ENTRIES), inputs.block_table.shape)
    inputs.block_table[...] = np.where(needed, inputs.block_table, absurd)
    inputs.query[keyless] = np.nan
    if inputs.gate is not None:
        inputs.gate[keyless] = np.nan


def _rows(inputs: Inputs) -> Iterator[Row]:
    pages, block = inputs.key_cache.shape[:2]
    return visible_rows(
        inputs.block_table,
        inputs.seq_lens,
        pages=pages,
        block=block,
        window=inputs.window,
        query_len=inputs.query_len,
        cu_query_lens=inputs.cu_query_lens,
        kv_start=inputs.kv_start,
        kv_end=inputs.kv_end,
    )
