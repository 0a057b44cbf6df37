"""Who reads which segment, through the wire: joins, losses, drains, restarts, other brokers."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

from harness.simulation.scalable.clients import CheckpointConsumer
from magnetar.model.segments import NEVER
from magnetar.scalable.records import DrainedRecord, GroupRecord
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.server.scalable_stage import (
    GRACE_S,
    NAME,
    TOPIC,
    Stage,
    joined,
    nothing_comes,
    owned,
    play,
    read,
    read_all,
    send,
    told,
    until,
)

_LATEST = {"ledgerId": 2**63 - 1, "entryId": 2**63 - 1}


async def _has_no_state(stage: Stage) -> bool:
    """No group, and no mark of what one has read."""
    scalable = stage.host.server.context.scalable
    groups = await scalable.store.all(TOPIC, "group", GroupRecord)
    marks = await scalable.store.all(TOPIC, "done", DrainedRecord)
    return not groups and not marks


def test_two_stream_consumers_after_the_first_split_own_one_active_segment_each() -> None:
    """Defect 3: a drained segment is nobody's share. And the grace period, to the second."""

    async def story(stage: Stage) -> None:
        await stage.create()
        one, two = stage.process(), stage.process()
        async with (
            one,
            two,
            stage.producer(one) as producer,
            stage.stream(one, "s1") as first,
            stage.stream(two, "s2") as second,
        ):
            await send(producer, 50)
            await stage.split(0)
            await read_all(stage, first, second)
            await until(lambda: sorted([*owned(first), *owned(second)]) == [1, 2], 2)
            assert [len(owned(each)) for each in (first, second)] == [1, 1]
            lost = owned(second)
            two.kill()
            await asyncio.sleep(GRACE_S - 5)
            assert owned(first) != [1, 2]
            assert (await stage.members())["s2"].lost_ms != NEVER
            await until(lambda: owned(first) == [1, 2], 10)
            assert "s2" not in await stage.members()
            assert lost[0] in owned(first)
            await send(producer, 50)
            await read_all(stage, first)

    play(story)


def test_a_member_that_leaves_gives_its_segment_back_at_once() -> None:
    """Command 82: no member outlives its close because the connection lives on."""

    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with stage.process() as links, stage.stream(links, "s1") as first:
            async with stage.stream(links, "s2"):
                await until(lambda: len(owned(first)) == 1, 2)
            await until(lambda: owned(first) == [0, 1], 1)
            assert set(await stage.members()) == {"s1"}

    play(story)


def test_children_are_given_out_the_moment_their_parent_is_drained() -> None:
    """Defect 4: the drain is told by the acknowledgement, however long it took to come."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 20)
            async with stage.stream(links) as consumer:
                await stage.split(0)
                await send(producer, 20)
                held = [await consumer.receive() for _ in range(20)]
                await asyncio.sleep(16 * 60)
                assert owned(consumer) == [0]
                consumer.ack(held[-1])
                assert await until(lambda: owned(consumer) == [1, 2], 1) < 0.5
                await read_all(stage, consumer)

    play(story)


def test_a_connection_that_ends_late_does_not_take_its_members_new_place_away() -> None:
    """Defect 8: a loss is one of a connection, not of a name."""

    async def story(stage: Stage) -> None:
        await stage.create()
        old, new = await stage.driver(), await stage.driver()
        await joined(old, "a")
        again = await joined(new, "a")
        assert [each.segment_id for each in again.segments] == [0]
        old.abort()
        await asyncio.sleep(2 * GRACE_S)
        assert (await stage.members())["a"].lost_ms == NEVER
        # It is the live connection that hears of changes.
        await stage.split(0)
        update = await told(new, "SCALABLE_TOPIC_ASSIGNMENT_UPDATE")
        assert update.consumer_id == 1
        await new.close()

    play(story)


def test_a_restarted_controller_keeps_every_place_within_the_grace_period() -> None:
    """The server dies and comes back: who returns in time has what it had, who does not is out."""

    async def story(stage: Stage) -> None:
        await stage.create(4)
        processes = [stage.process() for _ in range(3)]
        async with (
            processes[0] as one,
            processes[1] as two,
            processes[2] as three,
            stage.producer(one) as producer,
            stage.stream(one, "s1") as first,
            stage.stream(two, "s2") as second,
            stage.stream(three, "s3") as third,
        ):
            await send(producer, 60)
            await read_all(stage, first, second, third)
            await until(lambda: len(owned(first) + owned(second) + owned(third)) == 4, 5)
            before = [owned(first), owned(second)]
            processes[2].kill()
            await stage.host.kill()
            await asyncio.sleep(20)
            assert await stage.host.start()
            await send(producer, 60)
            await asyncio.sleep(30)
            assert [owned(first), owned(second)] == before
            members = await stage.members()
            assert [members[each].lost_ms == NEVER for each in ("s1", "s2", "s3")] == [
                True,
                True,
                False,
            ]
            await until(lambda: sorted(owned(first) + owned(second)) == [0, 1, 2, 3], GRACE_S)
            await read_all(stage, first, second)

    play(story, disk=True)


def test_consumers_go_on_while_their_controller_is_away() -> None:
    """Defect 7: another broker leads after the session of a dead one, and nobody notices."""

    async def story(stage: Stage) -> None:
        await stage.create(2)
        hosts = list(stage.world.hosts.values())
        async with (
            stage.process() as links,
            stage.producer(links) as producer,
            stage.stream(links) as consumer,
        ):
            await send(producer, 40)
            await read_all(stage, consumer)
            (leader,) = [
                host for host in hosts if host.server.context.scalable.controllers.leads(TOPIC)
            ]
            await leader.kill()
            await send(producer, 40)
            await read_all(stage, consumer)
            (other,) = stage.world.ready
            await until(lambda: other.server.context.scalable.controllers.leads(TOPIC), 30)
            layout = await stage.ask(lambda scalable: scalable.split(TOPIC, 0), other)
            assert layout.epoch == 1
            await send(producer, 40)
            await read_all(stage, consumer)
            assert await leader.start()

    play(story, brokers="ab")


def test_a_member_may_come_to_any_broker() -> None:
    """A subscribe (73) at a broker that is not the controller is served, not refused."""

    async def story(stage: Stage) -> None:
        await stage.create(2)
        drivers = {name: await stage.driver(name) for name in stage.world.hosts}
        leads = [
            host.server.context.scalable.controllers.leads(TOPIC)
            for host in stage.world.hosts.values()
        ]
        assert sorted(leads) == [False, True]
        first = await joined(drivers["a"], "at-a")
        assert [each.segment_id for each in first.segments] == [0, 1]
        second = await joined(drivers["b"], "at-b")
        update = await told(drivers["a"], "SCALABLE_TOPIC_ASSIGNMENT_UPDATE")
        shares = [*second.segments, *update.assignment.segments]
        assert sorted(each.segment_id for each in shares) == [0, 1]
        await drivers["b"].request("SCALABLE_TOPIC_UNSUBSCRIBE", consumer_id=1)
        update = await told(drivers["a"], "SCALABLE_TOPIC_ASSIGNMENT_UPDATE")
        assert len(update.assignment.segments) == 2
        for driver in drivers.values():
            await driver.close()

    play(story, brokers="ab")


def test_a_seek_back_hands_a_drained_segment_out_again_before_its_children() -> None:
    """The whole topic is read again in order, though its parents had been drained."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 30)
            await stage.split(0)
            await send(producer, 30)
            async with stage.stream(links) as consumer:
                await read_all(stage, consumer)
                await until(lambda: owned(consumer) == [1, 2], 2)
                await stage.ask(lambda scalable: scalable.seek_subscription(TOPIC, "s", 0))
                await until(lambda: owned(consumer) == [0], 5)
                again = await read(consumer, 60)
                segments = [each.feed.segment_id for each in again]
                assert segments[:30] == [0] * 30
                assert set(segments[30:]) == {1, 2}
                assert sorted(each.sequence for each in again) == list(range(60))
                await until(lambda: owned(consumer) == [1, 2], 2)

    # What was acknowledged is delivered again, as it was asked for: no history to be checked.
    play(story, checked=False)


def test_a_checkpoint_group_of_two_members_reads_everything_once_and_leaves_nothing() -> None:
    """Defect 9: a group is no subscription: no cursor on children, nothing left when it is gone."""

    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with stage.process() as links, stage.producer(links) as producer:
            async with (
                CheckpointConsumer(links, NAME, "m1", group="g", record=stage.record) as first,
                CheckpointConsumer(links, NAME, "m2", group="g", record=stage.record) as second,
            ):
                await send(producer, 60)
                await read_all(stage, first, second)
                await stage.split(0)
                await stage.merge(1, 3)
                await send(producer, 60)
                await read_all(stage, first, second)
                assert set(await stage.members()) == {"m1", "m2"}
            for segment in (await stage.layout()).segments.values():
                name = TOPIC.segment(segment.descriptor)
                held = await stage.host.server.topics.get(name, create=False)
                assert not [each for each in held.subscriptions if not each.startswith("reader-")]
            await until(lambda: _has_no_state(stage), 5, "the group is forgotten")

    play(story)


def test_a_checkpoint_group_begun_at_latest_reads_later_children_from_their_start() -> None:
    """Defect 2, second hole."""

    async def story(stage: Stage) -> None:
        await stage.create()
        driver = await stage.driver()
        first = await joined(driver, "m1", subscription="g", consumer_type=pb.CHECKPOINT)
        assert [each.segment_id for each in first.segments] == [0]
        reader: dict[str, Any] = {"subType": 0, "durable": False, "start_message_id": _LATEST}
        segment = first.segments[0].segment_topic
        await driver.request(
            "SUBSCRIBE", topic=segment, subscription="r", consumer_id=7, consumer_name="m1-seg-0",
            **reader,
        )  # fmt: skip
        await stage.split(0)
        update = await told(driver, "SCALABLE_TOPIC_ASSIGNMENT_UPDATE")
        # An empty parent is read at once; its children come as segments of their own, which a
        # client reads from their earliest message.
        while len(update.assignment.segments) < 3:
            update = await told(driver, "SCALABLE_TOPIC_ASSIGNMENT_UPDATE")
        assert sorted(each.segment_id for each in update.assignment.segments) == [0, 1, 2]
        await driver.close()

    play(story)


def test_members_that_cannot_be_placed_wait_and_are_told_when_there_is_work() -> None:
    """More members than segments and buckets: the rest are idle, until a split."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with stage.process() as links, stage.producer(links) as producer:
            consumers = [stage.stream(links, f"s{number}") for number in range(6)]
            for consumer in consumers:
                await consumer.start()
            await until(lambda: sum(map(len, map(owned, consumers))) == 4, 5)
            await send(producer, 30)
            await stage.split(0)
            await read_all(stage, *consumers)
            # Each half has two of the four buckets.
            await until(lambda: sorted(chain(*map(owned, consumers))) == [1, 1, 2, 2], 5)
            for consumer in consumers:
                await consumer.stop()

    play(story)


def test_nothing_comes_of_children_while_a_parent_is_unread() -> None:
    """Parents first over the whole DAG: sealed intermediates count, not only direct parents."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 10)
            await stage.split(0)
            await send(producer, 10)
            await stage.split(1)
            await stage.merge(4, 2)
            await send(producer, 10)
            async with stage.stream(links) as consumer:
                assert owned(consumer) == [0]
                held = [await consumer.receive() for _ in range(10)]
                await nothing_comes(consumer)
                consumer.ack(held[-1])
                await until(lambda: owned(consumer) == [1, 2], 1)
                await read_all(stage, consumer)
                await until(lambda: owned(consumer) == [3, 5], 1)

    play(story)


def test_a_process_that_comes_back_in_time_has_its_segments_and_nobody_else_moved() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(6)
        one, two, again = stage.process(), stage.process(), stage.process()
        async with (
            one,
            two,
            again,
            stage.producer(one) as producer,
            stage.stream(one, "s1") as first,
            stage.stream(two, "s2") as second,
        ):
            await until(lambda: len(owned(first)) == len(owned(second)) == 3, 5)
            before = owned(first), owned(second)
            changes = first.session.changes.version
            two.kill()
            await asyncio.sleep(GRACE_S - 10)
            async with stage.stream(again, "s2") as back:
                assert owned(back) == before[1]
                await send(producer, 60)
                await read_all(stage, first, back)
                await asyncio.sleep(GRACE_S)
                assert (owned(first), owned(back)) == before
                assert first.session.changes.version == changes, "it was told nothing"

    play(story)


def test_members_of_a_broker_that_dies_are_lost_like_any_other() -> None:
    """Their grace period begins when the broker is known to be dead; who comes back keeps all."""

    async def story(stage: Stage) -> None:
        await stage.create(4)
        hosts = stage.world.hosts
        drivers = {name: await stage.driver(name) for name in hosts}
        await joined(drivers["a"], "stays")
        await joined(drivers["b"], "returns")
        await joined(drivers["b"], "goes", 2)
        before = await _owners(stage)
        await hosts["b"].kill()
        await asyncio.sleep(30)
        back = await joined(drivers["a"], "returns", 5)
        now = await _owners(stage)
        assert now == before
        assert sorted(each.segment_id for each in back.segments) == before["returns"]
        await asyncio.sleep(GRACE_S)
        after = await _owners(stage)
        assert set(after) == {"stays", "returns"}
        assert sorted(len(each) for each in after.values()) == [2, 2]
        assert set(before["returns"]) <= set(after["returns"])
        await drivers["a"].close()
        assert await hosts["b"].start()

    play(story, brokers="ab")


async def _owners(stage: Stage) -> dict[str, list[int]]:
    """The segments of each member, as the stored group has them."""
    (group,) = await stage.ask(lambda scalable: scalable.store.all(TOPIC, "group", GroupRecord))
    found: dict[str, list[int]] = {}
    for segment_id, names in sorted(group.owners.items()):
        for name in names:
            found.setdefault(name, []).append(segment_id)
    return found
