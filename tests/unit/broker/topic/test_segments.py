"""Segments of scalable topics as topics: records, dedup over generations, ends, ownership."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from magnetar.broker.api import DROPPED, Receipt, SchemaData
from magnetar.broker.policy.namespaces import DEFAULT
from magnetar.broker.policy.paths import scalable_key
from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.values import InactiveTopicPolicies
from magnetar.broker.publish.lineage import NO_LINEAGE, Lineage, Piece
from magnetar.broker.publish.producer import Producer
from magnetar.broker.subscribe.ack import Ack
from magnetar.broker.topic.maintenance import CARE_SECONDS
from magnetar.broker.topic.ownership import SoleOwner
from magnetar.broker.topic.topic import Topic
from magnetar.broker.topic.topics import ListMode, Topics
from magnetar.errors import (
    DiskFailed,
    NotAllowed,
    ProducerBusy,
    ServiceNotReady,
    TopicNotFound,
)
from magnetar.managed_ledger.managed_ledger import EARLIEST
from magnetar.metadata.api import ABSENT
from magnetar.model.hashing import FULL_RING, HashRange, key_hash, segment_hash
from magnetar.model.names import TopicName
from magnetar.testing.virtual.virtual_time import run
from magnetar.wire.messages import Send, encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.broker.world import (
    EPOCH_MS,
    NAME,
    World,
    consumer,
    message,
    options,
    receipts,
    settled,
    stored,
)

ORDERS = TopicName.parse("topic://public/default/orders")
PARENT = TopicName.parse("segment://public/default/orders/0000-ffff-0")
LOWER = TopicName.parse("segment://public/default/orders/0000-7fff-1")
UPPER = TopicName.parse("segment://public/default/orders/8000-ffff-2")
MERGED = TopicName.parse("segment://public/default/orders/0000-ffff-3")
OTHER = TopicName.parse("segment://public/default/orders/eu/0000-ffff-0")


def with_topics(scenario: Callable[[World, Topics], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        topics = await world.topics()
        await scenario(world, topics)
        await topics.stop()

    run(main())


async def created(topics: Topics, name: TopicName) -> Topic:
    await topics.create(name)
    topic = await topics.get(name, create=False)
    assert isinstance(topic, Topic)
    return topic


async def joined(topic: Topic, name: str = "p") -> Producer:
    assert topic.name.descriptor is not None
    return await topic.add_producer(options(name=f"{name}-seg-{topic.name.descriptor.segment_id}"))


async def sent(producer: Producer, *sends: Send) -> list[Receipt]:
    for send in sends:
        producer.send(send)
    return await receipts(producer, len(sends))


def keyed(sequence_id: int, key: str, producer: str = "p") -> Send:
    metadata = pb.MessageMetadata(
        producer_name=producer, sequence_id=sequence_id, publish_time=EPOCH_MS, partition_key=key
    )
    return Send(1, sequence_id, 1, encode_entry(metadata, b"x"))


def key_in(hash_range: HashRange) -> str:
    return next(str(n) for n in range(100) if segment_hash(key_hash(str(n))) in hash_range)


async def make_scalable(world: World) -> None:
    await world.metadata.connect().put(scalable_key(ORDERS), b"{}", expected=ABSENT)


# --- records


def test_segments_are_created_explicitly_and_stand_in_no_list() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        changes = topics.list_changed(DEFAULT)
        with pytest.raises(TopicNotFound):
            await topics.get(PARENT)
        with pytest.raises(TopicNotFound):
            await topics.partitions(PARENT)
        assert not await topics.exists(PARENT)
        for name in (MERGED, PARENT, OTHER):
            assert await topics.create(name)
        assert not await topics.create(PARENT)
        assert await topics.exists(PARENT)
        assert await topics.partitions(PARENT) == 0
        assert isinstance(await topics.get(PARENT), Topic)
        assert await topics.names(DEFAULT, ListMode.ALL) == []
        assert await topics.segment_names(ORDERS) == [PARENT, MERGED]
        assert await topics.segment_names(PARENT) == [PARENT, MERGED]
        await topics.delete(PARENT)
        assert await topics.segment_names(ORDERS) == [MERGED]
        assert changes.version == 0

    with_topics(scenario)


def test_segments_do_not_count_as_topics_of_the_namespace() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        await topics.change_namespace(
            DEFAULT, lambda old: msgspec.structs.replace(old, max_topics_per_namespace=1)
        )
        for name in (LOWER, UPPER):
            await topics.create(name)
        await topics.get(NAME)

    with_topics(scenario)


def test_the_schema_outlives_a_segment() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        topic = await created(topics, PARENT)
        schema = SchemaData(1, b"")
        await topic.add_producer(dataclasses.replace(options(), schema=schema))
        await topics.delete(PARENT, force=True)
        topic = await created(topics, LOWER)
        producer = await topic.add_producer(dataclasses.replace(options(), schema=schema))
        assert producer.schema_version == bytes(8)
        await topic.subscription(dataclasses.replace(consumer(), schema=schema))

    with_topics(scenario)


def test_no_regular_topic_is_created_beside_a_scalable_one() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        grown = TopicName.parse("public/default/grown")
        await topics.create_partitioned(grown, 1)
        await make_scalable(world)
        creations: list[Awaitable[object]] = [
            topics.get(NAME),
            topics.create(NAME),
            topics.create_partitioned(NAME, 2),
            topics.get(NAME.with_partition(0)),
        ]
        for creation in creations:
            with pytest.raises(NotAllowed, match="use topic://public/default/orders"):
                await creation
        await topics.create(PARENT)
        await topics.grow(grown, 2)
        await world.metadata.connect().put(scalable_key(grown), b"{}", expected=ABSENT)
        with pytest.raises(NotAllowed):
            await topics.grow(grown, 3)
        assert isinstance(await topics.get(grown.with_partition(1)), Topic)

    with_topics(scenario)


def test_a_namespace_goes_with_its_segments() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        await created(topics, PARENT)
        await topics.create(LOWER)
        with pytest.raises(NotAllowed):
            await topics.delete_namespace(DEFAULT)
        assert await topics.delete_namespace(DEFAULT, force=True)
        assert await topics.segment_names(ORDERS) == []
        assert not topics.loaded

    with_topics(scenario)


def test_segments_are_not_deleted_for_disuse() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        inactive = InactiveTopicPolicies(delete_while_inactive=True)
        await topics.change_namespace(
            DEFAULT, lambda old: msgspec.structs.replace(old, inactive_topic_policies=inactive)
        )
        await created(topics, PARENT)
        await topics.get(NAME)
        await asyncio.sleep(CARE_SECONDS * 3 + 1)
        assert list(topics.loaded) == [PARENT]

    with_topics(scenario)


# --- dedup


def test_dedup_is_on_unless_the_namespace_says_no() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        def setting(value: bool | None) -> Callable[[Policies], Policies]:
            return lambda old: msgspec.structs.replace(old, deduplication_enabled=value)

        topic = await created(topics, PARENT)
        assert topic.policies.deduplication
        await topics.change_namespace(DEFAULT, setting(False))
        assert not topic.policies.deduplication
        await topic.inherit(Lineage({"p": [Piece(FULL_RING, 9)]}))
        assert (await joined(topic)).last_sequence_id == -1
        await topic.terminate()
        assert await topic.lineage() == NO_LINEAGE
        await topics.change_namespace(DEFAULT, setting(None))
        assert topic.policies.deduplication

    with_topics(scenario)


def test_a_producer_is_the_same_under_its_names_on_segments() -> None:
    async def main() -> None:
        world = World()
        parts = world.parts()
        topics = await world.topics(parts)
        topic = await created(topics, PARENT)
        producer = await joined(topic)
        await sent(producer, message(1), keyed(2, "k", "p-seg-0"))
        with pytest.raises(ProducerBusy):
            await topic.add_producer(options(2, "p"))
        assert list(topic.producers.connected) == ["p-seg-0"]
        await topic.remove_producer(producer)
        plain = await topic.add_producer(options(2, "p"))
        assert plain.last_sequence_id == 2
        world.kill(parts)

        topics = await world.topics()
        topic = await created(topics, PARENT)
        producer = await joined(topic)
        assert producer.last_sequence_id == 2
        (again,) = await sent(producer, message(2))
        assert again.position == DROPPED
        await topics.stop()

    run(main())


def test_a_send_that_crossed_a_split_and_a_merge_is_stored_once() -> None:
    async def main() -> None:
        world = World()
        parts = world.parts()
        topics = await world.topics(parts)
        parent = await created(topics, PARENT)
        producer = await joined(parent)
        low, high = key_in(HashRange(0, 0x7FFF)), key_in(HashRange(0x8000, 0xFFFF))
        await sent(producer, keyed(0, low), keyed(1, high))
        with pytest.raises(NotAllowed):
            await parent.lineage()
        await parent.terminate()
        children = [await created(topics, name) for name in (LOWER, UPPER)]
        for child in children:
            await child.inherit(Lineage.from_bytes((await parent.lineage()).to_bytes()))
        world.kill(parts)

        topics = await world.topics()
        lower, upper = [await created(topics, name) for name in (LOWER, UPPER)]
        lower_producer, upper_producer = await joined(lower), await joined(upper)
        assert lower_producer.last_sequence_id == upper_producer.last_sequence_id == 1
        found = await sent(lower_producer, keyed(0, low), keyed(2, low), keyed(4, low))
        assert [each.position == DROPPED for each in found] == [True, False, False]
        merged = await created(topics, MERGED)
        lineage = NO_LINEAGE
        for topic in (lower, upper):
            await topic.terminate()
            lineage = lineage.merged(await topic.lineage())
        await merged.inherit(lineage)
        producer = await joined(merged)
        assert producer.last_sequence_id == 4
        found = await sent(producer, keyed(1, high), keyed(2, low), keyed(3, high), keyed(4, low))
        assert [each.position == DROPPED for each in found] == [True, True, False, True]
        await topics.unload(MERGED)
        merged = await created(topics, MERGED)
        producer = await joined(merged)
        found = await sent(producer, keyed(4, low), keyed(5, low), message(5))
        assert [each.position == DROPPED for each in found] == [True, False, True]
        assert await stored(merged) == [3, 5]
        await topics.stop()

    run(main())


def test_without_a_key_a_send_may_be_refused() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        topic = await created(topics, MERGED)
        lower, upper = HashRange(0, 0x7FFF), HashRange(0x8000, 0xFFFF)
        await topic.inherit(Lineage({"p": [Piece(lower, 5), Piece(upper, 9)]}))
        producer = await joined(topic)
        found = await sent(producer, message(5), message(7), message(7, batch=2), message(10))
        assert [each.error is None for each in found] == [True, False, False, False]
        await topic.remove_producer(producer)
        producer = await joined(topic)
        (last,) = await sent(producer, message(10))
        assert last.position != DROPPED

    with_topics(scenario)


# --- the end


def test_the_ends_of_a_terminated_topic_are_told() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        topic = await created(topics, PARENT)
        producer = await joined(topic)
        await topic.create_subscription("s", EARLIEST)
        first, second = await sent(producer, message(1), message(2))
        subscription = await topic.subscription(consumer())
        member = subscription.add_consumer(consumer())
        assert topic.ends.version == 0

        async def told(step: Callable[[], object], *, at_end: bool) -> None:
            seen = topic.ends.version
            step()
            await asyncio.wait_for(topic.ends.past(seen), 1)
            await settled(lambda: (subscription.backlog() == 0) == at_end)

        await topic.terminate()
        assert topic.ends.version > 0
        await told(lambda: subscription.ack(member, [Ack(first.position)]), at_end=False)
        await told(
            lambda: subscription.ack(member, [Ack(second.position)], cumulative=True),
            at_end=True,
        )
        seek = asyncio.create_task(subscription.seek(first.position))
        await told(lambda: None, at_end=False)
        await seek
        await told(subscription.skip_all, at_end=True)
        seen = topic.ends.version
        await topic.create_subscription("late", EARLIEST)
        assert topic.ends.version > seen
        seen = topic.ends.version
        await topic.delete_subscription("late")
        await asyncio.wait_for(topic.ends.past(seen), 1)

        await topics.unload(PARENT)
        topic = await created(topics, PARENT)
        subscription = topic.subscriptions["s"]
        seek = asyncio.create_task(subscription.seek(first.position))
        await told(lambda: None, at_end=False)
        await seek

    with_topics(scenario)


# --- ownership


class Book:
    """Who has which topic, in one place."""

    def __init__(self) -> None:
        self.owners: dict[TopicName, str] = {}


class Shared:
    """One broker's view of a `Book`."""

    def __init__(self, book: Book, url: str) -> None:
        self._owners = book.owners
        self._url = url

    async def claim(self, name: TopicName) -> None:
        owner = self._owners.setdefault(name, self._url)
        if owner != self._url:
            raise ServiceNotReady(f"{name} is served by {owner}")

    async def owner_url(self, name: TopicName) -> str | None:
        return self._owners.get(name)

    async def release(self, name: TopicName) -> None:
        if self._owners.pop(name, self._url) != self._url:
            raise ServiceNotReady(f"{name} is not served here")


def test_a_topic_is_claimed_while_it_is_loaded() -> None:
    async def main() -> None:
        world, book = World(), Book()
        one, two = [
            await world.topics(dataclasses.replace(world.parts(), ownership=Shared(book, url)))
            for url in ("one", "two")
        ]
        ticks = TopicName.parse("non-persistent://public/default/ticks")
        seen = one.loaded_changed.version
        for name in (NAME, ticks):
            await one.get(name)
            with pytest.raises(ServiceNotReady, match="one"):
                await two.get(name)
        assert one.loaded_changed.version == seen + 2
        assert two.loaded_changed.version == 0
        await one.unload(NAME)
        assert one.loaded_changed.version == seen + 3
        await two.get(NAME)
        await two.delete(NAME)
        assert book.owners == {ticks: "one"}
        world.ledgers.fail_next(DiskFailed("broken"), operation="create")
        with pytest.raises(DiskFailed):
            await two.get(NAME)
        assert book.owners == {ticks: "one"}
        await two.get(NAME)
        book.owners[NAME] = "one"  # releasing fails: it is gone all the same
        await two.unload(NAME)
        assert not two.loaded
        await one.stop()
        await two.stop()
        assert book.owners == {}

    run(main())


def test_a_broker_that_is_alone_owns_everything() -> None:
    async def main() -> None:
        owner = SoleOwner("pulsar://here:6650")
        await owner.claim(NAME)
        assert await owner.owner_url(NAME) == "pulsar://here:6650"
        await owner.release(NAME)
        assert await owner.owner_url(PARENT) == "pulsar://here:6650"

    run(main())
