"""The Hopper kernel's host side, without a GPU: who asks for it, what it hands over, its descriptors of caches.

On the CPU kernels are stand-ins that note what they are launched with. What the kernel computes is tested by the suites
that run over every backend, on a GPU.
"""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from swa_plan import LAYOUTS, DeviceProfile, Plan
from swa_torch import PagedCache, _device, _planning, _repeat, _resolve, plan_for, swa_decode
from swa_torch._call import DecodeCall
from tests.torch.helpers import make_step

if _planning.choose_kernel(torch.device("cpu"), None) == "interpret":
    pytest.skip("Triton interprets in this process, and Gluon has no interpreter", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs a Triton with Gluon for Hopper")

from swa_torch._gluon import _descriptors, _launch
from swa_torch._gluon._descriptors import REMEMBERED_DESCRIPTORS, describe
from swa_torch._triton import _launch as portable

H200 = DeviceProfile.named("h200")
WINDOW = 40


class StandIn:
    """A kernel that only notes its launches: ``(grid, arguments)``."""

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        return lambda **arguments: self.launched.append((grid, arguments))


@pytest.fixture
def kernels(monkeypatch):
    """Pretend that the CPU is an H200, with three kernels."""
    kernels = SimpleNamespace(hopper=StandIn(), split=StandIn(), combine=StandIn())
    monkeypatch.setattr(_launch, "swa_decode_split_hopper", kernels.hopper)
    monkeypatch.setattr(portable, "swa_decode_split", kernels.split)
    monkeypatch.setattr(portable, "swa_decode_combine", kernels.combine)
    for module in (_launch, portable, _planning, _device):
        monkeypatch.setattr(module, "device_profile", lambda device: H200)
    monkeypatch.setattr(_resolve, "_remembered", {})
    monkeypatch.setattr(_planning, "choose_kernel", lambda device, backend: _device.BACKENDS[backend or "triton"])
    return kernels


def make(layout="pages block kv_heads dim", **fields):
    return make_step(max_blocks=4, layout=layout, **{"dtype": torch.bfloat16, **fields})


def decode_call(step, plan):
    """Return the call that ``swa_decode(*step, plan=plan)`` makes of these tensors."""
    absent = dict.fromkeys(("gate", "cu_query_lens", "kv_start", "kv_end", "sinks", "k_scale", "v_scale", "lse"))
    return DecodeCall(
        step.query, *step.cache.views(), step.block_table, step.seq_lens, **absent, scale=1.0, k_scale_number=1.0,
        v_scale_number=1.0, softcap=None, output=torch.empty_like(step.query), workspace=None, plan=plan,
    )  # fmt: skip


def hopper_plan(step, **changes):
    plan = plan_for(*step[:3], window=WINDOW, backend="gluon", device=H200)
    assert plan.kernel == "hopper"
    return replace(plan, **changes)


def test_a_call_launches_it_with_the_plans_numbers(kernels):
    step = make()
    plan = hopper_plan(step, splits=2)
    out = swa_decode(*step, window=WINDOW, plan=plan)
    ((grid, passed),) = kernels.hopper.launched
    assert grid == (plan.programs(4), 2, 1)
    assert passed["Query"] is step.query
    assert passed["Keys"] is describe(step.cache.key_cache)
    assert passed["Values"] is describe(step.cache.value_cache)
    assert passed["num_warps"] == plan.warps
    assert (passed["splits"], passed["STAGES"], passed["WINDOW"], passed["pages"]) == (2, plan.stages, WINDOW, 18)
    assert kernels.split.launched == []
    ((_, merged),) = kernels.combine.launched
    assert merged["Output"] is out
    assert merged["Partial"].data_ptr() == passed["Partial"].data_ptr()
    assert merged["PartialLse"].data_ptr() == passed["PartialLse"].data_ptr()


def test_asking_for_the_backend_is_asking_for_its_plan(kernels):
    step = make()
    swa_decode(*step, window=WINDOW, backend="gluon")
    assert len(kernels.hopper.launched) == 1
    swa_decode(*step, window=WINDOW)
    swa_decode(*step, window=WINDOW, backend="triton")
    assert (len(kernels.hopper.launched), len(kernels.split.launched)) == (1, 2)
    with pytest.raises(ValueError, match=r"backend 'triton' conflicts with plan\.kernel='hopper'"):
        swa_decode(*step, window=WINDOW, backend="triton", plan=hopper_plan(step))
    with pytest.raises(ValueError, match=r"plan\.warps must be 4"):
        swa_decode(*step, window=WINDOW, plan=hopper_plan(step, warps=8))
    assert (len(kernels.hopper.launched), len(kernels.split.launched)) == (1, 2)


def test_one_split_needs_no_second_kernel(kernels):
    step = make()
    swa_decode(*step, window=WINDOW, plan=hopper_plan(step, splits=1))
    assert (len(kernels.hopper.launched), len(kernels.combine.launched)) == (1, 0)


def misaligned(tensor):
    """Return a copy that starts two bytes after a multiple of 16."""
    flat = torch.empty(tensor.numel() + 8, dtype=tensor.dtype)
    flat = flat[-(flat.data_ptr() // 2) % 8 + 1 :][: tensor.numel()]
    return flat.view(tensor.shape).copy_(tensor)


def odd_slots(tensor):
    """Return a copy whose slots are an odd number of elements apart."""
    pages, block, kv_heads, dim = tensor.shape
    wide = torch.empty(pages, block, kv_heads * dim + 1, dtype=tensor.dtype)
    return wide[..., : kv_heads * dim].unflatten(-1, (kv_heads, dim)).copy_(tensor)


def one_page(tensor):
    """Return the first page, again and again."""
    return tensor[:1].expand(tensor.shape)


VIEWS = {
    "an odd address": (misaligned, "start at a multiple of 16 bytes"),
    "odd slots": (odd_slots, "positive multiples of 16 bytes"),
    "one page for all": (one_page, "positive multiples of 16 bytes"),
}


@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("change, words", VIEWS.values(), ids=VIEWS)
def test_a_cache_that_tma_cannot_address_is_handed_over(kernels, change, words, which):
    step = make()
    views = list(step.cache.views())
    views[which] = change(views[which])
    step = step._replace(cache=PagedCache.from_kv(*views))
    plan = hopper_plan(step, splits=2)
    assert plan.why_handed_over is None
    assert words in _launch.covers(decode_call(step, plan))
    swa_decode(*step, window=WINDOW, plan=plan)
    ((grid, passed),) = kernels.split.launched
    assert kernels.hopper.launched == []
    # The caller's workspace holds as many partials as the plan says.
    assert (grid[1], passed["splits"], passed["PACK"]) == (2, 2, plan.pack)
    assert passed["KeyCache"].data_ptr() == views[0].data_ptr()


SHAPES = {
    "an fp8 cache": ({}, torch.float8_e4m3fn),
    "fp32": ({"dtype": torch.float32}, None),
    "narrow heads": ({"k_dim": 32, "v_dim": 32}, None),
    "pages of 8": ({"block": 8}, None),
}


@pytest.mark.parametrize("fields, stored", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("invariant", [False, True])
def test_a_plan_that_is_handed_over_runs_as_the_portable_kernels(kernels, fields, stored, invariant):
    step, scales = make(**fields), {}
    if stored is not None:
        step = step._replace(cache=PagedCache.from_kv(*(view.to(stored) for view in step.cache.views())))
        scales = {"k_scale": 1.0, "v_scale": 1.0}
    calls = {}
    for backend in ("gluon", "triton"):
        kernels.split.launched.clear()
        swa_decode(*step, window=WINDOW, backend=backend, batch_invariant=invariant, **scales)
        ((grid, passed),) = kernels.split.launched
        calls[backend] = grid, {name: value for name, value in passed.items() if not hasattr(value, "data_ptr")}
    assert calls["gluon"] == calls["triton"]
    assert kernels.hopper.launched == []


def test_an_empty_batch_launches_nothing(kernels):
    step = make()
    plan = hopper_plan(step)
    empty = (step.query[:0], step.cache, step.block_table[:0], step.seq_lens[:0])
    assert swa_decode(*empty, window=WINDOW, plan=plan).shape == (0, 8, 64)
    assert kernels.hopper.launched == kernels.split.launched == []


def test_its_calls_are_not_repeated_directly(kernels, monkeypatch):
    """A descriptor is no address that could be filled in: each call builds or finds its own."""
    remembered = []
    monkeypatch.setattr(_repeat, "_is_candidate", lambda query: type(query) is torch.Tensor)
    monkeypatch.setattr(_repeat, "_remembered", {})
    monkeypatch.setattr(_repeat, "_again", lambda tensors, call: remembered.append(call.plan.kernel))
    steps = [make(seed=seed) for seed in range(2)]
    plan = hopper_plan(steps[0])
    for step in (*steps, steps[0]):
        swa_decode(*step, window=WINDOW, plan=plan)
    assert remembered == []
    swa_decode(*steps[0], window=WINDOW)
    assert remembered == ["portable"]
    addresses = [passed["Keys"].base.data_ptr() for _, passed in kernels.hopper.launched]
    assert addresses == [step.cache.key_cache.data_ptr() for step in (*steps, steps[0])]


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (80, 112)], ids=str)
@pytest.mark.parametrize("block", [16, 32, 64, 48, 128, 528])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_descriptor_finds_each_element(layout, block, dims):
    k_dim, v_dim = dims if "(kv dim)" in layout or "kv" not in layout.split() else (dims[0], dims[0])
    cache = PagedCache.empty(
        layout, pages=3, block=block, kv_heads=2, k_dim=k_dim, v_dim=v_dim, dtype=torch.float16
    )  # fmt: skip
    for view in cache.views():
        found = describe(view)
        assert found.base.data_ptr() == view.data_ptr()
        assert found.base.dtype == torch.float16
        box = found.block_shape[-3] if len(found.shape) == 5 else found.block_shape[1]
        assert block % box == 0
        assert 16 <= box <= 64
        assert found.block_shape[-1] == 64
        for page, slot, head, d in [(0, 0, 0, 0), (2, block - 1, 1, view.shape[3] - 1), (1, block // 2 + 1, 0, 17)]:
            place = (page, slot, head, d) if len(found.shape) == 4 else (page, slot // box, slot % box, head, d)
            assert all(at < size for at, size in zip(place, found.shape, strict=True))
            offset = sum(at * stride for at, stride in zip(place, found.strides, strict=True))
            assert offset == sum(at * stride for at, stride in zip((page, slot, head, d), view.stride(), strict=True))
        # Boxes beyond these sizes are filled with zeros: neither may reach into another view.
        assert found.shape[-1] == view.shape[3]
        assert (found.shape[0], found.shape[-2]) == (3, 2)


def test_an_axis_of_one_may_have_any_stride():
    memory = torch.empty(4096, dtype=torch.bfloat16)
    odd = memory.as_strided((1, 16, 1, 64), (3, 64, 5, 1))
    assert _descriptors.why_not_described(odd) is None
    assert describe(odd).strides[1] == 64
    assert all(stride % 8 == 0 for stride in describe(odd).strides[:-1])


def test_a_cache_without_pages_is_handed_over():
    assert "without pages" in _descriptors.why_not_described(torch.empty(0, 16, 1, 64, dtype=torch.bfloat16))


def test_descriptors_are_remembered_and_told_apart():
    memory = torch.empty(1 << 14, dtype=torch.bfloat16)
    views = [
        memory.view(4, 32, 2, 64),
        memory.view(8, 16, 2, 64),
        memory.view(4, 2, 32, 64).transpose(1, 2),
        memory.view(4, 32, 1, 128),
        memory.view(torch.float16).view(4, 32, 2, 64),
        memory[1024:].view(-1, 16, 1, 64),
    ]
    found = [describe(view) for view in views]
    assert len({id(each) for each in found}) == len(views)
    for view, each in zip(views, found, strict=True):
        assert describe(view) is each
        assert (each.base.data_ptr(), each.base.dtype) == (view.data_ptr(), view.dtype)
        assert each.shape[-1] == view.shape[3]


def test_memory_that_is_used_again_for_another_cache_has_another_descriptor():
    first = torch.empty(4, 32, 2, 64, dtype=torch.bfloat16)
    address = first.data_ptr()
    old = describe(first)
    alive = weakref.ref(first)
    del first
    gc.collect()
    assert alive() is None, "a descriptor keeps its cache alive"
    assert old.base.data_ptr() == address
    # What an allocator would do: the same bytes, as a cache of another form.
    memory = torch.empty(1 << 14, dtype=torch.bfloat16)
    one, other = memory.view(4, 32, 2, 64), memory.view(8, 16, 1, 128)
    assert one.data_ptr() == other.data_ptr()
    assert list(describe(one).shape) == [4, 32, 2, 64]
    assert list(describe(other).shape) == [8, 16, 1, 128]


def test_only_so_many_descriptors_are_remembered():
    memory = torch.empty(64 * 64 + 16 * (REMEMBERED_DESCRIPTORS + 1), dtype=torch.bfloat16)

    def view(number):
        return memory[8 * number :].as_strided((4, 16, 1, 64), (1024, 64, 64, 1))

    first = describe(view(0))
    assert describe(view(0)) is first
    for number in range(1, REMEMBERED_DESCRIPTORS + 1):
        describe(view(number))
    assert describe(view(0)) is not first


@pytest.mark.parametrize(
    "capability, version, words",
    [
        (90, "3.6.0", None),
        (90, "3.6.0+git1234", None),
        (90, "3.5.1", "got Triton 3.5.1"),
        (90, "4.0.0", "got Triton 4.0.0"),
        (80, "3.6.0", "needs an sm_90 device, got sm_80"),
        (100, "3.6.0", "needs an sm_90 device, got sm_100"),
    ],
)
def test_where_it_runs(capability, version, words, monkeypatch):
    reason = _device.why_no_gluon(capability, version)
    assert reason is None if words is None else words in reason
    profile = {80: "a100", 90: "h200", 100: "b200"}[capability]
    monkeypatch.setattr(_device, "device_profile", lambda device: DeviceProfile.named(profile))
    monkeypatch.setattr("triton.__version__", version)
    if words is None:
        assert _device.choose_kernel(torch.device("cuda"), "gluon") == "hopper"
    else:
        with pytest.raises(NotImplementedError, match=f"backend 'gluon' .*{words}; backend 'triton' runs here"):
            _device.choose_kernel(torch.device("cuda"), "gluon")


def test_tensors_on_the_cpu_are_refused():
    step = make()
    with pytest.raises(ValueError, match="backend 'gluon' needs tensors on a CUDA device, got cpu"):
        swa_decode(*step, window=WINDOW, backend="gluon")
    with pytest.raises(ValueError, match="backend 'gluon' needs tensors on a CUDA device, got cpu"):
        swa_decode(*step, window=WINDOW, plan=hopper_plan(step))


def test_a_plan_survives_json_and_the_operator(kernels):
    """While ``torch.compile`` traces, plans travel as text."""
    step = make()
    plan = Plan.from_json(hopper_plan(step, splits=2).to_json())

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(*tensors):
        return swa_decode(*tensors, window=WINDOW, plan=plan)

    compiled(*step)
    ((grid, _),) = kernels.hopper.launched
    assert grid == (plan.programs(4), 2, 1)
