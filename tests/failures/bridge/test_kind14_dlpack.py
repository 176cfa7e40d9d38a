"""Kind 14 of the known failures, and C103: memory that two frameworks share through DLPack."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("JAX has no part in a process in which Triton interprets", allow_module_level=True)
torch = pytest.importorskip("torch", reason="needs PyTorch and JAX")
jax = pytest.importorskip("jax", reason="needs PyTorch and JAX")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import swa_pallas  # noqa: E402
import swa_torch  # noqa: E402
from bridge import Session, to_jax, to_torch  # noqa: E402
from tests.bridge.test_races import slow  # noqa: E402

ON_GPU = torch.cuda.is_available() and jax.default_backend() == "gpu"
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device that torch and JAX see")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]


@pytest.fixture(params=DEVICES)
def device(request):
    """Return a torch device, JAX's default one for the length of the test."""
    with jax.default_device(jax.local_devices(backend=request.param)[0]):
        yield request.param


def bits(array):
    return np.asarray(array).view(np.uint8)


def test_donating_borrowed_memory(device):
    """C103, pytorch/xla#7198: JAX writes to torch's memory on a GPU and to a copy on the CPU, as the docs say."""
    tensor = torch.zeros(4096, device=device)
    array = to_jax(tensor)
    updated = jax.jit(lambda x: x.at[3].set(5.0), donate_argnums=0)(array)
    with pytest.raises(RuntimeError, match="deleted"):
        array + 1
    assert float(updated[3]) == 5
    assert tensor[3] == (5 if device == "cuda" else 0)
    del updated, array
    assert torch.full((4096,), 9.0, device=device)[0] == 9  # would reuse what had been freed
    tensor[3] = 0
    assert tensor.sum() == 0


def test_a_sessions_update_is_seen_through_the_alias(device):
    """C103, pytorch/xla#7198: a session's update is in torch's memory, on either device."""
    tensor = torch.zeros(4096, device=device)
    with Session({"x": tensor}, copy=device == "cpu") as session:
        step = session.jax_step(lambda buffers: (None, {"x": buffers["x"].at[3].add(5.0)}), updates="x")
        for number in range(1, 4):
            step()
            assert tensor[3] == 5 * number
            assert session.arrays["x"][3] == 5 * number
        assert session.pointers["x"] == [(tensor.data_ptr(), tensor.data_ptr())]


@pytest.mark.parametrize(
    "view",
    [
        lambda kv, table: kv[:, 0],
        lambda kv, table: kv[:, 0].permute(0, 2, 1, 3),
        lambda kv, table: kv.permute(0, 1, 3, 2, 4),
        lambda kv, table: table.t(),
    ],
    ids=["K of a pair", "HND of K", "HND of both", "table"],
)
def test_strided_tensors_are_refused_or_copied_right(view, device):
    """C104, jax-ml/jax#17784: never other values, and never a copy that was not asked for."""
    kv = torch.arange(4 * 2 * 16 * 2 * 8, dtype=torch.int32, device=device).view(4, 2, 16, 2, 8)
    table = torch.arange(12, dtype=torch.int32, device=device).view(3, 4)
    tensor = view(kv, table)
    with pytest.raises(ValueError, match=r"x must be contiguous.*got shape .* and strides"):
        to_jax(tensor)
    assert np.array_equal(np.asarray(to_jax(tensor, copy=True)), tensor.cpu().numpy())


def test_the_base_of_strided_views_is_shared(device):
    """C104, jax-ml/jax#17784: what to exchange instead: the base and the name of its layout."""
    kv = torch.arange(4 * 2 * 16 * 2 * 16, dtype=torch.float32, device=device).view(4, 2, 16, 2, 16)
    ours = swa_torch.PagedCache(kv, "pages kv block kv_heads dim")
    theirs = to_jax(ours)
    assert theirs.bases[0].unsafe_buffer_pointer() == kv.data_ptr()
    for tensor, array in zip(ours.views(), theirs.layout.views([np.asarray(theirs.bases[0])]), strict=True):
        assert np.array_equal(array, tensor.cpu().numpy())


def test_int64_tables_stop_at_the_exchange(device):
    """C106, jax-ml/jax#11895: a TypeError there and then; the fix that it names serves the kernel."""
    rng = np.random.default_rng(0)
    query, key, value = (
        torch.from_numpy(rng.standard_normal(shape, np.float32)).to(device, copy=True)
        for shape in ((1, 2, 16), (4, 16, 1, 16), (4, 16, 1, 16))
    )
    table = torch.tensor([[2, 1, 3]], device=device)
    lens = torch.tensor([40], dtype=torch.int32, device=device)
    with pytest.raises(TypeError, match=r"x must not be int64 while jax_enable_x64 is off.*tensor\.to\(torch\.int32\)"):
        to_jax(table)
    expected = swa_torch.swa_decode(query, (key, value), table, lens, window=20)
    pair = (to_jax(key), to_jax(value))
    out = swa_pallas.swa_decode(to_jax(query), pair, to_jax(table.to(torch.int32)), to_jax(lens), window=20)
    assert np.abs(np.asarray(out) - expected.cpu().numpy()).max() <= 1e-5


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"])
def test_small_floats_cross_bit_for_bit(dtype, device):
    """C107, pytorch/pytorch#150691: no fp8 arrives as uint8, and no bit changes."""
    number = getattr(torch, dtype)
    octets = torch.arange(4 * 16 * 2 * 192 * number.itemsize, device=device).to(torch.uint8)
    cache = octets.view(number).view(4, 16, 2, 192)
    array = to_jax(cache)
    assert array.dtype.name == dtype
    assert array.unsafe_buffer_pointer() == cache.data_ptr()
    assert np.array_equal(bits(array).reshape(-1), octets.cpu().numpy())
    back = to_torch(array)
    assert back.dtype == number
    assert torch.equal(back.view(torch.uint8), cache.view(torch.uint8))


def test_what_torch_writes_after_the_import(device):
    """C109, jax-ml/jax#19183: a new import and a session's step always see it; an old import may, as documented."""
    add = jax.jit(jnp.sum)
    tensor = torch.zeros(64, device=device)
    array = to_jax(tensor)
    before = add(array)
    assert float(before) == 0
    tensor[0] = 5
    assert float(add(array)) in (0, 5)
    assert float(add(to_jax(tensor))) == 5
    assert float(before) == 0
    with Session({"x": tensor}) as session:
        step = session.jax_step(lambda buffers: buffers["x"].sum())
        for number in range(3):
            tensor[0] = number
            assert step().item() == number


def test_an_array_is_exported_any_number_of_times(device):
    """C110, jax-ml/jax#4636: an export takes nothing away."""
    array = jnp.arange(64.0)
    first, second = to_torch(array), to_torch(array)
    assert first.data_ptr() == second.data_ptr() == array.unsafe_buffer_pointer()
    assert float(jnp.sum(array)) == first.sum().item() == second.sum().item() == 2016


TIMES = 100
LARGE = 2**27
SLEEP = 100_000_000
"""Clock cycles of an H100: about 50 milliseconds."""


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.slow
def test_jax_awaits_another_stream_of_torch():
    """C111, pytorch/pytorch#101318: a side stream sleeps and writes, and JAX reads at once."""
    side = torch.cuda.Stream()
    tensor = torch.zeros(LARGE, dtype=torch.bfloat16, device="cuda")
    ends = jax.jit(lambda x: (x.max(), x.min()))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        jax.block_until_ready(ends(to_jax(tensor)))
        for _ in range(TIMES):
            tensor.zero_()
            torch.cuda._sleep(SLEEP)
            tensor.fill_(3)
            largest, smallest = ends(to_jax(tensor))
            assert (float(largest), float(smallest)) == (3, 3)


@pytest.mark.gpu
@NEEDS_GPU
def test_another_stream_of_torch_awaits_jax():
    """C111, pytorch/pytorch#101318: JAX computes long and writes, and torch reads on a side stream at once."""
    side = torch.cuda.Stream()
    make = jax.jit(lambda number: jnp.full(LARGE, 2, jnp.bfloat16) + slow(number)[0].astype(jnp.bfloat16))
    jax.block_until_ready(make(jnp.float32(0)))
    with torch.cuda.stream(side):
        for number in range(TIMES):
            tensor = to_torch(make(jnp.float32(number)))
            assert (tensor.max().item(), tensor.min().item()) == (3, 3)


def test_pinned_memory_is_refused_by_name(monkeypatch):
    """C114, jax-ml/jax#22346: no KeyError for DLPack's device type 3; the fix works."""
    tensor = torch.arange(4.0)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda each: each.data_ptr() == tensor.data_ptr())
    monkeypatch.setattr(torch.Tensor, "__dlpack_device__", _as_if_pinned(tensor))
    with pytest.raises(ValueError, match=r"x must be in ordinary CPU .*, got pinned host memory: pass x\.clone\(\)"):
        to_jax(tensor)
    assert to_jax(tensor.clone()).tolist() == to_jax(tensor, copy=True).tolist() == [0.0, 1.0, 2.0, 3.0]


def _as_if_pinned(pinned):
    """Return a ``__dlpack_device__`` that gives the type of pinned memory for one tensor."""
    device_of = torch.Tensor.__dlpack_device__
    return lambda tensor: (3, 0) if tensor.data_ptr() == pinned.data_ptr() else device_of(tensor)


@pytest.mark.gpu
@NEEDS_GPU
def test_really_pinned_memory_is_refused_by_name():
    """C114, jax-ml/jax#22346: the same with memory that CUDA pinned."""
    tensor = torch.arange(4.0).pin_memory()
    with pytest.raises(ValueError, match="got pinned host memory"):
        to_jax(tensor)
    assert to_jax(tensor, copy=True).tolist() == [0.0, 1.0, 2.0, 3.0]
