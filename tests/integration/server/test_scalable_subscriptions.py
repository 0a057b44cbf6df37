"""Subscriptions of scalable topics through the wire: where they begin, what they keep."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from harness.simulation.scalable.clients import FROM_LATEST, CheckpointConsumer
from harness.simulation.scalable.producer import ScalableProducer
from magnetar.errors import DeadlineExceeded
from magnetar.model.ids import Checkpoint, MessageId, SegmentPosition
from magnetar.model.names import TopicName
from magnetar.testing.virtual.driver import Driver
from magnetar.wire.messages import Delivered, metadata_of
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.server.scalable_stage import (
    KEYS,
    NAME,
    TOPIC,
    Stage,
    joined,
    looked_up,
    nothing_comes,
    owned,
    play,
    read,
    read_all,
    send,
    told,
    until,
)

WHOLE = "segment://public/default/orders/0000-ffff-0"
LOW = "segment://public/default/orders/0000-7fff-1"
SEALED_S = 100.0
HIGH = "segment://public/default/orders/8000-ffff-2"


async def subscribe(driver: Driver, topic: str, number: int, **fields: Any) -> None:
    given: dict[str, Any] = {"subscription": "q", "subType": 1, "initialPosition": 0}
    await driver.request("SUBSCRIBE", topic=topic, consumer_id=number, **(given | fields))
    driver.send("FLOW", consumer_id=number, messagePermits=1000)


async def delivered(driver: Driver, count: int) -> list[Delivered]:
    found: list[Delivered] = []
    while len(found) < count:
        push = await driver.pushes.get()
        if isinstance(push, Delivered):
            found.append(push)
    return found


async def ack(driver: Driver, message: Delivered, *, cumulative: bool = False) -> None:
    body = message.body
    at = {"ledgerId": body.message_id.ledgerId, "entryId": body.message_id.entryId}
    kind = int(cumulative)
    await driver.request("ACK", consumer_id=body.consumer_id, ack_type=kind, message_id=[at])


async def backlog(stage: Stage, segment_id: int, subscription: str) -> int | None:
    layout = await stage.layout()
    name = TOPIC.segment(layout.segment(segment_id).descriptor)
    return await stage.ask(lambda scalable: scalable.host.backlog(name, subscription))


# --- at the latest message


def test_a_queue_consumer_at_latest_loses_nothing_at_a_split() -> None:
    """Defect 1: children have a cursor before anything can be written to them."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 20)
            driver = await stage.driver()
            await subscribe(driver, WHOLE, 1)
            await stage.split(0)
            await send(producer, 20)  # before any consumer has heard of the children
            for number, topic in ((2, LOW), (3, HIGH)):
                await subscribe(driver, topic, number)
            found = await delivered(driver, 20)
            numbers = {metadata_of(each.headers_and_payload).sequence_id for each in found}
            assert numbers == set(range(20, 40))
            await driver.close()

    play(story)


def test_a_split_between_the_layout_and_the_subscribes_of_a_queue_consumer_at_latest() -> None:
    """Defect 1: the layout that a client saw is old when it subscribes, and nothing is lost."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 20)
            driver = await stage.driver()
            dag = (await looked_up(driver, create=False)).dag
            assert [each.segment_id for each in dag.segments] == [0]
            await stage.split(0)
            await subscribe(driver, WHOLE, 1)  # by the layout of before
            await send(producer, 20)
            await stage.split(1)
            await send(producer, 20)
            layout = await stage.layout()
            for segment in layout.segments.values():
                if segment.segment_id:
                    name = str(TOPIC.segment(segment.descriptor))
                    await subscribe(driver, name, 1 + segment.segment_id)
            found = await delivered(driver, 40)
            numbers = {metadata_of(each.headers_and_payload).sequence_id for each in found}
            assert numbers == set(range(20, 60))
            await driver.close()

    play(story)


def test_a_queue_consumer_at_latest_under_traffic_and_changes() -> None:
    """Defect 1 with a whole client: nothing published after its subscribe is missing."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 20)
            async with stage.queue(links, earliest=False) as consumer:
                sending = asyncio.create_task(send(producer, 300))
                await stage.split(0)
                await stage.split(2)
                await stage.merge(1, 3)
                await sending
                await read_all(stage, consumer)

    play(story)


def test_a_stream_consumer_at_latest_joins_a_topic_with_sealed_parents() -> None:
    """Defect 2: what is older is drained for it at once, what comes later is not skipped."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 20)
            await stage.split(0)
            await send(producer, 20)
            await stage.split(1)
            async with stage.stream(links, earliest=False) as consumer:
                await send(producer, 40)
                found = await read(consumer, 40)
                assert {each.sequence for each in found} == set(range(40, 80))
                await nothing_comes(consumer)
                await until(lambda: owned(consumer) == [2, 3, 4], 1)

    play(story)


def test_a_split_between_the_assignment_and_the_subscribes_of_a_stream_consumer_at_latest() -> None:
    """Defect 2: it subscribes to the parent that it was given, and gets what comes after that."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 20)
            driver = await stage.driver()
            assignment = await joined(driver, "a")
            assert [each.segment_topic for each in assignment.segments] == [WHOLE]
            await stage.split(0)
            stream = {"subscription": "s", "subType": 0}
            await subscribe(driver, WHOLE, 1, **stream)
            await send(producer, 20)
            while await _assigned(driver) != [1, 2]:
                pass  # the new layout, before the parent is drained
            for number, topic in enumerate((LOW, HIGH)):
                await subscribe(driver, topic, 2 + number, **stream)
            found = await delivered(driver, 20)
            numbers = {metadata_of(each.headers_and_payload).sequence_id for each in found}
            assert numbers == set(range(20, 40))
            await driver.close()

    play(story)


@pytest.mark.parametrize("after_ms", range(0, 30, 3))
def test_consumers_that_come_at_latest_in_the_middle_of_a_split(after_ms: int) -> None:
    """Defects 1 and 2 at any moment of a change, with traffic all the while."""

    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 20)
            sending = asyncio.create_task(_trickle(producer, 100))
            splitting = asyncio.create_task(stage.split(0))
            await asyncio.sleep(after_ms / 1000)
            async with (
                stage.queue(links, earliest=False) as queue,
                stage.stream(links, earliest=False) as stream,
            ):
                await stage.split(1)
                await asyncio.gather(sending, splitting)
                await read_all(stage, queue, stream)

    play(story)


async def _trickle(producer: ScalableProducer, count: int) -> None:
    for number in range(count):
        await producer.send(f"k{number % KEYS}", b"m")
        await asyncio.sleep(0.001)
    await producer.flush()


def test_checkpoint_consumers_at_latest_read_later_children_from_their_start() -> None:
    """Defect 2, without a group: also when the split comes before anything was delivered."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 20)
            async with CheckpointConsumer(
                links, NAME, "c", start=FROM_LATEST, record=stage.record
            ) as reader:
                await stage.split(0)
                await send(producer, 20)
                found = await read(reader, 20)
                assert {each.sequence for each in found} == set(range(20, 40))
                await nothing_comes(reader)

    play(story)


# --- checkpoints


def test_a_checkpoint_is_restored_two_splits_and_a_merge_later_exactly() -> None:
    """Also defect 10: segments that had nothing to say are not read again from their start."""

    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 100)
            async with CheckpointConsumer(links, NAME, "c", record=stage.record) as reader:
                before = {each.sequence for each in await read(reader, 40)}
                taken = reader.checkpoint()
            await stage.split(0)
            await send(producer, 60)
            await stage.split(1)
            await send(producer, 60)
            await stage.merge(3, 4)
            await send(producer, 60)
            async with CheckpointConsumer(
                links, NAME, "c", start=taken, record=stage.record
            ) as reader:
                after = [each.sequence for each in await read(reader, 240)]
                await nothing_comes(reader)
            assert set(after) == set(range(280)) - before

    play(story)  # the order of each key is checked with the history


def test_a_checkpoint_names_what_the_client_did_not_read_yet_as_well() -> None:
    """Defect 10: a segment without a position in it is read from its earliest message."""

    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with stage.process() as links, stage.producer(links) as producer:
            async with CheckpointConsumer(links, NAME, "c", record=stage.record) as reader:
                await send(producer, 30, key="k1")
                await read(reader, 30)
                taken = reader.checkpoint()
                (position,) = Checkpoint.from_bytes(taken).positions
                assert isinstance(position, SegmentPosition)
                assert isinstance(position.message_id, MessageId)
            await send(producer, 48)
            async with CheckpointConsumer(
                links, NAME, "c", start=taken, record=stage.record
            ) as reader:
                await read(reader, 48)
                await nothing_comes(reader)

    play(story)


def test_sealed_segments_are_kept_for_a_checkpoint_without_a_group() -> None:
    """Defect 10: they have no subscription that speaks for them, so their time protects them."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 30)
            async with CheckpointConsumer(links, NAME, "c", record=stage.record) as reader:
                await read(reader, 10)
                taken = reader.checkpoint()
            await stage.split(0)
            await asyncio.sleep(SEALED_S - 10)
            async with CheckpointConsumer(
                links, NAME, "c", start=taken, record=stage.record
            ) as reader:
                await read(reader, 20)
                await nothing_comes(reader)

    play(story, scalable_sealed_seconds=SEALED_S, scalable_auto_scale_interval_seconds=5.0)


def test_what_a_member_of_a_checkpoint_group_has_not_read_is_not_pruned() -> None:
    """A member that reconnects, or waits for its turn, still needs what it was assigned."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 30)
        driver = await stage.driver()
        assignment = await joined(driver, "m", subscription="g", consumer_type=pb.CHECKPOINT)
        assert [each.segment_topic for each in assignment.segments] == [WHOLE]
        await stage.split(0)
        await asyncio.sleep(2 * SEALED_S)
        assert 0 in (await stage.layout()).segments
        await driver.close()

    play(story, scalable_sealed_seconds=SEALED_S)


# --- acknowledgements


def test_a_cumulative_acknowledgement_is_one_of_its_segment_alone() -> None:
    """Defects 11 and 19: whatever a client says of one segment, no other one moves."""

    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 48)
            driver = await stage.driver()
            layout = await stage.layout()
            names = {number: str(TOPIC.segment(each.descriptor))
                     for number, each in layout.segments.items()}  # fmt: skip
            stream = {"subscription": "s", "subType": 0, "initialPosition": 1}
            for number, name in names.items():
                await subscribe(driver, name, number, **stream)
            found = await delivered(driver, 48)
            last = [each for each in found if each.body.consumer_id == 0][-1]
            counts = [await backlog(stage, number, "s") for number in (0, 1)]
            await ack(driver, last, cumulative=True)
            assert await backlog(stage, 0, "s") == 0
            assert await backlog(stage, 1, "s") == counts[1] == 48 - (counts[0] or 0)
            await driver.close()

    play(story)


def test_a_stream_consumer_that_dies_is_given_again_what_it_did_not_acknowledge() -> None:
    """Defect 11: an acknowledgement covers what was handed out, never what only had arrived."""

    async def story(stage: Stage) -> None:
        await stage.create(3)
        one, two = stage.process(), stage.process()
        async with one, two, stage.producer(two) as producer:
            async with stage.stream(one) as first:
                await send(producer, 120)
                await read(first, 30)
                await asyncio.sleep(1)
                one.kill()
            async with stage.stream(two) as second:
                found = await read(second, 90, 90.0)
                assert len({each.sequence for each in found}) == 90
                await nothing_comes(second)

    play(story)


def test_acknowledgements_after_the_seal_are_taken() -> None:
    """Defect 18: the consumer of a sealed segment stays until it has acknowledged everything."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 10)
            driver = await stage.driver(client_version="Pulsar-Java-v5.0.0")
            await subscribe(driver, WHOLE, 1, initialPosition=1)
            found = await delivered(driver, 10)
            await stage.split(0)
            for message in found[:-1]:
                await ack(driver, message)
            assert await backlog(stage, 0, "q") == 1
            with pytest.raises(DeadlineExceeded):
                await driver.pushes.get(5.0)  # neither closed nor told of the end
            await ack(driver, found[-1])
            end = await driver.pushes.get()
            assert type(end).__name__ == "Received"
            assert await backlog(stage, 0, "q") == 0
            await driver.close()

    play(story)


def test_a_seek_of_a_client_on_a_drained_segment_takes_its_children_away() -> None:
    """The SEEK command, as a client sends it to one segment: parents first holds again."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 10)
            await stage.split(0)
            driver = await stage.driver()
            await joined(driver, "a")
            stream = {"subscription": "s", "subType": 0, "initialPosition": 1}
            await subscribe(driver, WHOLE, 1, **stream)
            found = await delivered(driver, 10)
            await ack(driver, found[-1], cumulative=True)
            assert await _assigned(driver) == [1, 2]
            at = found[4].body.message_id
            position = {"ledgerId": at.ledgerId, "entryId": at.entryId}
            await driver.request("SEEK", consumer_id=1, message_id=position)
            assert await _assigned(driver) == [0]
            await subscribe(driver, WHOLE, 3, **stream)
            again = await delivered(driver, 6)
            numbers = [metadata_of(each.headers_and_payload).sequence_id for each in again]
            assert numbers == list(range(4, 10))
            await ack(driver, again[-1], cumulative=True)
            assert await _assigned(driver) == [1, 2]
            await driver.close()

    play(story)


async def _assigned(driver: Driver) -> list[int]:
    """The next assignment that is told."""
    update = await told(driver, "SCALABLE_TOPIC_ASSIGNMENT_UPDATE")
    return sorted(each.segment_id for each in update.assignment.segments)


def test_a_backlog_that_is_dropped_gives_the_children_out_and_nothing_older_comes() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        async with stage.process() as links, stage.producer(links) as producer:
            await stage.ask(lambda scalable: scalable.create_subscription(TOPIC, "s", "STREAM"))
            await send(producer, 10)
            await stage.split(0)
            await send(producer, 10)
            await stage.ask(lambda scalable: scalable.skip_all(TOPIC, "s"))
            async with stage.stream(links) as consumer:
                await until(lambda: owned(consumer) == [1, 2], 1)
                await send(producer, 10)
                found = {each.sequence for each in await read(consumer, 10)}
                assert found == set(range(20, 30))
                await nothing_comes(consumer)

    play(story, checked=False)


def test_what_a_queue_consumer_held_on_sealed_segments_goes_to_the_next_one() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        one, two = stage.process(), stage.process()
        async with one, two, stage.producer(two) as producer:
            await send(producer, 40)
            async with stage.queue(one, "q1") as first:
                await read(first, 10)
                held = [await first.receive() for _ in range(10)]
                await stage.split(0)
                await send(producer, 20)
                await until(lambda: not any(feed._acks for feed in first.feeds.values()), 5)
                one.kill()
            async with stage.queue(two, "q2") as second:
                found = {each.sequence for each in await read(second, 50)}
                assert {each.sequence for each in held} <= found
                await nothing_comes(second)

    play(story)


def test_a_subscription_that_was_unsubscribed_everywhere_is_gone() -> None:
    """It must not come back with the next split, and keep segments from being pruned."""

    async def story(stage: Stage) -> None:
        await stage.create()
        driver = await stage.driver()
        await subscribe(driver, WHOLE, 1)
        await driver.request("UNSUBSCRIBE", consumer_id=1)
        await stage.split(0)
        assert await backlog(stage, 1, "q") is None
        await driver.close()

    play(story)


# --- the end of sealed segments


def test_a_sealed_segment_is_pruned_only_when_every_subscription_has_drained_it() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 20)
            async with stage.stream(links) as stream:
                async with stage.queue(links) as queue:
                    await stage.split(0)
                    await send(producer, 20)
                    await read(queue, 40)
                held = [await stream.receive() for _ in range(20)]
                await asyncio.sleep(10 * SEALED_S)
                assert 0 in (await stage.layout()).segments
                assert (await stage.layout()).epoch == 1
                stream.ack(held[-1])
                await read(stream, 20)
                await until(lambda: _is_pruned(stage, 0), 2 * SEALED_S)
            layout = await stage.layout()
            layout.check_invariants()
            assert layout.epoch == 2
            assert sorted(layout.segments) == [1, 2]
            assert not await stage.host.server.topics.exists(TopicName.parse(WHOLE))

    play(story, scalable_sealed_seconds=SEALED_S)


def test_a_drained_segment_is_pruned_though_a_queue_consumer_is_still_there() -> None:
    """Queue consumers stay on every sealed segment of the layout: they must not keep it there."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with (
            stage.process() as links,
            stage.producer(links) as producer,
            stage.queue(links) as queue,
        ):
            await send(producer, 20)
            await stage.split(0)
            await read(queue, 20)
            await until(lambda: _is_pruned(stage, 0), 20 * SEALED_S)

    play(story, scalable_sealed_seconds=SEALED_S)


def test_a_watch_is_told_when_a_segment_is_pruned() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        await stage.split(0)
        driver = await stage.driver()
        assert len((await looked_up(driver, create=False)).dag.segments) == 3
        body = await told(driver, "SCALABLE_TOPIC_UPDATE", 3 * SEALED_S)
        assert (body.dag.epoch, len(body.dag.segments)) == (2, 2)
        await driver.close()

    play(story, scalable_sealed_seconds=SEALED_S)


async def _is_pruned(stage: Stage, segment_id: int) -> bool:
    await asyncio.sleep(5)
    return segment_id not in (await stage.layout()).segments
