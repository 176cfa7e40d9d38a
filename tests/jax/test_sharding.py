"""Several devices: ``shard_map`` over kv heads, meshes of both kinds, and what the compiler may not partition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from swa_pallas import PagedCache, append, cache_specs, merge_states, plan_for, swa_decode
from swa_plan import DeviceProfile
from tests.jax.helpers import (
    BACKENDS,
    H200,
    HAS_GPU,
    LAYERED,
    LAYOUTS,
    TRITON_CALL,
    Step,
    copies_of,
    make_step,
    normal,
    same_bits,
    size_of,
)

DEVICES = 4
WINDOW = 16
RECIPE = "wrap the call in jax.shard_map over kv heads .see swa_pallas.cache_specs."

pytestmark = pytest.mark.skipif(
    len(jax.local_devices(backend="cpu")) < DEVICES,
    reason=f"needs {DEVICES} CPU devices (tests/conftest.py asks for them)",
)


def mesh_of(axis_type=AxisType.Auto):
    devices = np.array(jax.local_devices(backend="cpu")[:DEVICES])
    return jax.sharding.Mesh(devices, ("heads",), axis_types=(axis_type,))


def specs_of(step, **dims):
    return Step(P(None, "heads"), cache_specs(step.cache.layout, kv_heads="heads", **dims), P(), P())


def place(tree, specs, mesh):
    return jax.tree.map(lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec)), tree, specs)


def one_head_per_device(**fields):
    return make_step(heads=8, kv_heads=DEVICES, **fields)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_over_kv_heads(layout, check_vma, axis_type):
    step = one_head_per_device(layout=layout)
    mesh, specs = mesh_of(axis_type), specs_of(step)
    options = {"gate": normal(4, 8, seed=3), "sinks": normal(8, seed=4)}
    option_specs = {"gate": P(None, "heads"), "sinks": P("heads")}

    def decode(step, options):
        return swa_decode(*step, window=WINDOW, return_lse=True, **options)

    sharded = jax.shard_map(
        decode, mesh=mesh, in_specs=(specs, option_specs), out_specs=P(None, "heads"), check_vma=check_vma
    )
    with jax.set_mesh(mesh):
        out, lse = jax.jit(sharded)(place(step, specs, mesh), place(options, option_specs, mesh))
    expected = decode(step, options)
    assert all(each.sharding.spec[1] == "heads" for each in (out, lse))
    for one, other in zip((out, lse), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("layout", ["pages kv_heads block (kv dim)", "pages block kv_heads dim"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_unequal_head_sizes_and_scales_of_each_head(check_vma, layout):
    step = one_head_per_device(layout=layout, k_dim=64, v_dim=32, cache_dtype="int8")
    mesh, specs = mesh_of(), specs_of(step, k_dim=64, v_dim=32)
    scales = {"k_scale": jnp.array([0.01, 0.02, 0.03, 0.04]), "v_scale": jnp.array([0.05, 0.03, 0.02, 0.01])}

    def decode(step, scales):
        return swa_decode(*step, window=WINDOW, **scales)

    sharded = jax.shard_map(
        decode, mesh=mesh, in_specs=(specs, P("heads")), out_specs=P(None, "heads"), check_vma=check_vma
    )
    out = jax.jit(sharded)(place(step, specs, mesh), scales)
    assert out.shape == (4, 8, 32)
    np.testing.assert_allclose(out, decode(step, scales), rtol=2e-6, atol=2e-6)


def test_interpreted_kernels_over_kv_heads():
    step = one_head_per_device()
    mesh, specs = mesh_of(), tuple(specs_of(step))

    def decode(*step):
        return swa_decode(*step, window=WINDOW, backend="interpret")

    out_specs = P(None, "heads")
    out = jax.jit(jax.shard_map(decode, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False))(*step)
    np.testing.assert_allclose(out, decode(*step), rtol=2e-6, atol=2e-6)
    # Pallas's interpreter pads varying operands with constants that do not vary, so it cannot run under check_vma=True.
    # If this raises no more, JAX has learned it.
    with pytest.raises(ValueError, match="varying manual axes to match"):
        jax.jit(jax.shard_map(decode, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=True))(*step)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("layout", [*LAYOUTS, LAYERED[0], LAYERED[9]])
def test_append_over_kv_heads(layout, check_vma):
    step = one_head_per_device(layout=layout)
    mesh, specs = mesh_of(), specs_of(step)
    layer = None if step.cache.layers is None else 1
    rows, slots = normal(5, DEVICES, 32, seed=6), jnp.array([0, 33, -1, 10**6, 100])

    def write(cache, rows, slots):
        return append(cache, rows, rows * 2, slots, layer=layer)

    sharded = jax.shard_map(
        write, mesh=mesh, in_specs=(specs.cache, P(None, "heads"), P()), out_specs=specs.cache, check_vma=check_vma
    )
    cache = place(step.cache, specs.cache, mesh)
    written = jax.jit(sharded)(cache, rows, slots)
    assert same_bits(written, write(step.cache, rows, slots))
    assert [base.sharding for base in written.bases] == [base.sharding for base in cache.bases]


@pytest.mark.parametrize("check_vma", [True, False])
def test_append_to_pages_of_its_own_on_each_device(check_vma):
    """Pages are sharded, rows and slots are not: a shard writes what lies in its own pages."""
    step = make_step((20, 5, 9, 33), max_blocks=3)  # 14 pages: two to spare
    base = tuple(base[:12] for base in step.cache.bases)
    cache = PagedCache(base, step.cache.layout)
    specs = cache_specs(cache.layout, pages="heads")
    mesh = mesh_of()
    rows, slots = normal(4, 2, 32, seed=6), np.array([0, 50, 100, 191], np.int32)

    def write(cache, rows, slots):
        first = jax.lax.axis_index("heads") * cache.pages * cache.block
        return append(cache, rows, rows, slots - first)

    sharded = jax.shard_map(write, mesh=mesh, in_specs=(specs, P(), P()), out_specs=specs, check_vma=check_vma)
    written = jax.jit(sharded)(place(cache, specs, mesh), rows, jnp.asarray(slots))
    assert same_bits(written, append(cache, rows, rows, jnp.asarray(slots)))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_merge_over_heads(backend, check_vma):
    if backend == "interpret" and check_vma:
        pytest.skip("Pallas's interpreter cannot run under check_vma=True, see test_interpreted_kernels_over_kv_heads")
    outs, lses, sinks, gate = normal(3, 4, 8, 32), normal(3, 4, 8), normal(8), normal(4, 8)

    def merge(outs, lses, sinks, gate):
        return merge_states(outs, lses, sinks=sinks, gate=gate, backend=backend)

    over_heads = P(None, "heads")
    sharded = jax.shard_map(
        merge, mesh=mesh_of(), in_specs=(P(None, None, "heads"), P(None, None, "heads"), P("heads"), over_heads),
        out_specs=over_heads, check_vma=check_vma,
    )  # fmt: skip
    for one, other in zip(jax.jit(sharded)(outs, lses, sinks, gate), merge(outs, lses, sinks, gate), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


def test_context_shards_are_merged_over_devices():
    """Keys are sharded by position: each device attends to its own range, and the partials are merged."""
    step = make_step((48, 33, 7, 0))
    edges = jnp.array([0, 12, 20, 36, 64])
    mesh = mesh_of()

    def decode(*step):
        index = jax.lax.axis_index("heads")
        low, high = (jnp.full((4,), edges[index + i], jnp.int32) for i in (0, 1))
        out, lse = swa_decode(*step, window=40, kv_start=low, kv_end=high, return_lse=True)
        outs, lses = jax.lax.all_gather((out, lse), "heads")
        return merge_states(outs, lses, sinks=normal(4))

    # The merged result is the same on every device, which JAX does not know.
    sharded = jax.shard_map(decode, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    out, lse = jax.jit(sharded)(*step)
    expected = swa_decode(*step, window=40, sinks=normal(4), return_lse=True)
    np.testing.assert_allclose(out, expected[0], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=2e-6, atol=2e-6)


def test_plans_are_made_from_local_shapes():
    step = one_head_per_device()
    specs, seen = tuple(specs_of(step)), []

    def decode(*step):
        seen.append(plan_for(*step[:3], window=WINDOW, backend="xla"))
        assert step[1].kv_heads == 1
        return swa_decode(*step, window=WINDOW, plan=seen[0])

    out = jax.jit(jax.shard_map(decode, mesh=mesh_of(), in_specs=specs, out_specs=P(None, "heads")))(*step)
    assert (seen[0].problem.heads, seen[0].problem.kv_heads) == (2, 1)
    np.testing.assert_allclose(out, swa_decode(*step, window=WINDOW), rtol=2e-6, atol=2e-6)
    whole = plan_for(*step[:3], window=WINDOW, backend="xla")
    with pytest.raises(ValueError, match="heads"):
        jax.shard_map(
            lambda *step: swa_decode(*step, window=WINDOW, plan=whole), mesh=mesh_of(), in_specs=specs,
            out_specs=P(None, "heads"),
        )(*step)  # fmt: skip


def test_the_compiler_partitions_plain_operations():
    step = one_head_per_device()
    mesh = mesh_of()
    placed = place(step, specs_of(step), mesh)
    out = jax.jit(lambda step: swa_decode(*step, window=WINDOW))(placed)
    np.testing.assert_allclose(out, swa_decode(*step, window=WINDOW), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["query", "cache", "append", "merge"])
def test_an_explicit_mesh_is_refused_with_the_recipe(name):
    step = one_head_per_device()
    mesh, specs = mesh_of(AxisType.Explicit), specs_of(step)
    placed = place(step, specs, mesh)
    rows, slots = normal(4, DEVICES, 32), jnp.arange(4, dtype=jnp.int32)
    outs, lses = place((normal(2, 4, 8, 32), normal(2, 4, 8)), (P(None, None, "heads"),) * 2, mesh)
    calls = {
        "query": lambda: swa_decode(placed.query, *step[1:], window=WINDOW),
        "cache": lambda: swa_decode(step.query, *placed[1:], window=WINDOW),
        "append": lambda: append(placed.cache, rows, rows, slots),
        "merge": lambda: merge_states(outs, lses),
    }
    argument = {"append": "cache", "merge": "outs", "cache": "key_cache"}.get(name, name)
    with jax.set_mesh(mesh):
        for call in (calls[name], jax.jit(calls[name])):
            rule = f"{argument} must not be sharded over an explicit mesh axis: {RECIPE}, got P"
            with pytest.raises(ValueError, match=rule):
                call()


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_donated_decode_loop_keeps_its_shardings(check_vma):
    layout = "layers pages kv block kv_heads dim"
    step = one_head_per_device(layout=layout, max_blocks=3)
    mesh, specs = mesh_of(), specs_of(step)
    big = PagedCache.empty(
        layout, pages=1024, block=16, kv_heads=DEVICES, k_dim=32, layers=3, dtype="float32",
        device=NamedSharding(mesh, specs.cache.bases[0]),
    )  # fmt: skip
    placed = place(step._replace(cache=None), specs._replace(cache=None), mesh)

    def one_step(cache, query, table, lens):
        slots = jnp.take_along_axis(table, (lens // 16)[:, None], axis=1)[:, 0] * 16 + lens % 16

        def layer(carry, i):
            cache, query = carry
            cache = append(cache, query[:, ::2], query[:, 1::2], slots, layer=i)
            return (cache, swa_decode(query, cache, table, lens + 1, window=WINDOW, layer=i)), None

        (cache, query), _ = jax.lax.scan(layer, (cache, query), jnp.arange(3, dtype=jnp.int32))
        return cache, query

    sharded = jax.shard_map(
        one_step, mesh=mesh, in_specs=(specs.cache, *specs[:1], *specs[2:]),
        out_specs=(specs.cache, specs.query), check_vma=check_vma,
    )  # fmt: skip
    jitted = jax.jit(sharded, donate_argnums=0)
    lens = jnp.array([20, 5, 0, 33])
    compiled = jitted.lower(big, placed.query, placed.block_table, lens).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < size_of(big) / DEVICES / 16
    local = list(big.bases[0].shape)
    local[4] //= DEVICES
    assert not copies_of(compiled.as_text(), tuple(local))

    cache, query = place(step.cache, specs.cache, mesh), placed.query
    for i in range(3):
        cache, query = jitted(cache, query, placed.block_table, lens + i)
    assert cache.bases[0].sharding.spec == specs.cache.bases[0]
    alone, alone_query = step.cache, step.query
    for i in range(3):
        alone, alone_query = jax.jit(one_step)(alone, alone_query, step.block_table, lens + i)
    np.testing.assert_allclose(query, alone_query, rtol=1e-4, atol=1e-5)  # rounding errors of three layers and steps


# --- lowering for CUDA over several devices, on a machine that need not have one ---


def lower_over_four_gpus(function, step, *, axis_type, **jit_options):
    """Return the StableHLO of a sharded call for four H200."""
    mesh = AbstractMesh((DEVICES,), ("heads",), axis_types=(axis_type,), abstract_device=H200)
    described = jax.tree.map(
        lambda array, spec: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec)),
        step, specs_of(step),
    )  # fmt: skip
    with use_abstract_mesh(mesh):
        return jax.jit(function, **jit_options).trace(*described).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("check_vma", [True, False])
def test_kernels_lower_inside_shard_map(check_vma, axis_type):
    step = one_head_per_device(dtype="bfloat16", k_dim=64, v_dim=64)
    specs = specs_of(step)

    def step_of_all(query, cache, table, lens):
        cache = append(cache, query[:, ::2], query[:, 1::2], jnp.arange(4, dtype=jnp.int32))
        out, lse = swa_decode(query, cache, table, lens, window=WINDOW, return_lse=True)
        return cache, *merge_states(jnp.stack([out, out]), jnp.stack([lse, lse]))

    out_specs = (specs.cache, specs.query, specs.query)
    sharded = jax.shard_map(step_of_all, in_specs=tuple(specs), out_specs=out_specs, check_vma=check_vma)
    assert lower_over_four_gpus(sharded, step, axis_type=axis_type).count(f"@{TRITON_CALL}") == 3


def test_a_kernel_that_the_compiler_would_partition_is_refused():
    step = one_head_per_device(dtype="bfloat16", k_dim=64, v_dim=64)
    with pytest.raises(ValueError, match=f"swa_decode is a kernel that the compiler cannot partition: {RECIPE}, got 4"):
        lower_over_four_gpus(lambda *step: swa_decode(*step, window=WINDOW), step, axis_type=AxisType.Auto)
    rows = normal(4, DEVICES, 64, dtype="bfloat16")
    slots = jnp.arange(4, dtype=jnp.int32)
    with pytest.raises(ValueError, match="append is a kernel that the compiler cannot partition"):
        lower_over_four_gpus(lambda _, cache, *__: append(cache, rows, rows, slots), step, axis_type=AxisType.Auto)
    # The plain operations are the compiler's to partition.
    lower_over_four_gpus(lambda *step: swa_decode(*step, window=WINDOW, backend="xla"), step, axis_type=AxisType.Auto)


@pytest.mark.skipif(HAS_GPU, reason="here the device is known without a mesh")
def test_a_plan_names_the_device_where_the_mesh_does_not():
    step = one_head_per_device(dtype="bfloat16", k_dim=64, v_dim=64)
    mesh = mesh_of()
    placed = place(step, specs_of(step), mesh)
    plan = plan_for(*step[:3], window=WINDOW, device=DeviceProfile.named("h200"))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="cannot partition"):
        jax.jit(lambda step: swa_decode(*step, window=WINDOW, plan=plan)).trace(placed).lower(
            lowering_platforms=("cuda",)
        )


@pytest.mark.gpu2
@pytest.mark.parametrize("check_vma", [True, False])
def test_two_gpus_agree_with_one(check_vma):
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,))
    step = make_step((400, 77, 0, 512), max_blocks=32, heads=16, kv_heads=2, k_dim=192, v_dim=192, dtype="bfloat16")
    specs = specs_of(step)
    sharded = jax.shard_map(
        lambda *step: swa_decode(*step, window=200, batch_invariant=True), mesh=mesh, in_specs=tuple(specs),
        out_specs=specs.query, check_vma=check_vma,
    )  # fmt: skip
    out = jax.jit(sharded)(*place(step, specs, mesh))
    expected = swa_decode(*step, window=200, batch_invariant=True)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), rtol=2**-7, atol=2**-9)
    with pytest.raises(ValueError, match=RECIPE):
        jax.jit(lambda *step: swa_decode(*step, window=200))(*place(step, specs, mesh))
