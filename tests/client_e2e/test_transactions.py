"""Transactions of both kinds: what is seen when, conflicts, timeouts, order, layout changes.

The numbers are those of the scenarios in docs/reference/transaction-scenarios.md.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Final, NamedTuple

import pytest

from magnetar import EARLIEST, SubscriptionType, TransactionState
from magnetar.client.transaction.transaction import Beginning
from magnetar.errors import TransactionAborted, TransactionConflict
from tests.client_e2e.scene import (
    CHANGES,
    COMES_S,
    FIRST,
    Scene,
    drain,
    needs,
    numbers,
    play,
    send,
    silence,
    until,
)
from tests.client_e2e.target import Feature, Target

COMMITTED: Final = TransactionState.COMMITTED
ABORTED: Final = TransactionState.ABORTED


class Way(NamedTuple):
    """A kind of transactions, and the topics that they are for."""

    kind: str
    scalable: bool | None

    def begin(self, scene: Scene, seconds: float = 60.0) -> Beginning:
        return scene.client.transaction(timeout=seconds, scalable=self.scalable)


SCALABLE: Final = needs(Feature.SCALABLE_TOPICS, Feature.SCALABLE_TRANSACTIONS)
WAYS: Final = (
    pytest.param(Way("topic", None), marks=SCALABLE, id="topic"),
    pytest.param(Way("persistent", False), marks=needs(Feature.LEGACY_TRANSACTIONS), id="markers"),
)
ways = pytest.mark.parametrize("way", WAYS)


# --- what is seen


@ways
def test_a_commit_makes_messages_visible(target: Target, way: Way) -> None:
    """1, 54: nothing before, everything after."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(way.kind)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic) as producer:
            txn = await way.begin(scene)
            await send(producer, range(20), txn=txn)
            await silence(consumer)
            await txn.commit()
            assert txn.state is COMMITTED
            found = await drain(consumer, 20, consumer.ack)
            assert numbers(found) == list(range(20))
            assert {each.transaction for each in found} == {txn.txn_id}

    play(target, story)


@ways
def test_what_is_aborted_is_never_delivered(target: Target, way: Way) -> None:
    """2, 3, 54: only what comes behind it."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(way.kind)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic) as producer:
            txn = await way.begin(scene)
            await send(producer, range(20), txn=txn)
            await txn.abort()
            assert txn.state is ABORTED
            await producer.send(b"100")
        assert numbers(await drain(consumer, 1, consumer.ack)) == [100]
        await silence(consumer)
        with pytest.raises(TransactionAborted):
            await txn.commit()

    play(target, story)


@ways
def test_a_block_that_fails_aborts(target: Target, way: Way) -> None:
    async def story(scene: Scene) -> None:
        topic = await scene.topic(way.kind)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic) as producer:
            with pytest.raises(ZeroDivisionError):  # noqa: PT012  that is the point of it
                async with way.begin(scene) as txn:
                    await producer.send(b"1", txn=txn)
                    raise ZeroDivisionError
            assert txn.state is ABORTED
            async with way.begin(scene) as txn:
                await producer.submit(b"2", txn=txn)
        assert numbers(await drain(consumer, 1, consumer.ack)) == [2]

    play(target, story)


@ways
def test_a_commit_is_atomic_over_topics(target: Target, way: Way) -> None:
    """4, 21: testCommitAcrossMultipleTopics, testMultiTopicAtomicCommit."""

    async def story(scene: Scene) -> None:
        topics = [await scene.topic(way.kind) for _ in range(3)]
        consumer = await scene.client.queue_consumer(topics, "s", initial_position=FIRST)
        producers = [await scene.client.producer(topic) for topic in topics]
        for outcome in ("abort", "commit"):
            txn = await way.begin(scene)
            for number, producer in enumerate(producers):
                await producer.send(f"{outcome} {number}".encode(), txn=txn)
            await (txn.commit() if outcome == "commit" else txn.abort())
        found = await drain(consumer, 3, consumer.ack)
        assert sorted(each.value for each in found) == [b"commit 0", b"commit 1", b"commit 2"]
        await silence(consumer)

    play(target, story)


@pytest.mark.parametrize("parts", [pytest.param(3, marks=needs(Feature.ADMINISTRATION))])
@ways
def test_a_commit_is_atomic_over_segments(target: Target, way: Way, parts: int) -> None:
    """5: testMultiSegmentTransactionCommit, and partitions."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(way.kind, parts)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic) as producer, way.begin(scene) as txn:
            await send(producer, range(60), keys=30, txn=txn)
            await silence(consumer)
        assert numbers(await drain(consumer, 60, consumer.ack)) == list(range(60))

    play(target, story)


@ways
def test_transactions_at_once_of_which_half_are_aborted(target: Target, way: Way) -> None:
    """6: testConcurrentTransactionsMixedCommitAbort."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(way.kind)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic) as producer:
            txns = [await way.begin(scene) for _ in range(6)]
            for turn in range(5):
                for number, txn in enumerate(txns):
                    await producer.send(b"%d" % (number * 10 + turn), key="k", txn=txn)
            for number, txn in enumerate(txns):
                await (txn.abort() if number % 2 else txn.commit())
        found = await drain(consumer, 15, consumer.ack)
        assert numbers(found) == [10 * n + turn for n in (0, 2, 4) for turn in range(5)]
        await silence(consumer)

    play(target, story)


@ways
def test_a_large_transaction_is_there_exactly_once(target: Target, way: Way) -> None:
    """11: testLargeTransaction."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(way.kind)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic) as producer, way.begin(scene) as txn:
            await send(producer, range(500), txn=txn)
        assert numbers(await drain(consumer, 500, consumer.ack)) == list(range(500))
        await silence(consumer)

    play(target, story)


@ways
def test_an_open_transaction_pins_later_plain_messages(target: Target, way: Way) -> None:
    """15: testOpenTransactionPinsLaterNonTransactionalWrites; 30: readers end at what is seen."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(way.kind)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic) as producer:
            await producer.send(b"0")
            assert numbers(await drain(consumer, 1, consumer.ack)) == [0]
            txn = await way.begin(scene)
            await producer.send(b"1", txn=txn)
            await producer.send(b"2")
            await silence(consumer)
            await txn.commit()
            assert numbers(await drain(consumer, 2, consumer.ack)) == [1, 2]

    play(target, story)


@needs(Feature.LEGACY_TRANSACTIONS)
def test_a_reader_ends_at_what_is_committed(target: Target) -> None:
    """30, 60: the last message that can be seen."""

    async def story(scene: Scene) -> None:
        topic = await scene.regular()
        async with await scene.client.producer(topic) as producer:
            await producer.send(b"0")
            txn = await scene.client.transaction(scalable=False)
            await producer.send(b"1", txn=txn)
            reader = await scene.client.reader(topic, start=EARLIEST)
            assert (await reader.receive(timeout=COMES_S)).value == b"0"
            assert not await reader.has_message_available()
            await txn.commit()
            assert await reader.has_message_available()
            assert (await reader.receive(timeout=COMES_S)).value == b"1"

    play(target, story)


@ways
def test_asynchronous_sends_keep_their_order(target: Target, way: Way) -> None:
    """27, 55 (F7): transactional and plain ones of one producer, none awaited."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(way.kind)
        consumer = await scene.client.stream_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic, batching=False) as producer:
            txn = await way.begin(scene)
            for number in range(100):
                part_of = txn if number % 2 else None
                await producer.submit(b"%d" % number, key="k", txn=part_of)
            await producer.flush()
            await txn.commit()
        found = await drain(consumer, 100, consumer.ack_cumulative)
        assert [int(each.value) for each in found] == list(range(100))

    if way.kind == "persistent" and Feature.STREAMS_OF_REGULAR not in target.features:
        pytest.skip(f"{target.version} does not offer {Feature.STREAMS_OF_REGULAR.value}")
    play(target, story)


@ways
def test_a_dangling_transaction_is_aborted_in_time(target: Target, way: Way) -> None:
    """16, 61: testTimeoutSweepAbortsDanglingTransaction; the client is gone."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(way.kind)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic) as producer:
            txn = await way.begin(scene, seconds=3.0)
            await producer.send(b"1", txn=txn)
            await producer.send(b"2")
            await until(lambda: txn.state is TransactionState.TIMED_OUT)
            assert numbers(await drain(consumer, 1, consumer.ack, within=90.0)) == [2]
            with pytest.raises(TransactionAborted):
                await txn.commit()
            with pytest.raises(TransactionAborted):
                await producer.send(b"3", txn=txn)

    play(target, story)


# --- acknowledging


@ways
def test_consuming_and_producing_in_one_step(target: Target, way: Way) -> None:
    """12, 21: testTransactionalConsumeAndProduce, testConsumeTransformProduce."""

    async def story(scene: Scene) -> None:
        source, sink = [await scene.topic(way.kind) for _ in range(2)]
        client = scene.client
        results = await client.queue_consumer(sink, "r", initial_position=FIRST)
        async with (
            await client.producer(source) as inputs,
            await client.producer(sink) as outputs,
        ):
            await send(inputs, range(10))
            async with await client.queue_consumer(source, "s", initial_position=FIRST) as consumer:
                for _ in range(10):
                    message = await consumer.receive(timeout=COMES_S)
                    async with way.begin(scene) as txn:
                        value = b"%d" % (int(message.value) * 2)
                        await outputs.send(value, key=message.key, txn=txn)
                        consumer.ack(message, txn=txn)
            assert numbers(await drain(results, 10, results.ack)) == list(range(0, 20, 2))
            async with await client.queue_consumer(source, "s") as again:
                await silence(again)

    play(target, story)


@ways
def test_an_abort_delivers_again_and_a_commit_settles(target: Target, way: Way) -> None:
    """13, 56: testTransactionalAckAbortRedeliversThenCommitSticks."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(way.kind)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic, batching=False) as producer:
            await send(producer, range(5))
        first = await way.begin(scene)
        for message in await drain(consumer, 5):
            consumer.ack(message, txn=first)
        await first.abort()
        async with way.begin(scene) as second:
            again = await drain(consumer, 5)
            for message in again:
                consumer.ack(message, txn=second)
        assert numbers(again) == list(range(5))
        await consumer.close()
        async with await scene.client.queue_consumer(topic, "s") as last:
            await silence(last)

    play(target, story)


@ways
def test_subscriptions_acknowledge_on_their_own(target: Target, way: Way) -> None:
    """14, 57: testMultipleSubscriptionsIndependentTransactionalAcks."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(way.kind)
        consumers = [
            await scene.client.queue_consumer(topic, name, initial_position=FIRST)
            for name in ("committed", "aborted")
        ]
        async with await scene.client.producer(topic) as producer:
            await send(producer, range(5))
        for consumer, outcome in zip(consumers, ("commit", "abort"), strict=True):
            txn = await way.begin(scene)
            for message in await drain(consumer, 5):
                consumer.ack(message, txn=txn)
            await (txn.commit() if outcome == "commit" else txn.abort())
            await consumer.close()
        async with await scene.client.queue_consumer(topic, "committed") as settled:
            await silence(settled)
        async with await scene.client.queue_consumer(topic, "aborted") as left:
            assert numbers(await drain(left, 5)) == list(range(5))

    play(target, story)


@ways
def test_two_transactions_cannot_have_one_message(target: Target, way: Way) -> None:
    """57: testTransactionConflictExceptionWhenAckBatchMessage, one by one and in a batch."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(way.kind)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic) as producer:
            await send(producer, range(4))
        found = await drain(consumer, 4)
        first, second = await way.begin(scene), await way.begin(scene)
        await consumer.ack(found[0], txn=first)
        with pytest.raises(TransactionConflict):
            await consumer.ack(found[0], txn=second)
        with pytest.raises((TransactionConflict, TransactionAborted)):
            await second.commit()
        assert second.state is ABORTED
        await first.commit()
        assert first.state is COMMITTED

    play(target, story)


@needs(Feature.LEGACY_TRANSACTIONS)
@pytest.mark.parametrize("kind", [SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER])
def test_cumulative_acknowledgements_of_a_regular_topic(
    target: Target, kind: SubscriptionType
) -> None:
    """56: txnAckTest*Cumulative."""

    async def story(scene: Scene) -> None:
        topic = await scene.regular()
        consumer = await scene.client.consumer(
            topic, "s", subscription_type=kind, initial_position=FIRST
        )
        async with await scene.client.producer(topic, batching=False) as producer:
            await send(producer, range(10))
        first = await scene.client.transaction(scalable=False)
        found = await drain(consumer, 10)
        await consumer.ack_cumulative(found[9], txn=first)
        await first.abort()
        async with scene.client.transaction(scalable=False) as second:
            again = await drain(consumer, 10)
            consumer.ack_cumulative(again[6], txn=second)
        await consumer.close()
        async with await scene.client.consumer(topic, "s", subscription_type=kind) as last:
            assert numbers(await drain(last, 3)) == [7, 8, 9]

    play(target, story)


@SCALABLE
@CHANGES
def test_a_stream_acknowledges_segments_in_many_transactions(target: Target) -> None:
    """34 (F18): three segments, one transaction after the other."""

    async def story(scene: Scene) -> None:
        topic = await scene.scalable(3)
        consumer = await scene.client.stream_consumer(topic, "s", name="m", initial_position=FIRST)
        async with await scene.client.producer(topic) as producer:
            await send(producer, range(30), keys=30)
        for _ in range(30):
            message = await consumer.receive(timeout=COMES_S)
            async with scene.client.transaction() as txn:
                consumer.ack_cumulative(message, txn=txn)
            assert txn.state is COMMITTED
        await consumer.close()
        async with await scene.client.stream_consumer(topic, "s", name="m") as again:
            await silence(again)

    play(target, story)


# --- both kinds


@SCALABLE
def test_a_transaction_over_a_regular_and_a_scalable_topic(target: Target) -> None:
    """33 (F17)."""

    async def story(scene: Scene) -> None:
        topics = [await scene.regular(), await scene.scalable()]
        consumer = await scene.client.queue_consumer(topics, "s", initial_position=FIRST)
        producers = [await scene.client.producer(topic) for topic in topics]
        async with scene.client.transaction() as txn:
            for number, producer in enumerate(producers):
                await producer.send(b"%d" % number, txn=txn)
        for number, producer in enumerate(producers):
            await producer.send(b"%d" % (number + 2))
        assert numbers(await drain(consumer, 4, consumer.ack, within=10.0)) == [0, 1, 2, 3]

    play(target, story)


@SCALABLE
@needs(Feature.LEGACY_TRANSACTIONS)
def test_ids_of_both_kinds_are_not_taken_for_one_another(target: Target) -> None:
    """Transactions of either kind on one regular topic."""

    async def story(scene: Scene) -> None:
        topic = await scene.regular()
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic) as producer:
            for number in range(6):
                async with scene.client.transaction(scalable=bool(number % 2)) as txn:
                    await producer.send(b"%d" % number, txn=txn)
        assert numbers(await drain(consumer, 6, consumer.ack, within=10.0)) == list(range(6))

    play(target, story)


# --- layout changes


@SCALABLE
@CHANGES
@pytest.mark.parametrize("outcome", ["commit", "abort"])
@pytest.mark.parametrize("change", ["split", "merge"])
def test_a_change_amid_a_transaction(target: Target, change: str, outcome: str) -> None:
    """7 to 10: testCommitSpansSplit, ...Merge, testAbortSpansSplit, ...Merge."""

    async def story(scene: Scene) -> None:
        topic = await scene.scalable(2)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic) as producer:
            txn = await scene.client.transaction()
            await send(producer, range(20), txn=txn)
            if change == "split":
                changing = asyncio.ensure_future(scene.split(topic, 0))
            else:
                changing = asyncio.ensure_future(scene.merge(topic, 0, 1))
            await send(producer, range(20, 40), txn=txn)
            await (txn.commit() if outcome == "commit" else txn.abort())
            await changing
            await send(producer, range(100, 110))
        wanted = [*range(40), *range(100, 110)] if outcome == "commit" else [*range(100, 110)]
        assert numbers(await drain(consumer, len(wanted), consumer.ack)) == wanted
        await silence(consumer)

    play(target, story)


@SCALABLE
@CHANGES
@pytest.mark.slow
def test_sixty_four_at_once_over_splits_and_merges(target: Target) -> None:
    """35 (F19): exactly once, each key in its order, and no commit fails."""
    writers, rounds, each = 64, 4, 5

    async def story(scene: Scene) -> None:
        topic = await scene.scalable(1)
        async with await scene.client.producer(topic) as producer:

            async def write(key: str) -> None:
                for turn in range(rounds):
                    async with scene.client.transaction(timeout=120) as txn:
                        for number in range(turn * each, turn * each + each):
                            await producer.submit(b"%d" % number, key=key, txn=txn)
                    assert txn.state is COMMITTED

            async def change() -> None:
                await scene.split(topic, 0)
                await scene.merge(topic, *(await scene.active(topic)))
                for segment in await scene.active(topic):
                    await scene.split(topic, segment)

            writing = asyncio.gather(*(write(f"w{number}") for number in range(writers)))
            await asyncio.gather(writing, change())
        consumer = await scene.client.stream_consumer(topic, "check", initial_position=FIRST)
        found = await drain(consumer, writers * rounds * each, consumer.ack_cumulative)
        await silence(consumer)
        by_key: dict[str | None, list[int]] = defaultdict(list)
        for message in found:
            by_key[message.key].append(int(message.value))
        wanted = list(range(rounds * each))
        assert by_key == {f"w{number}": wanted for number in range(writers)}

    play(target, story)


# --- groups


@needs(Feature.GROUPS)
def test_a_group_commits_its_members_together(target: Target) -> None:
    async def story(scene: Scene) -> None:
        topic = await scene.scalable(1)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic) as producer:
            group = await scene.client.open_group(scene.new_name("app"), generation="g", run="r")
            members = []
            for number in range(3):
                async with group.transaction(sequence=0) as member:
                    await producer.send(b"%d" % number, txn=member)
                members.append(member)
            await silence(consumer)
            assert await group.commit(0, members[:2])
            assert not await group.commit(0, members[:2])
        assert numbers(await drain(consumer, 2, consumer.ack)) == [0, 1]
        await silence(consumer)

    play(target, story)
