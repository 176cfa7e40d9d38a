"""Kind 16 of the known failures: shared memory, compilation while serving, dependent launches, interpreted bf16."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import swa_torch
from swa_plan import DeviceProfile, Problem, plan, tolerance
from tests.contract.backends import plan_for
from tests.contract.torch_runner import GPU_BACKENDS, INTERPRETED, torch_arguments
from tests.failures.probes import decode, step
from tests.failures.torch.graphs import counted_compilations, same

ROOT = Path(__file__).parents[3]


CUDA = torch.device("cuda")


COMPILES = pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")


QUERY_LENS = (1, 2, 4)

SHARED_LIMITS = {"a100": 163 << 10, "h200": 227 << 10, "b200": 227 << 10, "rtx4090": 101_376, "rtx5090": 101_376}


DTYPES = ("bfloat16", "float16", "float32")


def verify_problem(query_len: int, dtype: str) -> Problem:
    """Return a step of enough requests that packing leaves no processor idle."""
    return Problem(64, 96, 8, 192, 192, 512, 16, 64, query_len=query_len, dtype=dtype)


def planned(query_len: int, dtype: str, device: str) -> swa_torch.Plan:
    """Return the planner's own choice."""
    return plan(verify_problem(query_len, dtype), DeviceProfile.named(device))


# Every combination where shared memory is smallest, the largest one elsewhere: each compilation takes seconds.
COMPILED = [(120, query_len, dtype) for query_len in QUERY_LENS for dtype in DTYPES] + [
    (80, 4, "float32"),
    (90, 4, "float32"),
    (100, 4, "float32"),
]


@COMPILES
@pytest.mark.parametrize("query_len, dtype", [(4, "bfloat16"), (4, "float32")])
def test_packing_by_hand_fits_into_shared_memory(query_len, dtype, monkeypatch):
    """C121, vllm-project/vllm#33846: what `swa_decode_gated(..., pack=4)` launches on sm_120."""
    offline = pytest.importorskip("tests.compile.offline")
    made = swa_torch.Plan.from_splits(verify_problem(query_len, dtype), 1, query_len)
    assert made.rows == 64
    split, _ = offline.record_decode(monkeypatch, made, 120)
    assert 0 < split.compile(120).shared_bytes <= SHARED_LIMITS["rtx5090"]


@COMPILES
@pytest.mark.parametrize("capability, query_len, dtype", COMPILED)
def test_compiled_kernel_fits_into_shared_memory(capability, query_len, dtype, monkeypatch):
    """C121, vllm-project/vllm#33846: what the compiler really takes, compiled without such a GPU."""
    offline = pytest.importorskip("tests.compile.offline")
    device = offline.PROFILES[capability]
    split, _ = offline.record_decode(monkeypatch, planned(query_len, dtype, device), capability)
    assert 0 < split.compile(capability).shared_bytes <= SHARED_LIMITS[device]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_first_requests_compile_nothing_after_warmup(backend):
    """C123, vllm-project/vllm#43009: no compilation for 1, 2, 16 or 17 requests, plain or verifying."""
    steps = {}
    for query_len in (1, 4):
        # A head size that no other test uses: nothing is compiled yet.
        inputs = step([600] * 17, query_len=query_len, k_dim=176)
        (query, cache, table, lens), _ = torch_arguments(inputs, CUDA)
        gate, out = torch.zeros(query.shape[:2], device=CUDA), torch.empty_like(query)
        made = swa_torch.plan_for(query, cache, table, window=512, query_len=query_len, backend=backend)
        with counted_compilations() as compiled:
            swa_torch.warmup(made, query, cache, gate=gate, out=out, key=query[:, :8], value=query[:, :8])
        assert 1 <= len(compiled) <= 3, compiled  # split; combine and append, unless the other rows had them
        steps[query_len] = (made, query, cache, table, lens, gate, out)
    # What torch itself does first in a process is not ours to time.
    torch.cuda.synchronize()
    for query_len, tensors in steps.items():
        for requests in (1, 2, 16, 17):
            with counted_compilations() as compiled:
                seconds = timed_calls(requests, query_len, *tensors)
            assert compiled == []
            # A compilation takes hundreds of milliseconds; Python's own first-call costs stay far below 5.
            assert seconds[0] <= max(5 * float(np.median(seconds)), 5e-3), (requests, seconds[0])


def timed_calls(requests, query_len, made, query, cache, table, lens, gate, out) -> list[float]:
    """Return the seconds that 20 decode calls take, and append once."""
    tokens, device = requests * query_len, query.device
    workspace = torch.empty(max(256, made.workspace_bytes), dtype=torch.uint8, device=device)
    slots = torch.full((requests,), -1, dtype=torch.int32, device=device)
    seconds = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        swa_torch.swa_decode(
            query[:tokens], cache, table[:requests], lens[:requests], window=512, query_len=query_len,
            gate=gate[:tokens], out=out[:tokens], plan=made, workspace=workspace,
        )  # fmt: skip
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    swa_torch.append(cache, query[:requests, :8], query[:requests, :8], slots)
    return seconds


LATE_INPUTS = ("query", "key_page", "value_page", "block_table", "seq_lens", "gate")


@pytest.mark.gpu
@COMPILES
@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("late", LATE_INPUTS)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_late_writes_of_the_kernel_before_are_seen(backend, late, splits):
    """C125, triton-lang/triton#11905: no load moves above the wait for the producer.

    The producer lets its successor start at once, sleeps and then writes; results must be those of synchronised runs.
    """
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs sm_90 or newer")
    from tests.failures.torch.slow_producer import copy_late

    inputs = step((700, 515, 64, 1200))
    (query, cache, table, lens), _ = torch_arguments(inputs, CUDA)
    gate = torch.randn(query.shape[:2], device=CUDA)
    page = int(table[0, 40])  # positions 640..655 of 700
    target = {
        "query": query, "key_page": cache.bases[0][page], "value_page": cache.bases[1][page], "block_table": table,
        "seq_lens": lens, "gate": gate,
    }[late]  # fmt: skip
    first = target.clone()
    if late == "block_table":
        second = first.roll(1, dims=0)  # other requests' pages, all of them valid
        lens.fill_(60)  # every request owns its first 4 pages
    elif late == "seq_lens":
        second = first - 37
    else:
        second = torch.randn_like(first)
    base = plan_for(inputs, backend, splits=splits)
    # A Plan refuses one stage, and four of them fit with 64 keys a tile.
    plans = [replace(base, tile=64, stages=stages) for stages in (2, 3, 4)]
    out = torch.empty_like(query)

    def call(made: swa_torch.Plan) -> torch.Tensor:
        return swa_torch.swa_decode(query, cache, table, lens, window=512, gate=gate, plan=made, out=out)

    expected = {}
    for name, contents in (("first", first), ("second", second)):
        target.copy_(contents)
        torch.cuda.synchronize()
        for made in plans:
            expected[name, made.stages] = call(made).clone()
            torch.cuda.synchronize()
    assert not torch.equal(expected["first", 2], expected["second", 2])
    target.copy_(first)
    copy_late(target, first)  # compiled before the rounds
    torch.cuda.synchronize()
    equal = torch.ones((), dtype=torch.bool, device=CUDA)
    for number in range(200):
        name = "first" if number % 2 else "second"
        made = plans[number // 2 % len(plans)]
        copy_late(target, first if number % 2 else second)
        call(made)
        equal &= same(out, expected[name, made.stages])
    torch.cuda.synchronize()
    assert equal.item()


def test_dependent_launch_is_used_only_where_it_exists(monkeypatch):
    """C126, flashinfer-ai/flashinfer#3120: off below sm_90, and the same in the split and the combine kernel."""
    offline = pytest.importorskip("tests.compile.offline")
    if INTERPRETED:
        pytest.skip("launch options are of compiled kernels")
    for capability in (80, 90, 100, 120):
        for splits in (1, 8):
            made = replace(planned(1, "float32", offline.PROFILES[capability]), splits=splits)
            with monkeypatch.context() as patch:
                recorders = offline.record_decode(patch, made, capability)
            launches = [options for recorder in recorders for _, options in recorder.launches]
            assert len(launches) == (1 if splits == 1 else 2)
            for options in launches:
                assert options["USE_PDL"] is (capability >= 90)
                assert options.get("launch_pdl", False) is (capability >= 90)


HANG = """
import torch
from tests.contract.backends import plan_for
from tests.contract.torch_runner import torch_arguments
from tests.failures.torch.graphs import capture
from tests.failures.probes import step
import sys
import swa_torch
inputs = step((700, 1, 64))
positional, _ = torch_arguments(inputs, torch.device("cuda"))
for splits in (1, 8):
    made = plan_for(inputs, sys.argv[1], splits=splits)
    out = torch.empty_like(positional[0])
    eager = swa_torch.swa_decode(*positional, window=512, plan=made)
    graph = capture(lambda: swa_torch.swa_decode(*positional, window=512, plan=made, out=out))
    for _ in range(100):
        graph.replay()
        swa_torch.swa_decode(*positional, window=512, plan=made)
    torch.cuda.synchronize()
    assert torch.equal(out, eager)
print("finished")
"""


@pytest.mark.gpu
@COMPILES
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_chains_of_dependent_launches_do_not_hang(backend):
    """C126, flashinfer-ai/flashinfer#3120: eager calls and graph replays after each other, within 60 seconds."""
    result = subprocess.run(
        [sys.executable, "-c", HANG, backend], capture_output=True, text=True, timeout=60, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.stdout.strip() == "finished", result.stderr


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("what", ["query", "gate", "out"])
def test_interpreter_refuses_bfloat16(what):
    """C127, triton-lang/triton#11584: interpreted bf16 products are of raw bit patterns; no silent wrong result."""
    inputs = step((40,), kv_heads=1, dtype="bfloat16" if what == "query" else "float32")
    (query, cache, table, lens), _ = torch_arguments(inputs, torch.device("cpu"))
    options = {
        "query": {},
        "gate": {"gate": torch.zeros(query.shape[:2], dtype=torch.bfloat16)},
        "out": {"out_dtype": torch.bfloat16},
    }[what]
    with pytest.raises(TypeError, match=f"{what} must not be bfloat16"):
        swa_torch.swa_decode(query, cache, table, lens, window=512, **options)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_interpreter_merge_refuses_bfloat16():
    """C127, triton-lang/triton#11584, for the merge of partial results."""
    outs, lses = torch.randn(2, 3, 4, 32), torch.randn(2, 3, 4)
    for options in ({"out_dtype": torch.bfloat16}, {"gate": torch.zeros(3, 4, dtype=torch.bfloat16)}):
        with pytest.raises(TypeError, match="bfloat16"):
            swa_torch.merge_states(outs, lses, **options)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_interpreter_is_right_in_other_dtypes(dtype):
    """C127, triton-lang/triton#11584: values in [-2, 2]."""
    inputs = step((40, 600), kv_heads=1, dtype=dtype)
    rng = np.random.default_rng(0)
    for array in (inputs.query, *inputs.bases):
        array[...] = rng.uniform(-2, 2, array.shape).astype(array.dtype)
    out, lse = decode(inputs, "interpret")
    tolerance.assert_close(out, inputs, actual_lse=lse)


def test_bfloat16_works_on_the_cpu():
    """C127, triton-lang/triton#11584: the plain-operations backend has no such limit."""
    inputs = step((40, 600), kv_heads=1, dtype="bfloat16")
    positional, options = torch_arguments(inputs, torch.device("cpu"))
    out, lse = swa_torch.swa_decode(*positional, **options, backend="cpu")
    tolerance.assert_close(out.float().numpy(), inputs, actual_lse=lse.numpy())
