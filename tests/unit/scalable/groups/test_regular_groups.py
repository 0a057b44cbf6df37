"""Groups of regular topics, before, while and after they are migrated, on virtual time."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.errors import TopicNotFound
from magnetar.model.names import TopicName
from magnetar.model.segments import NEVER
from magnetar.scalable.groups.group_balance import balanced
from magnetar.scalable.groups.regular_groups import partition_names
from magnetar.scalable.groups.sessions import ConsumerSession
from magnetar.scalable.layout import changes
from magnetar.scalable.records import (
    GroupKind,
    GroupRecord,
    MemberRecord,
    ScalableRecord,
    group_key,
    state_directory,
)
from magnetar.testing.virtual.virtual_time import run
from tests.unit.scalable.session_world import (
    GRACE_S,
    TOPIC,
    World,
    segment_ids,
    until_segments,
)

REGULAR = TopicName.parse("persistent://public/default/orders")


def regular_world(seed: int, partitions: int = 4) -> World:
    world = World(seed=seed)
    world.regular.counts[REGULAR] = partitions
    return world


async def begin_migration(world: World) -> None:
    names = partition_names(REGULAR, world.regular.counts[REGULAR])
    await world.store.create(changes.begin_migrate(TOPIC, names, now_ms=1, bucket_budget=4))


async def commit_migration(world: World) -> None:
    def committed(record: ScalableRecord) -> ScalableRecord:
        return changes.sealed(changes.prepared(record))

    await world.store.change_topic(TOPIC, committed)


async def nothing_is_stored(world: World) -> bool:
    return await world.metadata.scan_keys(state_directory(TOPIC)) == []


async def end_of(session: ConsumerSession) -> None:
    while True:
        await session.changes.past(session.changes.version)


# --- sharing


@pytest.mark.parametrize("kind", ["STREAM", "CHECKPOINT"])
def test_two_members_share_the_partitions_until_one_is_lost(kind: GroupKind) -> None:
    async def main() -> None:
        world = regular_world(1)
        async with world.brokers("x", "y", segments=0) as (x, y):
            first = await x.attach("a", kind=kind)
            assert segment_ids(first) == [0, 1, 2, 3]
            topics = [str(each.topic) for each in first.assignment.segments]
            assert topics == [f"{REGULAR}-partition-{number}" for number in range(4)]
            second = await y.attach("b", kind=kind)
            assert segment_ids(second) == [2, 3]
            await until_segments(first, 0, 1)
            await second.detach()
            await asyncio.sleep(GRACE_S - 1)
            assert segment_ids(first) == [0, 1]
            await asyncio.sleep(2)
            assert segment_ids(first) == [0, 1, 2, 3]

    run(main())


def test_what_a_broker_held_goes_to_others_when_it_has_ended_for_the_grace_period() -> None:
    async def main() -> None:
        world = regular_world(2)
        async with world.brokers("x", "y", segments=0) as (x, y):
            first, _ = await x.attach("a"), await y.attach("b")
            await until_segments(first, 0, 1)
            await asyncio.sleep(GRACE_S / 2)
            for part in (y.sessions, y.regular, y.live_brokers):
                await part.stop()
            await asyncio.sleep(GRACE_S - 1)
            assert segment_ids(first) == [0, 1]
            await asyncio.sleep(3)
            assert segment_ids(first) == [0, 1, 2, 3]

    run(main())


def test_members_that_come_back_elsewhere_in_time_have_what_they_had() -> None:
    async def main() -> None:
        world = regular_world(3)
        async with world.brokers("x", "y", segments=0) as (x, y):
            first, _ = await x.attach("a"), await x.attach("b")
            await until_segments(first, 0, 1)
            for part in (x.sessions, x.regular, x.live_brokers):
                await part.stop()
            await asyncio.sleep(GRACE_S / 2)
            assert segment_ids(await y.attach("b")) == [2, 3]
            assert segment_ids(await y.attach("a")) == [0, 1]

    run(main())


def test_a_topic_without_partitions_is_one_segment() -> None:
    async def main() -> None:
        world = regular_world(4, partitions=0)
        async with world.brokers("x", segments=0) as (x,):
            first, second = await x.attach("a", shares=True), await x.attach("b", shares=True)
            assert [each.topic for each in first.assignment.segments] == [REGULAR]
            assert segment_ids(second) == [], "without entry buckets it is not shared"

    run(main())


def test_a_name_that_is_no_topic_at_all_leaves_nothing() -> None:
    async def main() -> None:
        world = World()
        async with world.brokers("x", segments=0) as (x,):
            with pytest.raises(TopicNotFound):
                await x.attach("a")
            assert await nothing_is_stored(world)

    run(main())


def test_partitions_that_are_added_are_given_out_at_the_next_attach() -> None:
    async def main() -> None:
        world = regular_world(5, partitions=2)
        async with world.brokers("x", "y", segments=0) as (x, y):
            first = await x.attach("a")
            world.regular.counts[REGULAR] = 4
            second = await y.attach("b")
            await until_segments(first, 0, 1)
            await until_segments(second, 2, 3)

    run(main())


# --- the end


@pytest.mark.parametrize("leaves", [True, False])
def test_nothing_is_left_of_the_last_one(leaves: bool) -> None:
    async def main() -> None:
        world = regular_world(6)
        async with world.brokers("x", segments=0) as (x,):
            idle = x.open_watches
            session = await x.attach("a")
            await (session.leave() if leaves else session.detach())
            await asyncio.sleep(1 if leaves else GRACE_S + 1)
            assert await nothing_is_stored(world)
            assert not x.regular.looks_after(TOPIC)
            assert x.open_watches == idle

    run(main())


@pytest.mark.parametrize("seed", range(5))
def test_who_comes_when_the_last_one_goes_is_placed(seed: int) -> None:
    async def main() -> None:
        world = regular_world(seed)
        async with world.brokers("x", "y", segments=0) as brokers:
            for number in range(20):
                for name, broker in zip("ab", brokers, strict=True):
                    session = await broker.attach(name, str(number))
                    await session.leave()
                    await asyncio.sleep(0.001 * number)
            await asyncio.sleep(1)
            assert await nothing_is_stored(world)

    run(main())


def test_a_group_that_is_stored_while_no_other_is_left_is_kept_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The look at the groups was too early to see it."""

    async def main() -> None:
        world = regular_world(10)
        async with world.brokers("x", segments=0) as (x,):
            read = x.store.all
            late = GroupRecord("late", "STREAM", (MemberRecord("b", "x", "x/1#9"),))

            async def read_too_early(
                topic: TopicName, prefix: str, kind: type[GroupRecord]
            ) -> list[GroupRecord]:
                found = await read(topic, prefix, kind)
                if not found:
                    monkeypatch.undo()
                    await world.store.change(
                        group_key(TOPIC, "STREAM", "late"), GroupRecord, lambda _: late
                    )
                    x.regular.look_after(TOPIC)
                return found

            session = await x.attach("a")
            monkeypatch.setattr(x.store, "all", read_too_early)
            await session.leave()
            await asyncio.sleep(1)
            group = await world.group("late")
            assert group is not None
            assert group.owners == dict.fromkeys(range(4), ("b",))

    run(main())


def test_who_asks_at_the_very_end_gets_a_new_beginning() -> None:
    async def main() -> None:
        world = World()
        world.regular.counts[REGULAR] = 1
        async with world.brokers("x", segments=0) as (x,):
            await (await x.attach("a")).leave()
            for _ in range(1000):
                if x.regular.looks_after(TOPIC):
                    await asyncio.sleep(0)
            x.regular.look_after(TOPIC)
            assert x.regular.looks_after(TOPIC)
            await asyncio.sleep(1)
            assert not x.regular.looks_after(TOPIC)

    run(main())


def test_a_topic_that_is_deleted_ends_its_sessions() -> None:
    async def main() -> None:
        world = regular_world(7)
        async with world.brokers("x", "y", segments=0) as (x, y):
            sessions = [await x.attach("a"), await y.attach("b")]
            del world.regular.counts[REGULAR]
            for session in sessions:
                with pytest.raises(TopicNotFound):
                    await end_of(session)
            await asyncio.sleep(1)
            assert await nothing_is_stored(world)
            assert not x.regular.looks_after(TOPIC)

    run(main())


# --- migration


def test_members_keep_their_partitions_over_a_migration_and_then_get_the_children() -> None:
    async def main() -> None:
        world = regular_world(8)
        async with world.brokers("x", "y", segments=0) as (x, y):
            first = await x.attach("a")
            await begin_migration(world)
            second = await y.attach("b")  # while it goes on
            await until_segments(first, 0, 1)
            await commit_migration(world)
            await asyncio.sleep(2)
            assert (segment_ids(first), segment_ids(second)) == ([0, 1], [2, 3])
            assert first.assignment.layout_epoch == second.assignment.layout_epoch == 0
            assert not x.regular.looks_after(TOPIC)
            assert not y.regular.looks_after(TOPIC)
            world.drained.update(range(4))
            while len(segment_ids(first)) != 2 or segment_ids(first) == [0, 1]:
                await first.changes.past(first.changes.version)
            children = [*segment_ids(first), *segment_ids(second)]
            assert sorted(children) == [4, 5, 6, 7]

    run(main())


def test_a_migration_that_is_undone_changes_nothing() -> None:
    async def main() -> None:
        world = regular_world(9)
        async with world.brokers("x", segments=0) as (x,):
            first = await x.attach("a")
            await begin_migration(world)
            await asyncio.sleep(1)
            await world.store.change_topic(TOPIC, lambda _: None)
            await asyncio.sleep(1)
            await x.attach("b")
            await until_segments(first, 0, 1)

    run(main())


def test_what_is_decided_for_the_partitions_after_the_migration_does_not_count() -> None:
    layout = changes.synthetic_layout(partition_names(REGULAR, 2))
    member = MemberRecord("a", "x", "x/1#1", placed=True)
    migrated = GroupRecord("g", "STREAM", (member,), {2: ("a",), 3: ("a",)}, layout_epoch=0)
    assert balanced(migrated, layout, NEVER, set()) == migrated
