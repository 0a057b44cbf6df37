"""Dispatch of entries that transactions have acknowledged, undecided: who has them, who waits."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from magnetar.broker.dispatch.dispatch_state import DispatchState
from magnetar.broker.dispatch.plan import DispatchLimits
from magnetar.model.ids import Position
from magnetar.model.subscriptions import SubscriptionType

SHARED, KEY_SHARED = SubscriptionType.SHARED, SubscriptionType.KEY_SHARED


class Fact(NamedTuple):
    position: Position
    key_hash: int = 7
    num_messages: int = 1
    payload: bytes = b""
    open_indexes: int | None = None


def facts(count: int) -> list[Fact]:
    return [Fact(Position(1, number)) for number in range(count)]


def state_with(type_: SubscriptionType, entries: list[Fact]) -> DispatchState:
    """Consumer 0 has them all."""
    state = DispatchState(type_, DispatchLimits(), topic="t")
    state.on_join(0, "a")
    state.on_rewound()
    state.on_flow(0, 100)
    state.plan(entries)
    assert state.unacked == len(entries)
    return state


@pytest.mark.parametrize("type_", [SHARED, KEY_SHARED])
def test_a_withheld_entry_stays_where_it_is(type_: SubscriptionType) -> None:
    entries = facts(2)
    state = state_with(type_, entries)
    assert not state.on_withheld(entries[0].position)
    assert state.unacked == 2
    state.on_redeliver(0, [entries[1].position])
    assert state.on_withheld(entries[1].position)
    assert (state.waiting, state.unacked) == (0, 1)
    state.check_invariants()


@pytest.mark.parametrize("type_", [SHARED, KEY_SHARED])
def test_an_entry_that_returns_from_its_consumer_waits_and_counts(type_: SubscriptionType) -> None:
    entries = facts(3)
    state = state_with(type_, entries)
    assert state.on_returned([entries[0].position, entries[2].position]) == []
    assert (state.waiting, state.unacked) == (2, 1)
    assert state.redelivery_count(entries[0].position) == 1
    assert state.on_returned([entries[0].position]) == []
    assert state.redelivery_count(entries[0].position) == 1, "it waits already"
    state.check_invariants()


@pytest.mark.parametrize("type_", [SHARED, KEY_SHARED])
def test_an_entry_at_nobody_returns_once_its_hash_is_known(type_: SubscriptionType) -> None:
    entries = facts(2)
    state = state_with(type_, entries[:1])
    position = entries[1].position
    unknown = state.on_returned([position])
    assert unknown == ([position] if type_ is KEY_SHARED else [])
    for _ in unknown:
        state.on_returned_entry(entries[1])
        state.on_returned_entry(entries[0])  # its consumer has it
    assert (state.waiting, state.unacked) == (1, 1)
    state.check_invariants()
    plan = state.plan_waiting(entries[1:])
    assert [len(given) for _, given in plan.deliveries] == [1]


def test_nothing_returns_while_everything_is_read_again() -> None:
    entries = facts(1)
    state = state_with(SHARED, entries)
    before = state.rewinds
    state.on_leave(0)
    assert state.rewinds > before
    assert state.on_returned([entries[0].position]) == []
    state.on_returned_entry(entries[0])
    assert state.waiting == 0
