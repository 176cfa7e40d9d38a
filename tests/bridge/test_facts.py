"""The nine facts of torch and JAX that the bridge is built on. A release that changes one turns its test red.

Nothing here goes through the bridge: what is asserted is what the frameworks do by themselves.
"""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and JAX")
jax = pytest.importorskip("jax", reason="needs PyTorch and JAX")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental.buffer_callback import buffer_callback  # noqa: E402

from tests.bridge.test_races import slow  # noqa: E402

ON_GPU = torch.cuda.is_available() and jax.default_backend() == "gpu"
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device that torch and JAX see")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]
DTYPES = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]

TIMES = 20
VALUES = 1 << 20
LONG_SLEEP = 20_000_000
"""Clock cycles: about ten milliseconds, a hundred times what it takes to dispatch a JAX program."""


@pytest.fixture(params=DEVICES)
def device(request):
    """Return a torch device, JAX's default one for the length of the test."""
    with jax.default_device(jax.local_devices(backend=request.param)[0]):
        yield request.param


def shared(tensor):
    """Import without a copy."""
    return jax.dlpack.from_dlpack(tensor, copy=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fact_1_an_import_keeps_the_pointer(dtype, device):
    tensor = torch.zeros(4096, dtype=torch.uint8, device=device).view(getattr(torch, dtype))
    array = shared(tensor)
    assert array.dtype.name == dtype
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()


@pytest.mark.parametrize(
    "view",
    [
        lambda kv: kv[:, 0],
        lambda kv: kv[..., :4],
        lambda kv: kv[::2],
        lambda kv: kv[:1, :1].expand(4, 2, 16, 2, 8),
    ],
    ids=["K of a pair", "half of each head", "every other page", "expanded"],
)
def test_fact_2_strided_views_are_refused(view, device):
    kv = torch.zeros(4, 2, 16, 2, 8, device=device)
    with pytest.raises(jax.errors.JaxRuntimeError, match="compact"):
        shared(view(kv))


def test_fact_2_permuted_tensors_are_copied_before_a_kernel(device):
    tensor = torch.arange(4096.0, device=device).view(32, 128)
    seen = []

    def note(context, out, x):
        seen.append(torch.from_dlpack(x).data_ptr())

    kernel = jax.jit(lambda x: buffer_callback(note, jax.ShapeDtypeStruct((1,), jnp.float32))(x))
    for view in (tensor, tensor.t()):
        array = shared(view)
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()
        assert np.array_equal(np.asarray(array), view.cpu().numpy())
        kernel(array).block_until_ready()
    assert array.format.layout.major_to_minor == (1, 0)
    assert seen[0] == tensor.data_ptr()
    assert seen[1] != tensor.data_ptr()


@pytest.mark.parametrize("offset", [4, 16, 32])
def test_fact_3_the_cpu_wants_64_bytes(offset):
    base = torch.zeros(1024)
    with pytest.raises(ValueError, match="aligned to 64 bytes"):
        shared(base[offset // 4 :])
    assert shared(base[16:]).unsafe_buffer_pointer() == base.data_ptr() + 64


READ_AT = """
import sys, torch, jax
base = torch.arange(4096, dtype=torch.int16, device="cuda").to(torch.bfloat16)
offset = int(sys.argv[1])
array = jax.dlpack.from_dlpack(base[offset // 2 :][:1024], copy=False)
print("imported", flush=True)
print("read", float(jax.jit(lambda x: x.astype("float32").max())(array)), flush=True)
"""


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("offset", [2, 8, 16])
def test_fact_3_the_gpu_wants_16_bytes_when_a_program_runs(offset):
    """In processes of their own: what an error inside XLA leaves behind is not for other tests."""
    result = subprocess.run(
        [sys.executable, "-c", READ_AT, str(offset)],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.stdout.startswith("imported"), result.stderr
    assert (result.returncode == 0) == (offset % 16 == 0), result.stderr
    assert ("read" in result.stdout) == (offset % 16 == 0)


def test_fact_4_int64_is_narrowed_and_copied_in_silence(device):
    """Warnings are errors here, so that silence is tested too."""
    tensor = torch.tensor([1, 2, 2**40 + 3], device=device)
    array = shared(tensor)
    assert array.dtype == jnp.int32
    assert array.unsafe_buffer_pointer() != tensor.data_ptr()
    assert array.tolist() == [1, 2, 3]
    with jax.enable_x64(True):
        assert shared(tensor).unsafe_buffer_pointer() == tensor.data_ptr()


def test_fact_5_torch_ignores_that_jax_arrays_are_read_only(device):
    array = jnp.zeros(64)
    if device == "cpu":
        assert not np.from_dlpack(array).flags.writeable
    torch.from_dlpack(array).fill_(7)
    if device == "cuda":
        torch.cuda.synchronize()
    assert float(jax.jit(jnp.sum)(array)) == 7 * 64


@pytest.mark.gpu2
def test_fact_5_torch_exports_from_its_current_device_alone():
    tensor = torch.zeros(64, device="cuda:1")
    with torch.cuda.device(0), pytest.raises(BufferError, match="device"):
        tensor.__dlpack__()
    with torch.cuda.device(1):
        assert shared(tensor).unsafe_buffer_pointer() == tensor.data_ptr()


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("ticket, ordered", [("old", False), ("unused", False), ("used", True), ("kept", True)])
def test_fact_6_an_argument_imported_on_the_step_orders_the_launch(ticket, ordered):
    x, stub = torch.zeros(VALUES, device="cuda"), torch.zeros(16, dtype=torch.int32, device="cuda")
    view, old = shared(x), shared(stub)
    add = {
        "used": jax.jit(lambda x, stub: x.sum() + 0 * stub[0]),
        "unused": jax.jit(lambda x, stub: x.sum()),
        "kept": jax.jit(lambda x, stub: x.sum(), keep_unused=True),
        "old": jax.jit(lambda x, stub: x.sum(), keep_unused=True),
    }[ticket]
    assert float(add(view, old)) == 0
    wrong = 0
    for number in range(1, TIMES + 1):
        torch.cuda._sleep(LONG_SLEEP)
        x.fill_(number)
        wrong += float(add(view, old if ticket == "old" else shared(stub))) != number * VALUES
        torch.cuda.synchronize()
    assert wrong == 0 if ordered else wrong > TIMES // 2


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("exported", [False, True])
def test_fact_7_an_export_orders_later_work_of_torch(exported):
    @jax.jit
    def late(x):
        start = (slow(x[0], 20)[0] - 1).astype(jnp.int32)
        return 2 * jax.lax.dynamic_slice(x, (start,), (VALUES // 2,)).sum()

    x = torch.zeros(VALUES, device="cuda")
    assert float(late(shared(x))) == 0
    wrong = 0
    for number in range(1, TIMES + 1):
        x.fill_(number)
        torch.cuda.synchronize()
        total = late(shared(x))
        if exported:
            torch.from_dlpack(total)
        x.fill_(-1)
        wrong += float(total) != number * VALUES
        torch.cuda.synchronize()
    assert wrong == 0 if exported else wrong > TIMES // 2


def test_fact_8_donated_memory_of_torch_is_updated_in_place_on_a_gpu_and_copied_on_the_cpu(device):
    tensor = torch.zeros(4096, device=device)
    array = shared(tensor)
    updated = jax.jit(lambda x: x.at[0].set(42.0), donate_argnums=0)(array).block_until_ready()
    in_place = device == "cuda"
    assert (updated.unsafe_buffer_pointer() == tensor.data_ptr()) == in_place
    assert updated[0] == 42
    assert tensor[0] == (42 if in_place else 0)
    assert array.is_deleted()
    del updated, array
    assert tensor[1:].sum() == 0


def test_fact_9_donating_what_torch_views(device):
    """A GPU raises, the CPU copies; without the view both update in place."""
    update = jax.jit(lambda x: x.at[0].set(42.0), donate_argnums=0)
    array = jnp.zeros(4096).block_until_ready()
    pointer = array.unsafe_buffer_pointer()
    view = torch.from_dlpack(array)
    if device == "cuda":
        with pytest.raises((RuntimeError, ValueError), match=r"(?i)buffer|donat|reference"):
            update(array)
    else:
        copied = update(array)
        assert copied.unsafe_buffer_pointer() != pointer
        assert view[0] == 0
        array = jnp.zeros(4096).block_until_ready()
        pointer = array.unsafe_buffer_pointer()
        view = torch.from_dlpack(array)
    del view
    assert update(array).unsafe_buffer_pointer() == pointer
