"""Batch-invariant plans: a request's bits depend on the request alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from swa_pallas import PagedCache, plan_for, swa_decode
from tests.jax.helpers import make_step, normal, same_bits

# Interpreted kernels are slow, and the contract suite and the known failures of kind 12 run them with such plans.
pytestmark = pytest.mark.parametrize("backend", ["xla"])

# Around the sizes at which compilers change their mind.
SIZES = {"xla": (1, 2, 3, 8, 33)}
LENGTHS = (300, 0, 384, 129, 1, 100, 128, 255, 256, 383)
WINDOWS = [200, None]


def make_requests(requests, **fields):
    """Return a step of requests of many lengths."""
    fields = {"max_blocks": 24, "heads": 8, "kv_heads": 1, "dtype": "bfloat16", **fields}
    return make_step(tuple(LENGTHS[request % len(LENGTHS)] for request in range(requests)), **fields)


def chosen(step, requests):
    """Return the arguments of some of the requests, of one row each, in this order."""
    requests = np.asarray(requests)
    return step.query[requests], step.cache, step.block_table[requests], step.seq_lens[requests]


def decode(arguments, backend, window=200, **options):
    return swa_decode(*arguments, window=window, batch_invariant=True, backend=backend, **options)


@pytest.mark.parametrize("window", WINDOWS)
def test_batch_size_and_position(window, backend):
    largest = SIZES[backend][-1]
    step = make_requests(largest)
    gate = normal(largest, 8, seed=3)

    def answers(requests):
        return decode(chosen(step, requests), backend, window, gate=gate[np.asarray(requests)], return_lse=True)

    alone = [answers([request]) for request in range(largest)]
    expected = tuple(jnp.concatenate(parts) for parts in zip(*alone, strict=True))
    random = np.random.default_rng(1)
    for size in SIZES[backend]:
        order = random.permutation(largest)[:size]
        assert same_bits(answers(order), tuple(part[order] for part in expected)), size


def test_one_plan_for_every_size(backend):
    sizes = SIZES[backend]
    step = make_requests(sizes[-1])
    plan = plan_for(*step[:3], window=200, batch_invariant=True, max_requests=4096, backend=backend)
    assert plan.splits > 1
    whole = swa_decode(*step, window=200, plan=plan)
    for size in sizes:
        batch = chosen(step, range(size))
        assert same_bits(swa_decode(*batch, window=200, plan=plan), whole[:size]), size
        assert same_bits(decode(batch, backend), whole[:size]), size


def test_neighbours_and_padding_requests(backend):
    step = make_requests(3)
    lengths = step.seq_lens.at[1].set(300)
    expected = decode(chosen(step._replace(seq_lens=lengths), [1]), backend)
    others = np.array([0, 2])
    for neighbour in (0, -5, 384):
        table = step.block_table.at[others].set(-1) if neighbour <= 0 else step.block_table
        query = step.query.at[others].set(jnp.nan)
        out = decode((query, step.cache, table, lengths.at[others].set(neighbour)), backend)
        assert same_bits(out[1:2], expected), neighbour


def test_padding_tokens_of_a_ragged_batch(backend):
    step = make_requests(2)
    expected = decode(step, backend)
    padded = jnp.concatenate([step.query, jnp.full((5, 8, 32), jnp.nan, jnp.bfloat16)])
    edges = jnp.arange(3, dtype=jnp.int32)
    out = decode((padded, *step[1:]), backend, cu_query_lens=edges)
    assert same_bits(out[:2], expected)
    assert (out[2:] == 0).all()


def test_pages_may_lie_anywhere(backend):
    step = make_requests(3)
    moved = np.random.default_rng(2).permutation(step.cache.pages)
    bases = tuple(jnp.zeros_like(base).at[moved].set(base) for base in step.cache.bases)
    table = jnp.asarray(moved.astype(np.int32))[step.block_table]
    out = decode((step.query, PagedCache(bases, step.cache.layout), table, step.seq_lens), backend)
    assert same_bits(out, decode(step, backend))


@pytest.mark.parametrize("window", WINDOWS)
def test_narrower_tables_of_one_plan(window, backend):
    step = make_requests(5)._replace(seq_lens=jnp.array([90, 1, 0, 96, 33], jnp.int32))
    plan = plan_for(*step[:3], window=window, batch_invariant=True, backend=backend)
    expected = swa_decode(*step, window=window, plan=plan)
    for columns in (6, 23):
        narrow = step._replace(block_table=step.block_table[:, :columns])
        assert same_bits(swa_decode(*narrow, window=window, plan=plan), expected), columns


# Groups of 8 and 16 fill a tile of 16 rows by two rows and by one; 5 leaves rows of it empty.
@pytest.mark.parametrize(("query_len", "group"), [(2, 5), (2, 8), (4, 8), (2, 16)])
@pytest.mark.parametrize("window", WINDOWS)
def test_plain_decode_and_verify_rows(window, query_len, group, backend):
    step = make_requests(4, heads=group, query_len=query_len)
    plan = plan_for(*step[:3], window=window, query_len=query_len, batch_invariant=True, backend=backend)
    assert plan.splits > 1
    verified = decode(step, backend, window, query_len=query_len, return_lse=True)
    for row in range(query_len):
        lengths = step.seq_lens - (query_len - 1 - row)
        plain = decode(
            (step.query[row::query_len], step.cache, step.block_table, lengths), backend, window, return_lse=True
        )
        assert same_bits(plain, tuple(part[row::query_len] for part in verified)), row


@pytest.mark.parametrize("bound", [1, 3, 8])
def test_verify_rows_of_every_bound(bound, backend):
    """One row in a ragged batch of any bound equals the same row decoded alone."""
    step = make_requests(4)
    edges = jnp.arange(5, dtype=jnp.int32)
    assert same_bits(decode(step, backend, query_len=bound, cu_query_lens=edges), decode(step, backend))


def test_ragged_and_uniform_rows(backend):
    counts = (2, 0, 1, 3)
    step = make_step((150, 9, 384, 201), tokens=8, max_blocks=24, heads=8, kv_heads=1, dtype="bfloat16")
    edges = np.array([0, *np.cumsum(counts)], np.int32)
    ragged = decode(step, backend, query_len=3, cu_query_lens=jnp.asarray(edges))
    assert (ragged[6:] == 0).all()
    for request, count in enumerate(counts):
        if count:
            rows, own = slice(*edges[request : request + 2]), slice(request, request + 1)
            alone = (step.query[rows], step.cache, step.block_table[own], step.seq_lens[own])
            assert same_bits(ragged[rows], decode(alone, backend, query_len=count)), request


def test_repeats(backend):
    step = make_requests(3)
    first = decode(step, backend, return_lse=True)
    assert all(same_bits(first, decode(step, backend, return_lse=True)) for _ in range(3))
