"""The read cache: whole blocks, a limit that holds, the least recently used dropped first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.ledger.cache import BLOCK_ENTRIES, EntryCache

LARGE = 10**9


def payloads(first: int, count: int, ledger_id: int = 1) -> list[bytes]:
    return [b"%d:%d" % (ledger_id, n) for n in range(first, first + count)]


def cached(cache: EntryCache, ledger_id: int, first: int) -> list[bytes]:
    """What the cache has of the block in which an entry stands."""
    last = first + BLOCK_ENTRIES - 1 - first % BLOCK_ENTRIES
    return list(cache.get(ledger_id, first, last, LARGE))


def test_a_block_is_shared_from_any_of_its_entries() -> None:
    cache = EntryCache(LARGE)
    cache.add(1, 0, payloads(0, 2 * BLOCK_ENTRIES))
    assert list(cached(cache, 1, 0)) == payloads(0, BLOCK_ENTRIES)
    assert list(cached(cache, 1, 10)) == payloads(10, BLOCK_ENTRIES - 10)
    assert list(cached(cache, 1, BLOCK_ENTRIES)) == payloads(BLOCK_ENTRIES, BLOCK_ENTRIES)
    assert list(cached(cache, 1, 2 * BLOCK_ENTRIES)) == []
    assert list(cached(cache, 2, 0)) == []


def test_only_complete_aligned_blocks_are_kept() -> None:
    cache = EntryCache(LARGE)
    cache.add(1, 0, payloads(0, BLOCK_ENTRIES - 1))
    assert cache.bytes_used == 0
    cache.add(1, 5, payloads(5, 2 * BLOCK_ENTRIES))
    assert list(cached(cache, 1, 5)) == []
    assert list(cached(cache, 1, BLOCK_ENTRIES)) == payloads(BLOCK_ENTRIES, BLOCK_ENTRIES)
    assert list(cached(cache, 1, 2 * BLOCK_ENTRIES)) == []


def test_the_least_recently_used_block_goes_first() -> None:
    probe = EntryCache(LARGE)
    probe.add(1, 0, [bytes(100)] * BLOCK_ENTRIES)
    cache = EntryCache(2 * probe.bytes_used)
    for ledger_id in (1, 2):
        cache.add(ledger_id, 0, [bytes(100)] * BLOCK_ENTRIES)
    assert cached(cache, 1, 0)
    cache.add(3, 0, [bytes(100)] * BLOCK_ENTRIES)
    assert [bool(cached(cache, ledger_id, 0)) for ledger_id in (1, 2, 3)] == [True, False, True]


def test_dropping_a_ledger_frees_its_bytes() -> None:
    cache = EntryCache(LARGE)
    cache.add(1, 0, payloads(0, BLOCK_ENTRIES))
    alone = cache.bytes_used
    cache.add(2, 0, payloads(0, 3 * BLOCK_ENTRIES, 2))
    cache.drop(2)
    assert cache.bytes_used == alone
    assert not cached(cache, 2, 0)
    cache.drop(1)
    assert cache.bytes_used == 0


def test_a_block_larger_than_the_cache_is_not_kept() -> None:
    cache = EntryCache(1000)
    cache.add(1, 0, [bytes(100)] * BLOCK_ENTRIES)
    assert cache.bytes_used == 0
    cache.add(1, BLOCK_ENTRIES, [b""] * BLOCK_ENTRIES)
    assert cache.bytes_used <= 1000


ADDS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 200), st.integers(0, 200), st.integers(0, 30)),
    max_size=20,
)


@given(st.integers(0, 20_000), ADDS)
def test_the_limit_holds_and_what_is_found_is_right(
    limit: int, adds: list[tuple[int, int, int, int]]
) -> None:
    cache = EntryCache(limit)
    for ledger_id, first, count, size in adds:
        if size == 0:
            cache.drop(ledger_id)
        run = [b"%d:%d" % (ledger_id, n) for n in range(first, first + count)]
        cache.add(ledger_id, first, run)
        assert 0 <= cache.bytes_used <= limit
        for entry_id in range(first, first + count, 17):
            block = cached(cache, ledger_id, entry_id)
            assert block == payloads(entry_id, len(block), ledger_id)
            found = list(cache.get(ledger_id, entry_id, entry_id + 150, LARGE))
            assert found == payloads(entry_id, len(found), ledger_id)
            assert len(block) <= len(found) <= 151


def test_a_read_gets_all_blocks_that_follow_one_another_up_to_its_limits() -> None:
    cache = EntryCache(LARGE)
    cache.add(1, 0, payloads(0, 3 * BLOCK_ENTRIES))
    cache.add(1, 4 * BLOCK_ENTRIES, payloads(4 * BLOCK_ENTRIES, BLOCK_ENTRIES))
    assert list(cache.get(1, 10, 10_000, LARGE)) == payloads(10, 3 * BLOCK_ENTRIES - 10)
    assert list(cache.get(1, 10, 100, LARGE)) == payloads(10, 91)
    # One with little room does not go through all that is cached.
    assert list(cache.get(1, 10, 10_000, 1)) == payloads(10, BLOCK_ENTRIES - 10)
