"""What ``swa doctor`` says of the bridge: versions, devices that both frameworks see, what works, what to mend."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

from bridge import _versions
from bridge._cli import _frameworks
from bridge._cli._doctor_jax import Seen, cuda_devices

MEANINGS = {
    "order tested": "order tested on a GPU",
    "values tested": "values tested on a CPU, order on a GPU was not",
    "untested": "untested",
    "refused": "refused",
}
"""The status of a pair of versions, in words."""

DEFAULT_FRACTION = 0.75
"""What JAX takes of a GPU's memory when nothing else is said."""

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
"""Distributions of JAX's CUDA builds."""


def report(
    versions: Mapping[str, str | None],
    torch_devices: list[dict[str, Any]],
    hip: str | None,
    seen: Seen,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Return the section as values that JSON has.

    Args:
        versions: installed versions, None where absent.
        torch_devices: CUDA devices as torch sees them, in its order, each with ``memory_bytes``.
        hip: torch's HIP version, or None.
        seen: what JAX shows.
        environment: variables of the process.

    Returns:
        ``versions`` (the pair's status, or None), ``meaning`` (in words), ``devices`` (that both see, in torch's
        names), ``works`` (for each kind of device), ``int64`` (whether it crosses), ``preallocated_bytes`` (that JAX
        takes of each GPU at its start, else 0) and ``problems`` (what is wrong, and how to mend it).
    """
    missing = [name for name in ("torch", "jax") if versions[name] is None]
    broken = [] if seen.error is None else [f"JAX does not start: {seen.error}"]
    if missing or broken:
        problems = broken or [f"{name} is not installed: pip install 'swa-decode[{name}]'" for name in missing]
        return _section(None, "needs both frameworks", problems=problems)
    torch, jax = str(versions["torch"]), str(versions["jax"])
    try:
        status, refusal = _versions.pair_of(torch, jax).status, None
    except NotImplementedError as error:
        status, refusal = "refused", f"{error}: install a newer one"
    meaning = f"{MEANINGS[status]} (torch {torch}, jax {jax})"
    if refusal is not None:
        return _section(status, meaning, problems=[refusal])
    shared = [] if hip is not None else _shared(torch_devices, seen)
    taken = _preallocated(torch_devices, environment) if shared else 0
    problems = [] if hip is None else [f"torch is built for HIP {hip}: only the CPU's memory is shared"]
    if hip is None:
        problems += _devices_apart(torch_devices, seen, environment)
    problems += _on_shared_gpus(status, shared, seen, taken)
    if status == "untested" and not shared:
        problems.append(f"torch {torch} with jax {jax} was never tested: run the tests in tests/bridge, or {_tested()}")
    works = {"cpu": ["exchange", "session", "updates with copy=True"]}
    if shared and seen.orders:
        needs = "" if status == "order tested" else " with allow_untested=True"
        works["cuda"] = ["exchange", f"session{needs}", "updates in place"]
    return _section(
        status, meaning, devices=shared, works=works, int64=seen.x64, preallocated_bytes=taken, problems=problems
    )


def lines(section: dict[str, Any]) -> list[str]:
    """Return the section for a person, without its problems."""
    said = [section["meaning"]]
    names = {"cpu": "the CPU", "cuda": ", ".join(section["devices"])}
    said += [f"on {names[kind]}: {', '.join(what)}" for kind, what in section["works"].items()]
    if section["works"] and not section["int64"]:
        said.append("int64 does not cross: tables and lengths in int32, or JAX_ENABLE_X64=1")
    return said


def _section(status: str | None, meaning: str, **found: Any) -> dict[str, Any]:
    nothing = {"devices": [], "works": {}, "int64": False, "preallocated_bytes": 0, "problems": []}
    return {"versions": status, "meaning": meaning, **nothing, **found}


def _shared(torch_devices: list[dict[str, Any]], seen: Seen) -> list[str]:
    theirs = {device["id"] for device in cuda_devices(seen)}
    return [f"cuda:{index}" for index in range(len(torch_devices)) if index in theirs]


def _devices_apart(torch_devices: list[dict[str, Any]], seen: Seen, environment: Mapping[str, str]) -> list[str]:
    """Say which GPUs only one framework sees, and why."""
    ours = [f"cuda:{index}" for index in range(len(torch_devices))]
    theirs = [f"cuda:{device['id']}" for device in cuda_devices(seen)]
    if ours == theirs:
        return []
    if not ours:
        return [
            "JAX sees a CUDA device and torch does not: install a CUDA build of torch, or look at CUDA_VISIBLE_DEVICES"
        ]
    if theirs:
        return [
            f"torch sees {', '.join(ours)} and JAX sees {', '.join(theirs)}: choose devices for both at once with "
            "CUDA_VISIBLE_DEVICES, not with JAX_CUDA_VISIBLE_DEVICES"
        ]
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and platforms.split(",")[0] not in ("cuda", "gpu"):
        mend = f"JAX_PLATFORMS={platforms} puts another first: unset it, or put cuda in front"
    elif not any(map(_installed, PLUGINS)):
        mend = "its jaxlib is for the CPU alone: pip install 'jax[cuda13]' or 'jax[cuda12]', as torch's CUDA is"
    else:
        mend = "JAX_PLATFORMS=cuda makes JAX say why; look at CUDA_VISIBLE_DEVICES and at the driver's version"
    return [f"torch sees a CUDA device and JAX does not: {mend}"]


def _on_shared_gpus(status: str, shared: list[str], seen: Seen, taken: int) -> list[str]:
    """Say what hinders the bridge on the GPUs that both frameworks see."""
    if not shared:
        return []
    problems = []
    if not seen.orders:
        problems.append(
            "JAX's TFRT client has no streams to order by, so nothing on a GPU is exchanged: leave use_tfrt_gpu_client "
            "out of JAX_PJRT_CLIENT_CREATE_OPTIONS, and XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT unset"
        )
    if status != "order tested":
        problems.append(
            "a Session on a GPU wants versions whose order was tested: "
            f"{_tested()}, or run the tests in tests/bridge here and pass allow_untested=True"
        )
    if taken:
        problems.append(
            f"JAX takes {taken / 2**30:.0f} GiB of each GPU when it starts, and torch in the same process starves: set "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false, or a small XLA_CLIENT_MEM_FRACTION such as .25, before JAX starts"
        )
    return problems


def _preallocated(torch_devices: list[dict[str, Any]], environment: Mapping[str, str]) -> int:
    """Return the bytes that JAX would take of the smallest GPU when it starts."""
    if not _frameworks.preallocates(environment):
        return 0
    given = environment.get("XLA_CLIENT_MEM_FRACTION") or environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    try:
        fraction = float(given) if given else DEFAULT_FRACTION
    except ValueError:  # JAX will say so itself when it starts
        fraction = DEFAULT_FRACTION
    return int(fraction * min(device["memory_bytes"] for device in torch_devices))


def _tested() -> str:
    pairs = " or ".join(f"torch {torch} with jax {jax}" for torch, jax in _versions.ORDER_TESTED)
    return f"install {pairs}"


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
