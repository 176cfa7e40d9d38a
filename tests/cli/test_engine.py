"""The engine on a runner of NumPy: schedules, poison, records, and that what is broken is found."""

from dataclasses import replace

import numpy as np
import pytest

from bridge._replay import Engine, Geometry, ReplayConfig, Request
from bridge._replay.batching import Batch
from swa_plan.models import ModelShape
from tests.cli.numpy_runner import NumpyRunner

MTP = ModelShape("mtp", 4, 2, 16, 32, 20, query_len=3, gate=True)
PLAIN = ModelShape("plain", 4, 1, 16, 16, 7, sinks=True, softcap=5.0)


def make_trace(count=24, every_s=0.01):
    random = np.random.default_rng(3)
    return [
        Request(number, number * every_s, int(random.integers(0, 90)), int(random.integers(1, 25)))
        for number in range(count)
    ]


def config(model=MTP, **changes):
    checked = {"poison": True, "check_every": 1, "check_requests": 9}
    return ReplayConfig(**{"model": model, "block": 8, "dtype": "float32", "max_batch": 4, **checked, **changes})


def run(requests, settings, **faults):
    runner = NumpyRunner(settings, Geometry.of(requests, settings), **faults)
    engine = Engine(requests, settings, runner)
    records = list(engine.steps())
    return engine.result(), records, runner


@pytest.mark.parametrize("model", [MTP, PLAIN], ids=lambda model: model.name)
@pytest.mark.parametrize("block", [1, 8, 24])
def test_thirty_poisoned_steps_are_right(model, block):
    result, records, runner = run(make_trace(), config(model, block=block, max_steps=30))
    assert result.ok, result.worst_check
    assert len(records) == len(result.steps) == 30
    assert result.worst_check.ratio <= 1
    assert sum(check.rows for check in result.checks) == sum(r.requests for r in records) * model.query_len
    assert runner.poisoned


def test_the_whole_trace_is_served():
    requests = make_trace()
    result, records, runner = run(requests, config())
    assert result.finished == len(requests)
    assert result.tokens == sum(request.generated for request in requests)
    assert max(record.requests for record in records) == 4
    assert any(record.queued for record in records)
    assert runner.plans == list(dict.fromkeys(record.bucket for record in records)), "a plan is asked for once a bucket"
    assert [(step.append_us, step.attention_us) for step in result.steps] == [(1.0, 2.0)] * len(records)


def test_freed_pages_are_reused_and_the_cache_stays_small():
    requests = [Request(0, 0.0, 10, 2000)]
    result, _, runner = run(requests, config(max_batch=1, check_every=50))
    assert result.ok
    assert result.peak_pages <= result.pool_pages == 4
    assert result.peak_pages_full == 252
    assert result.reused_pages > 240
    assert set(runner.poisoned) <= set(range(result.peak_pages))


def test_bytes_are_those_of_the_windows():
    result, _, _ = run([Request(0, 0.0, 100, 3)], config(PLAIN, max_batch=1))
    key_bytes = (16 + 16) * 4
    assert [step.bytes_read for step in result.steps] == [7 * key_bytes] * 3
    assert [step.bytes_full for step in result.steps] == [101 * key_bytes, 102 * key_bytes, 103 * key_bytes]
    assert result.attention_gbps == pytest.approx(7 * key_bytes / 2.0 / 1e3)
    assert result.roofline is None


def test_idle_time_is_skipped_and_requests_wait_for_their_arrival():
    requests = [Request(0, 0.0, 5, 2), Request(1, 100.0, 5, 2)]
    _, records, _ = run(requests, config(PLAIN))
    assert [record.clock_s for record in records] == pytest.approx([0.0, 0.02, 100.0, 100.02])
    _, records, _ = run(requests, config(PLAIN, speed=1e6))
    assert [record.requests for record in records] == [1, 2, 1]


def test_a_replay_is_a_function_of_trace_and_seed():
    def schedule(**changes):
        records = run(make_trace(), config(**changes))[1]
        return [replace(record, host_us=0.0, append_us=0.0, attention_us=0.0) for record in records]

    assert schedule() == schedule(check_every=7, check_requests=1, poison=False)
    assert schedule() != schedule(seed=1)


@pytest.mark.parametrize("window_error", [-1, 1])
def test_a_window_off_by_one_is_a_miss(window_error):
    result, _, _ = run(make_trace(), config(max_steps=20), window_error=window_error)
    assert not result.ok
    assert not result.worst_check.ok
    assert result.to_json()["checks"]["misses"] > 0


def test_an_append_that_writes_nothing_is_a_miss():
    result, _, _ = run(make_trace(), config(poison=False, max_steps=6), lost_append=3)
    assert {check.step for check in result.checks if not check.ok} >= {3}
    assert "append stored other" in next(check for check in result.checks if not check.ok).message


def test_pages_freed_too_early_are_a_miss(monkeypatch):
    """The reference sees the same table, so that its NaN agrees with the runner's: not finite must be a miss too."""
    first_visible = Batch._first_visible
    monkeypatch.setattr(
        Batch, "_first_visible", lambda self, position: min(first_visible(self, position) + 8, max(position, 0))
    )
    result, _, _ = run(make_trace(), config())
    assert not result.ok
    assert any("not finite" in check.message for check in result.checks)


def test_padding_rows_that_are_not_zero_are_a_miss():
    requests = [Request(number, 0.0, 9, 5) for number in range(3)]
    settings = config(max_steps=2)

    class Careless(NumpyRunner):
        def step(self, slot_mapping, seq_lens):
            times = super().step(slot_mapping, seq_lens)
            self.out[-1] = 1.0
            return times

    engine = Engine(requests, settings, Careless(settings, Geometry.of(requests, settings)))
    list(engine.steps())
    assert "padding" in engine.result().worst_check.message


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"max_batch": 0}, "max_batch must be at least 1, got 0"),
        ({"max_steps": 0}, "max_steps must be at least 1"),
        ({"step_ms": 0.0}, "step_ms must be greater than 0 and finite, got 0.0"),
        ({"speed": float("nan")}, "speed must be greater than 0"),
        ({"layers": 2}, "layout must have a layers axis for layers=2"),
        ({"layout": "pages kv block kv_heads dim"}, "k_dim != v_dim"),
        ({"k_scale": 0.5}, "need a quantised cache_dtype"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)
