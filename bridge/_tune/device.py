"""Which CUDA device this process plans for, as its driver names it, and the profile that it gets."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from bridge._cli import _frameworks
from swa_plan import DeviceProfile, __version__
from swa_plan._profiles import StoredProfile, profile_path, stored_profile

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_RECORDED = ("torch", "triton", "numpy")


class Device(NamedTuple):
    """A kind of CUDA device.

    Attributes:
        name: as the driver names it.
        capability: compute capability times ten.
        num_sms: multiprocessors.
        memory_gbps: peak memory bandwidth, or None where the driver does not tell.
        l2_bytes: size of the L2 cache, likewise.
    """

    name: str
    capability: int
    num_sms: int
    memory_gbps: int | None = None
    l2_bytes: int | None = None

    @property
    def key(self) -> tuple[str, int, int]:
        """What a stored profile is found by."""
        return self.name, self.capability, self.num_sms

    @property
    def profile(self) -> DeviceProfile:
        """The profile that plans are made with here: the stored one, or the shipped one."""
        return DeviceProfile.for_cuda(*self.key, self.memory_gbps)

    @property
    def shipped(self) -> DeviceProfile:
        """The profile without what was stored."""
        return DeviceProfile.shipped(*self.key, self.memory_gbps)

    @property
    def stored(self) -> StoredProfile | None:
        """What was stored for this kind of device."""
        return stored_profile(*self.key)

    @property
    def file(self) -> Path | None:
        """Where it is, or would be, stored."""
        return profile_path(*self.key)

    @property
    def source(self) -> str:
        """A few words on where the profile comes from."""
        stored = self.stored
        if stored is None:
            return "shipped with swa-decode; `swa tune` measures this GPU"
        found = stored.provenance
        return (
            f"measured {found.date[:10]} with {found.plans} plans, median error {found.median_error:.1%}: {self.file}"
        )


def this_device() -> Device | None:
    """Return the CUDA device that torch would use, or JAX where torch is not installed; None without one."""
    if _frameworks.installed("torch"):
        return _torch_device()
    if _frameworks.installed("jax"):
        return _jax_device()
    return None


def versions() -> dict[str, str]:
    """Return the versions that times depend on."""
    found = {"swa-decode": __version__}
    for name in _RECORDED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def driver_version() -> str | None:
    """Return the version of NVIDIA's kernel driver, or None where this system does not tell."""
    try:
        text = _DRIVER_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else None


def _torch_device() -> Device | None:
    import torch

    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    from swa_torch._device import memory_gbps

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Device(
        properties.name,
        properties.major * 10 + properties.minor,
        properties.multi_processor_count,
        memory_gbps(properties),
        getattr(properties, "L2_cache_size", None) or None,
    )


def _jax_device() -> Device | None:
    with _frameworks.small_jax():
        import jax

        from swa_pallas._device import capability_of

        try:
            device = jax.local_devices(backend="cuda")[0]
        except RuntimeError:  # JAX has no other way to say that there is none
            return None
        return Device(device.device_kind, capability_of(device), device.core_count)
