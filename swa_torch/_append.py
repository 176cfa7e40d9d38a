"""The public ``append``: new keys and values into their slots of a paged cache, in place."""

from __future__ import annotations

import torch

from swa_plan._checks import check_positive
from swa_torch import _op  # noqa: F401  (defines the operators)
from swa_torch._cache import Cache, as_paged_cache
from swa_torch._validate import (
    INDEX_DTYPES,
    QUANTISED_DTYPES,
    QUERY_DTYPES,
    check_no_gradients,
    check_scale,
    check_tensor,
    names,
)


def append(
    cache: Cache,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    layer: int | None = None,
) -> None:
    """Write rows of keys and values into a paged cache, in place.

    A quantised cache stores ``cast(clip(x / scale, +-finite max))``, rounded half to even (int8 to +-127), clipping
    before the cast. NaN stays NaN (int8: 0).

    Args:
        cache: a ``PagedCache``, or ``(key_cache, value_cache)``, each ``[pages, block, kv_heads, dim]``.
        key: ``[rows, kv_heads, k_dim]``, bf16, fp16 or fp32 with a last stride of 1; the cache's dtype unless it is
            quantised.
        value: ``[rows, kv_heads, v_dim]``, likewise.
        slot_mapping: ``[<= rows]``, int32 or int64: page * block + offset of each row. Slots below 0 or beyond the
            cache write nothing; rows beyond its length are ignored; duplicates are undefined.
        k_scale: scale of the keys, a positive number or fp32 of shape ``[]`` or ``[kv_heads]``; quantised caches need
            it.
        v_scale: scale of the values, likewise.
        layer: layer of a cache with a ``layers`` axis.

    Raises:
        TypeError: kinds or dtypes.
        ValueError: shapes, strides, devices, a missing scale or layer.
        NotImplementedError: an input requires gradients.
    """
    paged = as_paged_cache(cache)
    key_cache, value_cache = paged.views(layer)
    check_no_gradients(
        key_cache=key_cache, value_cache=value_cache, key=key, value=value, k_scale=k_scale, v_scale=v_scale
    )
    if key_cache.dtype not in (*QUERY_DTYPES, *QUANTISED_DTYPES):
        raise TypeError(f"cache must have dtype {names((*QUERY_DTYPES, *QUANTISED_DTYPES))}, got {key_cache.dtype}")
    dtypes = QUERY_DTYPES if key_cache.dtype in QUANTISED_DTYPES else (key_cache.dtype,)
    for name, rows, target in (("key", key, key_cache), ("value", value, value_cache)):
        check_tensor(name, rows, dtypes, like=key_cache)
        if rows.ndim != 3 or rows.shape[1:] != target.shape[2:]:
            raise ValueError(
                f"{name} must have shape [rows, {target.shape[2]}, {target.shape[3]}], got {list(rows.shape)}"
            )
    if key.shape[0] != value.shape[0] or key.dtype != value.dtype:
        raise ValueError(
            f"value must have key's rows and dtype ({key.shape[0]}, {key.dtype}), got {value.shape[0]}, {value.dtype}"
        )
    check_tensor("slot_mapping", slot_mapping, INDEX_DTYPES, like=key_cache)
    if slot_mapping.ndim != 1 or slot_mapping.shape[0] > key.shape[0]:
        raise ValueError(
            f"slot_mapping must have 1 dim and at most {key.shape[0]} slots, got shape {list(slot_mapping.shape)}"
        )
    k_tensor, k_number = check_scale("k_scale", k_scale, key_cache, like=key_cache)
    v_tensor, v_number = check_scale("v_scale", v_scale, value_cache, like=key_cache)
    for name, number in (("k_scale", k_number), ("v_scale", v_number)):
        check_positive(name, number)
    scaled = k_scale is not None or v_scale is not None
    torch.ops.swa_torch.append(
        paged.bases[0], paged.bases[1] if len(paged.bases) == 2 else None, paged.layout.spec, paged.k_dim, paged.v_dim,
        layer, key, value, slot_mapping, k_tensor, v_tensor, k_number if scaled else None, v_number if scaled else None,
    )  # fmt: skip
