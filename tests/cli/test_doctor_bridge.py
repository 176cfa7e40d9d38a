"""`swa doctor` on the bridge: the pair of versions, devices that both see, memory, order, and how to mend each."""

import json
import os
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from bridge import _versions
from bridge._cli import _doctor_bridge, _doctor_jax
from bridge._cli._app import app
from bridge._cli._doctor_jax import Seen

TESTED = {"torch": "2.11.0+cu130", "jax": "0.11.2"}
GIB = 2**30
H200 = {"name": "NVIDIA H200", "capability": 90, "num_sms": 132, "memory_bytes": 140 * GIB}
JAX_CPU = {"platform": "cpu", "name": "cpu", "capability": None, "num_sms": None, "id": None}
SMALL = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
BOTH = find_spec("torch") is not None and find_spec("jax") is not None


def jax_h200(number):
    return {"platform": "gpu", "name": "NVIDIA H200", "capability": 90, "num_sms": 132, "id": number}


ON_CPU = Seen([JAX_CPU])
ON_GPU = Seen([jax_h200(0)])


@pytest.fixture(autouse=True)
def _tested(monkeypatch):
    """What was tested changes with each release."""
    monkeypatch.setattr(_versions, "ORDER_TESTED", (("2.11", "0.11"),))
    monkeypatch.setattr(_versions, "VALUES_TESTED", (("2.11", "0.11"), ("2.13", "0.10")))


def section(versions=TESTED, torch_devices=(H200,), seen=ON_GPU, environment=SMALL, hip=None):
    return _doctor_bridge.report(versions, list(torch_devices), hip, seen, environment)


def test_where_all_is_well():
    report = section()
    assert report == {
        "versions": "order tested",
        "meaning": "order tested on a GPU (torch 2.11.0+cu130, jax 0.11.2)",
        "devices": ["cuda:0"],
        "works": {
            "cpu": ["exchange", "session", "updates with copy=True"],
            "cuda": ["exchange", "session", "updates in place"],
        },
        "int64": False,
        "preallocated_bytes": 0,
        "problems": [],
    }
    assert _doctor_bridge.lines(report) == [
        "order tested on a GPU (torch 2.11.0+cu130, jax 0.11.2)",
        "on the CPU: exchange, session, updates with copy=True",
        "on cuda:0: exchange, session, updates in place",
        "int64 does not cross: tables and lengths in int32, or JAX_ENABLE_X64=1",
    ]


def test_without_a_gpu_there_is_nothing_to_mend():
    report = section({"torch": "2.13.0+cpu", "jax": "0.10.2"}, (), ON_CPU, {})
    assert report["versions"] == "values tested"
    assert report["meaning"].startswith("values tested on a CPU, order on a GPU was not")
    assert list(report["works"]) == ["cpu"]
    assert report["problems"] == []
    assert report["preallocated_bytes"] == 0


@pytest.mark.parametrize(
    "versions, seen, words",
    [
        ({"torch": None, "jax": "0.11.2"}, ON_GPU, "torch is not installed: pip install 'swa-decode[torch]'"),
        ({"torch": "2.11.0", "jax": None}, Seen(), "jax is not installed: pip install 'swa-decode[jax]'"),
        (TESTED, Seen(error="no such plugin"), "JAX does not start: no such plugin"),
    ],
)
def test_both_frameworks_are_needed(versions, seen, words):
    report = section(versions, seen=seen)
    assert report["problems"] == [words]
    assert report["versions"] is None
    assert report["works"] == {}
    assert _doctor_bridge.lines(report) == ["needs both frameworks"]


def test_neither_framework_is_here():
    assert len(section({"torch": None, "jax": None}, (), Seen())["problems"]) == 2


@pytest.mark.parametrize(
    "versions, words",
    [
        ({"torch": "2.9.1", "jax": "0.11.2"}, "torch must be at least 2.11 for the bridge, got 2.9.1: install a newer"),
        ({"torch": "2.11.0", "jax": "0.9.2"}, "jax must be at least 0.10.2 for the bridge, got 0.9.2: install a newer"),
    ],
)
def test_old_versions(versions, words):
    report = section(versions)
    assert report["versions"] == "refused"
    assert report["works"] == {}
    (problem,) = report["problems"]
    assert problem.startswith(words)


@pytest.mark.parametrize(
    "versions, status",
    [
        ({"torch": "2.13.0", "jax": "0.10.2"}, "values tested"),
        ({"torch": "2.14.0", "jax": "0.13.0"}, "untested"),
    ],
)
def test_versions_whose_order_was_not_tested(versions, status):
    report = section(versions)
    assert report["versions"] == status
    assert report["works"]["cuda"][1] == "session with allow_untested=True"
    (problem,) = report["problems"]
    assert "install torch 2.11 with jax 0.11, or run the tests in tests/bridge here" in problem
    assert "allow_untested=True" in problem
    on_cpu = section(versions, (), ON_CPU)["problems"]
    assert len(on_cpu) == (status == "untested")
    assert all("was never tested: run the tests in tests/bridge" in problem for problem in on_cpu)


def test_every_status_has_words():
    statuses = [_versions.pair_of(*pair).status for pair in (("2.11", "0.11"), ("2.13", "0.10.2"), ("99.0", "99.0"))]
    assert [*statuses, "refused"] == list(_doctor_bridge.MEANINGS)


@pytest.mark.parametrize(
    "environment, plugin, words",
    [
        ({"JAX_PLATFORMS": "cpu"}, True, "JAX_PLATFORMS=cpu puts another first: unset it, or put cuda in front"),
        ({}, False, "its jaxlib is for the CPU alone: pip install 'jax[cuda13]'"),
        ({"JAX_PLATFORMS": "cuda,cpu"}, False, "its jaxlib is for the CPU alone: pip install 'jax[cuda13]'"),
        ({}, True, "JAX_PLATFORMS=cuda makes JAX say why; look at CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_gpu_that_only_torch_sees(monkeypatch, environment, plugin, words):
    monkeypatch.setattr(metadata, "version", _plugin_alone if plugin else _nothing)
    report = section(seen=ON_CPU, environment=environment)
    (problem,) = report["problems"]
    assert problem.startswith(f"torch sees a CUDA device and JAX does not: {words}")
    assert report["devices"] == []
    assert list(report["works"]) == ["cpu"]
    assert report["preallocated_bytes"] == 0


def _plugin_alone(name):
    if not name.startswith("jax-cuda"):
        raise metadata.PackageNotFoundError(name)
    return "0.11.2"


def _nothing(name):
    raise metadata.PackageNotFoundError(name)


def test_a_gpu_that_only_jax_sees():
    (problem,) = section(torch_devices=())["problems"]
    assert "JAX sees a CUDA device and torch does not: install a CUDA build of torch" in problem


@pytest.mark.parametrize(
    "ours, theirs, shared, words",
    [
        (2, (1,), ["cuda:1"], "torch sees cuda:0, cuda:1 and JAX sees cuda:1: "),
        (1, (1,), [], "torch sees cuda:0 and JAX sees cuda:1: "),
        (1, (0, 1), ["cuda:0"], "torch sees cuda:0 and JAX sees cuda:0, cuda:1: "),
    ],
)
def test_gpus_of_other_numbers(ours, theirs, shared, words):
    report = section(torch_devices=(H200,) * ours, seen=Seen([jax_h200(number) for number in theirs]))
    assert report["devices"] == shared
    assert ("cuda" in report["works"]) == bool(shared)
    (problem,) = report["problems"]
    assert problem.startswith(words)
    assert "CUDA_VISIBLE_DEVICES" in problem


def test_hip():
    report = section(torch_devices=(), seen=ON_CPU, hip="7.0")
    assert report["problems"] == ["torch is built for HIP 7.0: only the CPU's memory is shared"]
    assert list(report["works"]) == ["cpu"]


@pytest.mark.parametrize(
    "environment, gib",
    [
        ({}, 105),
        ({"XLA_CLIENT_MEM_FRACTION": ".25"}, 35),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, 70),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, 0),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_CLIENT_MEM_FRACTION": ".25"}, 0),
    ],
)
def test_memory_that_jax_would_take(environment, gib):
    report = section(environment=environment)
    assert report["preallocated_bytes"] == gib * GIB
    assert len(report["problems"]) == (gib > 0)
    for problem in report["problems"]:
        assert problem.startswith(f"JAX takes {gib} GiB of each GPU when it starts")
        assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in problem


def test_a_client_that_cannot_order():
    report = section(seen=Seen([jax_h200(0)], orders=False))
    (problem,) = report["problems"]
    assert "TFRT" in problem
    assert "JAX_PJRT_CLIENT_CREATE_OPTIONS" in problem
    assert list(report["works"]) == ["cpu"]


def test_int64_under_x64():
    report = section(seen=Seen([jax_h200(0)], x64=True))
    assert report["int64"]
    assert not any("int64" in line for line in _doctor_bridge.lines(report))


@pytest.mark.skipif(not BOTH, reason="asks JAX")
def test_what_is_asked_of_jax():
    import jax

    assert _doctor_jax.look().x64 == jax.config.read("jax_enable_x64")
    with jax.enable_x64(True):
        assert _doctor_jax.look().x64
    assert _doctor_jax._orders(SimpleNamespace(get_stream_for_external_ready_events=lambda: 7))
    assert not _doctor_jax._orders(jax.local_devices(backend="cpu")[0])  # UNIMPLEMENTED, as the TFRT client says


@pytest.mark.skipif(not BOTH, reason="says what both frameworks see")
def test_as_it_is_here():
    result = CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False)
    report = json.loads(result.stdout)["bridge"]
    import torch

    pair = _versions.pair_of(metadata.version("torch"), metadata.version("jax"))
    assert report["versions"] == pair.status
    assert "cpu" in report["works"]
    assert len(report["devices"]) <= (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    text = CliRunner().invoke(app, ["doctor"], catch_exceptions=False).stdout
    assert "bridge on the CPU: exchange, session, updates with copy=True" in " ".join(text.split())


@pytest.mark.gpu
@pytest.mark.skipif(not BOTH, reason="says what both frameworks see")
def test_looking_leaves_the_gpus_memory_alone():
    """In a process of its own, in which JAX has not been started: with nothing set, doctor says what JAX would take."""
    script = (
        "import json, torch; free, _ = torch.cuda.mem_get_info()\n"
        "from typer.testing import CliRunner; from bridge._cli._app import app\n"
        "text = CliRunner().invoke(app, ['doctor', '--json'], catch_exceptions=False).stdout\n"
        "print(json.dumps([json.loads(text)['bridge'], free - torch.cuda.mem_get_info()[0]]))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    report, taken = json.loads(result.stdout)
    assert report["devices"][0] == "cuda:0"
    assert report["preallocated_bytes"] > 2**30
    assert any("XLA_PYTHON_CLIENT_PREALLOCATE=false" in problem for problem in report["problems"])
    assert taken < report["preallocated_bytes"] / 10
