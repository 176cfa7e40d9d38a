"""`swa bench`: the list of cases, the report's arithmetic, files out and in again, and a run on the CPU."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch", reason="the bench needs torch")
if find_spec("benchmarks") is None:
    pytest.skip("benchmarks are not part of this installation", allow_module_level=True)

from benchmarks import fetch_peers, peers, report, results
from benchmarks.cases import Case
from benchmarks.contenders import CONTENDERS, choose
from benchmarks.contenders.base import Machine
from benchmarks.results import CaseResult, Outcome, Run
from bridge._cli._app import app

NO_GPU, HOPPER, AMPERE = Machine(False, 0), Machine(True, 90), Machine(True, 80)


def swa(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], catch_exceptions=False)


def timed(time_us, **values):
    return Outcome(results.MEASURED, time_us=time_us, spread=0.01, **values)


def a_case(name="b4", requests=4, suite="nine", **values):
    return Case(name, suite, (600,) * requests, 8, 8, family="8 x 8", **values)


def a_run(*, tbps=4.45, device="NVIDIA H200, sm_90, 132 multiprocessors"):
    run = Run(device, {"torch": "2.11", "commit": None}, "method", 3, {"unified": "not fetched"}, [tbps, 4.45])
    for requests, ours, original in ((1, 5.0, 7.0), (4, 10.0, 10.2), (16, 20.0, 19.0)):
        outcomes = {
            "floor": timed(4.0 * requests**0.5),
            "torch graph": timed(ours, plan="portable: pack 1"),
            "torch eager": timed(40.0, host_us=31.0),
            "original": timed(original),
            "fa3 + gate": Outcome(results.FAILED, "RuntimeError: no"),
        }
        run.cases.append(CaseResult(a_case(f"b{requests}", requests), outcomes))
    wrong = {"floor": timed(2.0), "torch graph": timed(4.0), "original": Outcome(results.WRONG, "differs by 0.5")}
    run.cases.append(CaseResult(a_case("context1024", 2, "context"), wrong))
    far = {"floor": timed(2.0), "torch graph": timed(4.1), "original": Outcome(results.UNFIT, "head size 64")}
    run.cases.append(CaseResult(Case("context9999", "context", (9999, 9999), 8, 8, family="context"), far))
    return run


def test_list():
    listed = swa("--list", "--suite", "nine,mtp", "--case", "b*h8", "--case", "mtp2_*")
    assert listed.exit_code == 0
    names = [line.split()[0] for line in listed.stdout.splitlines() if " x " in line and "head 192" in line]
    assert names == ["b1h8", "b16h8", "b64h8", "b256h8", "mtp2_b32h8", "mtp2_b16h1"]
    assert "805.3" in listed.stdout
    assert "2 rows" in listed.stdout


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--suite", "ten"], "--suite must be one of nine, models"),
        (["--case", "zzz"], "got 'zzz'"),
        (["--contender", "fa4"], "--contender must be one of floor, torch graph"),
        (["--rounds", "0"], "--rounds"),
        (["--json", "/nowhere/at/all.json"], "existing folder"),
        (["--from", "/nowhere.json"], "is no file of"),
        (["--trace", "/nowhere.csv", "--suite", "traces"], "cannot be read"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    result = swa(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr


def test_contenders_that_cannot_run_are_named_with_the_reason(monkeypatch, tmp_path):
    present, absent = choose([], NO_GPU)
    assert "torch eager" in [each.name for each in present]
    for name in ("floor", "torch graph", "jax jit", "original", "unified", "fa3 + gate", "xla gather"):
        assert "needs a CUDA device" in absent[name]
    with pytest.raises(ValueError, match="original: needs a CUDA device"):
        choose(["original"], NO_GPU)

    for module in (fetch_peers, peers):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    asked = ["original", "unified", "FA3-gate", "floor"]
    present, absent = choose(asked, HOPPER)
    assert [each.name for each in present] == ["floor"]
    assert absent == dict.fromkeys(("original", "unified", "fa3 + gate"), f"not fetched: {fetch_peers.COMMAND}")
    assert "sm_80" in choose(asked, AMPERE)[1]["fa3 + gate"]
    for name in (*fetch_peers.ORIGINAL_FILES, *fetch_peers.UNIFIED_FILES, *fetch_peers.FA3_FILES):
        (tmp_path / name).touch()
    assert choose(asked, HOPPER)[1] == {}


def test_default_contenders_are_all_but_two():
    assert [name for name, each in CONTENDERS.items() if not each.default] == ["torch original plan", "torch fp8"]


@pytest.mark.parametrize(
    "values, why",
    [
        ({"k_dim": 128, "v_dim": 128}, "head size 128/128"),
        ({"group": 32}, "group 32"),
        ({"gate": False}, "it has a gate"),
        ({"sinks": True}, "neither sinks"),
        ({"softcap": 30.0}, "nor softcap"),
    ],
)
def test_what_the_original_cannot_do(values, why):
    original = CONTENDERS["original"]
    assert original.unfit(Case("x", "", (600,), 1, 16)) is None
    assert why in original.unfit(
        Case(**{"name": "x", "suite": "", "seq_lens": (600,), "kv_heads": 1, "group": 16, **values})
    )


def test_peers_are_unpacked_and_compressed(tmp_path):
    import lzma
    import zipfile

    wheel = tmp_path / "vllm-1.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/a.py", "source")
        archive.writestr("vllm/lib.so", b"machine code" * 1000)
    fetch_peers.unpack(wheel, {"a.py": "vllm/a.py", "lib.so.xz": "vllm/lib.so"}, tmp_path / "peers")
    assert (tmp_path / "peers" / "a.py").read_text() == "source"
    assert lzma.decompress((tmp_path / "peers" / "lib.so.xz").read_bytes()) == b"machine code" * 1000


def test_geometric_mean():
    assert results.geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)
    assert results.geometric_mean([None]) is None
    assert report.mean_cell([2.0, None, 8.0]) == "4.000 (2.00)"


def test_slower_means_by_more_than_three_percent():
    def ours(time_us):
        return CaseResult(a_case(), {"torch graph": timed(time_us), "original": timed(100.0)})

    assert not ours(102.9).slower_than("original")
    assert ours(103.1).slower_than("original")
    assert not ours(103.1).slower_than("unified")
    assert ours(50.0).ratio("original") == 2.0
    assert ours(50.0).ratio("unified") is None


def test_a_floor_that_is_too_low_makes_a_run_not_count():
    assert a_run(tbps=4.41).counts
    assert not a_run(tbps=4.39).counts
    assert a_run(tbps=3.0, device="NVIDIA A100").counts
    assert a_run(tbps=3.0, device="NVIDIA GH200 480GB, sm_90, 132 multiprocessors").counts
    assert not a_run(tbps=3.0, device="NVIDIA H200").counts
    missing = a_run()
    missing.floor_tbps = []
    assert not missing.counts
    assert results.terabytes_per_second(805_306_368, 180.0) == pytest.approx(4.474, abs=1e-3)


def test_the_report_says_what_was_found(tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps(a_run(tbps=4.2).to_json()))
    shown = swa("--from", file)
    assert shown.exit_code == 0
    text = shown.stdout
    assert "this run does not count: below 4.4 TB/s" in text
    assert "absent: unified (not fetched)" in text
    assert "failed: fa3 + gate at b1 (RuntimeError: no)" in text
    assert "wrong: original at context1024 (differs by 0.5)" in text
    assert "n/a: original at context9999 (head size 64)" in text
    assert "slower than original by more than 3%: b16 1.05x" in text
    assert "40.00 (31.00)" in text
    means = next(line for line in text.splitlines() if line.startswith("nine "))
    # original / ours: (7 / 5 * 10.2 / 10 * 19 / 20) ** (1 / 3), at worst 0.95; floor / ours: (.8 * .8 * .8) ** (1 / 3).
    assert means.split() == ["nine", "3", "0.800", "(0.80)", "1.107", "(0.95)"]
    file.write_text(json.dumps(a_run().to_json()))
    assert "does not count" not in swa("--from", file).stdout


def test_json_goes_round(tmp_path):
    run = a_run()
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run.to_json(), allow_nan=False))
    assert results.load(file) == run
    assert json.loads(file.read_text())["cases"][0]["case"]["read_bytes"] == run.cases[0].case.read_bytes
    for text, words in (("[]", "it holds a list"), ("{", "is no file"), ("{}", "KeyError: 'cases'")):
        file.write_text(text)
        with pytest.raises(ValueError, match=words):
            results.load(file)


def test_plots_are_drawn_from_a_file(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "run.json"
    file.write_text(json.dumps(a_run().to_json()))
    assert swa("--from", file, "--plots", tmp_path / "plots").exit_code == 0
    drawn = {path.name: path.stat().st_size for path in (tmp_path / "plots").iterdir()}
    assert set(drawn) == {"latency.png", "floor.png", "ratios.png", "context.png"}
    assert min(drawn.values()) > 5000


def test_a_run_on_the_cpu(tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file, plots = tmp_path / "run.json", tmp_path / "plots"
    result = swa("--case", "cpu_b1h2", "--case", "cpu_b8h2", "--rounds", 1, "--json", file, "--plots", plots)
    assert result.exit_code == 0, result.stderr
    assert "these are times of the CPU, and of nothing else" in result.stderr
    assert "absent: floor (needs a CUDA device" in result.stdout
    run = results.load(file)
    assert [each.case.name for each in run.cases] == ["cpu_b1h2", "cpu_b8h2"]
    assert "CPU times" in run.method
    for each in run.cases:
        assert each.outcomes["torch eager"].status == results.MEASURED
        assert each.time("torch eager") > 0
        assert each.outcomes["torch eager"].plan.startswith("ops")
        if find_spec("jax") is not None:
            assert each.outcomes["jax single"].status == results.MEASURED
            assert each.outcomes["jax single"].error < 0.02
    assert (plots / "latency.png").stat().st_size > 5000


def test_jax_does_not_take_the_gpus_memory(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    script = (
        "import os, sys; from bridge._cli._app import app\n"
        "try: app(['bench', '--list', '--suite', 'nine'])\n"
        "except SystemExit: pass\n"
        "print('jax' in sys.modules, os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines()[-1] == "False false", result.stderr


def test_without_a_checkout_it_says_so(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("bridge._cli._bench.find_spec", lambda name: None)
    result = swa("--list")
    assert result.exit_code == 2
    assert "bench needs a checkout of the repository" in result.stderr


@pytest.mark.gpu
def test_a_run_on_a_gpu(tmp_path):
    file = tmp_path / "run.json"
    result = swa("--case", "b1h8", "--rounds", 1, "--json", file)
    assert result.exit_code == 0, result.stderr
    run = results.load(file)
    assert len(run.floor_tbps) == 2
    (only,) = run.cases
    assert {name: each.why for name, each in only.outcomes.items() if each.status != results.MEASURED} == {}
    assert 0 < only.ratio("floor") < 1.05
