"""Topics that are loaded anew, and servers that are killed: what was committed stays, no more.

The numbers are those of the scenarios in docs/reference/transaction-scenarios.md.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from magnetar import TransactionState
from tests.client_e2e.scene import (
    COMES_S,
    FIRST,
    KINDS,
    Scene,
    drain,
    needs,
    numbers,
    play,
    send,
    silence,
)
from tests.client_e2e.target import SERVER, SERVICE_URL, Feature, Target
from tests.client_e2e.test_transactions import WAYS, Way

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        SERVER not in os.environ and SERVICE_URL not in os.environ,
        reason="takes minutes: `make e2e` and `make e2e-pulsar` run it",
    ),
]

COMMITTED = TransactionState.COMMITTED
Move = Callable[[Scene], Awaitable[None]]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """A server that was started again has new pipes."""


async def unload(scene: Scene) -> None:
    await scene.unload()


async def kill(scene: Scene) -> None:
    """kill -9, and start it again."""
    process = scene.target.process
    assert process is not None
    await asyncio.to_thread(process.kill)
    await asyncio.to_thread(process.start)


MOVES = (
    pytest.param(unload, marks=needs(Feature.UNLOADING), id="unload"),
    pytest.param(kill, marks=needs(Feature.RESTARTS), id="kill"),
)
moves = pytest.mark.parametrize("move", MOVES)
ways = pytest.mark.parametrize("way", WAYS)


@moves
@pytest.mark.parametrize("kind", KINDS)
def test_clients_go_on(own_target: Target, kind: str, move: Move) -> None:
    """V5DagWatchAutoReconnectTest, V5StreamConsumerAutoReconnectTest: nothing lost or twice."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(kind)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic, send_timeout=120) as producer:
            await send(producer, range(50))
            found = await drain(consumer, 50, consumer.ack)
            await consumer.ack(found[-1])
            await move(scene)
            await send(producer, range(50, 100))
            again = await drain(consumer, 50, consumer.ack, within=90.0)
        assert numbers(again) == list(range(50, 100))
        await silence(consumer)

    play(own_target, story, operation_timeout=120.0)


@moves
@ways
def test_what_is_committed_or_aborted_stays_so(own_target: Target, way: Way, move: Move) -> None:
    """17, 18: ...VisibleAfterBrokerRestart, testAbortedMessagesFilteredAfterBrokerRestart."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(way.kind)
        async with await scene.client.producer(topic, send_timeout=120) as producer:
            async with way.begin(scene) as txn:
                await send(producer, range(10), txn=txn)
            lost = await way.begin(scene)
            await send(producer, range(10, 20), txn=lost)
            await lost.abort()
            await move(scene)
            await producer.send(b"100")
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        assert numbers(await drain(consumer, 11, consumer.ack)) == [*range(10), 100]
        await silence(consumer)

    play(own_target, story, operation_timeout=120.0)


@moves
@ways
def test_committed_acknowledgements_stay(own_target: Target, way: Way, move: Move) -> None:
    """19, 24 (F2): testTransactionalAcksSurviveBrokerRestart, right after five commits."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(way.kind)
        async with await scene.client.producer(topic, batching=False) as producer:
            await send(producer, range(5))
        async with await scene.client.queue_consumer(topic, "s", initial_position=FIRST) as first:
            for message in await drain(first, 5):
                async with way.begin(scene) as txn:
                    await first.ack(message, txn=txn)
                assert txn.state is COMMITTED
            await move(scene)
        async with await scene.client.queue_consumer(topic, "s") as again:
            await silence(again, 3.0)

    play(own_target, story, operation_timeout=120.0)


@moves
@ways
def test_acknowledgements_of_related_names_stay(own_target: Target, way: Way, move: Move) -> None:
    """31 (F13): `job` and `job-retry` on one topic; committed acks count in the backlog."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(way.kind)
        names = ("job-retry", "job")
        consumers = [
            await scene.client.queue_consumer(topic, name, initial_position=FIRST) for name in names
        ]
        async with await scene.client.producer(topic, batching=False) as producer:
            await send(producer, range(3))
        for consumer in consumers:
            for message in await drain(consumer, 3):
                async with way.begin(scene) as txn:
                    await consumer.ack(message, txn=txn)
            await consumer.close()
        await move(scene)
        for name in names:
            async with await scene.client.queue_consumer(topic, name) as again:
                await silence(again, 3.0)

    play(own_target, story, operation_timeout=120.0)


@moves
@ways
def test_a_commit_after_a_move_applies_the_acknowledgements(
    own_target: Target, way: Way, move: Move
) -> None:
    """23 (F1): acks in a transaction, the topic is loaded anew, then the commit."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(way.kind)
        async with await scene.client.producer(topic, batching=False) as producer:
            await send(producer, range(5))
        async with await scene.client.queue_consumer(topic, "s", initial_position=FIRST) as first:
            txn = await way.begin(scene, 120.0)
            for message in await drain(first, 5):
                await first.ack(message, txn=txn)
            await move(scene)
            await txn.commit()
            assert txn.state is COMMITTED
        async with await scene.client.queue_consumer(topic, "s") as again:
            await silence(again, 3.0)

    play(own_target, story, operation_timeout=120.0)


@moves
@ways
def test_an_open_transaction_on_a_fresh_topic_stays_unseen(
    own_target: Target, way: Way, move: Move
) -> None:
    """20, 25 (F3): failover with an open transaction; nothing is seen before the commit."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(way.kind)
        async with await scene.client.producer(topic, send_timeout=120) as producer:
            txn = await way.begin(scene, 120.0)
            await send(producer, range(10), txn=txn)
            await move(scene)
            consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
            await silence(consumer, 3.0)
            await txn.commit()
            assert numbers(await drain(consumer, 10, consumer.ack)) == list(range(10))

    play(own_target, story, operation_timeout=120.0)


@moves
@needs(Feature.BATCH_INDEX_ACKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_txn", [False, True], ids=["plain", "transaction"])
def test_messages_of_a_batch_stay_acknowledged(
    own_target: Target, kind: str, in_txn: bool, move: Move
) -> None:
    """36 (F20): batch-index acks across a restart."""
    way = Way(kind, None if kind == "topic" else False)

    async def story(scene: Scene) -> None:
        topic = await scene.topic(kind)
        async with await scene.client.producer(topic) as producer:
            await send(producer, range(10))
        async with await scene.client.queue_consumer(topic, "s", initial_position=FIRST) as first:
            found = await drain(first, 10)
            if in_txn:
                async with way.begin(scene) as txn:
                    await first.ack_many(found[::2], txn=txn)
            else:
                await first.ack_many(found[::2])
            await move(scene)
        async with await scene.client.queue_consumer(topic, "s") as again:
            left = await drain(again, 5, again.ack, within=COMES_S)
            assert numbers(left) == numbers(found[1::2])
            await silence(again)

    play(own_target, story, operation_timeout=120.0)
