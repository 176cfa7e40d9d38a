"""The public ``append``: a cache with new keys and values in their slots."""

from __future__ import annotations

from typing import Any

import jax

from swa_pallas import _run
from swa_pallas._cache import Cache, PagedCache, as_paged_cache
from swa_pallas._call import Append, Statics
from swa_pallas._device import check_backend
from swa_pallas._validate import INDEX_DTYPES, as_arrays, check_array, check_layer, check_scale
from swa_plan._checks import check_positive
from swa_plan._dtypes import finite_max
from swa_plan._problem import QUANTISED_DTYPES, QUERY_DTYPES


def append(
    cache: Cache,
    key: jax.Array,
    value: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    layer: int | jax.Array | None = None,
    backend: str | None = None,
) -> Any:
    """Return a paged cache with rows of keys and values written.

    A pure function: call it inside a ``jax.jit`` that donates the cache (``donate_argnums``) and it writes in place; a
    cache that is not donated is copied. A quantised cache stores ``cast(clip(x / scale, +-finite max))``, rounded half
    to even (int8 to +-127), clipping before the cast. NaN stays NaN (int8: 0).

    Args:
        cache: a ``PagedCache``, or ``(key_cache, value_cache)``, each ``[pages, block, kv_heads, dim]``.
        key: ``[rows, kv_heads, k_dim]``, bf16, fp16 or fp32; the cache's dtype unless it is quantised.
        value: ``[rows, kv_heads, v_dim]``, likewise.
        slot_mapping: ``[<= rows]``, int32 (int64 under x64): page * block + offset of each row. Slots below 0 or beyond
            the cache write nothing; rows beyond its length are ignored; duplicates are undefined.
        k_scale: scale of the keys, a positive number or fp32 of shape ``[]`` or ``[kv_heads]``; quantised caches need
            it.
        v_scale: scale of the values, likewise.
        layer: layer of a cache with a ``layers`` axis; may be traced (one out of range writes nothing).
        backend: as in ``swa_decode``.

    Returns:
        The cache, of the kind that was passed.

    Raises:
        TypeError: kinds or dtypes.
        ValueError: shapes, a missing scale or layer, or (while lowering) a backend on a foreign platform.
        NotImplementedError: gradients or ``vmap``.
        RuntimeError: the backend needs a part of JAX that is gone.
    """
    check_backend(backend)
    paged = as_paged_cache(cache)
    stored = paged.dtype.name
    for base in paged.bases:
        check_array("cache", base, (*QUERY_DTYPES, *QUANTISED_DTYPES))
    quantised = stored in QUANTISED_DTYPES
    dtypes = QUERY_DTYPES if quantised else (stored,)
    check_array("key", key, dtypes, rank=3)
    rows = key.shape[0]
    check_array("key", key, dtypes, (rows, paged.kv_heads, paged.k_dim))
    check_array("value", value, dtypes, (rows, paged.kv_heads, paged.v_dim))
    check_array("slot_mapping", slot_mapping, INDEX_DTYPES)
    if slot_mapping.ndim != 1 or slot_mapping.shape[0] > rows:
        raise ValueError(f"slot_mapping must have 1 dim and at most {rows} slots, got shape {list(slot_mapping.shape)}")
    k_array, k_number = check_scale("k_scale", k_scale, paged)
    v_array, v_number = check_scale("v_scale", v_scale, paged)
    for name, number in (("k_scale", k_number), ("v_scale", v_number)):
        check_positive(name, number)
    layer_array, layer_number = check_layer(layer, paged)
    scaled = k_scale is not None or v_scale is not None
    limit = None
    if scaled:
        limit = finite_max(paged.dtype) if quantised else float("inf")
    statics = Statics(
        paged.layout, paged.k_dim, paged.v_dim, paged.pages, k_scale=k_number, v_scale=v_number, layer=layer_number
    )
    operands = Append(key, value, slot_mapping, paged.bases, k_array, v_array, layer_array)
    bases = _run.append(as_arrays(operands), statics=statics, limit=limit, backend=backend)
    if not isinstance(cache, PagedCache):
        return tuple(bases)
    return jax.tree.unflatten(jax.tree.structure(paged), bases)
