"""What a transaction has stored, against a set of numbers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from magnetar.txn.txn_dedup import Sent, TxnSequences, TxnVerdict


def test_what_is_in_flight_is_unknown_and_what_failed_may_come_again() -> None:
    stored = TxnSequences()
    assert stored.judge("p", 1) is TxnVerdict.STORE
    assert stored.judge("p", 1) is TxnVerdict.UNKNOWN
    stored.settled(Sent("p", 1, 1), stored=False)
    assert stored.judge("p", 1) is TxnVerdict.STORE
    stored.settled(Sent("p", 1, 3), stored=True)
    assert stored.judge("p", 3) is TxnVerdict.DUPLICATE
    assert stored.judge("p", 4) is TxnVerdict.STORE
    assert stored.judge("q", 3) is TxnVerdict.STORE


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), max_size=40))
def test_runs_hold_what_was_noted(notes: list[tuple[int, int]]) -> None:
    stored, expected = TxnSequences(), set[int]()
    for first, more in notes:
        stored.note(Sent("p", first, first + more))
        expected |= set(range(first, first + more + 1))
    spans = list(stored)
    assert {number for span in spans for number in range(span.first, span.last + 1)} == expected
    assert all(low.last + 1 < high.first for low, high in pairwise(spans))
    for number in range(40):
        verdict = stored.judge("p", number)
        assert verdict is (TxnVerdict.DUPLICATE if number in expected else TxnVerdict.STORE)
