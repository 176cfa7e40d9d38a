"""The page pool: no page has two owners, none is lost, and the one freed last comes back first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge._replay import OutOfPagesError, PagePool


@given(pages=st.integers(0, 12), actions=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_every_page_is_free_or_owned_once(pages, actions):
    pool, owned, peak = PagePool(pages), [], 0
    for allocates, count in actions:
        if allocates and count <= pages - len(owned):
            owned += pool.allocate(count)
        elif allocates:
            with pytest.raises(OutOfPagesError, match=f"{count} pages asked for"):
                pool.allocate(count)
        else:
            returned, owned = owned[:count], owned[count:]
            pool.free(returned)
        peak = max(peak, len(owned))
        assert len(set(owned)) == len(owned)
        assert set(owned) <= set(range(pages))
        assert (pool.used, pool.free_pages, pool.peak) == (len(owned), pages - len(owned), peak)


def test_the_page_freed_last_is_reused_first():
    pool = PagePool(8)
    first = pool.allocate(3)
    pool.free([first[1]])
    assert pool.allocate(1) == [first[1]]
    assert pool.reused == 1


def test_pages_never_needed_stay_untouched():
    pool = PagePool(100)
    for _ in range(50):
        pool.free(pool.allocate(3))
    assert (pool.peak, pool.reused) == (3, 147)


@pytest.mark.parametrize(
    "pages, message",
    [([0], "page 0 is freed twice"), ([7], r"in \[0, 4\), got 7"), ([-1], "got -1"), ([1, 1], "named once")],
)
def test_a_bad_free_changes_nothing(pages, message):
    pool = PagePool(4)
    pool.allocate(2)
    pool.free([0])
    with pytest.raises(ValueError, match=message):
        pool.free([1, *pages] if pages != [1, 1] else pages)
    assert pool.used == 1
    pool.free([1])


def test_a_failed_allocation_takes_nothing():
    pool = PagePool(2)
    with pytest.raises(OutOfPagesError):
        pool.allocate(3)
    assert pool.free_pages == 2


def test_negative_counts_are_refused():
    with pytest.raises(ValueError, match="pages must be at least 0, got -1"):
        PagePool(-1)
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        PagePool(1).allocate(-1)
