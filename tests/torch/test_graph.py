"""CUDA graphs, streams and memory: one capture replays on other data, with the bits of an eager call."""

from dataclasses import replace

import pytest
import torch

from swa_torch import PagedCache, append, plan_for, swa_decode
from tests.contract.torch_runner import GPU_BACKENDS
from tests.torch.helpers import make_step, normal, same_bits

pytestmark = pytest.mark.gpu

REQUESTS, HEADS, KV_HEADS, DIM, WINDOW = 8, 16, 2, 128, 512
FIRST = (700, 5, 0, 513, 512, 1024, 64, 1)
OTHERS = [(1, 1, 1, 1, 1, 1, 1, 1), (0, 1024, 900, 2, 511, 0, 600, 33), (1024,) * 8, (0,) * 8]


@pytest.fixture(params=GPU_BACKENDS)
def backend(request):
    return request.param


@pytest.fixture
def step():
    return make_decode(FIRST)


def make_decode(lengths, *, query_len=1, layout="pages block kv_heads dim", layers=None, tokens=None):
    return make_step(
        lengths, query_len=query_len, heads=HEADS, kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM, max_blocks=64,
        layout=layout, layers=layers, tokens=tokens, dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip


def capture(function, pool=None):
    """Capture ``function`` after two runs on a side stream; return the graph and what it returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = function()
    return graph, result


def aligned_workspace(plan):
    """Return a workspace; the allocator aligns to 512 bytes."""
    return torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda")


def set_lengths(step, lengths):
    step.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))


@pytest.mark.parametrize("splits", [None, 1, 2, 8, 17])
def test_replay_on_other_lengths(step, splits, backend):
    gate, sinks = normal(REQUESTS, HEADS).cuda(), normal(HEADS).cuda()
    plan = plan_for(*step[:3], window=WINDOW, backend=backend)
    plan = plan if splits is None else replace(plan, splits=splits)

    def decode():
        return swa_decode(*step, window=WINDOW, gate=gate, sinks=sinks, return_lse=True, plan=plan)

    graph, result = capture(decode)
    for seed, lengths in enumerate(OTHERS):
        set_lengths(step, lengths)
        step.query.copy_(normal(*step.query.shape, seed=seed))
        gate.copy_(normal(REQUESTS, HEADS, seed=seed + 50))
        graph.replay()
        assert same_bits(result, decode())


def test_planning_happens_in_the_capture(step, backend):
    """No plan given: nothing that planning does needs the device."""
    graph, result = capture(lambda: swa_decode(*step, window=WINDOW, backend=backend))
    set_lengths(step, OTHERS[1])
    graph.replay()
    assert same_bits(result, swa_decode(*step, window=WINDOW, backend=backend))


@pytest.mark.parametrize("splits", [1, 4])
def test_ragged_rows_move_between_replays(splits, backend):
    step = make_decode(FIRST, tokens=20)
    edges = torch.tensor([0, 4, 5, 5, 7, 8, 12, 13, 14], dtype=torch.int32, device="cuda")
    plan = replace(plan_for(*step[:3], window=WINDOW, backend=backend, query_len=4, ragged=True), splits=splits)

    def decode():
        return swa_decode(
            *step, window=WINDOW, query_len=4, cu_query_lens=edges, kv_end=step.seq_lens, plan=plan, return_lse=True
        )

    graph, result = capture(decode)
    for counts in [(1,) * 8, (4, 4, 4, 4, 0, 0, 0, 4), (0,) * 8, (5, 1, 1, 1, 1, 1, 1, 1)]:
        edges.copy_(torch.tensor([sum(counts[:i]) for i in range(9)], dtype=torch.int32))
        graph.replay()
        assert same_bits(result, decode())
        assert (result[0][sum(counts) :] == 0).all()


def test_scales_are_read_on_the_device(step):
    cache = tuple((base.float() * 30).to(torch.float8_e4m3fn) for base in step.cache.bases)
    k_scale, v_scale = torch.full((KV_HEADS,), 0.03, device="cuda"), torch.tensor(0.03, device="cuda")

    def decode():
        return swa_decode(
            step.query, cache, *step[2:], window=WINDOW, k_scale=k_scale, v_scale=v_scale, return_lse=True
        )

    graph, result = capture(decode)
    before = tuple(part.clone() for part in decode())
    k_scale.copy_(torch.tensor([0.01, 0.07]))
    v_scale.fill_(0.5)
    graph.replay()
    assert same_bits(result, decode())
    assert not torch.equal(result[0], before[0])
    assert not torch.equal(result[1], before[1])


def test_append_and_decode_replay_as_decoding_goes_on(backend):
    step = make_decode((700, 5, 0, 513, 512, 1000, 64, 1), layout="pages kv_heads block (kv dim)")
    reference = PagedCache(step.cache.bases[0].clone(), step.cache.layout)
    rows = [torch.zeros(REQUESTS, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2)]

    def model_step(cache):
        position = step.seq_lens.long()
        page = step.block_table.gather(1, position[:, None] // 16)[:, 0].long()
        append(cache, *rows, page * 16 + position % 16)
        return swa_decode(step.query, cache, step.block_table, step.seq_lens + 1, window=WINDOW, backend=backend)

    untouched = step.cache.bases[0].clone()
    graph, result = capture(lambda: model_step(step.cache))
    step.cache.bases[0].copy_(untouched)
    for seed in range(20):
        for row, offset in zip(rows, (0, 100), strict=True):
            row.copy_(normal(*row.shape, seed=seed + offset))
        graph.replay()
        assert same_bits(result, model_step(reference)), seed
        step.seq_lens.add_(1)
    assert same_bits(step.cache.bases[0], reference.bases[0])
    assert not same_bits(step.cache.bases[0], untouched)


@pytest.mark.parametrize("padded", [8, 16, 64])
def test_batch_invariant_plans_do_not_notice_the_graph(padded):
    step = make_decode(FIRST)
    alone = swa_decode(*step, window=WINDOW, batch_invariant=True)
    assert plan_for(*step[:3], window=WINDOW, batch_invariant=True).splits > 1
    padding = padded - REQUESTS
    query = torch.cat([step.query, torch.full((padding, HEADS, DIM), torch.nan, device="cuda").bfloat16()])
    table = torch.cat([step.block_table, torch.full((padding, 64), -1, dtype=torch.int32, device="cuda")])
    lengths = torch.cat([step.seq_lens, torch.zeros(padding, dtype=torch.int32, device="cuda")])
    graph, result = capture(lambda: swa_decode(query, step.cache, table, lengths, window=WINDOW, batch_invariant=True))
    result.fill_(7.0)
    graph.replay()
    assert same_bits(result[:REQUESTS], alone)
    assert (result[REQUESTS:] == 0).all()


def test_one_workspace_serves_all_layers(backend):
    layers = 6
    step = make_decode(FIRST, layout="layers pages kv_heads block (kv dim)", layers=layers)
    plan = replace(plan_for(*step[:3], window=WINDOW, backend=backend), splits=8)
    workspace = aligned_workspace(plan)
    workspace.fill_(0xFF)

    def model():
        hidden, outs = step.query, []
        for layer in range(layers):
            out = swa_decode(
                hidden, *step[1:], window=WINDOW, layer=layer, plan=plan, workspace=workspace, return_lse=True
            )
            hidden = hidden + out[0]
            outs += out
        return tuple(outs)

    def without_workspace():
        hidden, outs = step.query, []
        for layer in range(layers):
            out = swa_decode(hidden, *step[1:], window=WINDOW, layer=layer, plan=plan, return_lse=True)
            hidden = hidden + out[0]
            outs += out
        return tuple(outs)

    assert same_bits(model(), without_workspace())
    graph, result = capture(model)
    for lengths in OTHERS:
        set_lengths(step, lengths)
        workspace.fill_(0xFF)
        graph.replay()
        assert same_bits(result, without_workspace())


@pytest.mark.parametrize("splits", [1, 8])
def test_memory_does_not_grow(step, splits, backend):
    plan = replace(plan_for(*step[:3], window=WINDOW, backend=backend), splits=splits)
    out = torch.empty_like(step.query)
    workspace = aligned_workspace(plan)
    for options in ({}, {"out": out}, {"out": out, "workspace": workspace}):
        swa_decode(*step, window=WINDOW, plan=plan, **options)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(50):
            swa_decode(*step, window=WINDOW, plan=plan, **options)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
        if "workspace" in options:
            # Only the empty LSE and nothing else is allocated, so the peak is that of before.
            assert torch.cuda.max_memory_allocated() <= before + 512
    graph, _ = capture(lambda: swa_decode(*step, window=WINDOW, plan=plan, out=out))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


# torch says that its detection is a prototype, which does not see everything.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_a_call_does_not_synchronise(step, backend):
    gate = normal(REQUESTS, HEADS).cuda()
    key, value = (normal(REQUESTS, KV_HEADS, DIM).cuda().bfloat16() for _ in range(2))
    slots = torch.arange(REQUESTS, device="cuda")
    swa_decode(*step, window=WINDOW, backend=backend, gate=gate, return_lse=True)
    append(step.cache, key, value, slots)
    torch.cuda.set_sync_debug_mode("error")
    try:
        swa_decode(*step, window=WINDOW, backend=backend, gate=gate, return_lse=True)
        append(step.cache, key, value, slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_side_streams(backend):
    """Several streams at once, each with inputs made on it and scratch memory of its own."""
    steps = [make_decode(lengths) for lengths in (FIRST, *OTHERS)]
    plan = replace(plan_for(*steps[0][:3], window=WINDOW, backend=backend), splits=8)
    expected = [swa_decode(step.query * 2, *step[1:], window=WINDOW, plan=plan) for step in steps]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in steps]
    for _ in range(20):
        results = []
        for step, stream in zip(steps, streams, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000)
                results.append(swa_decode(step.query * 2, *step[1:], window=WINDOW, plan=plan))
        torch.cuda.synchronize()
        assert same_bits(tuple(results), tuple(expected))


def test_a_call_runs_on_the_current_stream(step, backend):
    plan = replace(plan_for(*step[:3], window=WINDOW, backend=backend), splits=8)
    query = step.query.clone()
    expected = swa_decode(query, *step[1:], window=WINDOW, plan=plan)
    side = torch.cuda.Stream()
    step.query.fill_(torch.nan)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        step.query.copy_(query)
        out = swa_decode(*step, window=WINDOW, plan=plan)
    torch.cuda.current_stream().wait_stream(side)
    assert same_bits(out, expected)


def test_two_graphs_share_a_pool(backend):
    first, second = make_decode(FIRST), make_decode(OTHERS[1])
    plan = replace(plan_for(*first[:3], window=WINDOW, backend=backend), splits=8)
    outs = [torch.empty_like(step.query) for step in (first, second)]
    graphs = []
    for step, out in zip((first, second), outs, strict=True):

        def decode(step=step, out=out):
            swa_decode(*step, window=WINDOW, plan=plan, out=out)

        graphs.append(capture(decode, pool=graphs[0].pool() if graphs else None)[0])
    for lengths in OTHERS:
        set_lengths(first, lengths)
        set_lengths(second, lengths[::-1])
        for order in ((0, 1), (1, 0), (0, 0, 1)):
            for out in outs:
                out.fill_(7.0)
            for number in order:
                graphs[number].replay()
            for step, out in zip((first, second), outs, strict=True):
                assert same_bits(out, swa_decode(*step, window=WINDOW, plan=plan))


def test_validate_is_refused_in_a_capture(step):
    out = torch.full_like(step.query, 7.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.query.clone()  # torch warns of empty graphs
        with pytest.raises(ValueError, match=r"validate must be False .* check_inputs"):
            swa_decode(*step, window=WINDOW, out=out, validate=True)
    torch.cuda.synchronize()
    assert (out == 7.0).all()


# Inductor warns of fp32 products that could be rounded to TF32; there are none here.
@pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning")
# Before it records, Inductor captures nothing once, to have a memory pool.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.slow
def test_compiled_with_cuda_graphs(step, backend):
    def model(query, lengths):
        return swa_decode(query.sin(), *step[1:3], lengths, window=WINDOW, backend=backend).cos()

    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for lengths in (FIRST, *OTHERS):
        set_lengths(step, lengths)
        torch.testing.assert_close(compiled(step.query, step.seq_lens).clone(), model(step.query, step.seq_lens))


@pytest.mark.gpu2
def test_a_device_that_is_not_current(step, backend):
    current = torch.cuda.current_device()  # not 0 where JAX started first, which leaves the thread on its last GPU
    expected = swa_decode(*step, window=WINDOW, backend=backend)
    other = torch.device("cuda", 1 - current)
    cache = PagedCache(tuple(base.to(other) for base in step.cache.bases), step.cache.layout)
    out = swa_decode(
        step.query.to(other), cache, step.block_table.to(other), step.seq_lens.to(other), window=WINDOW, backend=backend
    )  # fmt: skip
    assert out.device == other
    assert torch.cuda.current_device() == current
    assert same_bits(out.cpu(), expected.cpu())
