"""Consuming with every kind of consumer, of both kinds of topics."""

from __future__ import annotations

import asyncio
import re

import pytest

from magnetar import (
    EARLIEST,
    Checkpoint,
    DeadLetterPolicy,
    Message,
    MessageId,
    RedeliveryDelay,
    ScalableMessageId,
    SubscriptionType,
)
from magnetar.client.consume.checkpoint import FROM_EARLIEST
from magnetar.errors import ConsumerBusy, NotAllowed
from tests.client_e2e.scene import (
    CHANGES,
    COMES_S,
    FIRST,
    KINDS,
    KINDS_WITH_PARTS,
    LEAVES_S,
    STREAMED,
    Scene,
    drain,
    in_order,
    needs,
    numbers,
    play,
    send,
    silence,
    until,
)
from tests.client_e2e.target import Feature, Target

# --- queues


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_given_back_comes_again(target: Target, kind: str) -> None:
    """V5QueueConsumerBasicTest.testNegativeAckCausesRedelivery."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(kind)
        consumer = await scene.client.queue_consumer(
            topic, "s", initial_position=FIRST, nack_delay=RedeliveryDelay(0.2)
        )
        async with await scene.client.producer(topic) as producer:
            await send(producer, range(10))
        first = await drain(consumer, 10)
        for message in first[::2]:
            consumer.nack(message)
        await consumer.ack_many(first[1::2])
        again = await drain(consumer, 5, consumer.ack)
        assert numbers(again) == numbers(first[::2])
        await silence(consumer)

    play(target, story)


@needs(Feature.BATCH_INDEX_ACKS)
@pytest.mark.parametrize("parts", KINDS_WITH_PARTS)
def test_what_was_not_acknowledged_is_delivered_to_the_next(
    target: Target, parts: tuple[str, int]
) -> None:
    """V5QueueConsumerMultiSegmentAckTest.testPartialAcksReplayUnackedOnReattach."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(*parts)
        first = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic) as producer:
            await send(producer, range(60))
        found = await drain(first, 60)
        await first.ack_many(found[::3])
        await first.close()
        left = sorted(set(range(60)) - set(numbers(found[::3])))
        async with await scene.client.queue_consumer(topic, "s") as second:
            assert numbers(await drain(second, 40, second.ack)) == left
            await silence(second)

    play(target, story)


@pytest.mark.parametrize("parts", KINDS_WITH_PARTS)
def test_queue_consumers_share_the_load(target: Target, parts: tuple[str, int]) -> None:
    """V5MultipleConsumersTest.testQueueConsumersShareLoad."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(*parts)
        consumers = [
            await scene.client.queue_consumer(topic, "s", initial_position=FIRST, queue_size=10)
            for _ in range(3)
        ]
        async with await scene.client.producer(topic, batching=False) as producer:
            await send(producer, range(300))
        found: list[Message[bytes]] = []
        taken = []
        while len(found) < 300:
            for number, consumer in enumerate(consumers):
                for message in await consumer.receive_many(10, timeout=0.2):
                    consumer.ack(message)
                    found.append(message)
                    taken.append(number)
        assert numbers(found) == list(range(300))
        assert set(taken) == {0, 1, 2}

    play(target, story)


@pytest.mark.parametrize("parts", KINDS_WITH_PARTS)
def test_dead_letters_keep_what_the_message_carried(target: Target, parts: tuple[str, int]) -> None:
    """V5DeadLetterPolicyTest: both of its tests."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(*parts)
        dead = await scene.topic(parts[0])
        letters = await scene.client.queue_consumer(dead, "d", initial_position=FIRST)
        consumer = await scene.client.queue_consumer(
            topic,
            "s",
            initial_position=FIRST,
            nack_delay=RedeliveryDelay(0.1),
            dead_letter=DeadLetterPolicy(max_redeliveries=1, topic=dead),
        )
        async with await scene.client.producer(topic, batching=False) as producer:
            for number in range(9):
                await producer.send(b"%d" % number, key=f"k{number}", properties={"n": "1"})
        deliveries = 0
        while deliveries < 18:
            message = await consumer.receive(timeout=COMES_S)
            assert message.redelivery_count <= 1
            consumer.nack(message)
            deliveries += 1
        found = await drain(letters, 9, letters.ack)
        assert numbers(found) == list(range(9))
        for letter in found:
            assert letter.key == f"k{int(letter.value)}"
            assert letter.properties["n"] == "1"
            assert letter.properties["REAL_TOPIC"].startswith(topic)
            assert letter.properties["REAL_SUBSCRIPTION"] == "s"
        await silence(consumer)

    play(target, story)


@pytest.mark.parametrize("kind", KINDS)
def test_what_takes_too_long_is_delivered_again(target: Target, kind: str) -> None:
    """V5ProcessingTimeoutTest."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(kind)
        consumer = await scene.client.queue_consumer(
            topic, "s", initial_position=FIRST, processing_timeout=1.0
        )
        async with await scene.client.producer(topic) as producer:
            await producer.send(b"1")
        await drain(consumer, 1)
        again = await consumer.receive(timeout=COMES_S)
        await consumer.ack(again)
        await silence(consumer, 1.5)

    play(target, story)


@CHANGES
def test_a_subscription_that_was_made_before_keeps_messages(target: Target) -> None:
    """V5ScalableSubscriptionAdminTest.testPreCreatedSubscriptionRetainsPreProductionMessages."""

    async def story(scene: Scene) -> None:
        topic = await scene.scalable(2)
        path = f"scalable/{topic.removeprefix('topic://')}/subscriptions"
        await scene.administer("PUT", f"{path}/queue?type=QUEUE")
        await scene.administer("PUT", f"{path}/stream?type=STREAM")
        async with await scene.client.producer(topic) as producer:
            await send(producer, range(40))
        queue = await scene.client.queue_consumer(topic, "queue")
        stream = await scene.client.stream_consumer(topic, "stream")
        assert numbers(await drain(queue, 40, queue.ack)) == list(range(40))
        assert numbers(await drain(stream, 40, stream.ack_cumulative)) == list(range(40))
        await queue.close()
        await stream.close()
        await scene.administer("DELETE", f"{path}/queue")

    play(target, story)


@CHANGES
def test_skipping_and_seeking_by_administration(target: Target) -> None:
    """V5SeekSubscriptionTest: testSeekToleratesEmptyChildSegments..., testClearBacklog..."""

    async def story(scene: Scene) -> None:
        topic = await scene.scalable(2)
        path = f"scalable/{topic.removeprefix('topic://')}/subscriptions/s"
        await scene.administer("PUT", f"{path}?type=QUEUE")
        async with await scene.client.producer(topic) as producer:
            await send(producer, range(40))
            await scene.split(topic, 0)
            await scene.administer("POST", f"{path}/skip-all")
            async with await scene.client.queue_consumer(topic, "s") as consumer:
                await silence(consumer)
            await scene.administer("POST", f"{path}/seek?timestamp=0")
            async with await scene.client.queue_consumer(topic, "s") as again:
                assert numbers(await drain(again, 40, again.ack)) == list(range(40))

    play(target, story)


@pytest.mark.parametrize("kind", KINDS)
def test_several_topics_at_once(target: Target, kind: str) -> None:
    async def story(scene: Scene) -> None:
        topics = [await scene.topic(kind) for _ in range(3)]
        consumer = await scene.client.queue_consumer(topics, "s", initial_position=FIRST)
        for number, topic in enumerate(topics):
            async with await scene.client.producer(topic) as producer:
                await send(producer, range(number * 10, number * 10 + 10))
        found = await drain(consumer, 30, consumer.ack)
        assert numbers(found) == list(range(30))
        assert {each.topic for each in found} == set(topics)

    play(target, story)


# --- streams


@pytest.mark.parametrize("parts", STREAMED)
def test_an_acknowledgement_covers_all_segments(target: Target, parts: tuple[str, int]) -> None:
    """V5CumulativeAckTest: ...CoversAllSegments, ...MidStreamReplaysUnackedTail."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(*parts)
        first = await scene.client.stream_consumer(topic, "s", initial_position=FIRST, name="a")
        async with await scene.client.producer(topic) as producer:
            await send(producer, range(90))
        found = await drain(first, 90)
        assert in_order(found)
        await first.ack_cumulative(found[59])
        await first.close()
        async with await scene.client.stream_consumer(topic, "s", name="a") as second:
            rest = await drain(second, 30)
            assert numbers(rest) == numbers(found[60:])
            last = rest[-1].id
            assert isinstance(last, ScalableMessageId)
            await second.ack_cumulative(ScalableMessageId.from_bytes(last.to_bytes()))
        async with await scene.client.stream_consumer(topic, "s", name="a") as third:
            await silence(third)

    play(target, story)


@pytest.mark.parametrize("parts", STREAMED)
def test_closing_without_an_acknowledgement_acknowledges_nothing(
    target: Target, parts: tuple[str, int]
) -> None:
    """V5MultiTopicStreamConsumerTest.closeWithoutAckDoesNotAcknowledgeAnything."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(*parts)
        async with await scene.client.producer(topic) as producer:
            await send(producer, range(20))
        for _ in range(2):
            async with await scene.client.stream_consumer(
                topic, "s", initial_position=FIRST, name="same"
            ) as consumer:
                assert numbers(await drain(consumer, 20)) == list(range(20))

    play(target, story)


@CHANGES
def test_stream_consumers_share_the_segments(target: Target) -> None:
    """V5MultipleConsumersTest.testStreamConsumersSplitSegmentsAcrossConsumers."""

    async def story(scene: Scene) -> None:
        topic = await scene.scalable(4)
        members = [
            await scene.client.stream_consumer(topic, "s", initial_position=FIRST, name=f"m{n}")
            for n in range(2)
        ]
        await until(lambda: sorted(len(each.segments) for each in members) == [2, 2])
        async with await scene.client.producer(topic) as producer:
            await send(producer, range(200), keys=40)
        found: list[Message[bytes]] = []
        by_member: list[set[str | None]] = [set(), set()]
        while len(found) < 200:
            for number, member in enumerate(members):
                for message in await member.receive_many(100, timeout=0.2):
                    member.ack_cumulative(message)
                    found.append(message)
                    by_member[number].add(message.key)
        assert numbers(found) == list(range(200))
        assert in_order(found)
        assert not by_member[0] & by_member[1]

    play(target, story)


@CHANGES
def test_a_member_that_leaves_hands_its_segments_on(target: Target) -> None:
    """...GroupScalesUp and testSegmentReleaseWithPendingAcksHandsOffCleanly, by this client."""

    async def story(scene: Scene) -> None:
        topic = await scene.scalable(4)
        first = await scene.client.stream_consumer(topic, "s", initial_position=FIRST, name="a")
        async with await scene.client.producer(topic) as producer:
            await send(producer, range(100), keys=40)
            found = await drain(first, 100, first.ack_cumulative)
            second = await scene.client.stream_consumer(topic, "s", name="b")
            await until(lambda: len(first.segments) == len(second.segments) == 2)
            await first.close()
            await send(producer, range(100, 200), keys=40)
        found += await drain(second, 100, second.ack_cumulative, within=LEAVES_S)
        assert numbers(found) == list(range(200))
        assert in_order(found)

    play(target, story)


# --- checkpoints


@pytest.mark.parametrize("parts", KINDS_WITH_PARTS)
def test_a_checkpoint_resumes_behind_what_was_received(
    target: Target, parts: tuple[str, int]
) -> None:
    """V5CheckpointConsumerBasicTest.testCheckpointAndResume."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(*parts)
        async with await scene.client.producer(topic) as producer:
            await send(producer, range(60))
        async with await scene.client.checkpoint_consumer(topic, start=FROM_EARLIEST) as first:
            found = await drain(first, 25)
            stored = first.checkpoint().to_bytes()
        async with await scene.client.checkpoint_consumer(
            topic, start=Checkpoint.from_bytes(stored)
        ) as second:
            found += await drain(second, 35)
            await silence(second)
        assert numbers(found) == list(range(60))
        assert in_order(found)

    play(target, story)


@CHANGES
def test_members_of_a_checkpoint_group_share_the_segments(target: Target) -> None:
    """V5CheckpointConsumerGroupTest: testConsumersInGroupShareSegments."""

    async def story(scene: Scene) -> None:
        topic = await scene.scalable(4)
        members = [
            await scene.client.checkpoint_consumer(topic, start=FROM_EARLIEST, group="g")
            for _ in range(2)
        ]
        # What the first had of a segment before the second came may be read by both.
        await asyncio.sleep(2 * scene.target.quiet_s)
        async with await scene.client.producer(topic) as producer:
            await send(producer, range(200), keys=40)
        found: list[Message[bytes]] = []
        keys: list[set[str | None]] = [set(), set()]
        while len(found) < 200:
            for number, member in enumerate(members):
                for message in await member.receive_many(100, timeout=0.2):
                    found.append(message)
                    keys[number].add(message.key)
        assert numbers(found) == list(range(200))
        assert keys[0]
        assert keys[1]
        assert not keys[0] & keys[1]

    play(target, story)


# --- regular topics


@pytest.mark.parametrize("partitions", [0, pytest.param(2, marks=needs(Feature.ADMINISTRATION))])
@pytest.mark.parametrize("kind", list(SubscriptionType))
def test_each_type_of_subscription(target: Target, kind: SubscriptionType, partitions: int) -> None:
    async def story(scene: Scene) -> None:
        topic = await scene.regular(partitions)
        consumer = await scene.client.consumer(
            topic, "s", subscription_type=kind, initial_position=FIRST
        )
        by_key = kind is SubscriptionType.KEY_SHARED
        async with await scene.client.producer(topic, batch_by_key=by_key) as producer:
            await send(producer, range(60))
        found = await drain(consumer, 60)
        assert numbers(found) == list(range(60))
        assert in_order(found)
        if kind.takes_cumulative_acks and not partitions:
            await consumer.ack_cumulative(found[29])
            left = found[30:]
        else:
            await consumer.ack_many(found[:30])
            left = found[30:]
        await consumer.close()
        async with await scene.client.consumer(topic, "s", subscription_type=kind) as again:
            assert numbers(await drain(again, 30, again.ack)) == numbers(left)
            await silence(again)

    play(target, story)


def test_an_exclusive_subscription_is_not_shared(target: Target) -> None:
    async def story(scene: Scene) -> None:
        topic = await scene.regular()
        async with await scene.client.consumer(topic, "s") as consumer:
            with pytest.raises(ConsumerBusy):
                await scene.client.consumer(topic, "s")
            with pytest.raises(NotAllowed):
                await scene.client.consumer("topic://public/default/x", "s")
            await consumer.unsubscribe()

    play(target, story)


@pytest.mark.parametrize("batching", [True, False], ids=["batches", "single"])
@pytest.mark.parametrize("partitions", [0, pytest.param(2, marks=needs(Feature.ADMINISTRATION))])
def test_seeking(target: Target, partitions: int, batching: bool) -> None:
    async def story(scene: Scene) -> None:
        topic = await scene.regular(partitions)
        consumer = await scene.client.consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic, batching=batching) as producer:
            await send(producer, range(20))
            await drain(consumer, 20, consumer.ack)
            await consumer.seek(EARLIEST)
            found = await drain(consumer, 20, consumer.ack)
            assert numbers(found) == list(range(20))
            if not partitions:
                middle = found[9].id
                assert isinstance(middle, MessageId)
                await consumer.seek(middle)
                assert numbers(await drain(consumer, 11)) == numbers(found[9:])
            await consumer.seek(0)
            assert numbers(await drain(consumer, 20)) == list(range(20))
            last = await consumer.last_message_ids()
            assert len(last) == max(1, partitions)

    play(target, story)


@pytest.mark.parametrize("batching", [True, False], ids=["batches", "single"])
@pytest.mark.parametrize("partitions", [0, pytest.param(2, marks=needs(Feature.ADMINISTRATION))])
def test_readers(target: Target, partitions: int, batching: bool) -> None:
    async def story(scene: Scene) -> None:
        topic = await scene.regular(partitions)
        async with await scene.client.producer(topic, batching=batching) as producer:
            await send(producer, range(20))
        reader = await scene.client.reader(topic, start=EARLIEST)
        found: list[Message[bytes]] = []
        while await reader.has_message_available():
            found.append(await reader.receive(timeout=COMES_S))
        assert numbers(found) == list(range(20))
        await reader.close()
        if not partitions:
            middle = found[9].id
            assert isinstance(middle, MessageId)
            async with await scene.client.reader(topic, start=middle) as behind:
                assert numbers(await drain(behind, 10)) == numbers(found[10:])
            async with await scene.client.reader(topic, start=middle, inclusive=True) as at:
                assert numbers(await drain(at, 11)) == numbers(found[9:])

    play(target, story)


def test_topics_that_match(target: Target) -> None:
    async def story(scene: Scene) -> None:
        stem = f"persistent://{scene.namespace}/{scene.new_name('match')}"
        for number in range(3):
            async with await scene.client.producer(f"{stem}-{number}") as producer:
                await send(producer, range(number * 10, number * 10 + 10))
        consumer = await scene.client.consumer(
            None,
            "s",
            pattern=re.escape(stem).replace(r"\-", "-") + "-.*",
            namespace=scene.namespace,
            initial_position=FIRST,
        )
        assert numbers(await drain(consumer, 30, consumer.ack)) == list(range(30))

    play(target, story)
