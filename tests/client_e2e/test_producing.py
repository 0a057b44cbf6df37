"""Producing, of both kinds of topics: order, forms of messages, sequence ids, access modes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from magnetar import AccessMode, Compression, MessageId, ScalableMessageId
from magnetar.client.message.message import AnyMessageId
from magnetar.client.message.routing import Routing
from magnetar.errors import MessageTooLarge, ProducerBusy, ProducerFenced
from magnetar.model.hashing import key_hash, partition_of
from tests.client_e2e.scene import (
    COMES_S,
    FIRST,
    KINDS,
    KINDS_WITH_PARTS,
    Scene,
    drain,
    in_order,
    needs,
    numbers,
    play,
    send,
    silence,
)
from tests.client_e2e.target import Feature, Target


@pytest.mark.parametrize("routing", [Routing.RING, Routing.PREVIEW])
@pytest.mark.parametrize("parts", KINDS_WITH_PARTS)
def test_the_same_key_preserves_order(
    target: Target, parts: tuple[str, int], routing: Routing
) -> None:
    """V5KeyRoutingTest.testSameKeyPreservesOrder, with either placing of keys."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(*parts)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic, routing=routing) as producer:
            await send(producer, range(300), keys=20)
        found = await drain(consumer, 300, consumer.ack)
        assert numbers(found) == list(range(300))
        assert in_order(found)
        places = {(each.key, _place(each.id)[0]) for each in found}
        assert len(places) == 20, "a key has one place"
        assert len({part for _, part in places}) == parts[1], "and every place has a key"

    play(target, story)


def _place(message_id: AnyMessageId) -> tuple[int, MessageId]:
    """Segment or partition, and the place there."""
    if isinstance(message_id, ScalableMessageId):
        return message_id.segment_id, message_id.message_id
    return message_id.partition, message_id


@pytest.mark.parametrize("kind", KINDS)
def test_receipts_name_the_messages(target: Target, kind: str) -> None:
    async def story(scene: Scene) -> None:
        topic = await scene.topic(kind)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic) as producer:
            sent = await asyncio.gather(*(producer.send(b"%d" % n, key="k") for n in range(50)))
        found = await drain(consumer, 50, consumer.ack)
        assert [_place(each.id) for each in found] == [_place(each) for each in sent]

    play(target, story)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize("batching", [True, False], ids=["batches", "single"])
def test_compression_and_batches(
    target: Target, kind: str, compression: Compression, batching: bool
) -> None:
    """V5ProducerBatchingTest, V5ProducerCompressionTest."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(kind)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        payloads = [b"%d " % number * 100 for number in range(40)]
        async with await scene.client.producer(
            topic, compression=compression, batching=batching
        ) as producer:
            for payload in payloads:
                await producer.submit(payload, key="k")
            await producer.flush()
        found = await drain(consumer, 40, consumer.ack)
        assert [each.value for each in found] == payloads
        assert any(each._raw_id.batch_size > 1 for each in found) is batching

    play(target, story)


@pytest.mark.parametrize("kind", KINDS)
def test_large_messages_are_refused_or_cut(target: Target, kind: str) -> None:
    async def story(scene: Scene) -> None:
        topic = await scene.topic(kind)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        large = bytes(range(256)) * (12 * 1024 * 1024 // 256)
        async with await scene.client.producer(topic) as whole:
            with pytest.raises(MessageTooLarge):
                await whole.send(large)
        async with await scene.client.producer(topic, chunking=True) as producer:
            await producer.send(b"before", key="k")
            await producer.send(large, key="k")
            await producer.send(b"behind", key="k")
        found = await drain(consumer, 3)
        assert [each.value for each in found] == [b"before", large, b"behind"]
        assert len(found[1]._chunk_ids) > 2
        await consumer.ack_many(found)
        await consumer.close()
        async with await scene.client.queue_consumer(topic, "s") as again:
            await silence(again)

    play(target, story)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batching", [True, False], ids=["batches", "single"])
def test_what_a_message_carries(target: Target, kind: str, batching: bool) -> None:
    async def story(scene: Scene) -> None:
        topic = await scene.topic(kind)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        at = datetime(2026, 3, 1, 12, tzinfo=UTC)
        name = scene.new_name("teller")
        async with await scene.client.producer(topic, name=name, batching=batching) as producer:
            await producer.submit(
                b"all",
                key="k",
                ordering_key=b"o",
                properties={"a": "1", "ä": "ü"},
                event_time=at,
                sequence_id=7,
            )
            await producer.submit(b"binary", key=b"\xff\x00")
            await producer.submit(None, key="gone")
            await producer.submit(b"")
            await producer.flush()
        found = {
            each.data if not each.is_null else b"null": each for each in await drain(consumer, 4)
        }
        everything = found[b"all"]
        assert (everything.key, everything.ordering_key) == ("k", b"o")
        assert everything.properties == {"a": "1", "ä": "ü"}
        assert everything.event_time_ms == int(at.timestamp() * 1000)
        assert (everything.sequence_id, everything.producer_name) == (7, name)
        assert everything.topic.startswith(topic)
        assert found[b"binary"].key_bytes == b"\xff\x00"
        assert (found[b"null"].key, found[b""].key) == ("gone", None)

    play(target, story)


@needs(Feature.ADMINISTRATION)
@pytest.mark.parametrize("kind", KINDS)
def test_deduplication_drops_repeated_sequence_ids(target: Target, kind: str) -> None:
    """V5ProducerSequenceIdTest: both of its tests."""

    async def story(scene: Scene) -> None:
        namespace = f"{scene.namespace}-once-{kind}"
        await scene.administer("PUT", f"namespaces/{namespace}")
        await scene.administer("POST", f"namespaces/{namespace}/deduplication", True)
        topic = await scene.topic(kind, namespace=namespace)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        name = scene.new_name("importer")
        async with await scene.client.producer(topic, name=name, initial_sequence_id=100) as first:
            await first.send(b"a")
            assert first.last_sequence_id == 100
            await first.send(b"b", sequence_id=110)
        async with await scene.client.producer(topic, name=name) as again:
            assert again.last_sequence_id == 110
            await again.send(b"b again", sequence_id=110)
            await again.send(b"a again", sequence_id=100)
            await again.send(b"c", sequence_id=111)
        assert [each.value for each in await drain(consumer, 3)] == [b"a", b"b", b"c"]
        await silence(consumer)

    play(target, story)


@pytest.mark.parametrize("kind", KINDS)
def test_access_modes(target: Target, kind: str) -> None:
    """V5ProducerAccessModeTest: testExclusiveRejects..., testWaitForExclusiveSucceeds..."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(kind)
        only = await scene.client.producer(topic, access_mode=AccessMode.EXCLUSIVE)
        await only.send(b"alone")
        with pytest.raises((ProducerBusy, ProducerFenced)):
            await scene.client.producer(topic, access_mode=AccessMode.EXCLUSIVE)
        waiting = asyncio.ensure_future(
            scene.client.producer(topic, access_mode=AccessMode.WAIT_FOR_EXCLUSIVE)
        )
        done, _ = await asyncio.wait([waiting], timeout=1.0)
        assert not done
        await only.close()
        next_one = await asyncio.wait_for(waiting, COMES_S)
        await next_one.send(b"mine now")
        async with await scene.client.producer(
            topic, access_mode=AccessMode.EXCLUSIVE_WITH_FENCING
        ) as fencing:
            await fencing.send(b"no longer")
            with pytest.raises(ProducerFenced):
                await next_one.send(b"too late")

    play(target, story)


@pytest.mark.parametrize("kind", KINDS)
def test_many_sends_at_once_are_limited_and_flushed(target: Target, kind: str) -> None:
    """V5ProducerFlowControlTest, V5AsyncApisTest.testAsyncProducerSendAndFlush."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(kind)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        async with await scene.client.producer(topic, max_pending=10) as producer:
            most = 0
            for number in range(500):
                await producer.submit(b"%d" % number, key=f"k{number % 7}")
                most = max(most, producer.pending)
            await producer.flush()
            assert producer.pending == 0
        assert most <= 10
        assert numbers(await drain(consumer, 500, consumer.ack)) == list(range(500))

    play(target, story)


@needs(Feature.CREATION)
def test_a_scalable_topic_is_created_by_its_first_user(target: Target) -> None:
    """V5ScalableTopicAutoCreateTest: one segment on the lookup of a producer or a consumer."""

    async def story(scene: Scene) -> None:
        topic = f"topic://{scene.namespace}/{scene.new_name('new')}"
        async with await scene.client.producer(topic) as producer:
            sent = await producer.send(b"first")
        assert isinstance(sent, ScalableMessageId)
        other = f"topic://{scene.namespace}/{scene.new_name('new')}"
        async with await scene.client.stream_consumer(other, "s") as consumer:
            assert consumer.segments == (0,)

    play(target, story)


@needs(Feature.ADMINISTRATION)
def test_keys_of_partitions_are_those_of_version_4(target: Target) -> None:
    """V5RegularTopicInteropTest.testV5ProducerToPartitionedRegularTopicRoutesV4Compatibly."""

    async def story(scene: Scene) -> None:
        topic = await scene.regular(partitions=3)
        async with await scene.client.producer(topic) as producer:
            for number in range(20):
                sent = await producer.send(b"x", key=f"k{number}")
                assert not isinstance(sent, ScalableMessageId)
                assert sent.partition == partition_of(key_hash(f"k{number}"), 3)

    play(target, story)
