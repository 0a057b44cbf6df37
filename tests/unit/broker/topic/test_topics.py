"""The registry of topics: loading once, creation rules, partitions, lists, policies, care."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from magnetar.broker.api import ProducerRequest, SchemaData
from magnetar.broker.policy.namespaces import DEFAULT, SYSTEM, Tenant
from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.values import (
    AutoTopicCreation,
    InactiveTopicPolicies,
    RetentionPolicies,
)
from magnetar.broker.topic.maintenance import CARE_SECONDS, TopicMaintenance
from magnetar.broker.topic.nonpersistent import NonPersistentTopic
from magnetar.broker.topic.topic import Topic
from magnetar.broker.topic.topics import ListMode, Topics, topics_hash
from magnetar.errors import (
    DiskFailed,
    NotAllowed,
    ServiceNotReady,
    StorageFenced,
    TopicNotFound,
)
from magnetar.managed_ledger.managed_ledger import EARLIEST
from magnetar.model.names import NamespaceName, TopicName
from magnetar.model.subscriptions import SubscriptionType
from magnetar.runtime.limits import Limits
from magnetar.runtime.slices import SLICE_ITEMS
from magnetar.testing.virtual.virtual_time import run
from magnetar.wire.messages import Send
from tests.unit.broker.world import (
    EPOCH_MS,
    NAME,
    World,
    consumer,
    due,
    entry,
    message,
    options,
    receipts,
    settled,
    stored,
)

EXPIRY_SECONDS = Limits().expiry_check_seconds
SHARED = SubscriptionType.SHARED
TICKS = TopicName.parse("non-persistent://public/default/ticks")
PARTS = TopicName.parse("persistent://public/default/parts")


def with_topics(
    scenario: Callable[[World, Topics], Awaitable[None]], limits: Limits | None = None
) -> None:
    async def main() -> None:
        world = World(limits)
        topics = await world.topics()
        await scenario(world, topics)
        await topics.stop()

    run(main())


async def loaded(topics: Topics, name: TopicName = NAME) -> Topic:
    topic = await topics.get(name)
    assert isinstance(topic, Topic)
    return topic


def setting(**values: object) -> Callable[[Policies], Policies]:
    return lambda old: msgspec.structs.replace(old, **values)


# --- loading


def test_who_asks_at_the_same_time_gets_one_load() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        asked = await asyncio.gather(*(topics.get(NAME, create=n > 0) for n in range(5, -1, -1)))
        assert len({id(each) for each in asked}) == 1
        assert await topics.get(NAME) is asked[0]
        assert not topics._locks

    with_topics(scenario)


def test_a_caller_that_goes_away_does_not_stop_the_load() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        first = asyncio.create_task(topics.get(NAME))
        await asyncio.sleep(0)
        second = asyncio.create_task(topics.get(NAME))
        await asyncio.sleep(0)
        first.cancel()
        assert await second is topics.loaded[NAME]

    with_topics(scenario)


def test_a_failed_load_is_told_and_can_be_repeated() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        world.ledgers.fail_next(DiskFailed("broken"), operation="create")
        with pytest.raises(DiskFailed):
            await topics.get(NAME)
        await loaded(topics)

    with_topics(scenario)


def test_topics_and_messages_survive_the_broker() -> None:
    async def main() -> None:
        world = World()
        parts = world.parts()
        topics = await world.topics(parts)
        topic = await loaded(topics)
        producer = await topic.add_producer(options())
        producer.send(message(1))
        await receipts(producer, 1)
        world.kill(parts)

        topics = await world.topics()
        assert await topics.exists(NAME)
        assert await stored(await loaded(topics)) == [1]
        await topics.stop()

    run(main())


def test_a_lost_topic_is_loaded_again() -> None:
    async def main() -> None:
        world = World()
        topics = await world.topics()
        topic = await loaded(topics)
        other = await world.topics()
        await loaded(other)  # takes the managed ledger over
        producer = await topic.add_producer(options())
        producer.send(message(1))
        assert await due(producer) == []
        await asyncio.sleep(1)
        assert topic.lost is not None
        again = await loaded(topics)
        assert again is not topic
        producer = await again.add_producer(options())
        producer.send(message(1))
        assert len(await receipts(producer, 1)) == 1
        await topics.stop()
        await other.stop()

    run(main())


def test_stopping_closes_topics_and_admits_nobody() -> None:
    async def main() -> None:
        world = World()
        topics = await world.topics()
        producer = await (await topics.get(NAME)).add_producer(options())
        await topics.get(TICKS)
        producer.send(message(1))
        await topics.stop()
        assert len(await receipts(producer, 1)) == 1
        assert isinstance(producer.failure, ServiceNotReady)
        with pytest.raises(ServiceNotReady):
            await topics.get(NAME)

    run(main())


# --- creation


def test_creation_follows_request_and_policy() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        with pytest.raises(TopicNotFound):
            await topics.get(NAME, create=False)
        with pytest.raises(TopicNotFound):
            await topics.get(TopicName.parse("public/none/x"))
        no = AutoTopicCreation(allow_auto_topic_creation=False)
        await topics.change_namespace(DEFAULT, setting(auto_topic_creation=no))
        for name in (NAME, TICKS):
            with pytest.raises(TopicNotFound):
                await topics.get(name)
            with pytest.raises(TopicNotFound):
                await topics.partitions(name)
        assert await topics.create(NAME)
        assert not await topics.create(NAME)
        await loaded(topics)
        assert await topics.partitions(NAME) == 0

    with_topics(scenario)


def test_scalable_names_are_not_topics_here() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        with pytest.raises(NotAllowed):
            await topics.get(TopicName.parse("topic://public/default/x"))
        with pytest.raises(NotAllowed):
            await topics.create(TICKS)

    with_topics(scenario)


def test_a_namespace_has_a_limit_of_topics() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        await topics.change_namespace(DEFAULT, setting(max_topics_per_namespace=1))
        await topics.get(NAME)
        with pytest.raises(NotAllowed):
            await topics.get(PARTS)
        # Partitions count one by one, and either all of them come or none.
        await topics.change_namespace(DEFAULT, setting(max_topics_per_namespace=3))
        with pytest.raises(NotAllowed):
            await topics.create_partitioned(PARTS, 3)
        assert await topics.partitioned.get(PARTS) is None
        assert await topics.create_partitioned(PARTS, 2)
        with pytest.raises(NotAllowed):
            await topics.grow(PARTS, 3)
        assert await topics.partitions(PARTS) == 2
        await topics.get(PARTS.with_partition(1))

    with_topics(scenario)


# --- partitions


def test_partitioned_topics_have_partitions_and_no_base() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        assert await topics.partitions(PARTS) == 0
        assert await topics.create_partitioned(PARTS, 3)
        assert not await topics.create_partitioned(PARTS, 3)
        assert await topics.partitions(PARTS) == 3
        assert await topics.partitions(PARTS.with_partition(1)) == 0
        assert await topics.partitioned.names(DEFAULT) == [PARTS]
        with pytest.raises(NotAllowed):
            await topics.get(PARTS)
        with pytest.raises(NotAllowed):
            await topics.create(PARTS)
        with pytest.raises(NotAllowed):
            await topics.get(PARTS.with_partition(3))
        await loaded(topics, PARTS.with_partition(2))
        await topics.get(NAME)
        with pytest.raises(NotAllowed):
            await topics.create_partitioned(NAME, 2)

    with_topics(scenario)


def test_partitions_exist_even_where_nothing_is_created() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        no = AutoTopicCreation(allow_auto_topic_creation=False)
        await topics.change_namespace(DEFAULT, setting(auto_topic_creation=no))
        await topics.create_partitioned(PARTS, 2)
        await topics.get(PARTS.with_partition(1))
        ticks = TICKS.without_partition()
        await topics.create_partitioned(ticks, 2)
        assert isinstance(await topics.get(ticks.with_partition(0)), NonPersistentTopic)

    with_topics(scenario)


def test_partitions_grow_with_their_subscriptions_and_never_shrink() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        await topics.create_partitioned(PARTS, 1)
        first = await loaded(topics, PARTS.with_partition(0))
        await first.create_subscription("s", EARLIEST)
        await topics.grow(PARTS, 3)
        assert await topics.partitions(PARTS) == 3
        third = await loaded(topics, PARTS.with_partition(2))
        assert list(third.subscriptions) == ["s"]
        with pytest.raises(NotAllowed):
            await topics.grow(PARTS, 2)
        with pytest.raises(NotAllowed):
            await topics.grow(PARTS, 0)
        with pytest.raises(TopicNotFound):
            await topics.grow(NAME, 2)

    with_topics(scenario)


def test_topics_are_created_partitioned_where_the_policy_says_so() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        some = AutoTopicCreation(True, "partitioned", 4)
        await topics.change_namespace(DEFAULT, setting(auto_topic_creation=some))
        with pytest.raises(TopicNotFound):
            await topics.partitions(PARTS, create=False)
        asked = await asyncio.gather(*(topics.partitions(PARTS) for _ in range(3)))
        assert asked == [4, 4, 4]
        assert await topics.partitions(TopicName.parse("odd-partition-7")) == 0

    with_topics(scenario)


def test_a_partitioned_topic_is_deleted_with_its_partitions() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        await topics.create_partitioned(PARTS, 2)
        topic = await loaded(topics, PARTS.with_partition(1))
        await topic.add_producer(options())
        with pytest.raises(NotAllowed):
            await topics.delete_partitioned(PARTS)
        assert len(await topics.names(DEFAULT, ListMode.ALL)) == 2
        await topics.delete_partitioned(PARTS, force=True)
        assert await topics.names(DEFAULT, ListMode.ALL) == []
        assert not await topics.exists(PARTS)
        with pytest.raises(TopicNotFound):
            await topics.delete_partitioned(PARTS)

    with_topics(scenario)


# --- lists


def test_lists_and_their_signal() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        changed = topics.list_changed(DEFAULT)
        other = topics.list_changed(SYSTEM)
        await topics.get(NAME)
        await topics.get(TICKS)
        await topics.create_partitioned(PARTS, 2)
        await topics.create(TopicName.parse("__hidden"))
        assert await topics.names(DEFAULT, ListMode.PERSISTENT) == [
            "persistent://public/default/orders",
            "persistent://public/default/parts-partition-0",
            "persistent://public/default/parts-partition-1",
        ]
        assert await topics.names(DEFAULT, ListMode.NON_PERSISTENT) == [str(TICKS)]
        assert len(await topics.names(DEFAULT, ListMode.ALL)) == 4
        seen = changed.version
        assert seen >= 4
        await topics.delete(NAME)
        assert changed.version > seen
        assert other.version == 0
        assert await topics.names(NamespaceName("public", "none"), ListMode.ALL) == []

    with_topics(scenario)


def test_signals_of_lists_go_with_those_who_watch() -> None:
    """A client may name any namespaces, one after the other: they must not add up."""

    async def scenario(world: World, topics: Topics) -> None:
        kept = [weakref.ref(topics.list_changed(NamespaceName("t", str(n)))) for n in range(3)]
        gc.collect()
        assert [each() for each in kept] == [None, None, None]
        held = topics.list_changed(DEFAULT)
        assert topics.list_changed(DEFAULT) is held

    with_topics(scenario)


def test_the_hash_depends_on_the_set_of_names() -> None:
    assert topics_hash(["b", "a"]) == topics_hash(["a", "b"])
    assert topics_hash(["a", "b"]) != topics_hash(["a"])
    # CRC32C of "123456789" is e3069283.
    assert topics_hash(["123456789"]) == "839206e3"


# --- ending


def test_unloading_and_deleting() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        topic = await loaded(topics)
        producer = await topic.add_producer(
            ProducerRequest(1, None, "p", schema=SchemaData(4, b'"int"'))
        )
        producer.send(message(1))
        await topics.unload(NAME)
        await topics.unload(NAME)
        assert NAME not in topics.loaded
        assert await stored(await loaded(topics)) == [1]

        await topics.delete(NAME)
        assert not await topics.exists(NAME)
        with pytest.raises(TopicNotFound):
            await topics.delete(NAME)
        topic = await loaded(topics)
        assert await stored(topic) == []
        other = ProducerRequest(1, None, "p", schema=SchemaData(1, b""))
        assert (await topic.add_producer(other)).schema_version == bytes(8)

    with_topics(scenario)


def test_a_namespace_is_deleted_when_empty_or_by_force() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        shop = NamespaceName("shop", "eu")
        await topics.namespaces.tenants.create("shop", Tenant())
        await topics.namespaces.create(shop)
        for text in ("a", "__b"):
            await topics.get(TopicName.parse(f"shop/eu/{text}"))
        await topics.get(TopicName.parse("non-persistent://shop/eu/c"))
        await topics.create_partitioned(TopicName.parse("shop/eu/d"), 2)
        with pytest.raises(NotAllowed):
            await topics.delete_namespace(shop)
        assert await topics.delete_namespace(shop, force=True)
        assert not await topics.delete_namespace(shop)
        assert not topics.loaded

    with_topics(scenario)


# --- policies


def test_loaded_topics_follow_their_policies() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        topic = await loaded(topics)
        await topics.get(TICKS)
        await topics.change_namespace(DEFAULT, setting(max_producers_per_topic=5))
        assert topic.policies.max_producers == 5
        assert topics.loaded[TICKS].policies.max_producers == 5
        await topics.change_topic(NAME, setting(max_producers_per_topic=2))
        assert topic.policies.max_producers == 2
        await topics.change_namespace(DEFAULT, setting(max_producers_per_topic=9))
        assert topic.policies.max_producers == 2
        assert (await topics.topic_policies(NAME)).max_producers_per_topic == 2
        await topics.unload(NAME)
        assert (await loaded(topics)).policies.max_producers == 2
        await topics.change_topic(NAME, setting(max_producers_per_topic=None))
        assert (await loaded(topics)).policies.max_producers == 9
        with pytest.raises(TopicNotFound):
            await topics.change_topic(PARTS, setting(max_producers_per_topic=1))
        with pytest.raises(TopicNotFound):
            await topics.topic_policies(PARTS)

    with_topics(scenario)


# --- care


def test_retention_is_applied_in_time() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        keep = RetentionPolicies(10, -1)
        await topics.change_namespace(DEFAULT, setting(retention_policies=keep))
        topic = await loaded(topics)
        producer = await topic.add_producer(options())
        for number in range(25):
            producer.send(message(number))
        await receipts(producer, 25)
        await settled(lambda: topic.ledger.ledger_spans[0].closed)
        await asyncio.sleep(5 * CARE_SECONDS)
        assert len(await stored(topic)) == 25
        await asyncio.sleep(10 * CARE_SECONDS)
        assert len(await stored(topic)) < 25

    with_topics(scenario, Limits(managed_ledger_ledger_entries=10))


def expired(topic: Topic, name: str = "s") -> tuple[int, int]:
    stats = topic.subscriptions[name].stats()
    return stats.msg_backlog, stats.total_msg_expired


def test_messages_older_than_their_time_to_live_are_passed_over() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        topic = await loaded(topics)
        for name in ("s", "other", "__compaction"):
            await topic.create_subscription(name, EARLIEST)
        producer = await topic.add_producer(options())
        for number in range(10):
            producer.send(message(number))
        await receipts(producer, 10)
        reading = (await topic.subscription(consumer(type=SHARED))).add_consumer(
            consumer(type=SHARED)
        )
        reading.flow(4)
        await settled(lambda: reading.unacked == 4)
        await asyncio.sleep(2 * EXPIRY_SECONDS)
        assert expired(topic) == (10, 0), "no policy says so"
        await topics.change_namespace(DEFAULT, setting(message_ttl_in_seconds=1000))
        await asyncio.sleep(EXPIRY_SECONDS)
        assert expired(topic) == (10, 0), "not so soon"
        await asyncio.sleep(2 * EXPIRY_SECONDS)
        assert expired(topic) == (0, 10)
        at_ms = topic.subscriptions["s"].stats().last_expire_timestamp
        assert EPOCH_MS + 1_000_000 < at_ms < EPOCH_MS + 1_600_000
        # What a consumer had is done with, too.
        assert reading.unacked == 0
        assert expired(topic, "other") == (0, 10)
        assert expired(topic, "__compaction") == (10, 0)
        # What comes later is younger.
        fresh = EPOCH_MS + round(1000 * asyncio.get_running_loop().time())
        producer.send(Send(1, 10, 1, entry(10, publish_time=fresh)))
        await receipts(producer, 1)
        await asyncio.sleep(2 * EXPIRY_SECONDS)
        assert expired(topic) == (1, 10)

    with_topics(scenario)


def test_subscriptions_that_nobody_uses_are_deleted_if_the_policy_says_so() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        topic = await loaded(topics)
        for name in ("idle", "__compaction"):
            await topic.create_subscription(name, EARLIEST)
        await topic.subscription(consumer("reader", durable=False))
        used = await topic.subscription(consumer("used"))
        reading = used.add_consumer(consumer("used"))
        await asyncio.sleep(3 * EXPIRY_SECONDS)
        assert "idle" in topic.subscriptions, "no policy says so"
        await topics.change_namespace(DEFAULT, setting(subscription_expiration_time_minutes=20))
        await asyncio.sleep(3 * EXPIRY_SECONDS)
        assert set(topic.subscriptions) == {"__compaction", "reader", "used"}
        used.remove_consumer(reading)
        await asyncio.sleep(3 * EXPIRY_SECONDS)
        assert "used" in topic.subscriptions, "used not long ago"
        await asyncio.sleep(2 * EXPIRY_SECONDS)
        assert set(topic.subscriptions) == {"__compaction", "reader"}

    with_topics(scenario)


def test_unused_topics_go_only_if_the_policy_says_so() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        await topics.get(NAME)
        await topics.get(TICKS)
        await asyncio.sleep(5 * CARE_SECONDS)
        assert await topics.exists(NAME)
        assert TICKS not in topics.loaded, "of a non-persistent one nothing is lost"

        go = InactiveTopicPolicies(delete_while_inactive=True)
        await topics.change_namespace(DEFAULT, setting(inactive_topic_policies=go))
        topic = await loaded(topics)
        producer = await topic.add_producer(options())
        await asyncio.sleep(5 * CARE_SECONDS)
        assert await topics.exists(NAME)
        await topic.create_subscription("s", EARLIEST)
        await topic.remove_producer(producer)
        await asyncio.sleep(5 * CARE_SECONDS)
        assert await topics.exists(NAME)
        caught_up = msgspec.structs.replace(
            go, inactive_topic_delete_mode="delete_when_subscriptions_caught_up"
        )
        await topics.change_namespace(DEFAULT, setting(inactive_topic_policies=caught_up))
        await asyncio.sleep(5 * CARE_SECONDS)
        assert not await topics.exists(NAME)

    with_topics(scenario)


def test_others_have_turns_while_very_many_topics_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mostly nothing is to be done, so nothing is waited for."""
    many, looks, most = 5_000, 0, 0

    class Many:
        """One topic, as often as it takes."""

        def __init__(self, topic: Topic) -> None:
            self.loaded = {topic.name.with_partition(number): topic for number in range(many)}

        async def unload(self, name: TopicName) -> None:
            raise AssertionError(name)

        async def delete(self, name: TopicName) -> None:
            raise AssertionError(name)

        async def is_migrated(self, name: TopicName) -> bool:
            raise AssertionError(name)

    async def others() -> None:
        nonlocal most
        while looks < many:
            before = looks
            await asyncio.sleep(0)
            most = max(most, looks - before)

    async def scenario(world: World, topics: Topics) -> None:
        topic = await loaded(topics)
        waiting: list[asyncio.Task[None]] = []

        async def trim(self: Topic) -> list[int]:
            nonlocal looks
            looks += 1
            if not waiting:
                waiting.append(asyncio.create_task(others()))
            return []

        monkeypatch.setattr(Topic, "trim", trim)
        caring = asyncio.create_task(TopicMaintenance(Many(topic), world.clock, Limits()).run())
        await asyncio.sleep(CARE_SECONDS + 1)
        caring.cancel()
        assert looks >= many
        assert most <= SLICE_ITEMS

    with_topics(scenario)


def test_lost_topics_are_unloaded() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        topic = await loaded(topics)
        reading = (await topic.subscription(consumer())).add_consumer(consumer())
        producer = await topic.add_producer(options())
        world.ledgers.fail_next(StorageFenced("sync failed"))
        producer.send(message(1))
        assert await due(producer) == []
        await asyncio.sleep(2 * CARE_SECONDS)
        assert NAME not in topics.loaded
        assert reading.is_stopped

    with_topics(scenario)
