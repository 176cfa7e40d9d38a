"""The replay on JAX: right on layouts and dtypes, in place, and nothing compiles once a padded batch was seen."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from bridge._replay import Engine, Geometry, ReplayConfig

if find_spec("jax") is None:
    pytest.skip("the runner needs jax", allow_module_level=True)

import jax

import swa_pallas
from bridge._replay import jax_runner
from bridge._replay.jax_runner import JaxRunner
from tests.cli.replays import REQUESTS, SMALL, TINY, compiled_by_jax, report_of, swa

NEEDS_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="compares with the runner on torch")
ON_GPU = jax.default_backend() == "gpu"
FEW = ["--max-batch", "2", "--poison", "--check-every", "3", "--speed", "4", "--steps", "30", "--json"]
SHARED_PROGRAMS = 3
"""Prefill, poison, and the look at pages that are checked."""


def replayed(*arguments, backend="xla"):
    return report_of("--backend", backend, *FEW, *arguments)


def make(**changes):
    settings = {"block": 8, "dtype": "float32", "max_batch": 4, "check_every": 1, "poison": True}
    config = ReplayConfig(**{"model": TINY, **settings, **changes})
    runner = JaxRunner(config, Geometry.of(REQUESTS, config), "xla")
    return runner, Engine(REQUESTS, config, runner)


@pytest.mark.parametrize(
    "options",
    [
        ["--layout", "pages block kv_heads dim"],
        ["--layout", "kv pages block kv_heads dim", "--block", 1],
        ["--layout", "pages kv_heads block (kv dim)", "--layers", 3, "--v-dim", 64],
        [
            "--layout",
            "pages layers kv block kv_heads dim",
            "--layers",
            2,
            "--cache-dtype",
            "float8_e5m2",
            "--k-scale",
            0.25,
        ],
        ["--dtype", "float16", "--cache-dtype", "float8_e4m3fn", "--block", 24],
        ["--dtype", "float32", "--cache-dtype", "int8", "--v-scale", 0.03],
        ["--query-len", 5, "--gate", "--sinks", "--softcap", 3],
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_layouts_dtypes_and_features(options):
    report = replayed(*SMALL, *options)
    assert report["ok"]
    assert report["checks"]["worst"]["ratio"] <= 1
    assert report["checks"]["rows"] > 0
    assert report["pages"]["reused"] > 0
    assert report["pages"]["peak"] < report["pages"]["peak_full_context"]


@NEEDS_TORCH
def test_both_frameworks_replay_the_same_schedule_within_the_rule():
    on_jax, on_torch = (replayed("--model", "mimo-v2", "--tp", 8, backend=name) for name in ("xla", "cpu"))
    same = ("settings", "steps", "requests", "tokens", "rows", "batch_sizes", "kv_bytes", "pages")
    assert {name: on_jax[name] for name in same} == {name: on_torch[name] for name in same}
    assert list(on_jax["plans"]) == list(on_torch["plans"])
    for report in (on_jax, on_torch):
        assert report["checks"]["count"] > 0
        assert report["checks"]["misses"] == 0
    assert on_torch["compiled"] is None
    assert on_torch["clock"] in ("host clock", "CUDA events around graph replays")


def test_json_says_what_ran_and_how_it_was_timed():
    report = replayed(*SMALL)
    assert report["backend"] == "xla"
    assert report["framework"] == f"jax {jax.__version__}"
    assert "dispatch included" in report["clock"]
    assert report["compiled"]["programs"] == SHARED_PROGRAMS + 3 * len(report["plans"])
    assert report["compiled"]["time_s"] > 0
    assert {plan["kernel"] for plan in report["plans"].values()} == {"ops"}
    for times in report["time_us"].values():
        assert 0 < times["median"] <= times["p90"]


def test_the_report_for_a_person(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = swa("--backend", "xla", *FEW[:-1], *SMALL)
    assert result.exit_code == 0
    for words in (f"xla (jax {jax.__version__})", "all within the rule", "host clock around one call each"):
        assert words in result.stdout
    assert "programs in" in result.stdout


def test_batches_are_padded_to_powers_of_two():
    runner, _ = make(max_batch=12, poison=False)
    assert [runner.padded(requests) for requests in range(1, 13)] == [1, 2, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12]


def test_nothing_compiles_once_a_padded_batch_was_seen():
    runner, engine = make()
    buckets, late = compiled_by_jax(engine)
    assert buckets == {1, 2, 4}
    assert engine.result().ok
    assert late == []
    assert runner.compilation().programs == SHARED_PROGRAMS + 3 * len(buckets)


def test_append_is_in_place():
    runner, _ = make(layers=2, layout="layers pages kv_heads block (kv dim)", poison=False)
    runner.plan(1)
    base = runner._cache.bases[0]
    address = base.unsafe_buffer_pointer()
    runner.step(np.array([8, 9], np.int32), np.array([2], np.int32))
    assert base.is_deleted(), "the cache was not donated"
    assert runner._cache.bases[0].unsafe_buffer_pointer() == address


def test_an_append_that_is_lost_is_a_miss(monkeypatch):
    monkeypatch.setattr(swa_pallas, "append", lambda cache, *_, **__: cache)
    _, engine = make(poison=False, max_batch=1, max_steps=3)
    list(engine.steps())
    result = engine.result()
    assert not result.ok
    assert any("append stored other" in check.message for check in result.checks)


def test_a_window_off_by_one_is_a_miss(monkeypatch):
    decode, plan_for = swa_pallas.swa_decode, swa_pallas.plan_for
    monkeypatch.setattr(swa_pallas, "swa_decode", lambda *args, window, **named: decode(*args, window=19, **named))
    monkeypatch.setattr(swa_pallas, "plan_for", lambda *args, window, **named: plan_for(*args, window=19, **named))
    _, engine = make(max_batch=1)
    list(engine.steps())
    result = engine.result()
    assert not result.ok
    assert result.worst_check.ratio > 1e3


def test_padding_rows_that_are_not_zero_are_seen():
    runner, _ = make(poison=False)
    runner.plan(2)
    runner.step(np.full(4, -1, np.int32), np.zeros(2, np.int32))
    assert runner.padding_is_zero(0)
    runner._out = tuple(out.at[TINY.query_len].set(1.0) for out in runner._out)
    assert not runner.padding_is_zero(1)
    assert runner.padding_is_zero(2)


def test_poison_fills_the_pages_and_no_others():
    runner, _ = make(cache_dtype="int8")
    runner._cache = jax.tree.map(lambda base: base * 0, runner._cache)
    runner.poison(np.array([3, 0]))
    poisoned = np.asarray(runner._cache.bases[0]) == 127
    assert poisoned[[0, 3]].all()
    assert not np.delete(poisoned, [0, 3], axis=0).any()


@pytest.mark.skipif(ON_GPU, reason="there is a CUDA device")
@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--backend", "pallas_triton"], "'pallas_triton' needs a CUDA device"),
        (["--backend", "xla", "--dtype", "float64"], "dtype must be"),
        (["--backend", "xla", "--k-scale", "0.5"], "quantised"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = swa(*arguments, "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr


def test_a_jax_that_has_dropped_the_kernels_backend(monkeypatch):
    monkeypatch.setattr(jax_runner, "has_pallas_triton", lambda: False)
    assert jax_runner.choose_backend() == "xla"
    monkeypatch.setenv("COLUMNS", "200")
    result = swa("--backend", "pallas_triton")
    assert result.exit_code == 2
    assert "use backend 'xla'" in result.stderr


def test_backends_are_jax_s_own():
    with pytest.raises(ValueError, match="backend must be one of pallas_triton, xla, got 'interpret'"):
        JaxRunner(ReplayConfig(model=TINY), Geometry(1, 1, 1), "interpret")


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="JAX sees no CUDA device")
@pytest.mark.parametrize("backend", ["pallas_triton", "xla"])
@pytest.mark.parametrize(
    "options",
    [
        ["--model", "step5", "--tp", "4"],
        ["--model", "mimo-v2", "--layers", "3"],
        ["--model", "gpt-oss", "--block", "16", "--cache-dtype", "float8_e4m3fn"],
    ],
    ids=lambda options: options[1],
)
def test_on_a_gpu_in_a_process_of_its_own(options, backend):
    command = [sys.executable, "-m", "bridge._cli", "replay", "--backend", backend, *options, "--max-batch", "24"]
    command += ["--speed", "10", "--steps", "60", "--poison", "--check-every", "3", "--json"]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["ok"]
    assert report["backend"] == backend
    assert len(report["plans"]) > 2
    assert report["roofline"] > 0
