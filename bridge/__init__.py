"""One paged cache in PyTorch and JAX at once: exchange without a copy, order without a race, parity, and ``swa``.

The only package that may import both frameworks, and it does so when a name that needs them is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge import parity as parity
    from bridge._exchange import to_jax as to_jax
    from bridge._exchange import to_torch as to_torch
    from bridge._session import Session as Session

_MODULES = {"to_jax": "bridge._exchange", "to_torch": "bridge._exchange", "Session": "bridge._session"}
__all__ = ["Session", "parity", "to_jax", "to_torch"]


def __getattr__(name: str) -> Any:
    if name == "parity":
        return importlib.import_module("bridge.parity")
    if name not in _MODULES:
        raise AttributeError(f"module 'bridge' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
