"""Batch-invariant plans: a request's bits depend on the request alone."""

import pytest
import torch

from swa_torch import PagedCache, plan_for, swa_decode
from tests.contract.torch_runner import BACKENDS, INTERPRETED, device_of
from tests.torch.helpers import make_step, normal, same_bits

# Around the sizes at which planners change their mind: powers of two, multiples of 16 and their neighbours.
SIZES = {
    "interpret": (1, 2, 3),
    "cpu": (1, 2, 3, 8, 33, 257),
    "triton": (*range(1, 36), 47, 48, 49, 63, 64, 65, 96, 127, 128, 129, 130, 192, 255, 256, 257),
}
# The Hopper kernel hands such plans over to the portable one.
pytestmark = pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "gluon"])

LENGTHS = (0, 1, 100, 128, 129, 255, 256, 300, 383, 384)
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
WINDOWS = [200, None]


def make_requests(backend, requests, **fields):
    """Return a step of requests of many lengths, in the backend's home."""
    fields = {"max_blocks": 24, "heads": 8, "kv_heads": 1, "dtype": DTYPE, "device": device_of(backend), **fields}
    lengths = [LENGTHS[request % len(LENGTHS)] for request in range(requests)]
    return make_step(lengths, **fields)


def rows_of(step, request, query_len=1):
    return slice(request * query_len, (request + 1) * query_len)


def one(step, request, query_len=1):
    """Return a step of one of the requests."""
    return (
        step.query[rows_of(step, request, query_len)], step.cache, step.block_table[request : request + 1],
        step.seq_lens[request : request + 1],
    )  # fmt: skip


@pytest.mark.parametrize("window", WINDOWS)
def test_batch_size_and_position(window, backend):
    largest = SIZES[backend][-1]
    step = make_requests(backend, largest)
    gate = normal(largest, 8, seed=3).to(step.query.device)
    options = {"window": window, "batch_invariant": True, "return_lse": True}
    alone = [swa_decode(*one(step, request), gate=gate[request : request + 1], **options) for request in range(largest)]
    expected = tuple(torch.cat(parts) for parts in zip(*alone, strict=True))
    generator = torch.Generator().manual_seed(1)
    for size in SIZES[backend]:
        order = torch.randperm(largest, generator=generator)[:size].to(step.query.device)
        batch = swa_decode(
            step.query[order], step.cache, step.block_table[order], step.seq_lens[order], gate=gate[order], **options
        )
        assert same_bits(batch, tuple(part[order] for part in expected)), size


def test_one_plan_for_every_size(backend):
    largest = SIZES[backend][-1]
    step = make_requests(backend, largest)
    plan = plan_for(*step[:3], window=200, batch_invariant=True, max_requests=4096)
    assert plan.splits > 1
    whole = swa_decode(*step, window=200, plan=plan)
    for size in SIZES[backend]:
        batch = (step.query[:size], step.cache, step.block_table[:size], step.seq_lens[:size])
        assert same_bits(swa_decode(*batch, window=200, plan=plan), whole[:size]), size
        assert same_bits(swa_decode(*batch, window=200, batch_invariant=True), whole[:size]), size


def test_neighbours_and_padding_requests(backend):
    step = make_requests(backend, 3)
    request, length = 1, 300
    step.seq_lens[request] = length
    expected = swa_decode(*one(step, request), window=200, batch_invariant=True)
    for neighbour in (0, -5, 384):
        query, table = step.query.clone(), step.block_table.clone()
        query[[0, 2]] = torch.nan
        if neighbour <= 0:
            table[[0, 2]] = -1
        lengths = torch.full_like(step.seq_lens, neighbour)
        lengths[request] = length
        out = swa_decode(query, step.cache, table, lengths, window=200, batch_invariant=True)
        assert same_bits(out[request : request + 1], expected)


def test_pages_may_lie_anywhere(backend):
    step = make_requests(backend, 2)
    moved = torch.randperm(step.cache.pages, generator=torch.Generator().manual_seed(2)).to(step.query.device)
    bases = tuple(torch.empty_like(base) for base in step.cache.bases)
    for base, old in zip(bases, step.cache.bases, strict=True):
        base[moved] = old
    table = moved[step.block_table.long()].int()
    out = swa_decode(
        step.query, PagedCache(bases, step.cache.layout), table, step.seq_lens, window=200, batch_invariant=True
    )
    assert same_bits(out, swa_decode(*step, window=200, batch_invariant=True))


@pytest.mark.parametrize("window", WINDOWS)
def test_narrower_tables_of_one_plan(window, backend):
    step = make_requests(backend, 5)
    step.seq_lens.copy_(torch.tensor([90, 1, 0, 96, 33]))
    plan = plan_for(*step[:3], window=window, batch_invariant=True)
    expected = swa_decode(*step, window=window, plan=plan)
    for columns in (6, 7, 23):
        narrow = step.block_table[:, :columns]
        assert same_bits(swa_decode(step.query, step.cache, narrow, step.seq_lens, window=window, plan=plan), expected)


# Groups of 8 and 16 fill a tile of 16 rows by two rows and by one; 5 leaves rows of it empty.
@pytest.mark.parametrize("group", [5, 8, 16])
@pytest.mark.parametrize("query_len", [2, 4])
@pytest.mark.parametrize("window", WINDOWS)
def test_plain_decode_and_verify_rows(window, query_len, group, backend):
    requests = 3 if INTERPRETED else 10
    step = make_requests(backend, requests, heads=group, query_len=query_len)
    options = {"window": window, "batch_invariant": True, "return_lse": True}
    plan = plan_for(*step[:3], window=window, query_len=query_len, batch_invariant=True)
    assert plan.splits > 1
    verified = swa_decode(*step, query_len=query_len, **options)
    for row in range(query_len):
        lengths = step.seq_lens - (query_len - 1 - row)
        plain = swa_decode(step.query[row::query_len], step.cache, step.block_table, lengths, **options)
        assert same_bits(plain, tuple(part[row::query_len].contiguous() for part in verified)), row


@pytest.mark.parametrize("bound", [1, 3, 8])
def test_verify_rows_of_every_bound(bound, backend):
    """One row in a ragged batch of any bound equals the same row decoded alone."""
    step = make_requests(backend, 4)
    expected = swa_decode(*step, window=200, batch_invariant=True)
    edges = torch.arange(5, dtype=torch.int32, device=step.query.device)
    ragged = swa_decode(*step, window=200, batch_invariant=True, query_len=bound, cu_query_lens=edges)
    assert same_bits(ragged, expected)


def test_ragged_and_uniform_rows(backend):
    counts = (2, 0, 1, 3)
    device = device_of(backend)
    step = make_step((150, 9, 384, 201), tokens=8, max_blocks=24, heads=8, kv_heads=1, dtype=DTYPE, device=device)
    edges = torch.tensor([0, 2, 2, 3, 6], dtype=torch.int32, device=device)
    ragged = swa_decode(*step, window=200, batch_invariant=True, query_len=3, cu_query_lens=edges)
    assert (ragged[6:] == 0).all()
    for request, count in enumerate(counts):
        if count:
            first = int(edges[request])
            _, cache, table, lengths = one(step, request)
            uniform = swa_decode(
                step.query[first : first + count],
                cache,
                table,
                lengths,
                window=200,
                batch_invariant=True,
                query_len=count,
            )
            assert same_bits(ragged[first : first + count], uniform), request


def test_repeats(backend):
    step = make_requests(backend, 3)
    first = swa_decode(*step, window=200, batch_invariant=True)
    assert all(same_bits(first, swa_decode(*step, window=200, batch_invariant=True)) for _ in range(3))
