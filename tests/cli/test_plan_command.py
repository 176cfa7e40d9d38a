"""`swa plan`: the plan, the original planner beside it, and a picture whose chunks are exact."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bridge._cli._app import app
from bridge._cli._picture import picture, row_tiles
from swa_plan import DeviceProfile, Plan, Problem, plan, predict, swa_decode_plan


def swa(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)


@given(
    window=st.integers(1, 3000) | st.none(),
    query_len=st.integers(1, 8),
    requests=st.sampled_from([1, 8, 64, 512]),
    group=st.sampled_from([1, 8, 16]),
    invariant=st.booleans(),
    seq_len=st.integers(0, 4096),
)
def test_chunks_cut_the_live_range_without_gap_or_overlap(window, query_len, requests, group, invariant, seq_len):
    problem = Problem(requests, 2 * group, 2, 64, 64, window, 16, 256, query_len=query_len)
    chosen = plan(problem, DeviceProfile.named("h200"), batch_invariant=invariant)
    rows = 0
    for tile in row_tiles(chosen, seq_len):
        rows += len(tile.windows)
        taken = [key for start, end in tile.chunks for key in range(start, end + 1)]
        assert taken == list(range(tile.low, tile.high + 1))
        seen = [window for window in tile.windows if window[1] >= 0]
        if seen:
            assert tile.low == min(start for start, _ in seen)
            assert tile.high == max(end for _, end in seen)
        assert all(
            start % chosen.chunk == 0 or start == tile.low
            for start, end in tile.chunks
            if chosen.chunk and end >= start
        )
    assert rows == query_len
    assert str(picture(chosen, seq_len)).startswith(f"seq_len {seq_len}")


def test_json_is_pure_and_complete():
    result = swa("--model", "step5", "--tp", 4, "--batch", 32, "--device", "h200", "--seq-lens", "1,17,600", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    chosen = Plan.from_json(json.dumps(report["plan"]))
    assert (chosen.problem.heads, chosen.problem.kv_heads, chosen.problem.query_len) == (16, 1, 4)
    assert report["original"] == dict(zip(("pack", "splits"), swa_decode_plan(128, 1, 16, 4, 132, 512), strict=True))
    assert report["workspace_bytes"] == chosen.workspace_bytes
    assert [request["seq_len"] for request in report["requests"]] == [1, 17, 600]


def test_the_picture():
    result = swa("--device", "h200", "--seq-lens", "0,600", "--batch", 8)
    assert result.exit_code == 0
    for words in (
        "kernel portable on h200",
        "the original planner: pack",
        "sees nothing",
        "85 behind the window",
        "row 3",
    ):
        assert words in result.stdout
    assert result.stderr == ""


def test_no_line_is_wider_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    result = swa("--device", "a100", "--model", "gemma2", "--max-seq", 9000)
    assert max(map(len, result.stdout.splitlines())) <= 60
    assert "█" in result.stdout


@pytest.mark.parametrize(
    "arguments, kernel, device, backends",
    [
        (
            ["--device", "h200", "--batch", "256"],
            "portable",
            "h200",
            {"swa_torch": "triton", "swa_pallas": "pallas_triton"},
        ),
        (["--device", "cpu"], "ops", "cpu", {"swa_torch": "cpu", "swa_pallas": "xla"}),
        (["--device", "cpu", "--batch", "1"], "ops", "cpu", {"swa_torch": "cpu", "swa_pallas": "xla"}),
        (["--device", "a100", "--backend", "triton"], "portable", "a100", {"swa_torch": "triton"}),
        (["--device", "h200", "--backend", "gluon"], "hopper", "h200", {"swa_torch": "gluon"}),
        (["--device", "a100", "--backend", "pallas_triton"], "portable", "a100", {"swa_pallas": "pallas_triton"}),
        (["--backend", "xla"], "ops", "cpu", {"swa_pallas": "xla"}),
        (["--backend", "xla", "--device", "h200"], "ops", "h200", {"swa_pallas": "xla"}),
        (["--backend", "interpret"], "interpret", "cpu", {"swa_torch": "interpret"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_backend_of_either_framework(arguments, kernel, device, backends):
    report = json.loads(swa(*arguments, "--json").stdout)
    assert (report["plan"]["kernel"], report["plan"]["device"]) == (kernel, device)
    assert report["backends"] == backends


def test_a_plan_for_the_hopper_kernel():
    result = swa("--device", "h200", "--backend", "gluon", "--tp", 8, "--query-len", 1, "--batch", 2, "--seq-lens", 600)
    assert result.exit_code == 0
    for words in (
        "kernel hopper on h200\n",
        "8 of 8 matrix rows",
        "splits 8: 512 live keys at most, about 64 keys a program",
        "run by backend 'gluon' of swa_torch\n",
        "not modelled",
        "keys 88..599 are live",
    ):
        assert words in result.stdout
    handed = swa("--device", "h200", "--backend", "gluon", "--cache-dtype", "int8")
    assert handed.exit_code == 0
    assert "hands this plan to the portable kernel: it takes caches of 16-bit values" in " ".join(handed.stdout.split())


def test_chunks_of_the_hopper_kernel_are_whole_granules():
    problem = Problem(16, 64, 8, 192, 192, 500, 64, 128)
    made = replace(plan(problem, DeviceProfile.named("h200"), kernel="hopper"), splits=3)
    ((tile,),) = [row_tiles(made, 600)]
    # 500 keys are 32 granules of 16; a third of them, rounded up, are 11.
    assert tile.chunks == ((100, 275), (276, 451), (452, 599))


def test_the_backends_of_a_plan_are_shown():
    shown = swa("--device", "h200", "--batch", "256").stdout
    assert "run by backend 'triton' of swa_torch, backend 'pallas_triton' of swa_pallas" in shown
    assert "pallas_triton plans" not in shown


def test_a_plan_for_launches_that_wait_is_told():
    """Somewhere between plans that must be split and plans that must not, the dearer second kernel decides."""
    h200 = DeviceProfile.named("h200")

    def both(batch):
        problem = Problem(batch, 64, 4, 192, 192, 512, 64, 128, query_len=4)
        return [plan(problem, h200, dependent_launch=launch) for launch in (True, False)]

    batch = next(batch for batch in range(1, 400) if both(batch)[0] != both(batch)[1])
    started, waiting = both(batch)
    shown = swa("--device", "h200", "--batch", batch).stdout
    assert "run by backend 'triton' of swa_torch\n" in shown
    numbers = f"splits {waiting.splits}, tile {waiting.tile}, {waiting.warps} warps, {waiting.stages} stages"
    assert f"pallas_triton plans {numbers}" in shown
    report = json.loads(swa("--device", "h200", "--batch", batch, "--json").stdout)
    assert report["backends"] == {"swa_torch": "triton"}
    assert (report["plan"]["splits"], report["plan_of_swa_pallas"]["splits"]) == (started.splits, waiting.splits)
    assert json.loads(swa("--device", "h200", "--batch", "256", "--json").stdout)["plan_of_swa_pallas"] is None
    assert "pallas_triton plans" not in swa("--device", "cpu", "--batch", batch).stdout
    pallas = json.loads(swa("--device", "h200", "--batch", batch, "--backend", "pallas_triton", "--json").stdout)
    assert Plan.from_json(json.dumps(pallas["plan"])) == waiting
    assert pallas["prediction"]["time_us"] == predict(waiting, h200, dependent_launch=False).time_us


def test_a_plan_tells_what_it_costs_and_what_others_would():
    result = swa("--device", "h200", "--batch", "32", "--model", "step5", "--tp", 4)
    assert result.exit_code == 0
    for words in ("Why this plan", "launch", "reading", "together", "in 1 wave", "Alternatives", "chosen", "slower"):
        assert words in result.stdout
    report = json.loads(swa("--device", "h200", "--batch", "32", "--model", "step5", "--tp", 4, "--json").stdout)
    chosen = Plan.from_json(json.dumps(report["plan"]))
    prediction = predict(chosen, DeviceProfile.named("h200"))
    assert report["prediction"]["time_us"] == prediction.time_us
    assert report["prediction"]["parts"] == prediction.parts
    assert f"{prediction.time_us:.2f} us" in result.stdout
    assert 2 <= len(report["alternatives"]) <= 7
    slower = [each["slower"] for each in report["alternatives"]]
    assert slower == sorted(slower)
    assert slower[0] >= 0
    for each in report["alternatives"]:
        assert each["time_us"] == pytest.approx(prediction.time_us * (1 + each["slower"]))
        assert Plan.from_json(json.dumps(each["plan"])).problem == chosen.problem


@pytest.mark.parametrize(
    "options",
    [["--dtype", "float32"], ["--batch-invariant"], ["--backend", "xla"], ["--backend", "interpret"]],
    ids=str,
)
def test_what_is_not_modelled_gets_no_number(options):
    result = swa("--device", "h200", *options)
    assert "not modelled" in result.stdout
    assert "Alternatives" not in result.stdout
    report = json.loads(swa("--device", "h200", *options, "--json").stdout)
    assert report["prediction"]["time_us"] is None
    assert report["alternatives"] == []


@pytest.mark.parametrize("name", ["xla", "pallas_triton"])
def test_a_plan_names_the_kernel_that_swa_pallas_runs_by_that_name(name):
    """The command imports no framework and keeps a table of its own."""
    pytest.importorskip("jax", reason="swa_pallas needs jax")
    from swa_pallas._device import BACKENDS

    assert json.loads(swa("--backend", name, "--device", "h200", "--json").stdout)["plan"]["kernel"] == BACKENDS[name]


def test_a_plan_names_the_kernel_that_swa_torch_runs_by_that_name():
    pytest.importorskip("torch", reason="swa_torch needs torch")
    from bridge._cli import _frameworks
    from swa_torch._device import BACKENDS

    assert _frameworks.KERNELS["torch"] == BACKENDS


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--backend", "cuda"], "pallas_triton or xla (JAX), got 'cuda'"),
        (["--backend", "gluon", "--device", "a100"], "kernel 'hopper' needs an sm_90 GPU, got device 'a100'"),
        (["--backend", "gluon", "--device", "cpu"], "kernel 'hopper' needs an sm_90 GPU, got device 'cpu'"),
        (["--backend", "pallas_triton", "--device", "cpu"], "needs a GPU, got --device cpu"),
        (["--device", "h900"], "got 'h900'"),
        (["--seq-lens", "1,x"], "got 'x'"),
        (["--seq-lens", "9000"], "from 0 to 8192"),
        (["--window", "0"], "at least 1"),
        (["--model", "custom"], "--heads, --kv-heads"),
        (["--batch", "0"], "--batch"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = swa(*arguments, "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr


def test_it_works_without_a_framework():
    script = (
        "import sys; sys.modules.update(torch=None, jax=None); sys.argv = ['swa', 'plan', '--json']\n"
        "from bridge._cli import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["plan"]["device"]
