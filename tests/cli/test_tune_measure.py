"""What takes times, without a GPU: tensors that rotate, kernels counted once, the time of a graph divided by calls."""

import functools
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bridge._tune import compiling, measure, sample, tensors  # noqa: E402
from bridge._tune.compiling import Spills, compile_plans, compile_share, runs  # noqa: E402
from swa_plan import DeviceProfile, Plan, Problem, plan  # noqa: E402
from tests.cli import fake_cuda  # noqa: E402
from tests.cli.fake_gpu import H200  # noqa: E402

PROBLEMS = (
    Problem(3, 8, 2, 64, 64, 128, 64, 2),
    Problem(2, 16, 1, 64, 64, 128, 64, 3, query_len=4),
    Problem(2, 8, 2, 64, 64, 128, 64, 2, cache_dtype="float8_e4m3fn"),
)


def plans_of(problem):
    """Plans that a CPU can run."""
    return [Plan(problem, "ops", 1, splits, tile, 4, 3) for splits in (1, 2) for tile in (32, 64)]


@pytest.fixture
def cpu(monkeypatch):
    fake_cuda.install(monkeypatch)
    for module in (tensors, measure):
        monkeypatch.setattr(module, "make_tensors", functools.partial(tensors.make_tensors, device="cpu"))


@pytest.mark.parametrize("problem", PROBLEMS, ids=["decode", "verify", "fp8"])
def test_a_call_reads_all_its_pages_and_is_right(problem):
    made = tensors.make_tensors(problem, requests=problem.max_requests, sets=3, device="cpu")
    assert sorted(made.tables.flatten().tolist()) == list(range(made.key_cache.shape[0]))
    assert made.calls == 8
    for each in plans_of(problem):
        made.output.fill_(torch.nan)
        tensors.decode(made, each, 4)
        assert made.output.isfinite().all()
    first = made.output.clone()
    tensors.decode(made, each, 1)
    assert torch.equal(first, made.output), "rotation 4 of 3 is rotation 1"


def test_the_sample_can_be_called():
    """Problems of the sample itself, one request each: what `plan` says is legal for the tensors that are made."""
    for problem in sample.problems(H200.shipped):
        made = tensors.make_tensors(problem, requests=1, sets=1, device="cpu")
        for each in (sample.plans(problem, H200.shipped)[0], sample.plans(problem, H200.shipped)[-1]):
            tensors.decode(made, replace(each, kernel="ops"), 0)


def test_rotations_exceed_the_cache():
    assert tensors.rotations(3_000_000, 60 << 20) == 64
    assert tensors.rotations(30_000_000, 60 << 20) == 9
    assert tensors.rotations(10**9, 60 << 20) == 2


def test_plans_are_timed(cpu):
    bench = measure.Bench(H200._replace(l2_bytes=1 << 16), processes=1)
    plans = [each for problem in PROBLEMS for each in plans_of(problem)]
    steps = []
    measure_warm = measure._WARM_S
    try:
        measure._WARM_S = 0.01
        timed = bench.each([*plans, *plans], lambda: steps.append(1))
    finally:
        measure._WARM_S = measure_warm
    assert [each.plan for each in timed] == plans
    assert len(steps) == len(plans)
    assert all(each.time_us == pytest.approx(1000 / 8) for each in timed)
    together = bench.together(plans, lambda: None)
    assert {each.plan for each in together} == set(plans)
    assert bench.compile(plans) == len(sample.distinct_kernels(plans))


def test_plans_that_do_not_fit_or_spill_are_left_out(cpu, monkeypatch):
    bench = measure.Bench(H200, processes=1)
    plans = plans_of(PROBLEMS[0])
    monkeypatch.setattr(measure, "runs", lambda call: call() is None and next(fits))
    monkeypatch.setattr(measure, "_warm_up", lambda replay: None)
    fits = iter([True, False, True, True])
    monkeypatch.setattr(bench.spills, "of", lambda each: 12 if each == plans[2] else 0)
    assert [each.plan for each in bench.each(plans, lambda: None)] == [plans[0], plans[3]]
    fits = iter([True, False, True, True])
    assert [each.plan for each in bench.together(plans, lambda: None)] == [plans[0], plans[2], plans[3]]


class Full(RuntimeError):
    """What a driver says, in place of torch's own class."""


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), Full("Triton Error [CUDA]: out of memory")], ids=repr)
@pytest.mark.parametrize("place", ["make_tensors", "decode", "Replay"])
def test_a_problem_without_memory_is_noted_and_left_out(cpu, monkeypatch, error, place):
    original, failing = getattr(measure, place), PROBLEMS[1]
    monkeypatch.setattr(measure, "_warm_up", lambda replay: None)

    def full(*arguments, **options):
        problem = next(getattr(each, "problem", each) for each in arguments if isinstance(each, (Plan, Problem)))
        if problem == failing:
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(measure, place, full)
    notes = []
    bench = measure.Bench(H200._replace(l2_bytes=1 << 16), 1, notes.append)
    plans = [each for problem in PROBLEMS for each in plans_of(problem)]
    kept = [each for each in plans if each.problem != failing]
    assert [each.plan for each in bench.each(plans, lambda: None)] == kept
    assert [each.plan for each in bench.together(plans, lambda: None)] == kept
    assert len(notes) == 2
    assert "memory does not suffice" in notes[0]
    assert str(failing) in notes[0]


def test_other_errors_end_the_measuring(cpu, monkeypatch):
    monkeypatch.setattr(measure, "Replay", lambda *_: (_ for _ in ()).throw(RuntimeError("illegal memory access")))
    with pytest.raises(RuntimeError, match="illegal"):
        measure.Bench(H200._replace(l2_bytes=1 << 16), 1).each(plans_of(PROBLEMS[0]), lambda: None)


def test_memory_that_ran_out_is_known_through_what_followed():
    followed = RuntimeError("the capture was invalidated")
    assert not compiling.is_out_of_memory(followed)
    followed.__context__ = torch.OutOfMemoryError("no")
    assert compiling.is_out_of_memory(followed)


def test_a_plan_without_memory_is_compiled_by_nobody(cpu, monkeypatch):
    called = []
    plans = plans_of(PROBLEMS[0])

    def decode(made, each, rotation):
        called.append(each)
        if each == plans[0]:
            raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(tensors, "decode", decode)
    compile_share(plans, 0)
    assert called == plans


def test_only_a_kernel_that_does_not_fit_is_passed_over():
    from triton.runtime.errors import OutOfResources

    def refuse():
        raise OutOfResources(300_000, 232_448, "shared memory")

    def err():
        raise ValueError("a mistake")

    assert runs(lambda: None)
    assert not runs(refuse)
    with pytest.raises(ValueError, match="a mistake"):
        runs(err)


def test_kernels_are_shared_out_among_processes(cpu, monkeypatch):
    plans = [each for problem in PROBLEMS for each in plans_of(problem)]
    shares = []

    class Process:
        def __init__(self, target, args, daemon):
            assert (target, daemon) == (compile_share, True)
            shares.append(args)

        def start(self):
            pass

        def join(self, timeout):
            assert 100 < timeout < 600

        def is_alive(self):
            return False

    class Context:
        pass

    Context.Process = Process
    monkeypatch.setattr(compiling.multiprocessing, "get_context", lambda method: Context)
    kernels = compile_plans(plans, 5)
    assert [len(share) for share, _ in shares] == [3, 3, 2, 2, 2]
    assert kernels == 12
    for share, device in shares:
        compile_share(share, device)
    shares.clear()
    assert compile_plans(plans[:1], 5) == 1
    assert compile_plans([], 5) == 0
    assert not shares, "one kernel is compiled where it is measured"


def test_a_process_that_hangs_is_ended(cpu, monkeypatch):
    ended = []

    class Process:
        def __init__(self, target, args, daemon):
            self.alive = True

        def start(self):
            pass

        def join(self, timeout):
            assert timeout >= 0

        def is_alive(self):
            return self.alive

        def terminate(self):
            ended.append("terminate")
            self.alive = len(ended) == 1  # the first one ignores it

        def kill(self):
            ended.append("kill")
            self.alive = False

    class Context:
        pass

    Context.Process = Process
    monkeypatch.setattr(compiling.multiprocessing, "get_context", lambda method: Context)
    assert compile_plans(plans_of(PROBLEMS[0]), 2) == 4
    assert ended == ["terminate", "kill", "terminate"]


def test_spills_are_those_of_the_newest_kernel(monkeypatch):
    class Kernel:
        def __init__(self, spilled):
            self.n_spills = spilled

    kernels = []
    monkeypatch.setattr(compiling, "split_kernels", lambda: kernels)
    first, second, third, fourth = plans_of(PROBLEMS[0])
    spills = Spills()
    kernels.append(Kernel(0))
    assert spills.of(first) == 0
    kernels.append(Kernel(24))
    assert spills.of(second) == 24
    assert spills.of(first) == 0
    assert spills.of(second) == 24
    assert spills.of(third) == 0, "nothing new was compiled, and nothing is known"
    kernels += [Kernel(5), Kernel(6)]
    assert spills.of(fourth) == 0, "which of the two it is cannot be told"


def test_the_kernels_of_this_process_can_be_listed():
    assert compiling.split_kernels() == []


@pytest.mark.gpu
def test_a_real_kernel_is_timed_and_says_what_it_spills():
    from bridge._tune.device import this_device

    device = this_device()
    bench = measure.Bench(device, processes=2)
    problem = Problem(8, 16, 2, 128, 128, 512, 64, 8)
    chosen = plan(problem, DeviceProfile.for_cuda(*device.key))
    plans = list(dict.fromkeys([chosen, replace(chosen, splits=2), replace(chosen, splits=3)]))
    assert bench.compile(plans) >= 1
    timed = bench.each(plans, lambda: None)
    assert {each.plan for each in timed} == set(plans)
    assert all(1 < each.time_us < 1000 for each in timed)
    assert compiling.split_kernels()
    assert all(isinstance(kernel.n_spills, int) for kernel in compiling.split_kernels())
    assert len(bench.together(plans, lambda: None)) == len(plans)
