"""Where K and V lie in a paged cache: one parser, from which every view, stride and index map follows.

A layout is a string of axis names, outermost first, in the style of einops: ``pages``, ``block``, ``kv_heads``,
``dim``, ``kv`` (the K/V pair) and ``layers`` (a whole model in one allocation). ``(kv dim)`` puts K's ``k_dim`` and V's
``v_dim`` side by side in the last axis. Without ``kv`` the cache is two arrays of the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from swa_plan._checks import check_head_dim, check_integer

LAYOUTS = (
    "pages block kv_heads dim",
    "pages kv_heads block dim",
    "kv pages block kv_heads dim",
    "pages kv block kv_heads dim",
    "pages kv_heads block (kv dim)",
    "pages block kv_heads (kv dim)",
)
"""The layouts that serving engines use; each also exists with ``layers`` in front or after ``pages``."""

PACKED = "(kv dim)"
_VIEW_AXES = ("pages", "block", "kv_heads")
_OUTER_AXES = (*_VIEW_AXES, "kv", "layers")


class Sizes(NamedTuple):
    """Sizes of a cache's axes; ``layers`` is None where the layout has no such axis."""

    pages: int
    block: int
    kv_heads: int
    k_dim: int
    v_dim: int
    layers: int | None


class Selection(NamedTuple):
    """How to view K or V: index base number ``base``, then permute its axes to pages, block, kv_heads, dim."""

    base: int
    indices: tuple[int | slice, ...]
    permutation: tuple[int, ...]


@dataclass(frozen=True)
class CacheLayout:
    """A parsed layout.

    Attributes:
        spec: the layout string, normalised to single spaces.
        axes: axis names, outermost first; the last is ``dim`` or ``(kv dim)``.

    Raises:
        TypeError: ``spec`` is not a string.
        ValueError: an axis is unknown, missing or repeated, or the last axis is neither ``dim`` nor ``(kv dim)``.
    """

    spec: str
    axes: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.spec, str):
            raise TypeError(f"layout must be a string of axis names, got {self.spec!r}")
        spec = " ".join(self.spec.replace("(", " ( ").replace(")", " ) ").split())
        spec = spec.replace("( ", "(").replace(" )", ")")
        packed = spec.endswith(PACKED)
        axes = (*spec.removesuffix(PACKED).split(), PACKED) if packed else tuple(spec.split()) or ("",)
        object.__setattr__(self, "spec", spec)
        object.__setattr__(self, "axes", axes)
        *outer, last = self.axes
        rule = f"one of pages, block, kv_heads, kv, layers each at most once, then dim or {PACKED}"
        if last not in ("dim", PACKED) or any(axis not in _OUTER_AXES for axis in outer):
            raise ValueError(f"layout must name {rule}, got {self.spec!r}")
        missing = [axis for axis in _VIEW_AXES if axis not in outer]
        if len(set(outer)) != len(outer) or missing:
            raise ValueError(f"layout must name pages, block and kv_heads once and nothing twice, got {self.spec!r}")
        if self.packed and "kv" in outer:
            raise ValueError(f"layout must name kv once, got {self.spec!r}")

    @classmethod
    def parse(cls, layout: str | CacheLayout) -> CacheLayout:
        """Return ``layout`` as a ``CacheLayout``."""
        return layout if isinstance(layout, cls) else cls(layout)  # type: ignore[arg-type]

    @property
    def packed(self) -> bool:
        """Whether K and V share the last axis."""
        return self.axes[-1] == PACKED

    @property
    def bases(self) -> int:
        """Arrays that hold the cache: 1, or 2 where K and V are separate."""
        return 1 if self.packed or "kv" in self.axes else 2

    @property
    def has_layers(self) -> bool:
        """Whether one allocation holds all layers of a model."""
        return "layers" in self.axes

    def shape(
        self, *, pages: int, block: int, kv_heads: int, k_dim: int, v_dim: int, layers: int | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each base.

        Raises:
            ValueError: a size is out of range, ``layers`` is given without a ``layers`` axis or the reverse, or a plain
                ``kv`` axis would need ``k_dim == v_dim``.
        """
        check_integer("pages", pages, minimum=0)
        check_integer("block", block, minimum=1)
        check_integer("kv_heads", kv_heads, minimum=1)
        self._check_dims(k_dim, v_dim)
        if self.has_layers != (layers is not None):
            rule = "must be given" if self.has_layers else "must be left out"
            raise ValueError(f"layers {rule} for layout {self.spec!r}, got {layers}")
        if layers is not None:
            check_integer("layers", layers, minimum=1)
        outer = {"pages": pages, "block": block, "kv_heads": kv_heads, "kv": 2, "layers": layers}
        lasts = (k_dim + v_dim,) if self.packed else (k_dim, v_dim)[: self.bases]
        return tuple((*(outer[axis] or 0 for axis in self.axes[:-1]), last) for last in lasts)

    def sizes(self, shapes: Sequence[Sequence[int]], *, k_dim: int | None = None, v_dim: int | None = None) -> Sizes:
        """Read the sizes off the bases' shapes.

        Args:
            shapes: one shape per base.
            k_dim: key head size; only a packed layout needs it (there it defaults to half of the last axis).
            v_dim: value head size, likewise.

        Raises:
            ValueError: number of bases, rank or a size does not fit the layout.
        """
        if len(shapes) != self.bases:
            raise ValueError(f"layout {self.spec!r} takes {self.bases} array(s), got {len(shapes)}")
        for number, shape in enumerate(shapes):
            if len(shape) != len(self.axes):
                raise ValueError(
                    f"base {number} must have the {len(self.axes)} axes of layout {self.spec!r}, "
                    f"got shape {tuple(shape)}"
                )
        axis = {name: index for index, name in enumerate(self.axes)}
        outer = [tuple(shape[:-1]) for shape in shapes]
        if outer[0] != outer[-1]:
            raise ValueError(
                f"key and value caches must agree in every axis but the last, "
                f"got shapes {tuple(shapes[0])} and {tuple(shapes[1])}"
            )
        first = shapes[0]
        if "kv" in axis and first[axis["kv"]] != 2:
            raise ValueError(f"axis kv of layout {self.spec!r} must have size 2, got shape {tuple(first)}")
        k_size, v_size = self._last_axes([shape[-1] for shape in shapes], k_dim, v_dim)
        layers = first[axis["layers"]] if self.has_layers else None
        return Sizes(first[axis["pages"]], first[axis["block"]], first[axis["kv_heads"]], k_size, v_size, layers)

    def select(self, kv: int, *, k_dim: int, v_dim: int, layer: int | None = None) -> Selection:
        """Return how to view K (``kv=0``) or V (``kv=1``) as ``[pages, block, kv_heads, dim]``.

        Raises:
            ValueError: ``layer`` is given without a ``layers`` axis or missing with one.
        """
        if self.has_layers != (layer is not None):
            rule = "must be given" if self.has_layers else "must be left out"
            raise ValueError(f"layer {rule} for layout {self.spec!r}, got {layer}")
        index: list[int | slice] = []
        kept: list[str] = []
        for axis in self.axes:
            if axis == "kv":
                index.append(kv)
            elif axis == "layers":
                assert layer is not None
                index.append(layer)
            else:
                index.append(slice(None) if axis != PACKED else (slice(k_dim) if kv == 0 else slice(k_dim, None)))
                kept.append("dim" if axis == PACKED else axis)
        permutation = tuple(kept.index(axis) for axis in (*_VIEW_AXES, "dim"))
        return Selection(kv if self.bases == 2 else 0, tuple(index), permutation)

    def views(
        self, bases: Sequence[Any], *, k_dim: int | None = None, v_dim: int | None = None, layer: int | None = None
    ) -> tuple[Any, Any]:
        """Return the ``[pages, block, kv_heads, dim]`` views of K and V of NumPy arrays or torch tensors."""
        sizes = self.sizes([base.shape for base in bases], k_dim=k_dim, v_dim=v_dim)
        if layer is not None and sizes.layers is not None:
            check_integer("layer", layer, minimum=0, maximum=sizes.layers - 1)
        views = []
        for kv in (0, 1):
            base, index, permutation = self.select(kv, k_dim=sizes.k_dim, v_dim=sizes.v_dim, layer=layer)
            view = bases[base][index]
            views.append(view.permute(permutation) if hasattr(view, "permute") else view.transpose(permutation))
        return views[0], views[1]

    def _check_dims(self, k_dim: int, v_dim: int) -> None:
        check_head_dim("k_dim", k_dim)
        check_head_dim("v_dim", v_dim)
        if "kv" in self.axes and k_dim != v_dim:
            raise ValueError(
                f"a kv axis holds keys and values of one size; use {PACKED} or two arrays for k_dim != v_dim, "
                f"got k_dim={k_dim} and v_dim={v_dim}"
            )

    def _last_axes(self, lasts: list[int], k_dim: int | None, v_dim: int | None) -> tuple[int, int]:
        if self.packed:
            total = lasts[0]
            if k_dim is None and v_dim is None:
                if total % 2:
                    raise ValueError(f"axis {PACKED} must hold k_dim + v_dim values; name k_dim, got size {total}")
                k_dim = total // 2
            k_size = total - v_dim if k_dim is None and v_dim is not None else k_dim
            assert k_size is not None
            v_size = total - k_size if v_dim is None else v_dim
        else:
            k_size, v_size = lasts[0], lasts[-1]
        if (
            (k_dim not in (None, k_size))
            or (v_dim not in (None, v_size))
            or (self.packed and k_size + v_size != lasts[0])
        ):
            raise ValueError(
                f"the last axis of layout {self.spec!r} has size {', '.join(map(str, lasts))}, "
                f"got k_dim={k_dim} and v_dim={v_dim}"
            )
        self._check_dims(k_size, v_size)
        return k_size, v_size
