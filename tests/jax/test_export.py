"""``jax.export``: for CUDA from a machine without a GPU, for the CPU and back, and what cannot be exported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from swa_pallas import PagedCache, append, merge_states, plan_for, swa_decode
from swa_plan import DeviceProfile
from tests.jax.helpers import HAS_GPU, LAYERED, TRITON_CALL, cuda_target, make_step, normal, same_bits, specs

# Saving an exported function needs this package, which JAX does not require.
pytest.importorskip("flatbuffers", reason="jax.export saves through flatbuffers")

WINDOW = 16
TRITON_MAY_BE_SAVED = [export.DisabledSafetyCheck.custom_call(TRITON_CALL)]
NO_DEVICE = r"lowering for CUDA must know its GPU.*plan=plan_for\(.*DeviceProfile.named.*AbstractDevice"


def step_of_layers(layout="layers pages kv block kv_heads dim"):
    return make_step(layout=layout, dtype="bfloat16", k_dim=64, v_dim=64)


def one_layer(query, cache, table, lens, layer, plan=None):
    """Append one row to each request and attend."""
    rows = query[:, ::2]
    cache = append(cache, rows, rows, lens - 1, layer=layer)
    return cache, *swa_decode(query, cache, table, lens, window=WINDOW, layer=layer, plan=plan, return_lse=True)


@pytest.mark.usefixtures("cuda_lowering")
def test_a_plan_for_a_named_device_exports_for_cuda():
    step = step_of_layers()
    plan = plan_for(*step[:3], window=WINDOW, device=DeviceProfile.named("h200"))
    arguments = (*specs(step), jax.ShapeDtypeStruct((), jnp.int32))
    jitted = jax.jit(lambda *args: one_layer(*args, plan=plan))
    exported = export.export(jitted, platforms=("cuda",), disabled_checks=TRITON_MAY_BE_SAVED)(*arguments)
    loaded = export.deserialize(exported.serialize())
    assert loaded.platforms == ("cuda",)
    assert loaded.mlir_module().count(f"@{TRITON_CALL}") == 2
    cache, out, lse = jax.tree.unflatten(loaded.out_tree, loaded.out_avals)
    assert isinstance(cache, PagedCache)
    assert cache.layout == step.cache.layout
    assert (cache.bases[0].shape, cache.bases[0].dtype) == (step.cache.bases[0].shape, jnp.bfloat16)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((4, 4, 64), jnp.bfloat16, (4, 4), jnp.float32)
    if jax.default_backend() == "gpu":
        expected = jitted(*step, jnp.int32(0))
        called = loaded.call(*step, jnp.int32(0))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(called), jax.tree.leaves(expected))
    else:
        with pytest.raises(ValueError, match="cuda"):
            loaded.call(*step, jnp.int32(0))


@pytest.mark.usefixtures("cuda_lowering")
def test_saving_triton_needs_the_callers_consent():
    """JAX promises nothing about old Triton calls in new versions; whoever saves one says so."""
    step = make_step(dtype="bfloat16", k_dim=64, v_dim=64)
    plan = plan_for(*step[:3], window=WINDOW, device=DeviceProfile.named("h200"))
    jitted = jax.jit(lambda *step: swa_decode(*step, window=WINDOW, plan=plan))
    with pytest.raises(ValueError, match="no compatibility guarantees"):
        export.export(jitted, platforms=("cuda",))(*specs(step))


@pytest.mark.usefixtures("cuda_lowering")
def test_an_abstract_device_exports_for_cuda_without_a_plan():
    step = make_step(dtype="bfloat16", k_dim=64, v_dim=64)
    jitted = jax.jit(lambda *step: swa_decode(*step, window=WINDOW))
    with cuda_target():
        exported = export.export(jitted, platforms=("cuda",), disabled_checks=TRITON_MAY_BE_SAVED)(*specs(step))
    assert exported.mlir_module().count(f"@{TRITON_CALL}") == 1


@pytest.mark.parametrize("layout", ["pages block kv_heads dim", "pages kv_heads block (kv dim)", LAYERED[0]])
def test_for_the_cpu_and_back(layout):
    step = step_of_layers(layout)
    layer = None if step.cache.layers is None else jnp.int32(1)
    jitted = jax.jit(one_layer)
    exported = export.export(jitted, platforms=("cpu",))(*specs(step), specs(layer))
    loaded = export.deserialize(exported.serialize())
    assert same_bits(loaded.call(*step, layer), jitted(*step, layer))


def test_unequal_head_sizes_survive_being_saved():
    step = make_step(layout="pages kv_heads block (kv dim)", k_dim=64, v_dim=32)
    jitted = jax.jit(lambda cache: cache)
    exported = export.export(jitted, platforms=("cpu",))(step.cache)
    cache = export.deserialize(exported.serialize()).call(step.cache)
    assert (cache.k_dim, cache.v_dim) == (64, 32)
    assert same_bits(cache, step.cache)


@pytest.mark.skipif(HAS_GPU, reason="this process's GPU is the one that is lowered for")
def test_an_unknown_device_says_how_to_plan():
    step = make_step(dtype="bfloat16", k_dim=64, v_dim=64)
    jitted = jax.jit(lambda *step: swa_decode(*step, window=WINDOW))
    with pytest.raises(ValueError, match=NO_DEVICE):
        jitted.trace(*step).lower(lowering_platforms=("cuda",))
    for platforms in (("cuda",), ("cpu", "cuda")):
        with pytest.raises(ValueError, match=NO_DEVICE):
            export.export(jitted, platforms=platforms)(*specs(step))
    with pytest.raises(ValueError, match=r"backend 'pallas_triton' must know its GPU: pass plan=plan_for"):
        swa_decode(*step, window=WINDOW, backend="pallas_triton")


@pytest.mark.usefixtures("cuda_lowering")
def test_append_and_merge_export_for_a_gpu_that_nobody_knows():
    """They compile alike for every GPU."""
    step = make_step(dtype="bfloat16", k_dim=64, v_dim=64)
    rows, slots = normal(4, 2, 64, dtype="bfloat16"), jnp.arange(4, dtype=jnp.int32)
    calls = ((append, (step.cache, rows, rows, slots)), (merge_states, (normal(3, 4, 4, 64), normal(3, 4, 4))))
    for call, arguments in calls:
        exporting = export.export(jax.jit(call), platforms=("cuda",), disabled_checks=TRITON_MAY_BE_SAVED)
        assert exporting(*specs(arguments)).mlir_module().count(f"@{TRITON_CALL}") == 1


def test_a_cuda_plan_does_not_lower_for_the_cpu():
    step = make_step(dtype="bfloat16", k_dim=64, v_dim=64)
    plan = plan_for(*step[:3], window=WINDOW, device=DeviceProfile.named("h200"))
    with pytest.raises(ValueError, match="backend 'pallas_triton' of swa_decode lowers for cuda, got platform cpu"):
        swa_decode(*step, window=WINDOW, plan=plan)


def described(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def symbolic_calls():
    """Return calls with one symbolic size, by the argument that has it."""
    step = make_step()
    [n] = export.symbolic_shape("n")
    rows, slots = described(n, 2, 32), described(n, dtype=jnp.int32)
    cache = PagedCache((described(n, 16, 2, 32),) * 2, step.cache.layout)
    return {
        "query": (
            lambda query, table, lens: swa_decode(query, step.cache, table, lens, window=WINDOW),
            (described(n, 4, 32), described(n, 3, dtype=jnp.int32), slots),
        ),
        "block_table": (
            lambda table: swa_decode(step.query, step.cache, table, step.seq_lens, window=WINDOW),
            (described(4, n, dtype=jnp.int32),),
        ),
        "key_cache": (lambda cache: swa_decode(step.query, cache, *step[2:], window=WINDOW), (cache,)),
        "key": (lambda rows, slots: append(step.cache, rows, rows, slots), (rows, slots)),
        "cache": (lambda cache: append(cache, *[normal(4, 2, 32)] * 2, jnp.arange(4, dtype=jnp.int32)), (cache,)),
        "outs": (merge_states, (described(2, n, 4, 32), described(2, n, 4))),
    }


@pytest.mark.parametrize("name", ["query", "block_table", "key_cache", "key", "cache", "outs"])
def test_symbolic_shapes_are_refused(name):
    call, arguments = symbolic_calls()[name]
    with pytest.raises(ValueError, match=rf"{name} must have a static shape, because plans and kernels.*got \(.*n"):
        export.export(jax.jit(call))(*arguments)


@pytest.mark.gpu
def test_an_exported_function_runs_on_the_gpu():
    step = make_step((400, 77, 0, 512), max_blocks=32, k_dim=192, v_dim=192, heads=16, dtype="bfloat16")
    plan = plan_for(*step[:3], window=200)
    jitted = jax.jit(lambda *step: swa_decode(*step, window=200, plan=plan, return_lse=True))
    exported = export.export(jitted, platforms=("cuda",), disabled_checks=TRITON_MAY_BE_SAVED)(*specs(step))
    assert same_bits(export.deserialize(exported.serialize()).call(*step), jitted(*step))
