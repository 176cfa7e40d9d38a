"""Backends by name, and a command line that works with either framework alone, each in a process of its own."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from bridge._cli import _frameworks

HAS_TORCH, HAS_JAX = (find_spec(name) is not None for name in ("torch", "jax"))
NEEDS_TORCH = pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
NEEDS_JAX = pytest.mark.skipif(not HAS_JAX, reason="needs jax")
REPLAY = ["replay", "--model", "gpt-oss", "--tp", "8", "--steps", "4", "--max-batch", "1", "--check-every", "1"]

# `sys.modules[name] = None` makes `import name` raise and `find_spec(name)` find nothing, as on a machine without it.
SWA = """
import sys
blocked, *sys.argv = sys.argv[1:]
sys.modules.update(dict.fromkeys(filter(None, blocked.split(","))))
from bridge._cli import main
try:
    main()
finally:
    loaded = {name for name in ("torch", "triton", "jax") if sys.modules.get(name) is not None}
    print("loaded:", *sorted(loaded), file=sys.stderr)
"""


def swa(*arguments, blocked=""):
    command = [sys.executable, "-c", SWA, blocked, "swa", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    *_, loaded = result.stderr.splitlines()
    return result, loaded.removeprefix("loaded:").split()


@NEEDS_JAX
@pytest.mark.parametrize("backend", [[], ["--backend", "xla"]], ids=["auto", "named"])
def test_replay_with_jax_alone(backend):
    result, loaded = swa(*REPLAY, *backend, "--json", blocked="torch,triton")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["ok"]
    assert report["checks"]["count"] == 4
    assert report["framework"].startswith("jax ")
    assert loaded == ["jax"]


@NEEDS_TORCH
def test_replay_with_torch_alone():
    result, loaded = swa(*REPLAY, "--json", blocked="jax")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["ok"]
    assert report["framework"].startswith("torch ")
    assert "jax" not in loaded


@NEEDS_TORCH
@NEEDS_JAX
@pytest.mark.parametrize("backend, framework, other", [("auto", "torch", "jax"), ("xla", "jax", "torch")])
def test_with_both_only_the_one_that_decodes_is_imported(backend, framework, other):
    result, loaded = swa(*REPLAY, "--backend", backend, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["framework"].startswith(framework)
    assert other not in loaded


@pytest.mark.parametrize("command", [["plan"], ["plan", "--backend", "xla"], ["doctor"]], ids=" ".join)
@pytest.mark.parametrize("blocked", ["torch,triton", "jax", "torch,triton,jax"])
def test_plan_and_doctor_work_with_either_or_neither(command, blocked):
    result, loaded = swa(*command, "--json", blocked=blocked)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)
    assert not set(loaded) & set(blocked.split(","))


@pytest.mark.parametrize(
    "backend, blocked, words",
    [
        ("auto", "torch,triton,jax", "pip install 'swa-decode[torch]' or 'swa-decode[jax]'"),
        ("xla", "jax", "--backend xla needs jax: pip install 'swa-decode[jax]'"),
        ("pallas_triton", "jax", "--backend pallas_triton needs jax: pip install 'swa-decode[jax]'"),
        ("cpu", "torch", "--backend cpu needs torch: pip install 'swa-decode[torch]'"),
        ("interpret", "torch", "--backend interpret needs torch: pip install 'swa-decode[torch]'"),
        ("crossed", "jax", "needs torch and jax, and jax cannot be imported: pip install 'swa-decode[jax]'"),
        (
            "crossed",
            "torch,triton",
            "needs torch and jax, and torch cannot be imported: pip install 'swa-decode[torch]'",
        ),
    ],
)
def test_the_extra_that_is_missing_is_named(backend, blocked, words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result, _ = swa("replay", "--backend", backend, "--json", blocked=blocked)
    assert result.returncode == 2
    assert result.stdout == ""
    assert words in result.stderr


def test_a_name_means_one_framework():
    names = [name for framework in _frameworks.KERNELS.values() for name in framework]
    assert len(set(names)) == len(names)
    assert all(name in _frameworks.HELP for name in names)
    assert [_frameworks.framework_of(name) for name in ("auto", "interpret", "xla")] == [None, "torch", "jax"]
