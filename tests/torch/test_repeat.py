"""Calls that look like one before are launched directly: with their own addresses, and only where nothing could differ.

On the CPU the kernels are stand-ins that note what they are launched with; on a GPU results are compared bit by bit.
"""

import gc
import subprocess
import sys
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swa_plan import DeviceProfile, Plan
from swa_torch import PagedCache, _planning, _repeat, plan_for, swa_decode, swa_decode_gated
from tests.torch.helpers import make_step, normal, same_bits
from tests.torch.launchers import Compiled, Launcher

if _planning.choose_kernel(torch.device("cpu"), None) == "interpret":
    pytest.skip("Triton interprets in this process, so kernels have no launch to repeat", allow_module_level=True)
pytest.importorskip("triton", reason="needs Triton")

from swa_torch._triton import _launch

H200 = DeviceProfile.named("h200")
HEADS, DIM, WINDOW = 8, 64, 16


class StandIn:
    """A kernel that is compiled once and only notes its launches: ``(grid, arguments by name, stream)``."""

    def __init__(self, kernel):
        self.arg_names = kernel.arg_names
        self.launched = []
        self.looked_up = 0

    def __getitem__(self, grid):
        return lambda **arguments: self.count()

    def count(self):
        self.looked_up += 1

    def warmup(self, *, grid, **arguments):
        def launch(gridX, gridY, gridZ, stream, *values):
            assert values[:9] == (11, False, True, None, None, (4, 1, 0), None, None, None)
            self.launched.append(((gridX, gridY, gridZ), dict(zip(self.arg_names, values[9:], strict=True)), stream))

        return Compiled(Launcher(launch))


@pytest.fixture
def kernels(monkeypatch):
    """Pretend that the CPU is an H200 with two kernels."""
    split, combine = StandIn(_launch.swa_decode_split), StandIn(_launch.swa_decode_combine)
    monkeypatch.setattr(_launch, "swa_decode_split", split)
    monkeypatch.setattr(_launch, "swa_decode_combine", combine)
    for module in (_launch, _planning):
        monkeypatch.setattr(module, "device_profile", lambda device: H200)
    monkeypatch.setattr(_planning, "choose_kernel", lambda device, backend: "portable")
    monkeypatch.setattr(_repeat, "_is_candidate", lambda query: type(query) is torch.Tensor)
    monkeypatch.setattr(_repeat, "stream_getter", lambda: lambda index: 7)
    monkeypatch.setattr(_repeat, "_remembered", {})
    found = SimpleNamespace(split=split, combine=combine, current_device=None)
    monkeypatch.setattr(_repeat, "device_getter", lambda: lambda: found.current_device)
    return found


@pytest.fixture
def step():
    return make_step(max_blocks=4)


def gate_like(step):
    return normal(step.query.shape[0], HEADS, seed=5)


def two_splits(step):
    return Plan.from_splits(plan_for(*step[:3], window=WINDOW).problem, 2, device=H200)


def test_the_second_call_is_launched_directly_with_its_own_addresses(kernels, step):
    plan = two_splits(step)
    first = swa_decode(*step, window=WINDOW, gate=gate_like(step), plan=plan)
    assert (kernels.split.looked_up, len(kernels.split.launched)) == (1, 0)
    other = make_step(max_blocks=4, seed=1)
    gate = gate_like(other)
    out = swa_decode(*other, window=WINDOW, gate=gate, plan=plan)
    assert out.shape == first.shape
    assert out.data_ptr() != first.data_ptr()
    assert (kernels.split.looked_up, kernels.combine.looked_up) == (1, 1), "looked up again"
    ((grid, split, stream),) = kernels.split.launched
    assert grid == (plan.programs(4), 2, 1)
    assert stream == 7
    assert split["Query"] == other.query.data_ptr()
    assert split["KeyCache"] == other.cache.key_cache.data_ptr()
    assert split["ValueCache"] == other.cache.value_cache.data_ptr()
    assert split["BlockTable"] == other.block_table.data_ptr()
    assert split["SeqLens"] == other.seq_lens.data_ptr()
    assert split["Gate"] == gate.data_ptr()
    assert split["Output"] == out.data_ptr()
    assert split["PartialLse"] - split["Partial"] == plan.workspace_layout(4)[0]
    assert (split["Lse"], split["splits"], split["requests"], split["WINDOW"]) == (None, 2, 4, WINDOW)
    ((grid, combine, _),) = kernels.combine.launched
    assert grid == (4, HEADS, 1)
    assert (combine["Partial"], combine["PartialLse"]) == (split["Partial"], split["PartialLse"])
    assert (combine["Gate"], combine["Output"], combine["PARTS"]) == (gate.data_ptr(), out.data_ptr(), 2)


def test_arguments_are_those_of_the_long_way(kernels, step, monkeypatch):
    """Every argument that is no address is what the launch code itself would pass."""
    given = []
    monkeypatch.setattr(StandIn, "__getitem__", lambda self, grid: lambda **arguments: given.append(arguments))
    plan = two_splits(step)
    for _ in range(2):
        swa_decode(*step, window=WINDOW, plan=plan, return_lse=True, softcap=3.0, scale=0.25)
    for passed, kernel in zip(given, (kernels.split, kernels.combine), strict=True):
        ((_, repeated, _),) = kernel.launched
        for name, value in repeated.items():
            if isinstance(passed[name], torch.Tensor):
                assert isinstance(value, int), name
                assert value, name
            else:
                assert value == passed[name], name


def test_lse_and_callers_memory(kernels, step):
    plan = two_splits(step)
    workspace = torch.empty(plan.workspace_bytes + 512, dtype=torch.uint8)
    workspace = workspace[-workspace.data_ptr() % 256 :]
    out = torch.empty(4, HEADS, DIM)
    for _ in range(2):
        returned, lse = swa_decode(*step, window=WINDOW, plan=plan, out=out, workspace=workspace, return_lse=True)
    assert returned is out
    assert (lse.shape, lse.dtype) == ((4, HEADS), torch.float32)
    ((_, split, _),) = kernels.split.launched
    ((_, combine, _),) = kernels.combine.launched
    assert (split["Output"], split["Partial"]) == (out.data_ptr(), workspace.data_ptr())
    assert split["PartialLse"] - split["Partial"] == plan.workspace_layout(4)[0]
    assert combine["Lse"] == lse.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_made_for_a_repeated_call(kernels, monkeypatch, dtype):
    """An output of another dtype than the query's, and scratch that holds the fp32 partials whatever the query's."""
    step = make_step(max_blocks=4, dtype=dtype)
    plan = two_splits(step)
    swa_decode(*step, window=WINDOW, plan=plan, out_dtype=torch.float32)
    made = []

    def note(self, *sizes, **options):
        made.append(torch.empty(*sizes, **{"dtype": self.dtype, **options}))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", note)
        out = swa_decode(*step, window=WINDOW, plan=plan, out_dtype=torch.float32)
    output, scratch = made
    assert out is output
    assert (output.shape, output.dtype) == ((4, HEADS, DIM), torch.float32)
    assert scratch.nbytes >= plan.workspace_layout(4)[1]
    ((_, split, _),) = kernels.split.launched
    assert (split["Output"], split["Partial"]) == (output.data_ptr(), scratch.data_ptr())


def test_workspaces_are_refused_again(kernels, step):
    """A workspace of another alignment, over an input, or under the output."""
    plan = two_splits(step)
    room = torch.empty(4 * plan.workspace_bytes, dtype=torch.uint8)
    room = room[-room.data_ptr() % 256 :]
    workspace, out = room[: plan.workspace_bytes], torch.empty(4, HEADS, DIM)

    def call(query=step.query, out=out, workspace=workspace):
        return swa_decode(query, *step[1:], window=WINDOW, plan=plan, out=out, workspace=workspace)

    call()
    assert launched_directly(kernels, call)
    inside = workspace[: out.nbytes].view(torch.float32).view(out.shape)
    for wrong, words in (
        ({"workspace": room[16 : 16 + plan.workspace_bytes]}, "256"),
        ({"query": inside}, "workspace must not overlap"),
        ({"out": inside}, "must not overlap"),
    ):
        with pytest.raises(ValueError, match=words):
            call(**wrong)


def launched_directly(kernels, call):
    """Run a call; return whether it took the short way."""
    before = len(kernels.split.launched)
    call()
    return len(kernels.split.launched) > before


def remembered_calls():
    return sum(len(alike.calls) for alike in _repeat._remembered.values())


# Each looks different from the call before in one respect that decides checks, plan or machine code.
OTHERS = {
    "window": lambda step: {"window": WINDOW + 1},
    "scale": lambda step: {"scale": 0.5},
    "lse": lambda step: {"return_lse": True},
    "gate": lambda step: {"gate": gate_like(step)},
    "sinks": lambda step: {"sinks": torch.zeros(HEADS)},
    "out_dtype": lambda step: {"out_dtype": torch.bfloat16},
    "batch-invariant": lambda step: {"batch_invariant": True},
    "validated": lambda step: {"validate": True},
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_call_that_looks_different_is_checked_anew(kernels, step, other):
    for _ in range(2):
        swa_decode(*step, window=WINDOW)
    options = {"window": WINDOW, **OTHERS[other](step)}
    assert not launched_directly(kernels, lambda: swa_decode(*step, **options))
    assert launched_directly(kernels, lambda: swa_decode(*step, **options)) == (other != "validated")
    assert launched_directly(kernels, lambda: swa_decode(*step, window=WINDOW))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_lazily_negated_gate_is_negated(kernels, step, dtype):
    """``conj().imag`` is a plain tensor whose memory holds the opposite: only operators know."""
    numbers = torch.view_as_complex(normal(4, HEADS, 2).to(dtype))
    negated = numbers.conj().imag
    assert negated.is_neg()
    plain = numbers.imag
    for gate in (plain, plain, negated, negated):
        direct = launched_directly(kernels, lambda gate=gate: swa_decode(*step, window=WINDOW, gate=gate))
        assert not (direct and gate.is_neg())
    assert launched_directly(kernels, lambda: swa_decode(*step, window=WINDOW, gate=plain))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int32])
def test_tensors_that_are_not_asked_cannot_be_negated(dtype):
    """Only ``conj().imag`` waits to be negated, and these are no part of a complex number."""
    assert dtype not in _repeat._PARTS_OF_COMPLEX
    real = torch.zeros(2, 2, dtype=dtype)
    with pytest.raises(RuntimeError, match="only supported for half, float and double"):
        torch.view_as_complex(real)


def test_a_plan_of_another_type_is_refused_again(kernels, step):
    plan = two_splits(step)
    key_cache, value_cache = step.cache.views()
    for _ in range(2):
        swa_decode(*step, window=WINDOW, plan=plan)
        swa_decode_gated(
            step.query, key_cache, value_cache, *step[2:], gate_like(step), torch.empty(4, HEADS, DIM), scale=0.1,
            window=WINDOW, query_len=1, splits=2,
        )  # fmt: skip
    for wrong in (plan.text, (2, 1)):
        with pytest.raises(TypeError, match="plan must be a Plan or None"):
            swa_decode(*step, window=WINDOW, plan=wrong)


def test_zero_scales_keep_their_sign(kernels):
    step = make_step(max_blocks=4)
    cache = PagedCache(tuple(base.to(torch.int8) for base in step.cache.bases), step.cache.layout)
    args = (step.query, cache, step.block_table, step.seq_lens)
    for _ in range(2):
        swa_decode(*args, window=WINDOW, k_scale=1.0, v_scale=0.0)
    assert not launched_directly(kernels, lambda: swa_decode(*args, window=WINDOW, k_scale=1.0, v_scale=-0.0))


def test_tracing_sees_the_operator(kernels, step):
    query, cache, table, lengths = step
    for _ in range(2):
        swa_decode(query, cache, table, lengths, window=WINDOW)
    before = len(kernels.split.launched)
    observed = []

    def decode(gate):
        observed.append(_repeat.is_observed())
        return swa_decode(query, cache, table, lengths, window=WINDOW, gate=gate)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing is deprecated, and says what it takes for constants
        traced = torch.jit.trace(decode, gate_like(step))
    assert observed[0]
    assert len(kernels.split.launched) == before
    assert "swa_torch::decode" in str(traced.graph)


def test_what_cannot_be_remembered_does_not_fail_the_call(kernels, step, monkeypatch):
    def broken(self, **options):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(StandIn, "warmup", broken)
    for _ in range(3):
        swa_decode(*step, window=WINDOW)
    assert kernels.split.looked_up == 3


@pytest.mark.parametrize("names", [["Query", "splits", "Lse"], ["Query", "Stranger"]])
def test_a_kernel_whose_tensors_do_not_come_first_is_refused(names):
    """Its addresses would land in the wrong places."""
    others = {"splits": 2, "Lse": None}
    arguments = {name: others.get(name, torch.zeros(1)) for name in names}
    kernel = SimpleNamespace(arg_names=names, warmup=lambda **options: None)
    with pytest.raises(ValueError, match="first arguments must be tensors of a call"):
        _repeat._kernel(_launch.Launch(kernel, (1, 1, 1), arguments, {}), _repeat._ARGUMENTS)


def test_compiled_kernels_are_kept(kernels, step):
    """Triton unloads a kernel that nobody refers to."""
    swa_decode(*step, window=WINDOW)
    (alike,) = _repeat._remembered.values()
    (again,) = alike.calls.values()
    assert again.kernels[0].compiled.function == 11


def test_imported_under_a_mode():
    code = "import torch\nwith torch.device('meta'):\n    from swa_torch import _repeat\nprint(_repeat.is_observed())"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "False"


@pytest.mark.parametrize(
    "wrong", [{"window": True}, {"window": 16.0}, {"query_len": True}, {"scale": True}, {"k_scale": True}]
)
def test_options_that_only_compare_equal_are_refused_again(kernels, step, wrong):
    right = {"window": WINDOW, "query_len": 1, "scale": 1.0, "k_scale": 1.0}
    for _ in range(2):
        swa_decode(*step, **right)
    if wrong == {"window": True}:
        for _ in range(2):
            swa_decode(*step, **{**right, "window": 1})
    with pytest.raises(TypeError, match=next(iter(wrong))):
        swa_decode(*step, **{**right, **wrong})


def test_another_alignment_is_compiled_anew(kernels, step):
    swa_decode(*step, window=WINDOW)
    shifted = torch.empty(step.query.numel() + 1)[1:].view(step.query.shape)
    assert not launched_directly(kernels, lambda: swa_decode(shifted, *step[1:], window=WINDOW))
    assert launched_directly(kernels, lambda: swa_decode(shifted, *step[1:], window=WINDOW))


def test_an_output_over_an_input_is_refused_again(kernels, step):
    query = torch.randn(4, HEADS, DIM)
    out = torch.empty(4, HEADS, DIM)
    for _ in range(2):
        swa_decode(query, *step[1:], window=WINDOW, out=out)
    with pytest.raises(ValueError, match="out must not overlap an input, got an overlap with query"):
        swa_decode(query, *step[1:], window=WINDOW, out=query)


def test_gradients_are_refused_again(kernels, step):
    for _ in range(2):
        swa_decode(*step, window=WINDOW)
    query = step.query.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="query with requires_grad"):
        swa_decode(query, *step[1:], window=WINDOW)
    with torch.no_grad():
        swa_decode(query, *step[1:], window=WINDOW)
        assert launched_directly(kernels, lambda: swa_decode(query, *step[1:], window=WINDOW))
    with pytest.raises(NotImplementedError, match="query with requires_grad"):
        swa_decode(query, *step[1:], window=WINDOW)


@pytest.mark.parametrize("name", ["gate", "sinks", "k_scale", "out"])
def test_gradients_of_any_input_are_refused_again(kernels, step, name):
    tensors = {
        "gate": gate_like(step), "sinks": torch.zeros(HEADS), "k_scale": torch.ones(()),
        "out": torch.empty(4, HEADS, DIM),
    }  # fmt: skip
    for _ in range(2):
        swa_decode(*step, window=WINDOW, **tensors)
    tensors[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"{name} with requires_grad"):
        swa_decode(*step, window=WINDOW, **tensors)
    with torch.no_grad():
        assert launched_directly(kernels, lambda: swa_decode(*step, window=WINDOW, **tensors))


def test_modes_see_the_operator(kernels, step):
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    for _ in range(2):
        swa_decode(*step, window=WINDOW)
    with Watch():
        assert not launched_directly(kernels, lambda: swa_decode(*step, window=WINDOW))
    assert torch.ops.swa_torch.decode.default in seen


def test_profilers_see_the_operator(kernels, step):
    for _ in range(2):
        swa_decode(*step, window=WINDOW)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        swa_decode(*step, window=WINDOW)
    assert "swa_torch::decode" in {event.key for event in profile.key_averages()}


def test_a_profiler_of_triton_sees_the_launch(kernels, step):
    from triton import knobs

    for _ in range(2):
        swa_decode(*step, window=WINDOW)

    def watch(*arguments):
        raise AssertionError("stand-ins launch nothing")

    knobs.runtime.launch_enter_hook.add(watch)
    try:
        assert not launched_directly(kernels, lambda: swa_decode(*step, window=WINDOW))
    finally:
        knobs.runtime.launch_enter_hook.remove(watch)


def test_what_is_compiled_under_a_profiler_of_triton_is_not_remembered(kernels, step):
    """It may be made for the profiler."""
    from triton import knobs

    knobs.runtime.launch_enter_hook.add(print)
    try:
        swa_decode(*step, window=WINDOW)
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    assert not _repeat._remembered


def test_zeros_without_memory_take_the_long_way(kernels, step):
    gate = torch._efficientzerotensor(*gate_like(step).shape)
    assert gate.data_ptr() == 0
    swa_decode(*step, window=WINDOW, gate=gate_like(step))
    assert not launched_directly(kernels, lambda: swa_decode(*step, window=WINDOW, gate=gate))


def test_a_table_without_columns_has_no_memory_either(kernels, step):
    empty = [*step[:2], step.block_table[:, :0].contiguous(), step.seq_lens]
    swa_decode(*empty, window=WINDOW)
    assert launched_directly(kernels, lambda: swa_decode(*empty, window=WINDOW))


def test_an_unknown_launcher_is_asked_as_documented(kernels, step, monkeypatch):
    runs = []

    class Compiled:
        def run(self, one, other):
            raise AssertionError("not to be guessed at")

        def __getitem__(self, grid):
            return lambda *values, stream: runs.append((grid, len(values), stream))

    monkeypatch.setattr(StandIn, "warmup", lambda self, *, grid, **arguments: Compiled())
    for _ in range(2):
        swa_decode(*step, window=WINDOW, plan=two_splits(step))
    assert [(grid, stream) for grid, _, stream in runs] == [((4 * 2, 2, 1), 7), ((4, HEADS, 1), 7)]


def test_another_current_device_takes_the_long_way(kernels, step):
    for _ in range(2):
        swa_decode(*step, window=WINDOW)
    kernels.current_device = 3
    assert not launched_directly(kernels, lambda: swa_decode(*step, window=WINDOW))


def test_subclasses_are_never_remembered(kernels, step):
    class Table(torch.Tensor):
        pass

    table = step.block_table.as_subclass(Table)
    swa_decode(*step, window=WINDOW)
    for _ in range(3):
        assert not launched_directly(kernels, lambda: swa_decode(*step[:2], table, step.seq_lens, window=WINDOW))


def test_no_more_calls_are_remembered_than_said(kernels, step, monkeypatch):
    monkeypatch.setattr(_repeat, "REMEMBERED_CALLS", 3)
    for window in range(1, 9):
        swa_decode(*step, window=window)
        assert remembered_calls() <= 3


def test_no_more_looks_of_equal_options_are_remembered_than_said(kernels, step, monkeypatch):
    monkeypatch.setattr(_repeat, "REMEMBERED_CALLS", 3)
    query, cache, table, lengths = step
    plan = plan_for(query, cache, table, window=WINDOW)
    for blocks in (1, 2, 3, 4, 1, 2, 3, 4):
        swa_decode(query, cache, table[:, :blocks].contiguous(), lengths, window=WINDOW, plan=plan)
        assert remembered_calls() <= 3


def test_calls_of_equal_options_take_turns(kernels, step):
    """Batches of different sizes, each with the arguments of its own."""
    query, cache, table, lengths = step
    plan = two_splits(step)

    def call(requests):
        return swa_decode(query[:requests], cache, table[:requests], lengths[:requests], window=WINDOW, plan=plan)

    for requests in (4, 2, 3):
        call(requests)
    assert remembered_calls() == 3
    for requests in (4, 4, 2, 3, 4, 2):
        assert launched_directly(kernels, lambda requests=requests: call(requests))
        assert kernels.split.launched[-1][1]["requests"] == requests
        assert kernels.combine.launched[-1][0] == (requests, HEADS, 1)


def test_nothing_is_kept_alive(kernels):
    def call():
        step = make_step(max_blocks=4)
        gate = gate_like(step)
        out, lse = swa_decode(*step, window=WINDOW, gate=gate, return_lse=True)
        return [weakref.ref(tensor) for tensor in (step.query, *step.cache.bases, *step[2:], gate, out, lse)]

    call()
    assert remembered_calls() == 1
    kernels.split.launched.clear()
    kept = call()
    assert kernels.split.launched
    gc.collect()
    assert not [found for reference in kept if (found := reference()) is not None]


def test_the_original_signature_repeats_too(kernels, step):
    key_cache, value_cache = step.cache.views()
    out = torch.empty(4, HEADS, DIM)

    def call():
        swa_decode_gated(
            step.query, key_cache, value_cache, *step[2:], gate_like(step), out, scale=0.1, window=WINDOW, query_len=1,
            splits=2,
        )  # fmt: skip

    call()
    assert launched_directly(kernels, call)


@pytest.mark.parametrize("wrong", [{"splits": True}, {"pack": True}, {"splits": 1.0}, {"pack": 1.0}])
def test_splits_and_packs_that_only_compare_equal_are_refused_again(kernels, step, wrong):
    def call(**chosen):
        swa_decode_gated(
            step.query, *step.cache.views(), *step[2:], gate_like(step), torch.empty(4, HEADS, DIM), scale=0.1,
            window=WINDOW, query_len=1, **{"splits": 1, "pack": 1, **chosen},
        )  # fmt: skip

    for _ in range(2):
        call()
    with pytest.raises(TypeError, match=f"{next(iter(wrong))} must be an integer"):
        call(**wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("splits", [1, 3])
def test_bits_on_a_gpu(splits, cache_dtype):
    """Calls on other data give the bits of a process that never repeats."""
    scales = {} if cache_dtype == torch.bfloat16 else {"k_scale": 0.5, "v_scale": 2.0}
    for seed in range(4):
        step = make_step(
            (300, 5, 0, 200), k_dim=128, v_dim=128, max_blocks=32, dtype=torch.bfloat16, device="cuda", seed=seed
        )  # fmt: skip
        cache = PagedCache(tuple(base.to(cache_dtype) for base in step.cache.bases), step.cache.layout)
        gate = normal(4, HEADS, seed=seed).to("cuda", torch.bfloat16)
        problem = plan_for(step.query, cache, step.block_table, window=128).problem
        options = {"window": 128, "gate": gate, "plan": Plan.from_splits(problem, splits, device=H200), **scales}
        args = (step.query, cache, step.block_table, step.seq_lens)
        repeated = swa_decode(*args, **options, return_lse=True)
        _repeat._remembered.clear()
        assert same_bits(repeated, swa_decode(*args, **options, return_lse=True))
        again = swa_decode(*args, **options, return_lse=True)
        assert same_bits(repeated, again)
    assert remembered_calls() == 1


@pytest.mark.gpu
def test_the_launchers_python_is_passed_by(monkeypatch):
    from triton.backends.nvidia.driver import CudaLauncher

    step = make_step((300, 5), k_dim=128, v_dim=128, max_blocks=32, dtype=torch.bfloat16, device="cuda")
    problem = plan_for(*step[:3], window=128).problem
    plan = Plan.from_splits(problem, 3, device=H200)
    first = swa_decode(*step, window=128, plan=plan)

    def called(*arguments):
        raise AssertionError("called")

    monkeypatch.setattr(CudaLauncher, "__call__", called)
    assert same_bits(first, swa_decode(*step, window=128, plan=plan))


@pytest.mark.gpu
def test_no_compilation_after_the_first_of_each_kind():
    """Batch sizes, table widths and lengths that one plan serves compile nothing: counted where Triton compiles."""
    from triton.runtime.jit import JITFunction

    def kernels_compiled():
        found = 0
        for kernel in (_launch.swa_decode_split, _launch.swa_decode_combine):
            assert isinstance(kernel, JITFunction)
            found += sum(len(caches[0]) for caches in kernel.device_caches.values())
        return found

    step = make_step((300,) * 8, k_dim=128, v_dim=128, max_blocks=32, dtype=torch.bfloat16, device="cuda")
    problem = plan_for(*step[:3], window=128).problem
    for splits in (1, 4):
        plan = Plan.from_splits(problem, splits, device=H200)
        swa_decode(*step, window=128, plan=plan)
        compiled = kernels_compiled()
        for requests in range(1, 9):
            for blocks in (20, 27, 32):
                table = step.block_table[:requests, :blocks].contiguous()
                for _ in range(2):
                    swa_decode(
                        step.query[:requests], step.cache, table, step.seq_lens[:requests], window=128, plan=plan
                    )
        assert kernels_compiled() == compiled
    torch.cuda.synchronize()
