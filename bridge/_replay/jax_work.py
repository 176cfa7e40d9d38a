"""What a replay on JAX compiles: pure functions of the cache, of rows and of a random key.

A layer's operands are arrays of their own, as in a model, so that nothing is sliced out of a stack.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import swa_pallas
from bridge._replay.engine import ReplayConfig
from swa_plan import CacheLayout, Plan

PREFILL_ROWS = 256
"""Slots that one call of ``fill`` takes."""


class Rows(NamedTuple):
    """What a step decodes: one array a layer, ``[tokens, heads, dim]`` (gate: ``[tokens, heads]``, or none)."""

    query: tuple[jax.Array, ...]
    key: tuple[jax.Array, ...]
    value: tuple[jax.Array, ...]
    gate: tuple[jax.Array, ...] | None


class Work:
    """The functions for one configuration.

    Args:
        config: what is replayed.
        backend: backend of ``append``; that of ``attend`` is its plan's.
    """

    def __init__(self, config: ReplayConfig, backend: str) -> None:
        self._config = config
        self._backend = backend
        self._scales: dict[str, Any] = dict(config.scales)
        self._axes = CacheLayout.parse(config.layout).axes

    def draw(self, key: jax.Array, tokens: int) -> tuple[jax.Array, Rows]:
        """Return the next key and normal data for ``tokens`` rows of every layer."""
        config, model = self._config, self._config.model
        shapes = [(model.heads, model.k_dim), (model.kv_heads, model.k_dim), (model.kv_heads, model.v_dim)]
        shapes += [(model.heads,)] if model.gate else []
        sizes = [config.layers * tokens * math.prod(shape) for shape in shapes]
        key, own = jax.random.split(key)
        # One draw for all: what draws takes XLA longer to compile than the step itself.
        numbers = jax.random.normal(own, (sum(sizes),), jnp.dtype(config.dtype))
        parts = jnp.split(numbers, np.cumsum(sizes)[:-1].tolist())
        arrays = [tuple(part.reshape(config.layers, tokens, *shape)) for part, shape in zip(parts, shapes, strict=True)]
        return key, Rows(arrays[0], arrays[1], arrays[2], arrays[3] if model.gate else None)

    def append(self, cache: Any, keys: tuple[jax.Array, ...], values: tuple[jax.Array, ...], slots: jax.Array) -> Any:
        """Return the cache with the rows of every layer in their slots."""
        for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
            cache = swa_pallas.append(
                cache, key, value, slots, layer=self._layer(layer), backend=self._backend, **self._scales
            )
        return cache

    def attend(
        self,
        cache: Any,
        queries: tuple[jax.Array, ...],
        gates: tuple[jax.Array, ...] | None,
        sinks: jax.Array | None,
        table: jax.Array,
        lengths: jax.Array,
        *,
        plan: Plan,
    ) -> tuple[Any, ...]:
        """Return the output of every layer."""
        model = self._config.model
        return tuple(
            swa_pallas.swa_decode(
                query,
                cache,
                table,
                lengths,
                window=model.window,
                gate=None if gates is None else gates[layer],
                sinks=sinks,
                softcap=model.softcap,
                query_len=model.query_len,
                layer=self._layer(layer),
                plan=plan,
                **self._scales,
            )
            for layer, query in enumerate(queries)
        )

    def fill(self, key: jax.Array, cache: Any, slots: jax.Array) -> tuple[jax.Array, Any]:
        """Return the next key and the cache with random rows in ``PREFILL_ROWS`` slots, in every layer."""
        key, rows = self.draw(key, PREFILL_ROWS)
        return key, self.append(cache, rows.key, rows.value, slots)

    def spoil(self, cache: Any, pages: jax.Array) -> Any:
        """Return the cache with poison in ``pages``, in every layer; a page beyond the cache is left out."""
        index = (*[slice(None)] * self._axes.index("pages"), pages)
        return jax.tree.map(lambda base: base.at[index].set(poison(base.dtype), mode="drop"), cache)

    def look(self, cache: Any, pages: jax.Array, layer: jax.Array) -> tuple[jax.Array, ...]:
        """Return the bases cut down to ``pages``, and to one layer where there are layers."""
        found = tuple(jnp.take(base, pages, axis=self._axes.index("pages"), mode="clip") for base in cache.bases)
        if "layers" not in self._axes:
            return found
        return tuple(lax.dynamic_slice_in_dim(base, layer, 1, self._axes.index("layers")) for base in found)

    def _layer(self, layer: int) -> jax.Array | None:
        """Return the layer as an array, so that all layers share one trace and one kernel."""
        return jnp.asarray(layer, jnp.int32) if "layers" in self._axes else None


def poison(dtype: Any) -> float:
    """Return NaN, or the largest int8."""
    return jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 127
