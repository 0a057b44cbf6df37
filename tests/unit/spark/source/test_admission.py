"""Limits are kept exactly, nobody starves, and nobody runs ahead of those who wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.model.ranges import (
    RangeCount,
    RangeLayout,
    RangePosition,
    RangeSegment,
)
from magnetar.spark.source.admission import (
    GATHERED_BYTES,
    GATHERED_MESSAGES,
    Hold,
    SegmentShare,
    gathered,
    hold,
    level,
    piece_counts,
    shares,
)
from magnetar.spark.source.offsets import TopicOffset
from magnetar.spark.source.plan import TopicView

TOPIC = "topic://public/default/x"


def part(number: int) -> SegmentShare:
    return SegmentShare(TOPIC, number)


AMOUNTS = st.dictionaries(st.integers(0, 30).map(part), st.integers(0, 10_000), max_size=12)


@given(AMOUNTS, st.integers(1, 20_000), st.integers(0, 5))
def test_shares_use_the_limit_and_never_more(
    amounts: dict[SegmentShare, int], limit: int, turn: int
) -> None:
    found = shares(amounts, limit, turn)
    assert all(1 <= share <= amounts[each] for each, share in found.items())
    takers = sum(amount > 0 for amount in amounts.values())
    assert sum(found.values()) <= limit
    if limit >= takers:
        assert len(found) == takers
        assert sum(found.values()) >= min(limit, sum(amounts.values())) - takers


@given(st.integers(2, 9), st.integers(1, 8))
def test_with_fewer_to_give_than_takers_each_has_its_turn(takers: int, limit: int) -> None:
    amounts = {part(number): 100 for number in range(takers)}
    seen = {each for turn in range(takers) for each in shares(amounts, limit, turn)}
    assert seen == amounts.keys()


def test_shares_are_in_proportion() -> None:
    assert shares({part(0): 9000, part(1): 1000}, 100) == {part(0): 90, part(1): 10}


def _view(*segments: RangeSegment) -> TopicView:
    return TopicView(RangeLayout(TOPIC, "id", 1, segments), {})


def test_nobody_is_held_while_nobody_waits() -> None:
    view = _view(RangeSegment(0, ""), RangeSegment(1, "", created_ms=7))
    place = TopicOffset("id", 1, {0: RangePosition(0, 0), 1: RangePosition(1, 0)})
    assert hold({TOPIC: place}, {TOPIC: view}) is None


def test_the_first_of_those_that_wait_holds_all_but_its_ancestors() -> None:
    view = _view(
        RangeSegment(0, "", created_ms=10),
        RangeSegment(1, "", created_ms=10),
        RangeSegment(2, "", (0,), created_ms=50),
        RangeSegment(3, "", (1,), created_ms=40),
        RangeSegment(4, "", (2, 3), created_ms=60),
    )
    place = TopicOffset("id", 1, {0: RangePosition(0, 0), 1: RangePosition(1, 0)})
    assert hold({TOPIC: place}, {TOPIC: view}) == Hold(40, {part(1)})


def test_the_one_that_a_limit_stopped_first_holds_the_others() -> None:
    assert level({part(0): 70, part(1): 40}) == Hold(41, {part(1)})
    assert level({}) is None


def test_pieces() -> None:
    counts = {part(0): RangeCount(1000, 9000), part(1): RangeCount(10, 1000)}
    assert piece_counts(counts, None, None) == {part(0): 1, part(1): 1}
    assert piece_counts(counts, None, 300) == {part(0): 4, part(1): 1}
    wanted = piece_counts(counts, 12, None)
    assert sum(wanted.values()) >= 12
    assert wanted[part(0)] > wanted[part(1)]
    assert piece_counts({}, 5, None) == {}


@given(
    st.lists(
        st.none()
        | st.builds(
            RangeCount,
            st.integers(0, 2 * GATHERED_MESSAGES),
            st.integers(0, 2 * GATHERED_BYTES),
            st.booleans(),
        )
    )
)
def test_every_range_has_a_task_and_only_small_ones_share_it(
    counts: list[RangeCount | None],
) -> None:
    found = gathered(counts)
    assert [number for each in found for number in each] == list(range(len(counts)))
    for each in found:
        if len(each) > 1:
            shared = [counts[number] for number in each]
            sizes = [count for count in shared if count is not None and count.is_exact]
            assert len(sizes) == len(shared)
            assert sum(count.messages for count in sizes) <= GATHERED_MESSAGES
            assert sum(count.bytes for count in sizes) <= GATHERED_BYTES


def test_small_ranges_next_to_each_other_are_one_task() -> None:
    small, large = RangeCount(3, 300, True), RangeCount(10**6, 10**9, True)
    assert gathered([small, small, large, small, None, small, small]) == [
        range(0, 2),
        range(2, 3),
        range(3, 4),
        range(4, 5),
        range(5, 7),
    ]
