"""Producers of scalable topics through the wire: each message once, in order, by whom it may."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Any

import pytest

from harness.simulation.scalable.feeds import Delivery
from harness.simulation.scalable.links import route
from magnetar.errors import DeadlineExceeded, WireCode
from magnetar.model.hashing import HASH_MAX, bucket_hash, key_hash
from magnetar.model.names import TopicName
from magnetar.model.segments import SegmentLayout
from magnetar.scalable.service import ScalableTopics
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.commands import NAMES
from magnetar.wire.messages import Received
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.server.scalable_stage import (
    GRACE_S,
    NAME,
    TOPIC,
    Stage,
    owned,
    play,
    read_all,
    send,
    told,
    until,
)
from tests.unit.server.serving import refused

SHARED = pb.Shared
EXCLUSIVE = pb.Exclusive
WAITING = pb.WaitForExclusive
FENCING = pb.ExclusiveWithFencing


async def opened(driver: Driver, topic: str, number: int, name: str, **fields: Any) -> Any:
    fields = {"user_provided_producer_name": True, **fields}
    return await driver.request(
        "PRODUCER", topic=topic, producer_id=number, producer_name=name, **fields
    )


async def published(driver: Driver, number: int, name: str, sequence: int, key: str) -> Any:
    message = build_message(b"m", producer_name=name, sequence_id=sequence, key=key)
    return (await driver.publish(number, sequence, message)).message_id


async def segment_of(stage: Stage, key: str) -> tuple[int, str]:
    segment = route(await stage.layout(), key_hash(key))
    return segment.segment_id, str(TOPIC.segment(segment.descriptor))


async def _split(number: int, scalable: ScalableTopics) -> SegmentLayout:
    return await scalable.split(TOPIC, number)


async def entries(stage: Stage) -> int:
    """How many messages all segments hold."""
    count = 0
    for segment in (await stage.layout()).segments.values():
        count += await stage.ask(partial(_entries_of, TOPIC.segment(segment.descriptor)))
    return count


async def _entries_of(name: TopicName, scalable: ScalableTopics) -> int:
    await scalable.host.seek_earliest(name, "all")
    return await scalable.host.backlog(name, "all") or 0


# --- once


@pytest.mark.parametrize("crashes", [False, True])
def test_a_send_that_is_repeated_after_a_split_is_stored_once(crashes: bool) -> None:
    """The receipt was lost with the segment: the child knows what its parent has stored."""

    async def story(stage: Stage) -> None:
        await stage.create()
        await stage.ask(lambda scalable: scalable.create_subscription(TOPIC, "all", "QUEUE"))
        driver = await stage.driver()
        keys = [f"k{number}" for number in range(8)]
        _, parent = await segment_of(stage, "k0")
        await opened(driver, parent, 1, "p-seg-0")
        for sequence, key in enumerate(keys):
            await published(driver, 1, "p-seg-0", sequence, key)
        if crashes:
            await stage.host.kill()
            assert await stage.host.start()
        await stage.split(0)
        if crashes:
            await stage.host.kill()
            assert await stage.host.start()
            driver = await stage.driver()
        children: set[str] = set()
        for sequence, key in enumerate(keys):
            number, child = await segment_of(stage, key)
            if child not in children:
                children.add(child)
                await opened(driver, child, number, f"p-seg-{number}")
            again = await published(driver, number, f"p-seg-{number}", sequence, key)
            assert again.ledgerId == 2**64 - 1, "a duplicate has no place"
        assert len(children) == 2
        assert await entries(stage) == 8
        number, _ = await segment_of(stage, "k0")
        assert (await published(driver, number, f"p-seg-{number}", 8, "k0")).ledgerId < 2**63
        assert await entries(stage) == 9
        await driver.close()

    play(story, disk=crashes)


def test_a_send_that_is_repeated_after_a_merge_is_stored_once() -> None:
    """Each key is judged by the parent that held it, though their last sequences differ."""

    async def story(stage: Stage) -> None:
        await stage.create(2)
        await stage.ask(lambda scalable: scalable.create_subscription(TOPIC, "all", "QUEUE"))
        driver = await stage.driver()
        keys = [f"k{number}" for number in range(8)]
        parents = {key: await segment_of(stage, key) for key in keys}
        for number, topic in set(parents.values()):
            await opened(driver, topic, number, f"p-seg-{number}")
        for sequence, key in enumerate(keys):
            number, _ = parents[key]
            await published(driver, number, f"p-seg-{number}", sequence, key)
        await stage.merge(0, 1)
        number, child = await segment_of(stage, "k0")
        await opened(driver, child, number, f"p-seg-{number}")
        for sequence, key in enumerate(keys):
            again = await published(driver, number, f"p-seg-{number}", sequence, key)
            assert again.ledgerId == 2**64 - 1
        assert await entries(stage) == 8
        assert (await published(driver, number, f"p-seg-{number}", 8, "k0")).ledgerId < 2**63
        assert await entries(stage) == 9
        await driver.close()

    play(story)


def test_a_producer_that_dies_and_sends_again_after_a_split_and_a_merge() -> None:
    """A new process sends all that it has no receipt for, whatever became of the segments."""

    async def story(stage: Stage) -> None:
        await stage.create()
        one, two = stage.process(), stage.process()
        async with one, two, stage.queue(two) as consumer:
            producer = stage.producer(one)
            await producer.start()
            for number in range(40):
                await producer.send(f"k{number % 5}", b"m")
            await until(lambda: producer.waiting <= 20, 5)
            one.kill()
            await stage.split(0)
            await stage.merge(1, 2)
            unrecorded = stage.producer(two)
            async with unrecorded as again:
                for number in range(40):
                    await again.send(f"k{number % 5}", b"m")
                await again.flush()
            await read_all(stage, consumer)
            with pytest.raises(DeadlineExceeded):
                await consumer.receive(2.0)

    play(story, checked=False)


# --- order


def test_pipelined_sends_keep_the_order_of_each_key_over_changes_and_cuts() -> None:
    """Defects 12 and 13: the history that all clients saw is checked, epochs included."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with (
            stage.process() as links,
            stage.process() as others,
            stage.producer(links) as producer,
            stage.stream(others) as consumer,
        ):
            sending = asyncio.create_task(send(producer, 600))
            await stage.split(0)
            links.cut()
            await stage.split(1)
            await stage.merge(4, 2)
            links.cut()
            await stage.split(3)
            await sending
            await read_all(stage, consumer)

    play(story)


def test_of_sends_in_flight_at_a_seal_a_first_part_is_stored_and_the_rest_refused() -> None:
    """Defect 12: no send overtakes one that was refused, so a client can repeat them in order."""

    async def story(stage: Stage) -> None:
        await stage.create()
        await stage.ask(lambda scalable: scalable.create_subscription(TOPIC, "all", "QUEUE"))
        driver = await stage.driver()
        _, topic = await segment_of(stage, "k")
        await opened(driver, topic, 1, "p-seg-0")
        splitting = asyncio.create_task(stage.split(0))
        sent = 0
        while not splitting.done():
            message = build_message(b"m", producer_name="p-seg-0", sequence_id=sent, key="k")
            driver.send("SEND", message, producer_id=1, sequence_id=sent)
            sent += 1
            await asyncio.sleep(0.0002)
        answers: dict[str, list[int]] = {"SEND_RECEIPT": [], "SEND_ERROR": []}
        closed = False
        with contextlib.suppress(DeadlineExceeded):
            while True:
                push = await driver.pushes.get(2.0)
                assert isinstance(push, Received)
                body: Any = push.body
                closed |= NAMES[push.type] == "CLOSE_PRODUCER"
                if NAMES[push.type] in answers:
                    answers[NAMES[push.type]].append(body.sequence_id)
        stored, refusals = answers.values()
        assert stored == list(range(len(stored)))
        assert refusals == list(range(len(stored), len(stored) + len(refusals)))
        assert 0 < len(stored) < sent, "the seal came in the middle"
        assert closed
        assert await entries(stage) == len(stored)
        await driver.close()

    play(story)


def test_concurrent_changes_of_one_topic_are_serialised() -> None:
    """Defect 6: no two changes have the same ids, and each one's segments are there."""

    async def story(stage: Stage) -> None:
        await stage.create(4)
        async with (
            stage.process() as links,
            stage.producer(links) as producer,
            stage.stream(links) as consumer,
        ):
            sending = asyncio.create_task(send(producer, 300))
            hosts = list(stage.world.hosts.values())
            results = await asyncio.gather(
                *(
                    stage.ask(partial(_split, number), host)
                    for number in range(4)
                    for host in hosts
                ),
                return_exceptions=True,
            )
            done = [each for each in results if not isinstance(each, BaseException)]
            assert len(done) == 4, results
            assert sorted(each.epoch for each in done)[-1] == 4
            await sending
            layout = await stage.layout()
            layout.check_invariants()
            assert (layout.epoch, len(layout.active)) == (4, 8)
            await read_all(stage, consumer)

    play(story, brokers="ab")


# --- alone


def test_an_exclusive_producer_is_alone_on_its_segment_and_on_its_children() -> None:
    """Access modes are those of each segment: v5 claims all of them, and after each change."""

    async def story(stage: Stage) -> None:
        await stage.create(2)
        first, second = await stage.driver(), await stage.driver()
        names = [str(TOPIC.segment(each.descriptor)) for each in (await stage.layout()).active]
        for number, name in enumerate(names):
            mode = {"producer_access_mode": EXCLUSIVE}
            await opened(first, name, number, f"one-seg-{number}", **mode)
            for other in (EXCLUSIVE, SHARED):
                request = opened(
                    second, name, number, f"two-seg-{number}", producer_access_mode=other
                )
                assert await refused(request) in (
                    WireCode.PRODUCER_FENCED,
                    WireCode.PRODUCER_BUSY,
                )
        await stage.split(0)
        low, high = (
            str(TOPIC.segment(each.descriptor)) for each in (await stage.layout()).active[:2]
        )
        claimed = {"producer_access_mode": EXCLUSIVE}
        await opened(first, low, 12, "one-seg-2", **claimed)
        await opened(first, high, 13, "one-seg-3", **claimed)
        request = opened(second, low, 12, "two-seg-2", **claimed)
        assert await refused(request) == WireCode.PRODUCER_FENCED
        await published(first, 12, "one-seg-2", 0, "k")
        # Fencing takes it over, and the former one is out.
        await opened(second, low, 14, "two-seg-2", producer_access_mode=FENCING)
        while (await told(first, "CLOSE_PRODUCER")).producer_id != 12:
            pass  # that of the segment that was split
        request = opened(first, low, 15, "one-seg-2", **claimed)
        assert await refused(request) == WireCode.PRODUCER_FENCED
        await published(second, 14, "two-seg-2", 0, "k")
        await first.close()
        await second.close()

    play(story)


def test_a_waiting_producer_gets_the_segment_when_the_first_is_gone_and_not_of_a_sealed_one() -> (
    None
):
    async def story(stage: Stage) -> None:
        await stage.create(2)
        first, second = await stage.driver(), await stage.driver()
        names = [str(TOPIC.segment(each.descriptor)) for each in (await stage.layout()).active]
        for number, name in enumerate(names):
            mode = {"producer_access_mode": EXCLUSIVE}
            await opened(first, name, number, f"one-seg-{number}", **mode)
            answer = await opened(
                second, name, number, f"two-seg-{number}", producer_access_mode=WAITING
            )
            assert not answer.producer_ready
        await first.request("CLOSE_PRODUCER", producer_id=0)
        ready = await told(second, "PRODUCER_SUCCESS")
        assert (ready.producer_ready, ready.producer_name) == (True, "two-seg-0")
        await stage.split(1)
        # The segment will never take a message again: whoever waits for it is told.
        closed = await told(second, "CLOSE_PRODUCER")
        assert closed.producer_id == 1
        await first.close()
        await second.close()

    play(story)


# --- entry buckets


def test_two_consumers_share_one_segment_by_its_buckets() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        async with (
            stage.process() as links,
            stage.producer(links) as producer,
            stage.stream(links, "s1") as first,
        ):
            assert first.session.assignment is not None
            assert not first.session.assignment.segments[0].bucket_ranges
            async with stage.stream(links, "s2") as second:
                await until(lambda: len(first.feeds) == len(second.feeds) == 1, 5)
                for consumer in (first, second):
                    assert consumer.session.assignment is not None
                    (segment,) = consumer.session.assignment.segments
                    ranges = [(each.start, each.end) for each in segment.bucket_ranges]
                    assert (ranges[0][0], ranges[-1][1], len(ranges)) == (0, HASH_MAX, 4)
                await until(lambda: _are_subscribed(first, second), 5)
                await send(producer, 96)
                found = await read_all(stage, first, second)
                halves: dict[str, set[int]] = {"s1": set(), "s2": set()}
                for each in found:
                    halves[each.feed._consumer].add(bucket_hash(key_hash(each.key)) >> 14)
                assert halves == {"s1": {0, 1}, "s2": {2, 3}}

    play(story)


def test_the_order_of_keys_is_kept_while_a_third_consumer_joins_and_one_leaves() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        async with (
            stage.process() as links,
            stage.producer(links) as producer,
            stage.stream(links, "s1") as first,
            stage.stream(links, "s3") as third,
        ):
            sending = asyncio.create_task(_trickle(stage, 400))
            reading = asyncio.create_task(_read_until(stage, sending, first, third))
            await asyncio.sleep(2)
            async with stage.stream(links, "s2") as second:
                also = asyncio.create_task(_read_until(stage, sending, second))
                await asyncio.sleep(3)
                assert [owned(each) for each in (first, second, third)] == [[0], [0], [0]]
                await sending
                await asyncio.gather(reading, also)
                assert not producer.waiting

    play(story)


def test_what_a_sharing_consumer_held_goes_to_the_other_at_once_and_the_segment_after_grace() -> (
    None
):
    async def story(stage: Stage) -> None:
        await stage.create()
        one, two = stage.process(), stage.process()
        async with (
            one,
            two,
            stage.producer(two) as producer,
            stage.stream(one, "s1") as first,
            stage.stream(two, "s2") as second,
        ):
            await until(lambda: len(first.feeds) == len(second.feeds) == 1, 5)
            await until(lambda: _are_subscribed(first, second), 5)
            await send(producer, 100)
            for _ in range(10):
                await first.receive()  # and it acknowledges none of them
            one.kill()
            await send(producer, 100)
            begun = stage.world.now()
            await read_all(stage, second)
            assert stage.world.now() - begun < 5
            assert second.session.assignment is not None
            assert second.session.assignment.segments[0].bucket_ranges
            await asyncio.sleep(GRACE_S + 5)
            assert not second.session.assignment.segments[0].bucket_ranges, "it is alone now"
            await send(producer, 50)
            await read_all(stage, second)

    play(story)


def _are_subscribed(*consumers: Any) -> bool:
    feeds = [feed for consumer in consumers for feed in consumer.feeds.values()]
    return all(feed.subscribed and not feed.releasing and "keySharedMeta" in feed.options
               for feed in feeds)  # fmt: skip


async def _trickle(stage: Stage, count: int) -> None:
    async with stage.process() as links, stage.producer(links, "t") as producer:
        for number in range(count):
            await producer.send(f"k{number % 16}", b"m")
            await asyncio.sleep(0.02)
        await producer.flush()


async def _read_until(stage: Stage, sending: asyncio.Task[None], *consumers: Any) -> None:
    while not sending.done():
        await asyncio.gather(*(_some(each) for each in consumers))
    await read_all(stage, *consumers)


async def _some(consumer: Any) -> None:
    """A few messages, acknowledged late."""
    held: list[Delivery] = []
    with contextlib.suppress(DeadlineExceeded):
        while len(held) < 5:
            held += [await consumer.receive(0.1)]
    await asyncio.sleep(0.05)
    for delivery in held:
        consumer.ack(delivery)


def test_a_producer_that_is_refused_is_told_by_which_rule() -> None:
    """A topic itself takes no messages, and no segment is created by a producer."""

    async def story(stage: Stage) -> None:
        await stage.create()
        driver = await stage.driver()
        for topic, code in (
            (NAME, WireCode.NOT_ALLOWED),
            ("segment://public/default/orders/0000-7fff-1", WireCode.TOPIC_NOT_FOUND),
        ):
            assert await refused(opened(driver, topic, 1, "p")) == code
        await driver.close()

    play(story)
