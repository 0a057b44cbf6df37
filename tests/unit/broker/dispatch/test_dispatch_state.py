"""Who gets which entry: random lives of a subscription, and the rules one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from magnetar.broker.dispatch.dispatch_state import DispatchState
from magnetar.broker.dispatch.plan import DispatchLimits, DispatchPlan, MembershipChange
from magnetar.model.ids import Position
from magnetar.model.subscriptions import KeySharedPolicy, SubscriptionType
from tests.examples import examples
from tests.unit.broker.dispatch_world import (
    LIMITS,
    BucketMachine,
    ConsistentHashingMachine,
    DispatchMachine,
    Entry,
    ExclusiveMachine,
    FailoverMachine,
    KeySharedMachine,
    StickyMachine,
)

SEVERAL = (SubscriptionType.SHARED, SubscriptionType.KEY_SHARED, SubscriptionType.FAILOVER)
"""These have more than one consumer."""


@pytest.mark.parametrize(
    "machine",
    [
        ExclusiveMachine,
        FailoverMachine,
        DispatchMachine,
        pytest.param(KeySharedMachine, marks=pytest.mark.slow),
        pytest.param(ConsistentHashingMachine, marks=pytest.mark.slow),
        pytest.param(StickyMachine, marks=pytest.mark.slow),
        BucketMachine,
    ],
)
def test_random_lives(machine: type[DispatchMachine]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(60), stateful_step_count=50, deadline=None)
    )


POSITIONS = st.lists(st.integers(0, 40), max_size=12)


@given(
    st.sampled_from(list(SubscriptionType)),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 2), POSITIONS, st.booleans()), max_size=5),
)
def test_acks_that_come_together_count_as_each_of_them(
    type_: SubscriptionType, messages: int, steps: list[tuple[int, list[int], bool]]
) -> None:
    """The same life twice: acknowledgements as runs, and one by one."""
    limits = DispatchLimits(unacked_per_consumer=12, unacked_per_subscription=30)
    runs, singles = (opened(type_, permits=[20, 20][: 1 + (type_ in SEVERAL)], limits=limits)
                     for _ in range(2))  # fmt: skip
    entries = [Entry(Position(1, number), messages + 1) for number in range(40)]
    for state in (runs, singles):
        state.plan(entries)
    for key, numbers, redelivers in steps:
        positions = [Position(1, number) for number in numbers]
        woken = [singles.on_ack(key, each) for each in positions]
        assert runs.on_acks(key, positions) == any(woken)
        if redelivers:
            for state in (runs, singles):
                found = state.on_redeliver(key, positions[:3] or None)
                if found.rewind:
                    state.on_rewound()
        for state in (runs, singles):
            state.check_invariants()
        assert _seen(runs) == _seen(singles)


def _seen(state: DispatchState) -> tuple[object, ...]:
    members = [
        (key, each.pending, each.unacked, each.blocked, each.permits)
        for key, each in state.members.items()
    ]
    return members, state.unacked, state.blocked, state.waiting, state.next_read()


# --- single rules


def opened(
    type_: SubscriptionType,
    *,
    permits: Sequence[int],
    priorities: Sequence[int] | None = None,
    limits: DispatchLimits = DispatchLimits(),  # noqa: B008
) -> DispatchState:
    state = DispatchState(type_, limits, topic="t", consistent_hashing=False)
    for key, count in enumerate(permits):
        state.on_join(key, f"c{key}", 0 if priorities is None else priorities[key])
        state.on_flow(key, count)
    return state


def singles(count: int, first: int = 0) -> list[Entry]:
    return [Entry(Position(1, index)) for index in range(first, first + count)]


def shape(plan: DispatchPlan[Entry]) -> list[tuple[int, list[int]]]:
    return [(key, [entry.position.entry_id for entry in each]) for key, each in plan.deliveries]


def test_exclusive_stops_when_permits_are_used_and_a_batch_is_never_split() -> None:
    state = opened(SubscriptionType.EXCLUSIVE, permits=[5])
    entries = [Entry(Position(1, index), num_messages=4) for index in range(3)]
    plan = state.plan(entries)
    assert shape(plan) == [(0, [0, 1])]
    assert (plan.held_back, plan.read_more) == (1, False)
    assert state.members[0].permits == -3
    assert state.next_read() is None
    state.on_flow(0, 4)
    assert state.next_read() == ([Position(1, 2)], 0)
    assert shape(state.plan_waiting(entries[2:])) == [(0, [2])]


@pytest.mark.parametrize("type_", SubscriptionType)
def test_without_permits_nothing_more_is_handed_out(type_: SubscriptionType) -> None:
    state = opened(type_, permits=[2])
    plan = state.plan(singles(3))
    assert shape(plan) == [(0, [0, 1])]
    assert plan.held_back == 1
    assert state.members[0].permits == 0


def test_what_is_acknowledged_while_it_is_read_is_not_handed_out() -> None:
    state = opened(SubscriptionType.SHARED, permits=[1, 0])
    state.plan(singles(3))
    state.on_flow(1, 10)
    read = state.next_read()
    assert read == ([Position(1, 1), Position(1, 2)], 0)
    state.on_ack(0, Position(1, 1))
    assert shape(state.plan_waiting(singles(2, first=1))) == [(1, [2])]


def test_what_came_back_while_later_entries_of_its_key_were_read_goes_first() -> None:
    state = opened(SubscriptionType.KEY_SHARED, permits=[1])
    first, second, third = singles(3)
    state.plan([first, second])
    state.on_flow(0, 10)
    assert state.next_read() == ([second.position], 0)
    state.on_redeliver(0)
    assert not state.plan_waiting([second]).deliveries
    assert not state.plan([third]).deliveries
    assert state.next_read() == ([first.position, second.position, third.position], 0)
    assert shape(state.plan_waiting([first, second, third])) == [(0, [0, 1, 2])]


def test_acknowledged_messages_of_a_batch_cost_no_permits() -> None:
    state = opened(SubscriptionType.EXCLUSIVE, permits=[3])
    state.plan([Entry(Position(1, 0), num_messages=10, open_indexes=0b11)])
    assert state.members[0].permits == 1


def test_shared_takes_turns_of_twenty() -> None:
    state = opened(SubscriptionType.SHARED, permits=[100, 100])
    plan = state.plan(singles(50))
    assert [(key, len(each)) for key, each in plan.deliveries] == [(0, 20), (1, 20), (0, 10)]
    assert [key for key, _ in state.plan(singles(5, first=50)).deliveries] == [1]


def test_shared_serves_the_next_priority_only_when_the_first_has_no_permits() -> None:
    state = opened(SubscriptionType.SHARED, permits=[100, 3], priorities=[1, 0])
    assert shape(state.plan(singles(5))) == [(1, [0, 1, 2]), (0, [3, 4])]


def test_waiting_entries_come_before_new_ones() -> None:
    state = opened(SubscriptionType.SHARED, permits=[2, 0])
    state.plan(singles(3))
    state.on_flow(1, 10)
    assert state.next_read() == ([Position(1, 2)], 0)
    assert state.plan(singles(2, first=3)).held_back == 2
    assert state.next_read() == ([Position(1, 2), Position(1, 3), Position(1, 4)], 0)


def test_leaving_does_not_count_as_redelivery_but_a_request_does() -> None:
    state = opened(SubscriptionType.SHARED, permits=[1, 0])
    (entry,) = singles(1)
    state.plan([entry])
    assert not state.on_leave(0).rewind
    assert state.redelivery_count(entry.position) == 0
    state.on_flow(1, 2)
    assert shape(state.plan_waiting([entry])) == [(1, [0])]
    assert state.on_redeliver(1, [entry.position]) == (1, False)
    assert state.redelivery_count(entry.position) == 1
    assert shape(state.plan_waiting([entry])) == [(1, [0])]
    assert state.redelivery_count(entry.position) == 1
    assert state.on_leave(1).rewind
    assert state.redelivery_count(entry.position) == 0


def test_an_ack_of_another_consumer_counts() -> None:
    state = opened(SubscriptionType.SHARED, permits=[1, 0])
    state.plan(singles(1))
    state.on_ack(1, Position(1, 0))
    assert state.unacked == 0


def test_unacknowledged_messages_block_a_consumer_until_half_of_the_limit() -> None:
    limits = DispatchLimits(unacked_per_consumer=4, unacked_per_subscription=100)
    state = opened(SubscriptionType.SHARED, permits=[100, 0], limits=limits)
    assert state.plan(singles(6)).held_back == 2
    assert state.members[0].blocked
    assert not state.on_ack(0, Position(1, 0))
    assert state.next_read() is None
    assert state.on_ack(0, Position(1, 1))
    assert state.next_read() == ([Position(1, 4), Position(1, 5)], 0)


def test_unacknowledged_messages_block_the_subscription_until_half_of_the_limit() -> None:
    limits = DispatchLimits(unacked_per_consumer=0, unacked_per_subscription=4)
    state = opened(SubscriptionType.SHARED, permits=[3, 100], limits=limits)
    assert state.plan(singles(6)).held_back == 2
    assert state.blocked
    assert state.next_read() is None
    assert not state.on_ack(0, Position(1, 0))
    assert state.on_ack(0, Position(1, 1))
    assert state.next_read() is not None


def test_a_moved_key_waits_until_its_former_consumer_is_done() -> None:
    state = opened(SubscriptionType.KEY_SHARED, permits=[100])
    first, second, third = (Entry(Position(1, index), key_hash=5) for index in range(3))
    state.plan([first])
    state.on_join(1, "c1")
    state.on_flow(1, 100)
    assert state.draining() == {6: 1}
    assert state.plan([second]).held_back == 1
    assert state.plan([third]).held_back == 1
    read = state.next_read()
    assert read is not None
    assert not read.waiting
    assert state.on_ack(0, first.position)
    assert state.next_read() == ([second.position, third.position], 0)
    assert shape(state.plan_waiting([second, third])) == [(1, [1, 2])]


def test_a_moved_key_may_go_on_at_once_where_order_does_not_matter() -> None:
    policy = KeySharedPolicy(out_of_order=True)
    state = DispatchState(
        SubscriptionType.KEY_SHARED,
        LIMITS,
        topic="t",
        key_shared=policy,
        consistent_hashing=False,
    )
    first, second = (Entry(Position(1, index), key_hash=5) for index in range(2))
    for key in (0, 1):
        state.on_join(key, f"c{key}")
        state.on_flow(key, 10)
        state.plan([first if key == 0 else second])
    assert [len(state.members[key].pending) for key in (0, 1)] == [1, 1]


def test_reading_ahead_is_bounded() -> None:
    state = DispatchState(SubscriptionType.KEY_SHARED, LIMITS, topic="t", consistent_hashing=False)
    state.on_join(0, "c0")
    state.on_join(1, "c1")
    state.on_flow(1, 100)
    for index in range(0, 6, 3):
        entries = [Entry(Position(1, index + at), key_hash=60_000) for at in range(3)]
        assert state.plan(entries).held_back == 3
    assert state.next_read() is None
    assert state.on_flow(0, 1)
    assert state.next_read() == ([Position(1, 0)], 0)


def test_failover_moves_to_the_next_consumer_and_starts_at_the_mark_again() -> None:
    state = DispatchState(SubscriptionType.FAILOVER, LIMITS, topic="t", partition=0)
    first = state.on_join(0, "b")
    assert isinstance(first, MembershipChange)
    assert (first.active, first.active_changed, first.rewind) == (0, True, False)
    state.on_flow(0, 10)
    assert shape(state.plan(singles(2))) == [(0, [0, 1])]
    second = state.on_join(1, "a")
    assert isinstance(second, MembershipChange)
    assert (second.active, second.active_changed, second.rewind) == (1, True, True)
    state.on_flow(1, 10)
    assert state.next_read() is None
    assert not state.plan(singles(2, first=2)).deliveries
    state.on_rewound()
    assert state.next_read() is not None
    assert shape(state.plan(singles(2))) == [(1, [0, 1])]


def test_what_is_asked_of_an_unknown_consumer_is_ignored() -> None:
    state = opened(SubscriptionType.SHARED, permits=[])
    assert not state.on_flow(9, 1)
    assert not state.on_outbox(9, True)
    assert state.on_redeliver(9) == (0, False)
