"""Acknowledgements against models of the broker and of the application."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.consume.segment.ack_state import (
    BEFORE_ALL,
    WHOLE,
    AckItem,
    CumulativeAcks,
    HandOffs,
    IndividualAcks,
    SegmentMark,
    ack_item,
    all_of,
    bit_of,
)
from magnetar.model.ids import Position


class _Broker:
    """What a broker has left of each entry, and what it delivers again after a lost connection."""

    def __init__(self, sizes: list[int]) -> None:
        self.left = {Position(1, n): all_of(size) for n, size in enumerate(sizes)}
        self.sizes = {Position(1, n): size for n, size in enumerate(sizes)}

    def take(self, items: list[AckItem]) -> None:
        for item in items:
            self.left[item.position] &= item.unacked

    def unacked(self, position: Position) -> int:
        left = self.left[position]
        return 0 if left == all_of(self.sizes[position]) else left


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 2**32))
def test_individual_acks_reach_the_broker_and_nothing_else_does(
    sizes: list[int], seed: int
) -> None:
    random = Random(seed)
    broker, acks = _Broker(sizes), IndividualAcks()
    has: set[tuple[Position, int]] = set()
    done: set[tuple[Position, int]] = set()
    in_flight: list[list[AckItem]] = []

    def deliver() -> None:
        for position, size in broker.sizes.items():
            if not broker.left[position]:
                continue
            mask = acks.arrived(position, size, broker.unacked(position))
            for index in range(size):
                message = (position, index if size > 1 else WHOLE)
                if mask & bit_of(index) and random.random() < 0.8:
                    assert message not in has, "the application has it"
                    assert message not in done, "it was acknowledged"
                    acks.handed(position, message[1], size)
                    has.add(message)

    for _ in range(random.randrange(1, 30)):
        step = random.randrange(6)
        if step == 0:
            deliver()
        elif step in (1, 2) and has:
            message = random.choice(sorted(has))
            acks.ack(*message, broker.sizes[message[0]])
            has.discard(message)
            done.add(message)
        elif step == 3 and has:
            message = random.choice(sorted(has))
            acks.give_back(*message)
            has.discard(message)
        elif step == 4:
            in_flight.append(acks.take(random.randrange(1, 5)))
        elif step == 5 and in_flight:
            items = in_flight.pop(0)
            broker.take(items)
            if random.random() < 0.6:
                acks.confirm(items)
            else:  # its answer was lost, and all that followed
                in_flight.clear()
                acks.reconnected()
                deliver()
        assert {message for message in has if acks.is_held(*message)} == has
    acks.reconnected()
    while items := acks.take(3):
        broker.take(items)
        acks.confirm(items)
    assert not acks.waiting
    assert not acks._sent
    assert acks._entries.keys() == {position for position, _ in has}
    for position, size in broker.sizes.items():
        for index in range(size):
            message = (position, index if size > 1 else WHOLE)
            assert bool(broker.left[position] & bit_of(index)) == (message not in done)


def test_an_ack_of_an_id_that_was_stored_names_the_rest_of_its_batch() -> None:
    acks = IndividualAcks()
    acks.ack(Position(3, 4), 1, 4)
    assert acks.take(10) == [AckItem(Position(3, 4), 0b1101, 4)]
    acks.ack(Position(3, 5), WHOLE, 0)
    assert acks.take(10) == [AckItem(Position(3, 5), 0, 0)]
    acks.forget()
    assert not acks.waiting
    assert not acks._sent


def test_an_id_that_does_not_say_how_large_its_batch_is_acknowledges_nothing_else() -> None:
    acks = IndividualAcks()
    acks.ack(Position(3, 4), 2, 0)
    (item,) = acks.take(1)
    assert item.unacked & 0b11111 == 0b11011
    assert ack_item(SegmentMark(Position(3, 4), 2, 0)).unacked & 0b11111 == 0b11000
    cumulative = CumulativeAcks(SegmentMark(Position(3, 4), 2, 0))
    assert cumulative.arrived(Position(3, 4), 5) == 0b11000


def test_what_a_transaction_acknowledged_comes_again_after_its_abort() -> None:
    acks = IndividualAcks()
    acks.handed(Position(1, 1), WHOLE, 1)
    assert acks.arrived(Position(1, 1), 1) == 0
    acks.give_back(Position(1, 1), WHOLE)
    assert acks.arrived(Position(1, 1), 1) == 1


_MARKS = st.builds(
    lambda entry, index, size: SegmentMark(Position(1, entry), min(index, size - 1), size),
    st.integers(0, 5),
    st.integers(0, 3),
    st.just(4),
)


@given(st.lists(_MARKS, max_size=12), st.integers(0, 2**32))
def test_cumulative_acks_only_move_on(marks: list[SegmentMark], seed: int) -> None:
    random = Random(seed)
    acks = CumulativeAcks()
    highest, confirmed = BEFORE_ALL, BEFORE_ALL
    for mark in marks:
        moved = acks.ack_through(mark)
        assert moved == (mark.place > highest.place)
        highest = max(highest, mark, key=lambda each: each.place)
        if random.random() < 0.5:
            item = acks.take()
            if item is not None:
                assert item.position == highest.position
                open_bits = all_of(4) & ~all_of(highest.batch_index + 1)
                assert item.unacked == open_bits
            if random.random() < 0.5:
                acks.confirm()
                confirmed = highest
            else:
                acks.reconnected()
                assert acks.has_news == (highest.place > confirmed.place)
        assert acks.acked_through == highest
    acks.take()
    acks.confirm()
    assert not acks.has_news
    assert acks.is_settled


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 20), st.integers(0, 20))
def test_after_a_reconnect_only_what_is_new_is_handed_out(
    sizes: list[int], handed: int, acked: int
) -> None:
    order = [
        SegmentMark(Position(1, entry), index if size > 1 else WHOLE, size)
        for entry, size in enumerate(sizes)
        for index in range(size)
    ]
    acks = CumulativeAcks()
    handed = min(handed, len(order))
    acked = min(acked, handed)
    for mark in order[:handed]:
        acks.handed(mark)
    if acked:
        acks.ack_through(order[acked - 1])

    def delivered() -> list[SegmentMark]:
        return [
            SegmentMark(Position(1, entry), index if size > 1 else WHOLE, size)
            for entry, size in enumerate(sizes)
            for index in range(size)
            if acks.arrived(Position(1, entry), size) & bit_of(index)
        ]

    assert delivered() == order[handed:]
    acks.rewind()
    assert delivered() == order[acked:]


def test_an_id_without_an_index_is_the_whole_entry() -> None:
    acks = CumulativeAcks()
    assert acks.ack_through(SegmentMark(Position(1, 1), 2, 3))
    assert not acks.ack_through(SegmentMark(Position(1, 1)))
    assert acks.take() == AckItem(Position(1, 1), 0, 3)
    assert acks.take() is None


@given(st.lists(st.integers(1, 3), min_size=1, max_size=60), st.integers(4, 12), st.data())
def test_hand_offs_name_nothing_later_and_the_newest_exactly(
    gaps: list[int], limit: int, data: st.DataObject
) -> None:
    offs, turn, added = HandOffs(limit), 0, []
    for entry, gap in enumerate(gaps):
        turn += gap
        mark = SegmentMark(Position(1, entry))
        offs.add(turn, mark)
        added.append((turn, mark))
        assert len(offs) <= limit
    asked = data.draw(st.integers(0, turn + 2))
    exact = [mark for at, mark in added if at <= asked]
    found = offs.last_before(asked)
    assert found == offs.through(asked)
    if found is not None:
        assert found <= exact[-1]
    if asked >= turn:
        assert found == added[-1][1]
    if len(added) <= limit:
        assert found == (exact[-1] if exact else None)
    assert offs.through(asked) is None


def test_everything_up_to_a_message_is_acknowledged_and_nothing_behind_it() -> None:
    acks = IndividualAcks()
    for entry in range(3):
        for index in range(3):
            acks.handed(Position(1, entry), index, 3)
    assert acks.ack_through(SegmentMark(Position(1, 1), 1, 3)) == [Position(1, 0)]
    assert acks.take(9) == [AckItem(Position(1, 0), 0, 3), AckItem(Position(1, 1), 0b100, 3)]
    assert [acks.is_held(Position(1, 1), index) for index in range(3)] == [False, False, True]
    assert acks.ack_through(SegmentMark(Position(1, 2))) == [
        Position(1, 0),
        Position(1, 1),
        Position(1, 2),
    ]
    acks.give_back_all(Position(1, 2))
    assert not acks.is_held(Position(1, 2), WHOLE)


@pytest.mark.parametrize(("size", "mask"), [(0, 1), (1, 1), (3, 7)])
def test_every_entry_has_a_message(size: int, mask: int) -> None:
    assert all_of(size) == mask


def test_entries_that_are_held_are_counted_once_each_and_until_they_are_acknowledged_whole() -> (
    None
):
    acks = CumulativeAcks()
    for entry in range(3):
        for index in range(2):
            acks.handed(SegmentMark(Position(1, entry), index, 2))
    assert acks.held_entries == 3
    acks.ack_through(SegmentMark(Position(1, 1), 0, 2))
    assert acks.held_entries == 2
    acks.confirmed_elsewhere(SegmentMark(Position(1, 1), 1, 2))
    assert acks.held_entries == 1
    acks.rewind()
    assert acks.held_entries == 0
    acks.handed(SegmentMark(Position(1, 2)))
    assert acks.held_entries == 1


@given(st.integers(0, 4), st.integers(0, 31), st.integers(0, 31))
def test_what_is_admitted_is_what_arrives(size: int, unacked: int, held: int) -> None:
    """In one step, and for whatever was there before."""
    one, two = IndividualAcks(), IndividualAcks()
    position = Position(1, 2)
    for each in (one, two):
        if held & all_of(size):
            each.handed_all(position, held & all_of(size), size)
    expected = one.arrived(position, size, unacked)
    one.handed_all(position, expected, size)
    assert two.admit(position, size, unacked) == expected
    if expected:
        everything = all_of(size)
        assert two.held_among(position, everything) == one.held_among(position, everything)
    assert two.admit(position, size, unacked) == 0


def test_an_acknowledgement_tells_whether_the_application_had_it() -> None:
    acks = IndividualAcks()
    position = Position(1, 2)
    assert acks.admit(position, 3) == 0b111
    assert acks.ack(position, 1, 3)
    assert not acks.ack(position, 1, 3)
    assert not acks.ack(Position(1, 3), WHOLE, 0)
    assert [item.unacked for item in acks.take(1)] == [0b101]
    assert [item.position for item in acks.take(5)] == [Position(1, 3)]
    assert acks.waiting == 0


def test_what_a_transaction_acknowledged_waits_for_its_end() -> None:
    acks = IndividualAcks()
    place = Position(1, 2)
    acks.handed_all(place, 0b11, 2)
    acks.ack_in_txn(place, 0b01, 2)
    acks.ack_in_txn(place, 0b10, 2)
    # The first one is aborted, and the broker delivers the entry before it has the second ack.
    assert not acks.decided(place, 0b01, committed=False)
    assert acks.arrived(place, 2) == 0b01
    acks.handed_all(place, 0b01, 2)
    # What came in vain must be asked for, should the second one be aborted as well.
    assert acks.decided(place, 0b10, committed=False)
    assert acks.arrived(place, 2) == 0b10


def test_what_a_transaction_has_committed_is_acknowledged() -> None:
    acks = IndividualAcks()
    place = Position(1, 2)
    acks.handed_all(place, 0b11, 2)
    acks.ack_in_txn(place, 0b10, 2)
    assert acks.arrived(place, 2) == 0
    assert not acks.decided(place, 0b10, committed=True)
    acks.ack(place, 0, 2)
    assert acks.take(10) == [AckItem(place, 0, 2)], "nothing of the entry is left"
