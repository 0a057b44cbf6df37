"""Fields as payloads, by the schema of a topic."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from magnetar.client.schema.avro_schema import AvroPayloads
from magnetar.client.schema.info import SchemaInfo, SchemaType
from magnetar.errors import InvalidSetting
from magnetar.spark.avro_types import definition_of
from magnetar.spark.sink.columns import SinkColumns
from magnetar.spark.sink.value_encoding import ValueEncoder, encoder_for

TOPIC = "topic://public/default/t"
MOMENT = datetime(2026, 11, 16, 9, 0, 0, 123456, tzinfo=UTC)


def record(*fields: dict[str, Any], name: str = "R") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields)}


def of(name: str, kind: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


def encoder(kind: SchemaType, defined: dict[str, Any], batch: pa.RecordBatch) -> ValueEncoder:
    info = SchemaInfo(kind, msgspec.json.encode(defined), "R")
    types = dict.fromkeys(batch.schema.names, "some type")
    return ValueEncoder(info, SinkColumns.of(types, topic=TOPIC), batch.schema)


def _list(kind: str) -> dict[str, str]:
    return {"type": "array", "items": kind}


TIMES = record(
    of("at", {"type": "long", "logicalType": "timestamp-millis"}),
    of("fine", ["null", {"type": "long", "logicalType": "timestamp-micros"}]),
    of("day", {"type": "int", "logicalType": "date"}),
    of("inner", record(of("n", "int"), of("tags", _list("string")), name="Inner")),
    of("counts", {"type": "map", "values": "long"}),
    of("rest", "string", default="none"),
)
ROW = pa.RecordBatch.from_pydict(
    {
        "at": pa.array([MOMENT], pa.timestamp("us", tz="UTC")),
        "fine": pa.array([MOMENT], pa.timestamp("us", tz="UTC")),
        "day": pa.array([date(2026, 11, 16)], pa.date32()),
        "inner": pa.array(
            [{"n": 3, "tags": ["a"]}],
            pa.struct([("n", pa.int64()), ("tags", pa.list_(pa.string()))]),
        ),
        "counts": pa.array([[("x", 1)]], pa.map_(pa.string(), pa.int32())),
    }
)


def test_json_has_whole_numbers_for_times() -> None:
    encoded = encoder(SchemaType.JSON, TIMES, ROW).encode(ROW)
    assert encoded.faults == {}
    assert encoded.values[0] is not None
    micros = int(MOMENT.timestamp() * 1_000_000)
    assert msgspec.json.decode(encoded.values[0]) == {
        "at": micros // 1000,
        "fine": micros,
        "day": 20773,
        "inner": {"n": 3, "tags": ["a"]},
        "counts": {"x": 1},
        "rest": "none",
    }


def test_avro_is_read_back_as_it_was() -> None:
    encoded = encoder(SchemaType.AVRO, TIMES, ROW).encode(ROW)
    assert encoded.values[0] is not None
    back = AvroPayloads(TIMES).read(encoded.values[0], None)
    assert back["at"] == MOMENT.replace(microsecond=123000)
    assert back["fine"] == MOMENT
    assert back["day"] == date(2026, 11, 16)
    assert back["rest"] == "none"


def test_rows_that_do_not_fit_are_told_one_by_one() -> None:
    defined = record(of("n", "int"), of("note", ["null", "string"]))
    batch = pa.RecordBatch.from_pydict(
        {"n": pa.array([1, None, 2**40, 4], pa.int64()), "note": ["a", None, "c", None]}
    )
    for kind in (SchemaType.JSON, SchemaType.AVRO):
        values, faults = encoder(kind, defined, batch).encode(batch)
        assert [value is None for value in values] == [False, True, True, False]
        assert set(faults) == {1, 2}
        assert "NULL" in faults[1]


def test_an_unknown_symbol_is_a_fault_of_its_row() -> None:
    defined = record(of("suit", {"type": "enum", "name": "S", "symbols": ["HEARTS", "CLUBS"]}))
    batch = pa.RecordBatch.from_pydict({"suit": ["HEARTS", "SWORDS"]})
    assert set(encoder(SchemaType.AVRO, defined, batch).encode(batch).faults) == {1}


@pytest.mark.parametrize(
    ("defined", "said"),
    [
        (record(of("a", "long"), of("b", "string")), "a field 'b', and no column"),
        (record(), "has no field 'a'"),
        (record(of("a", "string")), "the column a is int64, .* wants string"),
        (record(of("a", ["string", "long"])), "a choice of 2 types"),
        (record(of("a", record(of("b", "int")))), "the column a is int64"),
    ],
)
def test_what_can_never_fit_is_told_before_a_row_is_sent(
    defined: dict[str, Any], said: str
) -> None:
    batch = pa.RecordBatch.from_pydict({"a": pa.array([1], pa.int64())})
    with pytest.raises(InvalidSetting, match=said):
        encoder(SchemaType.JSON, defined, batch)


def test_a_definition_of_columns_takes_them() -> None:
    batch = pa.RecordBatch.from_pydict(
        {
            "text": ["a", None],
            "money": pa.array([Decimal("1.25"), None], pa.decimal128(10, 2)),
            "at": pa.array([MOMENT, None], pa.timestamp("us", tz="UTC")),
            "list": pa.array([["x"], None], pa.list_(pa.string())),
            "inner": pa.array([{"n": 1}, None], pa.struct([("n", pa.int32())])),
            "map": pa.array([[("k", 1.5)], None], pa.map_(pa.string(), pa.float64())),
        }
    )
    defined = definition_of(batch.schema)
    made = encoder(SchemaType.AVRO, defined, batch)
    values, faults = made.encode(batch)
    assert faults == {}
    assert values[0] is not None
    assert values[1] is not None
    back = AvroPayloads(defined).read(values[0], None)
    assert back == {
        "text": "a",
        "money": Decimal("1.25"),
        "at": MOMENT,
        "list": ["x"],
        "inner": {"n": 1},
        "map": {"k": 1.5},
    }
    assert set(AvroPayloads(defined).read(values[1], None).values()) == {None}


def test_the_format_that_was_asked_for_must_be_the_topics() -> None:
    batch = pa.RecordBatch.from_pydict({"a": [1]})
    columns = SinkColumns.of({"a": "bigint"}, topic=TOPIC)
    avro = SchemaInfo(SchemaType.AVRO, msgspec.json.encode(record(of("a", "long"))))
    text = SchemaInfo(SchemaType.STRING)
    assert encoder_for(TOPIC, avro, "auto", columns, batch.schema).info is avro
    with pytest.raises(InvalidSetting, match="leave the option valueFormat out"):
        encoder_for(TOPIC, avro, "json", columns, batch.schema)
    with pytest.raises(InvalidSetting, match="make a column `value`"):
        encoder_for(TOPIC, text, "auto", columns, batch.schema)
    with pytest.raises(InvalidSetting, match="has no schema"):
        encoder_for(TOPIC, None, "auto", columns, batch.schema)
