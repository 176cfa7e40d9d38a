"""Paged caches of either framework as what they are made of: their bases, and how to put bases into the other kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import swa_pallas
import swa_torch


def is_cache(leaf: Any) -> bool:
    """Whether a leaf is a cache of either framework."""
    return isinstance(leaf, (swa_torch.PagedCache, swa_pallas.PagedCache))


def parts(leaf: Any) -> tuple[Any, ...]:
    """Return a cache's bases, or an array itself."""
    return leaf.bases if is_cache(leaf) else (leaf,)


def with_bases(kind: Any, like: Any, bases: Sequence[Any]) -> Any:
    """Return a cache of one framework's kind with the layout and head sizes of ``like``, on other bases."""
    return kind(tuple(bases) if len(bases) == 2 else bases[0], like.layout, k_dim=like.k_dim, v_dim=like.v_dim)
