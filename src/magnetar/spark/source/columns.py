"""The columns of the source: which there are, and how entries become record batches of them.

Owns: `Shape`, how the values of a query's topics are read; `spark_schema`, the columns that Spark
is told; `RowBatches`, from entries to record batches that have exactly these.

Invariants:
1. Record batches have the Arrow schema that Spark makes of its own one, to the last unit of time:
   it checks the first batch only, and breaks on the others.
2. `properties` is never NULL: Spark is ten times slower on NULL maps than on empty ones.
3. A column about the message whose name a field of the value has is called `__name`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from magnetar.client.arrow.arrow import UNREADABLE, RawEntry, entries_batch, entries_schema
from magnetar.client.schema.info import SchemaInfo, SchemaType
from magnetar.errors import InvalidSetting
from magnetar.spark.options import Options
from magnetar.spark.source.values import (
    SINGLE,
    Avro,
    Bytes,
    Json,
    SingleValues,
    Text,
    Values,
    Writer,
    refuse,
    text_of,
)
from magnetar.spark.spark_types import definition, fields_of

ERROR: Final = "_error"
ROWS_MAX: Final = 10_000
"""Of one record batch: fewer cost more for each, more gain nothing."""

_BYTES_HINT: Final = 'set valueFormat to "bytes" and decode the values in the query'


# --- about the message


@dataclass(frozen=True, slots=True)
class _About:
    """A column about the message, not of its value."""

    type: DataType
    needs: tuple[str, ...]
    """Columns of the client."""
    build: Callable[[pa.RecordBatch, str, int], pa.Array]
    """From those, the topic and the segment."""
    is_metadata: bool = True


def _text_key(batch: pa.RecordBatch, _topic: str, _segment: int) -> pa.Array:
    return text_of(batch.column("key")).columns[0]


def _plain(name: str, kind: pa.DataType) -> Callable[[pa.RecordBatch, str, int], pa.Array]:
    return lambda batch, _topic, _segment: batch.column(name).cast(kind)


def _message_id(batch: pa.RecordBatch, _topic: str, _segment: int) -> pa.Array:
    # A message that is no part of a batch has index -1; Pulsar writes its id with 0.
    index = pc.max_element_wise(batch.column("batch_index"), 0)
    parts = (batch.column("ledger_id"), batch.column("entry_id"), index)
    return pc.binary_join_element_wise(*(each.cast(pa.string()) for each in parts), ":")


def _schema_version(batch: pa.RecordBatch, _topic: str, _segment: int) -> pa.Array:
    # A dictionary column: each version is turned into a number once, not once per message.
    column = batch.column("schema_version")
    numbers = [
        int.from_bytes(each, "big") if each else None for each in column.dictionary.to_pylist()
    ]
    return pa.array(numbers, pa.int64()).take(column.indices)


# Spark's timestamps have microseconds; messages have milliseconds (invariant 1).
_TIME: Final = pa.timestamp("us", tz="UTC")

_ABOUT: Final[Mapping[str, _About]] = {
    "key": _About(StringType(), ("key",), _text_key, is_metadata=False),
    "keyBytes": _About(BinaryType(), ("key",), _plain("key", pa.binary()), is_metadata=False),
    "topic": _About(
        StringType(),
        (),
        lambda batch, topic, _: pa.repeat(pa.scalar(topic, pa.string()), batch.num_rows),
        is_metadata=False,
    ),
    "properties": _About(
        MapType(StringType(), StringType(), True),
        ("properties",),
        _plain("properties", pa.map_(pa.string(), pa.string())),
        is_metadata=False,
    ),
    "segment": _About(
        LongType(),
        (),
        lambda batch, _, segment: pa.repeat(pa.scalar(segment, pa.int64()), batch.num_rows),
    ),
    "messageId": _About(StringType(), ("ledger_id", "entry_id", "batch_index"), _message_id),
    "publishTime": _About(TimestampType(), ("publish_time",), _plain("publish_time", _TIME)),
    "eventTime": _About(TimestampType(), ("event_time",), _plain("event_time", _TIME)),
    "producerName": _About(StringType(), ("producer",), _plain("producer", pa.string())),
    "sequenceId": _About(LongType(), ("sequence_id",), _plain("sequence_id", pa.int64())),
    "schemaVersion": _About(LongType(), ("schema_version",), _schema_version),
}
# The names that queries written for the connector pulsar-spark use.
_PULSAR_SPARK: Final = {
    "key": "__key",
    "topic": "__topic",
    "messageId": "__messageId",
    "publishTime": "__publishTime",
    "eventTime": "__eventTime",
    "properties": "__messageProperties",
}


# --- the value


@dataclass(frozen=True, slots=True)
class Shape:
    """A way to read values: a format, its columns, and the topic's schema if that is needed."""

    format: str
    """bytes, string, single, json or avro."""
    fields: tuple[StructField, ...]
    info: SchemaInfo | None = None

    def values(self, writer: Writer) -> Values:
        """The way to decode them."""
        if self.format == "bytes":
            return Bytes()
        if self.format == "string":
            return Text()
        if self.format == "json":
            return Json(list(self.fields))
        assert self.info is not None, "the other formats have a schema"
        if self.format == "single":
            return SingleValues(self.info.type)
        return Avro(self.info, list(self.fields), writer)


def shape_of(wanted: str, info: SchemaInfo | None, topic: str) -> Shape:
    """The shape of a topic's values, from the option `valueFormat` and the registry's schema."""
    kind = SchemaType.BYTES if info is None else info.type
    # Bytes and text can be had of every topic, whatever its schema is.
    if wanted == "bytes" or (wanted == "auto" and kind is SchemaType.BYTES):
        return Shape("bytes", (StructField("value", BinaryType(), True),))
    if wanted == "string" or (wanted == "auto" and kind is SchemaType.STRING):
        return Shape("string", (StructField("value", StringType(), True),))
    # One number or truth value for each message, a column `value` with its type.
    if wanted == "auto" and kind in SINGLE:
        return Shape("single", (StructField("value", SINGLE[kind], True),), info)
    # From here on values have fields, and only a schema says which. Three ways to be wrong: asked
    # for fields where no schema has them, a schema of another kind (Protobuf, key and value), and a
    # format that is not the schema's.
    has_fields = kind in (SchemaType.JSON, SchemaType.AVRO)
    if wanted in ("json", "avro") and not has_fields:
        raise InvalidSetting(
            f"{topic} has no schema that says which columns its {wanted} values have",
            hint="give them to Spark with .schema(...)" if wanted == "json" else _BYTES_HINT,
        )
    if not has_fields:
        raise InvalidSetting(
            f"{topic} has a schema of type {kind.name}, which has no columns", hint=_BYTES_HINT
        )
    if wanted not in ("auto", kind.name.lower()):
        raise InvalidSetting(
            f"valueFormat is {wanted}, but the schema of {topic} is {kind.name}",
            hint=f"set valueFormat to {kind.name.lower()} or leave it out",
        )
    # Columns come from the newest schema; older messages are brought to it when they are read.
    assert info is not None, "it has a type"
    fields = fields_of(definition(info.data))
    return Shape(kind.name.lower(), tuple(fields), info)


def spark_schema(shape: Shape, options: Options) -> StructType:
    """The columns that a query gets if it asks for none in particular."""
    # Fields of the value come first and keep their names; columns about the message make way
    # (invariant 3).
    fields = list(shape.fields)
    if options["corruptRecord"] == "null":
        fields.append(StructField(ERROR, StringType(), True))
    taken = {each.name for each in fields}
    names = _names(options["columnStyle"], taken)
    for name, about in _ABOUT.items():
        # Two columns have an option of their own, since they are costly or seldom needed.
        is_wanted = options["includeMetadata"] or not about.is_metadata
        if name == "properties":
            is_wanted = options["includeProperties"]
        if name == "keyBytes":
            is_wanted = options["includeKeyBytes"]
        if is_wanted:
            fields.append(StructField(names[name], about.type, True))
    return StructType(fields)


def _names(style: str, taken: Iterable[str]) -> dict[str, str]:
    renamed = _PULSAR_SPARK if style == "pulsar-spark" else {}
    reserved = set(taken)
    return {name: renamed.get(name, f"__{name}" if name in reserved else name) for name in _ABOUT}


def shape_of_columns(schema: StructType, options: Options, info: SchemaInfo | None) -> Shape:
    """The shape of values, from the columns that a user asked for with `.schema(...)`."""
    # Both spellings of a column about the message: a user may name it as it is without a clash.
    about = set(_names(options["columnStyle"], ()).values()) | {f"__{name}" for name in _ABOUT}
    fields = tuple(each for each in schema.fields if each.name not in about | {ERROR})
    wanted = options["valueFormat"]
    # A single column `value` means the payload, if its type can be that; else it is a JSON field.
    if len(fields) == 1 and fields[0].name == "value" and wanted in ("auto", "bytes", "string"):
        if isinstance(fields[0].dataType, BinaryType) and wanted != "string":
            return Shape("bytes", fields)
        if isinstance(fields[0].dataType, StringType) and wanted != "bytes":
            return Shape("string", fields)
    # Only columns about the message: values are not decoded at all.
    if not fields:
        return Shape("bytes", ())
    if wanted == "avro" or (wanted == "auto" and info is not None and info.type is SchemaType.AVRO):
        return Shape("avro", fields, info)
    if wanted in ("auto", "json"):
        return Shape("json", fields)
    raise InvalidSetting(
        f"with valueFormat {wanted} there is no column {fields[0].name}",
        hint="name the columns about the message as the documents do, and `value`",
    )


# --- rows


@dataclass
class RowBatches:
    """Record batches of one segment."""

    topic: str
    segment: int
    schema: StructType
    shape: Shape
    style: str
    keeps_corrupt: bool
    writer: Writer
    _builders: list[tuple[str, _About | None]] = field(init=False)

    def __post_init__(self) -> None:
        taken = {each.name for each in self.shape.fields}
        about = {shown: name for name, shown in _names(self.style, taken).items()}
        self._builders = []
        # Only the columns that somebody asked for are taken out of the entries.
        needs = ["value"] if self.shape.fields else []
        # In the order of Spark's schema: the batches must have it exactly (invariant 1).
        for each in self.schema.fields:
            found = _ABOUT[about[each.name]] if each.name in about else None
            self._builders.append((each.name, found))
            if found is not None:
                _check_type(each, found)
                needs += found.needs
        if self.shape.format == "avro":
            needs.append("schema_version")
        # Rows that cannot be read say why there; their ids say which they are.
        needs += ["properties", "ledger_id", "entry_id", "batch_index"]
        self._entries = entries_schema(dict.fromkeys(needs))
        self._arrow = to_arrow_schema(self.schema, timezone="UTC")
        self._values = self.shape.values(self.writer)

    def of(self, entries: Iterable[RawEntry]) -> Iterator[pa.RecordBatch]:
        """The messages of some entries."""
        whole = entries_batch(entries, self._entries)
        for start in range(0, whole.num_rows, ROWS_MAX):
            yield self._batch(whole.slice(start, ROWS_MAX))

    def _batch(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        found: dict[str, pa.Array] = {}
        # Two kinds of broken rows: the whole entry cannot be opened, or one value cannot be
        # decoded.
        errors: dict[int, str] = _unreadable(rows)
        if self.shape.fields:
            has_version = "schema_version" in rows.schema.names
            versions = rows.column("schema_version") if has_version else pa.nulls(rows.num_rows)
            decoded = self._values.decode(rows.column("value"), versions)
            names = [each.name for each in self.shape.fields]
            found = dict(zip(names, decoded.columns, strict=True))
            errors |= decoded.errors
        # `corruptRecord` is `fail`: the task fails, with the id of the first message that is
        # broken.
        if not self.keeps_corrupt:
            refuse(errors, lambda row: _where(rows, row, self.topic, self.segment))
        columns = []
        for (name, about), kind in zip(self._builders, self._arrow, strict=True):
            if about is not None:
                column = about.build(rows, self.topic, self.segment)
            elif name == ERROR:
                column = pa.array([errors.get(row) for row in range(rows.num_rows)], pa.string())
            else:
                column = found[name]
            # Spark checks the first batch alone: a type that differs later would break it
            # (invariant 1).
            columns.append(column if column.type == kind.type else column.cast(kind.type))
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow)


def _check_type(asked: StructField, about: _About) -> None:
    if asked.dataType != about.type:
        raise InvalidSetting(
            f"the column {asked.name} is {about.type.simpleString()}, "
            f"not {asked.dataType.simpleString()}",
            hint="cast it in the query",
        )


def _unreadable(rows: pa.RecordBatch) -> dict[int, str]:
    """Entries that are broken: why, by row."""
    # Looking at all keys at once is cheap; only a batch that has a marked row becomes objects.
    properties = rows.column("properties")
    if not len(properties.keys):
        return {}
    marked = pc.equal(properties.keys, UNREADABLE)
    if not pc.any(marked).as_py():
        return {}
    found = {row: dict(pairs) for row, pairs in enumerate(properties.to_pylist()) if pairs}
    return {row: pairs[UNREADABLE] for row, pairs in found.items() if UNREADABLE in pairs}


def _where(rows: pa.RecordBatch, row: int, topic: str, segment: int) -> str:
    ledger, entry = (rows.column(name)[row].as_py() for name in ("ledger_id", "entry_id"))
    index = max(0, rows.column("batch_index")[row].as_py())
    return f"message {ledger}:{entry}:{index} in segment {segment} of {topic}"
