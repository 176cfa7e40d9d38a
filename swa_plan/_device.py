"""What the planner knows of a device.

Numbers are the vendors' public ones, in units that stay integers so that a profile can be part of a plan's provenance.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_CAPABILITY = 80
"""What the kernels of both frameworks need."""

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
    """

    name: str
    capability: int
    num_sms: int
    shared_memory: int
    l2_bytes: int
    memory_gbps: int

    @classmethod
    def named(cls, name: str) -> DeviceProfile:
        """Return a known profile.

        Raises:
            ValueError: no profile has that name.
        """
        try:
            return _KNOWN[name.lower()]
        except KeyError:
            raise ValueError(f"name must be one of {', '.join(sorted(_KNOWN))}, got {name!r}") from None

    @classmethod
    def for_cuda(cls, device_name: str, capability: int, num_sms: int) -> DeviceProfile:
        """Return the profile of a CUDA device as its driver describes it; unknown chips get their family's limits."""
        words = device_name.lower().replace("-", " ").split()
        for known in _KNOWN.values():
            if known.capability == capability and (known.name in words or known.name in "".join(words)):
                shared_memory = shared_memory_limit(capability)
                return cls(known.name, capability, num_sms, shared_memory, known.l2_bytes, known.memory_gbps)
        return cls(device_name, capability, num_sms, shared_memory_limit(capability), 32 << 20, 1000)


def shared_memory_limit(capability: int) -> int:
    """Return the bytes of shared memory a block may use (CUDA programming guide, table of capabilities)."""
    if capability in (90, 100, 103):
        return 227 << 10
    if capability in (80, 87):
        return 163 << 10
    return 99 << 10


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
