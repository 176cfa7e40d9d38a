"""What is compiled: kernels take the cache as it was passed, and no temporary is as large as a cache."""

import re

import jax.numpy as jnp
import pytest

from swa_pallas import append, swa_decode
from swa_pallas._xla import WIDENED_ON_CPU
from tests.jax.helpers import (
    ALL_LAYOUTS,
    LAYOUTS,
    TRITON_CALL,
    compile_here,
    copies_of,
    lower_for_cuda,
    make_cache,
    make_step,
    normal,
    same_bits,
    size_of,
)

DTYPES = ("bfloat16", "float8_e4m3fn")
WINDOW = 16


def scales_of(dtype):
    return {"k_scale": 0.1, "v_scale": 0.2} if dtype.startswith("float8") else {}


def layer_of(cache):
    return None if cache.layers is None else jnp.int32(1)


def decode(step, layer, scales):
    return swa_decode(*step, window=WINDOW, layer=layer, **scales)


def write(cache, key, value, slots, layer, scales):
    return append(cache, key, value, slots, layer=layer, **scales)


def operations_on(text, shape, dtype):
    """Return the operations of StableHLO that take or return an array of this type, calls of functions aside."""
    element = {"bfloat16": "bf16", "float8_e4m3fn": "f8E4M3FN"}[dtype]
    tensor = f"tensor<{'x'.join(map(str, shape))}x{element}>"
    lines = [line.strip() for line in text.splitlines() if tensor in line and "func.func" not in line]
    # A case of one branch is how JAX lowers a choice by platform; `})` ends its region and gives its type.
    lines = [line for line in lines if not line.startswith("})")]
    names = {re.match(r'(?:\S+ = )?"?(?:stablehlo\.)?(custom_call @[\w$.]+|\w+)', line)[1] for line in lines}
    return names - {"return", "call"}


@pytest.mark.usefixtures("cuda_lowering")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_the_kernel_takes_the_parameter_itself(layout, dtype):
    step = make_step(layout=layout, dtype="bfloat16", cache_dtype=dtype, k_dim=64, v_dim=64)
    text = lower_for_cuda(decode, step, layer_of(step.cache), scales_of(dtype))
    for base in step.cache.bases:
        assert operations_on(text, base.shape, dtype) == {f"custom_call @{TRITON_CALL}"}
    assert text.count(f"@{TRITON_CALL}") == 1


@pytest.mark.usefixtures("cuda_lowering")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_append_writes_into_the_parameter_itself(layout, dtype):
    cache = make_cache(layout, dtype=dtype, k_dim=64, v_dim=64)
    rows, slots = normal(3, 2, 64, dtype="bfloat16"), jnp.array([0, 5, -1])
    arguments = (cache, rows, rows, slots, layer_of(cache), scales_of(dtype))
    text = lower_for_cuda(write, *arguments, donate_argnums=0)
    for base in cache.bases:
        assert operations_on(text, base.shape, dtype) == {f"custom_call @{TRITON_CALL}"}
    assert text.count(f"@{TRITON_CALL}") == 1
    assert text.count("tf.aliasing_output") == len(cache.bases)
    [call] = [line for line in text.splitlines() if f"@{TRITON_CALL}" in line]
    assert call.count("output_operand_alias<") == len(cache.bases)


@pytest.mark.usefixtures("cuda_lowering")
def test_split_and_combine_are_two_kernels():
    step = make_step((400,), max_blocks=32, dtype="bfloat16", k_dim=192, v_dim=192)
    text = lower_for_cuda(lambda step: swa_decode(*step, window=None), step)
    assert text.count(f"@{TRITON_CALL}") == 2


@pytest.mark.usefixtures("cuda_lowering")
def test_a_sliced_cache_is_noticed():
    """The checks above would notice: a layer that is cut out of the base is not the parameter."""
    step = make_step(layout="layers pages block kv_heads dim", dtype="bfloat16", k_dim=64, v_dim=64)

    def sliced(step, layer):
        bases = tuple(base[layer] for base in step.cache.bases)
        return swa_decode(step.query, bases, step.block_table, step.seq_lens, window=WINDOW)

    text = lower_for_cuda(sliced, step, jnp.int32(1))
    assert "dynamic_slice" in operations_on(text, step.cache.bases[0].shape, "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_no_temporary_is_as_large_as_the_cache(layout, dtype):
    quantised = dtype in ("float8_e4m3fn", "float8_e5m2", "int8")
    step = make_step(dtype="bfloat16" if quantised else dtype)
    cache = make_cache(layout, pages=2048, dtype=dtype)
    scales = {"k_scale": 0.1, "v_scale": 0.2} if quantised else {}
    rows, slots = normal(3, 2, 32, dtype=step.query.dtype.name), jnp.array([0, 5, -1])
    decoded = compile_here(decode, step._replace(cache=cache), layer_of(cache), scales)
    written = compile_here(write, cache, rows, rows, slots, layer_of(cache), scales, donate_argnums=0)
    in_place = [decoded] if dtype in WIDENED_ON_CPU else [decoded, written]
    for compiled in in_place:
        assert compiled.memory_analysis().temp_size_in_bytes < size_of(cache) / 16
        for base in cache.bases:
            assert not copies_of(compiled.as_text(), base.shape)
    # What XLA cannot write in place on the CPU is copied once, as integers, and never to a wider dtype.
    assert written.memory_analysis().temp_size_in_bytes < size_of(cache) * (1 + 1 / 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_temporary_is_as_large_as_the_cache_on_the_gpu(layout, dtype):
    step = make_step(dtype="bfloat16")
    cache = make_cache(layout, pages=2048, dtype=dtype)
    rows, slots = normal(3, 2, 32, dtype="bfloat16"), jnp.array([0, 5, -1])
    decoded = compile_here(decode, step._replace(cache=cache), layer_of(cache), scales_of(dtype))
    written = compile_here(write, cache, rows, rows, slots, layer_of(cache), scales_of(dtype), donate_argnums=0)
    for compiled in (decoded, written):
        assert compiled.memory_analysis().temp_size_in_bytes < size_of(cache) / 16
        for base in cache.bases:
            assert not copies_of(compiled.as_text(), base.shape)


@pytest.mark.gpu
@pytest.mark.slow
def test_an_fp8_cache_above_two_gibibytes_is_right():
    """Pages beyond 2**31 elements of an fp8 cache: same bits as the same pages in a small cache."""
    pages, block, kv_heads, dim = 10240, 64, 8, 256
    small = make_cache("pages kv block kv_heads dim", pages=8, block=block, kv_heads=kv_heads, k_dim=dim, v_dim=dim,
                       dtype="float8_e4m3fn")  # fmt: skip
    large = jnp.zeros((pages, *small.bases[0].shape[1:]), jnp.float8_e4m3fn)
    assert 2**31 < large.size < 2**32
    base = jnp.concatenate([large[: pages - 8], small.bases[0]])
    del large
    large = type(small)(base, small.layout)
    table = jnp.asarray([[0, 3, 6, 1], [7, 2, 5, 4]], jnp.int32)
    lens = jnp.asarray([200, 256], jnp.int32)
    query = normal(2, 16, dim, dtype="bfloat16")
    call = {"window": 200, "k_scale": 0.05, "v_scale": 0.07, "return_lse": True}
    expected = swa_decode(query, small, table, lens, **call)
    assert same_bits(swa_decode(query, large, table + (pages - 8), lens, **call), expected)
    rows, slots = normal(2, kv_heads, dim, dtype="bfloat16"), jnp.asarray([5, 8 * block - 1], jnp.int32)
    scales = {"k_scale": 0.05, "v_scale": 0.07}
    small = append(small, rows, rows, slots, **scales)
    large = append(large, rows, rows, slots + (pages - 8) * block, **scales)
    assert same_bits(large.bases[0][pages - 8 :], small.bases[0])
