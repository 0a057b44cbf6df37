"""The ring of keys: who has what, what moves, and who must wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.dispatch.key_shared import (
    AssignRefused,
    ConsistentHashing,
    EntryBuckets,
    HashHolds,
    KeySelector,
    Moved,
    RangeSplitting,
    StickyRanges,
    _Part,
    selector_for,
)
from magnetar.errors import InvariantBroken
from magnetar.model.hashing import HASH_MAX, HashRange
from magnetar.model.subscriptions import KeySharedPolicy

SAMPLE = [*range(0, HASH_MAX, 97), HASH_MAX]


def owners(selector: KeySelector) -> list[int | None]:
    return [selector.select(at) for at in SAMPLE if at >= selector.first_position]


def test_the_policy_chooses_the_selector() -> None:
    whole = [(0, HASH_MAX)]
    assert isinstance(selector_for(KeySharedPolicy.sticky(whole), True), StickyRanges)
    assert isinstance(selector_for(KeySharedPolicy.bucketed(whole), True), EntryBuckets)
    assert isinstance(selector_for(KeySharedPolicy(), True), ConsistentHashing)
    assert isinstance(selector_for(KeySharedPolicy(), False), RangeSplitting)


@pytest.mark.parametrize("hash32", [0, 1, 65534, 65535, 65536, 2**31, 2**32 - 1])
def test_position_zero_is_for_sticky_consumers_only(hash32: int) -> None:
    assert RangeSplitting().ring_position(hash32) == (hash32 & 0x7FFFFFFF) % 65535 + 1
    assert StickyRanges().ring_position(hash32) == (hash32 & 0x7FFFFFFF) % 65536


def test_without_consumers_nobody_has_anything() -> None:
    for selector in (RangeSplitting(), ConsistentHashing(), StickyRanges()):
        assert set(owners(selector)) == {None}


def test_splitting_halves_the_widest_range_and_gives_it_back() -> None:
    selector = RangeSplitting()
    assert selector.join(1, "a") == [Moved(HashRange(1, HASH_MAX), None, 1)]
    assert selector.join(2, "b") == [Moved(HashRange(1, 32768), 1, 2)]
    assert selector.join(3, "c") == [Moved(HashRange(1, 16384), 2, 3)]
    assert selector.ranges_of(1) == [HashRange(32769, HASH_MAX)]
    assert selector.leave(1) == [Moved(HashRange(32769, HASH_MAX), 1, 2)]
    assert selector.leave(3) == [Moved(HashRange(1, 16384), 3, 2)]
    assert selector.leave(2) == [Moved(HashRange(1, HASH_MAX), 2, None)]


def test_a_ring_without_room_refuses() -> None:
    selector = RangeSplitting()
    selector._halves = [_Part(end, end) for end in range(1, HASH_MAX + 1)]
    assert isinstance(selector.join(0, "late"), AssignRefused)


@pytest.mark.parametrize("kind", [RangeSplitting, ConsistentHashing])
@given(changes=st.lists(st.integers(0, 5), max_size=14))
def test_moves_are_exactly_the_difference(kind: type[KeySelector], changes: list[int]) -> None:
    """A number joins if it is out and leaves if it is in."""
    selector = kind()
    present: set[int] = set()
    for key in changes:
        before = owners(selector)
        moves = selector.leave(key) if key in present else selector.join(key, f"c{key % 2}")
        assert not isinstance(moves, AssignRefused)
        present ^= {key}
        after = owners(selector)
        assert set(after) <= {None, *present}
        assert None not in after or not present
        positions = [at for at in SAMPLE if at >= selector.first_position]
        for at, old, new in zip(positions, before, after, strict=True):
            moved = [move for move in moves if at in move.range]
            assert [(move.source, move.target) for move in moved] == (
                [] if old == new else [(old, new)]
            )
            assert old == new or key in (old, new) or None in (old, new)
        sizes = {each: sum(r.size for r in selector.ranges_of(each)) for each in present}
        assert sum(sizes.values()) == (HASH_MAX if present else 0)


def test_consistent_hashing_spreads_evenly_and_ignores_the_order_of_arrival() -> None:
    names = [f"consumer-{number}" for number in range(8)]
    forwards, backwards = ConsistentHashing(), ConsistentHashing()
    for key, name in enumerate(names):
        forwards.join(key, name)
    for key, name in reversed(list(enumerate(names))):
        backwards.join(key, name)
    assert owners(forwards) == owners(backwards)
    sizes = [sum(part.size for part in forwards.ranges_of(key)) for key in range(8)]
    assert min(sizes) > HASH_MAX / 8 * 0.6
    assert max(sizes) < HASH_MAX / 8 * 1.5


def test_consumers_of_one_name_share_and_a_free_number_is_used_again() -> None:
    selector = ConsistentHashing()
    for key in (1, 2):
        selector.join(key, "same")
    before = owners(selector)
    assert set(before) == {1, 2}
    selector.leave(1)
    selector.join(3, "same")
    assert owners(selector) == [3 if owner == 1 else owner for owner in before]


def test_sticky_consumers_get_what_they_name() -> None:
    selector = StickyRanges()
    moves = selector.join(1, "a", [HashRange(10, 20), HashRange(0, 5)])
    assert moves == [Moved(HashRange(0, 5), None, 1), Moved(HashRange(10, 20), None, 1)]
    assert [selector.select(at) for at in (0, 5, 6, 10, 20, 21)] == [1, 1, None, 1, 1, None]
    assert isinstance(selector.join(2, "b", []), AssignRefused)
    assert isinstance(selector.join(2, "b", [HashRange(20, 30)]), AssignRefused)
    assert isinstance(selector.join(2, "b", [HashRange(30, 40), HashRange(40, 50)]), AssignRefused)
    assert selector.select(30) is None
    assert selector.join(2, "b", [HashRange(21, HASH_MAX)]) == [
        Moved(HashRange(21, HASH_MAX), None, 2)
    ]
    assert selector.leave(1) == [
        Moved(HashRange(0, 5), 1, None),
        Moved(HashRange(10, 20), 1, None),
    ]


def test_a_held_hash_is_for_its_holder_until_the_last_entry_is_gone() -> None:
    holds = HashHolds()
    holds.take(7, 1)
    holds.take(7, 1)
    holds.take(8, 2)
    assert holds.allows(7, 1)
    assert not holds.allows(7, 2)
    with pytest.raises(InvariantBroken):
        holds.take(7, 2)
    assert not holds.release(7)
    assert holds.release(7)
    assert holds.allows(7, 2)
    holds.take(7, 2)
    holds.clear()
    assert len(holds) == 0


def test_draining_is_what_another_than_the_selected_one_holds() -> None:
    selector = RangeSplitting()
    selector.join(1, "a")
    holds = HashHolds()
    for position in (10, 10, 60_000):
        holds.take(position, 1)
    assert holds.draining(selector) == {}
    selector.join(2, "b")
    assert holds.draining(selector) == {10: 2}
    selector.leave(2)
    assert holds.draining(selector) == {}
