"""Profiles that ``swa tune`` measured: one JSON file a kind of device, in the user's config folder.

Reading asks no driver and no device, and happens once a process for each kind of device, so that a profile can be
looked up while a graph is captured or JAX traces. A file that cannot be used is named in a warning and otherwise
ignored, because a decode step must not fail over a file that only makes it faster.

The folder is ``$SWA_DECODE_CONFIG``, else ``$XDG_CONFIG_HOME/swa-decode``, else ``~/.config/swa-decode``; where
``SWA_DECODE_CONFIG`` is set and empty there is none, and plans come from the shipped profiles.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import tempfile
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from swa_plan._costs import COST_NAMES, Costs

CONFIG_VARIABLE = "SWA_DECODE_CONFIG"
_SIZES = ("capability", "num_sms", "shared_memory", "l2_bytes", "memory_gbps")


@dataclass(frozen=True)
class Provenance:
    """Where a stored profile's costs come from.

    Attributes:
        device: the device as its driver names it.
        driver: the driver's version, or None where it is not known.
        versions: versions of what compiled and ran the plans, by name; this package's own is ``swa-decode``.
        date: when, ISO 8601, UTC.
        plans: plans that were measured.
        median_error: median of ``|predicted / measured - 1|`` over them, with the stored costs.
    """

    device: str
    driver: str | None
    versions: dict[str, str]
    date: str
    plans: int
    median_error: float


@dataclass(frozen=True)
class StoredProfile:
    """A measured profile: the fields of a ``DeviceProfile``, and their provenance."""

    name: str
    capability: int
    num_sms: int
    shared_memory: int
    l2_bytes: int
    memory_gbps: int
    costs: Costs
    provenance: Provenance

    def to_json(self) -> str:
        """Return the text of its file."""
        values = asdict(self)
        provenance = values.pop("provenance")
        return json.dumps({"profile": values, "provenance": provenance}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> StoredProfile:
        """Return the profile that ``to_json`` wrote.

        Raises:
            ValueError: ``text`` is not such an object, or holds a number that no device has.
        """
        values = json.loads(text)
        if not isinstance(values, dict) or {"profile", "provenance"} - set(values):
            raise ValueError("it must be an object with 'profile' and 'provenance'")
        profile, provenance = dict(values["profile"]), dict(values["provenance"])
        costs = dict(profile.pop("costs", {}))
        if set(costs) != set(COST_NAMES):
            wrong = sorted(set(costs) ^ set(COST_NAMES))
            raise ValueError(
                f"its costs must be those of this version, written by {provenance.get('versions')}: "
                f"{', '.join(wrong)} are too many or missing; measure again with `swa tune`"
            )
        for name, value in costs.items():
            if not _is_number(value) or value < 0:
                raise ValueError(f"cost {name} must be a number of at least 0, got {value!r}")
        for name in _SIZES:
            value = profile.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if not isinstance(profile.get("name"), str) or not isinstance(provenance.get("device"), str):
            raise ValueError("name and device must be strings")
        try:
            return cls(**profile, costs=Costs(**costs), provenance=Provenance(**provenance))
        except TypeError as error:
            raise ValueError(str(error)) from error


def config_folder() -> Path | None:
    """Return the folder of this user's settings, which need not exist; None where there shall be none."""
    named = os.environ.get(CONFIG_VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    shared = os.environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(shared):  # the XDG specification: relative paths are to be ignored
        return Path(shared) / "swa-decode"
    home = os.path.expanduser("~")
    return Path(home) / ".config" / "swa-decode" if os.path.isabs(home) else None


def profile_path(device_name: str, capability: int, num_sms: int) -> Path | None:
    """Return the file of a kind of device, which need not exist; None where there is no config folder."""
    folder = config_folder()
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") or "device"
    return None if folder is None else folder / "profiles" / f"{slug}-sm{capability}-{num_sms}.json"


@functools.lru_cache(maxsize=64)
def stored_profile(device_name: str, capability: int, num_sms: int) -> StoredProfile | None:
    """Return what was measured on this kind of device, or None; a file is read (and complained of) once a process."""
    path = profile_path(device_name, capability, num_sms)
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        return _complain(path, str(error))
    try:
        stored = StoredProfile.from_json(text)
    except (ValueError, TypeError) as error:
        return _complain(path, str(error))
    measured_on = (stored.provenance.device, stored.capability, stored.num_sms)
    if measured_on != (device_name, capability, num_sms):
        return _complain(path, f"it was measured on {measured_on}, not on {(device_name, capability, num_sms)}")
    return stored


def store_profile(stored: StoredProfile) -> Path:
    """Write a profile to its file, whole or not at all, and return the file.

    Raises:
        ValueError: there is no config folder.
        OSError: it cannot be written.
    """
    path = profile_path(stored.provenance.device, stored.capability, stored.num_sms)
    if path is None:
        raise ValueError(f"{CONFIG_VARIABLE} must name a folder to store a profile in, or be unset, got ''")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".json")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(stored.to_json())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    stored_profile.cache_clear()
    return path


def forget_profile(device_name: str, capability: int, num_sms: int) -> Path | None:
    """Delete the stored profile of a kind of device; return its file, or None where there was none."""
    path = profile_path(device_name, capability, num_sms)
    if path is None or not path.exists():
        return None
    path.unlink()
    stored_profile.cache_clear()
    return path


def _complain(path: Path, why: str) -> None:
    warnings.warn(f"the device profile {path} is ignored: {why}", stacklevel=3)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


PROFILE_FIELDS = tuple(each.name for each in fields(StoredProfile) if each.name != "provenance")
