"""Avro schemas: what is one, when two say the same, and that none of them takes long."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given

from magnetar.broker.policy.avro import SLICE_STEPS, NotAvro, meaning, parsed
from tests.unit.broker.policy.avro_samples import (
    avro,
    field,
    record,
    schemas,
    slices_of,
    whole,
)

ENUM = {"type": "enum", "name": "Colour", "symbols": ["RED", "BLUE"]}
FIXED = {"type": "fixed", "name": "Hash", "size": 16}

# What Apache Avro 1.12.1 for Java takes and refuses, tried there.
SOUND = {
    "a name": "int",
    "a type by itself": {"type": "int"},
    "an error": record() | {"type": "error"},
    "a logical type": {"type": "int", "logicalType": "date"},
    "an unknown logical type": {"type": "int", "logicalType": "moon"},
    "a member nobody knows": record(field("a", "int", colour="red"), weight=7),
    "a default of another type": record(field("a", "int", default="seven")),
    "names with a dollar": record(field("$a", "int"), name="Outer$Inner"),
    "names beyond ASCII": record(field("größe", "int"), name="Straße"),
    "a type that is used before it is defined": record(
        field("a", "Later"), field("b", record(name="Later"))
    ),
    "a record in itself": record(field("next", ["null", "Order"])),
    "a type by an object with its name": record(field("a", ENUM), field("b", {"type": "Colour"})),
    "a type that is written out twice": record(field("a", ENUM), field("b", ENUM)),
    "a name of a namespace around it": record(
        field("a", ENUM), field("b", "shop.Colour"), namespace="shop"
    ),
    "a name without one, from within one": [ENUM, record(field("a", "Colour"), name="shop.Order")],
    "an enum without symbols": {**ENUM, "symbols": []},
    "a union of nothing": [],
    "a primitive's name in a namespace": record(name="shop.int"),
    "the order of a field": record(field("a", "int", order="IGNORE")),
}
UNSOUND = {
    "a number": 5,
    "nothing": None,
    "a type that nobody defines": "Order",
    "a type that nobody defines, in a namespace": record(field("a", "B"), namespace="shop"),
    "an object in an object": {"type": {"type": "int"}},
    "a union in an object": {"type": ["null", "int"]},
    "an object without a type": {"name": "Order"},
    "a record without a name": {"type": "record", "fields": []},
    "a record without fields": {"type": "record", "name": "Order"},
    "fields that are no list": {"type": "record", "name": "Order", "fields": {}},
    "a field without a name": record({"type": "int"}),
    "a field without a type": record({"name": "a"}),
    "a field that is no object": {"type": "record", "name": "Order", "fields": [1]},
    "two fields of a name": record(field("a", "int"), field("a", "long")),
    "a name that begins with a digit": record(name="1st"),
    "a name with a dash": record(name="an-order"),
    "a namespace with a dash": record(namespace="the-shop"),
    "a primitive's name": record(name="int"),
    "a field's name with a dot": record(field("a.b", "int")),
    "an order of no kind": record(field("a", "int", order="up")),
    "aliases that are no list": record(aliases="Old"),
    "an alias that is no name": record(field("a", "int", aliases=[1])),
    "a type that is defined twice": record(field("a", ENUM), field("b", {**ENUM, "symbols": []})),
    "a record that defines itself again": record(field("a", record())),
    "a union in a union": [["int"], "string"],
    "a union with a branch twice": ["int", {"type": "int", "logicalType": "date"}],
    "a union with a name twice": record(field("a", ENUM), field("b", ["Colour", "Colour"])),
    "an enum without a list": {"type": "enum", "name": "Colour"},
    "an enum with a symbol twice": {**ENUM, "symbols": ["RED", "RED"]},
    "an enum with a symbol that is no name": {**ENUM, "symbols": ["RED-ISH"]},
    "an enum with a symbol of two lines": {**ENUM, "symbols": ["RED\nBLUE"]},
    "an enum with a number": {**ENUM, "symbols": [1]},
    "an enum with a default that it lacks": {**ENUM, "default": "GREEN"},
    "a size below nothing": {**FIXED, "size": -1},
    "a size in words": {**FIXED, "size": "16"},
    "half a byte": {**FIXED, "size": 3.5},
    "a size of true": {**FIXED, "size": True},
    "a size beyond 32 bits": {**FIXED, "size": 2**31},
    "an array of nothing": {"type": "array"},
    "a map of nothing": {"type": "map", "items": "int"},
}


@pytest.mark.parametrize("schema", SOUND.values(), ids=SOUND.keys())
def test_sound_schemas_are_read(schema: object) -> None:
    avro(schema)


@pytest.mark.parametrize("schema", UNSOUND.values(), ids=UNSOUND.keys())
def test_unsound_schemas_are_refused(schema: object) -> None:
    with pytest.raises(NotAvro):
        avro(schema)


@pytest.mark.parametrize("text", [b"", b"int", b'"int" x', b"{'type': 'int'}", b'"\xff"', b"[" * 5])
def test_what_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(NotAvro):
        whole(parsed(text))


def test_nesting_is_bounded_by_json_and_not_by_the_stack() -> None:
    def nested(depth: int) -> bytes:
        return b'{"type":"array","items":' * depth + b'"int"' + b"}" * depth

    assert whole(parsed(nested(300))).kind == "array"
    with pytest.raises(NotAvro):
        whole(parsed(nested(20_000)))


ADDRESS = record(field("zip", "int"), name="Address", namespace="shop")
BASE = record(field("id", "long"), field("to", ADDRESS), field("back", "shop.Address"))
SAME: dict[str, tuple[Any, Any]] = {
    "a type by itself": ({"type": "int"}, "int"),
    "docs": (record(field("a", "int", doc="why"), doc="what"), record(field("a", "int"))),
    "aliases": (record(field("a", "int", aliases=["b"]), aliases=["B"]), record(field("a", "int"))),
    "a namespace in the name": (record(name="shop.Order"), record(namespace="shop")),
    "a name by a reference or written out": (
        BASE,
        record(field("id", "long"), field("to", ADDRESS), field("back", ADDRESS)),
    ),
    "the default of an enum": ({**ENUM, "default": "RED"}, ENUM),
    "the usual order": (record(field("a", "int", order="ascending")), record(field("a", "int"))),
    "the order of members in a default": (
        record(field("a", {"type": "map", "values": "int"}, default={"x": 1, "y": 2})),
        record(field("a", {"type": "map", "values": "int"}, default={"y": 2, "x": 1})),
    ),
}
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "a logical type": ({"type": "int", "logicalType": "date"}, "int"),
    "a property": (record(field("a", "int", colour="red")), record(field("a", "int"))),
    "a default": (record(field("a", "int", default=1)), record(field("a", "int"))),
    "a default of null": (record(field("a", "null", default=None)), record(field("a", "null"))),
    "the kind of a default": (
        record(field("a", "int", default=1)),
        record(field("a", "int", default=1.0)),
    ),
    "the order of fields": (
        record(field("a", "int"), field("b", "int")),
        record(field("b", "int"), field("a", "int")),
    ),
    "the order of symbols": (ENUM, {**ENUM, "symbols": ["BLUE", "RED"]}),
    "the order of a field": (record(field("a", "int", order="ignore")), record(field("a", "int"))),
    "a namespace": (record(namespace="shop"), record()),
    "a size": (FIXED, {**FIXED, "size": 17}),
    "the order of branches": (["null", "int"], ["int", "null"]),
    "what an array holds": ({"type": "array", "items": "int"}, {"type": "array", "items": "long"}),
    "an array and a map": ({"type": "array", "items": "int"}, {"type": "map", "values": "int"}),
}


def said(schema: object) -> bytes:
    return whole(meaning(avro(schema)))


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME.keys())
def test_these_say_the_same(one: object, other: object) -> None:
    assert said(one) == said(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_these_do_not(one: object, other: object) -> None:
    assert said(one) != said(other)


def _backwards(schema: Any) -> Any:
    """The same JSON, with the members of every object in the other order."""
    if isinstance(schema, dict):
        return {key: _backwards(schema[key]) for key in reversed(list(schema))}
    return [_backwards(each) for each in schema] if isinstance(schema, list) else schema


@given(schemas())
def test_spacing_and_the_order_of_members_do_not_matter(schema: object) -> None:
    plain = msgspec.json.encode(schema)
    spaced = msgspec.json.format(msgspec.json.encode(_backwards(schema)), indent=3)
    assert whole(meaning(whole(parsed(plain)))) == whole(meaning(whole(parsed(spaced))))


def _many(count: int) -> dict[str, Any]:
    return {
        "fields": record(*(field(f"f{each}", "int") for each in range(count))),
        "records": record(
            *(field(f"f{each}", record(name=f"R{each}")) for each in range(count // 2))
        ),
        "branches": [{**FIXED, "name": f"F{each}"} for each in range(count)],
    }


@pytest.mark.parametrize("shape", ["fields", "records", "branches"])
def test_large_schemas_are_read_in_slices(shape: str) -> None:
    count = 20 * SLICE_STEPS
    data = msgspec.json.encode(_many(count)[shape])
    assert slices_of(parsed(data)) >= 15
    assert slices_of(meaning(whole(parsed(data)))) >= 15


def test_names_that_stand_for_much_are_said_once() -> None:
    """Each record holds the next one twice: written out, they would be 2 to the power of 400."""
    levels = [
        record(field("a", f"R{level + 1}"), field("b", f"R{level + 1}"), name=f"R{level}")
        for level in range(400)
    ]
    schema = avro([*levels, record(name="R400")])
    assert slices_of(meaning(schema)) < 20
