"""`to_jax` and `to_torch` where they share: each dtype bit for bit in one memory, caches of every layout, capsules."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and JAX")
jax = pytest.importorskip("jax", reason="needs PyTorch and JAX")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import swa_pallas  # noqa: E402
import swa_torch  # noqa: E402
from bridge import to_jax, to_torch  # noqa: E402
from bridge._dtypes import SHARED  # noqa: E402
from swa_plan._layout import LAYOUTS  # noqa: E402

ON_GPU = torch.cuda.is_available() and jax.default_backend() == "gpu"
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device that torch and JAX see")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]
SHAPES = [(), (0, 3), (1,), (5, 1, 3)]
EVERY_LAYOUT = [*LAYOUTS, *(f"layers {layout}" for layout in LAYOUTS), "pages layers kv block kv_heads dim"]


@pytest.fixture(params=DEVICES)
def device(request):
    """Return a torch device, JAX's default one for the length of the test."""
    with jax.default_device(jax.local_devices(backend=request.param)[0]):
        yield request.param


def all_bits(dtype, device):
    """Return a tensor whose bytes take every value, NaNs of every kind among them."""
    rng = np.random.default_rng(0)
    octets = np.concatenate([np.arange(256, dtype=np.uint8), rng.integers(0, 256, 768, dtype=np.uint8)])
    return torch.from_numpy(octets).to(device, copy=True).view(getattr(torch, dtype))


def bits(x):
    """Return the bytes of a tensor, or of an array as a JAX program reads them."""
    if isinstance(x, torch.Tensor):
        return x.contiguous().view(-1).view(torch.uint8).cpu().numpy()
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return np.asarray(jax.jit(lambda x: jax.lax.bitcast_convert_type(x, unsigned))(x)).reshape(-1).view(np.uint8)


def assert_one_memory(tensor, array):
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    assert tuple(tensor.shape) == array.shape
    assert str(tensor.dtype).removeprefix("torch.") == array.dtype.name


@pytest.mark.parametrize("dtype", SHARED)
def test_a_tensor_keeps_its_bits_and_its_memory(dtype, device):
    tensor = all_bits(dtype, device)
    array = to_jax(tensor)
    assert_one_memory(tensor, array)
    assert {each.platform for each in array.devices()} == {"cpu" if device == "cpu" else "gpu"}
    assert np.array_equal(bits(array), bits(tensor))
    back = to_torch(array)
    assert_one_memory(back, array)
    assert back.device.type == device
    assert np.array_equal(bits(back), bits(tensor))


@pytest.mark.parametrize("dtype", SHARED)
def test_an_array_keeps_its_bits_and_its_memory(dtype, device):
    given = all_bits(dtype, "cpu")
    array = jax.block_until_ready(jnp.array(bits(given).view(dtype)))
    tensor = to_torch(array)
    assert_one_memory(tensor, array)
    assert np.array_equal(bits(tensor), bits(given))
    back = to_jax(tensor)
    assert_one_memory(tensor, back)
    assert np.array_equal(bits(back), bits(given))


def test_int64_under_x64(device):
    with jax.enable_x64(True):
        tensor = torch.tensor([2**40, -1, 2**63 - 1], device=device)
        array = to_jax(tensor)
        assert_one_memory(tensor, array)
        assert np.asarray(array).tolist() == tensor.tolist()
        back = to_torch(array)
        assert_one_memory(back, array)
        assert torch.equal(back, tensor)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int32"])
def test_small_shapes(shape, dtype, device):
    tensor = torch.ones(shape, device=device).to(getattr(torch, dtype))
    array = to_jax(tensor)
    back = to_torch(array)
    assert array.shape == tuple(back.shape) == shape
    assert array.dtype.name == dtype
    assert back.dtype == tensor.dtype
    assert np.array_equal(bits(back), bits(tensor))
    if tensor.numel():
        assert_one_memory(tensor, array)
        assert_one_memory(back, array)


@pytest.mark.parametrize("shape", SHAPES)
def test_small_shapes_of_jax(shape, device):
    array = jnp.ones(shape, jnp.bfloat16)
    tensor = to_torch(array)
    assert tuple(tensor.shape) == to_jax(tensor).shape == shape
    assert tensor.dtype == torch.bfloat16
    assert (tensor == 1).all()


def test_an_axis_of_length_1_may_have_any_stride(device):
    tensor = torch.arange(32.0, device=device).as_strided((1, 32), (999, 1))
    array = to_jax(tensor)
    assert_one_memory(tensor, array)
    assert np.array_equal(np.asarray(array), tensor.cpu().numpy())


def test_a_slice_of_whole_rows_is_shared(device):
    base = torch.arange(256.0, device=device).view(4, 64)
    array = to_jax(base[2:])
    assert array.unsafe_buffer_pointer() == base.data_ptr() + 2 * 64 * 4
    assert np.array_equal(np.asarray(array), base[2:].cpu().numpy())


def test_what_does_not_make_a_subclass(device):
    parameter = torch.nn.Parameter(torch.ones(4, device=device), requires_grad=False)
    buffer = torch.nn.Buffer(torch.ones(4, device=device))
    for tensor in (parameter, buffer):
        assert_one_memory(tensor, to_jax(tensor))


def test_what_torch_writes_is_in_the_next_import(device):
    tensor = torch.zeros(64, device=device)
    add = jax.jit(jnp.sum)
    for number in range(3):
        tensor.fill_(number)
        assert float(add(to_jax(tensor))) == 64 * number


def test_what_torch_writes_reaches_the_memory_of_jax(device):
    array = jnp.zeros(64)
    tensor = to_torch(array)
    for number in range(3):
        tensor.fill_(number)
        assert float(jax.jit(jnp.sum)(to_jax(tensor))) == 64 * number
    del tensor
    assert float(jax.jit(jnp.sum)(array)) == 128


def test_an_array_is_exported_when_it_is_computed(device):
    array = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: y @ y / 128, x))(jnp.ones((128, 128)))
    assert (to_torch(array) == 1).all()


def test_exported_twice_and_still_jaxs(device):
    array = jnp.arange(64.0)
    first, second = to_torch(array), to_torch(array)
    assert first.data_ptr() == second.data_ptr() == array.unsafe_buffer_pointer()
    assert float(array.sum()) == first.sum().item() == 2016


def test_memory_outlives_its_owners_name(device):
    tensor = torch.arange(64.0, device=device)
    array = to_jax(tensor)
    del tensor
    again = to_torch(array)
    del array
    assert again.sum().item() == 2016
    array = jnp.arange(64.0) + 1
    tensor = to_torch(array)
    del array
    assert to_jax(tensor).sum() == 2080


# Copies


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base,
        lambda base: base[::2],
        lambda base: base.view(8, 8).t(),
        lambda base: base[:1].expand(5),
        lambda base: base[1:18],
        lambda base: base.requires_grad_(),
        lambda base: torch.nn.Parameter(base),
    ],
    ids=["contiguous", "strided", "permuted", "expanded", "misaligned", "requires_grad", "parameter"],
)
def test_a_copy_has_the_values_and_memory_of_its_own(view, device):
    tensor = view(torch.arange(64.0, device=device))
    array = to_jax(tensor, copy=True)
    assert array.unsafe_buffer_pointer() != tensor.data_ptr()
    expected = tensor.detach().cpu().numpy().copy()
    assert np.array_equal(np.asarray(array), expected)
    tensor.detach()[0].fill_(-9)
    assert np.array_equal(np.asarray(array + 0), expected)


def test_a_copied_array_has_memory_of_its_own(device):
    array = jnp.arange(64.0)
    tensor = to_torch(array, copy=True)
    assert tensor.data_ptr() != array.unsafe_buffer_pointer()
    tensor.zero_()
    assert array.sum() == 2016


def test_a_copied_cache_may_have_been_views(device):
    cache = filled("pages block kv_heads (kv dim)", "bfloat16", device)
    views = swa_torch.PagedCache.from_kv(cache.key_cache, cache.value_cache)
    copied = to_jax(views, copy=True)
    for ours, theirs in zip((cache.key_cache, cache.value_cache), copied.bases, strict=True):
        assert np.array_equal(bits(theirs), bits(ours))
    back = to_torch(copied, copy=True)
    assert {base.data_ptr() for base in back.bases}.isdisjoint(base.unsafe_buffer_pointer() for base in copied.bases)


# Caches


def filled(layout, dtype, device):
    """Return a cache of torch with other bits in each place; K and V are unequal where the layout lets them."""
    v_dim = 32 if " kv " in f" {layout.replace('(kv dim)', '')} " else 16
    sizes = {"pages": 3, "block": 4, "kv_heads": 2, "k_dim": 32, "v_dim": v_dim}
    layers = 2 if "layers" in layout else None
    cache = swa_torch.PagedCache.empty(layout, **sizes, layers=layers, dtype=getattr(torch, dtype), device=device)
    for number, base in enumerate(cache.bases):
        octets = base.view(-1).view(torch.uint8)
        octets.copy_((torch.arange(octets.numel(), device=device) * (7 + number)).to(torch.uint8))
    return cache


def assert_one_cache(ours, theirs):
    """Assert that caches of torch and of JAX are the same memory, read in the same way."""
    assert isinstance(ours, swa_torch.PagedCache)
    assert isinstance(theirs, swa_pallas.PagedCache)
    assert ours.layout == theirs.layout
    for name in ("pages", "block", "kv_heads", "k_dim", "v_dim", "layers"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert len(ours.bases) == len(theirs.bases)
    for tensor, array in zip(ours.bases, theirs.bases, strict=True):
        assert_one_memory(tensor, array)
    for layer in range(ours.layers) if ours.layers else [None]:
        arrays = [np.asarray(base) for base in theirs.bases]
        views = theirs.layout.views(arrays, k_dim=theirs.k_dim, v_dim=theirs.v_dim, layer=layer)
        for tensor, array in zip(ours.views(layer), views, strict=True):
            assert np.array_equal(bits(tensor), np.ascontiguousarray(array).reshape(-1).view(np.uint8))


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_a_cache_crosses_both_ways(layout, device):
    ours = filled(layout, "bfloat16", device)
    theirs = to_jax(ours)
    assert_one_cache(ours, theirs)
    assert_one_cache(to_torch(theirs), theirs)
    owned = jax.tree.map(jnp.copy, theirs)
    assert owned.bases[0].unsafe_buffer_pointer() != theirs.bases[0].unsafe_buffer_pointer()
    crossed = to_torch(owned)
    assert_one_cache(crossed, owned)
    assert_one_cache(crossed, to_jax(crossed))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "float16"])
def test_a_cache_of_each_stored_dtype_crosses(dtype, device):
    ours = filled("kv pages block kv_heads dim", dtype, device)
    assert_one_cache(ours, to_jax(ours))


def test_a_pair_of_whole_tensors_crosses(device):
    key, value = torch.ones(3, 4, 2, 32, device=device), torch.ones(3, 4, 2, 16, device=device)
    theirs = to_jax(swa_torch.PagedCache.from_kv(key, value))
    assert_one_memory(key, theirs.bases[0])
    assert_one_memory(value, theirs.bases[1])


# Capsules


class Producer:
    """The memory of another producer, exported as ``options`` say; notes what its consumer asked for."""

    def __init__(self, memory, **options):
        self.memory = memory
        self.options = options
        self.asked = []

    def __dlpack_device__(self):
        return self.memory.__dlpack_device__()

    def __dlpack__(self, **asked):
        self.asked.append(asked)
        return self.memory.__dlpack__(**self.options)


class OldProducer(Producer):
    """One that was written before DLPack had versions."""

    def __dlpack__(self, stream=None):
        return self.memory.__dlpack__()


def test_jax_takes_the_capsules_of_torch(device):
    """Without a version always; with one where it asks for one, which it does since 0.11 or 0.12."""
    tensor = torch.zeros(64, device=device)
    for producer in (Producer(tensor), OldProducer(tensor)):
        assert jax.dlpack.from_dlpack(producer, copy=False).unsafe_buffer_pointer() == tensor.data_ptr()
    producer = Producer(tensor)
    jax.dlpack.from_dlpack(producer, copy=False)
    (asked,) = producer.asked
    if "max_version" in asked:
        versioned = Producer(tensor, max_version=asked["max_version"])
        assert "dltensor_versioned" in repr(tensor.__dlpack__(max_version=asked["max_version"]))
        assert jax.dlpack.from_dlpack(versioned, copy=False).unsafe_buffer_pointer() == tensor.data_ptr()


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0)])
def test_torch_takes_the_capsules_of_jax(version, device):
    array = jnp.zeros(64)
    tensor = torch.from_dlpack(array.__dlpack__(max_version=version))
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    producer = Producer(array, max_version=version)
    assert torch.from_dlpack(producer).data_ptr() == array.unsafe_buffer_pointer()


def test_a_tensor_that_came_from_jax_goes_back(device):
    """A capsule of torch around a capsule of JAX, several times over."""
    array = jnp.arange(64.0)
    crossed = array
    for _ in range(4):
        crossed = to_jax(to_torch(crossed))
    assert crossed.unsafe_buffer_pointer() == array.unsafe_buffer_pointer()
    assert crossed.sum() == 2016
