"""Columns of fields as payloads, by the schema of a topic.

Owns: `ValueEncoder`, for JSON and Avro; `encoder_for`, which finds the schema; `Encoded`, payloads
and the rows that have none.

Invariants:
1. Columns and schema are compared once: what can never fit raises before anything is sent.
2. A row that does not fit (a NULL where none may be, a number that is too large) is a fault of that
   row; the others are encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from magnetar.client.schema.avro_schema import AvroPayloads
from magnetar.client.schema.info import SchemaInfo, SchemaType
from magnetar.errors import InvalidSetting, InvalidValue
from magnetar.spark.avro_types import Cast, cast_for, definition_of, is_nullable
from magnetar.spark.sink.columns import SinkColumns

_TYPES: Final = {"json": SchemaType.JSON, "avro": SchemaType.AVRO}
_MISSING: Final = object()


class Encoded(NamedTuple):
    """The payloads of a batch."""

    values: list[bytes | None]
    faults: dict[int, str]
    """Why a row has no payload."""


class RowSchema:
    """A schema for a producer that is given payloads."""

    needs_writer: Final = False

    def __init__(self, info: SchemaInfo) -> None:
        self.info = info

    def encode(self, value: bytes) -> bytes:
        return value

    def decode(self, data: bytes, writer: SchemaInfo | None = None) -> bytes:
        return data


class ValueEncoder:
    """Makes payloads of the columns of one data frame for one topic."""

    def __init__(self, info: SchemaInfo, columns: SinkColumns, schema: pa.Schema) -> None:
        self.info = info
        # Everything that can be known from types alone is settled here, once (invariant 1).
        defined = _definition(info)
        self._fields = {each["name"]: each for each in defined["fields"]}
        self._casts = _casts(self._fields, columns, schema)
        # Fields that the frame has no column for.
        self._defaults = {
            name: each.get("default")
            for name, each in self._fields.items()
            if name not in self._casts
        }
        self._write: Callable[[Any], bytes] = msgspec.json.encode
        if info.type is SchemaType.AVRO:
            self._write = AvroPayloads(defined).write

    def encode(self, batch: pa.RecordBatch) -> Encoded:
        # All rows at once, as columns. One that does not fit makes all of them fail, and is then
        # looked for row by row (invariant 2).
        try:
            rows = self._rows(batch)
        except (pa.ArrowInvalid, InvalidValue) as error:
            if batch.num_rows == 1:
                return Encoded([None], {0: str(error)})
            return self._one_by_one(batch)
        values: list[bytes | None] = []
        faults: dict[int, str] = {}
        for number, row in enumerate(rows):
            try:
                values.append(self._write(row | self._defaults))
            except (InvalidValue, TypeError, ValueError) as error:
                values.append(None)
                faults[number] = str(error)
        return Encoded(values, faults)

    def _rows(self, batch: pa.RecordBatch) -> list[dict[str, Any]]:
        found = {}
        for name, cast in self._casts.items():
            column = batch.column(name)
            # Arrow has a NULL in any column; Avro only where the schema says so.
            if column.null_count and not is_nullable(self._fields[name]["type"]):
                raise InvalidValue(f"the field {name} is NULL, which the topic's schema forbids")
            is_time = cast.typed != cast.plain
            # Only the end of a time that is finer than the schema's is cut off.
            found[name] = column.cast(cast.typed, safe=not is_time).cast(cast.plain)
        made = pa.RecordBatch.from_pydict(found)
        return list(made.to_pylist(maps_as_pydicts="strict"))

    def _one_by_one(self, batch: pa.RecordBatch) -> Encoded:
        values: list[bytes | None] = []
        faults: dict[int, str] = {}
        for number in range(batch.num_rows):
            one = self.encode(batch.slice(number, 1))
            values += one.values
            if one.faults:
                faults[number] = one.faults[0]
        return Encoded(values, faults)


def encoder_for(
    topic: str, info: SchemaInfo | None, value_format: str, columns: SinkColumns, schema: pa.Schema
) -> ValueEncoder:
    """The encoder for a topic, by the schema that it has, or the one that it is to get."""
    wanted = _TYPES.get(value_format)
    # No schema: it gets one of the frame's columns, if the user says in which format.
    if info is None or info.type is SchemaType.BYTES:
        if wanted is None:
            raise InvalidSetting(
                f"{topic} has no schema, and the data frame no column `value`",
                hint="value = to_json(struct(*)), or the option valueFormat = json or avro, which "
                "gives the topic a schema of these columns",
            )
        fields = [schema.field(name) for name in columns.fields]
        data = msgspec.json.encode(definition_of(fields))
        return ValueEncoder(SchemaInfo(wanted, data, "Row"), columns, schema)
    # A schema that is neither JSON nor Avro, or not the format that the user asked for.
    if info.type not in _TYPES.values() or (wanted is not None and info.type is not wanted):
        raise InvalidSetting(
            f"the schema of {topic} is {info.type.name}, which columns are not encoded as",
            hint="make a column `value` in the query"
            if info.type not in _TYPES.values()
            else "leave the option valueFormat out",
        )
    return ValueEncoder(info, columns, schema)


def _definition(info: SchemaInfo) -> Mapping[str, Any]:
    try:
        defined = msgspec.json.decode(info.data)
    except ValueError as error:
        raise InvalidSetting(f"the topic's schema is no Avro definition: {error}") from error
    if not isinstance(defined, dict) or defined.get("type") != "record":
        raise InvalidSetting(
            "the topic's schema is no record", hint="make a column `value` in the query"
        )
    return defined


def _casts(fields: Mapping[str, Any], columns: SinkColumns, schema: pa.Schema) -> dict[str, Cast]:
    given = [*columns.fields, *(name for name in columns.about if name in fields)]
    # A column too many would be lost in silence; a field without column and default cannot be made.
    # Columns of the source are used only if the schema has a field of their name.
    for name in columns.fields:
        if name not in fields:
            raise InvalidSetting(
                f"the topic's schema has no field {name!r}, but {', '.join(fields)}",
                hint="rename or drop the column",
            )
    for name, each in fields.items():
        if name not in given and each.get("default", _MISSING) is _MISSING:
            raise InvalidSetting(
                f"the topic's schema has a field {name!r}, and no column is called that",
                hint="add the column, or give the field a default",
            )
    return {name: cast_for(fields[name]["type"], schema.field(name).type, name) for name in given}
