"""Transformations: refused where they cannot be right, harmless elsewhere, and a decode loop that copies no cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from swa_pallas import PagedCache, append, merge_states, swa_decode
from swa_pallas._xla import WIDENED_ON_CPU
from swa_plan import reference, tolerance
from swa_plan._dtypes import numpy_dtype
from swa_plan.cases import Inputs
from tests.jax.helpers import BACKENDS, copies_of, make_cache, make_step, normal, same_bits, size_of

WINDOW = 16
STEP = make_step()
ROWS = normal(4, 2, 32)
SLOTS = np.arange(4, dtype=np.int32)
PARTS = normal(2, 4, 4, 32), normal(2, 4, 4)


def decode(query=STEP.query, scale=None):
    return swa_decode(query, *STEP[1:], window=WINDOW, scale=scale)


def appended(key):
    return append(STEP.cache, key, ROWS, jnp.asarray(SLOTS)).bases[0]


def merged(outs):
    return merge_states(outs, PARTS[1])[0]


CALLS = {
    "swa_decode": (decode, STEP.query),
    "append": (appended, ROWS),
    "merge_states": (merged, PARTS[0]),
}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", CALLS)
def test_vmap_is_refused_with_the_recipe(name, jitted):
    call, argument = CALLS[name]
    mapped = jax.vmap(call)
    with pytest.raises(NotImplementedError, match=f"{name} does not support vmap: fold the mapped axis into the"):
        (jax.jit(mapped) if jitted else mapped)(argument[None])


def test_vmap_over_something_else_is_harmless():
    factors = jnp.arange(3.0)
    assert same_bits(jax.vmap(lambda factor: decode() * factor)(factors), factors[:, None, None, None] * decode())


TRANSFORMS = {
    "grad": lambda call, argument: jax.grad(lambda x: call(x).sum())(argument),
    "jvp": lambda call, argument: jax.jvp(call, (argument,), (argument,)),
    "vjp": lambda call, argument: jax.vjp(call, argument),
    "linearize": lambda call, argument: jax.linearize(call, argument),
    "jit-grad": lambda call, argument: jax.jit(jax.grad(lambda x: call(x).sum()))(argument),
    "checkpoint": lambda call, argument: jax.grad(jax.checkpoint(lambda x: call(x).sum()))(argument),
    "hessian": lambda call, argument: jax.hessian(lambda x: call(x).sum())(argument),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_refused(name, transform):
    call, argument = CALLS[name]
    with pytest.raises(NotImplementedError, match=rf"{name} is for inference and has no gradients.*stop_gradient"):
        TRANSFORMS[transform](call, argument)


def test_a_gradient_of_an_option_is_refused():
    with pytest.raises(NotImplementedError, match="swa_decode is for inference"):
        jax.grad(lambda scale: decode(scale=scale).sum())(0.25)


WITHOUT_TANGENT = {
    "other": lambda weight: (decode() * weight).sum(),
    "stop_gradient": lambda weight: (decode(lax.stop_gradient(STEP.query * weight)) * weight).sum(),
    "checkpoint": jax.checkpoint(lambda weight: (decode() * weight).sum()),
    "scan": lambda weight: lax.scan(lambda total, _: (total + (decode() * weight).sum(), None), 0.0, length=1)[0],
}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", WITHOUT_TANGENT)
def test_gradients_that_do_not_reach_an_input_pass(name, jitted):
    gradient = jax.grad(WITHOUT_TANGENT[name])
    found = (jax.jit(gradient) if jitted else gradient)(1.0)
    np.testing.assert_allclose(found, decode().sum(), rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoint_changes_no_bit(backend):
    def call(query):
        return swa_decode(query, *STEP[1:], window=WINDOW, backend=backend)

    assert same_bits(jax.jit(jax.checkpoint(call))(STEP.query), jax.jit(call)(STEP.query))


# --- a decode loop: lax.scan over the layers of one cache, inside lax.while_loop over steps ---

LAYERS, REQUESTS, STEPS, BLOCK = 3, 3, 3, 16
LENGTHS = np.array([15, 0, 30], np.int32)  # before the first step; the first request crosses into a new page
TABLE = np.array([[7, 2, 9], [4, 0, 3], [1, 8, 5]], np.int32)
LOOP_LAYOUTS = (
    "layers pages kv block kv_heads dim",
    "pages layers kv_heads block (kv dim)",
    "layers pages block kv_heads dim",
)
SCALES = {"k_scale": 0.02, "v_scale": 0.03}


def projections(dtype):
    """Return the weights that make query, key and value of each layer out of the last layer's output.

    Powers of two, so that products are exact: XLA may leave a rounding to 16 bits out where it fuses.
    """
    rng = np.random.default_rng(1)
    return {
        name: jnp.asarray((2.0 ** rng.integers(-1, 2, (LAYERS, heads, 32))).astype(numpy_dtype(dtype)))
        for name, heads in {"query": 4, "key": 2, "value": 2}.items()
    }


def decode_loop(cache, hidden, weights, *, scales, backend, steps=STEPS):
    """Decode ``steps`` tokens of each request; return the cache and every layer's query and output of each step."""

    def one_layer(carry, layer_and_weights):
        cache, hidden, lens = carry
        layer, weights = layer_and_weights
        query = hidden * weights["query"]
        key, value = hidden[:, :2] * weights["key"], hidden[:, 2:] * weights["value"]
        last = lens - 1
        slots = jnp.take_along_axis(TABLE, (last // BLOCK)[:, None], axis=1)[:, 0] * BLOCK + last % BLOCK
        cache = append(cache, key, value, slots, layer=layer, backend=backend, **scales)
        out = swa_decode(query, cache, TABLE, lens, window=WINDOW, layer=layer, backend=backend, **scales)
        return (cache, out, lens), (query, key, value, out)

    def one_step(state):
        step, cache, hidden, lens, trace = state
        lens = lens + 1
        layers = (jnp.arange(LAYERS, dtype=jnp.int32), weights)
        (cache, hidden, _), seen = lax.scan(one_layer, (cache, hidden, lens), layers)
        trace = jax.tree.map(lambda all_steps, this: all_steps.at[step].set(this), trace, seen)
        return step + 1, cache, hidden, lens, trace

    dtype = hidden.dtype
    shapes = [(4, 32), (2, 32), (2, 32), (4, 32)]
    trace = tuple(jnp.zeros((steps, LAYERS, REQUESTS, *shape), dtype) for shape in shapes)
    state = (jnp.int32(0), cache, hidden, jnp.asarray(LENGTHS), trace)
    _, cache, _, _, trace = lax.while_loop(lambda state: state[0] < steps, one_step, state)
    return cache, trace


@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("layout", LOOP_LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decode_loop_over_layers_and_steps_is_right(backend, layout, cache_dtype):
    scales = SCALES if cache_dtype else {}
    cache = make_cache(layout, pages=10, layers=LAYERS, dtype=cache_dtype or "bfloat16")
    expected = tuple(np.array(base) for base in cache.bases)
    loop = jax.jit(decode_loop, donate_argnums=0, static_argnames=("backend", "steps"))
    hidden, weights = normal(REQUESTS, 4, 32, dtype="bfloat16", seed=9), projections("bfloat16")
    cache, trace = loop(cache, hidden, weights, scales=scales, backend=backend)

    traced = [np.asarray(each) for each in trace]
    for step in range(STEPS):
        lens = LENGTHS + step + 1
        slots = TABLE[np.arange(REQUESTS), (lens - 1) // BLOCK] * BLOCK + (lens - 1) % BLOCK
        for layer in range(LAYERS):
            query, key, value, out = (each[step, layer] for each in traced)
            views = cache.layout.views(expected, k_dim=32, v_dim=32, layer=layer)
            for view, new in zip(views, reference.append(*views, key, value, slots, **scales), strict=True):
                view[...] = new
            inputs = Inputs(query, expected, layout, 32, 32, TABLE, lens, WINDOW, layer=layer, **scales)
            tolerance.assert_close(out, inputs)
    assert same_bits(cache.bases, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("layout", LOOP_LAYOUTS)
def test_a_donated_decode_loop_copies_no_cache(layout, dtype):
    scales = SCALES if dtype in ("float8_e4m3fn", "float8_e5m2", "int8") else {}
    query_dtype = "bfloat16" if scales else dtype
    cache = PagedCache.empty(layout, pages=1024, block=BLOCK, kv_heads=2, k_dim=32, layers=LAYERS, dtype=dtype)
    loop = jax.jit(decode_loop, donate_argnums=0, static_argnames=("backend",))
    hidden = normal(REQUESTS, 4, 32, dtype=query_dtype)
    compiled = loop.lower(cache, hidden, projections(query_dtype), scales=scales, backend=None).compile()
    memory, size = compiled.memory_analysis(), size_of(cache)
    assert memory.alias_size_in_bytes == size
    if dtype in WIDENED_ON_CPU:  # XLA cannot write these in place on the CPU: one copy, as integers, and no wider one
        assert memory.temp_size_in_bytes < size * (1 + 1 / 16)
        return
    assert memory.temp_size_in_bytes < size / 16
    for base in cache.bases:
        assert not copies_of(compiled.as_text(), base.shape)


def test_a_copy_of_the_cache_is_noticed():
    """A cache that is read after it was given away has to be copied, and the check above would notice."""
    layout = LOOP_LAYOUTS[0]
    cache = PagedCache.empty(layout, pages=1024, block=BLOCK, kv_heads=2, k_dim=32, layers=LAYERS, dtype="float32")
    hidden = normal(REQUESTS, 4, 32)

    def twice(cache, hidden):
        new, _ = decode_loop(cache, hidden, projections("float32"), scales={}, backend=None)
        return new, cache.bases[0] + 1.0

    compiled = jax.jit(twice, donate_argnums=0).lower(cache, hidden).compile()
    assert copies_of(compiled.as_text(), cache.bases[0].shape)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", LOOP_LAYOUTS)
def test_a_donated_decode_loop_copies_no_cache_on_the_gpu(layout, dtype):
    scales = SCALES if dtype == "float8_e4m3fn" else {}
    cache = PagedCache.empty(layout, pages=1024, block=BLOCK, kv_heads=2, k_dim=32, layers=LAYERS, dtype=dtype)
    loop = jax.jit(decode_loop, donate_argnums=0, static_argnames=("backend",))
    hidden = normal(REQUESTS, 4, 32, dtype="bfloat16")
    compiled = loop.lower(cache, hidden, projections("bfloat16"), scales=scales, backend=None).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < size_of(cache) / 16
    for base in cache.bases:
        assert not copies_of(compiled.as_text(), base.shape)
    pointers = [base.unsafe_buffer_pointer() for base in cache.bases]
    cache, _ = compiled(cache, hidden, projections("bfloat16"), scales=scales)
    assert [base.unsafe_buffer_pointer() for base in cache.bases] == pointers
