"""A paged cache as a pytree: the arrays as they were allocated are its leaves, how to read them is static.

Kernels take the whole base and find K and V in it by index map: no view of it is ever made.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import PartitionSpec

from swa_plan import CacheLayout
from swa_plan._layout import Sizes

_PAIR = CacheLayout("pages block kv_heads dim")
"""What ``from_kv`` wraps, parsed once."""


@jax.tree_util.register_pytree_with_keys_class
class PagedCache:
    """Keys and values in pages; a pytree whose leaves are the base(s) and nothing else.

    Args:
        base: the array that holds K and V, or a ``(key, value)`` tuple of two where the layout has no ``kv`` axis.
        layout: axis names, outermost first, such as ``"pages kv_heads block (kv dim)"``.
        k_dim: key head size; only a ``(kv dim)`` layout with unequal sizes needs it.
        v_dim: value head size, likewise.

    Attributes:
        bases: the arrays, one or two (inside transformations whatever JAX puts in their place).
        layout: the parsed ``CacheLayout``.
        pages, block, kv_heads, k_dim, v_dim, layers: sizes, read off the bases' shapes; ``layers`` is None without
            such an axis. Under ``shard_map`` they are the local ones.

    Raises:
        TypeError: a base is not an array, or the dtypes differ.
        ValueError: shapes do not fit the layout.
    """

    def __init__(
        self,
        base: jax.Array | tuple[jax.Array, jax.Array],
        layout: str | CacheLayout,
        *,
        k_dim: int | None = None,
        v_dim: int | None = None,
    ) -> None:
        self.bases: tuple[Any, ...] = tuple(base) if isinstance(base, (tuple, list)) else (base,)
        for array in self.bases:
            if not isinstance(array, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
                raise TypeError(f"base must be a JAX array or two of them, got {type(array).__name__}")
        if self.bases[0].dtype != self.bases[-1].dtype:
            raise TypeError(
                f"key and value caches must have one dtype, got {self.bases[0].dtype} and {self.bases[-1].dtype}"
            )
        self.layout = CacheLayout.parse(layout)
        shapes = [array.shape for array in self.bases]
        sizes = self.layout.sizes(shapes, k_dim=k_dim, v_dim=v_dim)
        self._dims = _static_dims(self.layout, sizes.k_dim, sizes.v_dim)

    @classmethod
    def from_kv(cls, key_cache: jax.Array, value_cache: jax.Array) -> PagedCache:
        """Wrap two ``[pages, block, kv_heads, dim]`` arrays."""
        return cls((key_cache, value_cache), _PAIR)

    @classmethod
    def empty(
        cls,
        layout: str | CacheLayout,
        *,
        pages: int,
        block: int,
        kv_heads: int,
        k_dim: int,
        v_dim: int | None = None,
        layers: int | None = None,
        dtype: Any = jnp.bfloat16,
        device: Any = None,
    ) -> PagedCache:
        """Allocate a cache (of zeros: JAX has no uninitialised memory).

        Args:
            layout: axis names, see ``CacheLayout``.
            pages: pages of the pool.
            block: tokens in a page.
            kv_heads: heads of the cache.
            k_dim: key head size.
            v_dim: value head size; None means ``k_dim``.
            layers: layers, where the layout has such an axis.
            dtype: stored dtype.
            device: a device, or a ``Sharding`` for the base(s).
        """
        parsed = CacheLayout.parse(layout)
        v_size = k_dim if v_dim is None else v_dim
        shapes = parsed.shape(pages=pages, block=block, kv_heads=kv_heads, k_dim=k_dim, v_dim=v_size, layers=layers)
        bases = tuple(jnp.zeros(shape, dtype, device=device) for shape in shapes)
        return cls(bases if len(bases) == 2 else bases[0], parsed, k_dim=k_dim, v_dim=v_size)

    @functools.cached_property
    def sizes(self) -> Sizes:
        """Sizes of the axes, read off the bases once."""
        k_dim, v_dim = self._dims
        return self.layout.sizes([base.shape for base in self.bases], k_dim=k_dim, v_dim=v_dim)

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self.sizes.pages

    @property
    def block(self) -> int:
        """Tokens in a page."""
        return self.sizes.block

    @property
    def kv_heads(self) -> int:
        """Heads of the cache."""
        return self.sizes.kv_heads

    @property
    def k_dim(self) -> int:
        """Key head size."""
        return self.sizes.k_dim

    @property
    def v_dim(self) -> int:
        """Value head size."""
        return self.sizes.v_dim

    @property
    def layers(self) -> int | None:
        """Layers, or None without such an axis."""
        return self.sizes.layers

    @property
    def dtype(self) -> Any:
        """Stored dtype."""
        return self.bases[0].dtype

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        """Return the bases with their names, and what is static."""
        names = ("base",) if len(self.bases) == 1 else ("key", "value")
        children = [(jax.tree_util.GetAttrKey(name), base) for name, base in zip(names, self.bases, strict=True)]
        return children, (self.layout, self._dims)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], bases: Sequence[Any]) -> PagedCache:
        """Put bases of any kind (arrays, tracers, specs, ``ShapeDtypeStruct``) back."""
        cache = object.__new__(cls)
        cache.layout, cache._dims = static
        cache.bases = tuple(bases)
        return cache

    def __repr__(self) -> str:
        bases = ", ".join(f"{getattr(base, 'dtype', '')}{list(getattr(base, 'shape', ()))}" for base in self.bases)
        return f"PagedCache({self.layout.spec!r}, {bases})"


def _serialise(static: tuple[Any, ...]) -> bytes:
    layout, dims = static
    return json.dumps([layout.spec, *dims]).encode()


def _deserialise(data: bytes | bytearray) -> tuple[Any, ...]:
    spec, *dims = json.loads(data)
    return CacheLayout.parse(spec), tuple(dims)


# So that an exported function may take and return caches.
export.register_pytree_node_serialization(
    PagedCache,
    serialized_name="swa_pallas.PagedCache",
    serialize_auxdata=_serialise,
    deserialize_auxdata=_deserialise,
)


def _static_dims(layout: CacheLayout, k_dim: int | None, v_dim: int | None) -> tuple[int | None, int | None]:
    """Return the head sizes that the bases' shapes do not tell."""
    return (k_dim, v_dim) if layout.packed and k_dim != v_dim else (None, None)


Cache = PagedCache | tuple[jax.Array, jax.Array]
"""What every entry point takes: a ``PagedCache``, or K and V as ``[pages, block, kv_heads, dim]``."""


def as_paged_cache(cache: Cache) -> PagedCache:
    """Return ``cache`` as a ``PagedCache``.

    Raises:
        TypeError: ``cache`` is neither a ``PagedCache`` nor a tuple of two.
    """
    if isinstance(cache, PagedCache):
        return cache
    if not isinstance(cache, (tuple, list)) or len(cache) != 2:
        raise TypeError(f"cache must be a PagedCache or a (key_cache, value_cache) tuple, got {type(cache).__name__}")
    return PagedCache.from_kv(*cache)


def cache_specs(
    layout: str | CacheLayout,
    *,
    kv_heads: Any = None,
    pages: Any = None,
    k_dim: int | None = None,
    v_dim: int | None = None,
) -> PagedCache:
    """Return a ``PagedCache`` of ``PartitionSpec``s: what ``jax.shard_map`` takes for a cache of this layout.

    Args:
        layout: axis names of the cache.
        kv_heads: mesh axis (or axes) that the heads are sharded over.
        pages: mesh axis (or axes) that the pages are sharded over; each shard then has a pool and a table of its own.
        k_dim: key head size, where a ``(kv dim)`` layout has unequal sizes.
        v_dim: value head size, likewise.
    """
    parsed = CacheLayout.parse(layout)
    sharded = {"kv_heads": kv_heads, "pages": pages}
    spec = PartitionSpec(*(sharded.get(axis) for axis in parsed.axes))
    if (k_dim is None) != (v_dim is None):
        raise ValueError(f"k_dim and v_dim must be given together, got k_dim={k_dim} and v_dim={v_dim}")
    return PagedCache.tree_unflatten((parsed, _static_dims(parsed, k_dim, v_dim)), [spec] * parsed.bases)
