"""The states of a transaction: whatever happens in whatever order."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.transaction.state import TransactionState, TxnEvent, after
from magnetar.errors import InvalidTxnStatus

S, E = TransactionState, TxnEvent


def walk(events: list[TxnEvent]) -> list[TransactionState]:
    """The states that these lead to; what is refused changes nothing."""
    states = [S.OPEN]
    for event in events:
        try:
            states.append(after(states[-1], event))
        except InvalidTxnStatus:
            states.append(states[-1])
    return states


@given(st.lists(st.sampled_from(TxnEvent)))
def test_the_end_is_the_end(events: list[TxnEvent]) -> None:
    states = walk(events)
    for before, then in pairwise(states):
        assert then is before or not before.is_final
    assert len({state for state in states if state.is_final}) <= 1


@given(st.lists(st.sampled_from(TxnEvent)))
def test_only_a_coordinator_commits_and_only_if_asked(events: list[TxnEvent]) -> None:
    if walk(events)[-1] is S.COMMITTED:
        last = walk(events).index(S.COMMITTED) - 1
        assert events[last] is E.COMMITTED
        assert {S.COMMITTING, S.ABORTING} & set(walk(events[:last]))


@given(st.lists(st.sampled_from(TxnEvent)))
def test_from_everywhere_an_end_is_reached(events: list[TxnEvent]) -> None:
    end = walk([*events, E.ABORT, E.GIVE_UP, E.ABORTED])[-1]
    assert end.is_final
    assert end.is_aborted or E.COMMITTED in events


@pytest.mark.parametrize("state", [S.COMMITTED, S.ABORTED, S.TIMED_OUT])
def test_what_contradicts_an_end_is_refused(state: TransactionState) -> None:
    contrary = E.ABORT if state is S.COMMITTED else E.COMMIT
    with pytest.raises(InvalidTxnStatus, match=state.value):
        after(state, contrary)
    assert after(state, E.COMMIT if state is S.COMMITTED else E.ABORT) is state


def test_a_transaction_takes_its_time_while_it_is_open_only() -> None:
    expiring = {state for state in S if _goes(state, E.EXPIRE)}
    assert expiring == {S.OPEN}


def _goes(state: TransactionState, event: TxnEvent) -> bool:
    try:
        after(state, event)
    except InvalidTxnStatus:
        return False
    return True
