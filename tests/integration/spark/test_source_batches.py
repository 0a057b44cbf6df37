"""Batch reads, columns and values, and what users get to read who make a mistake."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, In, LessThan
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from magnetar.client.schema import BOOL, INT32, STRING, AvroSchema, JsonSchema
from magnetar.errors import (
    DataLost,
    InvalidSetting,
    MagnetarError,
    NotConnected,
    TopicNotFound,
    UnreadableMessage,
)
from magnetar.spark.data_source import MagnetarSource
from magnetar.spark.source.filters import CLOCKS_MS
from magnetar.spark.source.readers import PushingBatchReader
from tests.integration.spark.stage import REGULAR, TOPIC, Row, Stage, rows_of


def by_number(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: int(row.value))


def numbers(rows: list[Row]) -> list[int]:
    return sorted(int(row.value) for row in rows)


def table(on: Stage, columns: StructType | None = None, **options: str) -> pa.Table:
    """A batch read as one table, its schema checked."""
    source = MagnetarSource(on.options(options))
    schema = source.schema() if columns is None else columns
    reader: Any = source.reader(schema)
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return pa.Table.from_batches(batches, to_arrow_schema(schema, timezone="UTC"))


# --- where it begins and ends


def test_everything_in_all_generations(on: Stage) -> None:
    on.send(40)
    on.split(0)
    on.send(40)
    on.merge(1, 2)
    on.send(40)
    on.send_in_transaction(3, commit=False)
    on.check(by_number(on.batch()))


def test_a_read_ends_where_it_was_planned(on: Stage) -> None:
    on.send(20)
    source = MagnetarSource(on.options({}))
    schema = source.schema()
    reader: Any = source.reader(schema)
    parts = reader.partitions()
    on.split(0)
    on.send(20)
    assert len([row for part in parts for row in rows_of(reader, part, schema)]) == 20


def test_from_an_offset_to_an_offset(on: Stage) -> None:
    on.send(20)
    query = on.query(startingOffsets="earliest", maxMessagesPerTrigger="5")
    query.step()
    query.step()
    first, last = query.offsets
    assert numbers(on.batch(startingOffsets=first, endingOffsets=last)) == numbers(query.batches[1])
    assert len(on.batch(startingOffsets=last)) == 10


def test_from_a_message_on(on: Stage) -> None:
    on.send(20, REGULAR)
    rows = by_number(on.batch(topic=REGULAR))
    start = json.dumps({REGULAR: {"0": rows[7].message_id}})
    assert by_number(on.batch(topic=REGULAR, startingOffsets=start)) == rows[7:]
    assert by_number(on.batch(topic=REGULAR, endingOffsets=start)) == rows[:7]


def test_between_times(on: Stage) -> None:
    on.send(10)
    _let_time_pass()
    middle = _now()
    on.send(10)
    on.split(0)
    on.send(10)
    assert numbers(on.batch(startingTimestamp=str(middle))) == list(range(10, 30))
    assert numbers(on.batch(endingTimestamp=str(middle))) == list(range(10))
    query = on.query(startingTimestamp=str(middle), pollWaitMs="0")
    query.drain()
    assert numbers(query.rows) == list(range(10, 30))
    late = {"startingTimestamp": str(_now() + 60_000)}
    assert on.batch(**late) == []
    with pytest.raises(InvalidSetting, match="nothing was published"):
        on.batch(**late, startingTimestampStrategy="error")


def _now() -> int:
    return time.time_ns() // 1_000_000


def _let_time_pass() -> None:
    """Until the clock shows another millisecond, twice."""
    end = _now() + 2
    while _now() < end:
        continue


def test_more_tasks_have_the_same_rows(on: Stage) -> None:
    for _ in range(20):
        on.send(10)
    source = MagnetarSource(on.options({"minPartitions": "6"}))
    assert len(source.reader(source.schema()).partitions()) >= 6
    on.check(by_number(on.batch(minPartitions="6")))
    on.check(by_number(on.batch(maxRecordsPerPartition="30")))


# --- push-down


def test_filters_spare_reading_and_leave_nothing_out(on: Stage) -> None:
    on.send(40)
    on.split(0)
    on.send(40)
    source = MagnetarSource(on.options({"pushdown": "true"}))
    schema = source.schema()

    def read(*filters: Any) -> list[Row]:
        reader: Any = source.reader(schema)
        assert isinstance(reader, PushingBatchReader)
        assert list(reader.pushFilters(list(filters))) == list(filters)
        return [row for part in reader.partitions() for row in rows_of(reader, part, schema)]

    assert {row.segment for row in read(EqualTo(("segment",), 1))} == {1}
    assert {row.segment for row in read(In(("segment",), (0, 2)))} == {0, 2}
    seen = []
    for key in on.sent:
        mine = read(EqualTo(("key",), key))
        assert len([row for row in mine if row.key == key]) == 10
        seen.append(len({row.segment for row in mine}))
    assert min(seen) == 2
    later = datetime.fromtimestamp((_now() + 2 * CLOCKS_MS) / 1000, UTC)
    assert read(GreaterThanOrEqual(("publishTime",), later)) == []
    assert len(read(LessThan(("publishTime",), later))) == 80


def test_without_push_down_there_is_no_filter(on: Stage) -> None:
    on.send(1)
    source = MagnetarSource(on.options({}))
    assert not isinstance(source.reader(source.schema()), PushingBatchReader)


# --- columns


def test_columns_about_the_message(on: Stage) -> None:
    with on.client.producer(TOPIC, name="maker") as producer:
        producer.send(b"\xff", key="a", properties={"x": "1", "y": "2"}, event_time=1_700)
        producer.send(b"", key=b"\xff\x00")
        producer.send(b"v")
    found = table(on, includeKeyBytes="true").to_pylist()
    first, second, third = found
    assert (first["value"], first["key"], first["topic"], first["segment"]) == (
        b"\xff",
        "a",
        TOPIC,
        0,
    )
    assert dict(first["properties"]) == {"x": "1", "y": "2"}
    assert second["properties"] == []
    assert first["eventTime"] == datetime.fromtimestamp(1.7, UTC)
    assert second["eventTime"] is None
    assert abs(first["publishTime"].timestamp() * 1000 - _now()) < 60_000
    assert (second["key"], second["keyBytes"]) == (None, b"\xff\x00")
    assert third["key"] is None
    assert [each["producerName"] for each in found] == ["maker"] * 3
    assert [each["sequenceId"] for each in found] == [0, 1, 2]
    ids = [tuple(map(int, each["messageId"].split(":"))) for each in found]
    assert ids == sorted(ids)


def test_fewer_columns(on: Stage) -> None:
    on.send(1)
    few = table(on, includeMetadata="false", includeProperties="false")
    assert few.column_names == ["value", "key", "topic"]


def test_the_names_of_another_connector(on: Stage) -> None:
    on.send(1)
    names = table(on, columnStyle="pulsar-spark").column_names
    assert {"__key", "__topic", "__messageId", "__publishTime", "__messageProperties"} <= set(names)


def test_columns_that_the_user_names(on: Stage) -> None:
    with on.client.producer(TOPIC) as producer:
        producer.send(b'{"id": 7, "more": 1, "tags": ["a"], "at": "2026-01-01T00:00:00Z"}', key="k")
    wanted = _columns(
        id=LongType(), tags=ArrayType(StringType()), at=TimestampType(), key=StringType()
    )
    (row,) = table(on, wanted).to_pylist()
    assert row == {"id": 7, "tags": ["a"], "at": datetime(2026, 1, 1, tzinfo=UTC), "key": "k"}
    assert table(on, _columns(value=StringType())).to_pylist()[0]["value"].startswith("{")
    assert table(on, _columns(key=StringType())).to_pylist() == [{"key": "k"}]
    with pytest.raises(InvalidSetting, match="publishTime is timestamp, not string"):
        table(on, _columns(publishTime=StringType()))


def _columns(**kinds: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


# --- values by the topic's schema


@dataclass
class Line:
    """A part of an order."""

    item: str
    price: float


@dataclass
class Order:
    """A record with a bit of everything."""

    id: int
    key: str
    lines: list[Line]
    notes: dict[str, str]
    paid: bool = False
    comment: str | None = None


ORDER = Order(7, "mine", [Line("pen", 1.5)], {"a": "b"}, comment="ok")


@pytest.mark.parametrize("kind", [JsonSchema, AvroSchema])
def test_records_are_columns(on: Stage, kind: Any) -> None:
    with on.client.producer(TOPIC, schema=kind(Order)) as producer:
        producer.send(ORDER, key="k")
        producer.send(Order(8, "", [], {}), key="k")
    first, second = table(on).to_pylist()
    assert (first["id"], first["key"], first["__key"]) == (7, "mine", "k")
    assert first["lines"] == [{"item": "pen", "price": 1.5}]
    assert dict(first["notes"]) == {"a": "b"}
    assert (first["paid"], first["comment"]) == (False, "ok")
    assert (second["lines"], second["comment"]) == ([], None)
    assert first["schemaVersion"] == 0
    assert table(on, valueFormat="bytes").to_pylist()[0]["value"]


@dataclass
class Plain:
    """Fields that Arrow reads all at once."""

    id: int
    name: str
    tags: list[str]


def test_plain_json_is_read_at_once_and_odd_json_too(on: Stage) -> None:
    with on.client.producer(TOPIC, schema=JsonSchema(Plain)) as producer:
        producer.send(Plain(1, "ü", ["a"]))
    with on.client.producer(TOPIC) as raw:
        raw.send(b'{"id": 2,\n "other": {"x": 1}}')
        raw.send(b'{"id": 3, "name": null, "tags": []}')
    found = [(each["id"], each["name"], each["tags"]) for each in table(on).to_pylist()]
    assert found == [(1, "ü", ["a"]), (2, None, None), (3, None, [])]


@dataclass
class OrderBefore:
    """An earlier version."""

    id: int


@dataclass
class OrderAfter:
    """A later one."""

    id: int
    note: str = "none"


def test_avro_of_an_older_schema_is_read_with_its_own(on: Stage) -> None:
    with on.client.producer(TOPIC, schema=AvroSchema(OrderBefore)) as producer:
        producer.send(OrderBefore(1))
    _renamed(OrderAfter, "OrderBefore")
    with on.client.producer(TOPIC, schema=AvroSchema(OrderAfter)) as producer:
        producer.send(OrderAfter(2, "new"))
    found = [(each["id"], each["note"]) for each in table(on).to_pylist()]
    assert found == [(1, "none"), (2, "new")]


def _renamed(record: type, name: str) -> None:
    """Avro knows a record by its name."""
    record.__name__ = name


@pytest.mark.parametrize(
    ("schema", "value"), [(STRING, "grün"), (INT32, -5), (BOOL, True)], ids=["text", "int", "bool"]
)
def test_single_values(on: Stage, schema: Any, value: Any) -> None:
    with on.client.producer(TOPIC, schema=schema) as producer:
        producer.send(value)
    assert table(on).to_pylist()[0]["value"] == value


def test_what_cannot_be_read_fails_or_is_null(on: Stage) -> None:
    with on.client.producer(TOPIC, schema=JsonSchema(Plain)) as producer:
        producer.send(Plain(1, "a", []))
    with on.client.producer(TOPIC) as raw:
        raw.send(b"not json")
        raw.send(b'{"id": "seven"}')
    with pytest.raises(UnreadableMessage, match=f"in segment 0 of {TOPIC} cannot be read") as told:
        table(on)
    assert 'set corruptRecord to "null"' in str(told.value)
    first, second, third = table(on, corruptRecord="null").to_pylist()
    assert (first["id"], first["_error"]) == (1, None)
    assert (second["id"], third["id"]) == (None, None)
    assert second["_error"]
    assert third["_error"]


# --- mistakes


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"topic": "nowhere"}, TopicNotFound, "is topic://public/default/nowhere meant?"),
        ({"topic": "://"}, MagnetarError, "use one of persistent"),
        ({"topic": TOPIC, "topics": "a"}, InvalidSetting, "leave one of them out"),
        ({"topic": f"{TOPIC}/", "serviceUrl": "http://x"}, MagnetarError, "use pulsar://"),
        ({"serviceUrl": "pulsar://127.0.0.1:1"}, NotConnected, "is the option serviceUrl right"),
        ({"topicsPattern": "a(", "topic": ""}, InvalidSetting, "it is empty"),
        ({"topicsPattern": "a("}, InvalidSetting, "is no regular expression"),
        ({"startingOffsets": "soon"}, InvalidSetting, "use earliest, latest"),
        ({"startingOffsets": "latest", "startingTimestamp": "7"}, InvalidSetting, "leave one"),
        ({"endingOffsets": "earliest"}, InvalidSetting, "cannot end at earliest"),
        ({"valueFormat": "avro"}, InvalidSetting, 'set valueFormat to "bytes"'),
        ({"valueFormat": "json"}, InvalidSetting, "give them to Spark with .schema(...)"),
        ({"maxMessagesPerTrigger": "5"}, InvalidSetting, "means nothing to a batch read"),
        ({"path": "orders"}, InvalidSetting, "a topic is no path"),
    ],
)
def test_a_mistake_gets_one_message_with_the_next_step(
    on: Stage, options: dict[str, str], error: type[MagnetarError], said: str
) -> None:
    on.send(1)
    given = {"operationTimeoutMs": "300"} | options
    with pytest.raises(error) as raised:
        on.batch(**given)
    assert said in str(raised.value)


def test_topics_with_different_schemas_are_not_read_together(on: Stage) -> None:
    on.client.producer("topic://public/default/a", schema=JsonSchema(Plain)).close()
    on.client.producer("topic://public/default/b", schema=STRING).close()
    with pytest.raises(InvalidSetting, match="have different schemas"):
        on.batch(topics="topic://public/default/a,topic://public/default/b")


def test_an_offset_of_a_deleted_topic_is_refused(on: Stage) -> None:
    on.send(5)
    query = on.query(startingOffsets="earliest")
    query.drain()
    on.delete()
    on.send(5)
    with pytest.raises(InvalidSetting, match="an earlier topic with the name"):
        on.batch(startingOffsets=query.offsets[-1])


def test_a_task_whose_data_is_gone_says_so(on: Stage) -> None:
    on.send(5)
    query = on.query(startingOffsets="earliest")
    end = query.plan()
    on.delete()
    on.send(5)
    with pytest.raises(DataLost, match="was deleted before all of it was read"):
        query.reader.partitions(query.reader.initialOffset(), json.loads(end))
