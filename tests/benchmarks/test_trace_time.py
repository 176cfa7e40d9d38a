"""A trace's time: which steps are timed, what they stand for, and that both kernels do the same work."""

from pathlib import Path

import pytest

from benchmarks import peers, trace_time
from benchmarks.contenders import original
from benchmarks.tensors import make_tensors
from bridge._replay import bundled_trace


def test_sampled_steps_stand_for_all():
    steps = [[600] * size for size in (1, 1, 1, 1, 1, 5, 7, 8, 9, 16, 17)]
    samples = trace_time.sample(steps, 2)
    assert [(len(each.seq_lens), each.steps) for each in samples] == [
        (1, 2.5), (1, 2.5), (5, 1.5), (8, 1.5), (9, 1.0), (16, 1.0), (17, 1.0)
    ]  # fmt: skip
    assert sum(each.steps for each in samples) == len(steps)
    assert len(trace_time.sample(steps, 100)) == len(steps)


def test_a_traces_time_is_the_weighted_sum():
    samples = [trace_time.Sample((600, 700), 3.0), trace_time.Sample((600,) * 4, 2.0)]
    seen = []

    def time_step(case):
        seen.append(case)
        return {"ours": 10.0 * case.requests, "original": 15.0 * case.requests}

    found = trace_time.trace_times(samples, trace_time.SHAPES["step5, tp 8"], time_step)
    assert (found["ours_ms"], found["original_ms"], found["steps"], found["timed"]) == (0.14, 0.21, 5, 2)
    assert found["original / ours"] == pytest.approx(1.5)
    assert {case.max_blocks for case in seen} == {11}  # one width of the table
    assert [(case.kv_heads, case.group, case.query_len) for case in seen] == [(1, 8, 4)] * 2
    assert all(original.unfit(case) is None for case in seen)
    assert "original / ours 1.500" in trace_time.summary("x", trace_time.SHAPES["step5, tp 8"], found, 1.0)


def test_a_step_of_a_trace_is_timed_with_both(fake_gpu, monkeypatch):
    monkeypatch.setattr(trace_time, "make_tensors", lambda case: make_tensors(case, device="cpu", sets=2))
    case = trace_time.step_case(trace_time.SHAPES["64 heads over 8"], (70, 600))
    assert trace_time.step_times(case) == {"ours": 8.0, "original": 8.0}
    monkeypatch.setattr(peers, "original_kernel", lambda: lambda *tensors, **options: tensors[6].fill_(1.0))
    with pytest.raises(RuntimeError, match="ours and the original differ"):
        trace_time.step_times(case)


def test_the_bundled_trace_is_replayed_by_default():
    arguments = trace_time.parse_arguments([])
    assert arguments.trace == bundled_trace()
    assert trace_time.parse_arguments(["x.csv", "--each", "2"]).trace == Path("x.csv")


def test_no_step_of_a_batch_size_is_refused(capsys):
    with pytest.raises(SystemExit) as raised:
        trace_time.parse_arguments(["--each", "0"])
    assert raised.value.code == 2
    assert "--each must be at least 1, got 0" in capsys.readouterr().err
