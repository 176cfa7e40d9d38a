"""What is measured on a GPU only, run here with what a GPU gives replaced: graphs, rivals and the floor's timers."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import fetch_peers, host_cost, peers, results
from benchmarks import measure as measuring
from benchmarks.cases import Case
from benchmarks.contenders import CONTENDERS, ours_jax, ours_torch, unified
from benchmarks.contenders.base import LoopTimer, Machine, Way, disagreement
from benchmarks.measure import enter, measure_case, reference_error, spread, take
from benchmarks.tensors import make_tensors

PLAIN = Case("plain", "x", (20, 100, 60), 1, 8, window=40, query_len=2, block=16, family="x")
RICH = Case("rich", "x", (100, 70), 2, 4, 64, 64, 40, block=16, gate=False, sinks=True, softcap=20.0)


class FakeMachine:
    """A machine whose GPU is the CPU."""

    cuda, capability, device = True, 90, "cpu"


@pytest.mark.parametrize("case", [PLAIN, RICH], ids=lambda case: case.name)
def test_fa3_is_called_as_its_operators_want(case, fake_fa3, fake_gpu):
    tensors = make_tensors(case, device="cpu", sets=2)
    ways = CONTENDERS["fa3 + gate"].prepare(case, tensors)
    expected = ours_torch.decode(case, tensors, 0)
    assert {name: disagreement(way.result(), expected) < 0.01 for name, way in ways.items()} == {
        "scheduled": True,
        "heuristic": True,
        "unsplit": True,
    }
    k_dim, v_dim = case.k_dim, case.v_dim
    shape = (case.requests, case.query_len, case.heads, case.kv_heads, k_dim, v_dim, 16, case.window - 1)
    assert fake_fa3 == [shape, (True, 32), (False, 0), (False, 1)]
    ways["scheduled"].timer()
    assert fake_fa3.count(shape) == 1  # made once for all calls


def test_every_contender_that_agrees_is_measured(fake_fa3, fake_gpu):
    if find_spec("jax") is None:
        pytest.skip("a GPU run without JAX has fewer contenders")
    case = PLAIN
    # The first runs in the interpreter below, the others' plans are for a GPU.
    names = [name for name in CONTENDERS if name not in ("unified", "torch original plan", "torch gluon")]
    result = measure_case(case, [CONTENDERS[name] for name in names], FakeMachine(), rounds=1)
    assert {name: each.status for name, each in result.outcomes.items()} == dict.fromkeys(names, results.MEASURED)
    assert result.time("floor") == 2.0  # the better of two shapes
    assert result.outcomes["floor"].plan == "stream b"
    assert result.outcomes["jax jit"].plan.startswith("2 calls; ")
    assert result.outcomes["jax jit"].why == "warm: its 2 calls read 0 MB in all"
    assert result.outcomes["torch eager"].host_us is None
    assert result.outcomes["fa3 + gate"].plan in ("scheduled", "heuristic", "unsplit")
    assert all(each.error < 0.02 for name, each in result.outcomes.items() if name not in ("floor", "torch fp8"))


@pytest.mark.parametrize(
    "machine, triton_version, reason",
    [
        (Machine(False, 0), "3.6.0", "needs a CUDA device"),
        (Machine(True, 100), "3.6.0", "needs an sm_90 device, got sm_100"),
        (Machine(True, 90), "3.5.1", "got Triton 3.5.1"),
        (Machine(True, 90), "3.6.0", None),
    ],
)
def test_the_hopper_kernel_is_absent_where_it_does_not_run(machine, triton_version, reason, monkeypatch):
    monkeypatch.setattr("triton.__version__", triton_version)
    found = CONTENDERS["torch gluon"].absent(machine)
    assert found is None if reason is None else reason in found


def test_a_jitted_function_returns_every_call_on_its_own_table():
    pytest.importorskip("jax")
    t = make_tensors(PLAIN, device="cpu", sets=2)
    outputs = ours_jax.program(PLAIN, 3, None)(ours_jax.imported(t), ours_jax.imported_tables(t, 3))
    assert len(outputs) == 3
    errors = [disagreement(torch.from_dlpack(out), ours_torch.decode(PLAIN, t, i)) for i, out in enumerate(outputs)]
    assert max(errors) < 0.02
    assert disagreement(torch.from_dlpack(outputs[1]), ours_torch.decode(PLAIN, t, 0)) > 0.1
    tiny, large = PLAIN, Case("large", "", (2048,) * 64, 8, 8)
    assert (ours_jax.jitted_calls(tiny), ours_jax.jitted_calls(large)) == (64, 16)


def test_what_a_rival_cannot_do_is_not_asked_of_it(fake_gpu):
    result = measure_case(RICH, [CONTENDERS["original"], CONTENDERS["torch graph"]], FakeMachine(), rounds=1)
    assert result.outcomes["original"].status == results.UNFIT
    assert result.time("torch graph") == 8.0


class Rival:
    """A contender whose ways are given."""

    name, default, tolerance = "rival", True, 0.02

    def __init__(self, **ways):
        self.ways = ways

    def absent(self, machine):
        return None

    def unfit(self, case):
        return None

    def prepare(self, case, tensors):
        return self.ways


def way(value, time_us=1.0):
    def result():
        if isinstance(value, Exception):
            raise value
        return value

    return Way(lambda: lambda: time_us, result)


def test_a_result_that_differs_gives_no_time():
    right = torch.randn(4, 8, 16)
    almost, other = right * 1.01, right + torch.randn(4, 8, 16) * 0.1
    nan = right.clone()
    nan[1, 2, 3] = float("nan")
    assert enter(Rival(a=way(almost)), PLAIN, None, right).error == pytest.approx(0.01, rel=1e-3)
    for value in (other, nan, right[:2]):
        found = enter(Rival(a=way(value)), PLAIN, None, right)
        assert found.status == results.WRONG
        assert found.time_us is None
    failed = enter(Rival(a=way(RuntimeError("no\nstack"))), PLAIN, None, right)
    assert (failed.status, failed.why) == (results.FAILED, "a: RuntimeError: no")
    mixed = enter(Rival(a=way(RuntimeError("no")), b=way(other), c=way(right)), PLAIN, None, right)
    assert list(mixed.ways) == ["c"]


def test_samples_are_taken_in_turn():
    taken = []
    timers = {(name,): lambda name=name: taken.append(name) or 1.0 for name in "ab"}
    samples, failed = take(timers, rounds=2, count=3)
    assert failed == {}
    assert taken == ["a", "b"] * 6
    assert samples["a",] == [[1.0] * 3] * 2
    assert spread([[9.0, 10.0, 10.0], [10.0, 10.0, 11.0]]) == pytest.approx(0.1)


def failing_timer(after):
    count = iter(range(100))

    def timer():
        if next(count) == after:
            raise RuntimeError("an illegal address")
        return 1.0

    return timer


def test_a_timer_that_fails_does_not_end_the_run():
    samples, failed = take({("a",): failing_timer(4), ("b",): lambda: 2.0}, rounds=2, count=3)
    assert samples == {("b",): [[2.0] * 3] * 2}
    assert failed == {("a",): "RuntimeError: an illegal address"}


def test_a_contender_that_fails_while_it_is_timed_has_failed(fake_gpu):
    result = None  # nothing is compared

    class Named(Rival):
        def __init__(self, name, **ways):
            super().__init__(**ways)
            self.name = name

    rivals = [
        Named("fails", a=Way(lambda: failing_timer(0), result)),
        Named("one way", a=Way(lambda: failing_timer(2), result), b=Way(lambda: lambda: 5.0, result)),
        Named("host", a=Way(lambda: lambda: 6.0, result, lambda: failing_timer(1))),
    ]
    outcomes = measure_case(PLAIN, rivals, FakeMachine(), rounds=1).outcomes
    assert outcomes["fails"].status == results.FAILED
    assert outcomes["fails"].why == "while it was timed: a: RuntimeError: an illegal address"
    assert (outcomes["one way"].status, outcomes["one way"].time_us) == (results.MEASURED, 5.0)
    assert (outcomes["host"].time_us, outcomes["host"].host_us) == (6.0, None)


@pytest.mark.parametrize(
    "case",
    [PLAIN, RICH, Case("one", "x", (9,), 1, 2, 64, 32, 40, block=16, softcap=3.0),
     Case("wide", "x", (70, 5, 300), 2, 2, 64, 64, 33, 3, 16, columns=40)],
    ids=lambda case: case.name,
)  # fmt: skip
def test_our_own_result_is_compared_with_float64(case):
    t = make_tensors(case, device="cpu", sets=2)
    output = ours_torch.decode(case, t, 0)
    assert 0 < reference_error(case, t, output) < 0.02
    assert reference_error(case, t, ours_torch.decode(case, t, 1)) > 0.1  # another table's
    for row in {0, case.tokens - 1}:
        wrong = output.clone()
        wrong[row, -1] *= 1.1
        assert reference_error(case, t, wrong) > 0.05
        wrong[row, -1, 0] = float("nan")
        assert reference_error(case, t, wrong) == float("inf")


def test_the_check_copies_only_the_pages_that_its_rows_see():
    case = Case("many", "x", (200,) * 50, 1, 2, 64, 64, 40, block=16)
    t = make_tensors(case, device="cpu", sets=2)
    output = ours_torch.decode(case, t, 0)
    rows = {0, 16, 33, 49}
    unseen = torch.ones(len(t.key_cache), dtype=torch.bool)
    for row in rows:
        unseen[t.tables[0, row, 160 // 16 : 13].long()] = False
    assert 0 < unseen.sum() < len(unseen)
    t.key_cache[unseen] = float("nan")
    t.value_cache[unseen] = float("nan")
    assert reference_error(case, t, output) < 0.02


def test_a_wrong_result_of_ours_is_no_yardstick(fake_gpu, monkeypatch):
    monkeypatch.setattr(measuring, "decode", lambda *arguments: ours_torch.decode(*arguments) * 1.1)
    names = ("floor", "torch graph", "torch eager", "original")
    outcomes = measure_case(PLAIN, [CONTENDERS[name] for name in names], FakeMachine(), rounds=1).outcomes
    for name in ("torch graph", "torch eager"):
        assert outcomes[name].status == results.WRONG
        assert outcomes[name].why.startswith("ours differs from the float64 reference by 0.1")
    assert outcomes["original"].status == results.FAILED
    assert outcomes["original"].why.startswith("nothing to compare with: ours differs")


def test_the_originals_plan_is_made_for_the_current_gpu(monkeypatch):
    class Properties:
        multi_processor_count = 100

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {1: Properties}.__getitem__)
    pack, splits = ours_torch.original_plan(PLAIN)
    assert min(pack, splits) >= 1


def test_the_hosts_share_ends_before_the_wait():
    import time

    shares = {
        host_only: LoopTimer(lambda index: None, 4, lambda: time.sleep(0.1), host_only=host_only)()
        for host_only in (True, False)
    }
    assert shares[True] < 12_500 < 25_000 <= shares[False]
    calls = {"fast": lambda: None, "slow": lambda: time.sleep(0.0002)}
    costs = host_cost.host_us(calls, lambda: None)
    assert costs["fast"] < 100 < costs["slow"]


def test_fa3_is_unpacked_once(monkeypatch, tmp_path):
    import lzma
    import tempfile

    loaded = []
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    (tmp_path / fetch_peers.FA3_FILES[0]).write_bytes(lzma.compress(b"machine code"))
    for _ in range(2):
        peers.flash_attention_3.__wrapped__()
    library = Path(loaded[0])
    assert library.name.endswith(fetch_peers.FA3_LIBRARY)
    assert library.read_bytes() == b"machine code"
    assert loaded == [str(library)] * 2
    assert list(library.parent.iterdir()) == [library]


RUN_TRITON_PEERS = """
import torch
from benchmarks.cases import Case
from benchmarks.contenders import ours_torch, unified
from benchmarks.contenders.base import disagreement
from benchmarks.tensors import make_tensors
import sys

for case in (Case("a", "x", (70, 200), 1, 8, 64, 64, 48, block=16, query_len=3, sinks=True, softcap=20.0),
             Case("b", "x", (9, 200) * 3, 32, 2, 64, 64, 64, block=16, gate=False)):
    t = make_tensors(case, device="cpu", sets=2)
    given = {name: each for name, each in t._asdict().items() if each is not None}
    t = t._replace(**{name: each.float() for name, each in given.items() if each.dtype.is_floating_point})
    unified.launch(case, t)(1)
    print(disagreement(t.output, ours_torch.decode(case, t, 1, backend="cpu")) < 1e-4)
print([name for name in sys.modules if name.startswith("vllm")])
"""


@pytest.mark.skipif(not fetch_peers.present(fetch_peers.UNIFIED_FILES), reason=f"not fetched: {fetch_peers.COMMAND}")
def test_unified_attention_computes_the_same(tmp_path):
    """In Triton's interpreter: a process of its own, in fp32, which is right there."""
    import os

    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN_TRITON_PEERS], capture_output=True, text=True, timeout=200,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert result.stdout.split("\n") == ["True", "True", "[]", ""], result.stderr
    assert unified.Unified().unfit(Case("x", "", (600,), 1, 8, 192, 128)) is not None
