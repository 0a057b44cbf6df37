"""Payloads as columns: bytes, text, single values, and the fields of JSON and Avro records.

Owns: `Values`, one way to decode, made by `values_for`; `Decoded`, its columns and what could not
be read.

Invariants:
1. A message without a value is NULL in every column, and no error.
2. What cannot be read is NULL in every column, and its row is among the `errors`.
3. An Avro payload is read with the schema that it was written with, then brought to the fields that
   the query has: old messages of a schema that grew can be read.

Relies on: pyarrow; fastavro where a topic is in Avro. Rows are decoded all at once where Arrow can
(JSON of plain fields), else one by one.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from io import BytesIO
from typing import Any, Final, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from magnetar.client.schema.auto_schema import AutoSchema
from magnetar.client.schema.avro_schema import parsed_definition
from magnetar.client.schema.info import SchemaInfo, SchemaType
from magnetar.errors import MagnetarError, UnreadableMessage

Writer = Callable[[bytes], SchemaInfo | None]
"""The schema of a version, from the registry."""

SINGLE: Final[Mapping[SchemaType, DataType]] = {
    SchemaType.STRING: StringType(),
    SchemaType.BOOL: BooleanType(),
    SchemaType.INT8: IntegerType(),
    SchemaType.INT16: IntegerType(),
    SchemaType.INT32: IntegerType(),
    SchemaType.INT64: LongType(),
    SchemaType.FLOAT: FloatType(),
    SchemaType.DOUBLE: DoubleType(),
}

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# What Arrow's own JSON reader decodes as Spark would; times, dates, decimals and maps need a
# converter of their own.
_AT_ONCE: Final = (BooleanType, IntegerType, LongType, FloatType, DoubleType, StringType)


@dataclass(frozen=True, slots=True)
class Decoded:
    """The columns of some payloads."""

    columns: list[pa.Array]
    errors: dict[int, str] = field(default_factory=dict)
    """By row."""


class Values(Protocol):
    """One way to read payloads."""

    def decode(self, payloads: pa.Array, versions: pa.Array) -> Decoded:
        """`payloads`: binary; `versions`: of their schemas, a dictionary of binary."""
        ...


class Bytes:
    """Payloads as they are."""

    def decode(self, payloads: pa.Array, versions: pa.Array) -> Decoded:
        return Decoded([payloads])


class Text:
    """Payloads that are text."""

    def decode(self, payloads: pa.Array, versions: pa.Array) -> Decoded:
        return text_of(payloads)


def text_of(binary: pa.Array) -> Decoded:
    """Binary as text; what is none is NULL and an error."""
    # Nearly always all of it is text; only if not, each is tried to find the ones that are not.
    try:
        return Decoded([binary.cast(pa.string())])
    except pa.ArrowInvalid:
        return _one_by_one(binary.to_pylist(), lambda data: data.decode(), pa.string())


class SingleValues:
    """Numbers and truth values, as the Java client writes them."""

    def __init__(self, kind: SchemaType) -> None:
        self._info = SchemaInfo(kind)
        self._type = to_arrow_type(SINGLE[kind])

    def decode(self, payloads: pa.Array, versions: pa.Array) -> Decoded:
        read = AutoSchema()
        return _one_by_one(
            payloads.to_pylist(), lambda data: read.decode(data, self._info), self._type
        )


class Json:
    """The fields of JSON objects."""

    def __init__(self, fields: list[StructField]) -> None:
        self._fields = fields
        self._schema = pa.schema([_arrow(each) for each in fields])
        self._is_plain = all(_is_plain(each.dataType) for each in fields)
        self._convert = _converter(StructType(fields))

    def decode(self, payloads: pa.Array, versions: pa.Array) -> Decoded:
        if self._is_plain and len(payloads) and (found := self._all_at_once(payloads)) is not None:
            return found
        return _records(payloads.to_pylist(), self._read, self._schema)

    def _read(self, data: bytes) -> Any:
        plain = msgspec.json.decode(data)
        if not isinstance(plain, dict):
            raise ValueError("it is no object")
        return self._convert(plain)

    def _all_at_once(self, payloads: pa.Array) -> Decoded | None:
        """None: something in there needs a closer look."""
        # Arrow reads lines of JSON: one per message, and an empty object where there is no value,
        # which is NULL in every column (invariant 1).
        filled = pc.fill_null(payloads, b"{}")
        offsets = pa.array([0, len(filled)], pa.int32())
        lines = pc.binary_join(pa.ListArray.from_arrays(offsets, filled), b"\n")[0].as_buffer()
        options = pyarrow.json.ParseOptions(
            explicit_schema=self._schema, unexpected_field_behavior="ignore"
        )
        # One block and one thread: rows must not be cut at a block's end, and Spark has its own
        # cores.
        reading = pyarrow.json.ReadOptions(use_threads=False, block_size=lines.size + 1)
        try:
            table = pyarrow.json.read_json(
                pa.BufferReader(lines), read_options=reading, parse_options=options
            ).combine_chunks()
        except pa.ArrowInvalid:
            return None
        # An empty payload gives no row, one with two objects gives two: rows no longer match.
        if table.num_rows != len(payloads):
            return None
        empty = [pa.nulls(len(payloads), each.type) for each in self._schema]
        columns = [
            column.chunk(0) if column.num_chunks else empty[at]
            for at, column in enumerate(table.select(self._schema.names).columns)
        ]
        return Decoded(columns)


class Avro:
    """The fields of Avro records."""

    def __init__(self, info: SchemaInfo, fields: list[StructField], writer: Writer) -> None:
        self._schema = pa.schema([_arrow(each) for each in fields])
        self._reader = info.data
        self._writer = writer
        self._convert = _converter(StructType(fields))

    def decode(self, payloads: pa.Array, versions: pa.Array) -> Decoded:
        # Imported here: only queries on Avro topics need the package.
        from fastavro import schemaless_reader

        reader = parsed_definition(self._reader)
        # The registry is asked once for each version of a batch, not for each message (invariant
        # 3).
        written = {version: self._written(version) for version in versions.unique().to_pylist()}
        rows = zip(payloads.to_pylist(), versions.to_pylist(), strict=True)

        def read(row: tuple[bytes, bytes | None]) -> Any:
            data, version = row
            return self._convert(schemaless_reader(BytesIO(data), written[version], reader))

        pairs = [None if data is None else (data, version) for data, version in rows]
        return _records(pairs, read, self._schema)

    def _written(self, version: bytes | None) -> Any:
        found = self._writer(version) if version else None
        # A message without a version was sent before the topic had a schema, or by a client that
        # does not say: the schema of the query is the best guess.
        has_own = found is not None and found.type is SchemaType.AVRO
        return parsed_definition(found.data if has_own and found is not None else self._reader)


# --- one by one


def _one_by_one(rows: list[Any], read: Callable[[Any], Any], kind: pa.DataType) -> Decoded:
    errors: dict[int, str] = {}
    found = [None if row is None else _tried(read, row, at, errors) for at, row in enumerate(rows)]
    return Decoded([pa.array(found, kind)], errors)


def _records(rows: list[Any], read: Callable[[Any], Any], schema: pa.Schema) -> Decoded:
    errors: dict[int, str] = {}
    found = [None if row is None else _tried(read, row, at, errors) for at, row in enumerate(rows)]
    kind = pa.struct(list(schema))
    try:
        built = pa.array(found, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        # One of them does not fit its type: which, only a look at each can tell.
        fitting = [
            None if row is None else _tried(lambda one: pa.array([one], kind)[0], row, at, errors)
            for at, row in enumerate(found)
        ]
        built = pa.array([None if each is None else each.as_py() for each in fitting], kind)
    return Decoded(built.flatten(), errors)


def _tried(read: Callable[[Any], Any], row: Any, at: int, errors: dict[int, str]) -> Any:
    try:
        return read(row)
    except Exception as error:  # noqa: BLE001 - payloads are anything, and so is what they raise
        text = error.args[0] if isinstance(error, MagnetarError) else error
        errors[at] = f"{text}" or type(error).__name__
        return None


# --- types


def _arrow(field: StructField) -> pa.Field:
    return pa.field(field.name, to_arrow_type(field.dataType, timezone="UTC"), True)


def _is_plain(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return all(_is_plain(each.dataType) for each in kind.fields)
    # A map is never plain: Arrow's reader wants lists of pairs there, not JSON objects.
    if isinstance(kind, ArrayType):
        return _is_plain(kind.elementType)
    return isinstance(kind, _AT_ONCE)


def _converter(kind: DataType) -> Callable[[Any], Any]:
    """Make the converter from what a decoder gives to what Arrow takes; NULL stays NULL."""
    made = _MAKERS.get(type(kind))
    return _as_it_is if made is None else _unless_none(made(kind))


def _as_it_is(value: Any) -> Any:
    return value


def _unless_none(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


def _struct(kind: Any) -> Callable[[Any], Any]:
    parts = [(each.name, _converter(each.dataType)) for each in kind.fields]
    return lambda value: {name: convert(value.get(name)) for name, convert in parts}


def _array(kind: Any) -> Callable[[Any], Any]:
    convert = _converter(kind.elementType)
    return lambda value: [convert(each) for each in value]


def _map(kind: Any) -> Callable[[Any], Any]:
    convert = _converter(kind.valueType)
    return lambda value: [(key, convert(each)) for key, each in value.items()]


def _string(value: Any) -> str:
    if isinstance(value, str):
        return value
    # A user may ask for a nested field as text, as with Spark's own JSON source.
    if isinstance(value, dict | list):
        return json.dumps(value)
    return str(value)


def _binary(value: Any) -> bytes:
    """JSON has bytes as base64."""
    return base64.b64decode(value, validate=True) if isinstance(value, str) else bytes(value)


def _timestamp(value: Any) -> datetime:
    """JSON has times as milliseconds, or as text."""
    # `bool` is an `int` in Python; `true` as a time is a mistake, not the first millisecond.
    if isinstance(value, int) and not isinstance(value, bool):
        return _EPOCH + timedelta(milliseconds=value)
    return value if isinstance(value, datetime) else datetime.fromisoformat(value)


def _timestamp_ntz(value: Any) -> datetime:
    return _timestamp(value).replace(tzinfo=None)


def _date(value: Any) -> date:
    """JSON has dates as days, or as text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return date(1970, 1, 1) + timedelta(days=value)
    return value if isinstance(value, date) else date.fromisoformat(value)


def _milliseconds(value: Any) -> Any:
    """Avro has times of day too."""
    return _microseconds(value) // 1000 if isinstance(value, time) else value


def _microseconds(value: Any) -> Any:
    if not isinstance(value, time):
        return value
    seconds = (value.hour * 60 + value.minute) * 60 + value.second
    return seconds * 1_000_000 + value.microsecond


def _decimal(value: Any) -> Decimal:
    return value if isinstance(value, Decimal) else Decimal(str(value))


_MAKERS: Final[dict[type[DataType], Callable[[Any], Callable[[Any], Any]]]] = {
    StructType: _struct,
    ArrayType: _array,
    MapType: _map,
    StringType: lambda _: _string,
    BinaryType: lambda _: _binary,
    TimestampType: lambda _: _timestamp,
    TimestampNTZType: lambda _: _timestamp_ntz,
    DateType: lambda _: _date,
    DecimalType: lambda _: _decimal,
    # Avro's time-millis and time-micros, which are numbers in Spark (`spark_types`).
    IntegerType: lambda _: _milliseconds,
    LongType: lambda _: _microseconds,
}


def refuse(errors: Mapping[int, str], where: Callable[[int], str]) -> None:
    """Raise about the first of the rows that could not be read."""
    if errors:
        row = min(errors)
        raise UnreadableMessage(
            f"the value of {where(row)} cannot be read: {errors[row]}",
            hint='set corruptRecord to "null" to go on with NULL, or valueFormat to "bytes"',
        )
