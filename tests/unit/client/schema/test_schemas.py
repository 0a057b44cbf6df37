"""Schemas: golden bytes, round trips, evolution, garbage, definitions."""

from __future__ import annotations

import json
import math
import struct
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.schema import (
    BOOL,
    BYTES,
    FLOAT32,
    FLOAT64,
    INT8,
    INT16,
    INT32,
    INT64,
    STRING,
    AutoSchema,
    AvroSchema,
    JsonSchema,
    ProtobufSchema,
    Schema,
    SchemaInfo,
    SchemaType,
)
from magnetar.client.schema.record_types import definition_of
from magnetar.errors import InvalidSetting, InvalidValue, UnreadableMessage
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.client.schema_records import (
    AliasedModel,
    Bare,
    Color,
    DictOrder,
    First,
    Item,
    Level,
    ModelOrder,
    Order,
    RenamedStruct,
    Second,
    StructOrder,
    Tree,
)

SINGLE: list[tuple[Any, Any, str]] = [
    (BYTES, b"\x00a", "0061"),
    (STRING, "café", "636166c3a9"),
    (BOOL, True, "01"),
    (BOOL, False, "00"),
    (INT8, -2, "fe"),
    (INT16, 258, "0102"),
    (INT32, -1, "ffffffff"),
    (INT64, 2**40, "0000010000000000"),
    (FLOAT32, 1.5, "3fc00000"),
    (FLOAT64, -2.0, "c000000000000000"),
]

_TEXT = st.text(st.characters(codec="utf-8"), max_size=10)
_INT64 = st.integers(-(2**63), 2**63 - 1)
_ORDERS = st.builds(
    Order,
    id=_INT64,
    paid=st.booleans(),
    price=st.floats(allow_nan=False, allow_infinity=False),
    raw=st.binary(max_size=10),
    items=st.lists(st.builds(Item, _TEXT, _INT64), max_size=3),
    labels=st.dictionaries(_TEXT, _TEXT, max_size=3),
    color=st.sampled_from(Color),
    level=st.sampled_from(Level),
    note=st.none() | _TEXT,
    at=st.none() | st.datetimes(timezones=st.just(UTC)),
)


@pytest.mark.parametrize(("schema", "value", "golden"), SINGLE)
def test_golden_single_values(schema: Schema[Any], value: Any, golden: str) -> None:
    assert schema.encode(value).hex() == golden
    assert schema.decode(bytes.fromhex(golden)) == value


@given(_INT64)
def test_numbers_fit_or_are_refused(value: int) -> None:
    for schema, bits in ((INT8, 8), (INT16, 16), (INT32, 32), (INT64, 64)):
        if -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            assert schema.decode(schema.encode(value)) == value
        else:
            with pytest.raises(InvalidValue):
                schema.encode(value)


@given(st.floats())
def test_floats(value: float) -> None:
    found = FLOAT64.decode(FLOAT64.encode(value))
    assert found == value or math.isnan(value)
    try:
        encoded = FLOAT32.encode(value)
    except InvalidValue:
        assert abs(value) > 3e38
        return
    assert encoded == struct.pack(">f", value)


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        (BYTES, "text"),
        (STRING, b"bytes"),
        (STRING, "\ud800"),
        (BOOL, 1),
        (INT32, True),
        (INT32, 1.0),
        (INT8, 128),
        (FLOAT64, "1"),
        (FLOAT64, True),
    ],
)
def test_values_of_another_type_are_refused(schema: Schema[Any], wrong: Any) -> None:
    with pytest.raises(InvalidValue):
        schema.encode(wrong)


@given(st.binary(max_size=12))
def test_payloads_of_another_length_are_refused(data: bytes) -> None:
    for schema, size in ((BOOL, 1), (INT8, 1), (INT16, 2), (INT32, 4), (INT64, 8), (FLOAT64, 8)):
        if len(data) != size:
            with pytest.raises(UnreadableMessage):
                schema.decode(data)
    with pytest.raises(UnreadableMessage):
        STRING.decode(b"\xff" + data)


@given(_ORDERS)
def test_records_come_back(order: Order) -> None:
    for schema in (JsonSchema(Order), AvroSchema(Order)):
        assert schema.decode(schema.encode(order), schema.info) == order


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (StructOrder, StructOrder(1, "a", Item("x"))),
        (StructOrder, StructOrder(1)),
        (ModelOrder, ModelOrder(id=3, note="n", raw=b"r")),
        (DictOrder, {"id": 1, "note": "x"}),
        (Tree, Tree(1, [Tree(2), Tree(3, [Tree(4)])])),
    ],
)
def test_each_way_to_write_a_record(kind: type[Any], value: Any) -> None:
    for schema in (JsonSchema(kind), AvroSchema(kind)):
        assert schema.decode(schema.encode(value), schema.info) == value
        with pytest.raises(InvalidValue):
            schema.encode(object())


@pytest.mark.parametrize(
    "value",
    [RenamedStruct(order_id=1), AliasedModel(orderId=1, shortNote="short")],
    ids=["msgspec", "pydantic"],
)
def test_fields_have_the_names_under_which_they_are_written(value: Any) -> None:
    for schema in (JsonSchema(type(value)), AvroSchema(type(value))):
        definition = json.loads(schema.info.data)
        assert [each["name"] for each in definition["fields"]] == ["orderId", "shortNote"]
        assert definition["fields"][1]["default"] == "none"
        assert schema.decode(schema.encode(value), schema.info) == value


def test_golden_definition() -> None:
    assert definition_of(Order) == {
        "type": "record",
        "name": "Order",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "paid", "type": "boolean"},
            {"name": "price", "type": "double"},
            {"name": "raw", "type": "bytes"},
            {
                "name": "items",
                "type": {
                    "type": "array",
                    "items": {
                        "type": "record",
                        "name": "Item",
                        "fields": [
                            {"name": "name", "type": "string"},
                            {"name": "count", "type": "long", "default": 1},
                        ],
                    },
                },
            },
            {"name": "labels", "type": {"type": "map", "values": "string"}, "default": {}},
            {
                "name": "color",
                "type": {"type": "enum", "name": "Color", "symbols": ["RED", "BLUE"]},
                "default": "RED",
            },
            {"name": "level", "type": "long", "default": 1},
            {"name": "note", "type": ["null", "string"], "default": None},
            {"name": "at", "type": ["null", "string"], "default": None},
        ],
    }
    info = JsonSchema(Order).info
    assert (info.type, info.name) == (SchemaType.JSON, "Order")
    assert json.loads(info.data) == definition_of(Order)
    assert definition_of(ModelOrder)["fields"][2]["default"] == ""


@pytest.mark.parametrize("wrong", [int, dict, Bare, "Order", list[int]])
def test_what_is_no_record_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidSetting):
        definition_of(wrong)


def test_a_record_is_read_by_what_it_became() -> None:
    for made in (JsonSchema, AvroSchema):
        old: Any = made(First)
        new: Any = made(Second)
        assert new.decode(old.encode(First(1)), old.info) == Second(1)
        assert old.decode(new.encode(Second(2, "a")), new.info) == First(2)


@given(st.binary(max_size=40))
def test_garbage_is_refused_or_read(data: bytes) -> None:
    schemas: list[Any] = [JsonSchema(Order), AvroSchema(Order), ProtobufSchema(pb.KeyValue)]
    for schema in schemas:
        try:
            schema.decode(data, schema.info)
        except UnreadableMessage:
            continue


@given(st.binary(max_size=40), st.sampled_from(list(SchemaType)))
def test_a_broken_writer_schema_is_refused(data: bytes, kind: SchemaType) -> None:
    for schema in (AutoSchema(), AvroSchema(First)):
        try:
            schema.decode(b"\x02", SchemaInfo(kind, data))
        except UnreadableMessage:
            continue


def test_auto_reads_each_message_as_it_was_written() -> None:
    auto = AutoSchema()
    for schema, value, golden in SINGLE:
        assert auto.decode(bytes.fromhex(golden), schema.info) == value
    assert auto.decode(b"\x01\x02") == b"\x01\x02"
    order = First(5, "here")
    for records in (JsonSchema(First), AvroSchema(First)):
        expected = {"id": 5, "gone": "here"}
        assert auto.decode(records.encode(order), records.info) == expected
    messages = ProtobufSchema(pb.KeyValue)
    pair = pb.KeyValue(key="a", value="b")
    read = auto.decode(messages.encode(pair), messages.info)
    assert (read.key, read.value) == ("a", "b")
    with pytest.raises(UnreadableMessage, match="KEY_VALUE"):
        auto.decode(b"", SchemaInfo(SchemaType.KEY_VALUE))
    with pytest.raises(InvalidValue):
        auto.encode(b"")


def test_protobuf() -> None:
    schema = ProtobufSchema(pb.MessageIdData)
    value = pb.MessageIdData(ledgerId=1, entryId=2)
    assert schema.decode(schema.encode(value)) == value
    definition = msgspec.json.decode(schema.info.data)
    assert sorted(definition) == [
        "fileDescriptorSet",
        "rootFileDescriptorName",
        "rootMessageTypeName",
    ]
    assert definition["rootMessageTypeName"].endswith("MessageIdData")
    with pytest.raises(InvalidValue):
        schema.encode(pb.MessageIdData(ledgerId=1))
    with pytest.raises(InvalidValue):
        schema.encode(pb.KeyValue())  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting):
        ProtobufSchema(int)  # type: ignore[type-var]


def test_infos_go_over_the_wire() -> None:
    for schema in (STRING, INT64, JsonSchema(First), AutoSchema(), ProtobufSchema(pb.KeyValue)):
        info = schema.info
        wire = info.to_wire()
        assert wire is not None
        assert SchemaInfo.from_wire(pb.Schema.FromString(wire.SerializeToString())) == info
    assert BYTES.info.to_wire() is None
    assert SchemaInfo.from_wire(None) == BYTES.info


def test_dates_are_text_in_both_forms() -> None:
    at = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
    order = Order(1, True, 1.0, b"", [], at=at)
    assert b"2024-05-06T07:08:09Z" in JsonSchema(Order).encode(order)
    assert b"2024-05-06T07:08:09Z" in AvroSchema(Order).encode(order)
