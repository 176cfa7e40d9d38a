"""The operators as the compiler sees them: schemas, fake kernels, ``torch.compile`` and export."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from swa_torch import PagedCache, append, merge_states, plan_for, swa_decode, swa_decode_gated, swa_decode_plan
from tests.torch.helpers import make_step, normal, same_bits

OPERATORS = torch.ops.swa_torch
WRITTEN = {
    "decode": {"output"},
    "decode_with_workspace": {"output", "workspace"},
    "append": {"key_base", "value_base"},
    "merge_states": {"output"},
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Recompilations of one test must not count against the limit of the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# --- schemas ---


@pytest.mark.parametrize("name", WRITTEN)
def test_only_what_is_written_carries_a_mutation_mark(name):
    schema = getattr(OPERATORS, name).default._schema
    marked = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}
    assert marked == WRITTEN[name]
    assert not any(result.alias_info for result in schema.returns), "a result aliases an argument"


FEATURES = {
    "plain": {},
    "lse-gate": {"lse": True, "gate": True},
    "sinks-softcap": {"sinks": True, "softcap": 5.0},
    "verify": {"query_len": 2},
    "ragged": {"query_len": 2, "ragged": True, "lse": True},
    "kv-range": {"kv_range": True},
    "fp8": {"cache_dtype": torch.float8_e4m3fn, "scales": True},
    "int8": {"cache_dtype": torch.int8, "scales": True, "dtype": torch.bfloat16},
    "full-causal": {"window": None},
    "invariant": {"invariant": True},
}


def decode_arguments(
    window=16, query_len=1, lse=False, gate=False, sinks=False, softcap=None, ragged=False, kv_range=False,
    cache_dtype=None, scales=False, dtype=torch.float32, invariant=False,
):  # fmt: skip
    """Return the operator's arguments for a set of features."""
    query, cache, table, lengths = make_step(query_len=query_len, layout="pages kv_heads block (kv dim)", dtype=dtype)
    tokens, heads, _ = query.shape
    key_cache, value_cache = (view.to(cache_dtype or dtype) for view in cache.views())
    return (
        query, key_cache, value_cache, table, lengths, normal(tokens, heads) if gate else None,
        torch.tensor([0, 2, 3, 3, 5], dtype=torch.int32) if ragged else None,
        torch.tensor([4, 0, 0, 30], dtype=torch.int32) if kv_range else None,
        torch.tensor([18, 2, 0, 40], dtype=torch.int32) if kv_range else None,
        normal(heads) if sinks else None,
        torch.tensor(0.5) if scales else None, torch.tensor([0.5, 2.0]) if scales else None,
        0.125, 1.0, 1.0, softcap, window, query_len, "", None, invariant, lse, query.new_empty(tokens, heads, 64),
    )  # fmt: skip


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_opcheck_decode(features):
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if features.get("cache_dtype") == torch.float8_e4m3fn:
        checks.remove("test_schema")  # It compares inputs with arithmetic that torch lacks for fp8.
    opcheck(OPERATORS.decode.default, decode_arguments(**features), test_utils=checks)


@pytest.mark.parametrize("features", [FEATURES["plain"], FEATURES["lse-gate"]], ids=["plain", "lse-gate"])
def test_opcheck_decode_with_workspace(features):
    workspace = torch.empty(1 << 16, dtype=torch.uint8)
    opcheck(OPERATORS.decode_with_workspace.default, (*decode_arguments(**features), workspace))


@pytest.mark.parametrize(
    "layout", ["pages block kv_heads dim", "pages kv_heads block (kv dim)", "kv layers pages block kv_heads dim"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_opcheck_append(layout, dtype):
    layers = 2 if "layers" in layout else None
    cache = make_step(layout=layout, layers=layers).cache
    bases = [base.to(dtype) for base in cache.bases]
    arguments = (
        bases[0], bases[1] if len(bases) == 2 else None, layout, 64, 64, 1 if layers else None, normal(5, 2, 64),
        normal(5, 2, 64, seed=1), torch.tensor([0, 17, -1, 10**6]), None, torch.tensor([1.0, 0.5]), 0.5, 1.0,
    )  # fmt: skip
    opcheck(OPERATORS.append.default, arguments)


@pytest.mark.parametrize("options", [False, True])
def test_opcheck_merge_states(options):
    outs, lses = normal(3, 4, 8, 64), normal(3, 4, 8)
    sinks, gate = (normal(8), normal(4, 8)) if options else (None, None)
    opcheck(OPERATORS.merge_states.default, (outs, lses, sinks, gate, torch.empty(4, 8, 64)))


# --- shapes without running ---


def test_fake_tensors_give_shapes_without_running():
    with FakeTensorMode():
        cache = PagedCache.empty("pages block kv_heads dim", pages=10**6, block=16, kv_heads=2, k_dim=192, v_dim=128)
        query = torch.empty(6, 16, 192, dtype=torch.bfloat16)
        table, lengths = torch.empty(3, 10**4, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
        out, lse = swa_decode(
            query, cache, table, lengths, window=512, query_len=2, return_lse=True, out_dtype=torch.float32
        )
        assert (out.shape, out.dtype) == ((6, 16, 128), torch.float32)
        assert (lse.shape, lse.dtype) == ((6, 16), torch.float32)
        rows = torch.empty(6, 2, 192, dtype=torch.bfloat16), torch.empty(6, 2, 128, dtype=torch.bfloat16)
        assert append(cache, *rows, torch.empty(6, dtype=torch.int64)) is None
        merged, lse = merge_states(torch.empty(2, 6, 16, 128), torch.empty(2, 6, 16), out_dtype=torch.bfloat16)
        assert (merged.shape, merged.dtype, lse.shape) == ((6, 16, 128), torch.bfloat16, (6, 16))


def test_meta_tensors_give_shapes_without_running():
    query, cache, table, lengths = make_step(device="cpu")
    meta = [tensor.to("meta") for tensor in (query, *cache.bases, table, lengths)]
    out, lse = swa_decode(meta[0], tuple(meta[1:3]), *meta[3:], window=8, return_lse=True)
    assert out.device.type == lse.device.type == "meta"
    assert out.shape == query.shape
    assert lse.shape == query.shape[:2]
    merged, _ = merge_states(torch.empty(2, 6, 16, 128, device="meta"), torch.empty(2, 6, 16, device="meta"))
    assert merged.shape == (6, 16, 128)


# --- torch.compile ---


def plain(step, extra):
    return swa_decode(*step, window=16)


def tuple_cache(step, extra):
    return swa_decode(step[0], (step[1].key_cache, step[1].value_cache), *step[2:], window=16)


def every_option(step, extra):
    return swa_decode(
        *step, window=16, gate=extra["gate"], sinks=extra["sinks"], softcap=3.0, scale=0.1, return_lse=True,
        out_dtype=torch.bfloat16,
    )  # fmt: skip


def default_scale_full_causal(step, extra):
    return swa_decode(*step, window=None)


def into_out(step, extra):
    out = torch.full_like(step[0], 7.0)
    assert swa_decode(*step, window=16, out=out) is out
    return out


def kv_range(step, extra):
    return swa_decode(*step, window=16, kv_start=extra["kv_start"], kv_end=step[3], return_lse=True)


def inside_a_model(step, extra):
    query = (step[0].flatten(1) @ extra["weights"]).view_as(step[0])
    return swa_decode(query, *step[1:], window=16, gate=extra["gate"]).flatten(1).relu()


def batch_invariant(step, extra):
    return swa_decode(*step, window=16, batch_invariant=True)


COMPILED = [
    plain, tuple_cache, every_option, default_scale_full_causal, into_out, kv_range, inside_a_model, batch_invariant,
]  # fmt: skip


def step_and_extra(lengths, layout="pages kv_heads block (kv dim)"):
    step = make_step(lengths, layout=layout)
    tokens, heads, dim = step.query.shape
    extra = {
        "gate": normal(tokens, heads, seed=1), "sinks": normal(heads, seed=2), "kv_start": step.seq_lens // 2,
        "weights": normal(heads * dim, heads * dim, seed=3) / 16,
    }  # fmt: skip
    return tuple(step), extra


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", COMPILED, ids=lambda function: function.__name__)
def test_compiled_equals_eager(function, dynamic):
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for lengths in [(20, 5, 0, 33), (40, 41, 42), (1, 2, 3, 4, 5, 6, 7)]:
        arguments = step_and_extra(lengths)
        assert same_bits(compiled(*arguments), function(*arguments))


def test_dynamic_batches_compile_once():
    graphs = []
    compiled = torch.compile(
        plain, fullgraph=True, dynamic=True, backend=lambda graph, inputs: graphs.append(graph) or graph.forward
    )
    for requests in (5, 4, 7, 33):
        step, extra = step_and_extra([9] * requests)
        assert same_bits(compiled(step, extra), plain(step, extra))
    assert len(graphs) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_with_a_plan(dynamic):
    step, _ = step_and_extra((20, 5, 0, 33))
    plan = plan_for(*step[:3], window=16, max_requests=64)
    compiled = torch.compile(
        lambda step: swa_decode(*step, window=16, plan=plan), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    for lengths in [(20, 5, 0, 33), (1, 2, 3, 4, 5, 6, 7)]:
        step, _ = step_and_extra(lengths)
        assert same_bits(compiled(step), swa_decode(*step, window=16, plan=plan))


def test_compiled_with_a_plan_and_a_workspace():
    step, _ = step_and_extra((20, 5, 0, 33))
    plan = replace(plan_for(*step[:3], window=16), splits=4)
    workspace = torch.empty(plan.workspace_bytes + 512, dtype=torch.uint8)
    workspace = workspace[-workspace.data_ptr() % 256 :]

    def two_layers(step, workspace):
        first = swa_decode(*step, window=16, plan=plan, workspace=workspace)
        return first + swa_decode(first, *step[1:], window=16, plan=plan, workspace=workspace)

    compiled = torch.compile(two_layers, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(step, workspace), two_layers(step, workspace))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_original_signature(dynamic):
    def gated(step, gate, splits, pack):
        output = torch.empty_like(step[0])
        swa_decode_gated(
            step[0], step[1].key_cache, step[1].value_cache, *step[2:], gate, output, scale=0.1, window=16, query_len=1,
            splits=splits, pack=pack,
        )  # fmt: skip
        return output

    compiled = torch.compile(gated, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    pack, splits = swa_decode_plan(4, 2, 4, 1, 132, 512)
    for lengths in [(20, 5, 0, 33), (1, 2, 3, 4, 5, 6, 7)]:
        step, extra = step_and_extra(lengths)
        expected = swa_decode(*step, window=16, gate=extra["gate"], scale=0.1)
        assert same_bits(compiled(step, extra["gate"], splits, pack), expected)


LAYOUTS = {
    "pages block kv_heads dim": None,
    "pages kv_heads block dim": None,
    "kv pages block kv_heads dim": None,
    "pages kv_heads block (kv dim)": None,
    "layers pages kv_heads block (kv dim)": 1,
    "pages layers kv block kv_heads dim": 2,
    "pages layers block kv_heads dim": 0,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_decode_sees_the_append_before_it(layout, dynamic):
    layer = LAYOUTS[layout]

    def model_step(step, key, value, slots):
        append(step[1], key, value, slots, layer=layer)
        out = swa_decode(*step, window=16, layer=layer)
        append(step[1], value, key, slots - 1, layer=layer)
        return out, swa_decode(*step, window=16, layer=layer)

    compiled = torch.compile(model_step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for lengths in [(20, 5, 0, 33), (7, 9, 11)]:
        results = []
        for function in (compiled, model_step):
            step = make_step(lengths, layout=layout, layers=None if layer is None else 3)
            before = [base.clone() for base in step.cache.bases]
            last = step.seq_lens.long() - 1
            pages = step.block_table.gather(1, (last.clamp(min=0) // 16)[:, None])[:, 0].long()
            slots = torch.where(last < 0, -1, pages * 16 + last % 16)
            rows = normal(len(lengths), 2, 64, seed=4), normal(len(lengths), 2, 64, seed=5)
            outs = function(tuple(step), *rows, slots)
            assert not torch.equal(*outs)
            assert not any(torch.equal(base, old) for base, old in zip(step.cache.bases, before, strict=True))
            results.append((*outs, *step.cache.bases))
        assert same_bits(*results)


def test_compiled_append_of_a_quantised_cache():
    def quantised(cache, key, value, slots, k_scale):
        append(cache, key, value, slots, k_scale=k_scale, v_scale=0.25)

    rows = normal(4, 2, 64, seed=4), normal(4, 2, 64, seed=5)
    bases = []
    for function in (torch.compile(quantised, fullgraph=True, backend="aot_eager"), quantised):
        base = torch.zeros(3, 2, 16, 128, dtype=torch.float8_e4m3fn)
        cache = PagedCache(base, "pages kv_heads block (kv dim)")
        function(cache, *rows, torch.tensor([3, 40, 17]), torch.tensor([0.5, 2.0]))
        bases.append(base)
    assert same_bits(*bases)
    assert bases[0].view(torch.uint8).any()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_merge_states(dynamic):
    def merge(outs, lses, sinks, gate):
        return merge_states(outs, lses, sinks=sinks, gate=gate, out_dtype=torch.bfloat16)

    compiled = torch.compile(merge, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (3, 5):
        arguments = normal(2, tokens, 8, 64), normal(2, tokens, 8), normal(8), normal(tokens, 8)
        assert same_bits(compiled(*arguments), merge(*arguments))


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="needs a C++ compiler, for inductor's own code"
)
def test_inductor_compiles_a_model_step():
    def model_step(step, key, value, slots, gate):
        query = torch.sin(step[0]) * 2
        append(step[1], key * 2, value + 1, slots)
        out, lse = swa_decode(query, *step[1:], window=16, gate=gate, return_lse=True)
        merged, _ = merge_states(torch.stack([out, out]), torch.stack([lse, lse]))
        return torch.cos(merged)

    results = []
    for function in (torch.compile(model_step, fullgraph=True, dynamic=True), model_step):
        step = make_step(layout="pages kv_heads block (kv dim)")
        rows = normal(4, 2, 64, seed=4), normal(4, 2, 64, seed=5)
        out = function(tuple(step), *rows, torch.tensor([3, 40, 17, -1]), normal(4, 8, seed=6))
        results.append((out, *step.cache.bases))
    # The surrounding sines are inductor's own; the operators' share is exact.
    torch.testing.assert_close(results[0], results[1])


def test_export_keeps_one_operator():
    class Attention(torch.nn.Module):
        def forward(self, query, key_cache, value_cache, block_table, seq_lens):
            return swa_decode(query, (key_cache, value_cache), block_table, seq_lens, window=16)

    query, cache, table, lengths = make_step()
    arguments = (query, *cache.bases, table, lengths)
    requests = torch.export.Dim("requests", min=2, max=256)
    shapes = ({0: requests}, None, None, {0: requests}, {0: requests})
    program = torch.export.export(Attention(), arguments, dynamic_shapes=shapes)
    called = [node.target for node in program.graph.nodes if "swa_torch" in str(node.target)]
    assert called == [OPERATORS.decode.default]
    other = make_step((1, 2, 3, 4, 5, 6), seed=1)
    arguments = (other.query, *other.cache.bases, other.block_table, other.seq_lens)
    exported = torch.export.export(Attention(), arguments, dynamic_shapes=shapes).module()
    assert same_bits(exported(*arguments), swa_decode(*other, window=16))


# --- errors while tracing carry our message ---


def wrong_query_len(step):
    return swa_decode(*step, window=16, query_len=3)


def wrong_heads(step):
    return swa_decode(step[0][:, :7], *step[1:], window=16)


def wrong_gate(step):
    return swa_decode(*step, window=16, gate=step[0][:, :2, 0])


def wrong_out(step):
    return swa_decode(*step, window=16, out=step[0].new_empty(1, 8, 64))


def wrong_lengths(step):
    return swa_decode(*step[:3], step[3][1:], window=16)


def wrong_cache_dtype(step):
    return swa_decode(step[0].half(), *step[1:], window=16)


def wrong_window(step):
    return swa_decode(*step, window=0)


def wrong_validate(step):
    return swa_decode(*step, window=16, validate=True)


def wrong_append(step):
    append(step[1], step[0][:, :2], step[0][:, :3], step[3])


def wrong_merge(step):
    return merge_states(step[0][None], step[0][None, :, :2, 0])


TRACED_ERRORS = {
    wrong_query_len: r"query must have requests \* query_len = 4 \* 3 tokens .*got 4",
    wrong_heads: "heads must be a multiple of kv_heads, got heads=7 and kv_heads=2",
    wrong_gate: r"gate must have shape \[4, 8\], got \[4, 2\]",
    wrong_out: r"out(put)? must have shape \[4, 8, 64\], got \[1, 8, 64\]",
    wrong_lengths: r"seq_lens must have shape \[4\], got \[3\]",
    wrong_cache_dtype: "key_cache must have the query's dtype float16 .*got float32",
    wrong_window: "window must be at least 1 .*got 0",
    wrong_validate: r"validate must be False while compiling .*check_inputs\(\.\.\.\).*got validate=True",
    wrong_append: r"value must have shape \[rows, 2, 64\], got \[4, 3, 64\]",
    wrong_merge: r"lses must have shape \[1, 4, 8\], got \[1, 4, 2\]",
}


@pytest.mark.parametrize("function", TRACED_ERRORS, ids=lambda function: function.__name__)
def test_errors_while_tracing_carry_our_message(function):
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=TRACED_ERRORS[function]):
        compiled(tuple(make_step()))


def test_a_plan_for_another_problem_is_refused_while_running_compiled_code():
    step, _ = step_and_extra((20, 5, 0, 33))
    plan = plan_for(*step[:3], window=17)
    compiled = torch.compile(lambda step: swa_decode(*step, window=16, plan=plan), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="plan was made for window=17, got 16"):
        compiled(step)


@pytest.mark.parametrize(
    ("size", "offset", "rule"), [(64, 0, "at least plan.workspace_bytes = "), (1 << 16, 8, "16-byte aligned")]
)
def test_a_wrong_workspace_is_refused_while_running_compiled_code(size, offset, rule):
    step, _ = step_and_extra((20, 5, 0, 33))
    plan = replace(plan_for(*step[:3], window=16), splits=4)
    whole = torch.empty(size + 512, dtype=torch.uint8)
    start = -whole.data_ptr() % 256 + offset
    compiled = torch.compile(
        lambda step, workspace, out: swa_decode(*step, window=16, plan=plan, workspace=workspace, out=out),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    out = torch.full_like(step[0], 7.0)
    with pytest.raises(ValueError, match=rule):
        compiled(step, whole[start : start + size], out)
    assert (out == 7.0).all()
