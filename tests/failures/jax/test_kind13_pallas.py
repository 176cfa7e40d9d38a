"""Kind 13 of the known failures: traced scalars, 64-bit mode, masked tails, grids, shardings, fp32 products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import swa_pallas
from swa_plan import tolerance
from tests.contract.backends import plan_for, run, same_bits
from tests.contract.jax_runner import BACKENDS, HAS_GPU, arguments, device_of, name_of, to_array, to_numpy
from tests.failures.probes import decode, step

NEEDS_JAX_GPU = pytest.mark.skipif(not HAS_GPU, reason="JAX sees no CUDA device")


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_traced_scale_is_no_constant(backend, splits):
    """C94, jax-ml/jax#23301: one compiled function honours both scales that it is called with."""
    inputs = step((100,), kv_heads=2, k_dim=64)
    positional, _ = arguments(inputs, backend)
    plan = plan_for(inputs, backend, splits=splits)
    traces = []

    @jax.jit
    def decoded(positional, scale, softcap):
        traces.append(scale)
        return swa_pallas.swa_decode(
            *positional, window=512, scale=scale, softcap=softcap, return_lse=True, plan=plan, backend=name_of(backend)
        )

    for scale, softcap in ((0.1, 30.0), (0.2, 30.0), (0.1, 3.0)):
        out, lse = decoded(positional, scale, softcap)
        tolerance.assert_close(
            to_numpy(out), replace(inputs, scale=scale, softcap=softcap), actual_lse=to_numpy(lse)
        )  # fmt: skip
    assert len(traces) == 1


@pytest.mark.parametrize("name", ["window", "query_len"])
def test_what_must_be_static_is_refused_by_name(name):
    """C94, jax-ml/jax#23301: a traced window decides nothing at run time."""
    positional, _ = arguments(step((100,), kv_heads=1, k_dim=16), "jax-xla")

    def decoded(value):
        return swa_pallas.swa_decode(*positional, **{"window": 8, name: value})

    with pytest.raises(TypeError, match=f"{name} must be static"):
        jax.jit(decoded)(1)


@pytest.mark.parametrize("name", ["window", "query_len", "splits", "pack"])
def test_what_must_be_static_is_refused_by_name_in_the_gated_call(name):
    """C94, jax-ml/jax#23301, for the original's arguments."""
    (query, cache, table, lens), _ = arguments(step((100,), kv_heads=1, k_dim=16), "jax-xla")
    static = {"window": 8, "query_len": 1, "splits": 1, "pack": 1}

    def decoded(value):
        gate = jnp.zeros(query.shape[:2])
        return swa_pallas.swa_decode_gated(
            query, *cache.bases, table, lens, gate, scale=1.0, **{**static, name: value}
        )  # fmt: skip

    with pytest.raises(TypeError, match=f"{name} must be static"):
        jax.jit(decoded)(1)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_64_bit_mode_changes_no_bit(backend, splits):
    """C96, jax-ml/jax#18847: int64 tables and lengths, a float64 scale."""
    inputs = step((100, 0, 17), kv_heads=2, k_dim=64, scale=0.125)
    plan = plan_for(inputs, backend, splits=splits)
    expected, expected_lse = decode(inputs, backend, plan=plan)
    wide = replace(inputs, block_table=inputs.block_table.astype(np.int64), seq_lens=inputs.seq_lens.astype(np.int64))
    with jax.enable_x64(True):
        out, lse = decode(wide, backend, plan=plan, scale=to_array(np.float64(0.125), backend))
    assert same_bits(out, expected)
    assert same_bits(lse, expected_lse)
    tolerance.assert_close(out, inputs, actual_lse=lse)


def test_64_bit_indices_without_64_bit_mode_are_refused():
    """C96, jax-ml/jax#18847: NumPy's int64 is not silently narrowed."""
    inputs = step((100,), kv_heads=1, k_dim=16)
    (query, cache, _, lens), _ = arguments(inputs, "jax-xla")
    with pytest.raises(TypeError, match="block_table must be int32 while jax_enable_x64 is off, got int64"):
        swa_pallas.swa_decode(query, cache, inputs.block_table.astype(np.int64), lens, window=512)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_tile_beyond_the_pool_moves_nothing(backend, splits):
    """C97, jax-ml/jax#21143: 17 keys in a pool of exactly 2 pages, read in tiles of 64."""
    inputs = step((17,), kv_heads=2, k_dim=64, pages=2, max_blocks=2)
    plan = replace(plan_for(inputs, backend, splits=splits), tile=64)
    out, lse = decode(inputs, backend, plan=plan)
    tolerance.assert_close(out, inputs, actual_lse=lse)
    shown = inputs.value_cache
    inputs.query[...] = 0
    shown[...] = 0
    shown[inputs.block_table[0, 1], 0] = 17  # the last key's slot; the 15 after it hold nothing
    np.testing.assert_array_equal(decode(inputs, backend, plan=plan)[0].astype(np.float32), 1.0)


@pytest.mark.gpu
@NEEDS_JAX_GPU
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("tokens", [65536, 70000])
def test_more_tokens_than_a_grid_axis_may_have(tokens, splits):
    """C99, jax-ml/jax#18361: tokens do not lie on an axis that ends at 65535."""
    device = device_of("jax-pallas_triton")
    with jax.default_device(device):
        numbers = jnp.arange(1, 65).astype(jnp.bfloat16)
        value = jnp.broadcast_to(numbers[:, None, None, None], (64, 16, 8, 192)) + jnp.zeros((), jnp.bfloat16)
        table = (jnp.arange(tokens, dtype=jnp.int32) * 7 % 64)[:, None]
        query, lens = jnp.zeros((tokens, 96, 192), jnp.bfloat16), jnp.ones(tokens, jnp.int32)
        gate = jnp.full((tokens, 96), 30.0)
        out = swa_pallas.swa_decode_gated(
            query, value, value, table, lens, gate, scale=1.0, window=512, query_len=1, splits=splits
        )
        assert int((out != numbers[table[:, 0]][:, None, None]).sum()) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_is_refused(backend):
    """C99, jax-ml/jax#18361: a mapped axis would become a grid axis; every entry point says what to do instead."""
    (query, cache, table, lens), _ = arguments(step((40, 17), kv_heads=1, k_dim=16), backend)
    call = {"window": 8, "backend": name_of(backend)}
    calls = {
        "swa_decode": lambda query: swa_pallas.swa_decode(query, cache, table, lens, **call),
        "append": lambda query: swa_pallas.append(cache, query[:, :1], query[:, :1], lens, backend=name_of(backend)),
        "merge_states": lambda query: swa_pallas.merge_states(
            query[None].astype(jnp.float32), jnp.zeros((1, *query.shape[:2])), backend=name_of(backend)
        ),
    }
    for name, function in calls.items():
        with pytest.raises(NotImplementedError, match=f"{name} does not support vmap"):
            jax.vmap(function)(jnp.stack((query, query)))


@pytest.fixture
def mesh() -> Mesh:
    """Return two devices of the CPU along ``heads``."""
    devices = jax.devices("cpu")
    assert len(devices) >= 2, "tests/conftest.py asks for several"
    return Mesh(np.array(devices[:2]), ("heads",))


LAYOUTS = ("pages block kv_heads dim", "pages kv_heads block (kv dim)")
PER_HEAD, EVERYWHERE = PartitionSpec(None, "heads"), PartitionSpec()


def sharded_step(layout: str):
    """Return a step in a layout, and the specs that shard its cache over kv heads."""
    inputs = step((100, 0, 17), kv_heads=4, k_dim=64)
    inputs.gate = np.random.default_rng(1).standard_normal(inputs.query.shape[:2], np.float32)
    if layout != LAYOUTS[0]:
        packed = np.concatenate(inputs.bases, axis=-1).swapaxes(1, 2)
        inputs = replace(inputs, bases=(np.ascontiguousarray(packed),), layout=layout)
    return inputs, swa_pallas.cache_specs(layout, kv_heads="heads")


# JAX's interpreter of Pallas kernels does not keep track of what varies over a mesh; it asks to turn the check off.
@pytest.mark.parametrize("backend, check_vma", [("jax-xla", True), ("jax-xla", False), ("jax-interpret", False)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shard_map_over_kv_heads_changes_no_bit(mesh, backend, layout, check_vma):
    """C100, erfanzar/EasyDeL#149: each device attends with its own heads, with and without the check of replication."""
    inputs, specs = sharded_step(layout)
    (query, cache, table, lens), options = arguments(inputs, backend)
    plan = plan_for(replace(inputs, query=inputs.query[:, :24], bases=halved(inputs)), backend, splits=2)

    def local(query, cache, table, lens, gate):
        return swa_pallas.swa_decode(query, cache, table, lens, gate=gate, window=512, return_lse=True, plan=plan)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(PER_HEAD, specs, EVERYWHERE, EVERYWHERE, PER_HEAD),
        out_specs=(PER_HEAD, PER_HEAD), check_vma=check_vma,
    )  # fmt: skip
    uncommitted = jax.tree.map(np.asarray, (query, cache, table, lens, options["gate"]))
    out, lse = jax.jit(mapped)(*uncommitted)
    assert len(out.sharding.device_set) == 2
    expected, expected_lse = decode(inputs, backend, plan=plan_for(inputs, backend, splits=2))
    assert same_bits(to_numpy(out), expected)
    assert same_bits(to_numpy(lse), expected_lse)
    tolerance.assert_close(to_numpy(out), inputs, actual_lse=to_numpy(lse))


def halved(inputs) -> tuple[np.ndarray, ...]:
    """Return the first device's part of the cache."""
    axis = inputs.layout.split().index("kv_heads")
    return tuple(np.split(base, 2, axis=axis)[0] for base in inputs.bases)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_arrays_are_partitioned_by_the_compiler(mesh, layout):
    """C100, erfanzar/EasyDeL#149: without shard_map plain operations are right."""
    inputs, specs = sharded_step(layout)
    (query, cache, table, lens), options = arguments(inputs, "jax-xla")
    place = [
        (query, PER_HEAD), (table, EVERYWHERE), (lens, EVERYWHERE), (options["gate"], PER_HEAD),
    ]  # fmt: skip
    query, table, lens, gate = (jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in place)
    cache = jax.tree.map(lambda base, spec: jax.device_put(base, NamedSharding(mesh, spec)), cache, specs)

    @jax.jit
    def decoded(query, cache, table, lens, gate):
        return swa_pallas.swa_decode(query, cache, table, lens, gate=gate, window=512, return_lse=True)

    out, lse = decoded(query, cache, table, lens, gate)
    tolerance.assert_close(to_numpy(out), inputs, actual_lse=to_numpy(lse))


PRECISIONS = (None, "bfloat16", "tensorfloat32", "float32", "highest")


@pytest.fixture
def precision(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set JAX's global precision of products; put it back afterwards."""
    with jax.default_matmul_precision(request.param):
        yield


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("precision", PRECISIONS, indirect=True)
@pytest.mark.parametrize("backend", BACKENDS)
def test_fp32_stays_fp32_whatever_jax_was_told(backend, fp32_step):
    """C101, jax-ml/jax#23182: TF32 or bf16 products would err by 1e-3; no global switch lets them in."""
    inputs, expected = fp32_step
    out, lse = run(inputs, backend, plan=plan_for(inputs, backend, splits=2))
    assert np.abs(out - expected).max() <= 2e-5
    tolerance.assert_close(out, inputs, actual_lse=lse)


@pytest.mark.parametrize("backend", ["jax-xla", "jax-interpret"])
def test_every_product_asks_for_full_precision(backend, fp32_step):
    """C101, jax-ml/jax#23182: the CPU has one precision only, so that what is asked for is read off the trace."""
    inputs, _ = fp32_step
    positional, _ = arguments(inputs, backend)
    with jax.default_matmul_precision("bfloat16"):
        traced = jax.make_jaxpr(
            lambda *arrays: swa_pallas.swa_decode(*arrays, window=512, backend=name_of(backend))
        )(*positional)  # fmt: skip
    products = list(dot_precisions(traced.jaxpr))
    assert products
    assert set(products) == {(jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)}


def dot_precisions(jaxpr) -> Iterator[tuple]:
    """Yield the precision of every product in a trace, those inside its loops, calls and kernels too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"]
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(parameter):
                yield from dot_precisions(getattr(parameter, "jaxpr", parameter))


def is_jaxpr(value) -> bool:
    return hasattr(value, "eqns")
