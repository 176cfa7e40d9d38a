"""The Pallas kernels compile for every chip that they are for, without a GPU: no spills, shared memory in limits."""

import os
from dataclasses import replace

import pytest

if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes"):
    pytest.skip("Triton interprets in this process, so nothing can be compiled", allow_module_level=True)
pytest.importorskip("triton", reason="needs Triton")
pytest.importorskip("torch", reason="needs PyTorch, for the recorder of launches that this shares a module with")
pytest.importorskip("jax", reason="needs JAX")

import jax
import jax.numpy as jnp

import swa_pallas
from swa_plan import CacheLayout, DeviceProfile, Plan, Problem, plan
from tests.compile.offline import PROFILES
from tests.compile.pallas_offline import compile_kernel, kernels

DIMS = [(64, 64), (128, 128), (192, 192), (256, 256), (192, 128)]

# Rows of a program's matrix: 16 of a group of 8 heads, 64 of 8 packed rows of the same group.
ROWS = {16: 1, 64: 8}


def make_problem(dims, dtype="bfloat16", *, query_len=1, **fields):
    """Return a step5-like problem, large enough that rows are packed."""
    sizes = {"max_requests": 64, "heads": 16, "kv_heads": 2, "window": 512, "block": 16, "max_blocks": 128}
    return Problem(
        **{**sizes, "k_dim": dims[0], "v_dim": dims[1], "query_len": query_len, "dtype": dtype, **fields}
    )  # fmt: skip


def lower(chosen, layout="pages block kv_heads (kv dim)", **options):
    """Lower one call for CUDA from shapes alone."""
    problem = chosen.problem
    tokens, requests = problem.max_tokens, problem.max_requests
    shapes = CacheLayout(layout).shape(
        pages=8, block=problem.block, kv_heads=problem.kv_heads, k_dim=problem.k_dim, v_dim=problem.v_dim
    )
    bases = tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(problem.stored_dtype)) for shape in shapes)
    cache = swa_pallas.PagedCache(
        bases if len(bases) == 2 else bases[0], layout, k_dim=problem.k_dim, v_dim=problem.v_dim
    )
    arrays = {
        "query": jax.ShapeDtypeStruct((tokens, problem.heads, problem.k_dim), jnp.dtype(problem.dtype)),
        "cache": cache,
        "block_table": jax.ShapeDtypeStruct((requests, problem.max_blocks), jnp.int32),
        "seq_lens": jax.ShapeDtypeStruct((requests,), jnp.int32),
    }
    shaped = {
        "gate": (tokens, problem.heads), "sinks": (problem.heads,), "k_scale": (problem.kv_heads,), "v_scale": (),
        "kv_start": (requests,), "kv_end": (requests,), "cu_query_lens": (requests + 1,), "scale": (),
    }  # fmt: skip
    for name in [name for name in options if options[name] in ("float32", "bfloat16", "int32")]:
        arrays[name] = jax.ShapeDtypeStruct(shaped[name], jnp.dtype(options.pop(name)))

    def call(arrays):
        return swa_pallas.swa_decode(
            **arrays, window=problem.window, query_len=problem.query_len, plan=chosen, **options
        )

    return jax.jit(call).trace(arrays).lower(lowering_platforms=("cuda",))


def check(lowered, capability, folder, count):
    """Compile the kernels of a call and hold them against the chip."""
    compiled = kernels(lowered)
    assert len(compiled) == count
    limit = DeviceProfile.named(PROFILES[capability]).shared_memory
    for kernel in compiled:
        usage = compile_kernel(kernel, capability, folder)
        assert usage.spilled_bytes == 0, (kernel.name, usage)
        assert usage.registers <= 255, (kernel.name, usage)
        assert usage.shared_bytes <= limit, f"{kernel.name}: {usage} on a chip with {limit} bytes"


# Dtype, rows and splits in alternation: each chip and head size meets them all over the two parameters.
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dims", DIMS, ids=lambda dims: "x".join(map(str, dims)))
@pytest.mark.parametrize("capability", PROFILES)
def test_decode_compiles_without_spills(tmp_path, capability, dims, rows):
    odd = (DIMS.index(dims) + (rows == 64) + list(PROFILES).index(capability)) % 2
    problem = make_problem(dims, "float16" if odd else "bfloat16", query_len=ROWS[rows])
    chosen = plan(problem, DeviceProfile.named(PROFILES[capability]), dependent_launch=False)
    assert chosen.rows == rows, "the planner no longer packs here: choose a problem where it does"
    check(lower(replace(chosen, splits=4 if odd else 1)), capability, tmp_path, 2 if odd else 1)


def test_each_stage_holds_a_tile_of_keys_and_values(tmp_path):
    """As for the Triton kernel: page ids are carried by the loop."""
    problem = make_problem((128, 128))
    shared = {}
    for stages in (2, 3):
        (kernel,) = kernels(lower(Plan(problem, "portable", 1, 1, 32, 2, stages)))
        shared[stages] = compile_kernel(kernel, 90, tmp_path).shared_bytes
    assert shared[3] - shared[2] == pytest.approx(32 * (128 + 128) * 2, rel=0.05)


SCALES = {"k_scale": "float32", "v_scale": "float32"}

# name: (capability, splits, fields of the problem, options of the call)
FEATURES = {
    "gate-lse": (90, 1, {}, {"gate": "float32", "return_lse": True}),
    "gate-bf16-split": (90, 4, {}, {"gate": "bfloat16", "return_lse": True}),
    "softcap-sinks": (90, 1, {}, {"softcap": 30.0, "sinks": "float32"}),
    "fp8-e4m3": (90, 4, {"cache_dtype": "float8_e4m3fn"}, SCALES),
    "fp8-e4m3-bits": (80, 1, {"cache_dtype": "float8_e4m3fn"}, SCALES),
    "fp8-e5m2": (90, 1, {"cache_dtype": "float8_e5m2"}, SCALES),
    "int8": (90, 4, {"cache_dtype": "int8"}, SCALES),
    "ragged": (90, 4, {"query_len": 4, "ragged": True}, {"cu_query_lens": "int32"}),
    "kv-range": (90, 1, {}, {"kv_start": "int32", "kv_end": "int32"}),
    "full-causal-traced-scale": (90, 4, {"window": None}, {"scale": "float32"}),
    "group-96": (90, 1, {"heads": 96, "kv_heads": 1}, {}),
    "fp32": (90, 1, {"dtype": "float32"}, {}),
    "many-splits": (90, 32, {}, {}),
}


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_compiles_without_spills(tmp_path, name):
    capability, splits, fields, options = FEATURES[name]
    problem = make_problem((192, 192), **{"max_requests": 16, **fields})
    profile = DeviceProfile.named(PROFILES[capability])
    chosen = replace(plan(problem, profile, dependent_launch=False), splits=splits)
    check(lower(chosen, **options), capability, tmp_path, 2 if splits > 1 else 1)


@pytest.mark.parametrize("capability", PROFILES)
def test_a_chunk_of_several_tiles_compiles_without_spills(tmp_path, capability):
    """The planner's tile where each launch waits for the one before."""
    problem = make_problem((192, 192), heads=16, kv_heads=2, max_requests=16, window=1024)
    chosen = plan(problem, DeviceProfile.named(PROFILES[capability]), dependent_launch=False)
    assert chosen.splits > 1
    check(lower(chosen), capability, tmp_path, 2)


def test_batch_invariant_plans_compile_without_spills(tmp_path):
    chosen = plan(make_problem((192, 192), query_len=2), DeviceProfile.named("h200"), batch_invariant=True)
    check(lower(chosen, gate="float32"), 90, tmp_path, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_append_compiles_without_spills(tmp_path, dtype):
    cache = swa_pallas.PagedCache(
        jax.ShapeDtypeStruct((2, 2, 16, 320), jnp.dtype(dtype)), "pages kv_heads block (kv dim)", k_dim=192, v_dim=128
    )
    source = jnp.bfloat16
    scales = {} if dtype == "bfloat16" else {"k_scale": 0.5, "v_scale": 2.0}
    rows = [jax.ShapeDtypeStruct((3, 2, dim), source) for dim in (192, 128)]
    slots = jax.ShapeDtypeStruct((3,), jnp.int32)
    traced = jax.jit(lambda *each: swa_pallas.append(*each, **scales)).trace(cache, *rows, slots)
    check(traced.lower(lowering_platforms=("cuda",)), 90, tmp_path, 1)


def test_merge_states_compiles_without_spills(tmp_path):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 5, 16, 192), (3, 5, 16), (16,), (5, 16))]
    call = jax.jit(lambda outs, lses, sinks, gate: swa_pallas.merge_states(outs, lses, sinks=sinks, gate=gate))
    check(call.trace(*shapes).lower(lowering_platforms=("cuda",)), 90, tmp_path, 1)
