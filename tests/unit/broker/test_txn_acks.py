"""Acknowledgements in transactions: from a consumer's command to the durable cursor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from magnetar.broker.acks import Ack
from magnetar.broker.subscription import Subscription
from magnetar.broker.topic import Topic
from magnetar.errors import (
    ConsumerNotFound,
    MagnetarError,
    ManagedLedgerFenced,
    NotAllowed,
    ServiceNotReady,
    TransactionConflict,
)
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import SubscriptionType
from magnetar.runtime.limits import Limits
from magnetar.txn.ids import metadata_id
from magnetar.txn.records import header_key
from magnetar.wire.messages import Send, TxnId
from tests.unit.broker.subscription_world import (
    EXCLUSIVE,
    FAILOVER,
    KEY_SHARED,
    SHARED,
    Client,
    numbered,
)
from tests.unit.broker.txn_world import (
    T1,
    T2,
    T3,
    Broker,
    TxnWorld,
    cut,
    heal,
    in_txn_world,
    joined,
    quiet,
    taken,
)
from tests.unit.broker.world import NAME, entry, message, receipts

SEGMENT = TopicName.parse("segment://public/default/orders/0000-ffff-1")
Scenario = Callable[["Stage"], Awaitable[None]]


class Stage:
    """A broker, a topic with a subscription, and messages `0`, `1`, ... in it."""

    def __init__(self, broker: Broker, topic: Topic) -> None:
        self.world = broker.world
        self.broker = broker
        self.topic = topic

    @property
    def subscription(self) -> Subscription:
        return self.topic.subscriptions["s"]

    async def publish(self, *texts: str, batch: int | None = None) -> None:
        producer = await joined(self.topic)
        for number, text in enumerate(texts):
            body = entry(number, text, batch=batch)
            producer.send(Send(1, number, batch or 1, body) if batch else message(number, text))
        await receipts(producer, len(texts))
        await self.topic.remove_producer(producer)

    def client(self, type_: SubscriptionType = SHARED, name: str = "c") -> Client:
        return Client(self.subscription, type_, name)

    async def begin(self, *txns: TxnId) -> None:
        for txn in txns:
            await self.broker.begin(txn)

    async def moved(self) -> Stage:
        """The topic at another broker, the former one is dead."""
        self.broker.kill()
        return await self.world_stage()

    async def world_stage(self) -> Stage:
        broker = self.world.broker()
        return Stage(broker, await broker.topic(self.topic.name))

    async def ops(self) -> int:
        return len(await self.broker.keys())

    async def stored_mark(self) -> Position:
        """What a later owner would find acknowledged."""
        later = await self.world_stage()
        mark = later.subscription.cursor.mark_delete
        await later.topic.close()
        return mark


async def ack(
    client: Client, txn: TxnId, *bodies: str, cumulative: bool = False, unacked: int = 0
) -> None:
    acks = [Ack(client.position_of(body), unacked) for body in bodies]
    await client.subscription.ack_in_txn(client.consumer, txn, acks, cumulative=cumulative)


def play(
    scenario: Scenario, *, name: TopicName = NAME, messages: int = 5, limits: Limits | None = None
) -> None:
    async def scene(world: TxnWorld) -> None:
        broker = world.broker()
        stage = Stage(broker, await broker.topic(name))
        await stage.topic.create_subscription("s", Position(-1, -1))
        await stage.publish(*numbered(messages))
        await scenario(stage)

    in_txn_world(scene, limits)


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
        for txn in (T1, T2, T3, TxnId(0, 1)):
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


# --- what is durable


def test_an_intent_is_durable_before_the_answer_and_goes_after_the_cursor_write() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        stage.world.slow = 0.1
        answer = asyncio.create_task(ack(client, T1, "0"))
        await quiet(0.05)
        assert not answer.done()
        await answer
        assert await stage.ops() == 1
        await stage.broker.commit(T1)
        assert stage.subscription.backlog() == 4
        assert await stage.ops() == 1, "the cursor is not written yet"
        await quiet(1)
        stage.world.slow = 0.0
        assert await stage.ops() == 0
        assert await stage.stored_mark() == client.position_of("0")

    play(scenario)


@pytest.mark.parametrize("type_", [EXCLUSIVE, SHARED])
def test_committed_acks_survive_a_crash_at_any_moment(type_: SubscriptionType) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1, T2)
        client = stage.client(type_)
        await quiet()
        await ack(client, T1, "0", "1")
        await ack(client, T2, "2")
        stage.world.slow = 0.1
        await stage.broker.store.end(T1, "COMMITTED", 0)
        stage.broker.decisions.learn(T1, "COMMITTED")
        stage.broker.kill()
        stage.world.slow = 0.0
        later = await stage.world_stage()
        again = later.client(type_)
        await quiet()
        assert again.bodies() == ["3", "4"], "one is committed, the other still open"
        await later.broker.abort(T2)
        await quiet()
        assert sorted(set(again.bodies())) == ["2", "3", "4"]
        await quiet(1)
        assert await later.ops() == 0

    play(scenario)


def test_a_commit_at_another_owner_applies_what_the_former_one_took() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1, T2)
        client = stage.client(EXCLUSIVE)
        await quiet()
        await ack(client, T1, "1", cumulative=True)
        await ack(client, T1, "2", cumulative=True)
        later = await stage.moved()
        again = later.client(EXCLUSIVE)
        await quiet()
        assert again.bodies() == ["3", "4"]
        with pytest.raises(TransactionConflict):
            await ack(again, T2, "3", cumulative=True)
        await later.broker.commit(T1)
        assert later.subscription.backlog() == 2
        await quiet(1)
        assert await later.ops() == 0

    play(scenario)


def test_a_former_owner_does_not_answer() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        later = await stage.world_stage()
        with pytest.raises(ManagedLedgerFenced):
            await ack(client, T1, "0")
        await later.broker.commit(T1)
        await later.subscription.rescan_transactions()
        await quiet()
        assert later.subscription.backlog() == 4, "it came too late, and is part of the commit"
        assert await later.ops() == 0

    play(scenario)


def test_an_intent_that_cannot_be_written_holds_nothing() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1, T2)
        client = stage.client()
        await quiet()
        cut(stage.broker)
        with pytest.raises(MagnetarError):
            await ack(client, T1, "0")
        heal(stage.broker)
        await quiet()
        await ack(client, T2, "0")
        await stage.broker.commit(T2)
        assert stage.subscription.backlog() == 4

    play(scenario)


@pytest.mark.parametrize("type_", [EXCLUSIVE, SHARED, KEY_SHARED])
def test_what_dispatch_went_by_comes_back_if_the_intent_fails(type_: SubscriptionType) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client(type_)
        await quiet()
        client.take()
        stage.world.slow = 0.1
        answer = asyncio.create_task(ack(client, T1, "0"))
        await quiet(0.02)
        client.leave()
        after = stage.client(type_, "d")
        await quiet(0.02)
        assert after.bodies() == numbered(4, 1)
        cut(stage.broker)
        with pytest.raises(MagnetarError):
            await answer
        heal(stage.broker)
        stage.world.slow = 0
        await quiet()
        assert set(after.bodies()) == set(numbered(5))

    play(scenario)


def test_a_commit_covers_what_is_in_flight() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        await ack(client, T1, "0")
        stage.world.slow = 0.1
        answer = asyncio.create_task(ack(client, T1, "1"))
        await quiet(0.05)
        stage.broker.decisions.learn(T1, "COMMITTED")
        assert stage.subscription.backlog() == 5
        with pytest.raises(TransactionConflict):
            await ack(client, T1, "2")
        await answer
        assert stage.subscription.backlog() == 3

    play(scenario)


def test_a_command_goes_on_when_its_sender_is_gone() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        stage.world.slow = 0.1
        answer = asyncio.create_task(ack(client, T1, "1"))
        await quiet(0.05)
        answer.cancel()
        await quiet(2)
        stage.world.slow = 0
        await stage.broker.commit(T1)
        assert stage.subscription.backlog() == 4

    play(scenario)


def test_a_missing_header_means_aborted() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        await ack(client, T1, "0")
        await stage.world.metadata.connect().delete(header_key(T1))
        later = await stage.moved()
        again = later.client()
        await quiet()
        assert again.bodies() == numbered(5)
        assert await later.ops() == 0

    play(scenario)


# --- the ends of subscriptions


def test_a_seek_ends_what_is_held() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1, T2)
        client = stage.client()
        await quiet()
        await ack(client, T1, "0", "1")
        await ack(client, T2, "2")
        first = client.position_of("0")
        stage.world.slow = 0.1
        seek = asyncio.create_task(stage.subscription.seek(first))
        await quiet(0.05)
        stage.broker.decisions.learn(T1, "COMMITTED")
        await seek
        stage.world.slow = 0
        await stage.broker.store.end(T1, "COMMITTED", 0)
        again = stage.client()
        await quiet(1)
        assert again.bodies() == numbered(5)
        assert await stage.ops() == 0
        await stage.broker.commit(T2)
        assert stage.subscription.backlog() == 5

    play(scenario)


def test_an_ack_from_before_a_seek_does_not_count_after_it() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        first = client.position_of("0")
        stage.world.slow = 0.1
        answer = asyncio.create_task(ack(client, T1, "0"))
        await quiet(0.05)
        await stage.subscription.seek(first)
        with pytest.raises(ServiceNotReady):
            await answer
        stage.world.slow = 0
        await quiet(1)
        assert await stage.ops() == 0
        await stage.broker.commit(T1)
        assert stage.subscription.backlog() == 5

    play(scenario)


def test_acks_of_another_incarnation_are_dropped_at_recovery() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        await ack(client, T1, "0")
        stage.broker.kill()
        later = await stage.world_stage()
        await later.topic.ledger.delete_cursor("s")
        await later.topic.ledger.create_cursor("s", Position(-1, -1))
        last = await later.moved()
        await last.broker.commit(T1)
        await quiet(1)
        assert (last.subscription.backlog(), await last.ops()) == (5, 0)

    play(scenario)


def test_ops_go_with_their_subscription() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        await ack(client, T1, "0")
        await stage.topic.delete_subscription("s", force=True)
        assert await stage.ops() == 0
        await stage.broker.commit(T1)

    play(scenario)


def test_subscriptions_with_related_names_do_not_meet() -> None:
    async def scenario(stage: Stage) -> None:
        txns = [metadata_id(0, number) for number in (1, 10, 100)]
        await stage.begin(*txns)
        await stage.topic.create_subscription("s-retry", Position(-1, -1))
        retry = Client(stage.topic.subscriptions["s-retry"], SHARED)
        client = stage.client()
        await quiet()
        for number, txn in enumerate(txns):
            await ack(client, txn, str(number))
            await ack(retry, txn, str(number))
        await stage.broker.commit(txns[0])
        await quiet(1)
        assert await stage.ops() == 4
        later = await stage.moved()
        await later.broker.commit(txns[1])
        await later.broker.abort(txns[2])
        await quiet(1)
        assert [each.backlog() for each in later.topic.subscriptions.values()] == [3, 3]
        assert await later.ops() == 0

    play(scenario)


def test_a_sealed_topic_is_drained_when_the_commit_is_durable() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client(EXCLUSIVE)
        await quiet()
        await stage.topic.terminate()
        await quiet()
        await ack(client, T1, "4", cumulative=True)
        seen = stage.topic.ends.version
        assert stage.subscription.backlog() == 5
        await stage.broker.commit(T1)
        assert await stage.topic.ends.past(seen) > seen
        assert stage.subscription.backlog() == 0
        await stage.subscription.ack_durable()
        assert await stage.stored_mark() == client.position_of("4")

    play(scenario)


def test_dispatch_waits_for_recovery() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        await ack(client, T1, "0")
        later = await stage.moved()
        cut(later.broker)
        again = later.client()
        await quiet()
        assert again.bodies() == []
        heal(later.broker)
        await quiet(5)
        assert again.bodies() == numbered(4, 1)
        assert await taken(again.consumer) == []

    play(scenario)
