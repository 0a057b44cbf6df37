"""Acknowledgements in transactions: what they hold, what is refused, what consumers see."""

from __future__ import annotations

import pytest

from magnetar.broker.subscribe.ack import Ack
from magnetar.errors import (
    ConsumerNotFound,
    NotAllowed,
    TransactionConflict,
)
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import SubscriptionType
from magnetar.runtime.limits import Limits
from tests.unit.broker.subscription_world import (
    EXCLUSIVE,
    FAILOVER,
    KEY_SHARED,
    SHARED,
    Client,
    numbered,
)
from tests.unit.broker.txn_ack_world import Stage, ack, play
from tests.unit.broker.txn_world import (
    T1,
    T2,
    T3,
    quiet,
)
from tests.unit.broker.world import NAME

SEGMENT = TopicName.parse("segment://public/default/orders/0000-ffff-1")

# --- commit and abort


@pytest.mark.parametrize("type_", [EXCLUSIVE, FAILOVER, SHARED, KEY_SHARED])
def test_a_commit_acknowledges_and_an_abort_delivers_again(type_: SubscriptionType) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1, T2)
        client = stage.client(type_)
        await quiet()
        assert client.bodies() == numbered(5)
        await ack(client, T1, "0", "2")
        await ack(client, T2, "1", "3")
        assert stage.subscription.backlog() == 5
        await stage.broker.commit(T1)
        assert stage.subscription.backlog() == 3
        client.got.clear()
        await stage.broker.abort(T2)
        await quiet()
        order = ["1", "3", "4"] if type_ in (EXCLUSIVE, FAILOVER) else ["1", "3"]
        assert client.bodies() == order
        assert await stage.ops() == 0

    play(scenario)


def test_an_abort_counts_as_a_redelivery() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        await ack(client, T1, "0")
        client.take()
        client.got.clear()
        await stage.broker.abort(T1)
        await quiet()
        assert client.counts() == [("0", 1)]

    play(scenario)


@pytest.mark.parametrize("type_", [EXCLUSIVE, FAILOVER])
def test_cumulative_acks_end_with_their_transaction(type_: SubscriptionType) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1, T2)
        client = stage.client(type_)
        await quiet()
        await ack(client, T1, "1", cumulative=True)
        await ack(client, T1, "2", cumulative=True)
        client.got.clear()
        await stage.broker.abort(T1)
        await quiet()
        assert client.bodies() == numbered(5)
        await ack(client, T2, "3", cumulative=True)
        await stage.broker.commit(T2)
        assert stage.subscription.backlog() == 1
        client.leave()
        after = stage.client(type_)
        await quiet()
        assert after.bodies() == ["4"]

    play(scenario)


def test_individual_acks_are_merged_while_another_holds_everything_before() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1, T2)
        client = stage.client(EXCLUSIVE)
        await quiet()
        await ack(client, T2, "1", cumulative=True)
        await ack(client, T1, "3")
        await stage.broker.commit(T1)
        await stage.broker.abort(T2)
        client.take()
        client.got.clear()
        client.leave()
        after = stage.client(EXCLUSIVE)
        await quiet()
        assert after.bodies() == ["0", "1", "2", "4"]

    play(scenario)


# --- messages of a batch


def test_messages_of_a_batch_go_their_own_ways() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.publish("batch", batch=3)
        await stage.begin(T1, T2, T3)
        client = stage.client()
        await quiet()
        assert client.consumer.unacked == 3
        await ack(client, T1, "batch", unacked=0b011)
        with pytest.raises(TransactionConflict):
            await ack(client, T2, "batch", unacked=0b011)
        await ack(client, T2, "batch", unacked=0b110)
        client.nack("batch")
        await quiet()
        assert client.take()[-1].ack_set == (0b010,), "the one that nobody holds"
        await stage.broker.abort(T2)
        await quiet()
        assert client.take()[-1].ack_set == (0b011,)
        await stage.broker.commit(T1)
        assert stage.subscription.cursor.unacked_indexes(client.position_of("batch")) == 0b011
        assert client.consumer.unacked == 2
        await ack(client, T3, "batch")
        await stage.broker.commit(T3)
        assert (stage.subscription.backlog(), client.consumer.unacked) == (0, 0)

    play(scenario, messages=0)


def test_messages_of_a_batch_stay_held_at_another_owner() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.publish("batch", batch=3)
        await stage.begin(T1, T2)
        client = stage.client()
        await quiet()
        await ack(client, T1, "batch", unacked=0b011)
        later = await stage.moved()
        again = later.client()
        await quiet()
        assert again.take()[-1].ack_set == (0b011,)
        with pytest.raises(TransactionConflict):
            await ack(again, T2, "batch", unacked=0b011)
        await later.broker.commit(T1)
        assert later.subscription.cursor.unacked_indexes(again.position_of("batch")) == 0b011

    play(scenario, messages=0)


# --- refusals


def test_conflicts_are_refused_and_store_nothing() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1, T2)
        client = stage.client(EXCLUSIVE)
        await quiet()
        await ack(client, T1, "1")
        client.ack("3")
        for bodies, cumulative in ((["1"], False), (["3"], False), (["2"], True)):
            with pytest.raises(TransactionConflict):
                await ack(client, T2, *bodies, cumulative=cumulative)
        with pytest.raises(TransactionConflict):
            await ack(client, T1, "1")
        nowhere = [Ack(Position(10_000, 0))]
        with pytest.raises(TransactionConflict):
            await stage.subscription.ack_in_txn(client.consumer, T2, nowhere)
        assert await stage.ops() == 1

    play(scenario)


def test_a_transaction_that_has_ended_or_never_was_acknowledges_nothing() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1, T2)
        await stage.broker.commit(T1)
        await stage.broker.abort(T2)
        client = stage.client(EXCLUSIVE)
        await quiet()
        for txn in (T1, T2, T3):
            with pytest.raises(TransactionConflict):
                await ack(client, txn, "0")
            with pytest.raises(TransactionConflict):
                await stage.subscription.ack_in_txn(client.consumer, txn, [])
        await stage.begin(T3)
        await ack(client, T3, "0")
        assert await stage.ops() == 1

    play(scenario)


def test_who_may_not_acknowledge_in_a_transaction() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client(SHARED)
        await quiet()
        with pytest.raises(NotAllowed):
            await ack(client, T1, "0", cumulative=True)
        client.leave()
        with pytest.raises(ConsumerNotFound):
            await ack(client, T1, "0")

    play(scenario)


@pytest.mark.parametrize("name", [NAME, SEGMENT])
def test_a_repeated_cumulative_ack_succeeds_on_segments(name: TopicName) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1, T2)
        client = stage.client(EXCLUSIVE)
        await quiet()
        await ack(client, T1, "2", cumulative=True)
        for body in ("1", "2"):
            if name is SEGMENT:
                await ack(client, T1, body, cumulative=True)
            else:
                with pytest.raises(TransactionConflict):
                    await ack(client, T1, body, cumulative=True)
        await stage.broker.commit(T1)
        if name is SEGMENT:
            await ack(client, T2, "2", cumulative=True)
            with pytest.raises(TransactionConflict):
                await ack(client, T1, "2", cumulative=True)
        assert stage.subscription.backlog() == 2

    play(scenario, name=name)


def test_a_decision_that_was_not_told_yet_is_no_conflict() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1, T2)
        client = stage.client(EXCLUSIVE)
        await quiet()
        await ack(client, T1, "1", cumulative=True)
        await stage.broker.store.end(T1, "COMMITTED", 0)  # elsewhere
        await ack(client, T2, "2", cumulative=True)
        assert stage.subscription.backlog() == 3

    play(scenario)


# --- while it is undecided


def test_plain_acks_of_held_messages_are_dropped() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client(EXCLUSIVE)
        await quiet()
        await ack(client, T1, "1")
        client.ack("1")
        client.ack("3", cumulative=True)
        assert stage.subscription.backlog() == 2
        await stage.broker.abort(T1)
        client.take()
        client.got.clear()
        await quiet()
        assert client.bodies() == ["1", "4"]
        client.ack("4", cumulative=True)
        assert stage.subscription.backlog() == 0

    play(scenario)


def test_a_plain_ack_of_everything_passes_over_what_is_held() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client(EXCLUSIVE)
        await quiet()
        await ack(client, T1, "1", cumulative=True)
        client.ack("0", cumulative=True)
        client.ack("3", cumulative=True)
        assert stage.subscription.backlog() == 3
        await stage.broker.commit(T1)
        assert stage.subscription.backlog() == 1

    play(scenario)


@pytest.mark.parametrize("type_", [EXCLUSIVE, FAILOVER, SHARED, KEY_SHARED])
def test_held_messages_go_to_nobody_else(type_: SubscriptionType) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client(type_)
        await quiet()
        await ack(client, T1, "0", "2")
        client.take()
        client.got.clear()
        stage.subscription.redeliver(client.consumer)
        await quiet()
        assert client.bodies() == ["1", "3", "4"]
        client.leave()
        after = stage.client(type_, "d")
        await quiet()
        assert after.bodies() == ["1", "3", "4"]
        after.take()
        after.got.clear()
        await stage.broker.abort(T1)
        await quiet()
        order = numbered(5) if type_ in (EXCLUSIVE, FAILOVER) else ["0", "2"]
        assert after.bodies() == order

    play(scenario)


def test_later_commands_find_what_an_earlier_one_holds() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client(EXCLUSIVE)
        await quiet()
        positions = [client.position_of(body) for body in numbered(5)]
        client.got.clear()
        answer = stage.subscription.ack_in_txn(client.consumer, T1, [Ack(positions[1])])
        stage.subscription.ack(client.consumer, [Ack(positions[2])], cumulative=True)
        stage.subscription.redeliver(client.consumer)
        await answer
        await quiet()
        assert client.bodies() == ["3", "4"]
        await stage.broker.abort(T1)
        await quiet()
        assert client.bodies()[2:] == ["1", "3", "4"]

    play(scenario)


@pytest.mark.parametrize("type_", [SHARED, KEY_SHARED])
def test_held_messages_count_as_unacknowledged_until_the_commit(type_: SubscriptionType) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client(type_)
        await quiet()
        assert client.bodies() == ["0", "1"], "the limit"
        await ack(client, T1, "0", "1")
        await quiet()
        assert client.consumer.blocked
        await stage.broker.commit(T1)
        await quiet()
        assert client.bodies() == numbered(4)
        assert client.consumer.unacked == 2

    play(scenario, limits=Limits(consumer_unacked_messages=2))


@pytest.mark.parametrize("type_", [SHARED, KEY_SHARED])
def test_a_message_before_the_read_position_comes_once(type_: SubscriptionType) -> None:
    """Held before anybody read it here, and free again before or after dispatch came to it."""

    async def scenario(stage: Stage) -> None:
        await stage.begin(T1, T2)
        client = stage.client(type_)
        await quiet()
        await ack(client, T1, "0")
        await ack(client, T2, "3")
        later = await stage.moved()
        again = Client(later.subscription, type_, permits=1)
        await quiet()
        assert len(again.bodies()) == 1
        await later.broker.abort(T1)
        await later.broker.abort(T2)
        again.consumer.flow(100)
        await quiet()
        assert sorted(again.bodies()) == numbered(5)

    play(scenario)
