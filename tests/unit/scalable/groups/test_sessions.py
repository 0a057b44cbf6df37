"""Consumers that attach, are lost, come back and leave, on virtual time."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest

from magnetar.errors import (
    ConsumerBusy,
    ConsumerNotFound,
    CorruptMetadata,
    ServiceNotReady,
    TopicNotFound,
)
from magnetar.model.names import TopicName
from magnetar.model.segments import NEVER, SegmentLayout
from magnetar.scalable.groups.group_records import member_of
from magnetar.scalable.groups.sessions import ConsumerSession
from magnetar.scalable.records import (
    DrainedRecord,
    MemberRecord,
    drained_key,
    encode,
    group_key,
    state_directory,
)
from magnetar.testing.virtual.virtual_time import run
from tests.unit.scalable.session_world import (
    ATTACH_S,
    GRACE_S,
    SESSION_S,
    SETTLE_S,
    TOPIC,
    Broker,
    World,
    segment_ids,
    until_segments,
)


async def member(world: World, name: str) -> MemberRecord | None:
    group = await world.group()
    return None if group is None else member_of(group, name)


async def is_lost(world: World, name: str) -> bool:
    found = await member(world, name)
    assert found is not None
    return found.lost_ms != NEVER


def now() -> float:
    return asyncio.get_running_loop().time()


# --- attaching


def test_members_on_two_brokers_share_a_topic() -> None:
    async def main() -> None:
        world = World(seed=1)
        async with world.brokers("x", "y", segments=2) as (x, y):
            first = await x.attach("a")
            assert segment_ids(first) == [0, 1]
            second = await y.attach("b")
            assert segment_ids(second) == [1]
            await until_segments(first, 0)
            assert first.assignment.layout_epoch == 0
            assert str(first.assignment.segments[0].topic).endswith("/orders/0000-7fff-0")
            assert first.assignment.segments[0].bucket_ranges == ()

    run(main())


def test_two_stream_members_after_the_first_split() -> None:
    async def main() -> None:
        world = World(seed=2)
        async with world.brokers("x", "y") as (x, y):
            first, second = await x.attach("a"), await y.attach("b")
            assert segment_ids(second) == [], "placed, with nothing to read yet"
            await world.change_layout(lambda layout: layout.split(0, now_ms=1))
            world.drained.add(0)
            await until_segments(first, 1)
            await until_segments(second, 2)
            assert first.assignment.layout_epoch == second.assignment.layout_epoch == 1

    run(main())


def test_sharers_get_the_buckets() -> None:
    async def main() -> None:
        world = World()
        async with world.brokers("x") as (x,):
            first, second = await x.attach("a", shares=True), await x.attach("b", shares=True)
            assert len(second.assignment.segments[0].bucket_ranges) == 4
            while first.assignment != second.assignment:
                await first.changes.past(first.changes.version)

    run(main())


def test_kinds_of_one_name_are_separate_groups() -> None:
    async def main() -> None:
        world = World()
        async with world.brokers("x") as (x,):
            stream = await x.attach("a", kind="STREAM")
            checkpoint = await x.attach("a", kind="CHECKPOINT")
            await stream.leave()
            assert segment_ids(checkpoint) == [0]
            assert await world.members("g", "CHECKPOINT") == ["a"]

    run(main())


def test_without_a_controller_attaching_ends_in_time_and_leaves_a_lost_member() -> None:
    async def main() -> None:
        world = World()
        async with world.brokers("x") as (x,):
            world.controlled = False
            with pytest.raises(ServiceNotReady):
                await x.attach("a")
            assert now() <= ATTACH_S + 0.1
            await asyncio.sleep(SETTLE_S)
            assert await is_lost(world, "a")
            assert x.sessions.watches == 0
            world.controlled = True
            assert segment_ids(await x.attach("a")) == [0], "the client tries again"
            assert not await is_lost(world, "a")

    run(main())


def test_a_retry_on_the_same_connection_is_not_lost_with_the_first_try() -> None:
    async def main() -> None:
        world = World(seed=3)
        async with world.brokers("x") as (x,):
            world.controlled = False
            with pytest.raises(ServiceNotReady):
                await x.attach("a", "1")
            world.controlled = True
            await x.attach("a", "1")
            await asyncio.sleep(SETTLE_S)
            assert not await is_lost(world, "a")

    run(main())


def test_a_cancelled_attach_leaves_no_connected_member() -> None:
    async def main() -> None:
        world = World(seed=4)
        async with world.brokers("x") as (x,):
            world.controlled = False
            for step in range(12):
                task = asyncio.create_task(x.attach(f"a{step}"))
                await asyncio.sleep(step * 0.01)
                task.cancel()
                await asyncio.wait({task})
            await asyncio.sleep(SETTLE_S)
            group = await world.group()
            assert group is not None
            assert all(each.lost_ms != NEVER for each in group.members)
            assert x.sessions.watches == 0

    run(main())


def test_there_is_nothing_to_attach_to_without_a_topic() -> None:
    async def main() -> None:
        world = World()
        async with world.brokers("x") as (x,):
            other = TopicName.parse("topic://public/default/none")
            with pytest.raises(TopicNotFound):
                await x.sessions.attach(other, "g", "a", "STREAM", "1", False)
            assert await world.metadata.scan_keys(state_directory(other)) == []
            assert x.sessions.watches == 0

    run(main())


# --- the end of a connection


def test_a_lost_member_keeps_its_segments_for_the_grace_period_and_not_longer() -> None:
    async def main() -> None:
        world = World(seed=5)
        async with world.brokers("x", segments=2) as (x,):
            first, second = await x.attach("a"), await x.attach("b")
            await until_segments(first, 0)
            await first.detach()
            lost_at = now()
            await until_segments(second, 0, 1)
            assert GRACE_S <= now() - lost_at <= GRACE_S + 1

    run(main())


def test_a_member_that_comes_back_in_time_has_what_it_had() -> None:
    async def main() -> None:
        world = World(seed=6)
        async with world.brokers("x", "y", segments=2) as (x, y):
            first, second = await x.attach("a"), await x.attach("b")
            await until_segments(first, 0)
            version = second.changes.version
            await first.detach()
            await asyncio.sleep(GRACE_S / 2)
            world.controlled = False  # nobody has to place it again
            back = await y.attach("a", "2")
            assert segment_ids(back) == [0]
            world.controlled = True
            await asyncio.sleep(2 * GRACE_S)
            assert segment_ids(back) == [0]
            assert second.changes.version == version, "the others noticed nothing"

    run(main())


def test_an_old_connection_that_ends_late_harms_nobody() -> None:
    async def main() -> None:
        world = World(seed=7)
        async with world.brokers("x", "y") as (x, y):
            old = await x.attach("a", "1")
            new = await y.attach("a", "1")
            await old.detach()
            await old.leave()
            assert not await is_lost(world, "a")
            await asyncio.sleep(2 * GRACE_S)
            assert segment_ids(new) == [0]
            assert await world.members() == ["a"]

    run(main())


def test_a_session_that_was_taken_over_says_so() -> None:
    async def main() -> None:
        world = World(seed=8)
        async with world.brokers("x", "y") as (x, y):
            old = await x.attach("a", "1")
            waiting = asyncio.create_task(old.changes.past(old.changes.version))
            await y.attach("a", "2")
            with pytest.raises(ConsumerBusy):
                await waiting
            assert old.is_over
            assert x.sessions.watches == 0

    run(main())


def test_leaving_is_at_once_and_again_no_error() -> None:
    async def main() -> None:
        world = World(seed=9)
        async with world.brokers("x", segments=2) as (x,):
            first, second = await x.attach("a"), await x.attach("b")
            await first.leave()
            left_at = now()
            await first.leave()
            await first.detach()
            with pytest.raises(ConsumerNotFound):
                await first.changes.past(first.changes.version)
            await until_segments(second, 0, 1)
            assert now() - left_at < 2
            assert segment_ids(await x.attach("a")) != []

    run(main())


def test_leaving_while_the_loss_is_being_written() -> None:
    async def main() -> None:
        world = World(seed=10)
        async with world.brokers("x") as (x,):
            session = await x.attach("a")
            await asyncio.gather(session.detach(), session.leave())
            assert await world.members() == []

    run(main())


# --- faults


def test_a_detach_during_an_outage_is_written_after_it() -> None:
    async def main() -> None:
        world = World()
        async with world.brokers("x") as (x,):
            session = await x.attach("a")
            world.server.cut(x.metadata)
            began = now()
            await session.detach()
            with pytest.raises(ServiceNotReady):
                await session.leave()
            assert now() - began <= 2 * SETTLE_S + 0.1
            assert await world.members() == ["a"]
            world.server.heal(x.metadata)
            await asyncio.sleep(SETTLE_S)
            assert await world.members() == []
            assert session.is_over

    run(main())


@pytest.mark.parametrize("arrives", [False, True])
def test_writes_of_unknown_outcome_are_settled(arrives: bool) -> None:
    async def main() -> None:
        world = World(seed=11)
        async with world.brokers("x") as (x,):
            choose = random.Random(12)
            for round_ in range(10):
                task = asyncio.create_task(x.attach("a", str(round_)))
                for _ in range(3):
                    await asyncio.sleep(choose.random() * 0.1)
                    world.server.cut(x.metadata, in_flight_arrives=arrives)
                    await asyncio.sleep(choose.random() * 0.2)
                    world.server.heal(x.metadata)
                session = await task
                assert segment_ids(session) == [0]
                leaving = asyncio.create_task(session.leave())
                await asyncio.sleep(choose.random() * 0.05)
                world.server.cut(x.metadata, in_flight_arrives=arrives)
                await asyncio.sleep(0.1)
                world.server.heal(x.metadata)
                await leaving
                assert await world.members() == []

    run(main())


def test_an_attach_that_was_given_up_does_not_take_over_a_later_one() -> None:
    async def main() -> None:
        world = World(seed=17)
        async with world.brokers("x", "y") as (x, y):
            world.server.cut(y.metadata)
            with pytest.raises(ServiceNotReady):
                await y.attach("a")
            session = await x.attach("a")
            world.server.heal(y.metadata)
            await asyncio.sleep(2 * GRACE_S)
            assert not session.is_over
            assert segment_ids(session) == [0]
            assert y.sessions.watches == 0

    run(main())


def test_a_broker_taken_for_dead_attaches_its_consumers_again() -> None:
    async def main() -> None:
        world = World(seed=13)
        async with world.brokers("x", "y", segments=2) as (x, y):
            first, second = await x.attach("a"), await y.attach("b")
            await until_segments(first, 0)
            world.server.cut(x.metadata)
            await asyncio.sleep(SESSION_S + 2)
            assert await is_lost(world, "a")
            world.server.heal(x.metadata)
            await asyncio.sleep(2)
            assert not await is_lost(world, "a"), "within the grace period"
            world.server.cut(x.metadata)
            await until_segments(second, 0, 1)
            world.server.heal(x.metadata)
            await until_segments(second, 0)  # and after it, as a new member
            await until_segments(first, 1)

    run(main())


def test_a_slow_reader_is_told_to_look_again() -> None:
    async def main() -> None:
        world = World(seed=14, watch_limit=1)
        async with world.brokers("x", "y", segments=4) as (x, y):
            first = await x.attach("a")
            for segment_id in range(200):
                mark = DrainedRecord(segment_id, "other")
                key = drained_key(TOPIC, segment_id, "other")
                await world.metadata.put(key, encode(mark))
            await asyncio.gather(*(y.attach(name) for name in "bcd"))
            async with asyncio.timeout(10):
                while len(segment_ids(first)) != 1:
                    await first.changes.past(first.changes.version)

    run(main())


def test_a_layout_that_lags_behind_the_group_is_waited_for() -> None:
    async def main() -> None:
        world = World(seed=15)
        async with world.brokers("x") as (x,):
            session = await x.attach("a")
            epochs = [session.assignment.layout_epoch]
            for segment_id in (0, 1, 3):
                await world.change_layout(
                    partial(SegmentLayout.split, segment_id=segment_id, now_ms=1)
                )
                world.drained.add(segment_id)
            while len(segment_ids(session)) != 4:
                await session.changes.past(session.changes.version)
                epochs.append(session.assignment.layout_epoch)
            assert epochs == sorted(epochs)
            assert segment_ids(session) == [5, 6, 4, 2]

    run(main())


def test_a_deleted_topic_ends_its_sessions_and_keeps_no_record() -> None:
    async def main() -> None:
        world = World(seed=16)
        async with world.brokers("x", "y") as (x, y):
            sessions = [await x.attach("a"), await y.attach("b")]
            waiting = [
                asyncio.create_task(each.changes.past(each.changes.version)) for each in sessions
            ]
            await world.delete_topic()
            for task in waiting:
                with pytest.raises(TopicNotFound):
                    await task
            await asyncio.sleep(1)
            assert await world.metadata.scan_keys(state_directory(TOPIC)) == []
            for each in sessions:
                await each.detach()
            assert x.sessions.watches == y.sessions.watches == 0

    run(main())


def test_an_unreadable_group_ends_its_own_sessions_only() -> None:
    async def main() -> None:
        world = World()
        async with world.brokers("x") as (x,):
            broken, whole = await x.attach("a"), await x.attach("a", group="other")
            world.controlled = False
            await world.metadata.put(group_key(TOPIC, "STREAM", "g"), b"{")
            with pytest.raises(CorruptMetadata):
                await broken.changes.past(broken.changes.version)
            assert not whole.is_over
            assert x.sessions.error is None

    run(main())


# --- watches


def test_one_watch_per_topic_closed_with_its_last_session() -> None:
    async def main() -> None:
        world = World()
        async with world.brokers("x") as (x,):
            idle = x.open_watches
            sessions: list[ConsumerSession] = []
            for name in "abcde":
                sessions.append(await x.attach(name, group=f"g{name}"))
                assert x.open_watches == idle + 1
            for session in sessions:
                assert x.open_watches == idle + 1
                await session.leave()
            await asyncio.sleep(0)
            assert x.open_watches == idle

    run(main())


def test_a_broker_that_stops_ends_its_sessions() -> None:
    async def main() -> None:
        world = World()
        async with world.brokers("x", "y") as (x, _):
            session = await x.attach("a")
            await x.sessions.stop()
            with pytest.raises(ServiceNotReady):
                await session.changes.past(session.changes.version)
            with pytest.raises(ServiceNotReady):
                await x.attach("b")
            await x.live_brokers.stop()
            await asyncio.sleep(1)
            assert await is_lost(world, "a"), "its record tells the controllers"

    run(main())


# --- races


async def attach_at_last(
    brokers: list[Broker], choose: random.Random, name: str, connection: str
) -> ConsumerSession:
    """As a client does: somewhere else if it is not served."""
    for _ in range(100):
        try:
            return await choose.choice(brokers).attach(name, connection)
        except ServiceNotReady:
            await asyncio.sleep(0.05)
    raise AssertionError(f"{name} found no place")


async def come_and_go(brokers: list[Broker], choose: random.Random, name: str) -> ConsumerSession:
    async def end(session: ConsumerSession) -> None:
        try:
            await choose.choice((session.detach, session.leave))()
        except ServiceNotReady:
            return  # it goes on by itself

    async with asyncio.TaskGroup() as endings:
        for connection in range(6):
            session = await attach_at_last(brokers, choose, name, str(connection))
            await asyncio.sleep(choose.random() * 3)
            what = choose.randrange(3)
            if what == 0:
                await end(session)
            elif what == 1:  # while the next connection attaches already
                endings.create_task(end(session))
    return await attach_at_last(brokers, choose, name, "last")


async def cut_and_heal(world: World, brokers: list[Broker], choose: random.Random) -> None:
    while True:
        await asyncio.sleep(choose.random() * 4)
        broker = choose.choice(brokers)
        world.server.cut(broker.metadata, in_flight_arrives=choose.random() < 0.5)
        try:
            await asyncio.sleep(choose.random() * choose.choice((0.2, 2.0, 1.5 * SESSION_S)))
        finally:
            world.server.heal(broker.metadata)


@pytest.mark.parametrize("regular", [False, True])
@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_random_comings_and_goings_end_in_a_fair_share(
    seed: int, faults: bool, regular: bool
) -> None:
    async def main() -> None:
        world = World(seed=seed, watch_limit=(1, 3, 1000)[seed % 3])
        choose = random.Random(seed)
        if regular:
            world.regular.counts[TopicName.parse("persistent://public/default/orders")] = 5
        async with world.brokers("x", "y", segments=0 if regular else 5) as brokers:
            cutting = asyncio.create_task(
                cut_and_heal(world, brokers, choose) if faults else idle()
            )
            sessions = await asyncio.gather(*(come_and_go(brokers, choose, name) for name in "abc"))
            cutting.cancel()
            await asyncio.sleep(2 * GRACE_S)
            assert await world.members() == ["a", "b", "c"]
            owned = sorted(each for session in sessions for each in segment_ids(session))
            assert owned == [0, 1, 2, 3, 4]
            assert [broker.sessions.error for broker in brokers] == [None, None]
            assert [broker.regular.error for broker in brokers] == [None, None]

    run(main())


async def idle() -> None:
    """No faults."""
