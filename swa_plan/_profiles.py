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
import os
import re
import tempfile
import warnings
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, TypeGuard

from swa_plan._costs import COST_NAMES, Costs

CONFIG_VARIABLE = "SWA_DECODE_CONFIG"
_FOLDER = "profiles"
_SIZES = ("capability", "num_sms", "shared_memory", "l2_bytes", "memory_gbps")
_LARGEST_SIZE, _LARGEST_NUMBER = 2**48, 1e6
"""Far beyond any device's bytes, and any cost in microseconds; sums of what is below are finite."""


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
            if not _is_number(value):
                raise ValueError(f"cost {name} must be a number from 0 to {_LARGEST_NUMBER:.0e}, got {value!r}")
        _check_sizes(profile)
        _check_provenance(provenance)
        try:
            return cls(**profile, costs=Costs(**costs), provenance=Provenance(**provenance))
        except TypeError as error:
            raise ValueError(str(error)) from error


def config_folder() -> Path | None:
    """Return the folder of this user's settings, which need not exist; None where there shall be none.

    Raises:
        ValueError: the variable names the home of a user that does not exist.
    """
    named = os.environ.get(CONFIG_VARIABLE)
    if named is not None:
        try:
            return Path(named).expanduser() if named else None
        except RuntimeError as error:
            raise ValueError(f"{CONFIG_VARIABLE} must name a folder, got {named!r}: {error}") from error
    shared = os.environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(shared):  # the XDG specification: relative paths are to be ignored
        return Path(shared) / "swa-decode"
    home = os.path.expanduser("~")
    return Path(home) / ".config" / "swa-decode" if os.path.isabs(home) else None


def profile_path(device_name: str, capability: int, num_sms: int) -> Path | None:
    """Return the file of a kind of device, which need not exist; None where there is no config folder.

    Raises:
        ValueError: see ``config_folder``.
    """
    folder = config_folder()
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") or "device"
    return None if folder is None else folder / _FOLDER / f"{slug}-sm{capability}-{num_sms}.json"


@functools.lru_cache(maxsize=64)
def stored_profile(device_name: str, capability: int, num_sms: int) -> StoredProfile | None:
    """Return what was measured on this kind of device, or None; a file is read (and complained of) once a process."""
    try:
        path = profile_path(device_name, capability, num_sms)
    except ValueError as error:
        return _complain(os.environ[CONFIG_VARIABLE], str(error))
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
    except (ValueError, TypeError, RecursionError) as error:
        return _complain(path, str(error))
    measured_on = (stored.provenance.device, stored.capability, stored.num_sms)
    if measured_on != (device_name, capability, num_sms):
        return _complain(path, f"it was measured on {measured_on}, not on {(device_name, capability, num_sms)}")
    return stored


def prepare_folder() -> Path:
    """Create the folder of the profiles, see that a file can be written there, and return it.

    Raises:
        ValueError: there is no config folder.
        OSError: nothing can be written there.
    """
    folder = config_folder()
    if folder is None:
        raise ValueError(f"{CONFIG_VARIABLE} must name a folder to store a profile in, or be unset, got ''")
    folder = folder / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"{}")
    return folder


def store_profile(stored: StoredProfile) -> Path:
    """Write a profile to its file, whole or not at all, and return the file.

    Raises:
        ValueError: there is no config folder.
        OSError: it cannot be written.
    """
    folder = prepare_folder()
    path = profile_path(stored.provenance.device, stored.capability, stored.num_sms)
    assert path is not None
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".json")
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
    """Delete the stored profile of a kind of device; return its file, or None where there was none.

    Raises:
        ValueError: see ``config_folder``.
        OSError: it cannot be deleted.
    """
    path = profile_path(device_name, capability, num_sms)
    if path is None or not path.exists():
        return None
    path.unlink()
    stored_profile.cache_clear()
    return path


def _check_sizes(profile: dict[str, Any]) -> None:
    """Refuse a device that there is none of, because plans for it could not be made.

    Raises:
        ValueError: naming the field.
    """
    from swa_plan._device import shared_memory_limit  # that module imports this one

    for name in _SIZES:
        value = profile.get(name)
        if not _is_integer(value) or not 1 <= value <= _LARGEST_SIZE:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    shared_memory, limit = profile["shared_memory"], shared_memory_limit(profile["capability"])
    if shared_memory != limit:
        raise ValueError(f"shared_memory must be {limit} on sm_{profile['capability']}, got {shared_memory}")
    if not isinstance(profile.get("name"), str):
        raise ValueError(f"name must be a string, got {profile.get('name')!r}")


def _check_provenance(provenance: dict[str, Any]) -> None:
    """Refuse what a report could not print.

    Raises:
        ValueError: naming the field.
    """
    device, driver, versions, date, plans, error = (provenance.get(each.name) for each in fields(Provenance))
    texts = [*versions, *versions.values()] if isinstance(versions, dict) else [None]
    rules = (
        ("device", isinstance(device, str), "a string", device),
        ("driver", driver is None or isinstance(driver, str), "a string or null", driver),
        ("versions", all(isinstance(text, str) for text in texts), "an object of strings", versions),
        ("date", _is_date(date), "a date of ISO 8601", date),
        ("plans", _is_integer(plans) and 0 <= plans <= _LARGEST_SIZE, "a number of plans", plans),
        ("median_error", _is_number(error), "a number of at least 0", error),
    )
    for name, is_right, what, value in rules:
        if not is_right:
            raise ValueError(f"{name} must be {what}, got {value!r}")


def _complain(path: Path | str, why: str) -> None:
    warnings.warn(f"the device profile {path} is ignored: {why}", stacklevel=3)


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Whether this is a number from 0 on that sums of a few stay finite with; integers of any length are compared."""
    return (_is_integer(value) or isinstance(value, float)) and 0 <= value <= _LARGEST_NUMBER


def _is_date(value: Any) -> bool:
    try:
        datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return False
    return True


PROFILE_FIELDS = tuple(each.name for each in fields(StoredProfile) if each.name != "provenance")
