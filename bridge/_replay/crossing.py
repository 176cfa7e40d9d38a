"""What a replay on one cache and two frameworks tells: addresses, whose step it was, and how far outputs differ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from swa_plan import Plan

Addresses = tuple[tuple[int, int], ...]
"""For each base of the cache its address as torch and as JAX see it."""


@dataclass(frozen=True)
class Sharing:
    """What two frameworks on one cache have shared.

    Attributes:
        at_start: the cache's addresses before the first step.
        at_end: the same after the last.
        decoded_by: framework of each step: ``torch`` or ``jax``.
        backends: what runs, by framework.
        jax_plans: JAX's plan of each padded batch.
        versions: what is known of the order between the two versions, in words.
    """

    at_start: Addresses
    at_end: Addresses
    decoded_by: tuple[str, ...]
    backends: dict[str, str]
    jax_plans: dict[int, Plan]
    versions: str

    @property
    def same_memory(self) -> bool:
        """Whether both frameworks saw the cache at one address, which never changed."""
        return self.at_start == self.at_end and all(torch == jax for torch, jax in self.at_start)


@dataclass(frozen=True)
class Difference:
    """One step's rows as two frameworks decoded them from the same bytes.

    Attributes:
        values: values compared.
        equal: those of them that are the same bit by bit.
        ulps: largest difference, in ulps of the output's dtype at the row's largest magnitude.
    """

    values: int
    equal: int
    ulps: float


def difference(one: np.ndarray, other: np.ndarray) -> Difference:
    """Compare two outputs of one shape and dtype; rows are along the last axis.

    Values that differ are infinitely far apart in a row that is not finite.
    """
    size = {2: np.uint16, 4: np.uint32}[one.dtype.itemsize]
    equal = one.view(size) == other.view(size)
    with np.errstate(invalid="ignore"):
        largest = np.maximum(abs(one), abs(other)).max(axis=-1, keepdims=True)
        ulps = abs(one.astype(np.float64) - other.astype(np.float64)) / np.spacing(largest).astype(np.float64)
    ulps = np.where(equal, 0.0, np.where(np.isfinite(ulps), ulps, np.inf))
    return Difference(equal.size, int(equal.sum()), float(ulps.max()))
