"""Kind 1 of the known failures: where the window ends, and what its number means."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swa_plan import Problem, reference, tolerance
from tests.contract.backends import (
    BACKENDS,
    api_of,
    arguments,
    decode_gated,
    name_of,
    plan_for,
    to_array,
    to_numpy,
)
from tests.failures.probes import (
    RUNNERS,
    assert_exact,
    count_probe,
    decode,
    even_weights,
    step,
    weight_probe,
)

CONTRACT = Path(__file__).parents[2] / "docs" / "contract.md"
SPLITS = (1, 8)


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_window_counts_the_query(runner, splits):
    """C01, vllm-project/vllm#3385: window W means W keys, the query's own among them, not W + 1."""
    lengths = (511, 512, 513, 514)
    edges = [[e for e in (length - 1 - 511, length - 1 - 512) if e >= 0] or [0] for length in lengths]
    inputs = weight_probe(step(lengths), edges)
    out, _ = decode(inputs, runner, splits=splits)
    assert_exact(out, even_weights(inputs, edges))
    assert_exact(out[:, 0, 0], [1 / 511, 1 / 512, 1 / 512, 1 / 512])
    assert_exact(out[2:, 0, 1], 0.0)


@pytest.mark.parametrize("runner", RUNNERS)
def test_window_is_one_more_than_a_left_size(runner):
    """C02, huggingface/transformers#39408: W corresponds to FlashAttention's window_size=(W - 1, 0)."""
    edges = [[32, 31]]
    inputs = weight_probe(step((40,), window=8, block=4), edges)
    out, _ = decode(inputs, runner)
    assert_exact(out[..., 0], 1 / 8)
    assert_exact(out[..., 1], 0.0)

    def with_left_size(left: int) -> np.ndarray:
        """Return dense attention over the ``left`` keys before the query and its own, as FlashAttention defines it."""
        seen = range(39 - left, 40)
        return np.array([1 / len(seen) if e in seen else 0.0 for e in edges[0]])

    assert_exact(out[0, 0, :2], with_left_size(7))
    assert not np.array_equal(out[0, 0, :2].astype(np.float64), with_left_size(8))


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_oldest_key_in_the_window_is_not_dropped(runner, splits):
    """C03, sgl-project/sglang#32087: the key at p - W + 1 counts."""
    inputs = weight_probe(step((5000,), window=4096), [[904, 903]])
    out, _ = decode(inputs, runner, splits=splits)
    assert_exact(out[..., 0], 2.0**-12)
    assert_exact(out[..., 1], 0.0)
    counted, _ = decode(count_probe(inputs), runner, splits=splits)
    assert_exact(counted, 1.0)


@pytest.mark.parametrize(
    "library, theirs, ours",
    [
        ("FlashAttention", "window_size=(2047, 0)", "window=2048"),
        ("FlashAttention", "window_size=(-1, 0)", "window=None"),
        ("xformers", "2048", "window=2048"),
        ("FlashInfer, SGLang", "window_left=2047", "window=2048"),
    ],
)
def test_windows_of_other_libraries_are_documented(library, theirs, ours):
    """C06, facebookresearch/xformers#923: the contract's table says what each library's number is here."""
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in CONTRACT.read_text().splitlines() if "|" in line]
    assert any(row[1].startswith(library) and row[2:4] == [theirs, ours] for row in rows if len(row) > 3), rows
    assert re.search(r"window_right != 0", CONTRACT.read_text())


WRONG_WINDOWS = [
    pytest.param(0, ValueError, id="zero"),
    pytest.param(-1, ValueError, id="minus-one"),
    pytest.param(True, TypeError, id="bool"),
    pytest.param(512.0, TypeError, id="float"),
    pytest.param((511, 0), TypeError, id="left-and-right"),
]


@pytest.mark.parametrize("window, error", WRONG_WINDOWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_magic_window(backend, window, error):
    """C06, facebookresearch/xformers#923: a window in another library's convention is an error, everywhere."""
    inputs = replace(step((8,), kv_heads=1, k_dim=16), window=window)
    (_, cache, table, lens), _ = arguments(inputs, backend)
    calls = [
        lambda: decode(inputs, backend),
        lambda: decode_gated(inputs, backend, splits=1),
        lambda: plan_for(inputs, backend),
        lambda: api_of(backend).check_inputs(cache, table, lens, window=window),
    ]
    for call in calls:
        with pytest.raises(error, match="window"):
            call()


@pytest.mark.parametrize("window, error", WRONG_WINDOWS)
def test_no_magic_window_without_a_framework(window, error):
    """C06, facebookresearch/xformers#923, in the reference and in the planner."""
    inputs = step((8,), kv_heads=1, k_dim=16)
    with pytest.raises(error, match="window"):
        reference.swa_decode(*inputs.arrays(), window=window)
    with pytest.raises(error, match="window"):
        Problem(1, 12, 1, 16, 16, window, 16, 1)


@pytest.mark.parametrize("zero", ["scale", "k_scale"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_zero_scale_is_not_replaced_by_the_default(runner, zero):
    """C08, HKUSTDial/flash-sparse-attention#302: `x or default` must not swallow a legal 0.0."""
    inputs = step((16,), window=16, **{zero: 0.0})
    inputs.query[...] *= 10
    inputs.value_cache[...] = 0
    inputs.value_cache[inputs.block_table[0, 0], 3] = 1
    out, lse = decode(inputs, runner)
    assert_exact(out, 1 / 16)
    np.testing.assert_allclose(lse, np.log(16), rtol=1e-6)


@pytest.mark.parametrize("runner", RUNNERS)
def test_zero_value_scale_is_honoured(runner):
    """C08, HKUSTDial/flash-sparse-attention#302, the same for v_scale."""
    assert_exact(decode(step((16,), window=16, v_scale=0.0), runner)[0], 0.0)


@pytest.mark.parametrize("runner", RUNNERS)
def test_query_is_aligned_to_the_end_of_the_keys(runner):
    """C09, NVIDIA-NeMo/Megatron-Bridge#5259: the query of a longer cache sits at its last key, not at key 0."""
    inputs = weight_probe(step((4,), window=4096), [[0, 1, 2, 3]])
    assert_exact(decode(inputs, runner)[0][..., :4], 0.25)


SEEN = [[0, 87, 88]]


def check_entry_point(out: np.ndarray) -> None:
    """600 keys, window 512: keys 0 and 87 are outside, 88 is the oldest inside."""
    assert_exact(out[..., :3], [0.0, 0.0, 1 / 512])


@pytest.mark.parametrize("runner", RUNNERS)
def test_every_entry_point_gets_the_window(runner):
    """C11, EricLBuehler/mistral.rs#2094: no path may attend to everything."""
    inputs = weight_probe(step((600,)), SEEN)
    check_entry_point(decode(inputs, runner)[0])
    if runner == "reference":
        check_entry_point(tolerance.emulate(*inputs.arrays(), **inputs.reference_options())[0])
        return
    check_entry_point(decode(inputs, runner, batch_invariant=True)[0])
    check_entry_point(decode_gated(inputs, runner, splits=2))
    (query, cache, table, lens), _ = arguments(inputs, runner)
    call = {"window": 512, "backend": name_of(runner)}
    from_pair = api_of(runner).swa_decode(query, cache.bases, table, lens, **call)
    check_entry_point(to_numpy(from_pair, runner))
    edges = to_array(np.array([0, 1], np.int32), runner)
    ragged = api_of(runner).swa_decode(query, cache, table, lens, cu_query_lens=edges, **call)
    check_entry_point(to_numpy(ragged, runner))
