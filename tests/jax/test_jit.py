"""Under ``jax.jit``: what may be traced, what must be static, 64 bits, strict promotion, donation, compilations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swa_pallas import append, merge_states, plan_for, swa_decode, swa_decode_gated, warmup
from tests.jax.helpers import BACKENDS, compile_here, make_cache, make_step, normal, same_bits, specs

LAYERED = "layers pages kv block kv_heads dim"
WINDOW = 16
COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations():
    """Count what XLA compiles from here on."""
    counted = []

    def listen(event, duration, **_):
        if event == COMPILED:
            counted.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield counted
    jax.monitoring.unregister_event_duration_listener(listen)


def quantised_step():
    step = make_step(layout=LAYERED, cache_dtype="int8")
    return step, {"k_scale": 0.03, "v_scale": 0.02, "layer": 2, "scale": 0.25, "softcap": 3.0}


@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_but_the_shape_may_be_traced(backend):
    step, numbers = quantised_step()
    options = {"gate": normal(4, 4, seed=3), "sinks": normal(4, seed=4), "kv_start": jnp.array([3, 0, 0, 20])}
    traced = {name: jnp.asarray(number) for name, number in numbers.items()}

    @jax.jit
    def decode(step, options):
        return swa_decode(*step, window=WINDOW, return_lse=True, backend=backend, **options)

    expected = swa_decode(*step, window=WINDOW, return_lse=True, backend=backend, **options, **numbers)
    # The compiler sees constants in one of the two, so that sums may be ordered differently.
    for one, other in zip(decode(step, {**options, **traced}), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-7)
    before = decode._cache_size()
    decode(step, {**options, **traced, "scale": jnp.asarray(0.5), "layer": jnp.asarray(0), "softcap": jnp.asarray(9.0)})
    assert decode._cache_size() == before == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_of_each_head_may_be_traced(backend):
    step, _ = quantised_step()
    scales = {"k_scale": jnp.array([0.03, 0.01]), "v_scale": jnp.array([0.02, 0.05])}
    call = {"window": WINDOW, "layer": 1, "backend": backend}
    out = jax.jit(lambda step, scales: swa_decode(*step, **call, **scales))(step, scales)
    for head, heads in ((0, slice(0, 2)), (1, slice(2, 4))):
        alone = swa_decode(*step, **call, **{name: float(scale[head]) for name, scale in scales.items()})
        np.testing.assert_allclose(out[:, heads], alone[:, heads], rtol=2e-6, atol=2e-7)


def test_static_arguments_of_a_jitted_call():
    step = make_step()
    decode = jax.jit(swa_decode, static_argnames=("window", "query_len", "return_lse", "out_dtype", "backend", "plan"))
    plan = plan_for(*step[:3], window=WINDOW)
    assert same_bits(decode(*step, window=WINDOW, plan=plan), swa_decode(*step, window=WINDOW, plan=plan))
    out, lse = decode(*step, window=None, return_lse=True, out_dtype="float16")
    assert (out.dtype, lse.dtype) == (jnp.float16, jnp.float32)


STATIC = ("window", "query_len", "return_lse", "batch_invariant", "validate")


@pytest.mark.parametrize("name", STATIC)
def test_a_traced_static_argument_is_named(name):
    step = make_step()
    call = jax.jit(lambda value: swa_decode(*step, **{"window": WINDOW, name: value}))
    with pytest.raises(TypeError, match=f"{name} must be static.*static_argnames='{name}'.*got a traced"):
        call(1)


@pytest.mark.parametrize("name", ["splits", "pack", "window", "query_len"])
def test_a_traced_static_argument_of_the_gated_call_is_named(name):
    step = make_step()
    options = {"scale": 1.0, "window": WINDOW, "query_len": 1, "splits": 1, "pack": 1}

    def call(value):
        return swa_decode_gated(
            step.query, *step.cache.bases, step.block_table, step.seq_lens, normal(4, 4), **{**options, name: value}
        )

    with pytest.raises(TypeError, match=f"{name} must be static.*static_argnames='{name}'.*got a traced"):
        jax.jit(call)(1)


@pytest.mark.parametrize("layout", ["pages block kv_heads dim", LAYERED])
def test_eval_shape_of_descriptions(layout):
    step = make_step(layout=layout, dtype="bfloat16", v_dim=32)
    layer = {"layer": jax.ShapeDtypeStruct((), jnp.int32)} if step.cache.layers else {}

    def decode(step, layer):
        return swa_decode(*step, window=WINDOW, return_lse=True, out_dtype=jnp.float32, **layer)

    out, lse = jax.eval_shape(decode, specs(step), layer)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((4, 4, 32), jnp.float32, (4, 4), jnp.float32)
    rows = jax.ShapeDtypeStruct((4, 2, 32), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((4,), jnp.int32)
    cache = jax.eval_shape(lambda *args: append(*args[:-1], **args[-1]), specs(step.cache), rows, rows, slots, layer)
    assert jax.tree.structure(cache) == jax.tree.structure(step.cache)
    assert [(base.shape, base.dtype) for base in cache.bases] == [(b.shape, b.dtype) for b in step.cache.bases]
    parts = jax.ShapeDtypeStruct((3, 4, 4, 32), jnp.float32)
    lses = jax.ShapeDtypeStruct((3, 4, 4), jnp.float32)
    merged = jax.eval_shape(lambda *args: merge_states(*args, out_dtype=jnp.float16), parts, lses)
    assert [(each.shape, each.dtype) for each in merged] == [((4, 4, 32), jnp.float16), ((4, 4), jnp.float32)]


def test_plans_from_descriptions_equal_plans_from_arrays():
    step = make_step(layout=LAYERED, dtype="bfloat16")
    assert plan_for(*specs(step)[:3], window=WINDOW) == plan_for(*step[:3], window=WINDOW)


def decode_append_merge(step, layer, backend, index=np.int32, scale=None):
    """Run every operation once."""
    slots = jnp.asarray(np.array([0, 17, -1, 40], index))
    rows = normal(4, 2, 32, dtype=step.query.dtype.name, seed=5)
    cache = append(step.cache, rows, rows, slots, layer=layer, backend=backend)
    table, lens = (each.astype(index) for each in (step.block_table, step.seq_lens))
    edges = jnp.asarray(np.array([0, 1, 1, 2, 4], index))
    options = {"window": WINDOW, "layer": layer, "scale": scale, "backend": backend, "return_lse": True}
    plain = swa_decode(step.query, cache, table, lens, gate=normal(4, 4), sinks=normal(4), softcap=5.0, **options)
    ragged = swa_decode(
        step.query, cache, table, lens, query_len=2, cu_query_lens=edges, kv_start=lens - 9, kv_end=lens, **options
    )
    invariant = swa_decode(step.query, cache, table, lens, batch_invariant=True, **options)
    merged = merge_states(
        jnp.stack([plain[0], ragged[0]]), jnp.stack([plain[1], ragged[1]]), sinks=normal(4), gate=normal(4, 4),
        backend=backend,
    )  # fmt: skip
    return cache.bases, plain, ragged, invariant, merged


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_64_bits_change_no_bit(backend, dtype):
    step = make_step(layout=LAYERED, dtype=dtype)
    scale, layer = jnp.asarray(0.25), jnp.asarray(1)
    expected = jax.jit(lambda step, layer, scale: decode_append_merge(step, layer, backend, np.int32, scale))(
        step, layer, scale
    )
    with jax.enable_x64(True):
        wide_scale, wide_layer = jnp.asarray(np.float64(0.25)), jnp.asarray(np.int64(1))
        assert (wide_scale.dtype, wide_layer.dtype) == (np.float64, np.int64)
        wide = jax.jit(lambda step, layer, scale: decode_append_merge(step, layer, backend, np.int64, scale))(
            step, wide_layer, wide_scale
        )
    assert same_bits(wide, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strict_dtype_promotion(backend):
    step = make_step(layout=LAYERED, dtype="bfloat16")
    quantised, numbers = quantised_step()
    with jax.numpy_dtype_promotion("strict"):
        strict = decode_append_merge(step, 1, backend)
        strict_quantised = swa_decode(*quantised, window=WINDOW, backend=backend, **numbers)
    assert same_bits(strict, decode_append_merge(step, 1, backend))
    assert same_bits(strict_quantised, swa_decode(*quantised, window=WINDOW, backend=backend, **numbers))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
def test_out_dtype_and_lse_do_not_disturb_each_other(out_dtype, backend):
    step = make_step(dtype="bfloat16")
    call = {"window": WINDOW, "backend": backend}
    out, lse = swa_decode(*step, return_lse=True, out_dtype=out_dtype, **call)
    assert (out.dtype.name, lse.dtype.name) == (out_dtype, "float32")
    assert same_bits(out, swa_decode(*step, out_dtype=out_dtype, **call))
    assert same_bits(lse, swa_decode(*step, return_lse=True, **call)[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_donated_cache_is_written_in_place(backend, dtype):
    cache = make_cache(dtype=dtype)
    scales = {"k_scale": 0.1, "v_scale": 0.1} if dtype.startswith("float8") else {}
    rows = normal(3, 2, 32, dtype="bfloat16" if scales else dtype, seed=7)
    slots = jnp.array([5, -1, 100])

    def write(cache):
        return append(cache, rows, rows, slots, backend=backend, **scales)

    compiled = compile_here(write, cache, donate_argnums=0)
    assert compiled.memory_analysis().alias_size_in_bytes == sum(base.nbytes for base in cache.bases)
    assert "input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }" in compiled.as_text()
    expected = write(cache)
    pointers = [base.unsafe_buffer_pointer() for base in cache.bases]
    written = jax.jit(write, donate_argnums=0)(cache)
    assert all(base.is_deleted() for base in cache.bases)
    assert [base.unsafe_buffer_pointer() for base in written.bases] == pointers
    assert same_bits(written, expected)


def test_a_cache_that_is_not_donated_stays_as_it_was():
    cache = make_cache()
    before = [np.array(base) for base in cache.bases]
    rows = normal(3, 2, 32, seed=7)
    written = jax.jit(append)(cache, rows, rows, jnp.array([5, -1, 100]))
    assert same_bits(cache.bases, before)
    assert not same_bits(written, cache)


BUCKETS = (1, 2, 4, 8)


def test_a_serving_loop_compiles_once_for_each_bucket(compilations):
    step = make_step((9,) * 8)
    plan = plan_for(*step[:3], window=WINDOW)

    @jax.jit
    def serve(step):
        return swa_decode(*step, window=WINDOW, plan=plan)

    def padded(active, lens):
        size = next(bucket for bucket in BUCKETS if bucket >= active)
        lengths = np.where(np.arange(size) < active, lens, 0).astype(np.int32)
        return step._replace(query=step.query[:size], block_table=step.block_table[:size], seq_lens=lengths)

    batches = [padded(active, lens) for active, lens in ((1, 5), (3, 6), (8, 7), (5, 8), (2, 9), (1, 10), (7, 11))]
    batches = [jax.block_until_ready(jax.tree.map(jnp.asarray, batch)) for batch in batches]
    del compilations[:]
    for batch in batches:
        serve(batch)
    assert serve._cache_size() == len(compilations) == len(BUCKETS)


@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
def test_after_warmup_nothing_compiles(ragged, compilations):
    step = make_step((9, 20, 3, 40), layout=LAYERED)
    plan = plan_for(*step[:3], window=WINDOW, query_len=3 if ragged else 1, ragged=ragged)
    options = {"gate": normal(4, 4), "sinks": normal(4), "softcap": 4.0, "return_lse": True}
    warmup(plan, step.query, step.cache, requests=(1, 4), **options)
    batches = []
    for size in (1, 4):
        rows = 4 if ragged else size
        call = {"gate": jnp.asarray(normal(rows, 4)), "sinks": options["sinks"]}
        if ragged:
            call["cu_query_lens"] = jnp.asarray(np.minimum(np.arange(size + 1), rows).astype(np.int32))
        batches.append(((step.query[:rows], step.cache, step.block_table[:size], step.seq_lens[:size]), call))
    jax.block_until_ready(batches)
    assert compilations
    del compilations[:]
    for batch, call in batches:
        swa_decode(
            *batch, window=WINDOW, query_len=plan.problem.query_len, plan=plan, layer=0, softcap=4.0, return_lse=True,
            **call,
        )  # fmt: skip
    assert len(compilations) == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("query_len", [1, 3])
def test_padding_rows_are_zero_and_change_nothing(query_len, backend):
    step = make_step((20, 0, 33, -4, 5), query_len=query_len)
    rows = np.repeat(np.array(step.seq_lens) > 0, query_len)
    gate = np.array(normal(5 * query_len, 4))
    call = {"window": WINDOW, "query_len": query_len, "return_lse": True, "backend": backend}
    out, lse = swa_decode(*step, gate=jnp.asarray(gate), **call)
    assert not np.asarray(out)[~rows].any()
    assert np.isneginf(np.asarray(lse)[~rows]).all()
    gate[~rows] = np.nan
    poisoned = step._replace(
        query=jnp.where(rows[:, None, None], step.query, jnp.nan),
        block_table=jnp.where((step.seq_lens > 0)[:, None], step.block_table, 2**31 - 1),
    )
    assert same_bits(swa_decode(*poisoned, gate=jnp.asarray(gate), **call), (out, lse))


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_jit_the_same_comes_out(backend):
    step = make_step()
    expected = swa_decode(*step, window=WINDOW, backend=backend)
    with jax.disable_jit():
        out = swa_decode(*step, window=WINDOW, backend=backend)
    # Operations that are compiled one by one are not fused, so that their last bits may differ.
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.gpu
def test_a_donated_cache_is_written_in_place_on_the_gpu():
    cache = make_cache(dtype="bfloat16")
    rows = normal(3, 2, 32, dtype="bfloat16", seed=7)
    slots = jnp.array([5, -1, 100])
    expected = append(cache, rows, rows, slots)
    pointers = [base.unsafe_buffer_pointer() for base in cache.bases]
    written = jax.jit(append, donate_argnums=0)(cache, rows, rows, slots)
    assert [base.unsafe_buffer_pointer() for base in written.bases] == pointers
    assert same_bits(written, expected)


@pytest.mark.gpu
def test_command_buffers_give_the_same_bits():
    """XLA captures a step of several kernels in a CUDA graph; without command buffers it launches each."""
    step = make_step((400, 77, 0, 512), max_blocks=32, k_dim=192, v_dim=192, heads=16, dtype="bfloat16", layout=LAYERED)

    def layers(step):
        def layer(query, i):
            out = swa_decode(query, *step[1:], window=200, layer=i)
            return out, out

        return [layer(step.query, i)[0] for i in range(3)], jax.lax.scan(layer, step.query, jnp.arange(3))

    lowered = jax.jit(layers).lower(step)
    captured = lowered.compile()
    launched = lowered.compile(compiler_options={"xla_gpu_enable_command_buffer": ""})
    for _ in range(3):
        assert same_bits(captured(step), launched(step))
