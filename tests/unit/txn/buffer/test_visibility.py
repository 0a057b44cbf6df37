"""Visibility: the ceiling and the aborted, against a list of entries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.errors import InvariantBroken
from magnetar.model.ids import Position
from magnetar.txn.buffer.visibility import NOTHING_READABLE, Visibility
from magnetar.txn.ids import metadata_id
from magnetar.wire.messages import TxnId

T1, T2 = metadata_id(0, 1), metadata_id(0, 2)


def at(entry: int) -> Position:
    return Position(1, entry)


def test_nothing_is_readable_before_recovery() -> None:
    seen = Visibility()
    assert seen.max_read_position(at(9)) == NOTHING_READABLE
    seen.open_gate()
    assert seen.max_read_position(at(9)) == at(9)


def test_the_lowest_undecided_transaction_holds_the_ceiling() -> None:
    seen = Visibility()
    seen.open_gate()
    seen.track(T1, at(3))
    seen.track(T2, at(5))
    assert (seen.max_read_position(at(9)), seen.blocker()) == (at(2), T1)
    seen.commit(T1)
    assert (seen.max_read_position(at(9)), seen.blocker()) == (at(4), T2)
    seen.abort(T2, at(9))
    assert (seen.max_read_position(at(9)), seen.blocker()) == (at(9), None)
    assert seen.is_aborted(T2, at(9))
    assert not seen.is_aborted(T2, at(10))
    assert seen.forget_aborted(at(10)) == [T2]
    assert not seen.is_aborted(T2, at(9))


def test_a_bound_at_the_start_of_a_ledger_lets_the_earlier_ledgers_through() -> None:
    seen = Visibility()
    seen.open_gate()
    seen.track(T1, Position(7, 0))
    assert Position(6, 99) <= seen.max_read_position(Position(7, 4)) < Position(7, 0)


def test_a_transaction_is_tracked_once() -> None:
    seen = Visibility()
    seen.track(T1, at(0))
    with pytest.raises(InvariantBroken):
        seen.track(T1, at(1))


@given(st.lists(st.tuples(st.sampled_from("awcx"), st.integers(0, 3)), max_size=40))
def test_consumers_see_exactly_what_is_committed(steps: list[tuple[str, int]]) -> None:
    """a: plain append, w: append in a transaction, c: commit, x: abort; ids are used once."""
    seen = Visibility()
    seen.open_gate()
    log: list[TxnId | None] = []
    outcome: dict[TxnId, str] = {}
    shown = 0
    for kind, number in steps:
        txn = metadata_id(0, number)
        if kind == "a":
            log.append(None)
        elif kind == "w" and txn not in outcome:
            if txn not in seen.undecided:
                seen.track(txn, at(len(log)))
            log.append(txn)
        elif kind == "c" and txn in seen.undecided:
            seen.commit(txn)
            outcome[txn] = kind
        elif kind == "x" and txn in seen.undecided:
            seen.abort(txn, at(len(log) - 1))
            outcome[txn] = kind
        max_read_position = seen.max_read_position(at(len(log) - 1)).entry_id
        assert max_read_position + 1 >= shown, "the ceiling never falls"
        shown = max_read_position + 1
        for entry, writer in enumerate(log[:shown]):
            aborted = writer is not None and outcome.get(writer) == "x"
            assert writer is None or writer in outcome, "nothing undecided is below the ceiling"
            assert (writer is not None and seen.is_aborted(writer, at(entry))) == aborted
