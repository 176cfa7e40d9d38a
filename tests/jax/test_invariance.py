"""Batch-invariant plans: a request's bits depend on the request alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swa_pallas import PagedCache, plan_for, swa_decode
from tests.jax.helpers import BACKENDS, make_step, normal, same_bits

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

SIZES = {"xla": (1, 2, 3, 8, 17, 33), "interpret": (1, 2, 5)}
LENGTHS = (0, 1, 100, 128, 129, 255, 256, 300, 383, 384)
WINDOWS = [200, None]


@pytest.fixture(autouse=True)
def _quick_interpreter(backend):
    """Spare interpreted kernels XLA's slow optimisations: nobody runs them for their speed."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", before or backend == "interpret")
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def make_requests(requests, **fields):
    """Return a step of requests of many lengths."""
    fields = {"max_blocks": 24, "heads": 8, "kv_heads": 1, "dtype": "bfloat16", **fields}
    return make_step(tuple(LENGTHS[request % len(LENGTHS)] for request in range(requests)), **fields)


def take(step, requests, query_len=1):
    """Return a step of some of the requests."""
    rows = (np.asarray(requests)[:, None] * query_len + np.arange(query_len)).reshape(-1)
    return step.query[rows], step.cache, step.block_table[requests], step.seq_lens[requests]


@pytest.mark.parametrize("window", WINDOWS)
def test_batch_size_and_position(window, backend):
    largest = SIZES[backend][-1]
    step, gate = make_requests(largest), normal(largest, 8, seed=3)
    options = {"window": window, "batch_invariant": True, "return_lse": True, "backend": backend}
    plan = plan_for(*step[:3], window=window, batch_invariant=True, backend=backend, max_requests=1)
    assert backend == "xla" or plan.splits > 1
    alone = [
        swa_decode(*take(step, np.array([request])), gate=gate[request : request + 1], **options)
        for request in range(largest)
    ]
    expected = tuple(jnp.concatenate(parts) for parts in zip(*alone, strict=True))
    rng = np.random.default_rng(1)
    for size in SIZES[backend]:
        order = rng.permutation(largest)[:size]
        batch = swa_decode(*take(step, order), gate=gate[order], **options)
        assert same_bits(batch, tuple(part[order] for part in expected)), size


def test_one_plan_for_every_size(backend):
    largest = SIZES[backend][-1]
    step = make_requests(largest)
    plan = plan_for(*step[:3], window=200, batch_invariant=True, max_requests=4096, backend=backend)
    whole = swa_decode(*step, window=200, plan=plan)
    for size in SIZES[backend]:
        batch = take(step, np.arange(size))
        assert same_bits(swa_decode(*batch, window=200, plan=plan), whole[:size]), size
        assert same_bits(swa_decode(*batch, window=200, batch_invariant=True, backend=backend), whole[:size]), size


def test_neighbours_and_padding_requests(backend):
    step = make_requests(3)
    request, length = 1, 300
    step = step._replace(seq_lens=step.seq_lens.at[request].set(length))
    options = {"window": 200, "batch_invariant": True, "backend": backend}
    expected = swa_decode(*take(step, np.array([request])), **options)
    others = jnp.array([0, 2])
    for neighbour in (0, -5, 384):
        query, table = step.query.at[others].set(jnp.nan), step.block_table
        if neighbour <= 0:
            table = table.at[others].set(-1)
        lengths = jnp.full_like(step.seq_lens, neighbour).at[request].set(length)
        out = swa_decode(query, step.cache, table, lengths, **options)
        assert same_bits(out[request : request + 1], expected), neighbour


def test_pages_may_lie_anywhere(backend):
    step = make_requests(2)
    moved = np.random.default_rng(2).permutation(step.cache.pages)
    bases = tuple(jnp.zeros_like(base).at[moved].set(base) for base in step.cache.bases)
    table = jnp.asarray(moved.astype(np.int32))[step.block_table]
    options = {"window": 200, "batch_invariant": True, "backend": backend}
    out = swa_decode(step.query, PagedCache(bases, step.cache.layout), table, step.seq_lens, **options)
    assert same_bits(out, swa_decode(*step, **options))


@pytest.mark.parametrize("window", WINDOWS)
def test_narrower_tables_of_one_plan(window, backend):
    step = make_requests(5)._replace(seq_lens=jnp.array([90, 1, 0, 96, 33]))
    plan = plan_for(*step[:3], window=window, batch_invariant=True, backend=backend)
    expected = swa_decode(*step, window=window, plan=plan)
    for columns in (6, 23):
        narrow = step._replace(block_table=step.block_table[:, :columns])
        assert same_bits(swa_decode(*narrow, window=window, plan=plan), expected), columns


# A group of 8 fills a tile of 16 rows by two rows, 16 by one; 5 leaves rows of it empty.
@pytest.mark.parametrize("group", [5, 8, 16])
@pytest.mark.parametrize("query_len", [2, 4])
@pytest.mark.parametrize("window", WINDOWS)
def test_plain_decode_and_verify_rows(window, query_len, group, backend):
    step = make_requests(3 if backend == "interpret" else 10, heads=group, query_len=query_len)
    options = {"window": window, "batch_invariant": True, "return_lse": True, "backend": backend}
    verified = swa_decode(*step, query_len=query_len, **options)
    for row in range(query_len):
        plain = swa_decode(
            step.query[row::query_len], step.cache, step.block_table, step.seq_lens - (query_len - 1 - row), **options
        )
        assert same_bits(plain, tuple(part[row::query_len] for part in verified)), row


@pytest.mark.parametrize("bound", [1, 3])
def test_verify_rows_of_every_bound(bound, backend):
    """One row in a ragged batch of any bound equals the same row decoded alone."""
    step = make_requests(4)
    options = {"window": 200, "batch_invariant": True, "backend": backend}
    ragged = swa_decode(*step, query_len=bound, cu_query_lens=jnp.arange(5, dtype=jnp.int32), **options)
    assert same_bits(ragged, swa_decode(*step, **options))


def test_ragged_and_uniform_rows(backend):
    counts = (2, 0, 1, 3)
    edges = np.array([0, 2, 2, 3, 6], np.int32)
    step = make_step((150, 9, 384, 201), tokens=8, max_blocks=24, heads=8, kv_heads=1, dtype="bfloat16")
    options = {"window": 200, "batch_invariant": True, "backend": backend}
    ragged = swa_decode(*step, query_len=3, cu_query_lens=jnp.asarray(edges), **options)
    assert not np.asarray(ragged[6:]).any()
    for request, count in enumerate(counts):
        if count:
            rows = slice(edges[request], edges[request] + count)
            one = slice(request, request + 1)
            uniform = swa_decode(
                step.query[rows], step.cache, step.block_table[one], step.seq_lens[one], query_len=count, **options
            )
            assert same_bits(ragged[rows], uniform), request


def test_jitted_and_eager_calls(backend):
    step = make_requests(3)
    options = {"window": 200, "batch_invariant": True, "backend": backend}
    first = swa_decode(*step, **options)
    assert all(same_bits(first, swa_decode(*step, **options)) for _ in range(3))
    assert same_bits(first, jax.jit(lambda step: swa_decode(*step, **options))(step))
