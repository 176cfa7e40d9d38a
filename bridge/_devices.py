"""Devices of both frameworks: which are the same, and which cannot be shared or ordered."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import torch

GPU_ALIGNMENT, CPU_ALIGNMENT = 16, 64
"""Bytes that XLA wants an address to be a multiple of. On a GPU it does not check before a program runs."""

LEGACY_DEFAULT_STREAM = 1
"""DLPack's number for the stream that CUDA counts as 0."""

CAPTURE_RECIPE = (
    "a stream under CUDA graph capture cannot wait for JAX: capture what torch does before and after the step as "
    "graphs of their own, and run the JAX step between their replays"
)


def alignment_of(device: torch.device) -> int:
    """Return the bytes that a shared address must be a multiple of."""
    return GPU_ALIGNMENT if device.type == "cuda" else CPU_ALIGNMENT


def check_torch_device(name: str, device: torch.device) -> None:
    """Check that a torch device is one that JAX can share.

    Raises:
        NotImplementedError: HIP.
        ValueError: neither ``cpu`` nor ``cuda``.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on the CPU or a CUDA device, got device {str(device)!r}")
    if device.type == "cuda" and torch.version.hip is not None:
        raise NotImplementedError(f"{name} must be on an NVIDIA GPU, got HIP {torch.version.hip}")


def jax_device_of(name: str, device: torch.device) -> Any:
    """Return JAX's device for a torch device: the one with the same number in this process.

    Raises:
        ValueError: JAX does not see it.
        NotImplementedError: JAX's client has no streams to order by.
    """
    platform = "cuda" if device.type == "cuda" else "cpu"
    index = device.index or 0
    current = torch.cuda.current_device() if platform == "cuda" else None
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError as error:  # JAX has no other way to say that a platform is missing
        raise ValueError(
            f"{name} must be on a device that JAX sees too, got {str(device)!r} and a JAX without {platform} "
            f"({error}): install a CUDA build of jaxlib, or include cuda in JAX_PLATFORMS"
        ) from None
    if current is not None and torch.cuda.current_device() != current:
        torch.cuda.set_device(current)  # a JAX that starts leaves the thread on its last GPU
    if platform == "cpu":
        return devices[0]
    for candidate in devices:
        if candidate.local_hardware_id == index:
            check_client(candidate)
            return candidate
    seen = ", ".join(f"cuda:{candidate.local_hardware_id}" for candidate in devices)
    raise ValueError(f"{name} must be on a device that JAX sees too ({seen}), got {str(device)!r}")


def check_client(device: Any) -> None:
    """Check that JAX can order its work on a GPU by other libraries' streams; its TFRT client cannot.

    Raises:
        NotImplementedError: it cannot.
    """
    try:
        device.get_stream_for_external_ready_events()
    except Exception as error:
        if "UNIMPLEMENTED" not in str(error):
            raise
        raise NotImplementedError(
            f"JAX's client must order its work by CUDA streams, got one that cannot ({error}): the TFRT client; leave "
            "use_tfrt_gpu_client out of jax_pjrt_client_create_options and XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT unset"
        ) from None


def check_not_capturing(device: torch.device) -> None:
    """Check that torch's current stream, on its current device, is not recording a CUDA graph.

    Raises:
        RuntimeError: with the way to do it instead.
    """
    if is_capturing(device):
        raise RuntimeError(CAPTURE_RECIPE)


def is_capturing(device: torch.device) -> bool:
    """Whether torch's current stream, on its current device, is recording a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a CUDA device torch's current one: it exports from that alone, and is asked about its stream there."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()
