"""`swa replay` on the CPU: models, layouts and dtypes are right, stdout is pure, exit codes mean what they say."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from bridge import parity
from bridge._cli import _replay
from tests.cli.numpy_runner import NumpyRunner
from tests.cli.replays import SMALL, report_of, swa

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="replay needs torch")

FEW = ["--backend", "cpu", "--max-batch", "4", "--poison", "--check-every", "3", "--speed", "4", "--json"]


def replayed(*arguments):
    return report_of(*FEW, *arguments)


@pytest.mark.parametrize(
    "options",
    [
        ["--model", "step5", "--tp", 4],
        ["--model", "step3.7", "--tp", 8],
        ["--model", "mimo-v2", "--tp", 4],  # 192/128 with sinks
        ["--model", "gpt-oss", "--tp", 8],
        ["--model", "gemma2", "--tp", 8],  # softcap, and a window longer than most contexts
        ["--model", "gemma3", "--tp", 8],
        ["--model", "mistral", "--tp", 8],
    ],
    ids=lambda options: options[1],
)
def test_models(options):
    report = replayed(*options, "--steps", 8)
    assert report["ok"]
    assert report["settings"]["model"] == options[1]
    assert report["steps"] == 8
    assert report["checks"]["rows"] > 0
    assert report["checks"]["worst"]["ratio"] <= 1


@pytest.mark.parametrize(
    "options",
    [
        ["--layout", "pages block kv_heads dim"],
        ["--layout", "kv pages block kv_heads dim", "--block", 1],
        ["--layout", "pages kv_heads block (kv dim)", "--layers", 3, "--v-dim", 64],
        ["--layout", "pages layers kv block kv_heads dim", "--layers", 2],
        ["--layout", "layers pages kv_heads block dim", "--block", 24],
        ["--dtype", "float16", "--cache-dtype", "float8_e4m3fn"],
        ["--dtype", "bfloat16", "--cache-dtype", "float8_e5m2", "--k-scale", 0.25, "--layers", 2],
        ["--dtype", "float32", "--cache-dtype", "int8", "--v-scale", 0.05],
        ["--query-len", 5, "--gate", "--sinks", "--softcap", 3],
        ["--window", 1],
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_layouts_dtypes_and_features(options):
    if any("float8" in str(option) for option in options) and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("append runs in Triton's interpreter then, whose casts to fp8 are wrong")
    report = replayed(*SMALL, *options, "--steps", 30)
    assert report["ok"]
    assert report["checks"]["worst"]["ratio"] <= 1
    assert report["pages"]["reused"] > 0
    assert report["pages"]["peak"] < report["pages"]["peak_full_context"]
    assert report["kv_bytes"]["read"] < report["kv_bytes"]["full_context"]


def test_poison_changes_no_number_that_is_checked():
    """The same seed with and without poison: same data, so the same worst error to the last bit."""
    poisoned = replayed(*SMALL, "--steps", 25, "--seed", 5)
    clean = replayed(*SMALL, "--steps", 25, "--seed", 5, "--no-poison")
    assert poisoned["checks"] == clean["checks"]


def test_the_report_for_a_person():
    result = swa(*FEW[:-1], *SMALL, "--steps", 10)
    assert result.exit_code == 0
    for words in ("Batch sizes", "Plans", "requests finished", "KV bytes read", "peak pages", "all within the rule"):
        assert words in result.stdout
    assert "%" not in result.stdout.split("attention reads")[1].splitlines()[0], "a CPU has no roofline here"


def test_a_broken_runner_exits_with_1(monkeypatch):
    def off_by_one(config, geometry, framework, backend):
        return NumpyRunner(config, geometry, window_error=1)

    monkeypatch.setattr(_replay, "make_runner", off_by_one)
    result = swa(*SMALL, "--dtype", "float32", "--steps", 12, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ok"] is False
    assert "MISS at step" in result.stderr


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "replay.png"
    replayed(*SMALL, "--steps", 10, "--plot", path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--model", "llama"], "one of step5"),
        (["--model", "custom", "--heads", "4"], "--kv-heads, --k-dim, --window"),
        (["--tp", "5"], "tp must divide"),
        (
            ["--backend", "cuda"],
            "--backend must be auto, triton, gluon, cpu, interpret (PyTorch), pallas_triton or xla (JAX), or crossed",
        ),
        (["--backend", "interpret", "--dtype", "bfloat16"], "float16 or float32"),
        (["--backend", "interpret", "--cache-dtype", "float8_e5m2"], "use int8"),
        (["--layout", "pages block dim"], "kv_heads"),
        (["--dtype", "float64"], "dtype must be"),
        (["--cache-dtype", "float16"], "cache_dtype must be"),
        (["--k-scale", "0.5"], "quantised"),
        (["--block", "0"], "--block"),
        (["--plot", "no/such/folder/x.png"], "existing folder"),
        (["no-such-trace.csv"], "No such file"),
        (["--steps", "-1"], "--steps"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, words, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # restored afterwards, as the command sets it
    monkeypatch.setenv("COLUMNS", "200")
    result = swa(*arguments, "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr


@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_a_gpus_backend_needs_one(backend, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = swa("--backend", backend, "--json", *SMALL)
    assert result.exit_code == 2
    assert f"backend '{backend}' needs a CUDA device, and torch sees none" in " ".join(result.stderr.split())


def test_a_trace_file_and_its_errors(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")  # no line break within the path
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,70,5\n")
    report = replayed(path, *SMALL)
    assert report["requests"] == {"trace": 1, "finished": 1}
    assert report["tokens"] == 5
    path.write_text(path.read_text() + "2023-11-16 18:15:46.6805900,70,many\n")
    result = swa(path, *SMALL)
    assert result.exit_code == 2
    assert "trace.csv:3: column GeneratedTokens" in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="the interpreter is Triton's")
def test_the_interpreter_in_a_process_of_its_own():
    command = [sys.executable, "-m", "bridge._cli", "replay", "--backend", "interpret", *SMALL, "--steps", "3"]
    command += ["--max-batch", "2", "--json", "--poison", "--query-len", "2", "--check-every", "1", "--gate"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["backend"], report["settings"]["dtype"]) == ("interpret", "float16")
    assert report["ok"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        ["--model", "step5", "--tp", 4],
        ["--model", "mimo-v2", "--layers", 3],
        ["--model", "gpt-oss", "--block", 16, "--cache-dtype", "float8_e4m3fn"],
        ["--model", "gemma2", "--tp", 4, "--dtype", "float16"],
    ],
    ids=lambda options: options[1],
)
@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_graphs_on_a_gpu(backend, options):
    reason = parity.absent().get(backend)
    if reason is not None:
        pytest.skip(reason)
    report = replayed(*options, "--backend", backend, "--max-batch", 24, "--speed", 10, "--steps", 60)
    assert report["ok"]
    assert len(report["plans"]) > 2
    assert report["roofline"] > 0
