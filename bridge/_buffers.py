"""A session's buffers: each tree once as torch sees it, and as flat arrays and a structure for JAX."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import torch

import swa_pallas
import swa_torch
from bridge._caches import is_cache, parts, with_bases
from bridge._exchange import check_tensor, share, to_torch


@dataclass
class Buffer:
    """One registered name.

    Attributes:
        name: as registered.
        leaves: the buffer in torch: tensors and ``swa_torch.PagedCache``s.
        outer: the caller's structure around the leaves.
        tensors: the leaves' tensors, in the order of ``arrays``.
        structure: how JAX puts arrays in that order together.
        addresses: where the tensors lay at registration, and must lie always.
        arrays: JAX's views of the tensors; a step that updates the buffer replaces them.
    """

    name: str
    leaves: list[Any]
    outer: Any
    tensors: list[torch.Tensor]
    structure: Any
    addresses: list[int] = field(init=False)
    arrays: list[jax.Array] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]

    def tree(self) -> Any:
        """Return the buffer as torch's, in a container of its own."""
        return jax.tree.unflatten(self.outer, self.leaves)

    def imported(self) -> list[jax.Array]:
        """Import every tensor; programs that use the arrays run after what torch's current stream holds."""
        return [share(f"buffers[{self.name!r}]", tensor) for tensor in self.tensors]

    def view(self) -> None:
        """Replace JAX's views."""
        self.arrays = self.imported()

    def check_in_place(self) -> None:
        """Check that no tensor was given other memory (``set_``, ``.data = ...``, ``resize_``).

        Raises:
            RuntimeError: one was; JAX works on the old one.
        """
        found = [tensor.data_ptr() for tensor in self.tensors]
        if found != self.addresses:
            moved, address = next(pair for pair in zip(found, self.addresses, strict=True) if pair[0] != pair[1])
            raise RuntimeError(
                f"buffers[{self.name!r}] must stay where it was registered, got a tensor moved from {address:#x} to "
                f"{moved:#x} (by set_, .data = or resize_): register it in a new session"
            )


def register(buffers: Mapping[str, Any]) -> dict[str, Buffer]:
    """Return the buffers by name, checked; JAX's views are made later.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``to_jax`` and ``to_torch``; or two buffers overlap.
    """
    if not isinstance(buffers, Mapping):
        raise TypeError(f"buffers must map names to tensors, arrays or caches, got {type(buffers).__name__}")
    registered = {}
    for name, tree in buffers.items():
        if not isinstance(name, str):
            raise TypeError(f"buffers must have strings for names, got {name!r}")
        registered[name] = _register(name, tree)
    _check_apart([(buffer.name, tensor) for buffer in registered.values() for tensor in buffer.tensors])
    return registered


def _register(name: str, tree: Any) -> Buffer:
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_cache)
    if not leaves:
        raise ValueError(f"buffers[{name!r}] must hold at least one tensor or array, got {tree!r}")
    ours = [_in_torch(f"buffers[{name!r}]", leaf) for leaf in leaves]
    tensors = [tensor for leaf in ours for tensor in parts(leaf)]
    for tensor in tensors:
        check_tensor(f"buffers[{name!r}]", tensor)
    # Only the structure is wanted: PagedCaches of JAX with any arrays of the right shape in them.
    likeness = jax.tree.unflatten(structure, [_likeness(leaf) for leaf in ours])
    return Buffer(name, ours, structure, tensors, jax.tree.structure(likeness))


def _in_torch(name: str, leaf: Any) -> Any:
    """Return a leaf as torch's; JAX's memory is exported."""
    if isinstance(leaf, (jax.Array, swa_pallas.PagedCache)):
        # Once and for all streams, so that the first step's stream has nothing of JAX to wait for.
        return to_torch(jax.block_until_ready(leaf))
    if isinstance(leaf, (torch.Tensor, swa_torch.PagedCache)):
        return leaf
    raise TypeError(f"{name} must hold tensors, arrays and PagedCaches only, got {type(leaf).__name__}")


def _likeness(leaf: Any) -> Any:
    def spec(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    specs = [spec(tensor) for tensor in parts(leaf)]
    return with_bases(swa_pallas.PagedCache, leaf, specs) if is_cache(leaf) else specs[0]


def _check_apart(named: list[tuple[str, torch.Tensor]]) -> None:
    """Check that no two tensors overlap: JAX would be given one memory twice, once perhaps to write."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), name)
        for name, tensor in named
        if tensor.numel()
    )
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(
                f"buffers must not share memory with each other, got {first!r} and {second!r} that overlap"
            )
