"""Kind 11 of the known failures: CUDA graphs, torch.compile, and what the operator's schema promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import swa_torch
from swa_plan import DeviceProfile, swa_decode_plan
from tests.contract.backends import plan_for
from tests.contract.torch_runner import BACKENDS, GPU_BACKENDS, device_of, torch_arguments
from tests.failures.probes import step
from tests.failures.torch.graphs import capture, counted_compilations

CUDA = torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_replay_follows_the_lengths(backend, query_len):
    """C80, sgl-project/sglang#26019: neither splits nor lengths are frozen at capture time."""
    inputs = step([4096] * 8, query_len=query_len)
    (query, cache, table, lens), _ = torch_arguments(inputs, CUDA)
    call = {"window": 512, "query_len": query_len}
    call["plan"] = swa_torch.plan_for(query, cache, table, **call, backend=backend)
    lens.fill_(1)
    out = torch.empty_like(query)
    graph = capture(lambda: swa_torch.swa_decode(query, cache, table, lens, out=out, **call))
    for lengths in ([1, 17, 512, 513, 4096, 0, 0, 31], [0] * 8, [4096] * 8, [1] * 8):
        lens.copy_(torch.tensor(lengths))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, swa_torch.swa_decode(query, cache, table, lens, **call)), lengths
        assert torch.isfinite(out).all()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_graphs_of_one_pool_do_not_share_scratch(backend):
    """C82, ROCm/aiter#5430: partials of one graph survive other graphs, eager calls and other allocations."""
    pool = torch.cuda.graph_pool_handle()
    graphs, outs, eager, expected = {}, {}, {}, {}
    for name, lengths, splits in (("a", (4000, 700), 8), ("b", (4000, 1, 600, 33, 2000), 4)):
        inputs = step(lengths, seed=splits)
        positional, _ = torch_arguments(inputs, CUDA)
        call = {"window": 512, "plan": plan_for(inputs, backend, splits=splits)}
        outs[name] = torch.empty_like(positional[0])

        def run_eager(positional=positional, call=call):
            return swa_torch.swa_decode(*positional, **call)

        eager[name] = run_eager
        expected[name] = run_eager().clone()
        graphs[name] = capture(
            lambda positional=positional, call=call, out=outs[name]: swa_torch.swa_decode(*positional, **call, out=out),
            pool=pool,
        )
    allocated = None
    for round_number in range(50):
        junk = torch.full((1 + round_number % 7, 1 << 20), float("nan"), device=CUDA)
        for name in ("a", "b", "a", "eager", "b", "a"):
            if name == "eager":
                assert torch.equal(eager["b"](), expected["b"])
                continue
            outs[name].fill_(float("nan"))
            graphs[name].replay()
            assert torch.equal(outs[name], expected[name]), (round_number, name)
        del junk
        allocated = allocated or torch.cuda.memory_allocated()
        assert torch.cuda.memory_allocated() == allocated


def test_plan_depends_on_shapes_alone():
    """C83, vllm-project/vllm#51119: dummy lengths at capture time do not decide the splits."""
    assert swa_decode_plan(2, 8, 12, 1, 132, 512) == (1, 8)
    h200 = DeviceProfile.named("h200")
    plans = set()
    for device in ("cpu", "meta"):
        inputs = step((80, 80), kv_heads=8, max_blocks=500)
        (query, cache, table, _), _ = torch_arguments(inputs, torch.device("cpu"))
        query, table = query.to(device), table.to(device)
        pair = tuple(base.to(device) for base in cache.bases)
        plans.add(swa_torch.plan_for(query, pair, table, window=512, device=h200))
    assert len(plans) == 1
    assert plans.pop().splits > 1


@pytest.mark.gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_planning_while_capturing_reads_no_lengths(backend):
    """C83, vllm-project/vllm#51119: captured with lengths of 1, replayed with 8000; a host read would fail."""
    inputs = step((8000, 8000))
    (query, cache, table, lens), _ = torch_arguments(inputs, CUDA)
    before = swa_torch.plan_for(query, cache, table, window=512, backend=backend)
    expected = swa_torch.swa_decode(query, cache, table, lens, window=512, backend=backend)
    lens.fill_(1)
    out, plans = torch.empty_like(query), []

    def call():
        plans.append(swa_torch.plan_for(query, cache, table, window=512, backend=backend))
        swa_torch.swa_decode(query, cache, table, lens, window=512, out=out, backend=backend)

    graph = capture(call)
    assert set(plans) == {before}
    assert before.splits > 1
    lens.fill_(8000)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name, written", [("decode", {"output"}), ("decode_with_workspace", {"output", "workspace"})])
def test_only_the_output_is_marked_as_mutated(name, written):
    """C84, ROCm/aiter#2780: an operator that seems to mutate its inputs costs a copy of the cache."""
    schema = getattr(torch.ops.swa_torch, name).default._schema
    marked = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}
    assert marked == written
    assert all(result.alias_info is None for result in schema.returns)


@pytest.mark.parametrize("backend", BACKENDS)
def test_operator_passes_opcheck(backend):
    """C84, ROCm/aiter#2780: schema, fake implementation and mutation marks agree with what runs."""
    inputs = step((40, 3), kv_heads=1, k_dim=16, dtype="float32")
    (query, cache, table, lens), _ = torch_arguments(inputs, device_of(backend))
    arguments = (
        query, *cache.bases, table, lens, torch.zeros(query.shape[:2], device=query.device), None, None, None, None,
        None, None, 0.25, 1.0, 1.0, None, 16, 1, "", backend, False, True, torch.empty_like(query),
    )  # fmt: skip
    torch.library.opcheck(torch.ops.swa_torch.decode.default, arguments, test_utils=("test_schema", "test_faketensor"))


def gated_without_pack(query, key_cache, value_cache, table, lens, gate, output):
    """Leave out `pack`, whose default the operator must know."""
    swa_torch.swa_decode_gated(
        query, key_cache, value_cache, table, lens, gate, output, scale=0.25, window=16, query_len=1, splits=2
    )
    return output


def small_arguments(device: torch.device) -> tuple[torch.Tensor, ...]:
    inputs = step((40, 3), kv_heads=1, k_dim=16, dtype="float32")
    (query, cache, table, lens), _ = torch_arguments(inputs, device)
    return query, *cache.bases, table, lens, torch.zeros(query.shape[:2], device=device), torch.zeros_like(query)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_call_compiles_in_one_graph(backend, dynamic, compiler):
    """C86, Lightning-AI/lightning-thunder#2530: traced without a graph break, with a default left out."""
    arguments = small_arguments(device_of(backend))
    expected = gated_without_pack(*(argument.clone() for argument in arguments))
    compiled = torch.compile(gated_without_pack, fullgraph=True, dynamic=dynamic, backend=compiler)
    assert torch.equal(compiled(*arguments), expected)
    assert torch.equal(arguments[-1], expected)
    assert expected.abs().amax() > 0


def test_fake_tensors_trace_without_running():
    """C86, Lightning-AI/lightning-thunder#2530: shapes come out right, and nothing runs."""
    with FakeTensorMode() as mode:
        fakes = tuple(mode.from_tensor(argument) for argument in small_arguments(torch.device("cpu")))
        query, key, value, table, lens, gate, _ = fakes
        out, lse = swa_torch.swa_decode(query, (key, value), table, lens, window=16, gate=gate, return_lse=True)
    assert (out.shape, out.dtype) == ((2, 12, 16), torch.float32)
    assert (lse.shape, lse.dtype) == ((2, 12), torch.float32)


def test_meta_tensors_have_shapes():
    """C86, Lightning-AI/lightning-thunder#2530, on the meta device."""
    query, key, value, table, lens, gate, output = (
        argument.to("meta") for argument in small_arguments(torch.device("cpu"))
    )
    out, lse = swa_torch.swa_decode(query, (key, value), table, lens, window=16, gate=gate, return_lse=True)
    assert out.is_meta
    assert (out.shape, lse.shape) == ((2, 12, 16), (2, 12))
    assert gated_without_pack(query, key, value, table, lens, gate, output) is output


@pytest.mark.parametrize("backend", BACKENDS)
def test_call_exports(backend):
    """C86, Lightning-AI/lightning-thunder#2530, through torch.export."""

    class Model(torch.nn.Module):
        def forward(self, *arguments):
            query, key, value, table, lens, gate, _ = arguments
            return swa_torch.swa_decode(query, (key, value), table, lens, window=16, gate=gate)

    arguments = small_arguments(device_of(backend))
    program = torch.export.export(Model(), arguments)
    assert torch.equal(program.module()(*arguments), Model()(*arguments))


def batch(requests: int, columns: int, dim: int, query_len: int = 1) -> tuple:
    """Return query, cache, table, lens on the GPU, with lengths that the table holds."""
    rng = np.random.default_rng(requests * 100 + columns)
    lengths = rng.integers(query_len, columns * 16 + 1, requests)
    inputs = step(lengths, query_len=query_len, k_dim=dim, pages=requests * columns + 2, max_blocks=columns)
    return torch_arguments(inputs, CUDA)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_nothing_compiles_for_another_batch_or_table(backend):
    """C88, vllm-project/vllm-ascend#13637: 1, a multiple of 16 and other sizes are one kernel."""
    query, cache, table, _ = batch(64, 33, 112)  # a head size that no other test uses
    plan = swa_torch.plan_for(query, cache, table, window=512, backend=backend)
    with counted_compilations() as compiled:
        swa_torch.warmup(plan, query, cache)
    assert 1 <= len(compiled) <= 2, compiled
    with counted_compilations() as compiled:
        for requests in (1, 2, 3, 8, 15, 16, 17, 32, 64):
            for columns in (1, 7, 16, 33):
                swa_torch.swa_decode(*batch(requests, columns, 112), window=512, plan=plan)
                # A row slice of a wider table: another row stride, another address.
                query, cache, table, lens = batch(requests, columns, 112)
                wide = torch.zeros(requests, columns + 5, dtype=torch.int32, device=CUDA)
                wide[:, 3 : 3 + columns] = table
                swa_torch.swa_decode(query, cache, wide[:, 3 : 3 + columns], lens, window=512, plan=plan)
    assert compiled == []
    torch.cuda.synchronize()
