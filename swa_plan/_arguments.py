"""The arguments of ``swa_decode`` as NumPy arrays, checked once for the reference and for the tolerance rule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from swa_plan._checks import check_heads, check_integer, check_window
from swa_plan._dtypes import is_quantised
from swa_plan._visible import Row, visible_rows


@dataclass(frozen=True)
class Arguments:
    """Checked arguments; array dtypes are as given, shapes as in ``reference.swa_decode``.

    Attributes:
        scale: the factor of the logits, its default filled in.
        k_scale: float32 ``[kv_heads]``, ones where not given.
        v_scale: likewise.
    """

    query: np.ndarray
    key_cache: np.ndarray
    value_cache: np.ndarray
    block_table: np.ndarray
    seq_lens: np.ndarray
    window: int | None
    gate: np.ndarray | None
    scale: float
    query_len: int
    cu_query_lens: np.ndarray | None
    kv_start: np.ndarray | None
    kv_end: np.ndarray | None
    sinks: np.ndarray | None
    softcap: float | None
    k_scale: np.ndarray
    v_scale: np.ndarray

    @property
    def tokens(self) -> int:
        """Query rows, padding included."""
        return self.query.shape[0]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.query.shape[1]

    @property
    def v_dim(self) -> int:
        """Head size of values and outputs."""
        return self.value_cache.shape[3]

    def rows(self) -> Iterator[Row]:
        """Walk over the rows that belong to a request."""
        return visible_rows(
            self.block_table,
            self.seq_lens,
            pages=self.key_cache.shape[0],
            block=self.key_cache.shape[1],
            window=self.window,
            query_len=self.query_len,
            cu_query_lens=self.cu_query_lens,
            kv_start=self.kv_start,
            kv_end=self.kv_end,
        )

    def grouped_query(self, token: int, dtype: type) -> np.ndarray:
        """Return one token's query as ``[kv_heads, group, k_dim]``: head ``h`` reads kv head ``h // group``."""
        kv_heads = self.key_cache.shape[2]
        return self.query[token].astype(dtype).reshape(kv_heads, self.heads // kv_heads, -1)


def check_arguments(
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
) -> Arguments:
    """Check every argument of ``swa_decode`` and return them as arrays.

    Raises:
        TypeError: a dtype or kind is wrong.
        ValueError: a shape or range is wrong.
    """
    query = _array("query", query, ndim=3)
    tokens, heads, k_dim = query.shape
    key_cache, value_cache = check_caches(key_cache, value_cache)
    kv_heads = key_cache.shape[2]
    check_heads(heads, kv_heads)
    if key_cache.shape[3] != k_dim:
        raise ValueError(f"key_cache must have the query's head size {k_dim}, got shape {key_cache.shape}")
    if is_quantised(key_cache.dtype) and (k_scale is None or v_scale is None):
        raise ValueError(
            f"k_scale and v_scale must be given with a cache of dtype {key_cache.dtype.name}, "
            f"got k_scale={k_scale} and v_scale={v_scale}"
        )

    block_table = _integers("block_table", block_table, ndim=2)
    requests = block_table.shape[0]
    seq_lens = _integers("seq_lens", seq_lens, shape=(requests,))
    query_len = check_integer("query_len", query_len, minimum=1)
    if cu_query_lens is not None:
        cu_query_lens = _check_cu_query_lens(cu_query_lens, requests, tokens)
    elif tokens != requests * query_len:
        raise ValueError(
            f"query must have requests * query_len = {requests} * {query_len} tokens without cu_query_lens, "
            f"got {tokens}"
        )

    if scale is None:
        scale = k_dim**-0.5
    if softcap is not None and not _real("softcap", softcap) > 0:
        raise ValueError(f"softcap must be greater than 0, or None for no cap, got {softcap}")
    return Arguments(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        window=check_window(window),
        gate=None if gate is None else _array("gate", gate, shape=(tokens, heads)),
        scale=_real("scale", scale),
        query_len=query_len,
        cu_query_lens=cu_query_lens,
        kv_start=None if kv_start is None else _integers("kv_start", kv_start, shape=(requests,)),
        kv_end=None if kv_end is None else _integers("kv_end", kv_end, shape=(requests,)),
        sinks=None if sinks is None else _array("sinks", sinks, shape=(heads,)),
        softcap=None if softcap is None else float(softcap),
        k_scale=check_scale("k_scale", k_scale, kv_heads),
        v_scale=check_scale("v_scale", v_scale, kv_heads),
    )


def check_caches(key_cache: ArrayLike, value_cache: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return both caches as arrays ``[pages, block, kv_heads, dim]`` that agree in all but ``dim``."""
    key_cache, value_cache = _array("key_cache", key_cache, ndim=4), _array("value_cache", value_cache, ndim=4)
    if key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(
            f"key_cache and value_cache must agree in pages, block and kv_heads, "
            f"got shapes {key_cache.shape} and {value_cache.shape}"
        )
    check_integer("block", key_cache.shape[1], minimum=1)
    if key_cache.dtype != value_cache.dtype:
        raise TypeError(
            f"key_cache and value_cache must have one dtype, got {key_cache.dtype.name} and {value_cache.dtype.name}"
        )
    if key_cache.dtype.kind in "iub" and key_cache.dtype != np.int8:
        hint = "; view a uint8 cache as float8_e4m3fn, float8_e5m2 or int8" if key_cache.dtype == np.uint8 else ""
        raise TypeError(f"key_cache must be floating point, fp8 or int8, got {key_cache.dtype.name}{hint}")
    return key_cache, value_cache


def check_scale(name: str, scale: ArrayLike | None, kv_heads: int) -> np.ndarray:
    """Return a cache scale as float32 ``[kv_heads]``; None means 1."""
    array = np.asarray(1.0 if scale is None else scale)
    if array.shape not in ((), (kv_heads,)):
        raise ValueError(f"{name} must be a scalar or of shape [kv_heads] = ({kv_heads},), got shape {array.shape}")
    if array.dtype.kind in "bc":
        raise TypeError(f"{name} must be real numbers, got dtype {array.dtype.name}")
    return np.broadcast_to(array.astype(np.float32), (kv_heads,))


def _array(name: str, value: ArrayLike, *, ndim: int | None = None, shape: tuple[int, ...] | None = None) -> np.ndarray:
    array = np.asarray(value)
    if ndim is not None and array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes, got shape {array.shape}")
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    return array


def _integers(
    name: str, value: ArrayLike, *, ndim: int | None = None, shape: tuple[int, ...] | None = None
) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype not in (np.int32, np.int64):
        raise TypeError(f"{name} must be int32 or int64, got {array.dtype.name}")
    return _array(name, array, ndim=ndim, shape=shape)


def _real(name: str, value: Any) -> float:
    if isinstance(value, (bool, np.bool_)) or np.ndim(value) != 0 or np.asarray(value).dtype.kind in "bcOUS":
        raise TypeError(f"{name} must be a real number, got {value!r} of type {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)


def _check_cu_query_lens(value: ArrayLike, requests: int, tokens: int) -> np.ndarray:
    array = _integers("cu_query_lens", value, shape=(requests + 1,))
    if array[0] != 0 or (np.diff(array) < 0).any() or array[-1] > tokens:
        raise ValueError(
            f"cu_query_lens must start at 0, never decrease and end at or before the {tokens} tokens of query, "
            f"got {array.tolist()}"
        )
    return array
