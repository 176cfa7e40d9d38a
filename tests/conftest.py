"""What a process must set before JAX starts, and which tests a machine can run."""

import os
from importlib.util import find_spec

import pytest

# JAX takes most of a GPU's memory at once otherwise, and PyTorch starves.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Plans in tests come from the shipped profiles, whatever this machine's owner has measured.
os.environ["SWA_DECODE_CONFIG"] = ""
# Several devices of the CPU: what a test of sharding needs.
_HOST_DEVICES = "--xla_force_host_platform_device_count"
if _HOST_DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_HOST_DEVICES}=4".strip()

_DEVICES = {"gpu": (1, "needs a CUDA device"), "gpu2": (2, "needs two CUDA devices")}
_FOLDERS = {"torch": ("torch", "failures/torch"), "jax": ("jax", "failures/jax")}
_ABSENT = {framework: "is not installed" for framework in _FOLDERS if find_spec(framework) is None}
_LEFT_OUT = dict(_ABSENT)
if os.environ.get("TRITON_INTERPRET") == "1":
    _LEFT_OUT.setdefault("jax", "has no part in a process in which Triton interprets")

collect_ignore = [folder for framework in _LEFT_OUT for folder in _FOLDERS[framework]]


def pytest_report_header():
    return [f"not collected, {name} {reason}: {', '.join(_FOLDERS[name])}" for name, reason in _LEFT_OUT.items()]


def pytest_collection_modifyitems(items):
    marked = [item for item in items if any(item.get_closest_marker(marker) for marker in _DEVICES)]
    present = _cuda_devices() if marked else 0
    for item in marked:
        for marker, (needed, reason) in _DEVICES.items():
            if item.get_closest_marker(marker) and present < needed:
                item.add_marker(pytest.mark.skip(reason=reason))


def _cuda_devices() -> int:
    """Return how many CUDA devices a framework sees."""
    counts = [0]
    if "torch" not in _ABSENT:
        import torch

        counts.append(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if "jax" not in _ABSENT:
        import jax

        counts.append(len(jax.local_devices()) if jax.default_backend() == "gpu" else 0)
    return max(counts)
