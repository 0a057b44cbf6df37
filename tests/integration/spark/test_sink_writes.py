"""The sink without Spark: tasks and driver are called by hand, with a real server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from harness.limits import PATIENCE_S
from magnetar.client.schema import AutoSchema, AvroSchema, JsonSchema
from magnetar.errors import (
    CheckpointMismatch,
    GroupFenced,
    InvalidSetting,
    InvalidValue,
    MagnetarError,
    TransactionAborted,
    WriterConflict,
)
from magnetar.spark import links
from magnetar.spark.option_table import Use
from magnetar.spark.options import parse
from magnetar.spark.sink.writers import batch_writer, stream_writer
from tests.integration.spark.reading import check_numbers
from tests.integration.spark.writing import KEYED, TOPIC, Writing, rows, tasks, write_id, writing_to


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[Writing]:
    with writing_to(tmp_path) as writing:
        yield writing


def test_a_batch_is_there_when_it_is_committed(writing: Writing) -> None:
    sink = writing.sink()
    for batch in range(3):
        start = batch * 20
        done = tasks(sink, write_id(batch), range(start, start + 10), range(start + 10, start + 20))
        assert [each.part.rows for each in done] == [10, 10]
        assert len(writing.found(start)) == start
        sink.commit(batch, done)
    check_numbers(writing.found(60), range(60))


def test_a_batch_that_comes_again_is_skipped_also_with_other_tasks(writing: Writing) -> None:
    sink = writing.sink()
    sink.commit(0, tasks(sink, write_id(0), range(10), range(10, 20)))
    # The driver died before it wrote this down; another run has other tasks.
    again = tasks(sink, write_id(0, "run-2"), range(20), [])
    assert [each.part.is_skipped for each in again] == [True, False]
    assert again[0].part.rows == 20
    sink.commit(0, again)
    sink.commit(1, tasks(sink, write_id(1, "run-2"), range(20, 30)))
    check_numbers(writing.found(30), range(30))


def test_attempts_that_lost_are_not_there(writing: Writing) -> None:
    sink = writing.sink()
    loser, winner = tasks(sink, write_id(0), range(10), range(10))
    sink.commit(0, [winner])
    with pytest.raises(MagnetarError):
        sink.commit(1, [loser])
    check_numbers(writing.found(10), range(10))


def test_an_attempt_that_fails_aborts_what_it_wrote(writing: Writing) -> None:
    sink = writing.sink()

    def failing() -> Iterator[pa.RecordBatch]:
        yield rows(range(5))
        raise RuntimeError("the task is lost")

    with pytest.raises(RuntimeError):
        sink.write(failing(), write_id(0))
    sink.commit(0, tasks(sink, write_id(0), range(5)))
    check_numbers(writing.found(5), range(5))


def test_spark_may_abort_before_and_after_a_commit(writing: Writing) -> None:
    sink = writing.sink()
    given_up = tasks(sink, write_id(0), range(10))
    sink.abort([*given_up, None])
    with pytest.raises(TransactionAborted, match="transactionTimeout"):
        sink.commit(0, given_up)
    done = tasks(sink, write_id(0), range(10))
    sink.commit(0, done)
    sink.abort(done)
    check_numbers(writing.found(10), range(10))


def test_the_answer_to_a_commit_may_be_lost(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    from magnetar.client.connection.connection import BrokerConnection
    from magnetar.errors import ConnectionLost

    sink = writing.sink()
    asked = []
    real = BrokerConnection.request

    async def request(self: BrokerConnection, what: str, **fields: Any) -> Any:
        answer = await real(self, what, **fields)
        if what == "COMMIT_GROUP":
            asked.append(answer.replayed)
            if len(asked) == 1:
                raise ConnectionLost("the answer never came")
        return answer

    monkeypatch.setattr(BrokerConnection, "request", request)
    sink.commit(0, tasks(sink, write_id(0), range(10)))
    assert asked == [False, True]
    check_numbers(writing.found(10), range(10))


def test_a_run_that_was_replaced_can_neither_write_nor_commit(writing: Writing) -> None:
    sink = writing.sink()
    ready = tasks(sink, write_id(0, "run-1"), range(10))
    sink.commit(0, tasks(sink, write_id(0, "run-2"), range(10)))
    with pytest.raises(GroupFenced, match="only the last one goes on"):
        sink.commit(0, ready)
    with pytest.raises(GroupFenced):
        tasks(sink, write_id(1, "run-1"), range(10, 20))
    check_numbers(writing.found(10), range(10))


def test_a_transaction_that_takes_too_long_fails_its_batch(writing: Writing) -> None:
    sink = writing.sink(transactionTimeout="300ms")

    def slow() -> Iterator[pa.RecordBatch]:
        yield rows(range(5))
        while True:  # until its transaction is over
            yield rows(range(5, 10))

    with pytest.raises(TransactionAborted):
        sink.write(slow(), write_id(0))
    assert writing.found(0) == []


def test_a_batch_without_rows_is_committed_too(writing: Writing) -> None:
    sink = writing.sink()
    sink.commit(0, tasks(sink, write_id(0), [], []))
    assert writing.client.group_status("query-1").committed_sequence == 0


def test_an_older_checkpoint_and_another_query_are_refused(writing: Writing) -> None:
    sink = writing.sink()
    for batch in (0, 1):
        sink.commit(batch, tasks(sink, write_id(batch, app="mine"), [batch]))
    with pytest.raises(CheckpointMismatch):
        tasks(sink, write_id(0, "run-2", app="mine"), [0])
    with pytest.raises(WriterConflict, match="choose another transactionalId"):
        tasks(sink, write_id(0, "run-3", query="query-2", app="mine"), [0])
    # A query without a name of its own is another writer: it writes a second time.
    sink.commit(0, tasks(sink, write_id(0, "run-4", query="query-2"), [0]))
    assert sorted(int(each.value) for each in writing.found(3)) == [0, 0, 1]


def test_a_batch_that_comes_again_with_other_rows_is_refused(writing: Writing) -> None:
    """Somebody has taken the last batch out of the checkpoint, and Spark planned it anew."""
    sink = writing.sink()
    sink.commit(0, tasks(sink, write_id(0), range(10)))
    more = tasks(sink, write_id(0, "run-2"), range(15))
    with pytest.raises(CheckpointMismatch, match="10 rows, and has 15 now"):
        sink.commit(0, more)
    with pytest.raises(CheckpointMismatch, match="10 rows, and has 0 now"):
        sink.commit(0, tasks(sink, write_id(0, "run-3"), []))
    writing.sink(repeatedRows="ignore").commit(0, more)
    check_numbers(writing.found(10), range(10))


def test_at_least_once_writes_without_transactions(writing: Writing) -> None:
    sink = writing.sink(semantics="at-least-once")
    sink.commit(0, tasks(sink, write_id(0), range(10)))
    sink.abort(tasks(sink, write_id(1), range(10, 20)))
    check_numbers(writing.found(20), range(20))


# --- columns


def test_all_parts_of_a_message_come_from_columns(writing: Writing) -> None:
    moment = datetime(2026, 11, 16, 9, 30, 0, 123456, tzinfo=UTC)
    schema = StructType(
        [
            StructField("value", BinaryType()),
            StructField("key", StringType()),
            StructField("topic", StringType()),
            StructField("properties", MapType(StringType(), StringType())),
            StructField("eventTime", TimestampType()),
            StructField("orderingKey", BinaryType()),
        ]
    )
    batch = pa.RecordBatch.from_pydict(
        {
            "value": [b"1", None, b"3"],
            "key": ["a", None, "c"],
            "topic": [TOPIC, "persistent://public/default/other", TOPIC],
            "properties": pa.array([[("x", "1")], None, []], pa.map_(pa.string(), pa.string())),
            "eventTime": pa.array([moment, None, moment], pa.timestamp("us", tz="UTC")),
            "orderingKey": [b"o", None, None],
        }
    )
    sink = writing.sink(schema, topic="")
    sink.commit(0, [sink.write(iter([batch]), write_id(0))])
    first, third = sorted(writing.found(2), key=lambda each: each.value)
    assert (first.value, first.key, first.properties) == (b"1", "a", {"x": "1"})
    assert first.event_time_ms == int(moment.timestamp() * 1000)
    assert first.ordering_key == b"o"
    assert (third.value, third.properties) == (b"3", {})
    (other,) = writing.found(1, "persistent://public/default/other")
    assert other.is_null
    assert other.event_time_ms in (None, 0)


def test_rows_that_have_no_topic_go_to_the_dead_letters_of_their_transaction(
    writing: Writing,
) -> None:
    schema = StructType([*KEYED.fields, StructField("topic", StringType())])
    letters = "persistent://public/default/letters"
    batch = pa.RecordBatch.from_pydict(
        {"key": ["a", "b", "c"], "value": ["1", "2", "3"], "topic": [TOPIC, None, "no://such/"]}
    )
    with pytest.raises(InvalidValue, match="deadLetterTopic"):
        writing.sink(schema, topic="").write(iter([batch]), write_id(0))
    sink = writing.sink(schema, topic="", deadLetterTopic=letters)
    done = sink.write(iter([batch]), write_id(0))
    assert writing.found(0, letters) == []
    sink.commit(0, [done])
    assert [each.value for each in writing.found(1)] == [b"1"]
    put_aside = writing.found(2, letters)
    assert sorted((each.key, each.value) for each in put_aside) == [("b", b"2"), ("c", b"3")]
    assert {each.properties["REAL_TOPIC"] for each in put_aside} == {"", "no://such/"}


class Order(msgspec.Struct):
    """What the topic of the next tests holds."""

    number: int
    note: str
    count: int = 0


ORDERS = StructType(
    [
        StructField("number", LongType()),
        StructField("note", StringType()),
        StructField("key", StringType()),
    ]
)


@pytest.mark.parametrize("kind", [JsonSchema, AvroSchema])
def test_fields_are_encoded_by_the_schema_of_the_topic(writing: Writing, kind: Any) -> None:
    topic = f"persistent://public/default/orders-{uuid.uuid4().hex}"
    with writing.client.producer(topic, schema=kind(Order)) as producer:
        producer.send(Order(1, "first", 7))
    sink = writing.sink(ORDERS, topic=topic, deadLetterTopic=f"{topic}-letters")
    batch = pa.RecordBatch.from_pydict(
        {"number": [2, None, 4], "note": ["second", "none", "fourth"], "key": ["a", "b", "c"]}
    )
    sink.commit(0, [sink.write(iter([batch]), write_id(0))])
    with writing.client.reader(topic, schema=AutoSchema(), start=_first()) as reader:
        found = [reader.receive(timeout=PATIENCE_S).value for _ in range(3)]
    assert [each["number"] for each in found] == [1, 2, 4]
    assert found[1] == {"number": 2, "note": "second", "count": 0}
    (letter,) = writing.found(1, f"{topic}-letters")
    assert msgspec.json.decode(letter.value) == {"number": None, "note": "none"}
    assert "number" in letter.properties["magnetar-dead-letter-reason"]


def test_a_topic_without_a_schema_gets_one_of_the_columns(writing: Writing) -> None:
    batch = pa.RecordBatch.from_pydict({"number": [2], "note": ["x"], "key": ["a"]})
    with pytest.raises(InvalidSetting, match="valueFormat"):
        writing.sink(ORDERS).write(iter([batch]), write_id(0))
    sink = writing.sink(ORDERS, valueFormat="json")
    sink.commit(0, [sink.write(iter([batch]), write_id(0))])
    assert [msgspec.json.decode(each.value) for each in writing.found(1)] == [
        {"number": 2, "note": "x"}
    ]
    assert writing.client.topic_schema(TOPIC) is not None


def _first() -> Any:
    from magnetar import EARLIEST

    return EARLIEST


# --- mistakes


@pytest.mark.parametrize(
    ("fields", "options", "said"),
    [
        ({"value": StringType()}, {"topic": ""}, "nothing says which topic"),
        ({"value": IntegerType(), "topic": StringType()}, {"topic": ""}, ""),
        ({"key": StringType()}, {}, "no column for the value"),
        ({"value": StringType(), "amount": LongType()}, {}, "'amount' is no part"),
        ({"value": StringType(), "key": LongType()}, {}, "'key' is bigint"),
        ({"value": StringType(), "properties": ArrayType(StringType())}, {}, "array<string>"),
        ({"value": StringType()}, {"txnAppId": "a"}, "batch writes"),
        ({"value": StringType()}, {"topik": "a"}, "is topic meant"),
        ({"value": StringType()}, {"transactionTimeout": "soon"}, "duration"),
        ({"value": StringType()}, {"serviceUrl": ""}, "serviceUrl is missing"),
        ({"value": StringType()}, {"asyncProgressTrackingEnabled": "true"}, "exactly once"),
        ({"value": StringType()}, {"maxMessagesPerTrigger": "5"}, "means nothing to a write"),
    ],
)
def test_mistakes_are_told_before_a_row_is_written(
    fields: dict[str, Any], options: dict[str, str], said: str
) -> None:
    given = {"serviceUrl": "pulsar://localhost:1", "topic": TOPIC, "commitMode": "group"} | options
    schema = StructType([StructField(name, kind) for name, kind in fields.items()])

    def made() -> object:
        chosen = {name: text for name, text in given.items() if text}
        return stream_writer(parse(chosen, Use.WRITE), schema, False)

    if not said:
        assert made()
        return
    with pytest.raises(InvalidSetting, match=said) as caught:
        made()
    assert caught.value.hint, "every mistake comes with the next step"


def test_output_modes_that_replace_rows_are_refused() -> None:
    options = parse({"serviceUrl": "pulsar://localhost:1", "topic": TOPIC}, Use.WRITE)
    with pytest.raises(InvalidSetting, match="append"):
        stream_writer(options, KEYED, True)
    with pytest.raises(InvalidSetting, match="append"):
        batch_writer(options, KEYED, True)
    half = {"serviceUrl": "pulsar://localhost:1", "topic": TOPIC, "txnAppId": "nightly"}
    with pytest.raises(InvalidSetting, match="txnVersion is missing"):
        batch_writer(parse(half, Use.WRITE), KEYED, False)


def test_a_wrong_address_is_told_by_name() -> None:
    given = {"serviceUrl": "pulsar://localhost:1", "topic": TOPIC, "operationTimeoutMs": "500"}
    try:
        with pytest.raises(MagnetarError, match="localhost:1"):
            stream_writer(parse(given, Use.WRITE), KEYED, False)
        wrong = parse(given | {"serviceUrl": "localhost"}, Use.WRITE)
        with pytest.raises(MagnetarError, match="pulsar://host:port"):
            stream_writer(wrong, KEYED, False)
    finally:
        links.close_all()
