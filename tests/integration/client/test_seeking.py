"""Consumers that are moved: to a message, to a time, to an end of the topic."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from harness.simulation.seeds import EPOCH_MS
from magnetar.client.connection.connection import BrokerConnection
from magnetar.client.consume.core.stream_core import StreamCore
from magnetar.client.consume.stream import StreamConsumer
from magnetar.client.message.message import Message
from magnetar.errors import AlreadyClosed, ConsumerNotFound, InvalidValue, NotAllowed
from magnetar.model.ids import EARLIEST, LATEST, MessageId, ScalableMessageId
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import InitialPosition
from magnetar.runtime.clock import LoopClock
from magnetar.wire.commands import NAMES
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.client.stage import Kept, new_client, play
from tests.integration.client.test_consuming import REGULAR, drain, in_order, numbers, send, silence
from tests.integration.client.test_producing_in_trouble import cut_links
from tests.integration.server.scalable_stage import NAME, Stage

FIRST = InitialPosition.EARLIEST


def segment_of(message: Message[bytes]) -> int:
    assert isinstance(message.id, ScalableMessageId)
    return message.id.segment_id


def test_a_queue_is_moved_in_all_segments_or_in_that_of_a_message() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client:
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            await send(client, 20, batching=False)
            await stage.split(0)
            await asyncio.sleep(1)
            between = LoopClock(EPOCH_MS).now_ms()
            await asyncio.sleep(1)
            await send(client, 20, batching=False)
            found = await drain(consumer, 40, consumer.ack)
            await consumer.seek(EARLIEST)
            assert numbers(await drain(consumer, 40, consumer.ack)) == numbers(found)
            await consumer.seek(between)
            assert numbers(await drain(consumer, 20, consumer.ack)) == list(range(20))
            await consumer.seek(EARLIEST)
            await consumer.seek(LATEST)
            await silence(consumer)
            target = found[0].id
            assert isinstance(target, ScalableMessageId)
            await consumer.seek(target)
            segment = [each for each in found if segment_of(each) == target.segment_id]
            assert numbers(await drain(consumer, len(segment), consumer.ack)) == numbers(segment)
            await silence(consumer)
            with pytest.raises(ConsumerNotFound):
                await consumer.seek(ScalableMessageId(77, target.message_id))
            with pytest.raises(InvalidValue, match="names no partition"):
                await consumer.seek(target.message_id)

    play(story)


def test_a_stream_is_moved_over_segments_that_were_finished_and_keeps_the_order() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            consumer = await client.stream_consumer(NAME, "s", initial_position=FIRST)
            kept = Kept()
            await kept.send_many(producer, 30)
            await producer.flush()
            found = await drain(consumer, 30)
            await consumer.ack_cumulative(found[-1])
            await stage.split(0)
            await asyncio.sleep(2)
            between = LoopClock(EPOCH_MS).now_ms()
            await asyncio.sleep(1)
            await kept.send_many(producer, 30)
            await producer.flush()
            found += await drain(consumer, 30)
            await consumer.ack_cumulative(found[-1])
            assert consumer.segments == (1, 2)

            await consumer.seek(EARLIEST)
            again = await read_all(consumer, 60)
            assert in_order(again)
            assert numbers(again) == list(range(60))

            await consumer.seek(between)
            assert numbers(await read_all(consumer, 30)) == list(range(30, 60))

            await consumer.seek(found[0].id)
            assert numbers(await read_all(consumer, 30)) == list(range(30))
            with pytest.raises(AlreadyClosed):
                await consumer.ack_cumulative(found[0])

            await consumer.seek(EARLIEST)
            await consumer.seek(LATEST)
            await silence(consumer)
            await kept.send_many(producer, 5)
            await producer.flush()
            assert numbers(await read_all(consumer, 5)) == list(range(60, 65))

    play(story)


async def read_all(consumer: StreamConsumer[bytes], count: int) -> list[Message[bytes]]:
    """Exactly so many come, and are acknowledged as they do."""
    found: list[Message[bytes]] = []
    while got := await consumer.receive_many(7, timeout=20.0):
        found += got
        consumer.ack_cumulative(got[-1])
    assert len(found) == count
    return found


def test_a_group_of_several_is_not_moved_by_one_of_them() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            first = await client.stream_consumer(NAME, "s", initial_position=FIRST)
            second = await client.stream_consumer(NAME, "s", initial_position=FIRST)
            await asyncio.sleep(2)
            await Kept().send_many(producer, 20)
            await producer.flush()
            with pytest.raises(NotAllowed, match="another member"):
                await first.seek(LATEST)
            found = [
                each
                for consumer in (first, second)
                for each in await consumer.receive_many(20, timeout=5.0)
            ]
            assert numbers(found) == list(range(20))

    play(story)


def test_a_message_in_a_batch_is_the_next_one_and_none_before_it() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            consumer = await client.consumer(REGULAR, "s", initial_position=FIRST)
            queue = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            stream = await client.stream_consumer(NAME, "t", initial_position=FIRST)
            for topic in (REGULAR, NAME):
                await send(client, 10, topic)
            for each in (consumer, queue, stream):
                found = await drain(each, 10)
                target = found[6]
                assert target._raw_id.batch_index > 0
                await each.seek(target.id)
                assert numbers(await drain(each, 4)) == numbers(found[6:])
                await silence(each)
                if each is consumer:
                    start = target._raw_id
            reader = await client.reader(REGULAR, start=start, inclusive=True)
            assert numbers(await drain(reader, 4)) == [6, 7, 8, 9]
            await reader.seek(start, inclusive=True)
            assert numbers(await drain(reader, 4)) == [6, 7, 8, 9]
            await reader.seek(start)
            assert numbers(await drain(reader, 3)) == [7, 8, 9]
            await silence(reader)

    play(story)


@pytest.mark.parametrize("partitions", [0, 2])
def test_a_reader_is_moved_to_a_time(partitions: int) -> None:
    async def story(stage: Stage) -> None:
        if partitions:
            name = TopicName.parse(REGULAR)
            await stage.host.ask(
                lambda server: server.context.topics.create_partitioned(name, partitions)
            )
        async with new_client(stage) as client:
            clock = LoopClock(EPOCH_MS)
            begun = clock.now_ms()
            await send(client, 10, REGULAR, batching=False)
            await asyncio.sleep(1)
            between = clock.now_ms()
            await asyncio.sleep(1)
            await send(client, 20, REGULAR, batching=False)
            reader = await client.reader(REGULAR, start=EARLIEST)
            assert len(await drain(reader, 30)) == 30
            await reader.seek(between)
            assert await reader.has_message_available()
            await cut_links(stage, Random(0))
            assert numbers(await drain(reader, 20)) == list(range(20))
            assert not await reader.has_message_available()
            await reader.seek(begun - 1000)
            assert len(await drain(reader, 30)) == 30
            await asyncio.sleep(1)
            await reader.seek(clock.now_ms())
            assert not await reader.has_message_available()
            await silence(reader)
            await send(client, 1, REGULAR)
            assert (await reader.receive(timeout=5.0)).value == b"0"

    play(story)


def test_harm_of_reading_children_before_the_controller_knows_of_the_seek(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orders: list[list[Message[bytes]]] = []

    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            consumer = await client.stream_consumer(NAME, "s", initial_position=FIRST)
            kept = Kept()
            for _ in range(2):
                await kept.send_many(producer, 30)
                await producer.flush()
                await consumer.ack_cumulative((await drain(consumer, 30))[-1])
                if consumer.segments == (0,):
                    await stage.split(0)
                await asyncio.sleep(2)
            await consumer.seek(EARLIEST)
            orders.append(await read_all(consumer, 60))

    async def at_once(self: StreamCore[bytes], *_: object) -> None:
        """Nobody waits."""

    def check() -> None:
        # Which of them comes first is a race between connections: not every network shows it.
        for seed in range(20):
            play(story, seed=seed)
            assert in_order(orders[-1])

    check()
    monkeypatch.setattr(StreamCore, "_until_parents_first", at_once)
    with pytest.raises(AssertionError):
        check()


def test_what_was_acknowledged_goes_before_a_seek(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it, at Pulsar, it would acknowledge what comes again."""
    asked: list[str] = []
    write = BrokerConnection.write

    def noted(self: BrokerConnection, frame: bytes) -> None:
        size = int.from_bytes(frame[4:8], "big")
        asked.append(NAMES[pb.BaseCommand.FromString(frame[8 : 8 + size]).type])
        write(self, frame)

    monkeypatch.setattr(BrokerConnection, "write", noted)

    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            await send(client, 1, REGULAR)
            consumer = await client.consumer(REGULAR, "s", initial_position=FIRST)
            consumer.ack(await consumer.receive(timeout=5.0))
            await consumer.seek(EARLIEST)
            assert (await consumer.receive(timeout=5.0)).value == b"0"

    play(story)
    assert "ACK" not in asked[asked.index("SEEK") :]


def test_seeking_into_a_batch() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            consumer = await client.consumer(REGULAR, "s", initial_position=FIRST)
            await send(client, 100, REGULAR)
            found = await drain(consumer, 100, consumer.ack)
            for number in (70, 1):
                target = found[number].id
                assert isinstance(target, MessageId)
                assert target.batch_index > 0, "otherwise this shows nothing"
                await consumer.seek(target)
                again = await drain(consumer, 100 - number, consumer.ack)
                assert numbers(again) == numbers(found[number:])

    play(story)
