"""The steps that are run, and their data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from swa_plan.cases import CASES as CASES
from swa_plan.cases import Case as Case
from swa_plan.cases import Inputs, by_name, make_inputs, random_case

DEFAULT_SEED = 1

BRIEF: tuple[Case, ...] = tuple(
    map(
        by_name,
        (
            "window-edge",
            "window-none",
            "empty-requests",
            "verify-gate",
            "ragged",
            "kv-range-empty",
            "sinks-short",
            "fp8-softcap",
            "int8-packed-layers",
            "layout-pages-kv",
            "invalid-page",
            "dim-96-96",
        ),
    )
)
"""A dozen named cases that meet each feature, for backends that take about a second a case."""


def case_names() -> tuple[str, ...]:
    """Return the names of ``CASES``, to parametrize a test with."""
    return tuple(case.name for case in CASES)


def random_cases(count: int, *, seed: int = DEFAULT_SEED) -> list[Case]:
    """Return ``count`` random legal combinations of features; the ``repr`` of each is all that makes it again."""
    rng = np.random.default_rng(seed)
    return [random_case(rng) for _ in range(count)]


def inputs(
    case: Case | str,
    backend: str | None = None,
    *,
    seed: int = DEFAULT_SEED,
    poison: bool = True,
    dtype: str | None = None,
) -> Inputs:
    """Return a case's arrays, in NumPy (``ml_dtypes`` for bfloat16 and fp8).

    Args:
        case: a case, or the name of one of ``CASES``.
        backend: the backend that they are for: ``interpret`` gets fp16 in place of bf16, because the bf16 arithmetic of
            Triton's interpreter is wrong.
        seed: of the random numbers.
        poison: whether what must not be read holds NaN and absurd table entries. The visible data are the same bits
            either way, and so must be the results.
        dtype: name of the query's dtype, in place of the case's.

    Raises:
        ValueError: no case has that name.
    """
    case = by_name(case) if isinstance(case, str) else case
    dtype = dtype or case.dtype
    if backend == "interpret":
        no_bfloat16 = {"bfloat16": "float16"}
        case = replace(
            case,
            gate_dtype=no_bfloat16.get(case.gate_dtype, case.gate_dtype),
            out_dtype=no_bfloat16.get(case.out_dtype or "", case.out_dtype),
        )
        dtype = no_bfloat16.get(dtype, dtype)
    return make_inputs(case, seed=seed, poison=poison, dtype=dtype)
