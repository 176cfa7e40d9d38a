"""Backends by name and framework, and whether the framework is here; nothing is imported to find out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec

from swa_plan import DeviceProfile

AUTO = "auto"
KERNELS = {
    "torch": {"triton": "portable", "gluon": "hopper", "cpu": "ops", "interpret": "interpret"},
    "jax": {"pallas_triton": "portable", "xla": "ops"},
}
"""Backends by framework, and the plan's kernel that each one runs.

A name belongs to one framework: ``interpret`` is torch's (``swa_pallas`` has one too, for tests of its kernel).
"""

PACKAGES = {"torch": "swa_torch", "jax": "swa_pallas"}
BACKENDS = (AUTO, *(name for names in KERNELS.values() for name in names))
HELP = "auto, triton, gluon, cpu, interpret (PyTorch), pallas_triton or xla (JAX)"

CROSSED = "crossed"
"""Both frameworks on one cache, which only a replay does; it stands for backend and framework."""

REPLAY_HELP = f"{HELP}, or crossed (both in turn, on one cache)"

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


def framework_of(backend: str) -> str | None:
    """Return the framework of a backend's name; None for ``auto``.

    Raises:
        ValueError: no such backend.
    """
    if backend == AUTO:
        return None
    for framework, names in KERNELS.items():
        if backend in names:
            return framework
    raise ValueError(f"--backend must be {HELP}, got {backend!r}")


def kernel_of(backend: str) -> str | None:
    """Return the plan's kernel that a backend runs; None for ``auto``.

    Raises:
        ValueError: no such backend.
    """
    framework = framework_of(backend)
    return None if framework is None else KERNELS[framework][backend]


def backends_of(kernel: str, backend: str) -> dict[str, str]:
    """Return which backend of which package runs a plan's kernel: the one that was asked for, or all of them."""
    asked = framework_of(backend)
    return {
        PACKAGES[framework]: name
        for framework, names in KERNELS.items()
        for name, runs in names.items()
        if runs == kernel and asked in (None, framework)
    }


def dependent_launch(backend: str) -> bool:
    """Tell whether a backend's kernels start while the ones before them end: XLA's never do."""
    return framework_of(backend) != "jax"


def installed(framework: str) -> bool:
    """Tell whether a framework can be imported."""
    return find_spec(framework) is not None


def require(backend: str) -> str:
    """Return the framework that runs a replay's backend; for ``auto``, torch where it is installed, else JAX.

    Returns:
        ``torch``, ``jax``, or ``crossed`` for both.

    Raises:
        ValueError: no such backend, or a framework of it is not installed.
    """
    if backend == CROSSED:
        missing = [name for name in KERNELS if not installed(name)]
        if missing:
            raise ValueError(
                f"--backend crossed needs torch and jax, and {' and '.join(missing)} cannot be imported: "
                f"pip install 'swa-decode[{','.join(missing)}]'"
            )
        return CROSSED
    if backend not in BACKENDS:
        raise ValueError(f"--backend must be {REPLAY_HELP}, got {backend!r}")
    framework = framework_of(backend)
    if framework is None:
        found = next((name for name in KERNELS if installed(name)), None)
        if found is None:
            raise ValueError("replay needs torch or jax: pip install 'swa-decode[torch]' or 'swa-decode[jax]'")
        return found
    if not installed(framework):
        raise ValueError(f"--backend {backend} needs {framework}: pip install 'swa-decode[{framework}]'")
    return framework


def preallocates(environment: Mapping[str, str]) -> bool:
    """Tell whether JAX would take most of a GPU's memory when it starts."""
    if environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower() == "platform":
        return False
    return environment.get(_PREALLOCATE, "") not in ("false", "False", "0")


@contextmanager
def small_jax() -> Iterator[None]:
    """Keep a JAX that starts inside from taking the GPU's memory, because looking needs none."""
    given = os.environ.get(_PREALLOCATE)
    os.environ[_PREALLOCATE] = "false"
    try:
        yield
    finally:
        if given is None:
            del os.environ[_PREALLOCATE]
        else:
            os.environ[_PREALLOCATE] = given


def this_gpu() -> DeviceProfile | None:
    """Return the profile of this machine's GPU, as torch sees it, or JAX where torch is not installed."""
    if installed("torch"):
        import torch

        if not torch.cuda.is_available() or torch.version.hip is not None:
            return None
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        capability = properties.major * 10 + properties.minor
        return DeviceProfile.for_cuda(properties.name, capability, properties.multi_processor_count)
    if installed("jax"):
        with small_jax():
            from swa_pallas._device import local_profile

            return local_profile()
    return None


def interpret() -> None:
    """Make Triton interpret; it looks at this once, when it is imported."""
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
