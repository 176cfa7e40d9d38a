"""Where a key or value lies in the cache's base, and numbers that may be operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from swa_pallas._call import Statics
from swa_pallas._pallas._backend import load_one
from swa_plan._layout import PACKED


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
