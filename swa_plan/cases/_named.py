"""The named cases: what a step computes, then how it is stored, features singly and in the pairs that share code."""

from __future__ import annotations

from swa_plan.cases._case import Case
from swa_plan.cases._semantics import SEMANTICS
from swa_plan.cases._storage import STORAGE

CASES: tuple[Case, ...] = (*SEMANTICS, *STORAGE)
"""All named cases."""


def by_name(name: str) -> Case:
    """Return the named case.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(f"name must be one of {', '.join(case.name for case in CASES)}, got {name!r}")
