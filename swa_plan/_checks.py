"""Small argument checks shared by the planner, the reference and both frameworks.

Every message names the argument, the rule and the value it got, because a caller reads it far from this file.
"""

from __future__ import annotations

import math
from numbers import Integral, Real

FP32_MAX = 3.4028234663852886e38
FP32_TINY = 1.1754943508222875e-38
"""The largest and the smallest normal magnitudes of fp32."""


def check_integer(name: str, value: object, *, minimum: int, maximum: int | None = None) -> int:
    """Return ``value`` as an ``int``.

    Raises:
        TypeError: ``value`` is a bool or not an integer.
        ValueError: ``value`` is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    number = int(value)
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {number}")
    return number


def check_window(window: object) -> int | None:
    """Return ``window`` (keys a row sees, its own included) or None for full causal attention."""
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, Integral):
        raise TypeError(
            f"window must be an integer that counts the query's own position, or None for full causal attention, "
            f"got {window!r} of type {type(window).__name__}"
        )
    if window < 1:
        raise ValueError(
            f"window must be at least 1 (it counts the query's own position; None means full causal attention), "
            f"got {window}"
        )
    return int(window)


def check_head_dim(name: str, dim: object) -> int:
    """Return a head size: a multiple of 16 up to 256."""
    size = check_integer(name, dim, minimum=16, maximum=256)
    if size % 16:
        raise ValueError(f"{name} must be a multiple of 16 up to 256, got {size}")
    return size


def check_heads(heads: object, kv_heads: object) -> tuple[int, int]:
    """Return ``(heads, kv_heads)`` with ``heads`` a positive multiple of ``kv_heads``."""
    kv_count = check_integer("kv_heads", kv_heads, minimum=1)
    head_count = check_integer("heads", heads, minimum=1)
    if head_count % kv_count:
        raise ValueError(f"heads must be a multiple of kv_heads, got heads={head_count} and kv_heads={kv_count}")
    return head_count, kv_count


def check_real(name: str, value: object) -> float:
    """Return a number that is finite in fp32.

    Raises:
        TypeError: not a real number.
        ValueError: not finite.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= FP32_MAX:
        raise ValueError(f"{name} must be finite in float32, got {value}")
    return number


def check_positive(name: str, value: float) -> float:
    """Return a number that is positive in fp32.

    Raises:
        ValueError: it is not, or so small that fp32 has no normal number for it.
    """
    if value < FP32_TINY:
        raise ValueError(f"{name} must be positive (at least {FP32_TINY:.3g}), got {value}")
    return value


def check_softcap(softcap: object) -> float | None:
    """Return a positive cap or None."""
    if softcap is None:
        return None
    return check_positive("softcap", check_real("softcap", softcap))
