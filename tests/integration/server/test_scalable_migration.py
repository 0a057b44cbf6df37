"""Regular topics that become scalable under their clients, through the wire (all of defect 5)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest

from harness.simulation.scalable.clients import CheckpointConsumer, QueueConsumer, StreamConsumer
from harness.simulation.scalable.producer import ScalableProducer
from magnetar.errors import Conflict, DeadlineExceeded, RequestError, WireCode
from magnetar.model.names import TopicName
from magnetar.scalable.records import GroupRecord, MemberRecord, state_directory
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.messages import Delivered
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.server.scalable_stage import (
    GRACE_S,
    NAME,
    TOPIC,
    Process,
    Stage,
    joined,
    looked_up,
    nothing_comes,
    owned,
    play,
    read,
    send,
    told,
    until,
)
from tests.unit.server.serving import refused

REGULAR_NAME = "persistent://public/default/orders"
REGULAR = TopicName.parse(REGULAR_NAME)
PARTITIONS = [f"{REGULAR_NAME}-partition-{number}" for number in range(2)]
MANAGED = [{"key": "__pulsar.v5.managed", "value": "true"}]
EARLIEST = {"ledgerId": 2**64 - 1, "entryId": 2**64 - 1}


async def partitioned(stage: Stage, partitions: int = 2) -> None:
    await stage.host.ask(lambda server: server.topics.create_partitioned(REGULAR, partitions))


async def migrate(stage: Stage, *, force: bool = False) -> None:
    await stage.ask(lambda scalable: scalable.migrate(REGULAR, force=force))


async def publish(driver: Driver, topic: str, count: int, number: int = 1) -> None:
    """As a v4 client does."""
    await driver.request("PRODUCER", topic=topic, producer_id=number)
    for sequence in range(count):
        key = f"{topic[-1]}{sequence}"
        await driver.publish(number, sequence, build_message(b"m", sequence_id=sequence, key=key))
    await driver.request("CLOSE_PRODUCER", producer_id=number)


async def take(driver: Driver, topic: str, count: int) -> None:
    """A v4 consumer that acknowledges so many and goes."""
    await driver.request("SUBSCRIBE", topic=topic, subscription="s", subType=0, consumer_id=1,
                         initialPosition=1)  # fmt: skip
    driver.send("FLOW", consumer_id=1, messagePermits=100)
    body: Any = None
    while count:
        push = await driver.pushes.get()
        if isinstance(push, Delivered):  # and no news of an assignment
            body, count = push.body, count - 1
    at = {"ledgerId": body.message_id.ledgerId, "entryId": body.message_id.entryId}
    await driver.request("ACK", consumer_id=1, ack_type=1, message_id=[at])
    await driver.request("CLOSE_CONSUMER", consumer_id=1)
    while len(driver.pushes):
        driver.pushes.get_nowait()


def test_a_partitioned_topic_is_migrated_under_v5_clients_of_every_kind() -> None:
    """All messages from before and after come, to each of them, and nothing twice."""

    async def story(stage: Stage) -> None:
        await partitioned(stage)
        async with stage.process() as links:
            name = {"links": links, "topic": REGULAR_NAME}
            async with (
                ScalableProducer(**name, name="p") as producer,  # type: ignore[arg-type]
                QueueConsumer(links, REGULAR_NAME, "q", "q1") as queue,
                CheckpointConsumer(links, REGULAR_NAME, "c") as reader,
            ):
                await send(producer, 40)
                await read(queue, 20)
                await read(reader, 20)
                await migrate(stage, force=True)
                await send(producer, 40)
                async with StreamConsumer(links, REGULAR_NAME, "s", "s1") as stream:
                    streamed = [each.sequence for each in await read(stream, 80)]
                    assert len(set(streamed)) == 80
                    assert set(streamed[:40]) == set(range(40)), "parents first"
                    await nothing_comes(stream)
                async with CheckpointConsumer(links, REGULAR_NAME, "m", group="g") as member:
                    grouped = [each.sequence for each in await read(member, 80)]
                    assert len(set(grouped)) == 80
                    assert set(grouped[:40]) == set(range(40)), "parents first"
                for consumer in (queue, reader):
                    assert len({each.sequence for each in await read(consumer, 60)}) == 60
                    await nothing_comes(consumer)
            layout = await stage.layout(TopicName.parse(NAME))
            assert [each.segment_id for each in layout.active] == [2, 3]

    play(story, checked=False)


def test_a_stream_consumer_of_a_topic_that_is_not_migrated_yet() -> None:
    """It is given the partitions, and follows when they become segments."""

    async def story(stage: Stage) -> None:
        await partitioned(stage)
        async with (
            stage.process() as links,
            ScalableProducer(links, REGULAR_NAME, "p") as producer,
            StreamConsumer(links, REGULAR_NAME, "s", "s1") as stream,
        ):
            await send(producer, 20)
            await read(stream, 20)
            await migrate(stage, force=True)
            await send(producer, 20)
            await read(stream, 20)

    play(story, checked=False)


def test_two_stream_consumers_share_the_partitions_until_one_is_lost() -> None:
    async def story(stage: Stage) -> None:
        await partitioned(stage, 4)
        other = stage.process("b")
        async with (
            stage.process("a") as links,
            ScalableProducer(links, REGULAR_NAME, "p") as producer,
            StreamConsumer(links, REGULAR_NAME, "s", "s1") as stream,
            StreamConsumer(other, REGULAR_NAME, "s", "s2") as lost,
        ):
            await until(lambda: (owned(stream), owned(lost)) == ([0, 1], [2, 3]), 5)
            await send(producer, 40)
            other.kill()
            await asyncio.sleep(GRACE_S - 5)
            assert owned(stream) == [0, 1]
            await until(lambda: owned(stream) == [0, 1, 2, 3], 10)
            assert len({each.sequence for each in await read(stream, 40)}) == 40
        await until(lambda: _is_empty(stage), 2 * GRACE_S, "nothing is stored")

    play(story, brokers="ab", checked=False)


async def _is_empty(stage: Stage) -> bool:
    directory = state_directory(TOPIC)
    return not await stage.ask(lambda scalable: scalable.store.metadata.scan_keys(directory))


@pytest.mark.parametrize("group", [None, "g"])
def test_a_migration_between_two_consumers_that_share_the_partitions(group: str | None) -> None:
    """Of a stream, or of a checkpoint group: they keep them, read them out, and go on."""

    async def story(stage: Stage) -> None:
        await partitioned(stage, 4)
        async with (
            stage.process() as links,
            ScalableProducer(links, REGULAR_NAME, "p") as producer,
            _member(links, "m1", group) as one,
            _member(links, "m2", group) as two,
        ):
            had = {0: ("m1",), 1: ("m1",), 2: ("m2",), 3: ("m2",)}
            assert await _owners(stage) == had
            await send(producer, 40)
            before = await _read_quietly(one, two)
            await send(producer, 40)
            await migrate(stage, force=True)
            assert await _owners(stage) == had
            await send(producer, 40)
            after = await _read_quietly(one, two)
            assert (sorted(before), sorted(after)) == ([*range(40)], [*range(40, 120)])
            children = {each: name for each, name in (await _owners(stage)).items() if each > 3}
            assert sorted(children) == [4, 5, 6, 7]
            assert sorted(children.values()) == sorted(had.values())

    play(story, checked=False)


def _member(links: Process, name: str, group: str | None) -> StreamConsumer | CheckpointConsumer:
    if group is None:
        return StreamConsumer(links, REGULAR_NAME, "s", name)
    return CheckpointConsumer(links, REGULAR_NAME, name, group=group)


async def _owners(stage: Stage) -> dict[int, tuple[str, ...]]:
    (group,) = await stage.ask(lambda scalable: scalable.store.all(TOPIC, "group", GroupRecord))
    return group.owners


async def _read_quietly(*consumers: StreamConsumer | CheckpointConsumer) -> list[int]:
    """The sequences of all that comes until nothing does."""

    async def one(consumer: StreamConsumer | CheckpointConsumer) -> list[int]:
        found = []
        with contextlib.suppress(DeadlineExceeded):
            while True:
                found += [each.sequence for each in await read(consumer, 1, 3.0)]
        return found

    found = await asyncio.gather(*map(one, consumers))
    return [sequence for sequences in found for sequence in sequences]


def test_a_restart_of_the_server_keeps_what_consumers_of_partitions_had() -> None:
    async def story(stage: Stage) -> None:
        await partitioned(stage, 4)
        async with (
            stage.process() as links,
            ScalableProducer(links, REGULAR_NAME, "p") as producer,
            StreamConsumer(links, REGULAR_NAME, "s", "s1") as one,
            StreamConsumer(links, REGULAR_NAME, "s", "s2") as two,
        ):
            had = [0, 1], [2, 3]
            await until(lambda: (owned(one), owned(two)) == had, 5)
            before = await stage.members()
            await stage.host.kill()
            await asyncio.sleep(GRACE_S / 2)
            assert await stage.host.start()
            await until(lambda: _have_come_back(stage, before), 30, "they are back")
            assert (owned(one), owned(two)) == had
            await asyncio.sleep(2 * GRACE_S)
            assert (owned(one), owned(two)) == had
            await send(producer, 40)
            assert sorted(await _read_quietly(one, two)) == [*range(40)]

    play(story, disk=True, checked=False)


async def _have_come_back(stage: Stage, before: dict[str, MemberRecord]) -> bool:
    present = await stage.members()
    return all(
        name in present
        and present[name].broker != member.broker
        and present[name].lost_ms == member.lost_ms
        for name, member in before.items()
    )


def test_partitions_that_are_added_are_given_to_who_comes_next() -> None:
    async def story(stage: Stage) -> None:
        await partitioned(stage)
        driver = await stage.driver()
        await joined(driver, "a", topic=REGULAR_NAME)
        await stage.host.ask(lambda server: server.topics.grow(REGULAR, 4))
        second = await joined(driver, "b", 2, topic=REGULAR_NAME)
        assert [each.segment_id for each in second.segments] == [2, 3]
        await driver.close()

    play(story)


def test_assignments_name_the_topics_that_were_there_before() -> None:
    async def story(stage: Stage) -> None:
        await partitioned(stage)
        driver = await stage.driver()
        for topic in PARTITIONS:
            await publish(driver, topic, 3)
        await migrate(stage)
        first = await joined(driver, "a")
        assert [each.segment_topic for each in first.segments] == PARTITIONS
        found = await looked_up(driver, REGULAR_NAME, create=False)
        assert found.resolved_topic_name == NAME
        by_id = {each.segment_id: each for each in found.dag.segments}
        assert [by_id[number].legacy_topic_name for number in (0, 1)] == PARTITIONS
        assert not by_id[2].HasField("legacy_topic_name")
        checkpoint = await joined(driver, "m", 2, subscription="g", consumer_type=pb.CHECKPOINT)
        assert [each.segment_topic for each in checkpoint.segments] == PARTITIONS
        # The children are given out when both are drained, not when one is.
        for topic in PARTITIONS:
            await take(driver, topic, 3)
        update = await told(driver, "SCALABLE_TOPIC_ASSIGNMENT_UPDATE")
        while len(update.assignment.segments) != 2 or update.consumer_id != 1:
            update = await told(driver, "SCALABLE_TOPIC_ASSIGNMENT_UPDATE")
        topics = {each.segment_topic for each in update.assignment.segments}
        prefix = "segment://public/default/orders/"
        assert topics == {f"{prefix}0000-7fff-2", f"{prefix}8000-ffff-3"}
        await driver.close()

    play(story)


def test_subscriptions_go_on_where_they_were() -> None:
    """What v4 consumers had acknowledged stays so; the children have the subscription too."""

    async def story(stage: Stage) -> None:
        await partitioned(stage)
        driver = await stage.driver()
        for topic in PARTITIONS:
            await publish(driver, topic, 10)
            await take(driver, topic, 6)
        await migrate(stage)
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 20)  # before any consumer comes back
            async with stage.stream(links, earliest=False) as stream:
                found = await read(stream, 28)
                old = sorted(each.key for each in found[:8])
                assert old == sorted(f"{number}{at}" for number in "01" for at in range(6, 10))
                assert sorted(each.sequence for each in found[8:]) == list(range(20))
                await nothing_comes(stream)
                await until(lambda: owned(stream) == [2, 3], 2)
        await driver.close()

    play(story, checked=False)


def test_a_v4_producer_is_told_that_its_topic_is_terminated() -> None:
    async def story(stage: Stage) -> None:
        await partitioned(stage)
        driver = await stage.driver()
        await driver.request("PRODUCER", topic=PARTITIONS[0], producer_id=1)
        await driver.publish(1, 0, build_message(b"m"))
        with pytest.raises(Conflict):
            await migrate(stage)  # it would be cut off
        await migrate(stage, force=True)
        assert (await told(driver, "CLOSE_PRODUCER")).producer_id == 1
        request = driver.request("PRODUCER", topic=PARTITIONS[0], producer_id=2)
        assert await refused(request) == WireCode.TOPIC_TERMINATED
        await driver.close()

    play(story)


def test_the_regular_topic_takes_nothing_beside_the_scalable_one() -> None:
    async def story(stage: Stage) -> None:
        await partitioned(stage)
        driver = await stage.driver()
        await publish(driver, PARTITIONS[0], 2)
        await migrate(stage)
        for topic, code in (
            (REGULAR_NAME, WireCode.NOT_ALLOWED),  # it is partitioned
            (f"{REGULAR_NAME}-partition-7", WireCode.NOT_ALLOWED),
            (PARTITIONS[0], WireCode.TOPIC_TERMINATED),
            (PARTITIONS[1], WireCode.TOPIC_TERMINATED),
        ):
            made = driver.request("PRODUCER", topic=topic, producer_id=2)
            assert await refused(made) == code
        await driver.close()

    play(story)


async def _until_legacy_is_pruned(stage: Stage, left: int) -> None:
    for _ in range(60):
        await asyncio.sleep(10)
        if len((await stage.layout()).segments) == left:
            return
    raise AssertionError("what was migrated is not pruned")


def test_a_regular_topic_is_not_created_again_when_it_is_pruned() -> None:
    async def story(stage: Stage) -> None:
        driver = await stage.driver()
        await publish(driver, REGULAR_NAME, 2)
        await migrate(stage)
        await _until_legacy_is_pruned(stage, 1)
        made = driver.request("PRODUCER", topic=REGULAR_NAME, producer_id=3)
        assert await refused(made) == WireCode.TOPIC_NOT_FOUND
        assert not await stage.host.server.topics.exists(REGULAR)
        await driver.close()

    play(story, scalable_sealed_seconds=60.0)


def test_partitions_are_not_created_again_when_they_are_pruned() -> None:
    async def story(stage: Stage) -> None:
        await partitioned(stage)
        driver = await stage.driver()
        for topic in PARTITIONS:
            await publish(driver, topic, 2)
        await migrate(stage)
        await _until_legacy_is_pruned(stage, 2)
        assert await _is_refused(driver, PARTITIONS[0])
        assert not await stage.host.server.topics.exists(TopicName.parse(PARTITIONS[0]))
        await driver.close()

    play(story, scalable_sealed_seconds=60.0)


async def _is_refused(driver: Driver, topic: str) -> bool:
    try:
        await driver.request("PRODUCER", topic=topic, producer_id=3)
    except RequestError:
        return True
    return False


def test_a_migrated_topic_is_deleted_with_all_that_it_came_from() -> None:
    """Defect 17 on a migrated topic: nothing is stranded."""

    async def story(stage: Stage) -> None:
        await partitioned(stage)
        driver = await stage.driver()
        for topic in PARTITIONS:
            await publish(driver, topic, 2)
        await migrate(stage)
        await stage.ask(lambda scalable: scalable.delete(TopicName.parse(NAME), force=True))
        found = [
            topic
            for topic in (REGULAR_NAME, *PARTITIONS)
            if await stage.host.server.topics.exists(TopicName.parse(topic))
        ]
        assert found == []
        await stage.create()
        await driver.close()

    play(story)


@pytest.mark.parametrize("marked", [True, False])
def test_clients_that_follow_layouts_do_not_stand_in_the_way(marked: bool) -> None:
    """Those with the marker of v5; and readers of its checkpoint consumers, which have none.

    The latter are told by the watch that their connection has on the topic.
    """

    async def story(stage: Stage) -> None:
        await partitioned(stage)
        driver = await stage.driver(client_version="Pulsar-Java-v5.0.0")
        await looked_up(driver, REGULAR_NAME, create=False)
        metadata = MANAGED if marked else []
        reader: dict[str, Any] = {"subType": 0, "durable": False, "start_message_id": EARLIEST}
        for number, topic in enumerate(PARTITIONS):
            await driver.request(
                "SUBSCRIBE", topic=topic, subscription=f"r{number}", consumer_id=number,
                metadata=metadata, **reader,
            )  # fmt: skip
        if marked:
            await driver.request("PRODUCER", topic=PARTITIONS[0], producer_id=1, metadata=MANAGED)
        await migrate(stage)
        dag = (await told(driver, "SCALABLE_TOPIC_UPDATE")).dag
        assert len(dag.segments) == 4
        await driver.close()

    play(story)


@pytest.mark.parametrize("after_s", [0.005, 0.02, 0.04, 0.06])
def test_a_migration_that_a_crash_interrupts_is_finished_or_undone(after_s: float) -> None:
    """No writer of the regular topic is left beside the scalable one; to migrate again works."""

    async def story(stage: Stage) -> None:
        await partitioned(stage)
        driver = await stage.driver()
        for topic in PARTITIONS:
            await publish(driver, topic, 5)
        work = asyncio.create_task(migrate(stage))
        await asyncio.sleep(after_s)
        await stage.host.kill()
        await asyncio.wait([work])
        error = work.exception()  # it is seen: the broker died, or was done before
        assert error is None or not isinstance(error, AssertionError)
        assert await stage.host.start()
        await asyncio.sleep(1)
        with contextlib.suppress(Conflict):  # it was finished
            await migrate(stage)
        driver = await stage.driver()
        made = driver.request("PRODUCER", topic=PARTITIONS[0], producer_id=1)
        assert await refused(made) == WireCode.TOPIC_TERMINATED
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 10)
            async with StreamConsumer(links, NAME, "s", "s1") as stream:
                assert len(await read(stream, 20)) == 20
                await nothing_comes(stream)
        await driver.close()

    play(story, disk=True, checked=False)


@pytest.mark.parametrize("suffix", ["", "-seg-0"])
def test_a_send_that_is_repeated_after_a_migration_is_stored_once(suffix: str) -> None:
    """Where the regular topic had deduplication; with the names of v4 and of v5 producers."""

    async def story(stage: Stage) -> None:
        await stage.host.ask(
            lambda server: server.topics.change_namespace(
                REGULAR.namespace,
                lambda policies: msgspec.structs.replace(policies, deduplication_enabled=True),
            )
        )
        driver = await stage.driver()
        await _open_as(driver, REGULAR_NAME, 1, f"p{suffix}")
        message = build_message(b"m", producer_name=f"p{suffix}", sequence_id=7, key="k")
        assert (await driver.publish(1, 7, message)).message_id.ledgerId < 2**63
        await migrate(stage, force=True)
        (segment,) = (await stage.layout()).active
        await _open_as(driver, str(TOPIC.segment(segment.descriptor)), 2, "p-seg-1")
        message = build_message(b"m", producer_name="p-seg-1", sequence_id=7, key="k")
        again = (await driver.publish(2, 7, message)).message_id
        assert again.ledgerId == 2**64 - 1, "a duplicate has no place"
        await driver.close()

    play(story)


async def _open_as(driver: Driver, topic: str, number: int, name: str) -> None:
    await driver.request(
        "PRODUCER",
        topic=topic,
        producer_id=number,
        producer_name=name,
        user_provided_producer_name=True,
    )


def test_a_topic_that_is_not_there_is_not_migrated() -> None:
    async def story(stage: Stage) -> None:
        driver = await stage.driver()
        request = stage.ask(lambda scalable: scalable.migrate(REGULAR))
        assert await refused(request) == WireCode.TOPIC_NOT_FOUND
        found = await looked_up(driver, NAME, create=False)
        assert found.error == WireCode.TOPIC_NOT_FOUND
        with pytest.raises(RequestError):
            await joined(driver, "a", topic=REGULAR_NAME)
        await driver.close()

    play(story)
