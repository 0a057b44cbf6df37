"""Cursor state, against a naive model over random ledger lists."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.errors import InvariantBroken
from magnetar.managed_ledger.cursor_state import NOTHING, CursorState
from magnetar.managed_ledger.ledger_list import LedgerList, LedgerSpan
from magnetar.model.ids import Position
from tests.examples import examples

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=5)
POSITIONS = st.builds(Position, st.integers(0, 12), st.integers(-1, 6))

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ack", "batch", "cumulative", "cumulative-batch", "reset", "grow"]),
        POSITIONS,
        st.integers(1, 7),
    ),
    max_size=40,
)


def ledgers_of(counts: list[int]) -> LedgerList:
    """Ledgers 2, 4, 6, ...: closed but the last."""
    spans = [LedgerSpan(2 * at + 2, 0, 0, count) for at, count in enumerate(counts)]
    last = spans.pop()
    return LedgerList([*spans, LedgerSpan(last.ledger_id, 0, None, last.entries)])


def existing(ledgers: LedgerList) -> list[Position]:
    return [ledgers.at(number) for number in range(ledgers.total)]


class Model:
    """Every acknowledged position in one set."""

    def __init__(self) -> None:
        self.acked: set[Position] = set()
        self.batches: dict[Position, int] = {}

    def ack(self, position: Position, unacked: int, there: list[Position]) -> None:
        if position in self.acked or position not in there:
            return
        left = self.batches.pop(position, -1) & unacked
        if left:
            self.batches[position] = left
        else:
            self.acked.add(position)

    def ack_cumulative(self, position: Position, unacked: int, there: list[Position]) -> None:
        for each in there:
            if each < position or (each == position and not unacked):
                self.ack(each, 0, there)
        self.ack(position, unacked, there)


@settings(max_examples=examples(400))
@given(COUNTS, STEPS)
def test_behaves_as_the_model(counts: list[int], steps: list[tuple[str, Position, int]]) -> None:
    ledgers = ledgers_of(counts)
    state, model = CursorState(NOTHING, 1), Model()
    open_ledger = ledgers.spans[-1].ledger_id
    for step, position, number in steps:
        there = existing(ledgers)
        if step == "ack":
            state.ack(position, ledgers)
            model.ack(position, 0, there)
        elif step == "batch":
            state.ack(position, ledgers, number)
            model.ack(position, number, there)
        elif step == "cumulative":
            state.ack_cumulative(position, ledgers)
            model.ack_cumulative(position, 0, there)
        elif step == "cumulative-batch":
            state.ack_cumulative(position, ledgers, number)
            model.ack_cumulative(position, number, there)
        elif step == "grow":
            ledgers.grow(open_ledger, ledgers.entries_of(open_ledger) + number % 2, 0)
        else:
            state.reset(position, ledgers, state.incarnation + 1)
            model.acked = {each for each in there if each <= position}
            model.batches = {}
        state.check_invariants(ledgers)
        compare(state, model, ledgers)


def compare(state: CursorState, model: Model, ledgers: LedgerList) -> None:
    there = existing(ledgers)
    unacked = [each for each in there if each not in model.acked]
    assert [each for each in there if not state.is_acked(each)] == unacked
    assert state.backlog(ledgers) == len(unacked)
    assert dict(state.acked.partial()) == model.batches
    for start in [NOTHING, *there, Position(99, 0)]:
        expected = next((each for each in unacked if each >= start), None)
        assert state.next_to_read(start, ledgers) == expected


def test_mark_delete_moves_over_empty_ledgers() -> None:
    ledgers = ledgers_of([2, 0, 0, 2, 1])
    state = CursorState(NOTHING, 1)
    state.ack(Position(8, 0), ledgers)
    state.ack(Position(2, 1), ledgers)
    assert state.mark_delete == NOTHING
    state.ack(Position(2, 0), ledgers)
    assert state.mark_delete == Position(8, 0)
    assert not state.acked


def test_acks_of_nothing_change_nothing() -> None:
    ledgers = ledgers_of([2, 2])
    state = CursorState(Position(2, 0), 1)
    for position in [Position(2, 0), Position(2, 2), Position(3, 0), Position(4, 2)]:
        assert not state.ack(position, ledgers)
    assert not state.ack_cumulative(Position(2, 0), ledgers)
    assert state.changes == 0


def test_a_cumulative_ack_inside_a_batch_keeps_the_rest_of_it() -> None:
    ledgers = ledgers_of([3])
    state = CursorState(NOTHING, 1)
    assert state.ack_cumulative(Position(2, 1), ledgers, 0b1100)
    assert state.mark_delete == Position(2, 0)
    assert state.unacked_indexes(Position(2, 1)) == 0b1100
    assert not state.ack_cumulative(Position(2, 1), ledgers, 0b1100)


def test_reset_needs_a_new_incarnation() -> None:
    state = CursorState(NOTHING, 1)
    with pytest.raises(InvariantBroken):
        state.reset(Position(1, 1), ledgers_of([1]), 1)


def test_settle_drops_what_the_mark_covers() -> None:
    ledgers = ledgers_of([4, 1])
    state = CursorState(Position(2, 1), 1)
    state.acked.add_range(2, 0, 2)
    state.settle(ledgers)
    assert state.mark_delete == Position(2, 2)
    state.check_invariants(ledgers)


def test_broken_states_are_reported() -> None:
    ledgers = ledgers_of([4])
    ahead = CursorState(NOTHING, 1)
    ahead.acked.add(Position(2, 0))
    below = CursorState(Position(2, 2), 1)
    below.acked.merge_batch(Position(2, 1), 1)
    nowhere = CursorState(NOTHING, 1)
    nowhere.acked.add(Position(3, 3))
    for state in (ahead, below, nowhere):
        with pytest.raises(InvariantBroken):
            state.check_invariants(ledgers)
