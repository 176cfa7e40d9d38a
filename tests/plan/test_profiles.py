"""Stored profiles: found by device, ignored with a warning where they are broken, absent where they are off."""

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from swa_plan import DeviceProfile, Problem, plan
from swa_plan._costs import Costs
from swa_plan._profiles import (
    Provenance,
    StoredProfile,
    config_folder,
    forget_profile,
    prepare_folder,
    profile_path,
    store_profile,
    stored_profile,
)

DEVICE = ("NVIDIA H200", 90, 132)
FOUND = Provenance("NVIDIA H200", "580.65.06", {"swa-decode": "0.1.0", "triton": "3.6.0"}, "2026-11-30", 264, 0.021)
STORED = StoredProfile("h200", 90, 132, 227 << 10, 60 << 20, 4800, replace(Costs(), start=1.25), FOUND)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A config folder of its own, and a process that has looked at nothing yet."""
    monkeypatch.setenv("SWA_DECODE_CONFIG", str(tmp_path))
    stored_profile.cache_clear()
    yield tmp_path
    stored_profile.cache_clear()


def test_a_stored_profile_is_found_again(folder):
    shipped = DeviceProfile.for_cuda(*DEVICE)
    path = store_profile(STORED)
    assert path == folder / "profiles" / "nvidia-h200-sm90-132.json"
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert stored_profile(*DEVICE) == STORED
    found = DeviceProfile.for_cuda(*DEVICE)
    assert found == replace(shipped, costs=STORED.costs)
    assert hash(found) != hash(shipped)
    assert DeviceProfile.shipped(*DEVICE) == shipped
    assert DeviceProfile.named("h200") == shipped


@pytest.mark.parametrize("device", [("NVIDIA H100", 90, 132), ("NVIDIA H200", 100, 132), ("NVIDIA H200", 90, 78)])
def test_other_devices_do_not_get_it(folder, device):
    store_profile(STORED)
    assert stored_profile(*device) is None
    assert DeviceProfile.for_cuda(*device) == DeviceProfile.shipped(*device)


def test_plans_follow_the_stored_costs(folder):
    problem = Problem(8, 16, 1, 192, 192, 512, 64, 32)
    assert plan(problem, DeviceProfile.for_cuda(*DEVICE)).splits > 1
    store_profile(replace(STORED, costs=replace(Costs(), combine=1000.0)))
    assert plan(problem, DeviceProfile.for_cuda(*DEVICE)).splits == 1


def test_forgetting(folder):
    path = store_profile(STORED)
    assert forget_profile(*DEVICE) == path
    assert not path.exists()
    assert DeviceProfile.for_cuda(*DEVICE) == DeviceProfile.shipped(*DEVICE)
    assert forget_profile(*DEVICE) is None


def test_a_file_is_read_once(folder, monkeypatch):
    store_profile(STORED)
    first = stored_profile(*DEVICE)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("it was read again"))
    assert stored_profile(*DEVICE) is first


def broken(change):
    values = json.loads(STORED.to_json())
    change(values)
    return json.dumps(values)


BROKEN = {
    "empty": ("", "Expecting value"),
    "no JSON": ("{", "Expecting"),
    "a list": ("[]", "'profile' and 'provenance'"),
    "text for a profile": ('{"profile": "h200", "provenance": {}}', "dictionary"),
    "a number for a profile": ('{"profile": 3, "provenance": {}}', "not iterable"),
    "no cost": (broken(lambda v: v["profile"]["costs"].pop("start")), r"start are too many or missing.*swa tune"),
    "another cost": (broken(lambda v: v["profile"]["costs"].update(luck=1)), "luck are too many"),
    "a negative cost": (broken(lambda v: v["profile"]["costs"].update(start=-1)), "cost start must be .* got -1"),
    "a NaN": (broken(lambda v: v["profile"]["costs"].update(start=float("nan"))), "cost start must be .* got nan"),
    "text for a cost": (broken(lambda v: v["profile"]["costs"].update(start="1")), "cost start must be .* got '1'"),
    "no SMs": (broken(lambda v: v["profile"].pop("num_sms")), "num_sms must be a positive integer, got None"),
    "a fraction": (broken(lambda v: v["profile"].update(memory_gbps=0.5)), "memory_gbps must be .* got 0.5"),
    "a cost of 400 digits": (
        broken(lambda v: v["profile"]["costs"].update(start=10**400)),
        "cost start must be .* got 1",
    ),
    "a cost whose sums overflow": (broken(lambda v: v["profile"]["costs"].update(start=1e308)), "cost start must be"),
    "an endless size": (broken(lambda v: v["profile"].update(memory_gbps=10**400)), "memory_gbps must be"),
    "no shared memory": (
        broken(lambda v: v["profile"].update(shared_memory=1)),
        "shared_memory must be 232448 .* got 1",
    ),
    "too much of it": (broken(lambda v: v["profile"].update(shared_memory=1 << 20)), "shared_memory must be 232448"),
    "nesting": ("[" * 100_000 + "]" * 100_000, "recursion"),
    "a number for a name": (broken(lambda v: v["profile"].update(name=3)), "name must be a string, got 3"),
    "a number for a date": (broken(lambda v: v["provenance"].update(date=5)), "date must be .* got 5"),
    "no such date": (broken(lambda v: v["provenance"].update(date="soon")), "date must be .* got 'soon'"),
    "text for an error": (
        broken(lambda v: v["provenance"].update(median_error="x")),
        "median_error must be .* got 'x'",
    ),
    "a list of versions": (broken(lambda v: v["provenance"].update(versions=["1"])), "versions must be an object"),
    "a number for a version": (
        broken(lambda v: v["provenance"].update(versions={"a": 1})),
        "versions must be an object",
    ),
    "a number for a driver": (broken(lambda v: v["provenance"].update(driver=580)), "driver must be .* got 580"),
    "half a plan": (broken(lambda v: v["provenance"].update(plans=0.5)), "plans must be .* got 0.5"),
    "a number for a device": (broken(lambda v: v["provenance"].update(device=1)), "device must be a string, got 1"),
    "one more field": (broken(lambda v: v["profile"].update(colour="red")), "colour"),
    "no date": (broken(lambda v: v["provenance"].pop("date")), "date"),
    "another device": (broken(lambda v: v["provenance"].update(device="NVIDIA H20")), "measured on .*H20'"),
    "another chip": (broken(lambda v: v["profile"].update(num_sms=114)), "measured on .*114"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_once_and_ignored(folder, name):
    text, words = BROKEN[name]
    path = profile_path(*DEVICE)
    path.parent.mkdir()
    path.write_text(text)
    with pytest.warns(UserWarning, match=words) as caught:
        assert DeviceProfile.for_cuda(*DEVICE) == DeviceProfile.shipped(*DEVICE)
    assert f"the device profile {path} is ignored" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DeviceProfile.for_cuda(*DEVICE) == DeviceProfile.shipped(*DEVICE)


def test_a_file_that_cannot_be_read_is_ignored(folder):
    path = profile_path(*DEVICE)
    path.mkdir(parents=True)
    with pytest.warns(UserWarning, match="is ignored"):
        assert stored_profile(*DEVICE) is None
    stored_profile.cache_clear()
    path.rmdir()
    path.write_bytes(b"\xff\xfe{}")
    with pytest.warns(UserWarning, match="utf-8"):
        assert stored_profile(*DEVICE) is None


def test_the_home_of_nobody_is_named_and_ignored(monkeypatch):
    monkeypatch.setenv("SWA_DECODE_CONFIG", "~nosuchuser/x")
    stored_profile.cache_clear()
    with pytest.warns(UserWarning, match=r"profile ~nosuchuser/x is ignored: SWA_DECODE_CONFIG must name a folder"):
        assert DeviceProfile.for_cuda(*DEVICE) == DeviceProfile.shipped(*DEVICE)
    stored_profile.cache_clear()
    for call in (lambda: store_profile(STORED), lambda: forget_profile(*DEVICE)):
        with pytest.raises(ValueError, match="SWA_DECODE_CONFIG must name a folder, got '~nosuchuser/x'"):
            call()


def test_a_folder_is_probed(folder):
    assert prepare_folder() == folder / "profiles"
    assert list((folder / "profiles").iterdir()) == []
    (folder / "profiles").rmdir()
    (folder / "profiles").write_text("")
    with pytest.raises(OSError, match="profiles"):
        prepare_folder()


def test_an_empty_variable_means_no_folder(monkeypatch):
    monkeypatch.setenv("SWA_DECODE_CONFIG", "")
    stored_profile.cache_clear()
    assert config_folder() is None
    assert profile_path(*DEVICE) is None
    assert DeviceProfile.for_cuda(*DEVICE) == DeviceProfile.shipped(*DEVICE)
    assert forget_profile(*DEVICE) is None
    with pytest.raises(ValueError, match="SWA_DECODE_CONFIG must name a folder"):
        store_profile(STORED)


def test_where_the_folder_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SWA_DECODE_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/elsewhere")
    assert config_folder() == Path("/elsewhere/swa-decode")
    monkeypatch.setenv("XDG_CONFIG_HOME", "not/absolute")
    assert config_folder() == tmp_path / ".config" / "swa-decode"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert config_folder() == tmp_path / ".config" / "swa-decode"
    monkeypatch.setenv("SWA_DECODE_CONFIG", "~/mine")
    assert config_folder() == tmp_path / "mine"


@pytest.mark.parametrize("name", ["../../etc/passwd", "NVIDIA A100-SXM4-80GB", "", "Ünïcode GPU"])
def test_a_device_name_makes_a_plain_file_name(folder, name):
    path = profile_path(name, 80, 108)
    assert path.parent == folder / "profiles"
    assert path.name.replace("-", "").replace(".", "").isascii()
    assert path.name.endswith("-sm80-108.json")


def test_a_write_that_fails_leaves_the_old_file(folder, monkeypatch):
    path = store_profile(STORED)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        store_profile(replace(STORED, memory_gbps=1))
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert StoredProfile.from_json(path.read_text()) == STORED


def test_both_frameworks_ask_for_it():
    """What a stored profile reaches them by is one function; neither builds a profile of its own."""
    folder = Path(__file__).parents[2]
    for package in ("swa_torch", "swa_pallas"):
        text = (folder / package / "_device.py").read_text()
        assert "DeviceProfile.for_cuda(" in text
        assert "DeviceProfile(" not in text


def test_an_unknown_chip_takes_the_drivers_memory_rate():
    slow, fast = (DeviceProfile.for_cuda("NVIDIA New", 120, 100, rate) for rate in (500, 2000))
    assert (slow.memory_gbps, fast.memory_gbps) == (500, 2000)
    assert slow.costs.stream == pytest.approx(4 * fast.costs.stream)
    assert DeviceProfile.for_cuda("NVIDIA H200", 90, 132, 1).memory_gbps == 4800


def test_a_process_started_with_the_variable_uses_the_profile(folder):
    store_profile(STORED)
    script = "from swa_plan import DeviceProfile; print(DeviceProfile.for_cuda('NVIDIA H200', 90, 132).costs.start)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "1.25"
