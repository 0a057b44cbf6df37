"""Consumers against real brokers on virtual time: what is received, acknowledged and given back."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.consume.checkpoint import FROM_EARLIEST, FROM_LATEST
from magnetar.client.consume.receiving import Receiving
from magnetar.client.consume.segment.nacks import RedeliveryDelay
from magnetar.client.consume.segment.settings import DeadLetterPolicy
from magnetar.client.message.message import Checkpoint, Message, ScalableMessageId
from magnetar.errors import (
    AlreadyClosed,
    ConsumerBusy,
    ConsumerNotFound,
    DataLost,
    DeadlineExceeded,
    InvalidSetting,
    InvalidValue,
    NotAllowed,
)
from magnetar.model.ids import EARLIEST, MessageId
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import InitialPosition, SubscriptionType
from tests.integration.client.stage import new_client, play
from tests.integration.server.scalable_stage import NAME, TOPIC, Stage

FIRST = InitialPosition.EARLIEST
REGULAR = "persistent://public/default/plain"


async def send(client: Client, count: int, topic: str = NAME, **options: Any) -> None:
    async with await client.producer(topic, **options) as producer:
        for number in range(count):
            await producer.submit(b"%d" % number, key=f"k{number % 7}")
        await producer.flush()


async def drain(consumer: Receiving[bytes], count: int, ack: Any = None) -> list[Message[bytes]]:
    found: list[Message[bytes]] = []
    while len(found) < count:
        got = await consumer.receive_many(count - len(found), timeout=20.0)
        assert got, f"only {len(found)} of {count} came"
        for message in got:
            found.append(message)
            if ack is not None:
                ack(message)
    return found


def numbers(messages: list[Message[bytes]]) -> list[int]:
    return sorted(int(message.value) for message in messages)


def in_order(messages: list[Message[bytes]]) -> bool:
    by_key: dict[str | None, list[int]] = defaultdict(list)
    for message in messages:
        by_key[message.key].append(int(message.value))
    return all(values == sorted(values) for values in by_key.values())


async def silence(consumer: Receiving[bytes], seconds: float = 3.0) -> None:
    with pytest.raises(DeadlineExceeded):
        await consumer.receive(timeout=seconds)


def test_a_queue_consumer_gets_everything_once_over_a_split() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client:
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            await send(client, 100)
            await stage.split(0)
            await send(client, 100)
            found = await drain(consumer, 200, consumer.ack)
            assert numbers(found) == sorted([*range(100), *range(100)])
            assert {message.topic for message in found} == {NAME}
            await consumer.ack(found[-1])
            await consumer.close()
            async with await client.queue_consumer(NAME, "s") as again:
                await silence(again)

    play(story)


def test_batches_are_acknowledged_message_by_message() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            first = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            await send(client, 20)
            found = await drain(first, 20)
            assert any(message._raw_id.batch_size > 1 for message in found)
            await first.ack_many(found[::2])
            await first.close()
            async with await client.queue_consumer(NAME, "s") as second:
                left = await drain(second, 10)
                assert numbers(left) == numbers(found[1::2])
                await silence(second)

    play(story)


def test_what_is_given_back_comes_again_and_then_goes_to_the_dead_letters() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            dead = await client.queue_consumer(NAME + "-DLQ", "d", initial_position=FIRST)
            consumer = await client.queue_consumer(
                NAME,
                "s",
                initial_position=FIRST,
                nack_delay=RedeliveryDelay(1.0),
                dead_letter=DeadLetterPolicy(max_redeliveries=2),
            )
            await send(client, 1)
            counts = []
            for _ in range(3):
                message = await consumer.receive(timeout=10.0)
                counts.append(message.redelivery_count)
                consumer.nack(message)
            assert counts == [0, 1, 2]
            letter = await dead.receive(timeout=10.0)
            assert letter.value == b"0"
            assert letter.key == "k0"
            assert letter.properties["REAL_TOPIC"] == NAME
            assert letter.properties["REAL_SUBSCRIPTION"] == "s"
            await silence(consumer, 10.0)

    play(story)


def test_what_takes_too_long_is_delivered_again() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            consumer = await client.queue_consumer(
                NAME, "s", initial_position=FIRST, processing_timeout=5.0
            )
            await send(client, 1)
            assert (await consumer.receive(timeout=1.0)).redelivery_count == 0
            await silence(consumer, 4.0)
            again = await consumer.receive(timeout=4.0)
            assert again.redelivery_count == 1
            await consumer.ack(again)
            await silence(consumer, 10.0)

    play(story)


def test_stream_consumers_share_segments_in_order_and_resume_after_their_acks() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client:
            consumer = await client.stream_consumer(NAME, "s", initial_position=FIRST, name="a")
            await send(client, 50)
            found = await drain(consumer, 50)
            assert in_order(found)
            await consumer.ack_cumulative(found[29])
            await consumer.close()
            async with await client.stream_consumer(NAME, "s", name="a") as again:
                rest = await drain(again, 20)
                assert numbers(rest) == numbers(found[30:])
                last = rest[-1].id
                assert isinstance(last, ScalableMessageId)
                await again.ack_cumulative(ScalableMessageId.from_bytes(last.to_bytes()))
            async with await client.stream_consumer(NAME, "s", name="a") as done:
                await silence(done)

    play(story)


def test_a_stream_goes_on_with_the_children_once_the_parent_is_acknowledged() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            consumer = await client.stream_consumer(NAME, "s", initial_position=FIRST)
            await send(client, 40)
            await stage.split(0)
            await send(client, 40)
            found = await drain(consumer, 40)
            await silence(consumer)
            await consumer.ack_cumulative(found[-1])
            found += await drain(consumer, 40, consumer.ack_cumulative)
            assert numbers(found) == sorted([*range(40), *range(40)])

    play(story)


def test_a_second_member_gets_a_segment_once_the_first_has_settled_it() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client:
            first = await client.stream_consumer(NAME, "s", initial_position=FIRST, name="a")
            await send(client, 60)
            found = await drain(first, 60)
            opening = asyncio.ensure_future(
                client.stream_consumer(NAME, "s", initial_position=FIRST, name="b")
            )
            await asyncio.sleep(2)
            assert not opening.done()
            await first.ack_cumulative(found[-1])
            second = await opening
            assert len(first.segments) == len(second.segments) == 1
            await send(client, 60)
            more = await asyncio.gather(
                first.receive_many(60, timeout=5.0), second.receive_many(60, timeout=5.0)
            )
            assert all(more)
            assert {message.key for message in more[0]}.isdisjoint(
                message.key for message in more[1]
            )

    play(story)


def test_a_connection_that_breaks_brings_nothing_twice() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client:
            queue = await client.queue_consumer(NAME, "q", initial_position=FIRST)
            stream = await client.stream_consumer(NAME, "s", initial_position=FIRST)
            await send(client, 100)
            of_queue, of_stream = await drain(queue, 40), await drain(stream, 40)
            acks = [queue.ack(message) for message in of_queue[:20]]
            for link in client._connections._open.values():
                link.abort()
            of_queue += await drain(queue, 60, queue.ack)
            of_stream += await drain(stream, 60)
            assert numbers(of_queue) == numbers(of_stream) == list(range(100))
            assert in_order(of_stream)
            for ack in acks:
                await ack
            await stream.ack_cumulative(of_stream[-1])
            await silence(queue)
            await silence(stream)

    play(story)


def test_a_checkpoint_resumes_exactly_behind_what_was_received_over_a_split_and_merge() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client:
            await send(client, 50)
            await stage.split(0)
            await send(client, 50)
            found: list[Message[bytes]] = []
            place = FROM_EARLIEST
            for count in (30, 40, 30):
                consumer = await client.checkpoint_consumer(NAME, start=place)
                found += await drain(consumer, count)
                place = Checkpoint.from_bytes(consumer.checkpoint().to_bytes())
                await consumer.close()
            assert numbers(found) == sorted([*range(50), *range(50)])
            async with await client.checkpoint_consumer(NAME, start=place) as consumer:
                await silence(consumer)

    play(story)


def test_the_latest_checkpoint_begins_now_and_holds_silent_segments() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(3)
        async with new_client(stage) as client:
            await send(client, 30)
            await stage.split(1)
            async with await client.checkpoint_consumer(NAME, start=FROM_LATEST) as consumer:
                at_once = consumer.checkpoint()
                assert {each.segment_id for each in at_once.positions} == {0, 1, 2, 3, 4}
                await silence(consumer)
                await send(client, 30)
                assert numbers(await drain(consumer, 30)) == list(range(30))
            async with await client.checkpoint_consumer(NAME, start=at_once) as consumer:
                assert numbers(await drain(consumer, 30)) == list(range(30))
                await silence(consumer)

    play(story)


def test_members_of_a_checkpoint_group_share_the_segments() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client:
            await send(client, 60)
            first, second = [
                await client.checkpoint_consumer(NAME, start=FROM_EARLIEST, group="g", name=name)
                for name in ("a", "b")
            ]
            got = [
                message
                for one in (first, second)
                for message in await one.receive_many(100, timeout=5.0)
            ]
            assert {int(message.value) for message in got} == set(range(60))

    play(story)


def test_a_group_resumes_from_a_checkpoint_across_a_split() -> None:
    """What was read to its end is not read again while its segment stays assigned."""

    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client:
            await send(client, 60)
            async with await client.checkpoint_consumer(
                NAME, start=FROM_EARLIEST, group="g"
            ) as first:
                found = await drain(first, 30)
                stored = first.checkpoint().to_bytes()
            await stage.split(0)
            await send(client, 60)
            async with await client.checkpoint_consumer(
                NAME, start=Checkpoint.from_bytes(stored), group="g"
            ) as second:
                found += await drain(second, 90)
                await silence(second, 30.0)
            assert numbers(found) == sorted([*range(60), *range(60)])

    play(story)


def test_a_checkpoint_counts_for_segments_that_a_member_gets_later() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client:
            await send(client, 60)
            first = await client.checkpoint_consumer(NAME, start=FROM_EARLIEST, group="g", name="a")
            assert numbers(await drain(first, 60)) == list(range(60))
            second = await client.checkpoint_consumer(
                NAME, start=first.checkpoint(), group="g", name="b"
            )
            assert len(second.checkpoint().positions) == 1, "the first one still has the other"
            await first.close()
            await silence(second, 30.0)
            assert len(second.checkpoint().positions) == 2

    play(story)


@pytest.mark.parametrize("kind", list(SubscriptionType))
def test_each_type_of_subscription_of_a_regular_topic(kind: SubscriptionType) -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            consumer = await client.consumer(
                REGULAR, "s", subscription_type=kind, initial_position=FIRST
            )
            await send(client, 30, REGULAR, batch_by_key=True)
            found = await drain(consumer, 30)
            assert numbers(found) == list(range(30))
            assert in_order(found)
            if kind.takes_cumulative_acks:
                await consumer.ack_cumulative(found[19])
            else:
                with pytest.raises(NotAllowed):
                    consumer.ack_cumulative(found[19])
                await consumer.ack_many(found[:20])
            await consumer.close()
            async with await client.consumer(REGULAR, "s", subscription_type=kind) as again:
                assert numbers(await drain(again, 10)) == numbers(found[20:])
                await silence(again)

    play(story)


def test_an_exclusive_subscription_that_is_taken_is_an_error_at_once() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            await client.consumer(REGULAR, "s")
            with pytest.raises(ConsumerBusy):
                await client.consumer(REGULAR, "s")

    play(story)


def test_seeking_back_and_to_the_end() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            consumer = await client.consumer(REGULAR, "s", initial_position=FIRST)
            await send(client, 10, REGULAR, batching=False)
            found = await drain(consumer, 10, consumer.ack)
            await consumer.seek(EARLIEST)
            assert numbers(await drain(consumer, 10)) == list(range(10))
            fifth = found[5].id
            assert isinstance(fifth, MessageId)
            await consumer.seek(fifth)
            assert (await consumer.receive(timeout=5.0)).value == b"5"
            await consumer.seek(0)
            assert (await consumer.receive(timeout=5.0)).value == b"0"

    play(story)


def test_a_message_is_sought_in_its_own_partition() -> None:
    async def story(stage: Stage) -> None:
        name = TopicName.parse(REGULAR)
        await stage.host.ask(lambda server: server.context.topics.create_partitioned(name, 2))
        async with new_client(stage) as client:
            await send(client, 20, REGULAR, batching=False)
            consumer = await client.consumer(REGULAR, "s", initial_position=FIRST)
            found = await drain(consumer, 20, consumer.ack)
            first = next(each._raw_id for each in found if each._raw_id.partition == 1)
            await consumer.seek(first)
            behind = [each for each in found if each._raw_id.partition == 1]
            assert numbers(await drain(consumer, len(behind), consumer.ack)) == numbers(behind)
            await silence(consumer)
            with pytest.raises(ConsumerNotFound, match="nothing that is consumed"):
                await consumer.seek(replace(first, partition=7))
            with pytest.raises(InvalidValue, match="names no partition"):
                await consumer.seek(replace(first, partition=-1))
            await consumer.close()
            one = f"{REGULAR}-partition-1"
            async with await client.consumer(one, "s2", initial_position=FIRST) as alone:
                assert len(await drain(alone, len(behind))) == len(behind)
                await alone.seek(first)
                assert len(await drain(alone, len(behind))) == len(behind)
                await alone.ack(first)

    play(story)


@pytest.mark.parametrize("batching", [True, False])
def test_a_reader_that_includes_its_start(batching: bool) -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            await send(client, 100, REGULAR, batching=batching)
            async with await client.reader(REGULAR, start=EARLIEST, inclusive=True) as reader:
                found = await drain(reader, 100)
                for number in (70, 1, 0):
                    start = found[number].id
                    assert isinstance(start, MessageId)
                    await reader.seek(start, inclusive=True)
                    assert await reader.has_message_available()
                    assert numbers(await drain(reader, 100 - number)) == numbers(found[number:])
                    async with await client.reader(REGULAR, start=start, inclusive=True) as other:
                        assert numbers(await drain(other, 100 - number)) == numbers(found[number:])

    play(story)


def test_a_reader_reads_from_where_it_is_told() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            await send(client, 20, REGULAR)
            async with await client.reader(REGULAR, start=EARLIEST) as reader:
                found = [await reader.receive(timeout=5.0) for _ in range(20)]
                assert not await reader.has_message_available()
                await silence(reader)
            seventh = found[7].id
            assert isinstance(seventh, MessageId)
            async with await client.reader(REGULAR, start=seventh) as reader:
                assert await reader.has_message_available()
                assert (await reader.receive(timeout=5.0)).value == found[8].value
                await reader.seek(seventh, inclusive=False)
                assert (await reader.receive(timeout=5.0)).value == found[8].value
            async with await client.reader(REGULAR) as reader:
                assert not await reader.has_message_available()
                await send(client, 1, REGULAR)
                assert (await reader.receive(timeout=5.0)).value == b"0"

    play(story)


def test_several_topics_and_those_that_match() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            names = [f"persistent://public/default/t{number}" for number in range(3)]
            for name in names:
                await send(client, 5, name)
            many = await client.consumer(names, "s", initial_position=FIRST)
            found = await drain(many, 15, many.ack)
            assert {message.topic for message in found} == set(names)
            matching = await client.consumer(
                None, "m", pattern="persistent://public/default/t.*", initial_position=FIRST
            )
            assert len(await drain(matching, 15, matching.ack)) == 15
            await send(client, 5, "persistent://public/default/t9")
            more = await drain_within(matching, 5, 120.0)
            assert {message.topic for message in more} == {"persistent://public/default/t9"}
            await matching.ack_many(more)
            before = len(asyncio.all_tasks())
            await many.close()
            gone = TopicName.parse(names[0])
            await stage.host.ask(lambda server: server.topics.delete(gone, force=True))
            await asyncio.sleep(120)
            assert names[0] not in matching.topics
            assert len(asyncio.all_tasks()) < before
            await send(client, 1, names[1])
            assert (await matching.receive(timeout=5.0)).topic == names[1]

    play(story)


async def drain_within(
    consumer: Receiving[bytes], count: int, seconds: float
) -> list[Message[bytes]]:
    return [await consumer.receive(timeout=seconds) for _ in range(count)]


def test_what_is_closed_says_so_and_leaves_nothing_behind() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            tasks = []
            for _ in range(3):
                for consumer in (
                    await client.queue_consumer(NAME, "q"),
                    await client.stream_consumer(NAME, "s"),
                    await client.checkpoint_consumer(NAME),
                    await client.consumer(REGULAR, "c"),
                    await client.reader(REGULAR),
                ):
                    waiting = asyncio.ensure_future(consumer.receive())
                    await asyncio.sleep(0)
                    await consumer.close()
                    with pytest.raises(AlreadyClosed):
                        await waiting
                    with pytest.raises(AlreadyClosed):
                        await consumer.receive()
                    assert [message async for message in consumer] == []
                await asyncio.sleep(5)
                tasks.append(len(asyncio.all_tasks()))
            assert tasks[0] == tasks[2]

    play(story)


def test_a_receive_that_is_cancelled_takes_nothing_with_it() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            for number in range(30):
                waiting = asyncio.ensure_future(consumer.receive())
                await asyncio.sleep(0.001 * number)
                if number == 10:
                    await send(client, 5)
                waiting.cancel()
                if not waiting.cancelled() and waiting.done():
                    await consumer.ack(waiting.result())
            left = await consumer.receive_many(10, timeout=2.0)
            await silence(consumer)
            assert len(left) <= 5

    play(story)


def test_wrong_options_are_refused_before_anything_is_connected() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            with pytest.raises(NotAllowed, match="scalable topic"):
                await client.consumer(NAME, "s")
            with pytest.raises(NotAllowed, match="is a segment"):
                await client.stream_consumer("segment://t/n/x/0000-ffff-0", "s")
            with pytest.raises(InvalidSetting):
                await client.queue_consumer(NAME, "s", queue_size=0)
            with pytest.raises(InvalidSetting):
                await client.consumer(None, "s")
            assert client._connections.count == 0

    play(story)


def test_a_checkpoint_over_a_pruned_segment_is_refused_unless_told_otherwise() -> None:
    """Thirty of fifty messages are gone: nobody skips them without a word."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with new_client(stage) as client:
            await send(client, 50)
            async with await client.checkpoint_consumer(NAME, start=FROM_EARLIEST) as consumer:
                await drain(consumer, 20)
                stored = consumer.checkpoint()
            await stage.split(0)
            await until_pruned(stage, 0)
            await send(client, 10)
            with pytest.raises(DataLost, match=r"segment 0 of .* before all of it was read"):
                await client.checkpoint_consumer(NAME, start=stored)
            async with await client.checkpoint_consumer(
                NAME, start=stored, fail_on_data_loss=False
            ) as consumer:
                assert numbers(await drain(consumer, 10)) == list(range(10))
                stored = consumer.checkpoint()
            # It stands behind the gap now.
            async with await client.checkpoint_consumer(NAME, start=stored) as consumer:
                await silence(consumer)

    play(story, scalable_sealed_seconds=1.0, scalable_auto_scale_interval_seconds=1.0)


def test_a_checkpoint_behind_all_of_a_pruned_segment_is_taken() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        async with new_client(stage) as client:
            await send(client, 50)
            await stage.split(0)
            async with await client.checkpoint_consumer(NAME, start=FROM_EARLIEST) as consumer:
                await drain(consumer, 50)
                await silence(consumer)
                stored = Checkpoint.from_bytes(consumer.checkpoint().to_bytes())
            await until_pruned(stage, 0)
            await send(client, 10)
            async with await client.checkpoint_consumer(NAME, start=stored) as consumer:
                assert numbers(await drain(consumer, 10)) == list(range(10))

    play(story, scalable_sealed_seconds=1.0, scalable_auto_scale_interval_seconds=1.0)


def test_a_checkpoint_before_what_was_trimmed_is_refused_unless_told_otherwise() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        async with new_client(stage) as client:
            await send(client, 50, batching=False)
            async with await client.checkpoint_consumer(NAME, start=FROM_EARLIEST) as consumer:
                await drain(consumer, 20)
                early = consumer.checkpoint()
                await drain(consumer, 30)
                late = consumer.checkpoint()
            (segment,) = (await stage.layout()).active
            name = TOPIC.segment(segment.descriptor)
            topic = await stage.host.server.topics.get(name, create=False)
            for _ in range(10):  # the ledgers are full, and retention may want them a while
                if await topic.trim():
                    break
                await asyncio.sleep(60.0)
            with pytest.raises(DataLost, match=r"segment 0 of .* its first message is now"):
                await client.checkpoint_consumer(NAME, start=early)
            for place, strict in ((early, False), (late, True)):
                async with await client.checkpoint_consumer(
                    NAME, start=place, fail_on_data_loss=strict
                ) as consumer:
                    await silence(consumer)
            async with await client.checkpoint_consumer(NAME, start=FROM_EARLIEST) as consumer:
                await silence(consumer)

    play(story, managed_ledger_ledger_entries=10)


async def until_pruned(stage: Stage, segment_id: int) -> None:
    for _ in range(600):
        if segment_id not in (await stage.layout()).segments:
            return
        await asyncio.sleep(1.0)
    raise AssertionError(f"segment {segment_id} is not pruned")
