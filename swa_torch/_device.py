"""Which device a call runs on, what the planner may know of it, and which backend serves it."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from typing import Any

import torch

from swa_plan import DeviceProfile
from swa_plan._device import LEAST_CAPABILITY
from swa_plan._hopper import HOPPER_CAPABILITY

BACKENDS = {"triton": "portable", "gluon": "hopper", "cpu": "ops", "interpret": "interpret"}
"""Backend names, and the plan's kernel that each one runs."""

GPU_BACKENDS = ("triton", "gluon")

GLUON_TRITONS = ((3, 6), (3, 9))
"""Oldest and newest Triton whose Gluon the Hopper kernel is written in: names of it move from release to release."""


@functools.lru_cache(maxsize=64)
def cuda_profile(index: int) -> DeviceProfile:
    """Return the profile of a CUDA device.

    Raises:
        NotImplementedError: the device is older than sm_80 or is driven by HIP.
    """
    if torch.version.hip is not None:
        raise NotImplementedError("swa_torch's kernels need an NVIDIA GPU, got a HIP device")
    properties = torch.cuda.get_device_properties(index)
    capability = properties.major * 10 + properties.minor
    if capability < LEAST_CAPABILITY:
        raise NotImplementedError(f"swa_torch's kernels need sm_{LEAST_CAPABILITY} or newer, got sm_{capability}")
    return DeviceProfile.for_cuda(properties.name, capability, properties.multi_processor_count)


def memory_gbps(properties: Any) -> int | None:
    """Return the memory's peak rate in GB/s as the driver tells it, two transfers a clock; None where it does not."""
    clock_khz = getattr(properties, "memory_clock_rate", None) or 0
    return int(2 * clock_khz * (getattr(properties, "memory_bus_width", None) or 0) / 8 / 1e6) or None


def device_profile(device: torch.device) -> DeviceProfile:
    """Return the profile of ``device``.

    Raises:
        NotImplementedError: there is no kernel for that kind of device.
    """
    if device.type == "cuda":
        return cuda_profile(device.index if device.index is not None else torch.cuda.current_device())
    if device.type in ("cpu", "meta"):
        return DeviceProfile.named("cpu")
    raise NotImplementedError(f"swa_torch runs on CUDA and CPU devices, got {device}")


def choose_kernel(device: torch.device, backend: str | None) -> str:
    """Return the plan's kernel that serves ``backend`` on ``device``.

    None takes ``triton`` on a GPU, else ``cpu``, or ``interpret`` in a process that asked Triton to interpret.

    Raises:
        ValueError: no such backend, or it does not run on that device.
        NotImplementedError: the backend is not for that chip or that Triton.
        RuntimeError: Triton is needed and missing.
    """
    if backend is None:
        backend = "triton" if device.type == "cuda" else "interpret" if interpreter_is_on() else "cpu"
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    on_gpu = backend in GPU_BACKENDS
    if on_gpu != (device.type == "cuda"):
        needs = "tensors on a CUDA device" if on_gpu else "tensors on the CPU"
        raise ValueError(f"backend {backend!r} needs {needs}, got {device}")
    if backend != "cpu":
        require_triton(interpreted=backend == "interpret")
    if backend == "gluon":
        require_hopper(device)
    return BACKENDS[backend]


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of ``device`` is being captured into a graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def interpreter_is_on() -> bool:
    """Whether Triton runs (or would run, once imported) its interpreter instead of compiling."""
    if "triton" in sys.modules:
        from swa_torch._triton._pieces import widen

        return type(widen).__name__ == "InterpretedFunction"
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def refuse_interpreted_bfloat16(**tensors: torch.Tensor | None) -> None:
    """Refuse bf16 under Triton's interpreter, whose bf16 products are wrong and whose casts to bf16 truncate.

    Raises:
        TypeError: naming the first bf16 tensor.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype == torch.bfloat16:
            raise TypeError(
                f"{name} must not be bfloat16 with backend 'interpret', whose bf16 arithmetic is wrong: "
                "use float16 or float32, or backend 'cpu', got bfloat16"
            )


def require_triton(*, interpreted: bool) -> None:
    """Check that Triton is installed and in the mode that the backend needs.

    Raises:
        RuntimeError: Triton is missing.
        ValueError: Triton compiles where it should interpret, or the reverse.
    """
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        raise RuntimeError("this backend needs Triton, which is not installed: pip install 'triton>=3.6'")
    if interpreted != interpreter_is_on():
        if interpreted:
            raise ValueError(
                "backend 'interpret' needs TRITON_INTERPRET=1 in the environment before triton is first imported"
            )
        raise ValueError(
            "backends 'triton' and 'gluon' compile kernels, but TRITON_INTERPRET=1 was set when triton was imported"
        )


def require_hopper(device: torch.device) -> None:
    """Check that the Gluon kernel runs here.

    Raises:
        NotImplementedError: the device is not an sm_90, or the kernel is not written in this Triton's Gluon.
    """
    import triton

    reason = why_no_gluon(device_profile(device).capability, triton.__version__)
    if reason is not None:
        raise NotImplementedError(f"backend 'gluon' {reason}; backend 'triton' runs here")


def why_no_gluon(capability: int, triton_version: str) -> str | None:
    """Return why the Hopper kernel does not run on such a chip or with such a Triton, None if it does."""
    if capability != HOPPER_CAPABILITY:
        return f"needs an sm_{HOPPER_CAPABILITY} device, got sm_{capability}"
    oldest, newest = GLUON_TRITONS
    if not oldest <= tuple(int(number) for number in re.findall(r"\d+", triton_version)[:2]) <= newest:
        release = " to ".join(f"{major}.{minor}" for major, minor in dict.fromkeys(GLUON_TRITONS))
        return f"is written in the Gluon of Triton {release}, got Triton {triton_version}"
    return None
