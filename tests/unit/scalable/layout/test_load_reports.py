"""Reports of segments' load, and samples of where on the ring it is."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import pytest

from magnetar.broker.dispatch.consumer import Consumer
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.records import TopicRecord
from magnetar.broker.publish.producer import Producer
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.topic.nonpersistent import LoadedTopic
from magnetar.broker.topic.topic import Topic, TopicParts
from magnetar.errors import NotAllowed, Unavailable
from magnetar.metadata.api import MetadataStore
from magnetar.model.hashing import key_hash, segment_hash
from magnetar.model.names import TopicName
from magnetar.runtime.limits import Limits
from magnetar.scalable.layout.autoscale import Sample
from magnetar.scalable.layout.load_reports import LoadReporter, sample_positions
from magnetar.scalable.records import LoadRecord, decode, load_key
from magnetar.testing.virtual.virtual_time import run
from magnetar.wire.messages import Send, encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.broker.world import EPOCH_MS, World, consumer, options, receipts, settled

TOPIC = TopicName.parse("topic://public/default/orders")
LOWER = TopicName.parse("segment://public/default/orders/0000-7fff-1")
UPPER = TopicName.parse("segment://public/default/orders/8000-ffff-2")
REGULAR = TopicName.parse("persistent://public/default/orders")
INTERVAL_S = 10


@dataclass
class Loaded:
    """The topics that a broker has loaded."""

    loaded: dict[TopicName, LoadedTopic] = field(default_factory=dict)


class Broker:
    """Segments of one broker, and its reporter."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.parts: TopicParts = world.parts()
        self.topics = Loaded()
        self.reporter = LoadReporter(
            self.topics, self.parts.metadata, clock=world.clock, limits=world.limits
        )
        self._sequence = 0

    async def load(self, name: TopicName) -> Topic:
        topic = await Topic.open(name, self.parts, TopicRecord(EPOCH_MS), TopicPolicies())
        self.topics.loaded[name] = topic
        return topic

    async def send(self, producer: Producer, *keys: str | None) -> None:
        for key in keys:
            self._sequence += 1
            metadata = pb.MessageMetadata(
                producer_name="p", sequence_id=self._sequence, publish_time=EPOCH_MS
            )
            if key is not None:
                metadata.partition_key = key
            await self.send_entry(producer, encode_entry(metadata, b"x" * 50))

    async def send_entry(self, producer: Producer, entry: bytes, messages: int = 1) -> None:
        self._sequence += 1
        producer.send(Send(1, self._sequence, messages, entry))
        await receipts(producer, 1)

    async def stored(self, segment_id: int) -> LoadRecord | None:
        record = await self.parts.metadata.get(load_key(TOPIC, segment_id))
        return None if record is None else decode(record, LoadRecord)

    async def version(self, segment_id: int) -> int:
        record = await self.parts.metadata.get(load_key(TOPIC, segment_id))
        assert record is not None
        return record.version

    async def tick(self) -> None:
        """Just past the next report."""
        await self.world.clock.sleep(INTERVAL_S)
        for _ in range(20):
            await self.world.clock.sleep(0)

    async def stop(self) -> None:
        await self.reporter.stop()
        for topic in self.topics.loaded.values():
            await topic.close()


def with_broker(
    scenario: Callable[[Broker], Awaitable[None]], limits: Limits | None = None
) -> None:
    async def main() -> None:
        broker = Broker(World(limits))
        await scenario(broker)
        await broker.stop()

    run(main())


# --- reports


def test_rates_are_those_of_the_interval() -> None:
    async def scenario(broker: Broker) -> None:
        topic = await broker.load(LOWER)
        producer = await topic.add_producer(options())
        await broker.send(producer, "a", "b")  # before the reporter: not in the first interval
        await broker.reporter.start()
        await broker.send(producer, *["a"] * 20)
        await broker.tick()
        first = await broker.stored(1)
        assert first is not None
        assert (first.msg_rate_in, first.msg_rate_out, first.bytes_rate_out) == (2, 0, 0)
        assert first.bytes_rate_in == pytest.approx((topic.bytes_in * 20 / 22) / 10, rel=0.05)
        assert first.since_ms == EPOCH_MS + INTERVAL_S * 1000
        await topic.remove_producer(producer)  # its counters move to the topic's: nothing came
        await broker.tick()
        second = await broker.stored(1)
        assert second is not None
        assert (second.msg_rate_in, second.bytes_rate_in) == (0, 0)

    with_broker(scenario)


def test_deliveries_are_counted_over_all_subscriptions() -> None:
    async def scenario(broker: Broker) -> None:
        topic = await broker.load(LOWER)
        producer = await topic.add_producer(options())
        await broker.reporter.start()
        kept, kept_subscription = await joined(topic, "kept", durable=True)
        passing, passing_subscription = await joined(topic, "passing", durable=False)
        await broker.send(producer, *["a"] * 10)
        await taken(kept, 10)
        await taken(passing, 10)
        await broker.tick()
        record = await broker.stored(1)
        assert record is not None
        assert (record.msg_rate_in, record.msg_rate_out) == (1, 2)
        assert record.bytes_rate_out > record.bytes_rate_in
        # A subscription that goes takes its counters with it: that is no negative rate.
        passing_subscription.remove_consumer(passing)
        await topic.release(passing_subscription)
        assert set(topic.subscriptions) == {kept_subscription.name}
        await broker.send(producer, *["a"] * 10)
        await taken(kept, 10)
        await broker.tick()
        record = await broker.stored(1)
        assert record is not None
        assert (record.msg_rate_in, record.msg_rate_out) == (1, 1)

    with_broker(scenario)


async def joined(topic: Topic, name: str, *, durable: bool) -> tuple[Consumer, Subscription]:
    wanted = consumer(name, durable=durable)
    subscription = await topic.subscription(wanted)
    found = subscription.add_consumer(wanted)
    found.flow(100)
    return found, subscription


async def taken(by: Consumer, count: int) -> None:
    """Until a consumer has got so many."""
    got = 0

    def enough() -> bool:
        nonlocal got
        got += len(by.take())
        return got == count

    await settled(enough)


def test_an_immaterial_second_report_is_skipped() -> None:
    async def scenario(broker: Broker) -> None:
        topic = await broker.load(LOWER)
        producer = await topic.add_producer(options())
        await broker.reporter.start()
        await broker.send(producer, *["a"] * 20)
        await broker.tick()
        version = await broker.version(1)
        await broker.send(producer, *["a"] * 21)
        await broker.tick()
        assert await broker.version(1) == version
        await broker.send(producer, *["a"] * 40)
        await broker.tick()
        assert await broker.version(1) != version

    with_broker(scenario)


def test_an_identical_value_does_not_move_its_time() -> None:
    async def scenario(broker: Broker) -> None:
        await broker.load(LOWER)
        await broker.reporter.start()
        await broker.tick()
        first, version = await broker.stored(1), await broker.version(1)
        assert first == LoadRecord(1, since_ms=EPOCH_MS + INTERVAL_S * 1000)
        await broker.tick()
        await broker.tick()
        assert (await broker.stored(1), await broker.version(1)) == (first, version)

    with_broker(scenario)


def test_a_new_owner_seeds_its_baseline_from_the_store() -> None:
    async def scenario(broker: Broker) -> None:
        topic = await broker.load(LOWER)
        producer = await topic.add_producer(options())
        await broker.reporter.start()
        await broker.send(producer, *["a"] * 20)
        await broker.tick()
        before, version = await broker.stored(1), await broker.version(1)
        await broker.reporter.stop()
        await topic.close()
        other = Broker(broker.world)
        broker.topics.loaded.clear()
        moved = await other.load(LOWER)
        producer = await moved.add_producer(options())
        await other.reporter.start()
        await other.send(producer, *["a"] * 19)
        await other.tick()
        assert (await other.stored(1), await other.version(1)) == (before, version)
        await other.tick()
        found = await other.stored(1)
        assert found is not None
        assert found.msg_rate_in == 0
        await other.stop()

    with_broker(scenario)


def test_a_segment_that_is_loaded_again_counts_from_zero() -> None:
    async def scenario(broker: Broker) -> None:
        topic = await broker.load(LOWER)
        await broker.send(await topic.add_producer(options()), *["a"] * 20)
        await broker.reporter.start()
        await topic.close()
        again = await broker.load(LOWER)
        await broker.send(await again.add_producer(options()), *["a"] * 10)
        await broker.tick()  # it is seen now for the first time
        assert await broker.stored(1) is None
        await broker.tick()
        found = await broker.stored(1)
        assert found is not None
        assert found.msg_rate_in == 0

    with_broker(scenario)


def test_only_active_segments_are_reported() -> None:
    async def scenario(broker: Broker) -> None:
        sealed, _, _ = [await broker.load(name) for name in (LOWER, UPPER, REGULAR)]
        await broker.reporter.start()
        await sealed.terminate()
        await broker.tick()
        assert await broker.stored(1) is None
        assert await broker.stored(2) is not None
        keys = await broker.parts.metadata.scan_keys("/scalable/state/" + _directory())
        assert len(keys) == 1
        del broker.topics.loaded[REGULAR]
        await broker.tick()

    with_broker(scenario)


def _directory() -> str:
    return load_key(TOPIC, 0).split("/")[-2]


def test_a_failed_report_is_made_good(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(broker: Broker) -> None:
        topic = await broker.load(LOWER)
        producer = await topic.add_producer(options())
        store = broker.parts.metadata
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(store), "_put", _refused)
            await broker.reporter.start()
            await broker.send(producer, *["a"] * 20)
            await broker.tick()
        assert await broker.stored(1) is None
        await broker.send(producer, *["a"] * 20)
        await broker.tick()
        found = await broker.stored(1)
        assert found is not None
        assert found.msg_rate_in == 2

    with_broker(scenario)
    assert "load-report-failed" in caplog.text


async def _refused(store: MetadataStore, *arguments: object) -> None:
    raise Unavailable("not now")


def test_many_segments_are_reported_at_one_interval() -> None:
    async def scenario(broker: Broker) -> None:
        names = {
            number: TopicName.parse(f"segment://public/default/orders/0000-ffff-{number}")
            for number in range(100)
        }
        for name in names.values():
            await broker.load(name)
        await broker.reporter.start()
        await broker.tick()
        for number in names:
            assert await broker.stored(number) is not None

    with_broker(scenario)


# --- samples


def keys_in(name: TopicName, count: int) -> list[str]:
    """Keys that clients route to a segment."""
    assert name.descriptor is not None
    found: list[str] = []
    number = 0
    while len(found) < count:
        key = f"key-{number}"
        if segment_hash(key_hash(key)) in name.descriptor.hash_range:
            found.append(key)
        number += 1
    return found


def positions(samples: list[Sample]) -> list[int]:
    return [sample.position for sample in samples]


def test_the_last_entries_are_sampled_over_ledgers() -> None:
    async def scenario(broker: Broker) -> None:
        topic = await broker.load(LOWER)
        assert await sample_positions(topic, 5) == []
        producer = await topic.add_producer(options())
        keys = keys_in(LOWER, 20)
        await broker.send(producer, *keys)
        expected = [segment_hash(key_hash(key)) for key in keys]
        assert positions(await sample_positions(topic, 4)) == expected[-4:]
        assert positions(await sample_positions(topic, 13)) == expected[-13:]
        assert positions(await sample_positions(topic, 20)) == expected
        assert positions(await sample_positions(topic, 1000)) == expected
        assert len(topic.ledger.ledger_spans) > 2

    with_broker(scenario, Limits(managed_ledger_ledger_entries=4))


def test_messages_without_a_key_are_spread_over_the_segment() -> None:
    async def scenario(broker: Broker) -> None:
        topic = await broker.load(UPPER)
        producer = await topic.add_producer(options())
        (foreign,) = keys_in(LOWER, 1)  # such as one that was routed by something else
        await broker.send(producer, *[None] * 100, *[foreign] * 100)
        found = positions(await sample_positions(topic, 200))
        assert len(set(found)) > 150
        assert 0x8000 <= min(found) < 0x8800
        assert 0xF800 < max(found) <= 0xFFFF

    with_broker(scenario)


def batch(keys: list[str | None], **metadata: object) -> bytes:
    payload = b""
    for key in keys:
        single = pb.SingleMessageMetadata(payload_size=3)
        if key is not None:
            single.partition_key = key
        head = single.SerializeToString()
        payload += struct.pack(">I", len(head)) + head + b"abc"
    about = pb.MessageMetadata(
        producer_name="p",
        sequence_id=1,
        publish_time=EPOCH_MS,
        num_messages_in_batch=len(keys),
        **metadata,  # type: ignore[arg-type]  # names and kinds of its fields
    )
    return encode_entry(about, payload)


def test_keys_inside_a_batch_are_sampled() -> None:
    async def scenario(broker: Broker) -> None:
        topic = await broker.load(LOWER)
        producer = await topic.add_producer(options())
        one, other = keys_in(LOWER, 2)
        await broker.send_entry(producer, batch([one, other, one]), 3)
        found = await sample_positions(topic, 10)
        expected = [segment_hash(key_hash(key)) for key in (one, other, one)]
        assert positions(found) == expected
        assert sum(sample.messages for sample in found) == pytest.approx(3)
        size = topic.ledger.size_bytes
        assert sum(sample.size_bytes for sample in found) == pytest.approx(size)

    with_broker(scenario)


def test_of_a_large_batch_some_keys_stand_for_all() -> None:
    async def scenario(broker: Broker) -> None:
        topic = await broker.load(LOWER)
        producer = await topic.add_producer(options())
        await broker.send_entry(producer, batch([*keys_in(LOWER, 200)]), 200)
        found = await sample_positions(topic, 10)
        assert len(found) == 16
        assert sum(sample.messages for sample in found) == pytest.approx(200)

    with_broker(scenario)


def test_a_batch_that_cannot_be_read_counts_by_its_own_key() -> None:
    async def scenario(broker: Broker) -> None:
        topic = await broker.load(LOWER)
        producer = await topic.add_producer(options())
        one, other = keys_in(LOWER, 2)
        compressed = batch([other] * 5, compression=pb.LZ4, partition_key=one)
        await broker.send_entry(producer, compressed, 5)
        about = pb.MessageMetadata(
            producer_name="p",
            sequence_id=2,
            publish_time=EPOCH_MS,
            num_messages_in_batch=4,
            partition_key=one,
        )
        await broker.send_entry(producer, encode_entry(about, b"\x00\x00\x00\x02\xff\xff"), 4)
        await broker.send_entry(producer, encode_entry(about, b"\x00"), 4)
        found = await sample_positions(topic, 10)
        assert positions(found) == [segment_hash(key_hash(one))] * 3
        assert [sample.messages for sample in found] == [5, 4, 4]

    with_broker(scenario)


def test_only_segments_have_positions() -> None:
    async def scenario(broker: Broker) -> None:
        topic = await broker.load(REGULAR)
        with pytest.raises(NotAllowed, match="is no segment"):
            await sample_positions(topic, 10)

    with_broker(scenario)


def test_the_reporter_takes_the_brokers_topics() -> None:
    async def main() -> None:
        world = World()
        topics = await world.topics()
        loaded: Mapping[TopicName, LoadedTopic] = topics.loaded
        await topics.get(REGULAR)
        assert REGULAR in loaded
        store = world.parts().metadata
        reporter = LoadReporter(topics, store, clock=world.clock, limits=world.limits)
        async with reporter:
            await reporter.report()
        await topics.stop()

    run(main())
