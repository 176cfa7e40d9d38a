"""`swa doctor`: versions without imports, the backend and its reason, known traps."""

import json
import subprocess
import sys
from importlib import metadata

import pytest
from typer.testing import CliRunner

from bridge._cli._app import app
from bridge._cli._doctor import choose_backend, known_traps

VERSIONS = {"torch": "2.13.0+cpu", "triton": "3.9.0", "numpy": "2.4.6"}
H200 = {"name": "NVIDIA H200", "capability": 90}


def test_json_is_pure_and_says_what_is_installed():
    result = CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["versions"]["numpy"] == metadata.version("numpy")
    assert report["backend"] in ("cpu", "triton", None)
    assert report["reason"]
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
    "versions, hip, interpreter, words",
    [
        ({**VERSIONS, "triton": "3.6.0"}, None, False, "numpy >= 2.4"),
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


@pytest.mark.parametrize("flags", [[], ["-O"]], ids=["plain", "optimised"])
def test_the_module_runs_and_imports_no_jax(flags):
    script = (
        "import sys; sys.modules['jax'] = None; sys.argv = ['swa', 'doctor', '--json']\n"
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
