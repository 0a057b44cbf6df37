"""A producer of the Python client with a real broker: where messages go, and in which form."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from harness.simulation.seeds import EPOCH_MS
from magnetar.client.message.message import AnyMessageId
from magnetar.client.produce.settings import AccessMode
from magnetar.client.schema import STRING, JsonSchema
from magnetar.errors import (
    AlreadyClosed,
    IncompatibleSchema,
    InvalidSetting,
    InvalidValue,
    MessageTooLarge,
    NotAllowed,
    NotConnected,
    ProducerBusy,
    ProducerFenced,
    ProducerQueueFull,
    SendTimedOut,
    TopicTerminated,
)
from magnetar.model.hashing import key_hash, partition_of
from magnetar.model.ids import MessageId, ScalableMessageId
from magnetar.model.names import TopicName
from magnetar.wire.compression import Compression
from tests.integration.client.stage import Kept, new_client, play, stored
from tests.integration.server.scalable_stage import NAME, Stage

REGULAR = "persistent://public/default/regular"


def test_messages_of_a_scalable_topic_are_stored_once_in_the_order_of_their_keys() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(3)
        kept = Kept()
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            await kept.send_many(producer, 500)
            await producer.flush()
            assert producer.pending == 0
            ids = [receipt.result() for _, _, receipt in kept.receipts]
        assert len(set(ids)) == 500
        assert {each.segment_id for each in ids if isinstance(each, ScalableMessageId)} == {0, 1, 2}
        await kept.check(stage)
        entries = {(each.topic, each.entry.sequence_id) for each in await stored(stage)}
        assert len(entries) < 100, "they went in batches"

    play(story)


def test_a_regular_topic_gets_the_plain_name_and_plain_ids() -> None:
    async def story(stage: Stage) -> None:
        kept = Kept()
        async with (
            new_client(stage) as client,
            await client.producer(REGULAR, name="me", properties={"team": "x"}) as producer,
        ):
            assert (producer.name, producer.topic, producer.last_sequence_id) == ("me", REGULAR, -1)
            first = await producer.send(b"a", key="k")
            assert isinstance(first, MessageId)
            assert (first.partition, first.batch_index) == (-1, -1)
            kept.sent["k"].append(b"a")
            await kept.send_many(producer, 50)
            await producer.flush()
            assert producer.last_sequence_id == 50
        await kept.check(stage, REGULAR)
        found = await stored(stage, REGULAR)
        assert {each.entry.producer_name for each in found} == {"me"}
        assert [each.sequence_id for each in found] == list(range(51))
        assert found[0].entry.publish_time >= EPOCH_MS

    play(story)


def test_partitions_get_keys_as_version_4_does_and_others_in_turn() -> None:
    async def story(stage: Stage) -> None:
        name = TopicName.parse(REGULAR)
        await stage.host.ask(lambda server: server.context.topics.create_partitioned(name, 3))
        async with new_client(stage) as client, await client.producer(REGULAR) as producer:
            sent = await asyncio.gather(
                *(producer.send(b"%d" % number, key=f"k{number}") for number in range(40))
            )
            for number, each in enumerate(sent):
                assert isinstance(each, MessageId)
                assert each.partition == partition_of(key_hash(f"k{number}"), 3)
            turns: Counter[int] = Counter()
            for _ in range(30):
                each = await producer.send(b"no key")
                assert isinstance(each, MessageId)
                turns[each.partition] += 1
        assert set(turns) == {0, 1, 2}
        # One partition alone can be written to as well.
        async with (
            new_client(stage) as client,
            await client.producer(f"{REGULAR}-partition-2") as producer,
        ):
            assert isinstance(await producer.send(b"one"), MessageId)

    play(story)


@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize("batching", [True, False])
def test_compression(compression: Compression, batching: bool) -> None:
    async def story(stage: Stage) -> None:
        kept = Kept()
        async with (
            new_client(stage) as client,
            await client.producer(NAME, compression=compression, batching=batching) as producer,
        ):
            for number in range(20):
                await kept.send(producer, f"k{number % 3}", b"%d " % number * 50)
            await producer.flush()
        await kept.check(stage)
        for each in await stored(stage):
            assert int(each.entry.compression) == compression
            assert each.entry.HasField("num_messages_in_batch") <= batching

    play(story)


def test_what_a_message_says_beside_its_value() -> None:
    moment = datetime(2026, 1, 2, tzinfo=UTC)

    async def story(stage: Stage) -> None:
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            await asyncio.gather(
                producer.send(b"p", key="a", properties={"x": "y"}, event_time=moment),
                producer.send(b"o", key="b", ordering_key=b"\xff"),
                producer.send(b"later", key="c", deliver_after=timedelta(seconds=5)),
                producer.send(b"", key=b"\x00bytes"),
            )
            with pytest.raises(InvalidValue, match="exclude"):
                await producer.send(b"x", deliver_at=1, deliver_after=1)
            with pytest.raises(InvalidValue, match="time zone"):
                await producer.send(b"x", event_time=moment.replace(tzinfo=None))
            with pytest.raises(InvalidValue, match="0 or more, not -1"):
                await producer.send(b"x", sequence_id=-1)
            with pytest.raises(InvalidValue, match="1970"):
                await producer.send(b"x", event_time=-1)
            assert producer.pending == 0
        found = {each.payload: each.entry for each in await stored(stage)}
        assert len(found) == 4
        assert found[b"later"].deliver_at_time == pytest.approx(EPOCH_MS + 5000, abs=60_000)
        assert not found[b"later"].HasField("num_messages_in_batch")

    play(story)


def test_large_messages_are_refused_or_cut() -> None:
    large = bytes(range(256)) * (6 * 4096)

    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            async with await client.producer(REGULAR) as producer:
                with pytest.raises(MessageTooLarge, match="chunking"):
                    await producer.send(large)
                await producer.send(b"small")
                packed = await client.producer(REGULAR, compression=Compression.ZSTD)
                await packed.send(large)
            async with await client.producer(REGULAR, chunking=True) as cutting:
                before = [await cutting.submit(b"before")]
                await cutting.send(large)
                await cutting.send(b"after")
                assert before[0].done()
        found = await stored(stage, REGULAR)
        chunks = [each for each in found if each.entry.num_chunks_from_msg > 1]
        assert b"".join(each.payload for each in chunks) == large
        assert [each.entry.chunk_id for each in chunks] == [0, 1]
        assert [each.payload for each in found if each not in chunks] == [
            b"small", large, b"before", b"after",
        ]  # fmt: skip

    play(story)


@dataclass
class Order:
    number: int
    what: str


def test_values_are_checked_and_versions_told() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            producer = await client.producer(NAME, schema=JsonSchema(Order))
            await producer.send(Order(1, "x"), key="k")
            await producer.send(None, key="k")
            with pytest.raises(InvalidValue):
                await producer.send("text", key="k")  # type: ignore[arg-type]
            with pytest.raises(IncompatibleSchema):
                await client.producer(NAME, schema=STRING)
            texts = await client.producer(REGULAR, schema=STRING)
            await texts.send("text")
        found = await stored(stage)
        assert [each.entry.null_value for each in found] == [False, True]
        assert json.loads(found[0].payload) == {"number": 1, "what": "x"}
        assert {len(each.entry.schema_version) for each in found} == {8}

    play(story)


def test_closing_the_client_ends_what_is_being_opened() -> None:
    async def story(stage: Stage) -> None:
        client = new_client(stage)
        await client.producer(NAME, access_mode=AccessMode.EXCLUSIVE)
        opening = [
            asyncio.create_task(client.producer(NAME, access_mode=AccessMode.WAIT_FOR_EXCLUSIVE)),
            asyncio.create_task(client.producer(REGULAR)),
        ]
        await asyncio.sleep(0.001)
        begun = asyncio.get_running_loop().time()
        await client.close()
        ends = await asyncio.gather(*opening, return_exceptions=True)
        assert [type(each) for each in ends] == [AlreadyClosed, AlreadyClosed]
        assert asyncio.get_running_loop().time() - begun < 5

    play(story)


# --- limits


def test_whoever_sends_more_than_fits_waits_in_the_order_of_coming() -> None:
    async def story(stage: Stage) -> None:
        kept = Kept()
        async with (
            new_client(stage) as client,
            await client.producer(NAME, max_pending=5, batching=False) as producer,
        ):
            tasks = [
                asyncio.create_task(kept.send(producer, "k", b"%d" % number))
                for number in range(100)
            ]
            most = 0
            while not all(task.done() for task in tasks):
                most = max(most, producer.pending)
                await asyncio.sleep(0.001)
            await producer.flush()
            assert most == 5
        assert kept.sent["k"] == [b"%d" % number for number in range(100)]
        await kept.check(stage)

    play(story)


def test_bytes_are_limited_for_all_producers_of_a_client() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage, memory_limit=10_000) as client:
            one, two = await client.producer(NAME), await client.producer(REGULAR)
            sends = [each.send(bytes(3000)) for _ in range(20) for each in (one, two)]
            tasks = [asyncio.create_task(each) for each in sends]
            for _ in range(50):
                assert client._memory.taken <= 10_000
                await asyncio.sleep(0.001)
            await asyncio.gather(*tasks)
            await one.send(bytes(50_000))  # more than all of it: alone
            assert client._memory.taken == 0

    play(story)


def test_a_send_without_a_receipt_fails_in_time_and_a_full_queue_says_so() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            producer = await client.producer(REGULAR, send_timeout=5, max_pending=2)
            await producer.send(b"first")
            await stage.host.kill()
            begun = asyncio.get_running_loop().time()
            receipts = [await producer.submit(b"lost") for _ in range(2)]
            with pytest.raises(ProducerQueueFull, match="no room"):
                await asyncio.wait_for(producer.send(b"more", sequence_id=9), 100)
            for each in receipts:
                with pytest.raises(SendTimedOut, match="no receipt within 5"):
                    await each
            assert asyncio.get_running_loop().time() - begun < 6
            assert producer.pending == 0
            assert await stage.host.start()
            await producer.send(b"again")
            await producer.close()

    play(story, disk=True)


def test_cancelling_a_send_takes_nothing_back() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            task = asyncio.create_task(producer.send(b"sent", key="k"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
            await producer.flush()
            assert producer.pending == 0
        assert [each.payload for each in await stored(stage)] == [b"sent"]

    play(story)


# --- sequence ids


def test_a_named_producer_goes_on_where_it_was_and_repetitions_are_dropped() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        for run in range(3):
            async with (
                new_client(stage) as client,
                await client.producer(NAME, name="worker") as producer,
            ):
                assert producer.last_sequence_id == (-1 if run == 0 else run * 10 - 1)
                for number in range(10):
                    await producer.send(b"%d" % (run * 10 + number), key=f"k{number}")
        async with (
            new_client(stage) as client,
            await client.producer(NAME, name="worker") as producer,
        ):
            again = await producer.send(b"again", key="k3", sequence_id=13)
            assert isinstance(again, ScalableMessageId)
            assert again.message_id.ledger_id == -1
            await asyncio.gather(
                *(producer.send(b"n", key=f"k{each % 5}", sequence_id=100 + 7 * each)
                  for each in range(20))
            )  # fmt: skip
            assert producer.last_sequence_id == 100 + 7 * 19
            await producer.send(b"next", key="k3")
            assert producer.last_sequence_id == 100 + 7 * 19 + 1
        found = await stored(stage)
        assert len(found) == 51
        assert b"again" not in {each.payload for each in found}

    play(story)


def test_ids_of_an_application_are_kept_in_batches_of_any_bucket() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()  # one segment with four entry buckets
        kept = Kept()
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            for number in range(200):
                key = f"k{number // 7 % 9}"
                await kept.send(producer, key, b"%d" % number, sequence_id=3 * number)
            await producer.flush()
        await kept.check(stage)
        assert [each.sequence_id for each in await stored(stage)] == [3 * n for n in range(200)]

    play(story)


# --- access modes


@pytest.mark.parametrize("topic", [NAME, REGULAR])
def test_access_modes(topic: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as one, new_client(stage) as two:
            first = await one.producer(topic, access_mode=AccessMode.EXCLUSIVE)
            with pytest.raises(ProducerBusy):
                await two.producer(topic)
            with pytest.raises(ProducerFenced):
                await two.producer(topic, access_mode=AccessMode.EXCLUSIVE)
            waiting = asyncio.create_task(
                two.producer(topic, access_mode=AccessMode.WAIT_FOR_EXCLUSIVE)
            )
            await asyncio.sleep(100)
            assert not waiting.done()
            await first.send(b"first")
            await first.close()
            second = await waiting
            await second.send(b"second")
            third = await one.producer(topic, access_mode=AccessMode.EXCLUSIVE_WITH_FENCING)
            await third.send(b"third")
            await asyncio.sleep(10)
            with pytest.raises(ProducerFenced):
                await second.send(b"too late")
            with pytest.raises(ProducerFenced):
                await second.send(b"still")
            await third.close()
        assert len(await stored(stage, topic)) == 3

    play(story)


# --- wrong use


def test_wrong_use_gets_one_clear_error() -> None:
    async def story(stage: Stage) -> None:
        client = new_client(stage, operation_timeout=5)
        with pytest.raises(NotAllowed, match="is a segment"):
            await client.producer("segment://public/default/orders/0000-ffff-0")
        with pytest.raises(InvalidSetting, match="max_pending"):
            await client.producer(NAME, max_pending=0)
        producer = await client.producer(REGULAR)
        await producer.send(b"x")
        await client.close()
        for use in (producer.send(b"y"), client.producer(NAME)):
            with pytest.raises(AlreadyClosed):
                await use
        await producer.close()
        await client.close()

    play(story)


def test_a_server_that_is_not_there() -> None:
    async def story(stage: Stage) -> None:
        client = new_client(stage, operation_timeout=5)
        await stage.host.stop()
        begun = asyncio.get_running_loop().time()
        with pytest.raises(NotConnected, match="cannot be reached"):
            await client.producer(NAME)
        assert asyncio.get_running_loop().time() - begun <= 6
        await client.close()

    play(story)


def test_a_regular_topic_that_was_terminated_refuses_soon() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client, await client.producer(REGULAR) as producer:
            await producer.send(b"x")
            name = TopicName.parse(REGULAR)

            async def terminate(server: object) -> None:
                topic = await stage.host.server.context.topics.get(name, create=False)
                await topic.terminate()

            await stage.host.ask(terminate)
            begun = asyncio.get_running_loop().time()
            with pytest.raises(TopicTerminated):
                await producer.send(b"y")
            assert asyncio.get_running_loop().time() - begun < 10

    play(story)


def test_close_sends_what_was_handed_in_and_fails_what_it_cannot() -> None:
    async def story(stage: Stage) -> None:
        client = new_client(stage, operation_timeout=5)
        producer = await client.producer(NAME)
        receipts: list[asyncio.Future[AnyMessageId]] = [
            await producer.submit(b"%d" % number, key="k") for number in range(50)
        ]
        await client.close()
        assert all(each.exception() is None for each in receipts)
        assert len(await stored(stage)) == 50
        client = new_client(stage, operation_timeout=5)
        producer = await client.producer(NAME)
        await stage.host.kill()
        late = await producer.submit(b"late")
        await client.close()
        with pytest.raises(AlreadyClosed):
            await late
        assert await stage.host.start()

    play(story, disk=True)
