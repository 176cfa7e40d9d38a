"""The sweep of plans, its Python at least: cases, what is left out, what is measured last, and what is written."""

import json
import math
from dataclasses import replace

import pytest

for name in ("torch", "triton", "benchmarks"):
    pytest.importorskip(name)

from benchmarks import sweep, sweep_cases  # noqa: E402
from benchmarks.sweep_cases import DEFAULT, OTHERS, Variant, plans, random_variants  # noqa: E402
from benchmarks.tensors import make_tensors  # noqa: E402
from benchmarks.workloads import Workload, case_of  # noqa: E402
from bridge._tune.compiling import Spills  # noqa: E402
from swa_plan import DeviceProfile, plan  # noqa: E402
from swa_plan._costs import CANDIDATE_TILES, Tile, faults  # noqa: E402
from swa_plan._shapes import ceil_div  # noqa: E402

H200 = DeviceProfile.named("h200")
SMALL = Variant(Workload("small", 3, 2, 4, 2, 256, 128, 64, 64))


def test_the_nine_cases_are_swept_by_default():
    assert [each.name for each in sweep.chosen(None, 0, 0)] == [each.name for each in DEFAULT]
    assert len(DEFAULT) == 9
    assert [each.name for each in sweep.chosen(["fp8_b16h8", "b1h8"], 0, 0)] == ["fp8_b16h8", "b1h8"]
    assert len(sweep.chosen(None, 4, 1)) == 4
    with pytest.raises(ValueError, match=r"--only must be some of b1h8.*got nonesuch"):
        sweep.chosen(["b1h8", "nonesuch"], 0, 0)


@pytest.mark.parametrize("variant", [*DEFAULT, *OTHERS, *random_variants(8, 3)], ids=lambda variant: variant.name)
def test_plans_are_worth_trying(variant):
    found = plans(variant, H200)
    assert len(found) == len(set(found)) >= 15
    for each in found:
        assert not faults(each.problem, each.rows, Tile(each.tile, each.warps, each.stages))
        tiles = ceil_div(variant.problem.row_keys + each.pack - 1, each.tile)
        assert ceil_div(tiles, ceil_div(tiles, each.splits)) == each.splits
    if variant.dtype == "bfloat16" == variant.cache_dtype and variant.workload.query_len == 1:
        tried = {(each.tile, each.warps, each.stages) for each in found}
        assert len(tried & set(CANDIDATE_TILES)) >= 10
        assert tried - set(CANDIDATE_TILES)


def test_splits_are_tried_that_are_no_powers_of_two():
    (b32h1,) = (each for each in DEFAULT if each.name == "b32h1")
    assert {each.splits for each in plans(b32h1, H200)} >= {1, 2, 3, 4, 5, 6, 8, 16}


def test_random_shapes_are_what_they_are_said_to_be():
    found = random_variants(60, 7)
    assert found == random_variants(60, 7)
    assert found != random_variants(60, 8)
    assert len({each.name for each in found}) == 60
    for each in found:
        w = each.workload
        assert 1.5e6 < w.read_bytes < 9e8
        assert 64 <= w.dim <= 256
        assert (w.group in range(1, 17), w.kv_heads in range(1, 9), w.query_len in range(1, 5)) == (True,) * 3
        assert 128 <= w.window <= 4096
        assert w.block in (16, 64, 128)


class Timer:
    """Takes as many microseconds as its plan has splits, and a little more a tile."""

    def __init__(self, launch, calls):
        assert calls >= 8
        launch(calls - 1)
        self.launch = launch

    def measure(self):
        chosen = self.launch.__closure__
        (made,) = [cell.cell_contents for cell in chosen if hasattr(cell.cell_contents, "splits")]
        return made.splits + made.tile / 1000


@pytest.fixture
def cpu(monkeypatch):
    """No GPU: tensors on the CPU, plans of plain operations, a timer that counts."""

    def on_cpu(each):
        return replace(each, kernel="ops")

    monkeypatch.setattr(sweep, "make_tensors", lambda workload, cache_dtype: make_tensors(
        case_of(workload), device="cpu", cache_dtype=cache_dtype, sets=2
    ))  # fmt: skip
    monkeypatch.setattr(sweep, "GraphTimer", Timer)
    monkeypatch.setattr(sweep, "make_plan", lambda problem, profile: on_cpu(plan(problem, profile)))
    monkeypatch.setattr(sweep, "plans", lambda variant, profile: [on_cpu(each) for each in plans(variant, profile)])
    monkeypatch.setattr(sweep, "compile_plans", lambda plans, processes: len(plans))
    monkeypatch.setattr(sweep, "cuda_profile", {1: H200}.get)
    monkeypatch.setattr(sweep.torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(sweep.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(sweep.torch.cuda, "get_device_name", {1: "no GPU"}.__getitem__)


def test_the_best_and_ours_are_measured_together(cpu):
    swept = sweep.sweep(SMALL, H200, Spills(), math.inf)
    assert swept.best.plan.splits == min(each.splits for each in plans(SMALL, H200))
    assert swept.ours.plan == replace(plan(SMALL.problem, H200), kernel="ops")
    assert swept.regret == swept.ours.time_us / swept.best.time_us >= 1
    assert [each.time_us for each in swept.times] == sorted(each.time_us for each in swept.times)
    assert "regret" in sweep.report(swept)
    assert "OURS DOES NOT RUN" in sweep.report(swept._replace(ours=None))
    assert swept._replace(ours=None).regret is None
    json.dumps(swept.to_json())


def test_plans_that_spill_are_left_out(cpu, monkeypatch):
    spills = Spills()
    monkeypatch.setattr(spills, "of", lambda each: each.splits == 1)
    swept = sweep.sweep(SMALL, H200, spills, math.inf)
    ours = plan(SMALL.problem, H200)
    assert {each.plan.splits for each in swept.times} - {ours.splits} >= {2}
    assert all(each.plan.splits > 1 or each.plan == replace(ours, kernel="ops") for each in swept.times)


def test_where_nothing_runs_or_time_is_up_there_is_no_result(cpu, monkeypatch):
    assert sweep.sweep(SMALL, H200, Spills(), -math.inf) is None
    assert list(sweep.sweep_all([SMALL], H200, 2, -math.inf)) == []
    monkeypatch.setattr(sweep, "runs", lambda call: False)
    assert sweep.sweep(SMALL, H200, Spills(), math.inf) is None


def test_a_shape_that_the_time_limit_cuts_keeps_what_was_measured(cpu, monkeypatch, capsys):
    now = iter(range(1000))
    monkeypatch.setattr(sweep.time, "monotonic", lambda: next(now))
    total = len(plans(SMALL, H200))
    swept = sweep.sweep(SMALL, H200, Spills(), 9.5)
    assert swept.left == total - 10
    assert len(swept.times) in (10, 11)  # ours may be among them
    assert swept.best.time_us == min(each.time_us for each in swept.times)
    assert f"reached within small, after 10 of {total} plans\n" in capsys.readouterr().out
    assert f"at least: {swept.left} plans were not measured" in sweep.report(swept)
    assert swept.to_json()["left"] == swept.left
    assert sweep.regrets_of([swept, swept._replace(left=0)]) == [swept.regret]
    now = iter(range(1000))
    assert sweep.sweep(SMALL, H200, Spills(), 2.5) is None
    assert f"after 3 of {total} plans: it is left out" in capsys.readouterr().out


def test_everything_is_written_after_each_shape(cpu, monkeypatch, tmp_path, capsys):
    path = tmp_path / "sweep.json"
    other = Variant(SMALL.workload._replace(name="fp8"), cache_dtype="float8_e4m3fn")
    monkeypatch.setattr(sweep, "chosen", lambda *_: [SMALL, other])
    monkeypatch.setattr("sys.argv", ["sweep", "--json", str(path), "--random", "2", "--processes", "3"])
    written = []
    write = sweep._write
    monkeypatch.setattr(sweep, "_write", lambda *arguments: written.append(write(*arguments)))
    sweep.main()
    assert len(written) == 2
    found = json.loads(path.read_text())
    assert list(found["cases"]) == ["small", "fp8"]
    assert found["summary"]["shapes"] == 2
    assert found["summary"]["largest"] >= found["summary"]["geometric_mean"] >= 1
    assert [each.name for each in tmp_path.iterdir()] == ["sweep.json"]
    assert "2 shapes: regret" in capsys.readouterr().out


def test_wrong_names_are_told(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["sweep", "--only", "nonesuch"])
    with pytest.raises(SystemExit):
        sweep.main()
    assert "got nonesuch" in capsys.readouterr().err


def test_a_summary():
    assert sweep.summary([1.0, 1.21]) == {"shapes": 2, "geometric_mean": pytest.approx(1.1), "largest": 1.21}
    assert sweep.summary([])["geometric_mean"] is None
    assert len(sweep_cases.TILES) == len(CANDIDATE_TILES) + len(sweep_cases.OUTSIDE_TILES)
