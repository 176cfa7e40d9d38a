"""Checks of everything a caller passes, while JAX traces: shapes, dtypes, kinds and shardings, never data.

Each error names the argument, the rule and the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from swa_pallas._cache import PagedCache
from swa_plan._checks import check_head_dim, check_heads, check_integer, check_real
from swa_plan._problem import QUANTISED_DTYPES, QUERY_DTYPES

INDEX_DTYPES = ("int32", "int64")


def check_array(
    name: str, array: Any, dtypes: Sequence[str], shape: tuple[int, ...] | None = None, *, rank: int | None = None
) -> None:
    """Check one array's kind, dtype, shape and sharding.

    Raises:
        TypeError: not an array, or a dtype that is not supported.
        ValueError: another shape, a symbolic one, or sharded over an explicit mesh axis.
    """
    if not isinstance(array, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        raise TypeError(f"{name} must be a JAX array, got {type(array).__name__}")
    if array.dtype.name not in dtypes:
        hint = "; view a uint8 cache as float8_e4m3fn, float8_e5m2 or int8" if array.dtype == np.uint8 else ""
        raise TypeError(f"{name} must have dtype {', '.join(dtypes)}, got {array.dtype.name}{hint}")
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        narrow = jax.dtypes.canonicalize_dtype(array.dtype).name
        raise TypeError(f"{name} must be {narrow} while jax_enable_x64 is off, got {array.dtype.name}")
    if not all(isinstance(size, int) for size in array.shape):
        raise ValueError(
            f"{name} must have a static shape, because plans and kernels are made for it, got {array.shape}"
        )
    if shape is not None and tuple(array.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(array.shape)}")
    if rank is not None and array.ndim != rank:
        raise ValueError(f"{name} must have {rank} dims, got shape {list(array.shape)}")
    if isinstance(array, jax.Array):
        spec = getattr(getattr(jax.typeof(array), "sharding", None), "spec", None) or ()
        if any(axis is not None for axis in spec):
            raise ValueError(
                f"{name} must not be sharded over an explicit mesh axis: wrap the call in jax.shard_map over kv heads "
                f"(see swa_pallas.cache_specs), got {spec}"
            )


def as_arrays(operands: Any) -> Any:
    """Return checked operands, a named tuple or a dict of arguments, as JAX arrays.

    Raises:
        TypeError: one is a ``ShapeDtypeStruct``, which plans may be made from but nothing can be computed from.
    """

    def convert(path: Any, operand: Any) -> jax.Array:
        if isinstance(operand, jax.ShapeDtypeStruct):
            name = getattr(path[0], "name", None) or path[0].key
            name = "cache" if name == "bases" else name
            raise TypeError(f"{name} must hold data (jax.eval_shape takes calls without), got {operand}")
        return jnp.asarray(operand)

    return jax.tree_util.tree_map_with_path(convert, operands)


def check_static(name: str, value: object) -> None:
    """Refuse a traced value where a static one is needed.

    Raises:
        TypeError: naming the argument.
    """
    if isinstance(value, Tracer):
        raise TypeError(
            f"{name} must be static, because it decides shapes and code: pass a Python value "
            f"(static_argnames={name!r} in jax.jit), got a traced {value.aval}"
        )


def check_query_and_cache(query: Any, cache: PagedCache) -> None:
    """Check query and cache against each other.

    Raises:
        TypeError: kinds or dtypes.
        ValueError: shapes or shardings.
    """
    check_array("query", query, QUERY_DTYPES, rank=3)
    names = ("cache",) if len(cache.bases) == 1 else ("key_cache", "value_cache")
    for name, base in zip(names, cache.bases, strict=True):
        check_array(name, base, (query.dtype.name, *QUANTISED_DTYPES))
    check_integer("block", cache.block, minimum=1)
    check_heads(int(query.shape[1]), cache.kv_heads)
    check_head_dim("k_dim", int(query.shape[2]))
    check_head_dim("v_dim", cache.v_dim)
    if query.shape[2] != cache.k_dim:
        raise ValueError(f"key_cache must have the query's head size {query.shape[2]}, got {cache.k_dim}")


def check_block_table(block_table: Any) -> None:
    """Check a block table by itself.

    Raises:
        TypeError: kind or dtype.
        ValueError: rank.
    """
    check_array("block_table", block_table, INDEX_DTYPES)
    if block_table.ndim != 2:
        raise ValueError(f"block_table must have 2 dims [requests, max_blocks], got shape {list(block_table.shape)}")


def check_rows(
    query: Any, block_table: Any, seq_lens: Any, *, query_len: object, cu_query_lens: Any, kv_start: Any, kv_end: Any
) -> int:
    """Check how rows belong to requests; return ``query_len``.

    Raises:
        TypeError: kinds or dtypes.
        ValueError: shapes, or tokens that do not divide.
    """
    check_static("query_len", query_len)
    rows = check_integer("query_len", query_len, minimum=1)
    check_block_table(block_table)
    requests, tokens = block_table.shape[0], query.shape[0]
    check_array("seq_lens", seq_lens, INDEX_DTYPES, (requests,))
    if cu_query_lens is not None:
        check_array("cu_query_lens", cu_query_lens, INDEX_DTYPES, (requests + 1,))
    elif tokens != requests * rows:
        raise ValueError(
            f"query must have requests * query_len = {requests} * {rows} tokens (or pass cu_query_lens), got {tokens}"
        )
    for name, bound in (("kv_start", kv_start), ("kv_end", kv_end)):
        if bound is not None:
            check_array(name, bound, INDEX_DTYPES, (requests,))
    return rows


def check_head_options(tokens: int, heads: int, gate: Any, sinks: Any) -> None:
    """Check gate and sinks.

    Raises:
        TypeError: kinds or dtypes.
        ValueError: shapes.
    """
    if gate is not None:
        check_array("gate", gate, QUERY_DTYPES, (tokens, heads))
    if sinks is not None:
        check_array("sinks", sinks, QUERY_DTYPES, (heads,))


def check_scale(name: str, scale: Any, cache: PagedCache) -> tuple[jax.Array | None, float]:
    """Return a dequantisation scale as ``(array [1 or kv_heads] or None, number)``; their product is what is meant.

    Raises:
        TypeError: neither a number nor an fp32 array.
        ValueError: a quantised cache has none, or the shape is neither ``[]`` nor ``[kv_heads]``.
    """
    if scale is None:
        if cache.dtype.name in QUANTISED_DTYPES:
            raise ValueError(f"{name} must be given for a quantised cache ({cache.dtype.name}), got None")
        return None, 1.0
    if not isinstance(scale, (jax.Array, np.ndarray)):
        return None, check_real(name, scale)
    check_array(name, scale, ("float32", "float64") if scale.ndim == 0 else ("float32",))
    if scale.ndim not in (0, 1) or (scale.ndim == 1 and scale.shape[0] != cache.kv_heads):
        raise ValueError(
            f"{name} must be a scalar or have shape [{cache.kv_heads}] (kv_heads), got {list(scale.shape)}"
        )
    return jnp.asarray(scale, jnp.float32).reshape(-1), 1.0


def check_scalar(name: str, value: Any) -> tuple[jax.Array | None, float]:
    """Return a number as ``(fp32 array [1] or None, number)``: an array (traced, say) stays one.

    Raises:
        TypeError: neither a number nor a floating-point array.
        ValueError: not finite, or an array that is no scalar.
    """
    if not isinstance(value, (jax.Array, np.ndarray)):
        return None, check_real(name, value)
    check_array(name, value, ("float16", "bfloat16", "float32", "float64", "int32", "int64"), ())
    return jnp.asarray(value, jnp.float32).reshape(1), 1.0


def check_layer(layer: Any, cache: PagedCache) -> tuple[jax.Array | None, int | None]:
    """Return a layer as ``(int32 array [1] or None, number or None)``.

    Raises:
        TypeError: neither an integer nor an integer array.
        ValueError: missing, superfluous or out of range (an array is not looked into; one out of range gives NaN rows).
    """
    cache.layout.select(0, k_dim=cache.k_dim, v_dim=cache.v_dim, layer=layer)
    if layer is None:
        return None, None
    if isinstance(layer, (jax.Array, np.ndarray)):
        check_array("layer", layer, INDEX_DTYPES, ())
        return jnp.asarray(layer, jnp.int32).reshape(1), None
    assert cache.layers is not None
    return None, check_integer("layer", layer, minimum=0, maximum=cache.layers - 1)


def check_out_dtype(out_dtype: Any, default: Any) -> str:
    """Return the name of the output's dtype.

    Raises:
        TypeError: not one of the query dtypes.
    """
    try:
        name = default.name if out_dtype is None else jnp.dtype(out_dtype).name
    except TypeError:
        name = repr(out_dtype)
    if name not in QUERY_DTYPES:
        raise TypeError(f"out_dtype must be one of {', '.join(QUERY_DTYPES)}, got {name}")
    return name
