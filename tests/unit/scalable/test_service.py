"""Scalable topics on one broker: layout changes, subscriptions, drain, migration, recovery."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from magnetar.broker.policy.namespaces import Namespaces
from magnetar.broker.topic.topic import Topic
from magnetar.errors import Conflict, InvalidLayout, NotAllowed, TopicNotFound, TopicTerminated
from magnetar.model.names import TopicName
from magnetar.model.segments import SegmentLayout
from magnetar.model.subscriptions import SubscriptionType
from magnetar.runtime.limits import Limits
from magnetar.scalable.layout.drains import Drains
from magnetar.scalable.layout.subscriptions import Subscriptions
from magnetar.scalable.service import Dag
from magnetar.testing.virtual.virtual_time import run
from tests.unit.broker.world import message, options, receipts
from tests.unit.scalable.world import TOPIC, Broker, ScalableWorld

REGULAR = TopicName.parse("persistent://public/default/orders")


def on_a_broker(
    scenario: Callable[[ScalableWorld, Broker], Awaitable[None]], limits: Limits | None = None
) -> None:
    async def main() -> None:
        world = ScalableWorld(limits)
        broker = await world.broker()
        await scenario(world, broker)
        await world.stop(broker)

    run(main())


async def layout(broker: Broker, topic: TopicName = TOPIC) -> SegmentLayout:
    return (await broker.scalable.lookup(topic, create=False)).layout


def test_a_topic_is_created_with_its_segments() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.scalable.create(TOPIC, 4, {"team": "a"})
        found = await layout(broker)
        found.check_invariants()
        assert len(found.active) == 4
        assert found.epoch == 0
        for number in found.segments:
            await broker.publish(number)
        assert broker.scalable.names(TOPIC.namespace, {"team": "a"}) == [str(TOPIC)]
        assert broker.scalable.names(TOPIC.namespace, {"team": "b"}) == []
        with pytest.raises(Conflict):
            await broker.scalable.create(TOPIC)

    on_a_broker(scenario)


def test_a_lookup_creates_a_topic_of_one_segment_unless_told_not_to() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        with pytest.raises(TopicNotFound):
            await broker.scalable.lookup(TOPIC, create=False)
        found = await broker.scalable.lookup(TOPIC)
        assert isinstance(found, Dag)
        assert [str(each.descriptor) for each in found.layout.active] == ["0000-ffff-0"]
        assert not found.synthetic

    on_a_broker(scenario)


def test_a_split_seals_the_parent_and_opens_two_children() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.scalable.create(TOPIC)
        await broker.publish(0, 3)
        found = await broker.scalable.split(TOPIC, 0, after=0x3FFF)
        found.check_invariants()
        assert found.epoch == 1
        assert [str(each.descriptor) for each in found.active] == ["0000-3fff-1", "4000-ffff-2"]
        with pytest.raises(TopicTerminated):
            await broker.producer(0)
        await broker.publish(1)
        await broker.publish(2)

    on_a_broker(scenario)


def test_a_merge_takes_any_number_of_neighbours() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.scalable.create(TOPIC, 4)
        with pytest.raises(InvalidLayout):
            await broker.scalable.merge(TOPIC, [0, 2])
        found = await broker.scalable.merge(TOPIC, [1, 2, 3])
        assert [str(each.descriptor) for each in found.active] == ["0000-3fff-0", "4000-ffff-4"]
        assert found.segment(4).parent_ids == (1, 2, 3)

    on_a_broker(scenario)


def test_changes_of_one_topic_come_one_after_the_other() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.scalable.create(TOPIC, 8)
        work = [broker.scalable.split(TOPIC, number) for number in range(8)]
        await asyncio.gather(*work)
        found = await layout(broker)
        found.check_invariants()
        assert found.epoch == 8
        assert len(found.active) == 16

    on_a_broker(scenario)


def test_a_queue_subscription_at_latest_loses_nothing_at_a_split() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.scalable.create(TOPIC)
        await broker.publish(0, 2)
        shared = SubscriptionType.SHARED
        parent, _ = await broker.subscribe(0, type=shared, earliest=False)
        assert parent.backlog() == 0
        await broker.scalable.split(TOPIC, 0)
        await broker.publish(1, 3, first=2)  # before the consumer has heard of the child
        child, _ = await broker.subscribe(1, type=shared, earliest=False)
        assert child.backlog() == 3

    on_a_broker(scenario)


def test_a_subscription_begins_on_every_segment_when_its_first_consumer_comes() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.scalable.create(TOPIC, 2)
        await broker.publish(0, 2)
        await broker.publish(1, 2)
        await broker.scalable.split(TOPIC, 0)
        await broker.subscribe(1, "late", earliest=False)
        await broker.publish(2, first=2)
        first, _ = await broker.subscribe(0, "late", earliest=False)
        second, _ = await broker.subscribe(2, "late", earliest=False)
        assert first.backlog() == 0
        assert second.backlog() == 1
        await broker.subscribe(1, "early")
        third, _ = await broker.subscribe(0, "early")
        assert third.backlog() == 2

    on_a_broker(scenario)


def test_a_deleted_subscription_is_gone_from_every_segment() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.scalable.create(TOPIC, 2)
        await broker.scalable.create_subscription(TOPIC, "s", "QUEUE")
        segments = [await broker.segment(each) for each in (0, 1)]
        assert all("s" in each.subscriptions for each in segments)
        assert await broker.scalable.delete_subscription(TOPIC, "s")
        assert not any("s" in each.subscriptions for each in segments)
        assert not await broker.scalable.delete_subscription(TOPIC, "s")

    on_a_broker(scenario)


def test_children_are_given_out_the_moment_their_parent_is_drained() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.scalable.create(TOPIC)
        await broker.publish(0, 2)
        attach = broker.scalable.sessions.attach
        first = await attach(TOPIC, "s", "a", "STREAM", "1", False)
        second = await attach(TOPIC, "s", "b", "STREAM", "2", False)
        subscription, _ = await broker.subscribe(0, "s", consumer="a-seg-0")
        await broker.scalable.split(TOPIC, 0)
        await asyncio.sleep(1)
        assert [each.segment.segment_id for each in first.assignment.segments] == [0]
        assert second.assignment.segments == ()
        began = asyncio.get_running_loop().time()
        subscription.skip_all()
        while not second.assignment.segments:
            await second.changes.past(second.changes.version)
        assert asyncio.get_running_loop().time() - began < 2  # a flush of the cursor at most
        given = [
            [each.segment.segment_id for each in session.assignment.segments]
            for session in (first, second)
        ]
        assert sorted(given) == [[1], [2]]

    on_a_broker(scenario)


def test_a_lost_consumer_keeps_its_segments_for_the_grace_period_and_no_longer() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.scalable.create(TOPIC, 2)
        attach = broker.scalable.sessions.attach
        first = await attach(TOPIC, "s", "a", "STREAM", "1", False)
        second = await attach(TOPIC, "s", "b", "STREAM", "2", False)
        while len(first.assignment.segments) != 1:
            await first.changes.past(first.changes.version)
        await second.detach()
        await asyncio.sleep(world.limits.scalable_grace_period_seconds - 1)
        assert len(first.assignment.segments) == 1
        await asyncio.sleep(2)
        assert len(first.assignment.segments) == 2

    on_a_broker(scenario)


def test_a_deleted_topic_leaves_nothing() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.scalable.create(TOPIC, 2)
        await broker.scalable.create_subscription(TOPIC, "s", "QUEUE")
        producer = await broker.producer(0)
        with pytest.raises(Conflict):
            await broker.scalable.delete(TOPIC)
        await broker.scalable.delete(TOPIC, force=True)
        with pytest.raises(TopicNotFound):
            await broker.scalable.get(TOPIC)
        assert await broker.topics.segment_names(TOPIC) == []
        assert not producer.ready or producer.failure is not None
        assert await broker.parts.metadata.scan_keys("/scalable/topics") == []
        await broker.scalable.create(TOPIC)

    on_a_broker(scenario)


@pytest.mark.slow
def test_drained_segments_are_pruned_when_their_time_has_come() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.scalable.create(TOPIC)
        await broker.scalable.create_subscription(TOPIC, "s", "QUEUE")
        await broker.publish(0, 2)
        await broker.scalable.split(TOPIC, 0)
        await asyncio.sleep(world.limits.scalable_sealed_seconds + 120)
        assert 0 in (await layout(broker)).segments  # the subscription needs it
        await broker.scalable.skip_all(TOPIC, "s")
        await asyncio.sleep(120)
        found = await layout(broker)
        assert 0 not in found.segments
        assert found.epoch == 2
        names = await broker.topics.segment_names(TOPIC)
        assert [str(name.descriptor) for name in names] == ["0000-7fff-1", "8000-ffff-2"]
        marks = await broker.parts.metadata.scan_keys("/scalable/state")
        assert not [key for key in marks if "drained-0" in key]

    on_a_broker(scenario)


@pytest.mark.slow
def test_a_collection_reads_policies_and_subscriptions_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: Counter[str] = Counter()

    def counted(kind: type[Any], name: str) -> None:
        read = getattr(kind, name)

        async def count(self: object, *given: object) -> object:
            reads[kind.__name__] += 1
            return await read(self, *given)

        monkeypatch.setattr(kind, name, count)

    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.scalable.create(TOPIC)
        for number in range(7):
            await broker.scalable.split(TOPIC, number)
        interval = world.limits.scalable_auto_scale_interval_seconds
        await asyncio.sleep(world.limits.scalable_sealed_seconds - 1.5 * interval)
        counted(Namespaces, "policies")
        counted(Subscriptions, "all")
        while len((await layout(broker)).segments) > 8:
            before = reads.copy()
            await asyncio.sleep(interval)
        # The policies of the namespace are read for auto-scale, too.
        assert reads - before == {"Namespaces": 2, "Subscriptions": 1}

    on_a_broker(scenario)


def test_a_watch_of_a_sealed_segment_that_crashes_is_not_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def judge(*_: object) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        world = ScalableWorld()
        broker = await world.broker()
        await broker.scalable.create(TOPIC)
        await broker.scalable.create_subscription(TOPIC, "s", "QUEUE")
        monkeypatch.setattr(Drains, "_judge", judge)
        await broker.scalable.split(TOPIC, 0)
        await asyncio.sleep(1)
        with pytest.raises(ZeroDivisionError):
            await broker.scalable.stop()

    run(main())


@pytest.mark.slow
def test_sealed_segments_are_kept_for_readers_without_a_subscription() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.scalable.create(TOPIC)
        await broker.publish(0, 2)
        await broker.scalable.split(TOPIC, 0)
        await asyncio.sleep(world.limits.scalable_sealed_seconds - 60)
        reader, _ = await broker.subscribe(0, "reader", durable=False)
        assert reader.backlog() == 2

    on_a_broker(scenario)


def test_a_regular_topic_is_migrated_with_its_messages_and_subscriptions() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.topics.create_partitioned(REGULAR, 2)
        for number in range(2):
            partition = await broker.topics.get(REGULAR.with_partition(number))
            assert isinstance(partition, Topic)
            await partition.create_subscription("old", partition.ledger.last_position())
            producer = await partition.add_producer(options())
            await partition.remove_producer(producer)
        before = await broker.scalable.lookup(REGULAR)
        assert before.synthetic
        assert [each.legacy_topic_name for each in before.layout.active] == [
            str(REGULAR.with_partition(0)),
            str(REGULAR.with_partition(1)),
        ]
        await broker.scalable.migrate(REGULAR)
        after = await broker.scalable.lookup(REGULAR)
        assert not after.synthetic
        after.layout.check_invariants()
        assert [each.segment_id for each in after.layout.active] == [2, 3]
        assert "old" in (await broker.segment(2)).subscriptions
        with pytest.raises(TopicTerminated):
            await broker.producer(0)
        with pytest.raises(Conflict):
            await broker.scalable.migrate(REGULAR)

    on_a_broker(scenario)


def test_a_topic_of_too_many_partitions_is_not_migrated() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.topics.create_partitioned(REGULAR, 5)
        with pytest.raises(NotAllowed, match="10 segments; a topic may have 8"):
            await broker.scalable.migrate(REGULAR)
        assert await broker.scalable.layouts.read(TOPIC) is None

    on_a_broker(scenario, Limits(scalable_total_segments_max=8))


def test_a_topic_with_clients_that_would_not_follow_is_migrated_by_force_only() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        topic = await broker.topics.get(REGULAR)
        await topic.add_producer(options())
        with pytest.raises(Conflict):
            await broker.scalable.migrate(REGULAR)
        await broker.scalable.migrate(REGULAR, force=True)
        assert (await broker.scalable.lookup(REGULAR)).layout.epoch == 0

    on_a_broker(scenario)


def test_a_repeated_send_after_a_split_is_stored_once() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.scalable.create(TOPIC)
        parent = await broker.producer(0, "p-seg-0")
        for sequence in range(3):
            parent.send(message(sequence))
        await receipts(parent, 3)
        await broker.scalable.split(TOPIC, 0)
        child = await broker.producer(1, "p-seg-1")
        assert child.last_sequence_id == 2
        child.send(message(2))
        child.send(message(3))
        await receipts(child, 2)
        assert (await broker.segment(1)).ledger.entries == 1

    on_a_broker(scenario)
