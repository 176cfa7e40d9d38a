"""Sliding-window decode in float64, one row at a time: what the kernels are measured against.

It is written to be read beside the contract, not to be fast, and rounds nothing: inputs are converted to float64 as
they are; products, softmax and gate are float64. Only what a row sees is read.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from swa_plan._arguments import check_arguments, check_caches, check_scale
from swa_plan._dtypes import finite_max, is_quantised


def swa_decode(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    *,
    window: int | None,
    gate: ArrayLike | None = None,
    scale: float | None = None,
    query_len: int = 1,
    cu_query_lens: ArrayLike | None = None,
    kv_start: ArrayLike | None = None,
    kv_end: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    softcap: float | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    return_lse: bool = False,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Attend from each query row to the last ``window`` keys of its request.

    Row ``i`` of request ``r`` sits at position ``p = seq_lens[r] - rows_r + i`` and sees keys
    ``max(0, p - window + 1) .. p``, of them those in ``[kv_start[r], kv_end[r])``::

        logits = softcap * tanh(scale * k_scale * (q @ K.T) / softcap)
        out    = exp(logits) @ V / (sum(exp(logits)) + exp(sink)) * v_scale * sigmoid(gate)
        lse    = log(sum(exp(logits)) + exp(sink))

    A row that sees nothing, or whose exponentials sum to 0, is 0 with LSE -inf, whatever its gate and sinks. A row that
    sees a key on an invalid page or beyond the table is NaN, and so are the rows of a request with more than
    ``query_len`` of them.

    Args:
        query: ``[tokens, heads, k_dim]``, any floating dtype.
        key_cache: ``[pages, block, kv_heads, k_dim]``, any strides.
        value_cache: ``[pages, block, kv_heads, v_dim]``.
        block_table: int32 or int64 ``[requests, max_blocks]``.
        seq_lens: int32 or int64 ``[requests]``, the query's own tokens included; negative counts as 0.
        window: visible keys, the row's own included; None for full causal attention.
        gate: logits ``[tokens, heads]`` of a sigmoid that multiplies the output, or None.
        scale: factor of the logits; None means ``k_dim ** -0.5``.
        query_len: rows of each request, or their upper bound with ``cu_query_lens``.
        cu_query_lens: int32 or int64 ``[requests + 1]``, ragged rows; rows from ``cu_query_lens[-1]`` on are padding.
        kv_start: int32 or int64 ``[requests]``, first visible position, or None.
        kv_end: one past the last visible position, likewise.
        sinks: ``[heads]``, one more logit per head in the denominator, neither scaled nor capped.
        softcap: greater than 0, or None.
        k_scale: what a stored key is multiplied by, a scalar or ``[kv_heads]``; rounded to float32.
        v_scale: likewise for values.
        return_lse: also return the log-sum-exp.

    Returns:
        float64 ``[tokens, heads, v_dim]``, and with ``return_lse`` the natural-log LSE, float64 ``[tokens, heads]``.

    Raises:
        TypeError: a dtype or kind is wrong.
        ValueError: a shape or range is wrong.
    """
    args = check_arguments(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        window=window,
        gate=gate,
        scale=scale,
        query_len=query_len,
        cu_query_lens=cu_query_lens,
        kv_start=kv_start,
        kv_end=kv_end,
        sinks=sinks,
        softcap=softcap,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    k_factor = args.scale * args.k_scale.astype(np.float64)[:, None, None]
    v_factor = args.v_scale.astype(np.float64)[:, None, None]
    out = np.zeros((args.tokens, args.heads, args.v_dim))
    lse = np.full((args.tokens, args.heads), -np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        for row in args.rows():
            if row.is_nan:
                out[row.token], lse[row.token] = np.nan, np.nan
            elif not row.is_keyless:
                keys = args.key_cache[row.pages, row.offsets].astype(np.float64)  # [keys, kv_heads, k_dim]
                values = args.value_cache[row.pages, row.offsets].astype(np.float64)  # [keys, kv_heads, v_dim]
                # [kv_heads, group, k_dim] @ [kv_heads, k_dim, keys] -> [kv_heads, group, keys]
                logits = k_factor * (args.grouped_query(row.token, np.float64) @ keys.transpose(1, 2, 0))
                if args.softcap is not None:
                    logits = args.softcap * np.tanh(logits / args.softcap)
                sinks = None if args.sinks is None else args.sinks.astype(np.float64).reshape(logits.shape[:2])
                weights, row_lse = _softmax(logits, sinks)
                attention = (v_factor * (weights @ values.transpose(1, 0, 2))).reshape(args.heads, -1)
                lse[row.token] = row_lse.reshape(args.heads)
                gates = None if args.gate is None else args.gate[row.token]
                out[row.token] = _gated(attention, lse[row.token], gates)
    return (out, lse) if return_lse else out


def append(
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    slot_mapping: ArrayLike,
    *,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Write new keys and values into copies of the caches.

    Args:
        key_cache: ``[pages, block, kv_heads, k_dim]``.
        value_cache: ``[pages, block, kv_heads, v_dim]``.
        key: ``[rows, kv_heads, k_dim]``.
        value: ``[rows, kv_heads, v_dim]``.
        slot_mapping: int32 or int64 ``[<= rows]``, page * block + offset; slots below 0 or from ``pages * block`` on
            write nothing, and so do rows beyond its length.
        k_scale: a stored key means ``stored * k_scale``; a scalar or ``[kv_heads]``.
        v_scale: likewise for values.

    Returns:
        The two caches after the write.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape is wrong, or a quantised cache comes without its scales.
    """
    key_cache, value_cache = check_caches(key_cache, value_cache)
    key, value, slots = np.asarray(key), np.asarray(value), np.asarray(slot_mapping)
    pages, block, kv_heads, _ = key_cache.shape
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if rows.ndim != 3 or rows.shape[1:] != cache.shape[2:] or len(rows) != len(key):
            raise ValueError(
                f"{name} must have shape [rows, kv_heads, dim] = ({len(key)}, {kv_heads}, {cache.shape[3]}), "
                f"got {rows.shape}"
            )
    if slots.dtype not in (np.int32, np.int64):
        raise TypeError(f"slot_mapping must be int32 or int64, got {slots.dtype.name}")
    if slots.ndim != 1 or len(slots) > len(key):
        raise ValueError(f"slot_mapping must have shape [<= rows] with {len(key)} rows, got {slots.shape}")
    if is_quantised(key_cache.dtype) and (k_scale is None or v_scale is None):
        raise ValueError(
            f"k_scale and v_scale must be given with a cache of dtype {key_cache.dtype.name}, "
            f"got k_scale={k_scale} and v_scale={v_scale}"
        )
    rows = np.flatnonzero((slots >= 0) & (slots < pages * block))
    page, offset = slots[rows] // block, slots[rows] % block
    written = []
    for name, cache, new, scale in (
        ("k_scale", key_cache, key, k_scale),
        ("v_scale", value_cache, value, v_scale),
    ):
        cache = cache.copy()
        cache[page, offset] = quantise(new[rows], check_scale(name, scale, kv_heads)[:, None], cache.dtype)
        written.append(cache)
    return written[0], written[1]


def quantise(x: np.ndarray, scale: ArrayLike, dtype: np.dtype) -> np.ndarray:
    """Return what a cache of ``dtype`` stores for ``x``: ``cast(clip(x / scale, +-finite max))``.

    The quotient is float32, the cast rounds half to even. Clipping comes first because casts of what does not fit
    differ between frameworks. NaN stays NaN, and is 0 in int8. An unquantised cache is not clipped: it stores what it
    is given.

    Args:
        x: values, any floating dtype.
        scale: broadcasts against ``x``.
        dtype: the cache's dtype.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        stored = x.astype(np.float32) / np.asarray(scale, np.float32)
        if is_quantised(dtype):
            stored = np.clip(stored, -finite_max(dtype), finite_max(dtype))
        if dtype == np.int8:
            stored = np.rint(np.where(np.isnan(stored), 0, stored))
        return stored.astype(dtype)


def merge_states(
    outs: ArrayLike, lses: ArrayLike, *, sinks: ArrayLike | None = None, gate: ArrayLike | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Merge partial attentions over disjoint sets of keys, computed without sinks and gate.

    A part with LSE -inf is the identity, whatever its output holds; a row without any other part is 0 with LSE -inf.

    Args:
        outs: ``[parts, tokens, heads, v_dim]``.
        lses: natural log, ``[parts, tokens, heads]``.
        sinks: ``[heads]``, added once to the denominator, or None.
        gate: logits ``[tokens, heads]``, applied once to the merged output, or None.

    Returns:
        float64 output ``[tokens, heads, v_dim]`` and LSE ``[tokens, heads]``.

    Raises:
        ValueError: a shape is wrong.
    """
    outs, lses = np.asarray(outs).astype(np.float64), np.asarray(lses).astype(np.float64)
    if outs.ndim != 4 or outs.shape[:3] != lses.shape:
        raise ValueError(
            f"outs and lses must have shapes [parts, tokens, heads, v_dim] and [parts, tokens, heads], "
            f"got {outs.shape} and {lses.shape}"
        )
    _, tokens, heads = lses.shape
    for name, array, shape in (("sinks", sinks, (heads,)), ("gate", gate, (tokens, heads))):
        if array is not None and np.shape(array) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {np.shape(array)}")
    with np.errstate(invalid="ignore", over="ignore"):
        weights, lse = _softmax(
            np.moveaxis(lses, 0, -1), None if sinks is None else np.asarray(sinks).astype(np.float64)
        )
        parts = np.where(np.isneginf(lses)[..., None], 0.0, outs)
        out = np.einsum("thp,pthd->thd", weights, parts)
        return _gated(out, lse, None if gate is None else np.asarray(gate)), lse


def _softmax(logits: np.ndarray, sinks: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return weights ``[..., keys]`` and LSE ``[...]`` of ``logits``; sinks ``[...]`` join the denominator only.

    Where every logit is -inf the weights are 0 and the LSE is -inf, sinks or not.
    """
    largest = logits.max(axis=-1, initial=-np.inf)
    nothing = np.isneginf(largest)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    largest = np.where(nothing, 0.0, largest)
    powers = np.exp(logits - largest[..., None])
    total = powers.sum(axis=-1)
    if sinks is not None:
        total = total + np.where(nothing, 0.0, np.exp(sinks - largest))
    total = np.where(nothing, 1.0, total)
    return powers / total[..., None], np.where(nothing, -np.inf, largest + np.log(total))


def _gated(out: np.ndarray, lse: np.ndarray, gate: np.ndarray | None) -> np.ndarray:
    """Return ``out * sigmoid(gate)`` where a row saw something; elsewhere 0 even if the gate or a value is NaN."""
    if gate is not None:
        out = out / (1.0 + np.exp(-gate.astype(np.float64)))[..., None]
    return np.where(np.isneginf(lse)[..., None], 0.0, out)
