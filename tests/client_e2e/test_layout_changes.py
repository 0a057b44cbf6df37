"""Splits and merges of scalable topics while they are written to and read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from magnetar import Checkpoint, InitialPosition, Message, Producer
from magnetar.client.consume.checkpoint import FROM_EARLIEST, FROM_LATEST
from magnetar.client.consume.receiving import Receiving
from magnetar.client.message.routing import Routing
from tests.client_e2e.scene import (
    CHANGES,
    FIRST,
    Scene,
    drain,
    in_order,
    numbers,
    play,
    send,
    silence,
)
from tests.client_e2e.target import Target

pytestmark = CHANGES

Change = Callable[[Scene, str], Awaitable[None]]


async def split_all(scene: Scene, topic: str) -> None:
    for segment in await scene.active(topic):
        await scene.split(topic, segment)


async def merge_two(scene: Scene, topic: str) -> None:
    first, second, *_ = await scene.active(topic)
    await scene.merge(topic, first, second)


async def back_and_forth(scene: Scene, topic: str) -> None:
    await split_all(scene, topic)
    await merge_two(scene, topic)
    await split_all(scene, topic)


async def changed_while_sending(
    scene: Scene, topic: str, producer: Producer[bytes], count: int, change: Change
) -> None:
    """Send so many, one after another is handed in, while the layout changes."""
    changing = asyncio.ensure_future(change(scene, topic))
    for number in range(count):
        await producer.submit(b"%d" % number, key=f"k{number % 16}")
        await asyncio.sleep(0.001)
    await producer.flush()
    await changing


@pytest.mark.parametrize("change", [split_all, merge_two, back_and_forth])
@pytest.mark.parametrize("routing", [Routing.RING, Routing.PREVIEW])
def test_changes_lose_and_repeat_nothing(target: Target, change: Change, routing: Routing) -> None:
    """V5SegmentSplitTest, V5SegmentMergeTest, V5DAGFollowingTest.testMultiGeneration..."""

    async def story(scene: Scene) -> None:
        topic = await scene.scalable(2)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic, routing=routing) as producer:
            await changed_while_sending(scene, topic, producer, 600, change)
        found = await drain(consumer, 600, consumer.ack)
        assert numbers(found) == list(range(600))
        await silence(consumer)

    play(target, story)


@pytest.mark.parametrize("change", [split_all, merge_two, back_and_forth])
def test_a_stream_keeps_the_order_of_each_key(target: Target, change: Change) -> None:
    async def story(scene: Scene) -> None:
        topic = await scene.scalable(2)
        consumer = await scene.client.stream_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic) as producer:
            await changed_while_sending(scene, topic, producer, 600, change)
        found = await drain(consumer, 600, consumer.ack_cumulative)
        assert numbers(found) == list(range(600))
        assert in_order(found)
        await silence(consumer)

    play(target, story)


def test_a_send_right_after_a_split_succeeds(target: Target) -> None:
    """V5ProducerSplitRetryTest."""

    async def story(scene: Scene) -> None:
        topic = await scene.scalable(1)
        async with await scene.client.producer(topic) as producer:
            for number in range(3):
                await producer.send(b"%d" % (2 * number), key="k")
                await split_all(scene, topic)
                await producer.send(b"%d" % (2 * number + 1), key="k")
        consumer = await scene.client.stream_consumer(topic, "s", initial_position=FIRST)
        found = await drain(consumer, 6, consumer.ack_cumulative)
        assert [int(each.value) for each in found] == list(range(6))

    play(target, story)


@pytest.mark.parametrize("kind", ["queue", "stream", "checkpoint"])
def test_a_new_reader_gets_what_sealed_parents_have(target: Target, kind: str) -> None:
    """testNewEarliestSubscriptionReplaysSealedParent; the DagReplay tests with two splits."""

    async def story(scene: Scene) -> None:
        topic = await scene.scalable(1)
        async with await scene.client.producer(topic) as producer:
            for generation in range(3):
                await send(producer, range(generation * 100, generation * 100 + 100))
                if generation < 2:
                    await split_all(scene, topic)
        found = await everything(scene, topic, kind, 300)
        assert numbers(found) == list(range(300))
        if kind != "queue":
            assert in_order(found)

    play(target, story)


async def everything(scene: Scene, topic: str, kind: str, count: int) -> list[Message[bytes]]:
    client = scene.client
    consumer: Receiving[bytes]
    if kind == "queue":
        queue = consumer = await client.queue_consumer(topic, "s", initial_position=FIRST)
        found = await drain(consumer, count, queue.ack)
    elif kind == "stream":
        stream = consumer = await client.stream_consumer(topic, "s", initial_position=FIRST)
        found = await drain(consumer, count, stream.ack_cumulative)
    else:
        consumer = await client.checkpoint_consumer(topic, start=FROM_EARLIEST)
        found = await drain(consumer, count)
    await silence(consumer)
    await consumer.close()
    return found


def test_what_was_drained_is_not_delivered_again(target: Target) -> None:
    """testSealedBacklogNotRedeliveredAfterFirstConsumerDrains."""

    async def story(scene: Scene) -> None:
        topic = await scene.scalable(1)
        async with await scene.client.producer(topic) as producer:
            await send(producer, range(50))
            await split_all(scene, topic)
            await send(producer, range(50, 100))
        async with await scene.client.stream_consumer(
            topic, "s", name="m", initial_position=FIRST
        ) as first:
            found = await drain(first, 100, first.ack_cumulative)
            await first.ack_cumulative(found[-1])
        async with await scene.client.stream_consumer(
            topic, "s", name="m", initial_position=FIRST
        ) as again:
            await silence(again)

    play(target, story)


def test_an_acknowledgement_covers_parents_and_children(target: Target) -> None:
    """V5CumulativeAckTest.testCumulativeAckCrossesSealedParentToChildren."""

    async def story(scene: Scene) -> None:
        topic = await scene.scalable(1)
        consumer = await scene.client.stream_consumer(topic, "s", name="m", initial_position=FIRST)
        async with await scene.client.producer(topic) as producer:
            await send(producer, range(20))
            await split_all(scene, topic)
            await send(producer, range(20, 60))
        parents = await drain(consumer, 20)
        await consumer.ack_cumulative(parents[-1])
        children = await drain(consumer, 40)
        await consumer.ack_cumulative(children[29])
        await consumer.close()
        async with await scene.client.stream_consumer(topic, "s", name="m") as again:
            rest = await drain(again, 10)
        assert numbers(rest) == numbers(children[30:])

    play(target, story)


@pytest.mark.parametrize("change", [split_all, merge_two])
@pytest.mark.parametrize("group", [None, "g"], ids=["alone", "group"])
def test_a_checkpoint_resumes_across_a_change(
    target: Target, change: Change, group: str | None
) -> None:
    """V5CheckpointConsumerGroupTest: testCheckpointResumeAcrossSplit, ...AcrossMerge."""

    async def story(scene: Scene) -> None:
        topic = await scene.scalable(2)
        async with await scene.client.producer(topic) as producer:
            await send(producer, range(60))
            async with await scene.client.checkpoint_consumer(
                topic, start=FROM_EARLIEST, group=group, name="m"
            ) as first:
                found = await drain(first, 30)
                stored = first.checkpoint().to_bytes()
            await change(scene, topic)
            await send(producer, range(60, 120))
        async with await scene.client.checkpoint_consumer(
            topic, start=Checkpoint.from_bytes(stored), group=group, name="m"
        ) as second:
            found += await drain(second, 90)
            await silence(second)
        assert numbers(found) == list(range(120))
        assert in_order(found)

    play(target, story)


def test_a_checkpoint_from_the_latest_message_holds_silent_segments(target: Target) -> None:
    async def story(scene: Scene) -> None:
        topic = await scene.scalable(3)
        async with await scene.client.producer(topic) as producer:
            await send(producer, range(30))
            consumer = await scene.client.checkpoint_consumer(topic, start=FROM_LATEST)
            stored = consumer.checkpoint().to_bytes()
            await consumer.close()
            await send(producer, range(30, 60))
        async with await scene.client.checkpoint_consumer(
            topic, start=Checkpoint.from_bytes(stored)
        ) as again:
            assert numbers(await drain(again, 30)) == list(range(30, 60))

    play(target, story)


def test_a_queue_consumer_at_the_latest_message_loses_nothing_at_a_split(target: Target) -> None:
    """What was sent after it had subscribed comes, in children that were split meanwhile too."""

    async def story(scene: Scene) -> None:
        for _ in range(5):
            topic = await scene.scalable(1)
            consumer = await scene.client.queue_consumer(
                topic, "s", initial_position=InitialPosition.LATEST
            )
            async with await scene.client.producer(topic) as producer:
                await changed_while_sending(scene, topic, producer, 300, split_first)
            found = await drain(consumer, 300, consumer.ack)
            assert numbers(found) == list(range(300))
            await consumer.close()

    play(target, story)


def test_a_parent_that_was_sealed_under_load_can_be_read(target: Target) -> None:
    """A new subscription gets what the parent has, whatever was under way when it was sealed."""

    async def story(scene: Scene) -> None:
        topic = await scene.scalable(1)
        async with await scene.client.producer(topic) as producer:
            await changed_while_sending(scene, topic, producer, 300, split_first)
        assert numbers(await everything(scene, topic, "queue", 300)) == list(range(300))

    play(target, story)


async def split_first(scene: Scene, topic: str) -> None:
    first, *_ = await scene.active(topic)
    await scene.split(topic, first)


@pytest.mark.parametrize("partitions", [0, 3])
def test_a_regular_topic_becomes_a_scalable_one(target: Target, partitions: int) -> None:
    """V5MigrationEndToEndTest.testV5ProducerSurvivesMigrationAndAllDataIsConsumable."""

    async def story(scene: Scene) -> None:
        regular = await scene.regular(partitions)
        name = regular.removeprefix("persistent://")
        async with await scene.client.producer(regular) as producer:
            await send(producer, range(50))
            await scene.administer("POST", f"scalable/{name}/migrate")
            await send(producer, range(50, 100))
        found = await everything(scene, f"topic://{name}", "queue", 100)
        assert numbers(found) == list(range(100))

    play(target, story)
