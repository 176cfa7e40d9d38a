"""The replay on both frameworks in turn: right, one memory, few programs, and what is stale or copied exits with 1."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

if find_spec("torch") is None or find_spec("jax") is None:
    pytest.skip("needs torch and jax", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("JAX has no part in a process in which Triton interprets", allow_module_level=True)

import jax
import jax.numpy as jnp
import torch

from bridge._cli import _frameworks, _replay
from bridge._cli._app import app
from bridge._replay import Engine, Geometry, ReplayConfig, crossed_runner
from bridge._replay.crossed_runner import CrossedRunner
from bridge._replay.crossing import Sharing, difference
from bridge._replay.torch_runner import TorchRunner
from tests.cli.replays import REQUESTS, SMALL, TINY, compiled_by_jax, report_of, swa

FEW = ["--backend", "crossed", "--max-batch", "2", "--speed", "4", "--steps", "20", "--check-every", "3", "--json"]
CHECKED = {"block": 8, "dtype": "bfloat16", "max_batch": 4, "check_every": 1, "check_requests": 4, "poison": True}


def replayed(*arguments):
    return report_of(*FEW, *arguments)


def make(**changes):
    config = ReplayConfig(**{"model": TINY, **CHECKED, **changes})
    runner = CrossedRunner(config, Geometry.of(REQUESTS, config))
    return runner, Engine(REQUESTS, config, runner)


def run(**changes):
    _, engine = make(**changes)
    list(engine.steps())
    return engine.result()


@pytest.mark.parametrize(
    "options",
    [
        ["--layout", "pages block kv_heads dim", "--poison"],
        ["--layout", "pages layers kv block kv_heads dim", "--layers", 2, "--cache-dtype", "float8_e5m2", "--poison"],
        ["--dtype", "float16", "--cache-dtype", "int8", "--v-scale", 0.05],
        ["--query-len", 5, "--gate", "--sinks", "--softcap", 3, "--v-dim", 64, "--poison"],
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_layouts_dtypes_and_features(options):
    report = replayed(*SMALL, *options)
    bridge = report["bridge"]
    assert report["ok"]
    assert bridge["same_memory"]
    assert len(bridge["cache"]["at_start"]) == (2 if "pages block kv_heads dim" in options else 1)
    assert bridge["cache"]["at_start"] == bridge["cache"]["at_end"]
    assert all(int(base["torch"], 16) == int(base["jax"], 16) > 0 for base in bridge["cache"]["at_end"])
    assert {name: by["steps"] for name, by in bridge["decoded_by"].items()} == {"torch": 10, "jax": 10}
    assert bridge["both_ways"]["steps"] == 20
    assert bridge["both_ways"]["values"] > 0
    assert report["checks"]["count"] == 14
    assert report["compiled"]["programs"] == len(report["plans"]) == len(bridge["jax_plans"])


def test_what_torch_decodes_is_not_disturbed():
    """JAX reads and writes nothing else: torch's rows have the errors that they have without it, to the last bit."""
    config = ReplayConfig(model=TINY, **CHECKED)
    alone = Engine(
        REQUESTS, config, TorchRunner(config, Geometry.of(REQUESTS, config), crossed_runner.choose_backends()[0])
    )
    list(alone.steps())
    crossed = run()
    assert [check for check in crossed.checks if check.decoded_by == "torch"] == list(alone.result().checks)
    assert [check.step for check in crossed.checks if check.decoded_by == "jax"] == [
        check.step for check in alone.result().checks
    ]


def test_the_step_s_own_framework_decodes_first():
    runner, engine = make(max_batch=1, max_steps=4)
    own = []
    for _ in engine.steps():
        own.append(next(iter(runner._outs)))
        assert set(runner._outs) == {"torch", "jax"}
    assert tuple(own) == ("torch", "jax", "torch", "jax") == runner.sharing().decoded_by


def test_steps_that_are_not_checked_are_decoded_both_ways_too():
    runner, engine = make(check_every=0, max_steps=2)
    assert [list(runner._outs) for _ in engine.steps()] == [["torch", "jax"], ["jax", "torch"]]
    assert len(engine.result().differences) == 2


def test_nothing_compiles_once_a_padded_batch_was_seen():
    runner, engine = make()
    buckets, late = compiled_by_jax(engine)
    assert buckets == {1, 2, 4}
    assert engine.result().ok
    assert late == []
    assert runner.compilation().programs == len(buckets)


def test_a_cache_that_is_copied_for_jax_exits_with_1(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    make_runner = _replay.make_runner

    def copying(*arguments):
        runner = make_runner(*arguments)
        buffer = runner._session._buffers["cache"]
        buffer.arrays = [jnp.copy(array) for array in buffer.arrays]
        runner._at_start = runner._addresses()
        return runner

    monkeypatch.setattr(_replay, "make_runner", copying)
    result = swa(*FEW, *SMALL)
    assert result.exit_code == 1
    assert "different addresses" in result.stderr
    assert "decoded by jax" in result.stderr
    assert "decoded by torch" not in result.stderr
    report = json.loads(result.stdout)
    assert not report["ok"]
    assert not report["bridge"]["same_memory"]
    assert report["checks"]["misses"] > 0
    # The addresses alone are enough.
    result = swa(*FEW, *SMALL, "--check-every", 0)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["checks"]["misses"] == 0
    assert "NOT THE SAME" in swa(*FEW[:-1], *SMALL, "--check-every", 0).stdout


def test_a_stale_cache_behind_the_same_address_exits_with_1(monkeypatch):
    decode_in_jax = CrossedRunner._decode_in_jax

    def stale(self, bucket):
        decode, old = decode_in_jax(self, bucket), jax.tree.map(jnp.copy, self._session.arrays["cache"])
        return lambda buffers: decode({**buffers, "cache": old})

    monkeypatch.setattr(CrossedRunner, "_decode_in_jax", stale)
    monkeypatch.setenv("COLUMNS", "400")
    result = swa(*FEW, *SMALL)
    assert result.exit_code == 1
    assert "decoded by jax: out misses the tolerance rule" in result.stderr
    assert "decoded by torch" not in result.stderr
    report = json.loads(result.stdout)
    assert report["bridge"]["same_memory"]
    assert report["bridge"]["both_ways"]["largest_ulps"] > 100


def test_padding_rows_of_jax_that_are_not_zero_are_a_miss():
    runner, _ = make(poison=False)
    runner.plan(4)
    runner.step(np.full(8, -1, np.int32), np.zeros(4, np.int32))
    assert runner.padding_is_zero(0)
    runner._outs["jax"] = torch.nn.functional.pad(runner._outs["jax"][:, :-1], (0, 0, 0, 0, 0, 1), value=1.0)
    assert not runner.padding_is_zero(3)
    assert runner.padding_is_zero(4)


def test_difference_counts_bits_and_ulps():
    one = np.array([[[1.0, -0.5], [4.0, 0.25]]], ml_dtypes.bfloat16)
    other = one.copy()
    assert difference(one, other) == (found := difference(other, one))
    assert (found.values, found.equal, found.ulps) == (4, 4, 0.0)
    other[0, 0, 1] = -0.5 - 2**-8  # one ulp of its own, half of one at the row's largest
    other[0, 1, 0] = 4.0 + 3 * 2**-5
    assert replace(difference(one, other), ulps=0) == replace(found, equal=2)
    assert difference(one[:, :1], other[:, :1]).ulps == 0.5
    assert difference(one, other).ulps == 3.0
    other[0, 1, 1] = np.nan
    assert difference(one, other).ulps == np.inf
    assert difference(other, other).ulps == 0.0


@pytest.mark.parametrize(
    "at_start, at_end, same",
    [
        (((64, 64), (128, 128)), ((64, 64), (128, 128)), True),
        (((64, 64), (128, 192)), ((64, 64), (128, 192)), False),
        (((64, 64),), ((64, 128),), False),
        (((64, 64),), ((128, 128),), False),
    ],
    ids=["same", "one base", "at the end", "moved"],
)
def test_addresses_agree_and_stay(at_start, at_end, same):
    assert Sharing(at_start, at_end, (), {}, {}, "").same_memory is same


def test_the_report_for_a_person(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = swa(*FEW[:-1], *SMALL)
    assert result.exit_code == 0
    assert f"crossed (torch {torch.__version__} and jax {jax.__version__})" in result.stdout
    assert "as decoded by torch and by jax: all within the rule" in result.stdout
    _, bridge = result.stdout.split("One cache, two frameworks")
    for words in (
        "cache at the start",
        "cache at the end",
        ": the same",
        "decoded by torch",
        "decoded by jax",
        "10 steps",
    ):
        assert words in bridge
    assert "20 steps, from the same bytes" in bridge
    assert f"with jax {jax.__version__}: " in bridge


@pytest.mark.parametrize("absent, backend", [((), "crossed"), (("jax",), "auto"), (("torch",), "auto")])
def test_the_demo_crosses_where_both_are_installed(absent, backend, monkeypatch):
    asked = []
    monkeypatch.setattr(_frameworks, "installed", lambda name: name not in absent)
    monkeypatch.setattr(_replay, "replay", lambda **options: asked.append(options["backend"]))
    assert CliRunner().invoke(app, ["demo"], catch_exceptions=False).exit_code == 0
    assert asked == [backend]


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="JAX sees no CUDA device")
@pytest.mark.parametrize(
    "options",
    [
        ["--model", "step5", "--tp", "4"],
        ["--model", "mimo-v2", "--layers", "3"],
        ["--model", "gpt-oss", "--block", "16", "--cache-dtype", "float8_e4m3fn"],
        ["--model", "gemma2", "--tp", "4", "--dtype", "float16"],
    ],
    ids=lambda options: options[1],
)
def test_on_a_gpu_in_a_process_of_its_own(options):
    command = [sys.executable, "-m", "bridge._cli", "replay", "--backend", "crossed", *options, "--max-batch", "24"]
    command += ["--speed", "10", "--steps", "60", "--poison", "--check-every", "1", "--json"]
    # Nothing set: the command itself has to leave torch its share of the memory.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XLA_PYTHON_CLIENT")}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["ok"]
    assert report["bridge"]["same_memory"]
    assert {name: by["backend"] for name, by in report["bridge"]["decoded_by"].items()} == {
        "torch": "triton",
        "jax": crossed_runner.choose_backends()[1],
    }
    assert report["bridge"]["both_ways"]["steps"] == 60
    assert len(report["plans"]) > 2
