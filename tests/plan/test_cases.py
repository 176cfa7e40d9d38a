"""The cases cover what they say they cover, and poison changes nothing that may be read."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from swa_plan import cases, reference, tolerance
from swa_plan._layout import LAYOUTS, CacheLayout
from swa_plan._problem import Problem


def decode(inputs):
    return reference.swa_decode(*inputs.arrays(), **inputs.reference_options(), return_lse=True)


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


def random_cases(count):
    rng = np.random.default_rng(0)
    return [cases.random_case(rng) for _ in range(count)]


def test_names_are_unique_and_reasons_given():
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    assert all(case.why for case in cases.CASES)
    assert cases.by_name("step5-tp4").heads == 16
    with pytest.raises(ValueError, match=r"step5-tp4.*got 'nonesuch'"):
        cases.by_name("nonesuch")


@pytest.mark.parametrize("case", [*cases.CASES, *random_cases(20)], ids=str)
def test_cases_are_legal_problems(case):
    Problem(
        max_requests=case.requests,
        heads=case.heads,
        kv_heads=case.kv_heads,
        k_dim=case.k_dim,
        v_dim=case.v_dim,
        window=case.window,
        block=case.block,
        max_blocks=case.max_blocks,
        query_len=case.query_len,
        dtype=case.dtype,
        cache_dtype=case.cache_dtype,
        ragged=case.ragged,
        max_tokens=case.tokens,
    )
    inputs = cases.make_inputs(case)
    assert inputs.query.shape == (case.tokens, case.heads, case.k_dim)
    assert inputs.query.dtype.name == case.dtype
    assert inputs.key_cache.shape[1:] == (case.block, case.kv_heads, case.k_dim)
    assert inputs.value_cache.shape[1:] == (case.block, case.kv_heads, case.v_dim)
    assert inputs.key_cache.dtype.name == (case.cache_dtype or case.dtype)
    assert inputs.block_table.shape == (case.requests, case.max_blocks)
    assert {inputs.block_table.dtype.name, inputs.seq_lens.dtype.name} == {case.index_dtype}


@pytest.mark.parametrize("case", [*cases.CASES, *random_cases(60)], ids=str)
def test_poison_never_changes_a_bit(case):
    clean, poisoned = (cases.make_inputs(case, seed=3, poison=poison) for poison in (False, True))
    for right, actual in zip(decode(clean), decode(poisoned), strict=True):
        np.testing.assert_array_equal(bits(actual), bits(right))
    emulations = (tolerance.emulate(*inputs.arrays(), **inputs.reference_options()) for inputs in (clean, poisoned))
    for right, actual in zip(*emulations, strict=True):
        np.testing.assert_array_equal(bits(actual), bits(right))


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_nan_rows_are_only_those_that_the_case_is_about(case):
    out, lse = decode(cases.make_inputs(case, poison=True))
    assert np.isnan(out).any() == case.name.startswith(("invalid", "beyond", "ragged-over"))
    np.testing.assert_array_equal(np.isnan(out).all(axis=2), np.isnan(lse))
    assert (out[np.isneginf(lse)] == 0).all()


def test_poison_reaches_everything_that_is_not_visible():
    case = cases.by_name("window-mid-page")  # visible: 38..74, 53..89, 70..106
    inputs = cases.make_inputs(case, poison=True)
    finite = np.isfinite(inputs.key_cache.astype(np.float64)).all(axis=(2, 3))
    np.testing.assert_array_equal(finite, np.isfinite(inputs.value_cache.astype(np.float64)).all(axis=(2, 3)))
    assert finite.sum() == 3 * 37
    needed = np.array([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0]], bool)
    pages = inputs.key_cache.shape[0]
    inside = (inputs.block_table >= 0) & (inputs.block_table < pages)
    np.testing.assert_array_equal(inside, needed)
    assert len(set(inputs.block_table[needed])) == needed.sum(), "requests own their pages"


def test_poison_spoils_other_layers_and_int8():
    inputs = cases.make_inputs(cases.by_name("layout-layers-inner"), poison=True)
    (base,) = inputs.bases
    assert np.isnan(base[:, :2].astype(np.float64)).all()
    assert not np.isnan(base[:, 2].astype(np.float64)).all()
    inputs = cases.make_inputs(cases.by_name("int8-packed-layers"), poison=True)
    (base,) = inputs.bases
    assert (base[0] == 127).all()
    assert not (base[1] == 127).all()


def test_poison_spoils_query_and_gate_of_rows_that_see_nothing():
    inputs = cases.make_inputs(cases.by_name("ragged"), poison=True)
    keyless = np.isneginf(decode(inputs)[1]).all(axis=1)
    assert keyless.tolist() == [False] * 8 + [True] * 3
    np.testing.assert_array_equal(np.isnan(inputs.gate).all(axis=1), keyless)
    np.testing.assert_array_equal(np.isnan(inputs.query.astype(np.float32)).all(axis=(1, 2)), keyless)


def test_seeds_are_repeatable_and_differ():
    case = cases.by_name("sinks")
    first, again, other = (cases.make_inputs(case, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(bits(first.query), bits(again.query))
    np.testing.assert_array_equal(bits(first.bases[1]), bits(again.bases[1]))
    assert (bits(first.query) != bits(other.query)).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_override_keeps_a_quantised_cache(dtype):
    inputs = cases.make_inputs(cases.by_name("sinks"), dtype=dtype)
    assert {inputs.query.dtype.name, inputs.key_cache.dtype.name} == {dtype}
    inputs = cases.make_inputs(cases.by_name("fp8-e5m2"), dtype=dtype)
    assert (inputs.query.dtype.name, inputs.key_cache.dtype.name) == (dtype, "float8_e5m2")


def test_quantised_data_use_most_of_their_range_and_are_unsaturated():
    for name, most in (("fp8-e4m3", 448), ("fp8-e5m2", 57344), ("int8-per-head", 127)):
        stored = np.abs(cases.make_inputs(cases.by_name(name)).key_cache.astype(np.float64))
        assert most / 4 < stored.max() <= most
        assert (stored == most).mean() < 0.01


def test_options_are_keyword_arguments():
    options = cases.make_inputs(cases.by_name("window-none")).options()
    assert options == {"window": None, "query_len": 1, "return_lse": True}
    inputs = cases.make_inputs(cases.by_name("int8-packed-layers"))
    assert set(inputs.options()) == {"window", "query_len", "k_scale", "v_scale", "layer", "return_lse"}
    assert set(inputs.reference_options()) == {"window", "query_len", "k_scale", "v_scale"}
    assert cases.make_inputs(cases.by_name("out-fp32")).options()["out_dtype"] == "float32"


def test_a_case_is_its_repr():
    for case in (*cases.CASES, *random_cases(5)):
        assert eval(repr(case), {"Case": cases.Case}) == case


def test_cases_cover_the_contract():
    every = cases.CASES
    assert {case.block for case in every} >= {1, 3, 16, 24, 64, 528}
    assert {case.group for case in every} >= {1, 3, 5, 8, 12, 16, 17, 24, 48, 71}
    assert {case.k_dim for case in every} >= {16, 48, 64, 80, 96, 112, 128, 144, 192, 240, 256}
    assert {case.dtype for case in every} == {"bfloat16", "float16", "float32"}
    assert {case.cache_dtype for case in every} == {None, "float8_e4m3fn", "float8_e5m2", "int8"}
    assert {case.query_len for case in every} >= {1, 2, 4, 5}
    assert {case.gate_dtype for case in every if case.gate} == {"bfloat16", "float16", "float32"}
    bare = {" ".join(axis for axis in CacheLayout(case.layout).axes if axis != "layers") for case in every}
    assert bare == set(LAYOUTS)
    assert {case.layout.startswith("layers") for case in every if case.layers} == {True, False}
    assert all(len(case.seq_lens) <= 6 for case in every)


def test_random_cases_vary_and_repeat():
    drawn = random_cases(200)
    assert drawn[:20] == random_cases(20)
    for field in dataclasses.fields(cases.Case):
        if field.name not in ("why", "invalid_pages"):
            assert len({getattr(case, field.name) for case in drawn}) > 1, field.name


def test_keys_and_values_differ_by_position():
    inputs = cases.make_inputs(cases.by_name("window-none"))
    for cache in (inputs.key_cache, inputs.value_cache):
        assert cache.dtype == ml_dtypes.bfloat16
        rows = cache.reshape(-1, cache.shape[-1]).astype(np.float32)
        assert len(np.unique(rows, axis=0)) == len(rows)
        assert abs(rows.std() - 1) < 0.05
