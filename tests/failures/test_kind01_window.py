"""Kind 1 of the known failures: where the window ends, and what its number means."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import swa_torch
from swa_plan import Problem, reference, tolerance
from tests.contract.backends import BACKENDS, device_of, run, same_bits, torch_arguments
from tests.failures.probes import (
    RUNNERS,
    assert_exact,
    count_probe,
    decode,
    decode_gated,
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
def test_no_magic_window(window, error):
    """C06, facebookresearch/xformers#923: a window in another library's convention is an error, everywhere."""
    inputs = step((8,), kv_heads=1, k_dim=16)
    (query, cache, table, lens), _ = torch_arguments(inputs, torch.device("cpu"))
    gate, output = torch.zeros(1, 12), torch.full_like(query, 7.0)
    calls = [
        lambda: swa_torch.swa_decode(query, cache, table, lens, window=window),
        lambda: swa_torch.swa_decode_gated(
            query, *cache.bases, table, lens, gate, output, scale=1.0, window=window, query_len=1, splits=1
        ),
        lambda: swa_torch.plan_for(query, cache, table, window=window),
        lambda: swa_torch.check_inputs(cache, table, lens, window=window),
        lambda: reference.swa_decode(*inputs.arrays(), window=window),
        lambda: Problem(1, 12, 1, 16, 16, window, 16, 1),
    ]
    for call in calls:
        with pytest.raises(error, match="window"):
            call()
    assert (output == 7.0).all()


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


@pytest.mark.gpu
def test_time_does_not_grow_with_the_context():
    """C10, vllm-project/vllm#49588: a window bounds what is read, not only what is scored."""
    times, plan = {}, None
    for length in (131072, 1024):
        inputs = step((1024,) * 16)
        blocks = length // 16
        # A pool as large as 131072 tokens need would be 13 GB; pages outside the window are never read, so they repeat.
        rng = np.random.default_rng(0)
        table = rng.integers(0, len(inputs.key_cache), (16, blocks)).astype(np.int32)
        table[:, -64:] = inputs.block_table[:, -64:]
        inputs.block_table, inputs.seq_lens = table, np.full(16, length, np.int32)
        (query, cache, table, lens), _ = torch_arguments(inputs, torch.device("cuda"))
        plan = plan or swa_torch.plan_for(query, cache, table, window=512)
        out = torch.empty_like(query)

        def call(args=(query, cache, table, lens), out=out, plan=plan):
            swa_torch.swa_decode(*args, window=512, out=out, plan=plan)

        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        milliseconds = []
        for _ in range(200):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            milliseconds.append(start.elapsed_time(end))
        times[length] = float(np.median(milliseconds))
        tolerance.assert_close(run(inputs, "triton", plan=plan)[0], inputs)
    assert times[131072] <= 1.3 * times[1024], times


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
    device = device_of(runner)
    (query, cache, table, lens), _ = torch_arguments(inputs, device)
    from_pair = swa_torch.swa_decode(query, cache.bases, table, lens, window=512, backend=runner)
    check_entry_point(from_pair.float().cpu().numpy())
    edges = torch.tensor([0, 1], dtype=torch.int32, device=device)
    ragged = swa_torch.swa_decode(query, cache, table, lens, window=512, cu_query_lens=edges, backend=runner)
    check_entry_point(ragged.float().cpu().numpy())


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_call_gets_the_window(backend):
    """C11, EricLBuehler/mistral.rs#2094, through torch.compile."""
    inputs = weight_probe(step((600,)), SEEN)
    positional, _ = torch_arguments(inputs, device_of(backend))

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(query, cache, table, lens):
        return swa_torch.swa_decode(query, cache, table, lens, window=512, backend=backend)

    out = compiled(*positional).float().cpu().numpy()
    check_entry_point(out)
    assert same_bits(out, decode(inputs, backend)[0].astype(np.float32))
