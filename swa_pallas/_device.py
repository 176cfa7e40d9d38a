"""Backends of this package, and what is known of the GPU that a traced call will run on."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, get_abstract_mesh, use_abstract_mesh

from swa_plan import DeviceProfile, Plan
from swa_plan._device import FP8_CAPABILITY, LEAST_CAPABILITY

BACKENDS = {"pallas_triton": "portable", "xla": "ops", "interpret": "interpret"}
"""Backend names, and the plan's kernel that each one runs."""

DEVICE_KINDS = {
    "a100": "NVIDIA A100",
    "h100": "NVIDIA H100",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
    "rtx4090": "NVIDIA GeForce RTX 4090",
    "rtx5090": "NVIDIA RTX PRO 6000",
}
"""Profiles' names, and devices of that architecture that JAX knows."""


def check_backend(backend: object) -> None:
    """Check a backend's name.

    Raises:
        ValueError: no such backend.
        RuntimeError: it needs a part of JAX that this JAX no longer has.
    """
    if backend is None:
        return
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend != "xla" and not has_pallas_triton():
        raise RuntimeError(
            f"backend {backend!r} needs jax.experimental.pallas.triton, which jax {jax.__version__} does not have: "
            "use backend 'xla'"
        )


@functools.cache
def has_pallas_triton() -> bool:
    """Whether this JAX still ships Pallas lowered through Triton, deprecated since 0.11."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def lowering_profile() -> DeviceProfile | None:
    """Return the profile of the CUDA device that is lowered for: an abstract one, else this process's first GPU.

    None where neither is there. Inside ``jax.sharding.use_abstract_mesh`` the mesh's ``AbstractDevice`` decides.

    Raises:
        NotImplementedError: the GPU is older than sm_80.
    """
    abstract = getattr(get_abstract_mesh(), "abstract_device", None)
    if abstract is not None and abstract.platform == "gpu":
        return abstract_profile(abstract.device_kind, abstract.num_cores)
    return local_profile()


def abstract_profile(device_kind: str, num_cores: int | None) -> DeviceProfile | None:
    """Return the profile of a device that is known by name only; None where the name says nothing."""
    words = device_kind.lower().split()
    for name in DEVICE_KINDS:
        if name in words or name in "".join(words):
            known = DeviceProfile.named(name)
            return DeviceProfile.for_cuda(device_kind, known.capability, num_cores or known.num_sms)
    return None


@functools.cache
def local_profile() -> DeviceProfile | None:
    """Return the profile of this process's first CUDA device, or None."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:  # JAX has no other way to say that there is none
        return None
    capability = capability_of(device)
    if capability < LEAST_CAPABILITY:
        raise NotImplementedError(
            f"swa_pallas's kernels need sm_{LEAST_CAPABILITY} or newer (backend 'xla' runs anywhere), "
            f"got sm_{capability}"
        )
    return DeviceProfile.for_cuda(device.device_kind, capability, device.core_count)


def capability_of(device: Any) -> int:
    """Return a CUDA device's compute capability times ten."""
    return int(str(device.compute_capability).replace(".", ""))


def lowering_device(name: str | None, operands: Any) -> contextlib.AbstractContextManager[Any]:
    """Tell JAX which GPU is lowered for, in a process that has none; JAX asks since 0.11.

    Left to JAX (and its error) where arrays carry a mesh already, whose type the results would not fit.
    """
    kind = DEVICE_KINDS.get(name or "")
    mesh = get_abstract_mesh()
    known = getattr(mesh, "abstract_device", None) is not None or local_profile() is not None
    typed = not mesh.empty or any(not jax.typeof(leaf).sharding.mesh.empty for leaf in jax.tree.leaves(operands))
    if kind is None or known or typed:
        return contextlib.nullcontext()
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    return use_abstract_mesh(AbstractMesh((1,), ("swa_device",), abstract_device=device))


def runs_on_gpu() -> bool:
    """Whether what is called now runs on a GPU unless its arrays say otherwise, or is lowered for an abstract one."""
    if getattr(get_abstract_mesh(), "abstract_device", None) is not None:
        return True
    default = getattr(jax.config, "jax_default_device", None)
    platform = jax.default_backend() if default is None else getattr(default, "platform", default)
    return platform in ("gpu", "cuda")


def converts_fp8(plan: Plan | None = None) -> bool:
    """Whether the device of a plan (or the one that is lowered for) converts fp8 e4m3 in hardware; unknown ones do."""
    device = "" if plan is None else plan.device
    profile = DeviceProfile.named(device) if device in DEVICE_KINDS else lowering_profile()
    return profile is None or profile.capability == 0 or profile.capability >= FP8_CAPABILITY
