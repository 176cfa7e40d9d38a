"""``swa doctor``: what is installed, what serves a call here and why, whether the bridge holds, and known traps."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bridge._cli import _doctor_bridge, _doctor_jax
from bridge._cli._console import print_json, stdout
from bridge._tune.device import Device
from bridge._versions import interpreter_fault
from swa_plan._device import LEAST_CAPABILITY

DISTRIBUTIONS = ("swa-decode", "numpy", "ml_dtypes", "torch", "triton", "jax", "jaxlib", "typer", "rich", "matplotlib")


def doctor(json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False) -> None:
    """Show versions, devices, the backend that serves here and why, what the bridge can do, and known traps."""
    versions = {"python": platform.python_version(), **{name: _version(name) for name in DISTRIBUTIONS}}
    devices, hip = _devices()
    interpreter = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
    backend, reason = choose_backend(versions, devices, hip=hip)
    gluon = why_no_gluon(versions, devices, hip=hip)
    seen = _doctor_jax.look()
    report = {
        "versions": versions,
        "platform": platform.platform(),
        "devices": devices,
        "backend": backend,
        "reason": reason,
        "gluon": {"present": gluon is None, "reason": gluon},
        "interpreter": interpreter,
        "profile": _profile([*([] if hip is not None else devices), *seen.devices]),
        "jax": _doctor_jax.report(versions, seen),
        "bridge": _doctor_bridge.report(versions, devices, hip, seen, os.environ),
        "warnings": [
            *known_traps(versions, devices, hip=hip, interpreter=interpreter),
            *_doctor_jax.traps(versions),
        ],
    }
    if json:
        print_json(report)
    else:
        _print(report, stdout())


def choose_backend(
    versions: dict[str, str | None], devices: list[dict[str, Any]], *, hip: str | None
) -> tuple[str | None, str]:
    """Return the backend that serves a call of ``swa_torch`` on this machine, and why.

    Args:
        versions: installed versions, None where absent.
        devices: CUDA devices, each with ``name`` and ``capability``.
        hip: torch's HIP version, or None.
    """
    if versions["torch"] is None:
        return None, "torch is not installed: pip install 'swa-decode[torch]'"
    if hip is not None:
        return "cpu", f"HIP {hip} is not supported"
    if not devices:
        return "cpu", "no CUDA device"
    capability = devices[0]["capability"]
    if capability < LEAST_CAPABILITY:
        return "cpu", f"{devices[0]['name']} is sm_{capability}; the kernels need sm_{LEAST_CAPABILITY} or newer"
    if versions["triton"] is None:
        return "cpu", "triton is not installed: pip install 'triton>=3.6'"
    return "triton", f"sm_{capability} ({devices[0]['name']})"


def why_no_gluon(versions: dict[str, str | None], devices: list[dict[str, Any]], *, hip: str | None) -> str | None:
    """Return why backend ``gluon`` of ``swa_torch`` cannot be asked for on this machine, None if it can."""
    backend, reason = choose_backend(versions, devices, hip=hip)
    if backend != "triton" or versions["triton"] is None:
        return reason
    from swa_torch._device import why_no_gluon

    found = why_no_gluon(devices[0]["capability"], versions["triton"])
    return None if found is None else f"it {found}"


def known_traps(
    versions: dict[str, str | None], devices: list[dict[str, Any]], *, hip: str | None, interpreter: bool
) -> list[str]:
    """Return a line for each known trap that this machine is near."""
    traps = []
    fault = interpreter_fault(versions["triton"], versions["numpy"])
    if fault is not None:
        traps.append(f"backend 'interpret' cannot run: {fault}")
    if interpreter:
        traps.append(
            "TRITON_INTERPRET is set: kernels are interpreted on the CPU, where tl.dot of bfloat16 and casts to fp8 "
            "are silently wrong: use float16 or float32, and no fp8 cache"
        )
    if hip is not None:
        traps.append(f"torch is built for HIP {hip}: the kernels are for NVIDIA GPUs")
    if _before(versions["torch"], 2, 11):
        traps.append(f"torch {versions['torch']} is older than 2.11, the oldest that is tested")
    if devices and versions["triton"] is None:
        traps.append("there is a CUDA device but no triton: the fast kernels cannot run")
    return traps


def _version(name: str) -> str | None:
    """Return the installed version without importing the package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[list[dict[str, Any]], str | None]:
    """Return the CUDA devices as torch sees them, and its HIP version."""
    if find_spec("torch") is None:
        return [], None
    import torch

    if torch.version.hip is not None or not torch.cuda.is_available():
        return [], torch.version.hip
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": properties.name,
                "capability": properties.major * 10 + properties.minor,
                "num_sms": properties.multi_processor_count,
                "memory_bytes": properties.total_memory,
            }
        )
    return devices, None


def _profile(devices: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the profile that plans are made with on the first CUDA device, and where it comes from."""
    for each in devices:
        if each["capability"] is not None and each["num_sms"] is not None:
            device = Device(each["name"], each["capability"], each["num_sms"])
            stored = device.stored
            return {
                "name": device.profile.name,
                "source": device.source,
                "file": None if stored is None else str(device.file),
            }
    return None


def _before(version: str | None, *release: int) -> bool:
    """Tell whether an installed version is older than a release; False where it is absent."""
    if version is None:
        return False
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[: len(release)])
    return numbers < release


def _print(report: dict[str, Any], console: Console) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("", style="dim")
    table.add_column("")
    for name, version in report["versions"].items():
        table.add_row(name, version or "[dim]not installed[/]")
    table.add_row("platform", report["platform"])
    for index, device in enumerate(report["devices"]):
        table.add_row(
            f"cuda:{index}",
            f"{device['name']}, sm_{device['capability']}, {device['num_sms']} SMs, "
            f"{device['memory_bytes'] / 2**30:.0f} GiB",
        )
    for index, device in enumerate(report["jax"]["devices"]):
        chip = "" if device["capability"] is None else f", sm_{device['capability']}, {device['num_sms']} SMs"
        table.add_row(f"jax {device['platform']}:{index}", device["name"] + chip)
    if report["jax"]["devices"]:
        table.add_row("jax tested", "this release" if report["jax"]["tested"] else "not this release")
        table.add_row("jax preallocates", "yes" if report["jax"]["preallocates"] else "no")
    if report["profile"] is not None:
        table.add_row("profile", escape(f"{report['profile']['name']}, {report['profile']['source']}"))
    table.add_row("interpreter", "on" if report["interpreter"] else "off")
    console.print(table)
    for package, served in (("swa_torch", report), ("swa_pallas", report["jax"])):
        console.print(f"[bold]backend of {package}[/] {served['backend'] or 'none'}: {escape(served['reason'])}")
    gluon = report["gluon"]
    line = "here, where a call or its plan asks for it" if gluon["present"] else f"not here: {gluon['reason']}"
    console.print(f"[bold]backend gluon of swa_torch[/] {escape(line)}")
    for line in _doctor_bridge.lines(report["bridge"]):
        console.print(f"[bold]bridge[/] {escape(line)}")
    for problem in report["bridge"]["problems"]:
        console.print(f"[yellow]bridge[/] {escape(problem)}")
    for warning in report["warnings"]:
        console.print(f"[yellow]warning[/] {escape(warning)}")
