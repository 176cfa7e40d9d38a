"""Results of any framework, judged by the shipped rule and by their bits."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from swa_plan import tolerance
from swa_plan.cases import Inputs


def compare(actual: Any, inputs: Inputs, *, lse: Any = None, out_dtype: DTypeLike | None = None) -> tolerance.Report:
    """Judge a result by ``swa_plan.tolerance``, the rule that this project's own tests use.

    Per (token, head) the largest error against float64 is at most twice that of a fixed dense emulation, plus one ulp
    of the output's dtype; NaN and infinities must stand where the reference has them.

    Args:
        actual: the output ``[tokens, heads, v_dim]`` of any floating dtype, a torch tensor, a JAX array or a NumPy
            array; or ``(out, lse)``, as ``swa_decode`` returns them.
        inputs: what it was computed from.
        lse: the LSE ``[tokens, heads]`` where ``actual`` does not hold it, or None to leave it out.
        out_dtype: dtype (or name) that the output was rounded to; None means ``inputs.out_dtype``, then the query's.

    Returns:
        The report of the output or of the LSE, whichever is worse: ``ok``, ``worst_error``, ``worst_limit``,
        ``worst_at``, ``ratio``, ``ulps``, ``message``.

    Raises:
        TypeError: the LSE is given twice.
        ValueError: a shape is not the expected one.
    """
    out = actual
    if isinstance(actual, tuple):
        if lse is not None:
            raise TypeError("lse must be left out where actual is (out, lse), got both")
        out, lse = actual
    return tolerance.compare(
        to_numpy(out), inputs, out_dtype=out_dtype, actual_lse=None if lse is None else to_numpy(lse)
    )


def assert_close(actual: Any, inputs: Inputs, *, lse: Any = None, out_dtype: DTypeLike | None = None) -> None:
    """Raise an ``AssertionError`` with place, error and limit where ``compare`` is not ok; arguments as there."""
    report = compare(actual, inputs, lse=lse, out_dtype=out_dtype)
    if not report.ok:
        raise AssertionError(report.message)


def to_numpy(array: Any) -> np.ndarray:
    """Return a NumPy array with the bits of a torch tensor, a JAX array or a NumPy array, bfloat16 and fp8 included."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        from bridge.parity import _torch

        return _torch.to_numpy(array)
    return np.asarray(array)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two arrays, of whatever framework, have one dtype, one shape and the same bits."""
    left, right = to_numpy(a), to_numpy(b)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
