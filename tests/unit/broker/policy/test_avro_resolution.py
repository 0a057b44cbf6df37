"""What can be read with another Avro schema: the truth table of Apache Avro 1.12.1 for Java."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.policy import avro_resolution
from magnetar.broker.policy.avro_resolution import Effort, problem
from tests.unit.broker.policy.avro_samples import avro, field, record, schemas, slices_of, whole

ENUM = {"type": "enum", "name": "Colour", "symbols": ["RED", "BLUE"]}
FIXED = {"type": "fixed", "name": "Hash", "size": 16}
A = field("a", "int")


def array(kind: object) -> dict[str, Any]:
    return {"type": "array", "items": kind}


def nested(schema: object) -> dict[str, Any]:
    """A record that holds this, and nothing else."""
    return record(field("held", schema), name="Holder")


def retyped(old: object, new: object) -> tuple[Any, Any]:
    return record(field("a", old)), record(field("a", new))


# What changes: old, new, whether new reads old (BACKWARD), whether old reads new (FORWARD).
TABLE: dict[str, tuple[Any, Any, bool, bool]] = {
    "add a field with a default": (record(A), record(A, field("b", "int", default=1)), True, True),
    "add a field without": (record(A), record(A, field("b", "int")), False, True),
    "remove a field with a default": (
        record(A, field("b", "int", default=1)),
        record(A),
        True,
        True,
    ),
    "remove a field without": (record(A, field("b", "int")), record(A), True, False),
    "int to long": (*retyped("int", "long"), True, False),
    "float to double": (*retyped("float", "double"), True, False),
    "long to float": (*retyped("long", "float"), True, False),
    "items of an array, int to long": (*retyped(array("int"), array("long")), True, False),
    "string to bytes": (*retyped("string", "bytes"), True, True),
    "string to bytes, at the top": ("string", "bytes", True, True),
    "made nullable": (*retyped("int", ["null", "int"]), True, False),
    "made not nullable": (*retyped(["null", "int"], "int"), False, True),
    "a symbol added": (ENUM, {**ENUM, "symbols": ["RED", "BLUE", "PINK"]}, True, True),
    "a symbol added, with a default": (
        {**ENUM, "default": "RED"},
        {**ENUM, "symbols": ["RED", "BLUE", "PINK"], "default": "RED"},
        True,
        True,
    ),
    "all symbols changed": (ENUM, {**ENUM, "symbols": ["PINK"]}, True, True),
    "an enum renamed": (ENUM, {**ENUM, "name": "Color"}, False, False),
    "an enum in another namespace": (ENUM, {**ENUM, "namespace": "shop"}, True, True),
    "a size changed": (FIXED, {**FIXED, "size": 17}, False, False),
    "a record renamed": (record(A), record(A, name="Purchase"), True, True),
    "a namespace changed": (record(A), record(A, namespace="shop"), True, True),
    "a nested record renamed": (
        nested(record(A)),
        nested(record(A, name="Purchase")),
        True,
        True,
    ),
    "a record in a union renamed": (
        ["null", record(A)],
        ["null", record(A, name="Purchase")],
        True,
        True,
    ),
    "an enum of a union in another namespace": (
        ["null", ENUM],
        ["null", {**ENUM, "namespace": "shop"}],
        True,
        True,
    ),
    "an enum that became one of a union, in another namespace": (
        ENUM,
        ["null", {**ENUM, "namespace": "shop"}],
        False,
        False,
    ),
    "a field renamed with an alias": (
        record(A),
        record(field("b", "int", aliases=["a"])),
        True,
        False,
    ),
    "a record and its field renamed, with one alias": (
        record(A),
        record(field("b", "int", aliases=["a"]), name="Purchase"),
        False,
        False,
    ),
    "a record and its field renamed, with both": (
        record(A),
        record(field("b", "int", aliases=["a"]), name="Purchase", aliases=["Order"]),
        True,
        False,
    ),
    "an enum renamed with an alias": (
        ENUM,
        {**ENUM, "name": "Color", "aliases": ["Colour"]},
        True,
        False,
    ),
    "an alias that makes two fields one": (
        record(A, field("b", "int")),
        record(field("b", "int", aliases=["a"])),
        False,
        False,
    ),
    "fields in another order": (
        record(A, field("b", "string")),
        record(field("b", "string"), A),
        True,
        True,
    ),
    "branches in another order": (*retyped(["null", "int"], ["int", "null"]), True, True),
    "a doc": (record(A), record(A, doc="why"), True, True),
    "a property": (record(A), record(A, weight=7), True, True),
    "another default": (
        record(field("a", "int", default=1)),
        record(field("a", "int", default=2)),
        True,
        True,
    ),
    "no logical type any more": (
        *retyped({"type": "int", "logicalType": "date"}, "int"),
        True,
        True,
    ),
    "string to int": (*retyped("string", "int"), False, False),
    "a map to a record": (
        *retyped({"type": "map", "values": "int"}, record(A, name="R")),
        False,
        False,
    ),
    "the same record in itself, longer": (
        record(A, field("next", ["null", "Order"])),
        record(A, field("next", ["null", "Order"]), field("b", "int", default=1)),
        True,
        True,
    ),
    "a record in itself whose field became another": (
        record(A, field("next", ["null", "Order"])),
        record(field("a", "string"), field("next", ["null", "Order"])),
        False,
        False,
    ),
    "a union that lost a branch": (["int", "string"], ["int", "boolean"], False, False),
    "a union of nothing that became something": ([], "int", True, False),
    "an added field whose default is no value": (
        record(A),
        record(A, field("b", "int", default="one")),
        False,
        True,
    ),
    "an added field whose default fits the second branch": (
        record(A),
        record(A, field("b", ["null", "int"], default=1)),
        True,
        True,
    ),
}


def reads(reader: object, writer: object) -> bool:
    return whole(problem(avro(writer), avro(reader), Effort())) is None


@pytest.mark.parametrize(("old", "new", "backward", "forward"), TABLE.values(), ids=TABLE.keys())
def test_the_truth_table(old: object, new: object, backward: bool, forward: bool) -> None:
    assert (reads(new, old), reads(old, new)) == (backward, forward)


@given(schemas())
def test_every_schema_reads_itself(schema: object) -> None:
    assert reads(schema, schema)


def _with_default() -> Iterator[tuple[Any, Any]]:
    yield "int", 7
    yield "string", "seven"
    yield "boolean", True
    yield "null", None
    yield "double", 0.5
    yield "bytes", "\u0000"
    yield ENUM | {"name": "Late"}, "BLUE"
    yield FIXED | {"name": "Late"}, "0123456789abcdef"
    yield array("int"), [1, 2]
    yield {"type": "map", "values": array("string")}, {"x": ["y"]}
    yield ["null", "int"], None
    yield ["null", "int"], 7
    yield record(field("x", "int", default=1), field("y", "int"), name="Late"), {"y": 2}


@given(schemas(), st.sampled_from(list(_with_default())))
def test_a_field_with_a_default_may_come_and_go(schema: Any, added: tuple[Any, Any]) -> None:
    kind, default = added
    old = nested(schema)
    new = record(*old["fields"], field("late", kind, default=default), name="Holder")
    assert reads(new, old)
    assert reads(old, new)
    without = record(*old["fields"], field("late", kind), name="Holder")
    assert not reads(without, old)
    assert reads(old, without)


@given(schemas())
def test_whatever_may_become_nullable(schema: Any) -> None:
    # A union becomes one with another branch.
    wider = [*schema] if isinstance(schema, list) else [schema]
    wider = wider if "null" in wider else ["null", *wider]
    assert reads(nested(wider), nested(schema))


VALUES: dict[str, Any] = {
    "add a field with a default": {"a": 1},
    "remove a field without": {"a": 1, "b": 2},
    "int to long": {"a": 1},
    "made nullable": {"a": 1},
    "fields in another order": {"a": 1, "b": "x"},
    "a field renamed with an alias": {"a": 1},
    "items of an array, int to long": {"a": [1, 2]},
    "an added field whose default fits the second branch": {"a": 1},
}


@pytest.mark.parametrize("change", VALUES)
def test_what_is_called_readable_is_read_by_another_implementation(change: str) -> None:
    old, new, _, _ = TABLE[change]
    file = BytesIO()
    fastavro.schemaless_writer(file, fastavro.parse_schema(old), VALUES[change])
    file.seek(0)
    found = fastavro.schemaless_reader(file, fastavro.parse_schema(old), fastavro.parse_schema(new))
    assert isinstance(found, dict)
    assert found.keys() == {each["name"] for each in new["fields"]}


MESSAGES = {
    "add a field without": "field 'b' (int) of record 'Order' has no default, and record 'Order'"
    " lacks it",
    "string to int": "at 'a': string cannot be read as int",
    "an enum renamed": "enum 'Colour' cannot be read as enum 'Color'",
    "a size changed": "fixed 'Hash' of 16 bytes cannot be read as fixed 'Hash' of 17 bytes",
    "made not nullable": "at 'a': null cannot be read as int",
}


@pytest.mark.parametrize("change", MESSAGES)
def test_both_types_and_the_field_are_named(change: str) -> None:
    old, new, _, _ = TABLE[change]
    assert whole(problem(avro(old), avro(new), Effort())) == MESSAGES[change]


# --- work is bounded


def _branches(count: int, name: str, kind: str) -> list[Any]:
    """Records of other names, which fit each other by their last field or not at all."""
    fields = [field(f"f{each}", "int") for each in range(20)]
    return [record(*fields, field("last", kind), name=f"{name}{each}") for each in range(count)]


def test_a_comparison_goes_in_slices() -> None:
    wide = [field(f"f{each}", "int") for each in range(5000)]
    assert slices_of(problem(avro(record(*wide)), avro(record(*wide)), Effort())) > 20


def test_a_comparison_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unions of records try each with each: beyond the limit they count as incompatible."""
    monkeypatch.setattr(avro_resolution, "STEPS_MAX", 20_000)
    old = avro(_branches(40, "Old", "int"))
    new = avro(_branches(40, "Text", "string") + _branches(1, "New", "int"))
    effort = Effort()
    found = whole(problem(old, new, effort))
    assert found == "the two schemas are too large to be compared"
    # All comparisons of one schema share it: a thousand versions take no longer than one.
    assert whole(problem(avro("int"), avro("int"), effort)) == found


def test_records_that_are_tried_out_in_each_other_do_not_exhaust_the_stack() -> None:
    """Which branch a record fits depends on its field, and that on the field of that, 400 deep."""
    depth = 400
    old, new = [record(name=f"Old{depth}")], [record(name=f"New{depth}")]
    for level in range(depth - 1, -1, -1):
        old.append(record(field("next", f"Old{level + 1}"), name=f"Old{level}"))
        new.append(record(field("next", ["null", f"New{level + 1}"]), name=f"New{level}"))
    assert reads(list(reversed(new)), list(reversed(old)))
    new[0] = record(A, name=f"New{depth}")
    assert not reads(list(reversed(new)), list(reversed(old)))


def test_defaults_that_hold_each_other_are_looked_at_once() -> None:
    """Each record is left to its default in two fields of the next: two to the power of 300."""
    levels = [
        record(
            field("a", f"R{level + 1}", default={}),
            field("b", f"R{level + 1}", default={}),
            name=f"R{level}",
        )
        for level in range(300)
    ]
    late = [*levels, record(name="R300")]
    new = record(A, field("u", ["null", *late]), field("late", "R0", default={}))
    old = record(A, field("u", ["null"]))
    assert reads(new, old)
