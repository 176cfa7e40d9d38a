"""A paged cache: the memory as it was allocated, and the layout that says where K and V lie in it.

The compact base travels (to ops, to other frameworks); strided views of K and V are derived from it on demand.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from swa_plan import CacheLayout

_VIEWS_LAYOUT = CacheLayout("pages block kv_heads dim")
"""What ``from_kv`` wraps, parsed once."""

REMEMBERED_VIEWS = 1024


class PagedCache:
    """Keys and values in pages.

    Args:
        base: the tensor that holds K and V, or a ``(key, value)`` tuple of two where the layout has no ``kv`` axis.
        layout: axis names, outermost first, such as ``"pages kv_heads block (kv dim)"``.
        k_dim: key head size; only a ``(kv dim)`` layout with unequal sizes needs it.
        v_dim: value head size, likewise.

    Attributes:
        bases: the tensors as given, one or two.
        layout: the parsed ``CacheLayout``.
        pages, block, kv_heads, k_dim, v_dim, layers: sizes; ``layers`` is None without such an axis.
        is_views: whether this was made from views whose base is unknown (``from_kv``).

    Raises:
        TypeError: a base is not a tensor, or the dtypes differ.
        ValueError: shapes do not fit the layout, or a last stride is not 1.
    """

    def __init__(
        self,
        base: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        layout: str | CacheLayout,
        *,
        k_dim: int | None = None,
        v_dim: int | None = None,
    ) -> None:
        self.bases = tuple(base) if isinstance(base, (tuple, list)) else (base,)
        for tensor in self.bases:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"base must be a torch tensor or two of them, got {type(tensor).__name__}")
            if tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
                raise ValueError(f"base must have a last stride of 1, got strides {tuple(tensor.stride())}")
        first, last = self.bases[0], self.bases[-1]
        if first.dtype != last.dtype:
            raise TypeError(f"key and value caches must have one dtype, got {first.dtype} and {last.dtype}")
        if first.device != last.device:
            raise ValueError(f"key and value caches must be on one device, got {first.device} and {last.device}")
        self.layout = CacheLayout.parse(layout)
        sizes = self.layout.sizes([tensor.shape for tensor in self.bases], k_dim=k_dim, v_dim=v_dim)
        self.pages, self.block, self.kv_heads, self.k_dim, self.v_dim, self.layers = sizes
        self.is_views = False
        self.dtype = first.dtype
        self.device = first.device
        self._views: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def from_kv(cls, key_cache: torch.Tensor, value_cache: torch.Tensor) -> PagedCache:
        """Wrap two ``[pages, block, kv_heads, dim]`` tensors or views; no base is guessed from them."""
        cache = cls((key_cache, value_cache), _VIEWS_LAYOUT)
        cache.is_views = True
        return cache

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
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> PagedCache:
        """Allocate an uninitialised cache.

        Args:
            layout: axis names, see ``CacheLayout``.
            pages: pages of the pool.
            block: tokens in a page.
            kv_heads: heads of the cache.
            k_dim: key head size.
            v_dim: value head size; None means ``k_dim``.
            layers: layers, where the layout has such an axis.
            dtype: stored dtype.
            device: where to allocate; None means torch's default.
        """
        parsed = CacheLayout.parse(layout)
        v_size = k_dim if v_dim is None else v_dim
        shapes = parsed.shape(pages=pages, block=block, kv_heads=kv_heads, k_dim=k_dim, v_dim=v_size, layers=layers)
        bases = tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
        return cls(bases if len(bases) == 2 else bases[0], parsed, k_dim=k_dim, v_dim=v_size)

    def views(self, layer: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ``[pages, block, kv_heads, dim]`` views of K and V, of one layer where the layout has layers.

        Raises:
            TypeError: ``layer`` is not an integer.
            ValueError: ``layer`` is missing, superfluous or out of range.
        """
        if torch.compiler.is_compiling() or isinstance(self.bases[0], FakeTensor):
            return layer_views(self.bases, self.layout, self.k_dim, self.v_dim, layer)
        key = (layer, type(layer), *[base.data_ptr() for base in self.bases])  # a generator would take longer
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= REMEMBERED_VIEWS:
                self._views.clear()
            found = self._views[key] = layer_views(self.bases, self.layout, self.k_dim, self.v_dim, layer)
        return found

    @property
    def key_cache(self) -> torch.Tensor:
        """K as ``[pages, block, kv_heads, k_dim]``; with layers use ``views(layer)``."""
        return self.views()[0]

    @property
    def value_cache(self) -> torch.Tensor:
        """V as ``[pages, block, kv_heads, v_dim]``; with layers use ``views(layer)``."""
        return self.views()[1]

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(base.shape)) for base in self.bases)
        return f"PagedCache({self.layout.spec!r}, {shapes}, {self.dtype}, {self.device})"


def layer_views(
    bases: tuple[torch.Tensor, ...], layout: CacheLayout, k_dim: int, v_dim: int, layer: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 4-D views of K and V in ``bases``."""
    key_cache, value_cache = layout.views(bases, k_dim=k_dim, v_dim=v_dim, layer=layer)
    return key_cache, value_cache


Cache = PagedCache | tuple[torch.Tensor, torch.Tensor]
"""What every entry point takes: a ``PagedCache``, or K and V as ``[pages, block, kv_heads, dim]``."""


def cache_views(cache: Cache, layer: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 4-D views of K and V of whatever a caller passed; a plain pair is checked later, with the query."""
    if isinstance(cache, tuple) and len(cache) == 2 and layer is None:
        return cache
    return as_paged_cache(cache).views(layer)


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
