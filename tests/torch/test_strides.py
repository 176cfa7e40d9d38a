"""Any strides with a unit last one: the same bits as contiguous arguments, over every backend present."""

from dataclasses import replace

import pytest
import torch

from swa_torch import PagedCache, plan_for, swa_decode
from tests.contract.torch_runner import BACKENDS, device_of
from tests.torch.helpers import make_step, normal, same_bits

pytestmark = [pytest.mark.parametrize("backend", BACKENDS), pytest.mark.parametrize("splits", [1, 3])]

TOKENS, HEADS, KV_HEADS, DIM = 4, 8, 2, 64
FILLER = 7.0


@pytest.fixture
def step(backend):
    return make_step((20, 5, 0, 33), device=device_of(backend))


@pytest.fixture
def decode(step, backend, splits):
    """Decode the step with some arguments changed, every time with the same plan."""
    plan = replace(plan_for(*step[:3], window=16, backend=backend), splits=splits)

    def call(**changed):
        arguments = {**step._asdict(), "window": 16, "plan": plan, **changed}
        return swa_decode(
            arguments.pop("query"), arguments.pop("cache"), arguments.pop("block_table"), arguments.pop("seq_lens"),
            **arguments,
        )  # fmt: skip

    return call


def wide(tensor, extra, fill):
    """Return the same values as the left columns of a wider buffer."""
    buffer = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + extra), fill)
    buffer[..., : tensor.shape[-1]] = tensor
    return buffer[..., : tensor.shape[-1]]


def every_other_row(tensor, fill):
    """Return the same values as every second row of a longer buffer."""
    buffer = tensor.new_full((2 * tensor.shape[0], *tensor.shape[1:]), fill)
    buffer[::2] = tensor
    return buffer[::2]


def test_query_sliced_from_a_fused_projection(step, decode):
    columns = (HEADS + 2 * KV_HEADS) * DIM
    fused = torch.full((TOKENS, columns), torch.nan, device=step.query.device)
    fused[:, : HEADS * DIM] = step.query.flatten(1)
    query = fused[:, : HEADS * DIM].view(TOKENS, HEADS, DIM)
    assert not query.is_contiguous()
    assert same_bits(decode(query=query), decode())


def test_query_with_heads_outside_tokens(step, decode):
    query = step.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert query.stride() == (DIM, TOKENS * DIM, 1)
    assert same_bits(decode(query=query), decode())


def test_query_with_a_gate_between_its_heads(step, decode):
    query = wide(step.query, 16, torch.nan)
    assert same_bits(decode(query=query), decode())


def test_expanded_query(step, decode):
    query = step.query[:1].expand(TOKENS, -1, -1)
    assert same_bits(decode(query=query), decode(query=query.contiguous()))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_column_and_row_sliced_tables(step, decode, index_dtype):
    table = step.block_table.to(index_dtype)
    columns, rows = wide(table, 5, -1), every_other_row(table, -1)
    both = every_other_row(wide(table, 5, -1), -1)
    expected = decode(block_table=table)
    for sliced in (columns, rows, both):
        assert same_bits(decode(block_table=sliced), expected)
    assert same_bits(expected, decode())


def test_sliced_lengths_and_ranges(step, decode):
    lengths = torch.cat([step.seq_lens.new_full((3,), 99), step.seq_lens])[3:]
    starts = (step.seq_lens // 2).long()
    expected = decode(kv_start=starts, kv_end=step.seq_lens)
    shifted = torch.cat([starts.new_full((1,), -5), starts])[1:]
    assert same_bits(decode(seq_lens=lengths, kv_start=shifted, kv_end=lengths), expected)
    assert same_bits(decode(seq_lens=lengths), decode())


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.float16])
def test_gates_of_any_strides(step, decode, gate_dtype):
    gate = normal(TOKENS, HEADS).to(step.query.device, gate_dtype)
    expected = decode(gate=gate)
    transposed = gate.t().contiguous().t()
    spread = gate.new_full((TOKENS, 2 * HEADS), torch.nan)
    spread[:, ::2] = gate
    for strided in (transposed, spread[:, ::2], wide(gate, 3, torch.nan), every_other_row(gate, torch.nan)):
        assert not strided.is_contiguous()
        assert same_bits(decode(gate=strided), expected)


def test_expanded_gates(step, decode):
    gate = normal(TOKENS, HEADS).to(step.query.device)
    for expanded in (gate[:, :1].expand(-1, HEADS), gate[:1].expand(TOKENS, -1), gate[:1, :1].expand(TOKENS, HEADS)):
        assert same_bits(decode(gate=expanded), decode(gate=expanded.contiguous()))


def test_padded_pages_slots_and_heads(step, decode):
    expected = decode()
    keys, values = step.cache.bases
    padded_pages = [wide(base.flatten(1), 48, torch.nan).unflatten(1, base.shape[1:]) for base in (keys, values)]
    padded_heads = [wide(base, 16, torch.nan) for base in (keys, values)]
    every_other_page = [every_other_row(base, torch.nan) for base in (keys, values)]
    heads_first = [base.transpose(1, 2).contiguous().transpose(1, 2) for base in (keys, values)]
    for cache in (padded_pages, padded_heads, every_other_page, heads_first):
        assert not cache[0].is_contiguous()
        assert same_bits(decode(cache=tuple(cache)), expected)
    # Keys and values need not be strided alike.
    assert same_bits(decode(cache=(padded_pages[0], heads_first[1])), expected)


@pytest.mark.parametrize(
    "layout",
    ["pages kv_heads block (kv dim)", "layers pages kv block kv_heads dim", "pages layers block kv_heads (kv dim)"],
)
def test_every_layout_gives_the_same_bits(step, decode, layout):
    layers = 3 if "layers" in layout else None
    layer = 1 if layers else None
    cache = PagedCache.empty(
        layout, pages=step.cache.pages, block=16, kv_heads=KV_HEADS, k_dim=DIM, layers=layers, dtype=torch.float32,
        device=step.query.device,
    )  # fmt: skip
    cache.bases[0].fill_(torch.nan)
    for view, values in zip(cache.views(layer), step.cache.bases, strict=True):
        view.copy_(values)
    assert same_bits(decode(cache=cache, layer=layer), decode())


def test_output_slices_leave_their_neighbours_untouched(step, decode):
    expected = decode()
    device = step.query.device
    columns = torch.full((TOKENS, HEADS * DIM + 32), FILLER, device=device)
    between = torch.full((TOKENS, HEADS, DIM + 16), FILLER, device=device)
    rows = torch.full((2 * TOKENS, HEADS, DIM), FILLER, device=device)
    heads_first = torch.full((HEADS, TOKENS + 1, DIM), FILLER, device=device)
    outs = (
        (columns, columns[:, 16 : 16 + HEADS * DIM].view(TOKENS, HEADS, DIM)),
        (between, between[..., :DIM]),
        (rows, rows[::2]),
        (heads_first, heads_first[:, :TOKENS].transpose(0, 1)),
    )
    for buffer, out in outs:
        assert decode(out=out) is out
        assert same_bits(out.contiguous(), expected)
        out.fill_(FILLER)
        assert (buffer == FILLER).all(), "memory beside the output was written"


def test_output_beside_its_query(step, decode):
    fused = torch.full((TOKENS, 3, HEADS, DIM), FILLER, device=step.query.device)
    fused[:, 1] = step.query
    assert same_bits(decode(query=fused[:, 1], out=fused[:, 0]).contiguous(), decode())
    assert same_bits(fused[:, 1].contiguous(), step.query)
    assert (fused[:, 2] == FILLER).all()


def test_everything_at_once(step, decode):
    gate = normal(TOKENS, HEADS).to(step.query.device)
    sinks = normal(HEADS, seed=1).to(step.query.device)
    expected = decode(gate=gate, sinks=sinks, return_lse=True)
    out = torch.full((TOKENS, HEADS, DIM + 16), FILLER, device=step.query.device)
    actual = decode(
        query=wide(step.query, 32, torch.nan), block_table=wide(step.block_table, 2, -1),
        gate=gate.t().contiguous().t(),
        cache=tuple(wide(base, 16, torch.nan) for base in step.cache.bases), sinks=sinks, return_lse=True,
        out=out[..., :DIM],
    )  # fmt: skip
    assert same_bits((actual[0].contiguous(), actual[1]), expected)
