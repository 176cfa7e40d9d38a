"""`swa check`: what it runs, what it prints, and that a miss turns the exit code."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from bridge import parity
from bridge._cli import _check
from bridge._cli._app import app
from bridge.parity._backends import CROSSED

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NEEDS_CPU = pytest.mark.skipif(find_spec("torch") is None or INTERPRETED, reason="needs the backend cpu")
NEEDS_BOTH = pytest.mark.skipif(
    find_spec("torch") is None or find_spec("jax") is None or INTERPRETED, reason="needs torch and jax"
)
FLOAT64 = ("--backend", "float64")
CPU = ("--backend", "cpu")


def swa(*arguments):
    return CliRunner().invoke(app, ["check", *map(str, arguments)], catch_exceptions=False)


def plant_fault(monkeypatch, where="swa_torch.swa_decode"):
    """Make one value of `swa_decode` wrong by 1%."""
    import swa_torch

    decode = swa_torch.swa_decode

    def faulty(*args, **options):
        result = decode(*args, **options)
        out = result[0] if isinstance(result, tuple) else result
        out[0, 0, 0] += 0.01 * out.abs().max()
        return result

    monkeypatch.setattr(where, faulty)


def test_json_is_pure_and_complete():
    result = swa("window-one", "ragged", "--cases", 2, "--seed", 7, *FLOAT64, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    drawn = parity.random_cases(2, seed=7)
    assert (report["ok"], report["seed"]) == (True, 7)
    assert report["random"] == {case.name: repr(case) for case in drawn}
    assert [row["case"] for row in report["outcomes"]] == ["window-one", "ragged", *map(str, drawn)]
    summary = report["backends"]["float64"]
    assert (summary["cases"], summary["misses"], summary["bitwise"], summary["same_memory"]) == (4, 0, 4, None)
    assert summary["ratio"] == max(row["ratio"] for row in report["outcomes"])
    expected = parity.check("window-one", "float64", seed=7)
    assert parity.Outcome.from_json(report["outcomes"][0]) == expected


@pytest.mark.parametrize(
    "arguments, named, random",
    [
        ([], len(parity.CASES), _check.DEFAULT_RANDOM),
        (["--cases", 0], len(parity.CASES), 0),
        (["softcap"], 1, 0),
        (["softcap", "softcap", "--cases", 1], 1, 1),
    ],
    ids=str,
)
def test_how_many_cases_run(arguments, named, random):
    report = json.loads(swa(*arguments, *FLOAT64, "--json").stdout)
    assert len(report["outcomes"]) == named + random
    assert len(report["random"]) == random


def test_interpreters_run_everything_only_when_they_are_named(monkeypatch):
    """They take a second a case."""
    ran = []
    monkeypatch.setattr(_check, "_choose", lambda asked: (["float64", "jax-interpret"], False, {}))
    monkeypatch.setattr(parity, "check", lambda case, backend, seed: ran.append(backend) or OUTCOMES[backend])
    assert swa("--cases", 0).exit_code == 0
    assert (ran.count("float64"), ran.count("jax-interpret")) == (len(parity.CASES), len(parity.BRIEF))
    ran.clear()
    assert swa("--cases", 0, "--backend", "jax-interpret").exit_code == 0
    assert ran.count("jax-interpret") == len(parity.CASES)


OUTCOMES = {
    name: parity.Outcome("window-one", name, "float32", "float32", True, 1.0, 2.0, 0.5, 1.0, True, name, None, "")
    for name in ("float64", "jax-interpret")
}


def test_the_report_for_a_person(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = swa("window-one", *FLOAT64)
    assert result.exit_code == 0
    for words in ("error", "bound", "ratio", "ulps", "bits", "memory", "float64", "all within the rule: 1 runs of 1"):
        assert words in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stderr.strip() == ""
    table = result.stdout.partition("error, bound")[0]
    assert len(swa("window-one", *FLOAT64, "--all").stdout.split("window-one")) == len(table.split("window-one")) + 2


@NEEDS_CPU
def test_a_planted_fault_exits_with_1(monkeypatch):
    plant_fault(monkeypatch)
    result = swa("window-edge", *FLOAT64, *CPU)
    assert result.exit_code == 1
    assert "1 MISSED: 2 runs of 1 cases on 2 backends" in result.stdout
    assert "MISS cpu, window-edge: out misses the tolerance rule at token 0, head 0, dim 0" in result.stderr
    report = swa("window-edge", *FLOAT64, *CPU, "--json")
    assert report.exit_code == 1
    parsed = json.loads(report.stdout)
    assert not parsed["ok"]
    assert {name: summary["misses"] for name, summary in parsed["backends"].items()} == {"float64": 0, "cpu": 1}


@pytest.mark.parametrize("ratio, bitwise, luck", [(1.3, True, True), (5.0, True, False), (1.3, False, False)])
def test_a_ratio_just_above_1_may_be_luck_and_exits_with_1(ratio, bitwise, luck, monkeypatch):
    miss = replace(OUTCOMES["float64"], ok=False, error=ratio, bound=1.0, ratio=ratio, bitwise=bitwise)
    monkeypatch.setattr(parity, "check", lambda case, backend, seed: miss)
    result = swa("window-one", *FLOAT64)
    assert result.exit_code == 1
    assert ("draw's luck" in result.stderr) == luck


@NEEDS_CPU
def test_a_random_case_that_misses_is_shown_whole(monkeypatch):
    plant_fault(monkeypatch)
    (case,) = parity.random_cases(1, seed=4)
    result = swa("window-edge", "--cases", 1, "--seed", 4, *CPU)
    assert result.exit_code == 1
    assert repr(case) in result.stderr


@NEEDS_CPU
def test_a_backend_that_fails_is_a_miss_and_the_others_still_run(monkeypatch):
    def failing(*args, **options):
        raise RuntimeError("no kernel today")

    monkeypatch.setattr("swa_torch.swa_decode", failing)
    result = swa("window-one", *CPU, *FLOAT64, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["backends"]["float64"]["misses"] == 0
    assert report["backends"]["cpu"]["error"] is None
    assert "MISS cpu, window-one: RuntimeError: no kernel today" in result.stderr


@NEEDS_BOTH
def test_crossed_ways_report_their_memory():
    ways = [option for way in CROSSED for option in ("--backend", way)]
    report = json.loads(swa("fp8-e4m3", *ways, "--json").stdout)
    assert report["ok"]
    assert [(row["backend"], row["same_memory"], row["bitwise"]) for row in report["outcomes"]] == [
        ("torch>jax", True, True),
        ("jax>torch", True, True),
    ]
    assert {summary["same_memory"] for summary in report["backends"].values()} == {1}


@pytest.mark.skipif(
    find_spec("torch") is None or find_spec("triton") is None or INTERPRETED, reason="needs torch and triton"
)
def test_the_interpreter_runs_in_a_process_of_its_own(tmp_path, monkeypatch):
    result = swa("window-one", "--cases", 1, "--backend", "interpret", "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["outcomes"]
    (drawn,) = parity.random_cases(1, seed=1)
    assert [(row["backend"], row["case"]) for row in rows] == [("interpret", "window-one"), ("interpret", drawn.name)]
    assert rows[0]["dtype"] == "float16"
    # A process that cannot decode: each of its cases is a miss that says so.
    (tmp_path / "triton.py").write_text("raise RuntimeError('not the triton you want')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken = swa("window-one", "--backend", "interpret", "--json")
    assert broken.exit_code == 1
    assert "not the triton you want" in json.loads(broken.stdout)["outcomes"][0]["message"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--backend", "tritn"], "--backend must be one of float64, cpu"),
        (["no-such-case"], "got 'no-such-case'"),
        (["--cases", "-1"], "--cases"),
        (["--seed", "x"], "--seed"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    result = swa(*arguments, "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr


def test_an_absent_backend_is_refused_with_its_reason(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(parity, "absent", lambda: {"triton": "no GPU today", "jax-xla": "no JAX today"})
    result = swa("--backend", "triton")
    assert result.exit_code == 2
    assert "--backend triton cannot run here: no GPU today" in result.stderr
    report = json.loads(swa("window-one", *FLOAT64, "--json").stdout)
    assert report["absent"]["jax-xla"] == "no JAX today"


def test_it_runs_without_a_framework():
    script = (
        "import sys; sys.modules.update(torch=None, jax=None); sys.argv = ['swa', 'check', 'softcap', '--json']\n"
        "from bridge._cli import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert list(report["backends"]) == ["float64"]
    assert "pip install 'swa-decode[torch]'" in report["absent"]["cpu"]
