"""Kind 1 of the known failures: where the window ends, and what its number means."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import swa_torch
from swa_plan import tolerance
from tests.contract.backends import run, same_bits
from tests.contract.torch_runner import BACKENDS, GPU_BACKENDS, device_of, torch_arguments
from tests.failures.probes import (
    assert_exact,
    decode,
    step,
    weight_probe,
)

WRONG_WINDOWS = [
    pytest.param(0, ValueError, id="zero"),
    pytest.param(-1, ValueError, id="minus-one"),
    pytest.param(True, TypeError, id="bool"),
    pytest.param(512.0, TypeError, id="float"),
    pytest.param((511, 0), TypeError, id="left-and-right"),
]


@pytest.mark.parametrize("window, error", WRONG_WINDOWS)
def test_no_magic_window_writes_anything(window, error):
    """C06, facebookresearch/xformers#923: a window in another library's convention is an error, everywhere."""
    inputs = step((8,), kv_heads=1, k_dim=16)
    (query, cache, table, lens), _ = torch_arguments(inputs, torch.device("cpu"))
    gate, output = torch.zeros(1, 12), torch.full_like(query, 7.0)
    calls = [
        lambda: swa_torch.swa_decode(query, cache, table, lens, window=window),
        lambda: swa_torch.swa_decode_gated(
            query, *cache.bases, table, lens, gate, output, scale=1.0, window=window, query_len=1, splits=1
        ),
    ]
    for call in calls:
        with pytest.raises(error, match="window"):
            call()
    assert (output == 7.0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_time_does_not_grow_with_the_context(backend):
    """C10, vllm-project/vllm#49588: a window bounds what is read, not only what is scored."""
    graphs, plan = {}, None
    for length in (131072, 1024):
        inputs = step((1024,) * 16)
        blocks = length // 16
        # A pool as large as 131072 tokens need would be 13 GB; pages outside the window are never read, so they repeat.
        rng = np.random.default_rng(0)
        table = rng.integers(0, len(inputs.key_cache), (16, blocks)).astype(np.int32)
        table[:, -64:] = inputs.block_table[:, -64:]
        inputs.block_table, inputs.seq_lens = table, np.full(16, length, np.int32)
        (query, cache, table, lens), _ = torch_arguments(inputs, torch.device("cuda"))
        plan = plan or swa_torch.plan_for(query, cache, table, window=512, backend=backend)
        out = torch.empty_like(query)

        def call(args=(query, cache, table, lens), out=out, plan=plan):
            swa_torch.swa_decode(*args, window=512, out=out, plan=plan)

        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs[length] = graph, call
        tolerance.assert_close(run(inputs, backend, plan=plan)[0], inputs)
    times = {length: [] for length in graphs}
    for _ in range(200):
        for length, (graph, _) in graphs.items():  # in turn, as others may use the GPU meanwhile
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[length].append(start.elapsed_time(end))
    medians = {length: float(np.median(milliseconds)) for length, milliseconds in times.items()}
    assert medians[131072] <= 1.3 * medians[1024], medians


SEEN = [[0, 87, 88]]


def check_entry_point(out: np.ndarray) -> None:
    """600 keys, window 512: keys 0 and 87 are outside, 88 is the oldest inside."""
    assert_exact(out[..., :3], [0.0, 0.0, 1 / 512])


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
