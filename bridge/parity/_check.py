"""One case through one backend, judged: a row of ``swa check``."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from bridge.parity import _backends
from bridge.parity._backends import Result
from bridge.parity._cases import DEFAULT_SEED, inputs
from bridge.parity._judge import compare, same_bits
from swa_plan.cases import Case


@dataclass(frozen=True)
class Outcome:
    """What a backend made of a case.

    Attributes:
        case: the case's name.
        backend: the backend's name.
        dtype: name of the query's dtype.
        cache_dtype: name of the cache's dtype.
        ok: whether the result is within the tolerance rule, the bits are equal and the memory was shared.
        error: the worst |actual - expected|; infinite for a misplaced NaN or infinity, or where nothing was computed.
        bound: what the rule allows there.
        ratio: error / bound, the largest of the step.
        ulps: error in ulps of the output's dtype at the row's largest expected magnitude.
        bitwise: whether the bits equal those of ``bitwise_to``.
        bitwise_to: what they are compared with. For a crossed way, the backend whose kernel it runs: the same program
            on the same bits. For any other, its own second run, on data without poison: nothing unseen is read, and
            runs repeat.
        same_memory: for a crossed way, whether the cache's bases and all other arrays have the same address in both
            frameworks; else None.
        message: one line for a person, also when ok.
    """

    case: str
    backend: str
    dtype: str
    cache_dtype: str
    ok: bool
    error: float
    bound: float
    ratio: float
    ulps: float
    bitwise: bool
    bitwise_to: str
    same_memory: bool | None
    message: str

    @classmethod
    def failed(cls, case: Case, backend: str, reason: str) -> Outcome:
        """Return the outcome of a backend that computed nothing."""
        return cls(
            case=case.name,
            backend=backend,
            dtype=case.dtype,
            cache_dtype=case.cache_dtype or case.dtype,
            ok=False,
            error=math.inf,
            bound=math.inf,
            ratio=math.inf,
            ulps=math.inf,
            bitwise=False,
            bitwise_to="nothing",
            same_memory=None,
            message=reason,
        )

    def to_json(self) -> dict[str, Any]:
        """Return values that JSON has: an infinity is None."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Outcome:
        """Return what ``to_json`` wrote."""
        numbers = {name: values[name] for name in ("error", "bound", "ratio", "ulps")}
        return cls(**{**values, **{name: math.inf if value is None else value for name, value in numbers.items()}})


def check(case: Case | str, backend: str, *, seed: int = DEFAULT_SEED) -> Outcome:
    """Run a case twice and judge it.

    What must not be read holds NaN and absurd table entries.

    Args:
        case: a case, or the name of one of ``CASES``.
        backend: one of ``backends()``.
        seed: of the case's data.

    Returns:
        The outcome. A result that misses is an outcome that is not ok, not an error.

    Raises:
        ValueError: no such case or backend, or the backend is absent.
    """
    reason = _backends.why_absent(backend)
    if reason is not None:
        raise ValueError(f"backend {backend!r} cannot run here: {reason}")
    poisoned = inputs(case, backend, seed=seed)
    same_memory = None
    if backend in _backends.CROSSED:
        from bridge.parity._crossed import run_crossed

        bitwise_to = _backends.crossed_kernel(backend)
        result, same_memory = run_crossed(poisoned, backend)
        other = _backends.run(poisoned, bitwise_to)
    else:
        bitwise_to = f"{backend} without poison"
        result = _backends.run(poisoned, backend)
        other = _backends.run(inputs(case, backend, seed=seed, poison=False), backend)
    report = compare(result.out, poisoned, lse=result.lse)
    bitwise = _same(result, other)
    message = report.message
    if not bitwise:
        message += f"; the bits differ from {bitwise_to}"
    if same_memory is False:
        message += "; an array was copied on its way"
    return Outcome(
        case=str(case),
        backend=backend,
        dtype=poisoned.query.dtype.name,
        cache_dtype=poisoned.bases[0].dtype.name,
        ok=report.ok and bitwise and same_memory is not False,
        error=report.worst_error,
        bound=report.worst_limit,
        ratio=report.ratio,
        ulps=report.ulps,
        bitwise=bitwise,
        bitwise_to=bitwise_to,
        same_memory=same_memory,
        message=message,
    )


def _same(result: Result, other: Result) -> bool:
    if result.lse is None or other.lse is None:
        return result.lse is other.lse and same_bits(result.out, other.out)
    return same_bits(result.out, other.out) and same_bits(result.lse, other.lse)
