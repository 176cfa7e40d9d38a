"""What `to_jax` and `to_torch` refuse: each message names the argument, the rule, the value and a fix that works."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and JAX")
jax = pytest.importorskip("jax", reason="needs PyTorch and JAX")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import swa_pallas  # noqa: E402
import swa_torch  # noqa: E402
from bridge import to_jax, to_torch  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_cpu")


class Subclass(torch.Tensor):
    """One that means nothing more than its memory."""


def values(tensor):
    return np.asarray(tensor.detach().resolve_neg().cpu())


# Tensors


FIXABLE = {
    "strided": (
        lambda: torch.arange(64.0)[::2],
        ValueError,
        r"x must be contiguous, .*or copy=True, got shape \(32,\) and strides \(2,\)",
        lambda x: to_jax(x, copy=True),
    ),
    "rows cut": (
        lambda: torch.arange(64.0).view(8, 8)[:, :4],
        ValueError,
        r"x must be contiguous, .*or copy=True, got shape \(8, 4\) and strides \(8, 1\)",
        lambda x: to_jax(x, copy=True),
    ),
    "permuted": (
        lambda: torch.arange(64.0).view(4, 16).t(),
        ValueError,
        r"x must be contiguous, .*pass the compact base .*strides \(1, 16\)",
        lambda x: to_jax(x.t()).T,
    ),
    "expanded": (
        lambda: torch.arange(4.0)[2].expand(5),
        ValueError,
        r"x must be contiguous, .*got shape \(5,\) and strides \(0,\)",
        lambda x: to_jax(x, copy=True),
    ),
    "misaligned": (
        lambda: torch.arange(64.0)[4:],
        ValueError,
        r"x must start at a multiple of 64 bytes on the cpu, got one at byte 16 of its storage, address 0x[0-9a-f]+",
        lambda x: to_jax(x.clone()),
    ),
    "requires grad": (
        lambda: torch.arange(4.0, requires_grad=True),
        ValueError,
        r"x must not require grad, which JAX would lose: pass x\.detach\(\)",
        lambda x: to_jax(x.detach()),
    ),
    "subclass": (
        lambda: torch.arange(4.0).as_subclass(Subclass),
        TypeError,
        r"x must be a torch\.Tensor .*got Subclass .*pass tensor\.as_subclass\(torch\.Tensor\)",
        lambda x: to_jax(x.as_subclass(torch.Tensor)),
    ),
    "negative": (
        lambda: torch.complex(torch.arange(4.0), torch.arange(4.0)).conj().imag,
        ValueError,
        r"x must hold its own values, got a lazy conjugate or negative: pass x\.clone\(\)",
        lambda x: to_jax(x.clone()),
    ),
    "int64": (
        lambda: torch.arange(4),
        TypeError,
        r"x must not be int64 while jax_enable_x64 is off, .*use int32 \(tensor\.to\(torch\.int32\)\)",
        lambda x: to_jax(x.to(torch.int32)),
    ),
    "sparse": (
        lambda: torch.eye(4).to_sparse(),
        TypeError,
        r"x must be a dense tensor, got layout torch\.sparse_coo",
        None,
    ),
    "meta": (
        lambda: torch.zeros(4, device="meta"),
        ValueError,
        "x must be on the CPU or a CUDA device, got device 'meta'",
        None,
    ),
}


@pytest.mark.parametrize("case", FIXABLE)
def test_a_tensor_that_cannot_be_shared(case):
    make, error, words, fix = FIXABLE[case]
    x = make()
    with pytest.raises(error, match=words):
        to_jax(x)
    if fix is None:
        with pytest.raises(error, match=words):
            to_jax(x, copy=True)
    else:
        assert np.array_equal(np.asarray(fix(x)), values(x))


@pytest.mark.parametrize(
    "dtype", ["bool", "complex64", "float64", "int16", "uint16", "uint32", "float8_e4m3fnuz", "float8_e8m0fnu"]
)
@pytest.mark.parametrize("copy", [False, True])
def test_dtypes_of_torch_that_do_not_cross(dtype, copy):
    x = torch.zeros(4, dtype=torch.uint8).to(getattr(torch, dtype))
    with pytest.raises(TypeError, match=rf"x must have a dtype that both .*\(bfloat16, .*int64\), got {dtype}$"):
        to_jax(x, copy=copy)


@pytest.mark.parametrize("dtype", ["bool", "complex64", "int4", "int16", "uint32", "float8_e4m3b11fnuz"])
@pytest.mark.parametrize("copy", [False, True])
def test_dtypes_of_jax_that_do_not_cross(dtype, copy):
    x = jnp.zeros(4, dtype)
    with pytest.raises(TypeError, match=rf"x must have a dtype that both .*\(bfloat16, .*int64\), got {dtype}$"):
        to_torch(x, copy=copy)


def test_int64_crosses_once_jax_has_it():
    with jax.enable_x64(True):
        x = jnp.arange(4)
    with pytest.raises(TypeError, match=r"x must not be int64 while jax_enable_x64 is off"):
        to_torch(x)
    with jax.enable_x64(True):
        assert to_torch(x).dtype == torch.int64


@pytest.mark.parametrize(
    "x, words",
    [
        (np.zeros(4, np.float32), "got ndarray"),
        ([torch.zeros(4)], "got list"),
        (jax.ShapeDtypeStruct((4,), np.float32), "got ShapeDtypeStruct"),
        (None, "got NoneType"),
    ],
)
def test_what_is_of_neither_framework(x, words):
    with pytest.raises(TypeError, match=rf"x must be a torch\.Tensor or a swa_torch\.PagedCache, {words}"):
        to_jax(x)
    with pytest.raises(TypeError, match=rf"x must be a jax\.Array or a swa_pallas\.PagedCache, {words}"):
        to_torch(x)


def test_what_is_already_there():
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor .*\(it is JAX's already\)"):
        to_jax(jnp.zeros(4))
    with pytest.raises(TypeError, match=r"x must be a jax\.Array .*got Tensor"):
        to_torch(torch.zeros(4))


def test_a_fake_tensor():
    with FakeTensorMode():
        x = torch.zeros(4)
    for copy in (False, True):
        with pytest.raises(TypeError, match=r"x must be a torch\.Tensor .*got FakeTensor"):
            to_jax(x, copy=copy)


def test_pinned_memory(monkeypatch):
    x = torch.arange(4.0)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() == x.data_ptr())
    with pytest.raises(ValueError, match=r"x must be in ordinary CPU .*got pinned host memory: pass x\.clone\(\)"):
        to_jax(x)
    assert to_jax(x.clone()).tolist() == to_jax(x, copy=True).tolist() == x.tolist()


# Caches


def packed_cache():
    base = torch.arange(3 * 4 * 2 * 48, dtype=torch.float32).view(3, 4, 2, 48)
    return swa_torch.PagedCache(base, "pages block kv_heads (kv dim)", k_dim=32, v_dim=16)


def test_views_of_a_cache_are_not_guessed_back_into_their_base():
    cache = packed_cache()
    views = swa_torch.PagedCache.from_kv(cache.key_cache, cache.value_cache)
    with pytest.raises(ValueError, match=r"x\.bases\[0\] must be contiguous, .*PagedCache\(base, layout\)"):
        to_jax(views)
    assert to_jax(cache).bases[0].unsafe_buffer_pointer() == cache.bases[0].data_ptr()
    assert np.array_equal(np.asarray(to_jax(views, copy=True).bases[1]), values(cache.value_cache))


def test_a_cache_of_strided_pages():
    whole = torch.zeros(3, 2, 2, 4, 2, 16)
    with pytest.raises(ValueError, match=r"the base of x must be contiguous"):
        to_jax(swa_torch.PagedCache(whole[:, 0], "pages kv block kv_heads dim"))
    with pytest.raises(ValueError, match=r"x\.bases\[1\] must be contiguous"):
        to_jax(swa_torch.PagedCache((torch.zeros(3, 4, 2, 16), whole[:, 0, 0]), "pages block kv_heads dim"))


def test_a_cache_of_numpy_or_of_deleted_arrays():
    cache = swa_pallas.PagedCache(np.zeros((3, 2, 4, 2, 16), np.float32), "pages kv block kv_heads dim")
    with pytest.raises(TypeError, match=r"the base of x must be a jax\.Array .*got ndarray"):
        to_torch(cache)
    pair = (jnp.zeros((3, 4, 2, 16)), jnp.zeros((3, 4, 2, 16)))
    cache = swa_pallas.PagedCache(pair, "pages block kv_heads dim")
    pair[1].delete()
    with pytest.raises(ValueError, match=r"x\.bases\[1\] must not have been donated or deleted"):
        to_torch(cache)


# Arrays


def test_a_deleted_or_donated_array():
    x = jnp.arange(4.0)
    y = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    with pytest.raises(ValueError, match="x must not have been donated or deleted: use the result of the function"):
        to_torch(x)
    assert to_torch(y).tolist() == [1.0, 2.0, 3.0, 4.0]
    y.delete()
    with pytest.raises(ValueError, match="x must not have been donated or deleted"):
        to_torch(y)


def test_an_array_on_several_devices():
    devices = jax.local_devices(backend="cpu")
    if len(devices) < 2:
        pytest.skip("needs two CPU devices in the process")
    mesh = jax.sharding.Mesh(devices[:2], "x")
    for spec in ("x", None):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(spec))
        x = jax.device_put(jnp.arange(64.0), sharding)
        with pytest.raises(ValueError, match=r"x must be on one device, got 2: exchange its shards, \[to_torch\("):
            to_torch(x)
        shards = [to_torch(shard.data) for shard in x.addressable_shards]
        pointers = [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
        assert [shard.data_ptr() for shard in shards] == pointers
        whole = torch.cat(shards) if spec else shards[1]
        assert whole.tolist() == list(range(64))


def test_another_device_of_the_cpu_is_the_cpu():
    x = jax.device_put(jnp.arange(4.0), jax.local_devices(backend="cpu")[-1])
    assert to_torch(x).data_ptr() == x.unsafe_buffer_pointer()


# Transformations


@pytest.mark.parametrize(
    "transformed",
    [
        lambda inside: jax.jit(inside)(jnp.ones(4)),
        lambda inside: jax.vmap(inside)(jnp.ones((2, 4))),
        lambda inside: jax.grad(lambda x: inside(x).sum())(jnp.ones(4)),
        lambda inside: jax.lax.scan(lambda carry, x: (inside(carry), None), jnp.ones(4), jnp.ones(2)),
        lambda inside: jax.eval_shape(inside, jnp.ones(4)),
    ],
    ids=["jit", "vmap", "grad", "scan", "eval_shape"],
)
def test_inside_a_transformation(transformed):
    tensor = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"to_jax must be called outside jax\.jit .* would be a constant"):
        transformed(lambda x: x + to_jax(tensor))
    with pytest.raises(TypeError, match=r"x must be a concrete array, got .*Tracer.*: exchange outside jax\.jit"):
        transformed(lambda x: x + to_torch(x).sum().item())
    assert to_jax(tensor).sum() == 4


def test_settings_of_jax_are_no_transformation():
    tensor = torch.ones(4)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), jax.debug_nans(True), jax.named_scope("here"), jax.disable_jit():
        assert to_jax(tensor).unsafe_buffer_pointer() == tensor.data_ptr()
