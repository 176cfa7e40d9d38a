"""Dtypes by name, for NumPy: ``ml_dtypes`` supplies bfloat16 and the two fp8 formats.

Names are used because a torch dtype, a JAX dtype and a NumPy dtype of one name mean the same bits.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from swa_plan._problem import QUANTISED_DTYPES, QUERY_DTYPES

_NUMPY = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}

INT8_MAX = 127
"""int8 caches are symmetric: -128 is never stored."""


def numpy_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the NumPy dtype of a name such as ``"bfloat16"`` or ``"float8_e4m3fn"``, or of any NumPy dtype."""
    return _NUMPY[dtype] if isinstance(dtype, str) and dtype in _NUMPY else np.dtype(dtype)


def is_quantised(dtype: np.dtype) -> bool:
    """Whether a cache of ``dtype`` stores ``x / scale``."""
    return dtype.name in QUANTISED_DTYPES


def is_compute(dtype: np.dtype) -> bool:
    """Whether ``dtype`` is one that queries come in."""
    return dtype.name in QUERY_DTYPES


def finite_max(dtype: np.dtype) -> float:
    """Return the largest magnitude that ``append`` stores in a cache of ``dtype``."""
    return float(INT8_MAX) if dtype == np.int8 else float(ml_dtypes.finfo(dtype).max)
