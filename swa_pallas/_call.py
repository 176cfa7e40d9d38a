"""One decode call as its backends see it: checked arrays, and everything that is static while JAX traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import ManualAxisType

from swa_plan import CacheLayout
from swa_plan._problem import MAX_POSITIONS


class Operands(NamedTuple):
    """The arrays of a call (inside a kernel: their references); absent ones are None.

    ``scale``, ``softcap``, ``k_scale``, ``v_scale`` and ``layer`` are here where they are arrays, in ``Statics`` where
    they are plain numbers. They have one axis, of size 1 or ``kv_heads``.
    """

    query: jax.Array
    bases: tuple[jax.Array, ...]
    block_table: jax.Array
    seq_lens: jax.Array
    cu_query_lens: jax.Array | None
    kv_start: jax.Array | None
    kv_end: jax.Array | None
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    sinks: jax.Array | None
    gate: jax.Array | None
    scale: jax.Array | None
    softcap: jax.Array | None
    layer: jax.Array | None


class Append(NamedTuple):
    """The arrays of an ``append``; absent ones are None."""

    key: jax.Array
    value: jax.Array
    slot_mapping: jax.Array
    bases: tuple[jax.Array, ...]
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    layer: jax.Array | None


@dataclass(frozen=True)
class Statics:
    """What is fixed while a call is traced; what comes after ``layer`` is of no use to an ``append``.

    Attributes:
        layout: axes of the cache.
        k_dim: key head size.
        v_dim: value head size.
        pages: pages of the cache that was passed; 0 where a stand-in replaces an empty one.
        k_scale: what a stored key is multiplied by; 1 where that is an operand.
        v_scale: the same for values.
        layer: layer of the cache; None without layers or where it is an operand.
        max_blocks: columns of the table that was passed; 0 where a stand-in replaces an empty one.
        scale: factor of the logits; 1 where it is an operand.
        softcap: cap of the logits; None without one or where it is an operand.
        out_dtype: name of the output's dtype.
        return_lse: whether the log-sum-exps are wanted.
    """

    layout: CacheLayout
    k_dim: int
    v_dim: int
    pages: int
    k_scale: float = 1.0
    v_scale: float = 1.0
    layer: int | None = None
    max_blocks: int = 0
    scale: float = 1.0
    softcap: float | None = None
    out_dtype: str = ""
    return_lse: bool = False

    def existing_layer(self, given: jax.Array | None, base: Any) -> tuple[Any, Any]:
        """Return ``(layer to use, whether there is such a layer)``; a traced layer, ``given``, may name none."""
        if given is None:
            return self.layer, True
        exists = (given >= 0) & (given < base.shape[self.layout.axes.index("layers")])
        return jnp.where(exists, given, 0).astype(jnp.int32), exists


def clamp_position(position: jax.Array) -> jax.Array:
    """Bring lengths or positions into 32 bits; no table reaches beyond 2**30."""
    return jnp.clip(position, -MAX_POSITIONS, MAX_POSITIONS).astype(jnp.int32)


def like_all(shape: tuple[int, ...], dtype: jnp.dtype | str, *arrays: object) -> jax.ShapeDtypeStruct:
    """Return the type of an output that varies over every manual mesh axis that one of ``arrays`` varies over."""
    leaves = jax.tree.leaves(arrays)
    varying = frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in leaves))
    return jax.ShapeDtypeStruct(
        shape, jnp.dtype(dtype), manual_axis_type=ManualAxisType(varying=varying) if varying else None
    )
