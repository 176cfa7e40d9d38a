"""Continuous batching: every visible key has a page of its own request, and nothing else has one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge._replay import PagePool, Request
from bridge._replay.batching import Batch, bucket_size, pages_per_request


@given(
    window=st.integers(1, 40) | st.none(),
    query_len=st.integers(1, 5),
    block=st.sampled_from([1, 3, 8, 16]),
    lengths=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=8),
    max_batch=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_pages_follow_the_windows(window, query_len, block, lengths, max_batch, seed):
    random = np.random.default_rng(seed)
    requests = [Request(number, 0.0, *length) for number, length in enumerate(lengths)]
    max_blocks = -(-(max(r.total for r in requests) + query_len) // block)
    each = pages_per_request(window, query_len, block, max_blocks)
    pool = PagePool(max_batch * each)
    batch = Batch(pool, max_batch=max_batch, max_blocks=max_blocks, block=block, window=window, query_len=query_len)
    content: dict[int, tuple[int, int]] = {}  # slot -> (request, position)
    seen, finished = {}, 0
    while requests or batch.running:
        while requests and not batch.full:
            request = requests.pop(0)
            slots = batch.admit(request)
            content |= {int(s): (request.number, request.context - len(slots) + i) for i, s in enumerate(slots)}
        batch.extend()
        bucket = bucket_size(len(batch.running), max_batch)
        slots, seq_lens = batch.slot_mapping(bucket).reshape(bucket, query_len), batch.seq_lens(bucket)
        assert (slots[len(batch.running) :] == -1).all()
        assert (seq_lens[len(batch.running) :] == 0).all()
        for row, entry in enumerate(batch.running):
            content |= {int(s): (entry.request.number, entry.length + i) for i, s in enumerate(slots[row])}
            first = 0 if window is None else max(0, entry.length - window + 1)
            for position in range(first, seq_lens[row]):
                page = batch.table[row, position // block]
                assert page >= 0
                assert content[page * block + position % block] == (entry.request.number, position)
            assert (batch.table[row] >= 0).sum() <= each
        live = batch.table[batch.table >= 0]
        assert len(np.unique(live)) == len(live) == pool.used
        assert (batch.table[len(batch.running) :] == -1).all()
        done, freed = batch.accept(random.integers(1, query_len + 1, size=len(batch.running)))
        finished += len(done)
        for page in freed:
            content = {slot: owner for slot, owner in content.items() if slot // block != page}
        for entry in batch.running:
            assert entry.remaining > 0
            assert entry.length == entry.request.context + entry.generated
            assert entry.generated > seen.get(entry.request.number, 0)
            seen[entry.request.number] = entry.generated
    assert finished == len(lengths)
    assert pool.used == 0
    assert (batch.table == -1).all()


def test_a_full_window_needs_the_pages_it_straddles():
    assert pages_per_request(512, 1, 64, 1000) == 9  # 512 keys that start at a page's second slot
    assert pages_per_request(512, 4, 64, 1000) == 10  # 515 keys that start at a page's last slot
    assert pages_per_request(1, 1, 64, 1000) == 1
    assert pages_per_request(5, 1, 1, 1000) == 5
    assert pages_per_request(512, 1, 64, 3) == 3
    assert pages_per_request(None, 1, 64, 7) == 7


@pytest.mark.parametrize(
    "requests, bucket", [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (17, 24), (100, 104), (250, 250)]
)
def test_buckets(requests, bucket):
    assert bucket_size(requests, 250) == bucket
