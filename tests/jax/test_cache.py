"""``PagedCache`` as a pytree, its specs, and ``append`` against the reference, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from swa_pallas import PagedCache, append, cache_specs, swa_decode
from swa_plan import CacheLayout, reference
from swa_plan._dtypes import numpy_dtype
from tests.contract.appends import BLOCK, DIM, KV_HEADS, PAGES, SLOTS, make_bases, make_rows
from tests.jax.helpers import ALL_LAYOUTS, BACKENDS, LAYERED, LAYERS, LAYOUTS, make_cache, same_bits, specs

PAIR, PACKED = LAYOUTS[0], LAYOUTS[4]
QUANTISED = ("float8_e4m3fn", "float8_e5m2", "int8")
DTYPES = ("float32", "float16", "bfloat16")

# --- the pytree ---


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_leaves_are_the_bases_and_nothing_else(layout):
    cache = make_cache(layout)
    leaves, structure = jax.tree.flatten(cache)
    assert len(leaves) == cache.layout.bases
    assert all(leaf is base for leaf, base in zip(leaves, cache.bases, strict=True))
    again = jax.tree.unflatten(structure, leaves)
    assert (again.layout, again.sizes, again.bases) == (cache.layout, cache.sizes, cache.bases)
    names = ["base"] if len(leaves) == 1 else ["key", "value"]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(cache)]
    assert paths == [f".{name}" for name in names]


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_caches_of_other_sizes_have_the_same_structure(layout):
    structure = jax.tree.structure(make_cache(layout))
    other = make_cache(layout, pages=3, block=8, kv_heads=1, layers=2, k_dim=64, v_dim=64, dtype="bfloat16")
    assert jax.tree.structure(other) == structure
    assert hash(jax.tree.structure(other)) == hash(structure)
    assert jax.tree.structure(cache_specs(layout, kv_heads="x")) == structure
    different = LAYOUTS[1] if layout != LAYOUTS[1] else LAYOUTS[0]
    assert jax.tree.structure(make_cache(different)) != structure


def test_unequal_head_sizes_are_static_where_shapes_do_not_tell():
    packed = make_cache(PACKED, k_dim=64, v_dim=32)
    assert jax.tree.structure(packed) != jax.tree.structure(make_cache(PACKED))
    assert jax.tree.structure(packed) == jax.tree.structure(cache_specs(PACKED, k_dim=64, v_dim=32))
    halved = jax.tree.map(lambda base: base[:, :1], packed)
    assert (halved.kv_heads, halved.k_dim, halved.v_dim) == (1, 64, 32)
    pair = make_cache(PAIR, k_dim=64, v_dim=32)
    assert jax.tree.structure(pair) == jax.tree.structure(make_cache(PAIR))


@pytest.mark.parametrize("leaf", [None, 3, "text", object(), P("x"), jax.ShapeDtypeStruct((2,), jnp.int8), np.ones(3)])
def test_any_object_may_stand_for_a_base(leaf):
    structure = jax.tree.structure(make_cache(PACKED))
    cache = jax.tree.unflatten(structure, [leaf])
    assert cache.bases[0] is leaf
    assert "PagedCache" in repr(cache)


def test_it_passes_through_jit_and_loops():
    cache = make_cache(LAYERED[0])
    assert same_bits(jax.jit(lambda cache: cache)(cache), cache)
    doubled = jax.jit(lambda cache: jax.tree.map(lambda base: base * 2, cache))(cache)
    assert isinstance(doubled, PagedCache)
    assert (doubled.layout, doubled.sizes) == (cache.layout, cache.sizes)
    carried, _ = jax.lax.scan(lambda cache, _: (jax.tree.map(jnp.negative, cache), None), cache, length=2)
    assert same_bits(carried, cache)
    shapes = jax.eval_shape(lambda cache: cache, specs(cache))
    assert (shapes.sizes, shapes.dtype) == (cache.sizes, cache.dtype)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_sizes(layout):
    v_dim = 64 if "kv" in CacheLayout.parse(layout).axes else 32
    cache = PagedCache.empty(
        layout, pages=5, block=3, kv_heads=2, k_dim=64, v_dim=v_dim, layers=4 if "layers" in layout else None,
        dtype="float16",
    )  # fmt: skip
    assert (cache.pages, cache.block, cache.kv_heads, cache.k_dim, cache.v_dim) == (5, 3, 2, 64, v_dim)
    assert cache.layers == (4 if "layers" in layout else None)
    assert cache.dtype == jnp.float16
    assert not any(np.asarray(base).any() for base in cache.bases)


def test_from_kv_keeps_the_arrays():
    key, value = jnp.zeros((5, 3, 2, 64)), jnp.zeros((5, 3, 2, 32))
    cache = PagedCache.from_kv(key, value)
    assert cache.bases[0] is key
    assert cache.bases[1] is value
    assert (cache.layout.spec, cache.k_dim, cache.v_dim) == (PAIR, 64, 32)


def test_empty_on_a_device_and_with_a_sharding():
    device = jax.local_devices(backend="cpu")[-1]
    sizes = {"pages": 4, "block": 4, "kv_heads": 4, "k_dim": 16}
    assert PagedCache.empty(PACKED, **sizes, device=device).bases[0].devices() == {device}
    mesh = Mesh(np.array(jax.local_devices(backend="cpu")[:4]), ("heads",))
    sharding = NamedSharding(mesh, cache_specs(PAIR, kv_heads="heads").bases[0])
    cache = PagedCache.empty(PAIR, **sizes, device=sharding)
    assert all(base.sharding == sharding for base in cache.bases)
    assert cache.bases[0].addressable_shards[0].data.shape == (4, 4, 1, 16)


def test_cache_specs():
    assert cache_specs(PAIR, kv_heads="x", pages="y").bases == (P("y", None, "x", None),) * 2
    assert cache_specs(PACKED, kv_heads=("x", "z")).bases == (P(None, ("x", "z"), None, None),)
    assert cache_specs(f"layers {LAYOUTS[3]}", pages="y").bases == (P(None, "y", None, None, None, None),)
    assert cache_specs(LAYOUTS[2]).bases == (P(None, None, None, None, None),)


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda: cache_specs(PACKED, k_dim=64), ValueError, "k_dim and v_dim must be given together, got k_dim=64"),
        (lambda: cache_specs(PACKED, v_dim=64), ValueError, "together, got k_dim=None and v_dim=64"),
        (lambda: cache_specs("pages heads dim"), ValueError, "layout must name"),
        (lambda: cache_specs(3), TypeError, "layout must be a string"),
        (lambda: PagedCache([1], PACKED), TypeError, "base must be a JAX array or two of them, got int"),
        (lambda: PagedCache(jnp.zeros((2, 2, 2, 16)), PAIR), ValueError, r"takes 2 array\(s\), got 1"),
        (lambda: PagedCache(jnp.zeros((2, 2, 16)), PACKED), ValueError, r"the 4 axes .*got shape \(2, 2, 16\)"),
        (lambda: PagedCache.from_kv(jnp.zeros((2, 2, 1, 16)), jnp.zeros((3, 2, 1, 16))), ValueError, "agree in every"),
        (
            lambda: PagedCache.from_kv(jnp.zeros((2, 2, 1, 16)), jnp.zeros((2, 2, 1, 16), jnp.int8)),
            TypeError, "one dtype, got float32 and int8",
        ),
        (
            lambda: PagedCache.empty(LAYOUTS[2], pages=1, block=1, kv_heads=1, k_dim=64, v_dim=32),
            ValueError, "k_dim=64 and v_dim=32",
        ),
        (lambda: PagedCache.empty(LAYERED[0], pages=1, block=1, kv_heads=1, k_dim=16), ValueError, "layers must be"),
        (lambda: PagedCache(jnp.zeros((1, 1, 1, 40)), PACKED), ValueError, "multiple of 16.*got 20"),
        (lambda: PagedCache(jnp.zeros((1, 1, 1, 48)), PACKED, k_dim=64), ValueError, "k_dim|v_dim"),
    ],
)  # fmt: skip
def test_errors(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_it_says_what_it_is():
    assert repr(make_cache(PACKED)) == f"PagedCache({PACKED!r}, float32[14, 2, 16, 64])"
    assert repr(make_cache(PAIR)) == f"PagedCache({PAIR!r}, float32[14, 16, 2, 32], float32[14, 16, 2, 32])"


# --- append ---

backends = pytest.mark.parametrize("backend", BACKENDS)


def difference(actual, expected, *, any_nan=False):
    """Return where two arrays first differ in a bit, or an empty text; the bits of a converted NaN are anyone's."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    integers = f"u{expected.dtype.itemsize}"
    differs = np.ascontiguousarray(actual).view(integers) != np.ascontiguousarray(expected).view(integers)
    if any_nan:
        differs &= ~(np.isnan(actual.astype(np.float32)) & np.isnan(expected.astype(np.float32)))
    places = np.argwhere(differs)
    if not len(places):
        return ""
    first = tuple(places[0].tolist())
    return f"{len(places)} differ, first at {first}: {actual[first]!r} instead of {expected[first]!r}"


def check(backend, layout, bases, key, value, slots, *, k_dim=DIM, v_dim=DIM, layer=None, jit=True, **scales):
    """Append on the backend, eagerly and jitted, and in the reference; every bit of every base must agree."""
    expected = tuple(base.copy() for base in bases)
    index = None if layer is None else int(layer)
    views = CacheLayout.parse(layout).views(expected, k_dim=k_dim, v_dim=v_dim, layer=index)
    for view, new in zip(views, reference.append(*views, key, value, slots, **scales), strict=True):
        view[...] = new
    arrays = tuple(map(jnp.asarray, bases))
    cache = PagedCache(arrays if len(arrays) == 2 else arrays[0], layout, k_dim=k_dim, v_dim=v_dim)
    scales = {name: jnp.asarray(each) if isinstance(each, np.ndarray) else each for name, each in scales.items()}

    def write(cache, key, value, slots, scales):
        return append(cache, key, value, slots, layer=layer, backend=backend, **scales)

    rows = tuple(map(jnp.asarray, (key, value, slots)))
    written = (jax.jit(write) if jit else write)(cache, *rows, scales)
    assert isinstance(written, PagedCache)
    for array, wanted in zip(written.bases, expected, strict=True):
        assert difference(np.asarray(array), wanted, any_nan=bool(scales)) == ""
    return expected


@backends
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_into_every_layout(dtype, layout, backend):
    slots = np.array([0, 7, 19, 4, 11, 12], np.int32)
    bases = make_bases(layout, dtype)
    layer = 1 if "layers" in layout else None
    expected = check(backend, layout, bases, *make_rows(dtype), slots, layer=layer)
    assert not any(same_bits(new, old) for new, old in zip(expected, bases, strict=True))


@backends
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("kind", ["float", "scalar", "head"])
def test_quantises_with_every_kind_of_scale(kind, dtype, source, jit, backend):
    # 0.03 puts many 16-bit values next to a tie, where the quotient's last bit decides.
    k_scale = {"float": 0.03, "scalar": np.array(0.03, np.float32), "head": np.array([0.03, 0.021], np.float32)}[kind]
    v_scale = {"float": 0.011, "scalar": np.array(0.3, np.float32), "head": np.array([3.0, 0.07], np.float32)}[kind]
    slots = np.arange(SLOTS, dtype=np.int32)
    slots[[1, 5]] = -1
    rows = make_rows(source, rows=SLOTS)
    check(backend, PACKED, make_bases(PACKED, dtype), *rows, slots, jit=jit, k_scale=k_scale, v_scale=v_scale)


def special_values(dtype):
    """Return NaN, infinities, overflow, ties between neighbours, subnormals and signed zeros, as ``[rows, 2, 32]``."""
    target = numpy_dtype(dtype)
    if dtype == "int8":
        exact = np.arange(-130, 131).astype(np.float32)
    else:
        exact = np.arange(256, dtype=np.uint8).view(target).astype(np.float32)
        exact = np.sort(exact[np.isfinite(exact)])
    ties = (exact[1:] + exact[:-1]) / 2
    nudged = np.concatenate([np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    odd = [np.nan, -np.nan, np.inf, -np.inf, 1e38, -1e38, 0.0, -0.0, 1e-30, -1e-30, 448, 464, 465, 57344, 61440]
    values = np.concatenate([exact, ties, nudged, np.array(odd, np.float32)]).astype(np.float32)
    return np.resize(values, (-(-len(values) // 64), KV_HEADS, DIM))


@backends
@pytest.mark.parametrize("dtype", QUANTISED)
def test_every_tie_and_special_value(dtype, backend):
    key = special_values(dtype)
    block = -(-len(key) // PAGES)
    cache = tuple(np.zeros((PAGES, block, KV_HEADS, DIM), numpy_dtype(dtype)) for _ in range(2))
    slots = np.arange(len(key), dtype=np.int32)
    check(backend, PAIR, cache, key, key[::-1].copy(), slots, k_scale=1.0, v_scale=1.0)


@backends
@pytest.mark.parametrize("dtype", QUANTISED)
def test_nan_stays_nan_and_is_zero_in_int8(dtype, backend):
    key = jnp.full((1, KV_HEADS, DIM), jnp.nan)
    cache = tuple(jnp.ones((1, 1, KV_HEADS, DIM), dtype) for _ in range(2))
    written = append(cache, key, -key, jnp.zeros(1, jnp.int32), k_scale=0.5, v_scale=0.5, backend=backend)
    assert isinstance(written, tuple)
    for stored in written:
        values = np.asarray(stored).astype(np.float32)
        assert not values.any() if dtype == "int8" else np.isnan(values).all()


@backends
@pytest.mark.parametrize("dtype", QUANTISED[:2])
def test_slots_that_are_not_written_keep_every_bit(dtype, backend):
    """Every bit pattern, NaNs too, survives beside new rows: nothing is converted there and back."""
    base = np.resize(np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype)), (PAGES, BLOCK, KV_HEADS, DIM))
    slots = np.array([3, -1, SLOTS, 12, 0, 7], np.int32)
    written = append(
        (jnp.asarray(base), jnp.asarray(base)), *map(jnp.asarray, make_rows("bfloat16")), jnp.asarray(slots),
        k_scale=0.1, v_scale=0.2, backend=backend,
    )  # fmt: skip
    touched = [3, 12, 0, 7]
    for each in written:
        kept = np.delete(np.asarray(each).reshape(SLOTS, KV_HEADS, DIM), touched, axis=0)
        # JAX's interpreter itself moves fp8 by way of fp16, which knows fewer kinds of NaN.
        before = np.delete(base.reshape(SLOTS, KV_HEADS, DIM), touched, axis=0)
        assert difference(kept, before, any_nan=backend == "interpret") == ""


@backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_unquantised_caches_keep_every_bit(dtype, backend):
    key = np.resize(np.array([np.nan, np.inf, -np.inf, -0.0, 1e-40, 6e4]), (6, KV_HEADS, DIM)).astype(
        numpy_dtype(dtype)
    )
    check(backend, PAIR, make_bases(PAIR, dtype), key, key[::-1].copy(), np.arange(6, dtype=np.int32))


@backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_divide_in_an_unquantised_cache_too(dtype, backend):
    check(
        backend, PAIR, make_bases(PAIR, dtype), *make_rows(dtype), np.arange(6, dtype=np.int32),
        k_scale=0.37, v_scale=np.array([0.37, 3.0], np.float32),
    )  # fmt: skip


@backends
def test_infinity_survives_a_scaled_unquantised_cache(backend):
    key = np.resize(np.array([np.inf, -np.inf, np.nan, 1.0], np.float32), (4, KV_HEADS, DIM))
    slots = np.arange(4, dtype=np.int32)
    check(backend, PAIR, make_bases(PAIR, "float32"), key, key, slots, k_scale=0.5, v_scale=2.0)


@backends
@pytest.mark.parametrize("layout", [PAIR, PACKED, LAYOUTS[2]])
def test_slots_outside_the_cache_write_nothing(layout, backend):
    """JAX's scatters count negative indices from the end; -1 is the last slot's neighbour in that sense."""
    for slots in ([-1, SLOTS, 2, -7, SLOTS + 5, SLOTS - 1], [-SLOTS, -1, -BLOCK, 2**31 - 1, -(2**31), SLOTS]):
        check(backend, layout, make_bases(layout, "float32"), *make_rows("float32"), np.array(slots, np.int32))


@backends
@pytest.mark.parametrize("far", [2**31, 2**40, -(2**40), 2**63 - 1, -(2**63)])
def test_absurd_64_bit_slots_write_nothing(far, backend):
    slots = np.array([far, 3, far + (1 if far < 0 else -1)], np.int64)
    with jax.enable_x64(True):
        check(backend, PAIR, make_bases(PAIR, "float32"), *make_rows("float32"), slots)


@backends
@pytest.mark.parametrize("count", [0, 1, 4])
def test_rows_beyond_the_slot_mapping_are_ignored(count, backend):
    slots = np.arange(count, dtype=np.int32) + 2
    check(backend, LAYOUTS[1], make_bases(LAYOUTS[1], "float16"), *make_rows("float16"), slots)


@backends
@pytest.mark.parametrize("layout", [LAYERED[0], LAYERED[7]])
@pytest.mark.parametrize("layer", [-1, LAYERS, 2**31 - 1, -(2**31)])
def test_a_traced_layer_that_does_not_exist_writes_nothing(layer, layout, backend):
    cache = make_cache(layout, pages=PAGES, block=BLOCK)
    rows = tuple(map(jnp.asarray, make_rows("float32")))
    slots = jnp.arange(6, dtype=jnp.int32)
    write = jax.jit(lambda cache, layer: append(cache, *rows, slots, layer=layer, backend=backend))
    assert same_bits(write(cache, jnp.int32(layer)), cache)
    assert not same_bits(write(cache, jnp.int32(2)), cache)


@backends
def test_a_traced_layer_is_the_layer(backend):
    for layer in range(LAYERS):
        bases = make_bases(LAYERED[0], "float32")
        slots = np.arange(6, dtype=np.int32)
        check(backend, LAYERED[0], bases, *make_rows("float32"), slots, layer=jnp.int32(layer))


@backends
def test_no_rows_and_no_pages(backend):
    check(backend, PAIR, make_bases(PAIR, "float32"), *make_rows("float32", rows=0), np.zeros(0, np.int32))
    empty = PagedCache.empty(PAIR, pages=0, block=4, kv_heads=2, k_dim=32, dtype="float32")
    rows = tuple(map(jnp.asarray, make_rows("float32")))
    assert append(empty, *rows, jnp.zeros(6, jnp.int32), backend=backend).bases[0].shape == (0, 4, 2, 32)


@backends
@pytest.mark.parametrize(("k_dim", "v_dim"), [(192, 128), (80, 48), (16, 256)])
@pytest.mark.parametrize("layout", [PACKED, PAIR])
def test_unequal_head_sizes(layout, k_dim, v_dim, backend):
    dims = {"k_dim": k_dim, "v_dim": v_dim}
    slots = np.array([1, 18, 9], np.int32)
    check(backend, layout, make_bases(layout, "float16", **dims), *make_rows("float16", **dims), slots, **dims)


@backends
@pytest.mark.parametrize("dtype", QUANTISED)
def test_what_is_appended_is_what_is_read(dtype, backend):
    key, value = make_rows("float32", rows=1)
    base = jnp.zeros((PAGES, KV_HEADS, BLOCK, 2 * DIM), dtype)
    scales = {"k_scale": jnp.array([0.04, 0.06]), "v_scale": 0.05}
    cache = append(
        PagedCache(base, PACKED), jnp.asarray(key), jnp.asarray(value), jnp.array([9]), backend=backend, **scales
    )
    out = swa_decode(
        jnp.zeros((1, 4, DIM)), cache, jnp.array([[2]]), jnp.array([2]), window=1, backend=backend, **scales
    )
    stored = reference.quantise(value, np.float32(0.05), numpy_dtype(dtype)).astype(np.float32)
    assert difference(np.asarray(out), np.repeat(stored * np.float32(0.05), 2, axis=1)) == ""
