"""Dtypes that cross: those whose DLPack type both frameworks read alike, so that no bit is interpreted twice."""

from __future__ import annotations

import jax

SHARED = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32")
"""Names of the dtypes that always cross; they are the same in both frameworks."""

WIDE = "int64"
"""Crosses while JAX has 64-bit types; otherwise JAX would narrow it, and copy."""


def check_dtype(name: str, dtype: str) -> None:
    """Check that a dtype crosses; ``dtype`` is its name in either framework.

    Raises:
        TypeError: it does not, or only under ``jax_enable_x64``.
    """
    if dtype in SHARED or (dtype == WIDE and jax.config.read("jax_enable_x64")):
        return
    if dtype == WIDE:
        raise TypeError(
            f"{name} must not be int64 while jax_enable_x64 is off, because JAX would narrow it to int32 in a copy: "
            "use int32 (tensor.to(torch.int32)) or jax.config.update('jax_enable_x64', True), got int64"
        )
    raise TypeError(f"{name} must have a dtype that both frameworks share ({', '.join(SHARED)}, int64), got {dtype}")
