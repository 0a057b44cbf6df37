"""A persistent topic: publishing, dedup over loads, failures, termination, deletion, unloading."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import pytest

from magnetar.broker.api import (
    DROPPED,
    Delivery,
    LastMessage,
    ProducerRequest,
    Receipt,
    SchemaData,
)
from magnetar.broker.dispatch.consumer import Consumer
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.values import SubscribeRate
from magnetar.broker.publish.dedup_log import SNAPSHOT_ENTRIES
from magnetar.broker.publish.producer import Producer
from magnetar.broker.topic.topic import Topic
from magnetar.errors import (
    ConsumerBusy,
    DiskFailed,
    IncompatibleSchema,
    MagnetarError,
    ManagedLedgerFenced,
    MetadataError,
    NotAllowed,
    ProducerBusy,
    ServiceNotReady,
    StorageFenced,
    SubscriptionNotFound,
    TopicNotFound,
    TopicTerminated,
)
from magnetar.managed_ledger.ledger_list import Retention
from magnetar.managed_ledger.managed_ledger import EARLIEST
from magnetar.metadata.memory import MemoryStore
from magnetar.model.ids import Position
from magnetar.model.subscriptions import SubscriptionType
from magnetar.runtime.limits import Limits
from magnetar.testing.virtual.virtual_time import run
from magnetar.wire.messages import Send, encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.broker.world import (
    EPOCH_MS,
    NAME,
    World,
    consumer,
    due,
    entry,
    message,
    options,
    rare,
    receipts,
    settled,
    stored,
)


def in_world(scenario: Callable[[World], Awaitable[None]], limits: Limits | None = None) -> None:
    async def main() -> None:
        await scenario(World(limits))

    run(main())


async def send_all(topic: Topic, producer: Producer, *numbers: int) -> list[Receipt]:
    for number in numbers:
        producer.send(message(number))
    return await receipts(producer, len(numbers))


# --- publishing


def test_what_is_receipted_is_stored_in_order() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        producer = await topic.add_producer(options())
        found = await send_all(topic, producer, *range(100))
        assert [each.sequence_id for each in found] == list(range(100))
        assert [each.position.entry_id for each in found] == list(range(100))
        assert await stored(topic) == list(range(100))
        assert topic.stats().msg_in_counter == 100
        await topic.remove_producer(producer)
        assert topic.stats().msg_in_counter == 100
        await topic.close()

    in_world(scenario)


def test_the_last_message_names_the_last_of_a_batch() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        assert await topic.last_message() == LastMessage(DROPPED, -1)
        producer = await topic.add_producer(options())
        (first,) = await send_all(topic, producer, 1)
        assert await topic.last_message() == LastMessage(first.position, -1)
        producer.send(message(2, batch=10))
        (second,) = await receipts(producer, 1)
        assert await topic.last_message() == LastMessage(second.position, 9)
        await topic.close()

    in_world(scenario)


def test_entries_are_found_by_time() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        producer = await topic.add_producer(options())
        for number in range(20):
            data = entry(number, publish_time=EPOCH_MS + 10 * number)
            producer.send(Send(1, number, 1, data))
        found = await receipts(producer, 20)
        assert await topic.find_by_time(EPOCH_MS + 55) == found[6].position
        assert await topic.find_by_time(EPOCH_MS + 1000) is None
        await topic.close()

    in_world(scenario)


def test_names_are_made_up_and_unique() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        made = [await topic.add_producer(options(n, None)) for n in range(3)]
        assert len({each.name for each in made}) == 3
        await topic.close()

    in_world(scenario)


def test_policies_limit_who_produces() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        await topic.apply(TopicPolicies(max_producers=1))
        await topic.add_producer(options(1, "a"))
        with pytest.raises(ProducerBusy):
            await topic.add_producer(options(2, "b"))
        # Of those who come at once all but one are refused too.
        await topic.apply(TopicPolicies(max_producers=2))
        coming = [topic.add_producer(options(n, str(n))) for n in range(5)]
        found = await asyncio.gather(*coming, return_exceptions=True)
        assert sum(isinstance(each, ProducerBusy) for each in found) == 4
        # Who comes again takes the place of its former self.
        here = next(each for each in found if isinstance(each, Producer))
        later = dataclasses.replace(here.options, epoch=1)
        await topic.add_producer(later)
        await topic.apply(TopicPolicies(encryption_required=True))
        with pytest.raises(MetadataError):
            await topic.add_producer(options(2, "b"))
        await topic.close()

    in_world(scenario)


def test_policies_limit_who_consumes() -> None:
    shared = SubscriptionType.SHARED

    async def scenario(world: World) -> None:
        topic = await world.topic()
        policies = TopicPolicies(max_consumers=3, max_consumers_per_subscription=2)
        await topic.apply(policies)

        async def join(name: str, number: int, kind: SubscriptionType = shared) -> None:
            asked = consumer(name, kind, consumer_id=number)
            (await topic.subscription(asked)).add_consumer(asked)

        coming = [join("a", number) for number in range(4)]
        found = await asyncio.gather(*coming, return_exceptions=True)
        assert sum(isinstance(each, ConsumerBusy) for each in found) == 2
        await join("b", 5)
        # The topic is full: no subscription is made for who is refused.
        with pytest.raises(ConsumerBusy):
            await join("c", 6)
        assert set(topic.subscriptions) == {"a", "b"}
        await topic.apply(TopicPolicies(subscription_types=frozenset({"Failover"})))
        for kind in (shared, SubscriptionType.EXCLUSIVE):
            with pytest.raises(NotAllowed):
                await join("d", 7, kind)
        await join("d", 7, SubscriptionType.FAILOVER)
        await topic.apply(TopicPolicies(max_subscriptions=3))
        await join("a", 8)
        with pytest.raises(NotAllowed):
            await join("e", 9)
        await topic.close()

    in_world(scenario)


def encrypted(number: int) -> Send:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=number, publish_time=EPOCH_MS)
    metadata.encryption_keys.add(key="k", value=b"v")
    return Send(1, number, 1, encode_entry(metadata, b"x"))


def test_a_consumer_may_subscribe_only_so_often() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        await topic.apply(TopicPolicies(subscribe_rate=SubscribeRate(2, 30)))
        asked = [
            dataclasses.replace(consumer(), address=f"10.0.0.1:{port}")
            for port in range(4000, 4003)
        ]
        for each in asked[:2]:
            await topic.subscription(each)
        # From another port it is the same one; and no subscription is made for who is refused.
        with pytest.raises(NotAllowed):
            await topic.subscription(dataclasses.replace(asked[2], subscription="other"))
        assert set(topic.subscriptions) == {"s"}
        await topic.subscription(dataclasses.replace(asked[2], consumer_id=2))
        await asyncio.sleep(30)
        await topic.subscription(asked[2])
        await topic.close()

    in_world(scenario)


def test_loaded_producers_follow_the_size_of_messages() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        producer = await topic.add_producer(options())
        await topic.apply(TopicPolicies(max_message_bytes=100))
        producer.send(message(1, "x" * 100))
        late = await topic.add_producer(options(2, "late"))
        late.send(message(1, "x" * 100))
        for each in (producer, late):
            (refused,) = await receipts(each, 1)
            assert isinstance(refused.error, NotAllowed)
        await topic.apply(TopicPolicies())
        producer.send(message(2, "x" * 100))
        assert (await receipts(producer, 1))[0].error is None
        await topic.close()

    in_world(scenario)


def test_switching_encryption_on_stops_who_does_not_encrypt() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        plain = await topic.add_producer(options(1, "plain"))
        secret = await topic.add_producer(ProducerRequest(2, None, "secret", encrypted=True))
        await topic.apply(TopicPolicies(encryption_required=True))
        assert isinstance(plain.failure, MetadataError)
        assert not secret.stopped
        # What it claimed does not count, what it sends does.
        sealed = encrypted(1)
        secret.send(message(0))
        secret.send(sealed)
        found = await receipts(secret, 2)
        assert isinstance(found[0].error, MetadataError)
        assert found[1].error is None
        await topic.apply(TopicPolicies())
        again = await topic.add_producer(options(3, "again"))
        again.send(message(0))
        assert (await receipts(again, 1))[0].error is None
        await topic.close()

    in_world(scenario)


def test_schemas_of_producers_and_consumers() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        avro = ProducerRequest(1, None, "a", schema=SchemaData(4, b'"int"'))
        assert (await topic.add_producer(avro)).schema_version == bytes(8)
        again = ProducerRequest(2, None, "b", schema=SchemaData(4, b'"int"'))
        assert (await topic.add_producer(again)).schema_version == bytes(8)
        other = ProducerRequest(3, None, "c", schema=SchemaData(1, b""))
        with pytest.raises(IncompatibleSchema):
            await topic.add_producer(other)
        assert (await topic.add_producer(options(4, "d"))).schema_version == b""
        await topic.apply(TopicPolicies(schema_required=True))
        with pytest.raises(IncompatibleSchema):
            await topic.add_producer(options(5, "e"))
        await topic.close()

    in_world(scenario)


def test_the_first_schema_comes_from_a_consumer_only_while_nobody_relies_on_none() -> None:
    text, any_schema = SchemaData(1, b""), SchemaData(21, b"")

    async def scenario(world: World) -> None:
        topic = await world.topic()

        async def subscribe(name: str, schema: SchemaData | None) -> Consumer:
            request = dataclasses.replace(consumer(name), schema=schema)
            joined = (await topic.subscription(request)).add_consumer(request)
            assert isinstance(joined, Consumer)
            return joined

        # One that takes what there is relies on nothing; one without a schema does.
        await subscribe("any", any_schema)
        plain = await subscribe("plain", None)
        with pytest.raises(IncompatibleSchema):
            await subscribe("text", text)
        topic.subscriptions["plain"].remove_consumer(plain)
        producer = await topic.add_producer(options())
        with pytest.raises(IncompatibleSchema):
            await subscribe("text", text)
        await topic.remove_producer(producer)
        await subscribe("text", text)
        assert (await topic.add_producer(options(2, "b"))).schema_version == b""
        await topic.close()

        # Nor of one that holds a message.
        world = World()
        topic = await world.topic()
        producer = await topic.add_producer(options())
        await send_all(topic, producer, 1)
        await topic.remove_producer(producer)
        with pytest.raises(IncompatibleSchema):
            await subscribe("text", text)
        await topic.close()

    in_world(scenario)


# --- dedup


def test_dedup_answers_duplicates_and_survives_a_crash() -> None:
    async def scenario(world: World) -> None:
        parts = world.parts()
        topic = await world.topic(parts, dedup=True)
        producer = await topic.add_producer(options())
        await send_all(topic, producer, 1, 2, 3)
        (again,) = await send_all(topic, producer, 2)
        assert again == Receipt(2, None, DROPPED)
        world.kill(parts)

        topic = await world.topic(dedup=True)
        producer = await topic.add_producer(options())
        assert producer.last_sequence_id == 3
        found = await send_all(topic, producer, 2, 3, 4)
        assert [each.position == DROPPED for each in found] == [True, True, False]
        assert await stored(topic) == [1, 2, 3, 4]
        await topic.close()

    in_world(scenario)


def test_a_snapshot_covers_what_sessions_have_not_taken_yet() -> None:
    """Receipts that nobody asked for are settled before the snapshot is taken."""

    async def scenario(world: World) -> None:
        parts = world.parts()
        topic = await world.topic(parts, dedup=True)
        producer = await topic.add_producer(options())
        for number in range(SNAPSHOT_ENTRIES + 10):
            producer.send(message(number))
        await settled(lambda: topic.ledger.pending == 0)
        await asyncio.sleep(TopicPolicies().deduplication_snapshot_seconds + 1)
        world.kill(parts)

        topic = await world.topic(dedup=True)
        producer = await topic.add_producer(options())
        assert producer.last_sequence_id == SNAPSHOT_ENTRIES + 9
        await topic.close()

    in_world(scenario)


def test_dedup_is_switched_on_and_off() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        producer = await topic.add_producer(options())
        await send_all(topic, producer, 1, 1)
        await topic.apply(TopicPolicies(deduplication=True))
        assert await due(producer) == []
        assert isinstance(producer.failure, ServiceNotReady)
        await topic.remove_producer(producer)

        producer = await topic.add_producer(options())
        await send_all(topic, producer, 1)
        (duplicate,) = await send_all(topic, producer, 1)
        assert duplicate.position == DROPPED
        await topic.apply(TopicPolicies(deduplication=False))
        (found_again,) = await send_all(topic, producer, 1)
        assert found_again.position != DROPPED
        assert topic.stats().deduplication_status == "Disabled"
        await topic.close()

    in_world(scenario)


def test_a_producer_that_lost_its_session_is_settled_before_it_comes_back() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic(dedup=True)
        producer = await topic.add_producer(options())
        for number in range(5):
            producer.send(message(number))
        await topic.remove_producer(producer)
        back = await topic.add_producer(options(epoch=1))
        assert back.last_sequence_id == 4
        await topic.close()

    in_world(scenario)


def test_nothing_behind_the_snapshot_is_trimmed() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic(dedup=True)
        producer = await topic.add_producer(options())
        await send_all(topic, producer, *range(25))
        await settled(lambda: topic.ledger.ledger_spans[0].closed)
        assert await topic.trim() == []
        await asyncio.sleep(TopicPolicies().deduplication_snapshot_seconds + 1)
        assert await topic.trim() != []
        await topic.close()

    in_world(scenario, Limits(managed_ledger_ledger_entries=10))


# --- failures


def test_a_failed_write_fences_the_topic_and_clients_come_back() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        one = await topic.add_producer(options(1, "one"))
        two = await topic.add_producer(options(2, "two"))
        await send_all(topic, one, 1)
        world.ledgers.fail_next(DiskFailed("broken"))
        one.send(message(2))
        assert await due(one) == []
        await settled(lambda: two.stopped)
        assert await due(two) == []
        with pytest.raises(ServiceNotReady):
            await topic.add_producer(options(3, "three"))
        for producer in (one, two):
            await topic.remove_producer(producer)
        await asyncio.sleep(5)

        back = await topic.add_producer(options(1, "one", epoch=1))
        await send_all(topic, back, 2, 3)
        assert await stored(topic) == [1, 2, 3]
        await topic.close()

    in_world(scenario)


def test_a_storage_that_is_fenced_takes_the_topic_with_it() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        producer = await topic.add_producer(options())
        world.ledgers.fail_next(StorageFenced("sync failed"), stored=True)
        producer.send(message(1))
        assert await due(producer) == []
        await asyncio.sleep(1)
        assert topic.lost is not None
        with pytest.raises(ServiceNotReady):
            await topic.add_producer(options(2, "b"))
        with pytest.raises(ServiceNotReady):
            await topic.subscription(consumer())
        await topic.close()

    in_world(scenario)


def test_another_owner_ends_the_topic_here() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        subscription = await topic.subscription(consumer())
        reading = subscription.add_consumer(consumer())
        later = await world.topic(world.parts())
        producer = await topic.add_producer(options())
        producer.send(message(1))
        assert await due(producer) == []
        await asyncio.sleep(1)
        assert isinstance(topic.lost, ManagedLedgerFenced)
        assert reading.is_stopped
        await topic.close()
        await later.close()

    in_world(scenario)


@pytest.mark.parametrize("by", ["the owner", "somebody else"])
def test_another_owner_ends_a_terminated_topic_here_too(by: str) -> None:
    """Only a cursor finds out, whoever writes it."""

    async def scenario(world: World) -> None:
        topic = await world.topic()
        subscription = await topic.subscription(consumer())
        reading = subscription.add_consumer(consumer())
        producer = await topic.add_producer(options())
        (last,) = await send_all(topic, producer, 1)
        await topic.terminate()
        later = await world.topic(world.parts())
        assert topic.lost is None, "nothing is written here, so nobody noticed"
        subscription.cursor.ack(last.position)
        if by == "somebody else":
            with pytest.raises(ManagedLedgerFenced):
                await subscription.cursor.flush()
        await asyncio.sleep(world.limits.cursor_flush_seconds + 1)
        assert isinstance(topic.lost, ManagedLedgerFenced)
        assert reading.is_stopped
        await topic.close()
        await later.close()

    in_world(scenario)


# --- subscriptions


def test_subscriptions_are_created_found_and_removed() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        subscription = await topic.subscription(consumer("s"))
        assert await topic.subscription(consumer("s")) is subscription
        with pytest.raises(NotAllowed):
            await topic.subscription(consumer("s", durable=False))
        with pytest.raises(ProducerBusy):
            await topic.subscription(consumer(""))
        await topic.apply(TopicPolicies(auto_subscription_creation=False))
        with pytest.raises(SubscriptionNotFound):
            await topic.subscription(consumer("t"))
        assert await topic.create_subscription("t", EARLIEST)
        assert not await topic.create_subscription("t", EARLIEST)
        await topic.close()

        topic = await world.topic(world.parts())
        assert set(topic.subscriptions) == {"s", "t"}
        await topic.delete_subscription("s")
        with pytest.raises(SubscriptionNotFound):
            await topic.delete_subscription("s")
        assert topic.ledger.cursor_names() == ["t"]
        await topic.close()

    in_world(scenario)


def test_a_deletion_that_stops_half_way_leaves_a_whole_subscription_or_none() -> None:
    async def scenario(world: World) -> None:
        parts = world.parts()
        topics = await world.topics(parts)
        topic = await topics.get(NAME)
        assert isinstance(topic, Topic)
        await topic.subscription(consumer("s"))
        assert isinstance(parts.metadata, MemoryStore)
        world.metadata.cut(parts.metadata)
        with pytest.raises(MagnetarError):
            await topic.delete_subscription("s", force=True)
        world.metadata.heal(parts.metadata)

        again = await topics.get(NAME)
        assert again is not topic
        assert isinstance(again, Topic)
        subscription = await again.subscription(consumer("s"))
        assert subscription.cursor.failure is None
        await again.delete_subscription("s", force=True)
        assert not again.subscriptions
        await topics.stop()

    in_world(scenario)


def test_of_two_deletions_the_second_finds_none_and_nothing_is_lost() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        await topic.subscription(consumer("s"))
        both = (topic.delete_subscription("s"), topic.delete_subscription("s"))
        first, second = await asyncio.gather(*both, return_exceptions=True)
        assert first is None
        assert isinstance(second, SubscriptionNotFound)
        assert topic.lost is None
        await topic.close()

    in_world(scenario)


def test_a_reader_goes_with_its_last_consumer() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        asked = consumer("reader", durable=False)
        subscription = await topic.subscription(asked)
        reader = subscription.add_consumer(asked)
        await topic.release(subscription)
        assert "reader" in topic.subscriptions
        subscription.remove_consumer(reader)
        await topic.release(subscription)
        assert "reader" not in topic.subscriptions
        await topic.close()

    in_world(scenario)


def test_messages_reach_a_consumer() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        subscription = await topic.subscription(consumer())
        reading = subscription.add_consumer(consumer())
        reading.flow(10)
        producer = await topic.add_producer(options())
        await send_all(topic, producer, 1, 2, 3)
        got: list[Delivery] = []
        while len(got) < 3:
            await reading.outbox_ready.past(0)
            got += reading.take()
            await asyncio.sleep(0)
        assert len(got) == 3
        await topic.close()
        assert reading.is_stopped
        assert isinstance(reading.error, ServiceNotReady)

    in_world(scenario)


def test_an_initial_subscription_gets_everything() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        asked = ProducerRequest(1, None, "p", initial_subscription="dlq")
        producer = await topic.add_producer(asked)
        await send_all(topic, producer, 1, 2)
        assert topic.subscriptions["dlq"].backlog() == 2
        await topic.apply(TopicPolicies(auto_subscription_creation=False))
        with pytest.raises(NotAllowed):
            await topic.add_producer(ProducerRequest(2, None, "q", initial_subscription="x"))
        await topic.close()

    in_world(scenario)


# --- the end


def test_a_terminated_topic_takes_nothing_more() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        producer = await topic.add_producer(options())
        (last,) = await send_all(topic, producer, 1)
        assert await topic.terminate() == last.position
        assert await topic.terminate() == last.position
        assert isinstance(producer.failure, TopicTerminated)
        with pytest.raises(TopicTerminated):
            await topic.add_producer(options(2, "b"))
        await topic.close()

        topic = await world.topic(world.parts())
        assert topic.terminated
        with pytest.raises(TopicTerminated):
            await topic.add_producer(options(2, "b"))
        assert await stored(topic) == [1]
        await topic.close()

    in_world(scenario)


def test_a_used_topic_is_deleted_by_force_only() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic(dedup=True)
        producer = await topic.add_producer(options())
        await topic.subscription(consumer())
        await send_all(topic, producer, 1)
        with pytest.raises(NotAllowed):
            await topic.delete()
        await topic.delete(force=True)
        assert isinstance(producer.failure, TopicNotFound)

        topic = await world.topic(world.parts(), dedup=True)
        assert await stored(topic) == []
        assert not topic.subscriptions
        assert (await topic.add_producer(options())).last_sequence_id == -1
        await topic.close()

    in_world(scenario)


def test_unloading_gives_receipts_owed_and_writes_cursors() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        await topic.subscription(consumer())
        producer = await topic.add_producer(options())
        (first,) = await send_all(topic, producer, 1)
        producer.send(message(2))
        topic.subscriptions["s"].cursor.ack(first.position)
        await topic.close()
        await topic.close()
        assert [each.sequence_id for each in await due(producer)] == [2]
        assert await due(producer) == []
        assert isinstance(producer.failure, ServiceNotReady)

        topic = await world.topic(world.parts())
        assert topic.subscriptions["s"].backlog() == 1
        await topic.close()

    in_world(scenario)


def test_retention_lets_whole_ledgers_go() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic()
        await topic.subscription(consumer())
        producer = await topic.add_producer(options())
        found = await send_all(topic, producer, *range(25))
        await settled(lambda: topic.ledger.ledger_spans[0].closed)
        assert await topic.trim() == []
        topic.subscriptions["s"].cursor.ack_cumulative(found[-1].position)
        await topic.apply(TopicPolicies(retention=Retention(3600.0, None)))
        assert await topic.trim() == []
        await topic.apply(TopicPolicies())
        assert await topic.trim() != []
        assert topic.ledger.first_position() > Position(found[0].position.ledger_id, 0)
        await topic.close()

    in_world(scenario, Limits(managed_ledger_ledger_entries=10))


def test_highest_ids_of_batches_count() -> None:
    async def scenario(world: World) -> None:
        topic = await world.topic(dedup=True)
        producer = await topic.add_producer(options())
        producer.send(rare(1, highest=5))
        await receipts(producer, 1)
        (duplicate, fresh) = await send_all(topic, producer, 4, 6)
        assert duplicate.position == DROPPED
        assert fresh.position != DROPPED
        await topic.close()

    in_world(scenario)


def test_a_former_owner_does_not_overwrite_the_snapshot_of_its_successor() -> None:
    async def scenario(world: World) -> None:
        old = await world.topic(dedup=True)
        new = await world.topic(world.parts(), dedup=True)
        producer = await new.add_producer(options())
        await send_all(new, producer, 1, 2)
        await new.close()
        await old.close()
        again = await world.topic(world.parts(), dedup=True)
        assert (await again.add_producer(options())).last_sequence_id == 2
        await again.close()

    in_world(scenario)
