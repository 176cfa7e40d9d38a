"""Where a key or value lies in the cache's base: index maps of a layout, and lengths brought into 32 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from swa_pallas._call import Statics
from swa_pallas._pallas._backend import load_one
from swa_plan._layout import PACKED
from swa_plan._problem import MAX_POSITIONS


def clamp_position(position: jax.Array) -> jax.Array:
    """Bring a length or position into 32 bits; no table reaches beyond 2**30."""
    return jnp.clip(position, -MAX_POSITIONS, MAX_POSITIONS).astype(jnp.int32)


def load_number(reference: Any, number: float, position: jax.Array | int = 0) -> Any:
    """Return a number times what an operand holds (at ``position``, if there is one for each kv head)."""
    if reference is None:
        return number
    value = load_one(reference, position if reference.shape[0] > 1 else 0)
    return value if number == 1.0 else value * number


def cache_index(
    statics: Statics, kv: int, page: Any, slot: Any, kv_head: Any, layer: Any
) -> Callable[[jax.Array], tuple[Any, ...]]:
    """Return the index map of K (``kv=0``) or V (``kv=1``) in its base, still to be completed with the last axis."""
    first = statics.k_dim if statics.layout.packed and kv else 0
    by_axis = {"pages": page, "block": slot, "kv_heads": kv_head, "kv": kv, "layers": layer}

    def index(d: jax.Array) -> tuple[Any, ...]:
        last = {"dim": d, PACKED: first + d}
        return tuple({**by_axis, **last}[axis] for axis in statics.layout.axes)

    return index


def existing_layer(reference: Any, statics: Statics, base: Any) -> tuple[Any, Any]:
    """Return ``(layer to use, whether there is such a layer)``; a traced layer may name none."""
    if reference is None:
        return statics.layer, True
    layer = load_one(reference, 0)
    exists = (layer >= 0) & (layer < base.shape[statics.layout.axes.index("layers")])
    return jnp.where(exists, layer, 0).astype(jnp.int32), exists
