"""What the planner knows of a device.

Sizes and rates are the vendors' public ones. What a plan costs on an H200 was measured; for other chips its constants
are scaled by their memory's rate, until ``swa tune`` measures them and stores what it found.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from swa_plan._costs import Costs
from swa_plan._profiles import PROFILE_FIELDS, stored_profile

LEAST_CAPABILITY = 80
"""What the kernels of both frameworks need."""

DEPENDENT_LAUNCH_CAPABILITY = 90
"""Programmatic dependent launch exists from sm_90 on."""

FP8_CAPABILITY = 89
"""Chips before sm_89 cannot convert fp8 e4m3 themselves; there the kernels take it as bits."""


@dataclass(frozen=True)
class DeviceProfile:
    """A device as the planner sees it.

    Attributes:
        name: short name, such as ``h200``.
        capability: CUDA compute capability times ten (90 for sm_90); 0 for a CPU.
        num_sms: multiprocessors.
        shared_memory: most bytes of shared memory a block can have.
        l2_bytes: size of the L2 cache.
        memory_gbps: peak memory bandwidth in GB/s.
        costs: what the parts of a plan take; None takes the H200's, scaled by bandwidth.
    """

    name: str
    capability: int
    num_sms: int
    shared_memory: int
    l2_bytes: int
    memory_gbps: int
    costs: Costs = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.costs is None:
            object.__setattr__(self, "costs", scaled_costs(self.memory_gbps, self.num_sms))

    @property
    def shared_per_sm(self) -> int:
        """Bytes of shared memory of a multiprocessor: what one block may have, and the kilobyte that CUDA keeps."""
        return self.shared_memory + 1024

    @classmethod
    def named(cls, name: str) -> DeviceProfile:
        """Return a shipped profile, whatever was measured here.

        Raises:
            ValueError: no profile has that name.
        """
        try:
            return _KNOWN[name.lower()]
        except KeyError:
            raise ValueError(f"name must be one of {', '.join(sorted(_KNOWN))}, got {name!r}") from None

    @classmethod
    def for_cuda(cls, device_name: str, capability: int, num_sms: int, memory_gbps: int | None = None) -> DeviceProfile:
        """Return the profile of a CUDA device as its driver describes it: the one that ``swa tune`` stored, if any.

        Else the shipped one of that chip; unknown chips get their family's limits. ``memory_gbps`` is the driver's
        word, where it gives one; a known chip's public number comes first.
        """
        stored = stored_profile(device_name, capability, num_sms)
        if stored is not None:
            return cls(**{name: getattr(stored, name) for name in PROFILE_FIELDS})
        return cls.shipped(device_name, capability, num_sms, memory_gbps)

    @classmethod
    def shipped(cls, device_name: str, capability: int, num_sms: int, memory_gbps: int | None = None) -> DeviceProfile:
        """Return what ``for_cuda`` returns where nothing is stored."""
        words = device_name.lower().replace("-", " ").split()
        for known in _KNOWN.values():
            if known.capability == capability and (known.name in words or known.name in "".join(words)):
                shared_memory = shared_memory_limit(capability)
                return cls(known.name, capability, num_sms, shared_memory, known.l2_bytes, known.memory_gbps)
        memory_gbps = memory_gbps or _FAMILY_GBPS.get(capability, _UNKNOWN_GBPS)
        return cls(device_name, capability, num_sms, shared_memory_limit(capability), 32 << 20, memory_gbps)


def shared_memory_limit(capability: int) -> int:
    """Return the bytes of shared memory a block may use (CUDA programming guide, table of capabilities)."""
    if capability in (90, 100, 103):
        return 227 << 10
    if capability in (80, 87):
        return 163 << 10
    return 99 << 10


_UNKNOWN_GBPS = 1000
_FAMILY_GBPS = {80: 1935, 86: 768, 87: 205, 89: 864, 90: 3350, 100: 8000, 103: 8000, 120: 1344}
"""For chips without a profile: the public rate of a data-centre or workstation card of that capability. Both frameworks
take it, because JAX cannot ask the driver, and the same step must be planned alike."""

_MEASURED_GBPS, _MEASURED_SMS = 4800, 132


def scaled_costs(memory_gbps: int, num_sms: int) -> Costs:
    """Return the H200's costs with those of reading and writing scaled to another memory."""
    measured = Costs()
    if not memory_gbps:
        return measured
    slower = _MEASURED_GBPS / memory_gbps
    each = slower * num_sms / _MEASURED_SMS
    return replace(
        measured, stream=measured.stream * each, shallow=measured.shallow * each, tall=measured.tall * each,
        partial=measured.partial * slower,
    )  # fmt: skip


_KNOWN = {
    profile.name: profile
    for profile in (
        DeviceProfile("a100", 80, 108, 163 << 10, 40 << 20, 2039),
        DeviceProfile("h100", 90, 132, 227 << 10, 50 << 20, 3350),
        DeviceProfile("h200", 90, 132, 227 << 10, 60 << 20, 4800),
        DeviceProfile("b200", 100, 148, 227 << 10, 126 << 20, 8000),
        DeviceProfile("rtx4090", 89, 128, 99 << 10, 72 << 20, 1008),
        DeviceProfile("rtx5090", 120, 170, 99 << 10, 96 << 20, 1792),
        DeviceProfile("cpu", 0, 1, 0, 0, 0),
    )
}
