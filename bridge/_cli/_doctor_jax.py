"""What ``swa doctor`` says of JAX: its devices, the backend that serves ``swa_pallas`` and why, and traps."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from bridge._cli import _frameworks
from swa_plan._device import LEAST_CAPABILITY

TESTED = ("0.10.2", "0.11.2", "0.12.0.1")
"""Versions of JAX that the tests run with."""

DEPRECATED_SINCE = (0, 11)
"""From this JAX on, jax.experimental.pallas.triton is deprecated."""


@dataclass(frozen=True)
class Seen:
    """What JAX shows.

    Attributes:
        devices: JAX's devices; CUDA's have ``capability``, ``num_sms`` and ``id`` (their number among the CUDA devices
            of the process), for others these are None.
        pallas_triton: whether this JAX has ``jax.experimental.pallas.triton``.
        orders: whether its CUDA client, if there is one, can order its work by other libraries' streams.
        x64: whether it has 64-bit types.
        error: why JAX or ``swa_pallas`` cannot be imported or started, or None.
    """

    devices: list[dict[str, Any]] = field(default_factory=list)
    pallas_triton: bool = False
    orders: bool = True
    x64: bool = False
    error: str | None = None


def look() -> Seen:
    """Start JAX and look, without taking a GPU's memory."""
    if not _frameworks.installed("jax"):
        return Seen()
    try:
        with _frameworks.small_jax():
            import jax

            from swa_pallas._device import has_pallas_triton

            local = jax.local_devices()
            try:
                cuda = jax.local_devices(backend="cuda")
            except RuntimeError:  # JAX has no other way to say that there is none
                cuda = []
    except (ImportError, RuntimeError) as error:
        return Seen(error=" ".join(str(error).split()))
    return Seen(
        devices=[_describe(device, device in cuda) for device in local],
        pallas_triton=has_pallas_triton(),
        orders=all(map(_orders, cuda)),
        x64=jax.dtypes.canonicalize_dtype("int64") == "int64",
    )


def cuda_devices(seen: Seen) -> list[dict[str, Any]]:
    """Return the CUDA devices among those that JAX shows."""
    return [device for device in seen.devices if device["capability"] is not None]


def report(versions: dict[str, str | None], seen: Seen) -> dict[str, Any]:
    """Return the section as values that JSON has."""
    backend, reason = choose_backend(versions, seen)
    return {
        **asdict(seen),
        "backend": backend,
        "reason": reason,
        "tested": None if versions["jax"] is None else release(versions["jax"]) in map(release, TESTED),
        "preallocates": preallocates(seen),
    }


def choose_backend(versions: dict[str, str | None], seen: Seen) -> tuple[str | None, str]:
    """Return the backend that serves a call of ``swa_pallas`` on this machine, and why."""
    version = versions["jax"]
    if version is None:
        return None, "jax is not installed: pip install 'swa-decode[jax]'"
    if seen.error is not None:
        return None, f"jax {version} does not start: {seen.error}"
    gpus = cuda_devices(seen)
    if not gpus:
        kinds = sorted({device["platform"] for device in seen.devices})
        return "xla", f"JAX computes on {', '.join(kinds) or 'nothing'}, no CUDA device"
    if not seen.pallas_triton:
        return "xla", f"jax {version} has no jax.experimental.pallas.triton any more"
    name, capability = gpus[0]["name"], gpus[0]["capability"]
    if capability < LEAST_CAPABILITY:
        return "xla", f"{name} is sm_{capability}; the kernels need sm_{LEAST_CAPABILITY} or newer: ask for 'xla'"
    reason = f"sm_{capability} ({name})"
    if release(version) >= DEPRECATED_SINCE:
        reason += "; JAX deprecates it since 0.11, and 'xla' serves where a later JAX has dropped it"
    return "pallas_triton", reason


def traps(versions: dict[str, str | None]) -> list[str]:
    """Return a line for each known trap of JAX alone that this machine is near."""
    version = versions["jax"]
    if version is None:
        return []
    oldest, newest = TESTED[0], TESTED[-1]
    if release(version, 3) < release(oldest, 3):
        return [f"jax {version} is older than {oldest}, the oldest that is tested"]
    if release(version) not in map(release, TESTED):
        return [f"jax {version} is not tested ({', '.join(TESTED)} are)" + _newer(version, newest)]
    return []


def preallocates(seen: Seen) -> bool:
    """Tell whether a process started like this one would give JAX most of a GPU's memory."""
    return bool(cuda_devices(seen)) and _frameworks.preallocates(os.environ)


def release(version: str, numbers: int = 2) -> tuple[int, ...]:
    """Return the first numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:numbers])


def _newer(version: str, newest: str) -> str:
    return ": newer than all of them" if release(version) > release(newest) else ""


def _describe(device: Any, is_cuda: bool) -> dict[str, Any]:
    from swa_pallas._device import capability_of

    return {
        "platform": device.platform,
        "name": device.device_kind,
        "capability": capability_of(device) if is_cuda else None,
        "num_sms": device.core_count if is_cuda else None,
        "id": device.local_hardware_id if is_cuda else None,
    }


def _orders(device: Any) -> bool:
    import jax

    try:
        device.get_stream_for_external_ready_events()
    except jax.errors.JaxRuntimeError:
        return False
    return True
