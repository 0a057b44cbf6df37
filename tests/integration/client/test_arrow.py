"""Messages as Arrow record batches: what they hold, what is acknowledged by them, what is sent."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from magnetar.client.arrow import arrow
from magnetar.client.arrow.arrow import UNREADABLE, columns, record_batch
from magnetar.client.client import Client
from magnetar.client.consume.checkpoint import FROM_EARLIEST
from magnetar.client.consume.receiving import Receiving
from magnetar.client.message.message import Message
from magnetar.errors import InvalidSetting, InvalidValue, UnreadableMessage
from magnetar.model.ids import Position
from magnetar.model.subscriptions import InitialPosition
from magnetar.wire.compression import Compression
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.client.nowhere import Nowhere
from tests.unit.server.serving import serving

pa: Any = import_module("pyarrow")

REGULAR = "persistent://public/default/regular"
SCALABLE = "topic://public/default/scalable"
FIRST = InitialPosition.EARLIEST
TOPICS = pytest.mark.parametrize("topic", [REGULAR, SCALABLE])


async def rows(consumer: Receiving[bytes], count: int, each_max: int = 10_000) -> Any:
    batches: list[Any] = []
    while sum(batch.num_rows for batch in batches) < count:
        batch = await consumer.receive_arrow(each_max, timeout=5)
        assert batch.num_rows, "nothing more came"
        assert batch.num_rows <= each_max
        batches.append(batch)
    return pa.Table.from_batches(batches)


def consumer_of(client: Client, topic: str, name: str = "sub") -> Any:
    make = client.consumer if topic == REGULAR else client.queue_consumer
    return make(topic, name, initial_position=FIRST)


@TOPICS
def test_rows_are_the_messages(tmp_path: Path, topic: str) -> None:
    async def story() -> None:
        async with serving(tmp_path) as server, Client(server.service_url) as client:
            producer = await client.producer(topic, name="maker", compression=Compression.ZSTD)
            consumer = await consumer_of(client, topic)
            plain = await consumer_of(client, topic, "plain")
            empty = await consumer.receive_arrow(timeout=0.01)
            assert (empty.num_rows, empty.schema) == (0, columns())
            for number in range(300):
                await producer.submit(
                    None if number % 50 == 49 else b"%d" % number,
                    key=(f"k{number % 5}", b"\xff%d" % number, None)[number % 3],
                    properties={"n": str(number)} if number % 4 == 0 else {},
                    event_time=1000 + number if number % 2 else None,
                )
            await producer.flush()
            await producer.send(b"alone")
            table = await rows(consumer, 301, each_max=70)
            expected = [await plain.receive(5) for _ in range(301)]
            assert table.schema == columns()
            by_place = {place_of(message): message for message in expected}
            assert len(by_place) == 301
            for row in table.to_pylist():
                check_row(row, by_place.pop(place_in(row)))
            assert not by_place

    asyncio.run(story())


def place_of(message: Any) -> tuple[Any, ...]:
    raw = message._raw_id
    return (message._source.segment_id, *raw.position, raw.batch_index)


def place_in(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row["segment_id"], row["ledger_id"], row["entry_id"], row["batch_index"])


def check_row(row: dict[str, Any], message: Any) -> None:
    assert row["value"] == (None if message.is_null else message.value)
    assert row["key"] == message.key_bytes
    assert dict(row["properties"]) == message.properties
    assert row["publish_time"] == datetime.fromtimestamp(message.publish_time_ms / 1000, UTC)
    event_time = message.event_time_ms
    at = None if event_time is None else datetime.fromtimestamp(event_time / 1000, UTC)
    assert row["event_time"] == at
    assert row["topic"] == message.topic
    assert row["producer"] == message.producer_name == "maker"
    assert row["sequence_id"] == message.sequence_id
    assert row["partition"] == message._raw_id.partition


@TOPICS
def test_a_part_of_the_rows_acknowledges_just_these(tmp_path: Path, topic: str) -> None:
    async def story() -> None:
        async with serving(tmp_path) as server, Client(server.service_url) as client:
            async with await client.producer(topic) as producer:
                for number in range(100):
                    await producer.submit(b"%d" % number)
            async with await consumer_of(client, topic) as consumer:
                table = await rows(consumer, 100)
                even = [int(value) % 2 == 0 for value in table["value"].to_pylist()]
                for batch in table.filter(pa.array(even)).to_batches():
                    await consumer.ack_arrow(batch)
            async with await consumer_of(client, topic) as consumer:
                left = await rows(consumer, 50)
                values = sorted(int(value) for value in left["value"].to_pylist())
                assert values == list(range(1, 100, 2))
                async with client.transaction() as txn:
                    for batch in left.to_batches():
                        consumer.ack_arrow(batch, txn=txn)
            async with await consumer_of(client, topic) as consumer:
                assert (await consumer.receive_arrow(timeout=0.2)).num_rows == 0

    asyncio.run(story())


def test_a_stream_is_acknowledged_up_to_the_last_row(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as server, Client(server.service_url) as client:
            async with await client.producer(SCALABLE) as producer:
                for number in range(100):
                    await producer.submit(b"%d" % number, key="k")
            async with await client.stream_consumer(
                SCALABLE, "s", initial_position=FIRST
            ) as stream:
                table = await rows(stream, 100, each_max=64)
                backwards = table.slice(0, 40).take(list(reversed(range(40))))
                await stream.ack_arrow(backwards)
            async with await client.stream_consumer(SCALABLE, "s") as stream:
                left = await rows(stream, 60)
                assert [int(value) for value in left["value"].to_pylist()] == list(range(40, 100))

    asyncio.run(story())


def test_rows_and_messages_can_be_mixed(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as server, Client(server.service_url) as client:
            consumer = await client.checkpoint_consumer(SCALABLE, start=FROM_EARLIEST)
            producer = await client.producer(SCALABLE)
            assert (await consumer.receive_arrow(timeout=0.01)).num_rows == 0
            for number in range(90):
                await producer.submit(b"%d" % number, key="k")
            await producer.flush()
            found = (await rows(consumer, 10, each_max=10))["value"].to_pylist()
            found += [(await consumer.receive(5)).value for _ in range(10)]
            place = consumer.checkpoint()
            found += (await rows(consumer, 70))["value"].to_pylist()
            assert found == [b"%d" % number for number in range(90)]
            async with await client.checkpoint_consumer(SCALABLE, start=place) as other:
                assert (await rows(other, 70))["value"].to_pylist() == found[20:]

    asyncio.run(story())


@TOPICS
def test_a_batch_is_sent_row_by_row(tmp_path: Path, topic: str) -> None:
    async def story() -> None:
        async with serving(tmp_path) as server, Client(server.service_url) as client:
            consumer = await consumer_of(client, topic)
            producer = await client.producer(topic)
            time = datetime(2026, 1, 2, tzinfo=UTC)
            sent: dict[str, list[Any]] = {
                "key": ["a", None, "b"],
                "value": ["x", "y", None],
                "event_time": [time, None, time],
                "properties": [{"p": "1"}, None, {}],
            }
            kind = pa.map_(pa.string(), pa.string())
            fields = {"key": pa.string(), "value": pa.string(), "properties": kind}
            fields["event_time"] = pa.timestamp("us", tz="UTC")
            schema = pa.schema([(name, fields[name]) for name in sent])
            batch = pa.RecordBatch.from_pydict(
                {**sent, "properties": [list((each or {}).items()) for each in sent["properties"]]},
                schema=schema,
            )
            assert await producer.send_arrow(batch) == 3
            got = sorted((await rows(consumer, 3)).to_pylist(), key=lambda row: row["sequence_id"])
            by_value = {row["value"]: row for row in got}
            assert by_value.keys() == {b"x", b"y", None}
            assert (by_value[b"x"]["key"], by_value[b"y"]["key"]) == (b"a", None)
            assert by_value[b"x"]["event_time"] == time
            assert by_value[b"x"]["properties"] == [("p", "1")]
            # What was received can be sent as it is.
            again = await producer.send_arrow(pa.RecordBatch.from_pylist(got, columns()))
            assert again == 3
            for wrong in (pa.RecordBatch.from_pydict({"payload": [b"x"]}), [b"x"]):
                with pytest.raises(InvalidValue):
                    await producer.send_arrow(wrong)
            with pytest.raises(InvalidValue):
                consumer.ack_arrow(batch)

    asyncio.run(story())


def test_what_cannot_be_read_is_a_row_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise UnreadableMessage("broken on purpose")

    async def story() -> None:
        async with serving(tmp_path) as server, Client(server.service_url) as client:
            consumer = await consumer_of(client, REGULAR)
            await (await client.producer(REGULAR)).send(b"x", properties={"not": "plain"})
            batch = await consumer.receive_arrow(timeout=5)
            (row,) = batch.to_pylist()
            assert row["value"] is None
            assert "on purpose" in dict(row["properties"])[UNREADABLE]
            await consumer.ack_arrow(batch)

    monkeypatch.setattr("magnetar.client.consume.segment.entry_intake.read_entry", broken)
    asyncio.run(story())


def test_a_cancelled_send_takes_nothing_back(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as server, Client(server.service_url) as client:
            consumer = await consumer_of(client, REGULAR)
            producer = await client.producer(REGULAR)
            batch = pa.RecordBatch.from_pydict({"value": [b"%d" % n for n in range(100)]})
            sending = asyncio.create_task(producer.send_arrow(batch))
            await asyncio.sleep(0)
            assert producer.pending == 100
            sending.cancel()
            assert (await asyncio.gather(sending, return_exceptions=True))[0] is not None
            assert (await rows(consumer, 100)).num_rows == 100

    asyncio.run(story())


def test_whatever_the_wire_carries_fits_into_the_columns() -> None:
    metadata = pb.MessageMetadata(
        producer_name="p-seg-3",
        sequence_id=2**64 - 1,
        publish_time=2**64 - 1,
        event_time=2**64 - 1,
        partition_key="%%",
        partition_key_b64_encoded=True,
    )
    message: Message[bytes] = Message(
        source=Nowhere(),
        position=Position(1, 2),
        data=b"x",
        metadata=metadata,
        single=None,
        decode=lambda data, _: data,
        redelivery_count=2**32 - 1,
    )
    (row,) = record_batch([message]).to_pylist()
    assert (row["value"], row["key"], row["producer"]) == (b"x", None, "p")
    assert (row["sequence_id"], row["batch_index"], row["batch_size"]) == (-1, -1, 0)
    assert row["publish_time"] == row["event_time"] < datetime(1970, 1, 1, tzinfo=UTC)


def test_without_pyarrow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(arrow, "import_module", missing)
    with pytest.raises(InvalidSetting, match="pyarrow") as caught:
        arrow.pyarrow()
    assert "magnetar[arrow]" in str(caught.value.hint)


def test_no_rows_are_an_empty_batch() -> None:
    assert record_batch([]).num_rows == 0
