"""Values as columns: every type that a schema can have, and payloads that do not fit."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time
from decimal import Decimal
from io import BytesIO
from typing import Any
from uuid import UUID

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import IntegerType, LongType, StringType, StructField

from magnetar.client.schema.info import SchemaInfo, SchemaType
from magnetar.errors import InvalidSetting
from magnetar.spark.source.values import Avro, Json, Text, Values
from magnetar.spark.spark_types import definition, fields_of

EVERYTHING: dict[str, Any] = {
    "type": "record",
    "name": "Everything",
    "fields": [
        {"name": "flag", "type": "boolean"},
        {"name": "small", "type": "int"},
        {"name": "large", "type": "long"},
        {"name": "half", "type": "float"},
        {"name": "whole", "type": "double"},
        {"name": "raw", "type": "bytes"},
        {"name": "text", "type": ["null", "string"]},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "local", "type": {"type": "long", "logicalType": "local-timestamp-millis"}},
        {"name": "hour", "type": {"type": "int", "logicalType": "time-millis"}},
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        {
            "name": "price",
            "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        },
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "counts", "type": {"type": "map", "values": "long"}},
        {
            "name": "inner",
            "type": {
                "type": "record",
                "name": "Inner",
                "fields": [{"name": "kind", "type": "Kind"}],
            },
        },
    ],
}
VALUE: dict[str, Any] = {
    "flag": True,
    "small": -5,
    "large": 2**40,
    "half": 0.5,
    "whole": 1.25,
    "raw": b"\x00\xff",
    "text": None,
    "kind": "B",
    "day": date(2026, 11, 16),
    "at": datetime(2026, 11, 16, 10, tzinfo=UTC),
    "local": datetime(2026, 11, 16, 10),  # noqa: DTZ001 - that is what it is about
    "hour": time(1, 2, 3),
    "id": UUID(int=7),
    "price": Decimal("12.34"),
    "tags": ["x"],
    "counts": {"a": 1},
    "inner": {"kind": "A"},
}
FOUND = VALUE | {
    "hour": 3_723_000,
    "id": str(UUID(int=7)),
    "counts": [("a", 1)],
}


def decoded(values: Values, *payloads: bytes | None) -> list[tuple[Any, ...]]:
    kind = pa.dictionary(pa.int32(), pa.binary())
    versions = pa.nulls(len(payloads), kind)
    found = values.decode(pa.array(payloads, pa.binary()), versions)
    rows = list(zip(*(column.to_pylist() for column in found.columns), strict=True))
    return [("error",) if at in found.errors else row for at, row in enumerate(rows)]


def test_every_type_of_avro() -> None:
    out = BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(EVERYTHING), VALUE)
    fields = fields_of(EVERYTHING)
    info = SchemaInfo(SchemaType.AVRO, json.dumps(EVERYTHING).encode())
    (row, nothing, broken) = decoded(
        Avro(info, fields, lambda _: None), out.getvalue(), None, b"\x01"
    )
    assert dict(zip([each.name for each in fields], row, strict=True)) == FOUND
    assert set(nothing) == {None}
    assert broken == ("error",)


def test_every_type_of_json() -> None:
    plain = VALUE | {
        "raw": "AP8=",
        "day": 20_773,
        "at": 1_794_823_200_000,
        "local": "2026-11-16T10:00:00",
        "hour": 3_723_000,
        "id": str(UUID(int=7)),
        "price": 12.34,
    }
    fields = fields_of(EVERYTHING)
    (row,) = decoded(Json(fields), json.dumps(plain).encode())
    assert dict(zip([each.name for each in fields], row, strict=True)) == FOUND


PLAIN = [
    StructField("id", LongType()),
    StructField("name", StringType()),
    StructField("n", IntegerType()),
]
RECORDS = st.fixed_dictionaries(
    {},
    optional={
        "id": st.none() | st.integers(-(2**63), 2**63 - 1),
        "name": st.none() | st.text(max_size=5),
        "n": st.none() | st.integers(-(2**31), 2**31 - 1),
        "other": st.lists(st.integers(), max_size=2),
    },
)


@given(st.lists(st.none() | RECORDS, min_size=1, max_size=6))
def test_json_at_once_and_one_by_one_say_the_same(records: list[dict[str, Any] | None]) -> None:
    payloads = [None if each is None else json.dumps(each).encode() for each in records]
    wanted = [tuple((each or {}).get(name) for name in ("id", "name", "n")) for each in records]
    assert decoded(Json(PLAIN), *payloads) == wanted
    with_a_break = [None if each is None else b"\n" + each for each in payloads]
    assert decoded(Json(PLAIN), *with_a_break) == wanted


@given(st.lists(st.binary(max_size=6), max_size=5))
def test_payloads_that_are_anything_are_rows(payloads: list[bytes]) -> None:
    assert len(decoded(Json(PLAIN), *payloads)) == len(payloads)
    assert len(decoded(Text(), *payloads)) == len(payloads)


def test_one_that_does_not_fit_leaves_the_others() -> None:
    good, bad = b'{"id": 1, "n": 2}', b'{"id": 1, "n": 3000000000}'
    assert decoded(Json(PLAIN), good, bad, b"[]", good) == [
        (1, None, 2),
        ("error",),
        ("error",),
        (1, None, 2),
    ]
    assert decoded(Text(), b"a", b"\xff") == [("a",), ("error",)]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (["int", "string"], "a choice of 2 types"),
        ("Unknown", "the type Unknown"),
        (
            {"type": "record", "name": "Node", "fields": [{"name": "next", "type": "Node"}]},
            "itself",
        ),
        ({"type": "duration"}, "the type duration"),
    ],
)
def test_what_spark_has_no_column_for(kind: Any, said: str) -> None:
    record = {"type": "record", "name": "R", "fields": [{"name": "f", "type": kind}]}
    with pytest.raises(InvalidSetting, match='set valueFormat to "bytes"') as raised:
        fields_of(record)
    assert said in str(raised.value)
    assert "the field f" in str(raised.value)


def test_what_is_no_definition() -> None:
    with pytest.raises(InvalidSetting, match="no Avro definition"):
        definition(b"{")
    with pytest.raises(InvalidSetting, match="no record"):
        fields_of("string")
