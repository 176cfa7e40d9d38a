"""Kind 15 of the known failures: a missing Triton, tensors on the wrong device, and several devices."""

from __future__ import annotations

import pytest
import torch

import swa_torch
from swa_plan import tolerance
from tests.contract.torch_runner import INTERPRETED, torch_arguments
from tests.failures.probes import step
from tests.failures.processes import run_without
from tests.failures.torch.graphs import capture
from tests.failures.torch.workspace import aligned_workspace

MAKE_STEP = """
import importlib.util, sys
import torch, swa_torch
assert importlib.util.find_spec("triton") is None
device = torch.device(sys.argv[1] if len(sys.argv) > 1 else DEVICE)
query = torch.ones(1, 2, 16, device=device)
pair = tuple(torch.ones(2, 16, 1, 16, device=device) for _ in range(2))
table, lens = torch.zeros(1, 1, dtype=torch.int32, device=device), torch.full((1,), 5, dtype=torch.int32, device=device)
parts, lses = torch.ones(2, 1, 2, 16, device=device), torch.zeros(2, 1, 2, device=device)
"""


REFUSALS = """
calls = {
    "decode": lambda: swa_torch.swa_decode(query, pair, table, lens, window=8),
    "append": lambda: swa_torch.append(pair, query[:, :1], query[:, :1], lens),
    "merge": lambda: swa_torch.merge_states(parts, lses),
}
for name, call in calls.items():
    try:
        call()
    except Exception as error:
        print(name, type(error).__name__, error)
    else:
        print(name, "ran")
"""


def check_refusals(output: str) -> None:
    lines = output.splitlines()
    assert [line.split()[:2] for line in lines] == [[name, "RuntimeError"] for name in ("decode", "append", "merge")], (
        lines
    )
    assert all("pip install" in line and "triton" in line for line in lines), lines


def test_cpu_works_without_triton(tmp_path):
    """C115, vllm-project/vllm#14888: on a machine without Triton the CPU path, append, merge and planner work."""
    run_without(
        ("triton",),
        "DEVICE = 'cpu'"
        + MAKE_STEP
        + """
swa_torch.append(pair, 3 * query[:, :1], 3 * query[:, :1], torch.tensor([4]))
out = swa_torch.swa_decode(query, pair, table, lens, window=1)
assert (out == 3).all()
assert swa_torch.plan_for(query, pair, table, window=8).kernel == "ops"
assert (swa_torch.merge_states(parts, lses)[0] == 1).all()
""",
        tmp_path,
    )


def test_missing_triton_is_one_error_that_says_what_to_install(tmp_path):
    """C115, vllm-project/vllm#14888: asked for the interpreter, every call names Triton."""
    check_refusals(run_without(("triton",), "DEVICE = 'cpu'" + MAKE_STEP + REFUSALS, tmp_path, TRITON_INTERPRET="1"))


@pytest.mark.gpu
def test_gpu_calls_without_triton_are_one_error_that_says_what_to_install(tmp_path):
    """C115, vllm-project/vllm#14888: every call with CUDA tensors names Triton."""
    check_refusals(run_without(("triton",), "DEVICE = 'cuda'" + MAKE_STEP + REFUSALS, tmp_path))


def test_cpu_tensors_give_the_right_result():
    """C119, AnswerDotAI/ModernBERT#152: CPU tensors are served, with or without a GPU in the machine."""
    inputs = step((100,), kv_heads=1)
    positional, _ = torch_arguments(inputs, torch.device("cpu"))
    out = swa_torch.swa_decode(*positional, window=512)
    tolerance.assert_close(out.float().numpy(), inputs)


def test_cpu_tensors_never_reach_the_gpu_backend():
    """C119, AnswerDotAI/ModernBERT#152: asking for it is an error that names the device."""
    positional, _ = torch_arguments(step((100,), kv_heads=1), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"triton.*CUDA.*cpu"):
        swa_torch.swa_decode(*positional, window=512, backend="triton")


def check_mixed_devices(device: torch.device, other: torch.device) -> None:
    """Move one tensor at a time to another device."""
    inputs = step((100,), kv_heads=1)
    (query, cache, table, lens), _ = torch_arguments(inputs, device)
    tensors = {
        "query": query, "key_cache": cache.bases[0], "value_cache": cache.bases[1],
        "block_table": table, "seq_lens": lens,
        "gate": torch.zeros(query.shape[:2], device=device), "sinks": torch.zeros(query.shape[1], device=device),
        "k_scale": torch.ones((), device=device), "v_scale": torch.ones(1, device=device),
        "cu_query_lens": torch.tensor([0, 1], dtype=torch.int32, device=device),
        "kv_start": torch.zeros_like(lens), "kv_end": lens.clone(), "out": torch.full_like(query, 7.0),
        "workspace": aligned_workspace(1 << 20, device),
    }  # fmt: skip

    def call(query, key_cache, value_cache, block_table, seq_lens, **options):
        return swa_torch.swa_decode(query, (key_cache, value_cache), block_table, seq_lens, window=512, **options)

    for name in tensors:
        moved = {**tensors, name: tensors[name].to(other)}
        with pytest.raises(ValueError, match=r"device") as caught:
            call(**moved)
        if name not in ("query", "key_cache"):  # what the others are compared with
            assert name.partition("_cache")[0] in str(caught.value), (name, str(caught.value))
        assert str(other) in str(caught.value)
    assert (tensors["out"] == 7.0).all()
    call(**tensors)
    for name in ("key", "value", "slot_mapping"):
        rows = {"key": query[:, :1], "value": query[:, :1], "slot_mapping": torch.zeros_like(lens)}
        rows[name] = rows[name].to(other)
        with pytest.raises(ValueError, match=name):
            swa_torch.append(cache, *rows.values())


def test_mixed_devices_are_refused_by_name():
    """C119, AnswerDotAI/ModernBERT#152, with the meta device as the other one."""
    check_mixed_devices(torch.device("cpu"), torch.device("meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("on_gpu", [True, False])
def test_cpu_and_gpu_tensors_are_not_mixed(on_gpu):
    """C119, AnswerDotAI/ModernBERT#152."""
    devices = (torch.device("cuda:0"), torch.device("cpu"))
    check_mixed_devices(*(devices if on_gpu else devices[::-1]))


@pytest.mark.gpu
@pytest.mark.gpu2
@pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")
@pytest.mark.parametrize("splits", [1, 8])
def test_tensors_of_another_device_than_the_current_one(splits):
    """C120, triton-lang/triton#2441: all tensors on cuda:1 while cuda:0 is current, eager and in a graph."""
    inputs = step((600, 40), seed=1)
    torch.cuda.set_device(0)
    second = torch.device("cuda:1")
    (query, cache, table, lens), _ = torch_arguments(inputs, second)
    plan = swa_torch.plan_for(query, cache, table, window=512)
    assert plan == swa_torch.plan_for(query, cache, table, window=512, backend="triton")
    plan = swa_torch.Plan.from_splits(plan.problem, splits, 1)
    out = swa_torch.swa_decode(query, cache, table, lens, window=512, plan=plan)
    assert out.device == second
    assert torch.cuda.current_device() == 0
    tolerance.assert_close(out.float().cpu().numpy(), inputs)
    default = swa_torch.swa_decode(query, cache, table, lens, window=512)
    tolerance.assert_close(default.float().cpu().numpy(), inputs)
    swa_torch.append(cache, query[:, :8], query[:, :8], torch.tensor([-1, -1], device=second))
    outs, lses = out.float()[None], torch.zeros(1, *out.shape[:2], device=second)
    merged, _ = swa_torch.merge_states(outs, lses)
    assert torch.equal(merged, outs[0])
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(second):
        replayed = torch.empty_like(out)
        graph = capture(lambda: swa_torch.swa_decode(query, cache, table, lens, window=512, plan=plan, out=replayed))
    replayed.fill_(float("nan"))
    with torch.cuda.device(second):
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(replayed, out)
    assert torch.cuda.current_device() == 0
