"""`swa doctor`: versions without imports, the backend and its reason, known traps."""

import json
import os
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from bridge._cli import _doctor, _doctor_jax
from bridge._cli._app import app
from bridge._cli._doctor import DISTRIBUTIONS, choose_backend, known_traps, why_no_gluon
from bridge._cli._doctor_jax import Seen

VERSIONS = {"torch": "2.13.0+cpu", "triton": "3.9.0", "numpy": "2.4.6"}
H200 = {"name": "NVIDIA H200", "capability": 90}
JAX_H200 = {"platform": "gpu", "name": "NVIDIA H200", "capability": 90, "num_sms": 132, "id": 0}
JAX_V100 = {"platform": "gpu", "name": "V100", "capability": 70, "num_sms": 80, "id": 0}
JAX_CPU = {"platform": "cpu", "name": "cpu", "capability": None, "num_sms": None, "id": None}
ON_GPU = Seen([JAX_H200], pallas_triton=True)
ON_CPU = Seen([JAX_CPU], pallas_triton=True)


def test_json_is_pure_and_says_what_is_installed():
    result = CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["versions"]["numpy"] == metadata.version("numpy")
    assert report["backend"] in ("cpu", "triton", None)
    assert report["reason"]
    assert report["gluon"]["present"] == (report["gluon"]["reason"] is None)
    assert "jax" in report["versions"]


def test_the_report_for_a_person():
    result = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "numpy" in result.stdout
    assert "backend" in result.stdout


@pytest.mark.parametrize(
    "versions, devices, hip, expected",
    [
        (VERSIONS, [], None, ("cpu", "no CUDA device")),
        (VERSIONS, [H200], None, ("triton", "sm_90")),
        (VERSIONS, [{"name": "V100", "capability": 70}], None, ("cpu", "sm_70; the kernels need sm_80")),
        ({**VERSIONS, "triton": None}, [H200], None, ("cpu", "triton is not installed")),
        ({**VERSIONS, "torch": None}, [], None, (None, "torch is not installed")),
        (VERSIONS, [], "7.0", ("cpu", "HIP 7.0 is not supported")),
    ],
)
def test_the_backend_and_why(versions, devices, hip, expected):
    backend, reason = choose_backend(versions, devices, hip=hip)
    assert backend == expected[0]
    assert expected[1] in reason


@pytest.mark.parametrize(
    "versions, devices, hip, words",
    [
        ({**VERSIONS, "triton": "3.6.0"}, [H200], None, None),
        ({**VERSIONS, "triton": "3.5.1"}, [H200], None, "got Triton 3.5.1"),
        ({**VERSIONS, "triton": "3.6.0"}, [{"name": "B200", "capability": 100}], None, "sm_90 device, got sm_100"),
        (VERSIONS, [{"name": "V100", "capability": 70}], None, "sm_70; the kernels need sm_80"),
        ({**VERSIONS, "triton": None}, [H200], None, "triton is not installed"),
        (VERSIONS, [], None, "no CUDA device"),
        ({**VERSIONS, "torch": None}, [], None, "torch is not installed"),
        (VERSIONS, [], "7.0", "HIP 7.0 is not supported"),
    ],
)
def test_the_hopper_kernel_and_why_not(versions, devices, hip, words):
    if devices:
        pytest.importorskip("torch", reason="where there is no torch, no device is seen")
    reason = why_no_gluon(versions, devices, hip=hip)
    assert reason is None if words is None else words in reason


@pytest.mark.parametrize(
    "triton, words",
    [("3.6.0", "here, where a call or its plan asks for it"), ("3.5.1", "not here: it is written in the Gluon of")],
)
def test_a_person_reads_whether_gluon_runs(triton, words, monkeypatch):
    pytest.importorskip("torch", reason="where there is no torch, no device is seen")
    h200 = {**H200, "num_sms": 132, "memory_bytes": 141 << 30}
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(_doctor, "_devices", lambda: ([h200], None))
    monkeypatch.setattr(_doctor, "_version", {**dict.fromkeys(DISTRIBUTIONS), **VERSIONS, "triton": triton}.get)
    text = CliRunner().invoke(app, ["doctor"], catch_exceptions=False).stdout
    (line,) = [line for line in text.splitlines() if line.startswith("backend gluon of swa_torch")]
    assert words in line


@pytest.mark.parametrize(
    "versions, hip, interpreter, words",
    [
        ({**VERSIONS, "triton": "3.6.0"}, None, False, "triton>=3.9 or numpy<2.4"),
        ({**VERSIONS, "torch": "2.9.1"}, None, False, "older than 2.11"),
        (VERSIONS, "7.0", False, "HIP"),
        (VERSIONS, None, True, "bfloat16 and casts to fp8 are silently wrong"),
    ],
)
def test_known_traps(versions, hip, interpreter, words):
    (trap,) = known_traps(versions, [], hip=hip, interpreter=interpreter)
    assert words in trap


def test_no_trap_where_there_is_none():
    assert known_traps(VERSIONS, [H200], hip=None, interpreter=False) == []
    assert known_traps({**VERSIONS, "triton": "3.6.0", "numpy": "2.3.5"}, [H200], hip=None, interpreter=False) == []
    assert len(known_traps({**VERSIONS, "triton": None}, [H200], hip=None, interpreter=False)) == 1


@pytest.mark.skipif(find_spec("jax") is None, reason="says what JAX sees")
def test_jax_as_it_is_here():
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False).stdout)["jax"]
    import jax

    assert [device["platform"] for device in report["devices"]] == [device.platform for device in jax.local_devices()]
    assert report["error"] is None
    assert report["backend"] == ("pallas_triton" if jax.default_backend() == "gpu" else "xla")


@pytest.mark.parametrize(
    "version, seen, backend, words",
    [
        ("0.10.2", ON_CPU, "xla", "JAX computes on cpu, no CUDA device"),
        ("0.10.2", ON_GPU, "pallas_triton", "sm_90 (NVIDIA H200)"),
        ("0.12.0.1", ON_GPU, "pallas_triton", "deprecates it since 0.11"),
        ("0.14.0", Seen([JAX_H200]), "xla", "jax 0.14.0 has no jax.experimental.pallas.triton"),
        ("0.11.2", Seen([JAX_V100], pallas_triton=True), "xla", "sm_70; the kernels need sm_80"),
        ("0.9.0", Seen(error="no ManualAxisType"), None, "does not start: no ManualAxisType"),
        (None, Seen(), None, "pip install 'swa-decode[jax]'"),
    ],
)
def test_the_backend_of_jax_and_why(version, seen, backend, words):
    report = _doctor_jax.report({"jax": version}, seen)
    assert report["backend"] == backend
    assert words in report["reason"]
    assert ("deprecates" in report["reason"]) == (version == "0.12.0.1")


@pytest.mark.parametrize(
    "version, tested, words",
    [
        ("0.10.2", True, None),
        ("0.11.0", True, None),
        ("0.12.0.1", True, None),
        ("0.10.1", True, "older than 0.10.2"),
        ("0.9.2", False, "older than 0.10.2"),
        ("0.13.1", False, "newer than all of them"),
    ],
)
def test_tested_versions_of_jax(version, tested, words):
    assert _doctor_jax.report({"jax": version}, ON_CPU)["tested"] == tested
    lines = _doctor_jax.traps({"jax": version})
    assert len(lines) == (words is not None)
    assert words is None or words in lines[0]


@pytest.mark.parametrize(
    "setting, takes",
    [
        ({}, True),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, True),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, False),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "0"}, False),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, False),
    ],
)
def test_a_gpu_whose_memory_jax_would_take(setting, takes, monkeypatch):
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    versions = {"jax": "0.11.2"}
    assert _doctor_jax.report(versions, ON_GPU)["preallocates"] == takes
    assert not _doctor_jax.report(versions, ON_CPU)["preallocates"]


def test_looking_leaves_the_environment_as_it_was(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    _doctor_jax.look()
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"


def test_what_to_install_is_printed_whole(monkeypatch):
    """Square brackets are rich's markup too."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(metadata, "version", _nothing)
    text = CliRunner().invoke(app, ["doctor"], catch_exceptions=False).stdout
    assert "pip install 'swa-decode[torch]'" in text
    assert "pip install 'swa-decode[jax]'" in text


def _nothing(name):
    raise metadata.PackageNotFoundError(name)


@pytest.mark.parametrize("flags", [[], ["-O"]], ids=["plain", "optimised"])
def test_the_module_runs_without_a_framework(flags):
    script = (
        "import sys; sys.modules.update(torch=None, jax=None); sys.argv = ['swa', 'doctor', '--json']\n"
        "import runpy; runpy.run_module('bridge._cli', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, *flags, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["versions"]["python"]


def test_a_missing_extra_is_named():
    script = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'typer' else find(name, *a)\n"
        "from bridge._cli import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert "swa needs typer: pip install 'swa-decode[cli]'" in result.stderr


def test_version_and_help():
    assert CliRunner().invoke(app, ["--version"]).stdout.strip()
    text = CliRunner().invoke(app, ["--help"]).stdout
    assert all(command in text for command in ("demo", "replay", "plan", "doctor"))
