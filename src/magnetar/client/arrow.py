"""Messages as Arrow record batches, without an object for each message.

Owns: the columns of a received batch (`columns`), the way from what waits in an inbox to a record
batch (`record_batch`), which messages a record batch names (`entries_in`), and the messages that
one holds for a producer (`outgoing`).

A received batch has a row per message: `value` and `key` (bytes; null if there is none),
`properties`, `publish_time`, `event_time`, `topic`, `producer`, `sequence_id`, `redelivery_count`,
and the id in parts: `segment_id` (null on regular topics), `ledger_id`, `entry_id`, `partition`,
`batch_index` (-1: not of a batch) and `batch_size`.

Invariants:
1. Values are the payloads as they were sent, decompressed: schemas are not applied.
2. What cannot be read is a row too, with a null value and the reason in a property (`UNREADABLE`).
3. The columns of ids alone say what is acknowledged: a slice or a filtered batch acknowledges its
   own rows only.

Relies on: pyarrow, which is there with `magnetar[arrow]`, and is imported when it is needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from magnetar.client.batch_columns import signed
from magnetar.client.entry_rows import EntryRows
from magnetar.client.message import Message
from magnetar.errors import InvalidSetting, InvalidValue, UnreadableMessage
from magnetar.model.ids import Position
from magnetar.wire.pb import pulsar_pb2 as pb

if TYPE_CHECKING:
    import pyarrow as pa

UNREADABLE: Final = "magnetar-unreadable"
"""A property of rows that stand for something that cannot be read: why. Their value is null."""

_SEGMENT_SUFFIX: Final = "-seg-"
_NO_SEGMENT: Final = -1
_INT32_MAX: Final = 2**31 - 1
_SENT_COLUMNS: Final = ("value", "key", "properties", "event_time")
_ENTRY_COLUMNS: Final = ("topic", "segment_id", "ledger_id", "entry_id")
_ID_COLUMNS: Final = (*_ENTRY_COLUMNS, "batch_index", "batch_size")


def pyarrow() -> Any:
    """The module; raises `InvalidSetting` if it is not installed."""
    try:
        return import_module("pyarrow")
    except ImportError as error:
        raise InvalidSetting(
            "columns need pyarrow, which is not installed", hint="install magnetar[arrow]"
        ) from error


@cache
def columns() -> Any:
    """The schema of received batches."""
    arrow = pyarrow()
    time = arrow.timestamp("ms", tz="UTC")
    names = arrow.dictionary(arrow.int32(), arrow.string())
    return arrow.schema(
        [
            arrow.field("value", arrow.binary()),
            arrow.field("key", arrow.binary()),
            arrow.field("properties", arrow.map_(arrow.string(), arrow.string()), nullable=False),
            arrow.field("publish_time", time, nullable=False),
            arrow.field("event_time", time),
            arrow.field("topic", names, nullable=False),
            arrow.field("producer", names, nullable=False),
            arrow.field("sequence_id", arrow.int64(), nullable=False),
            arrow.field("redelivery_count", arrow.int32(), nullable=False),
            arrow.field("segment_id", arrow.int64()),
            arrow.field("ledger_id", arrow.int64(), nullable=False),
            arrow.field("entry_id", arrow.int64(), nullable=False),
            arrow.field("partition", arrow.int32(), nullable=False),
            arrow.field("batch_index", arrow.int32(), nullable=False),
            arrow.field("batch_size", arrow.int32(), nullable=False),
        ]
    )


# --- received


class _Names:
    """A column of few different texts."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._column = array("i")

    def add(self, text: str, count: int) -> None:
        number = self._numbers.setdefault(text, len(self._numbers))
        self._column.extend(array("i", (number,)) * count)

    def built(self, arrow: Any) -> Any:
        indexes = _numbers(arrow, arrow.int32(), self._column)
        return arrow.DictionaryArray.from_arrays(indexes, arrow.array(list(self._numbers)))


class _Columns:
    """The columns of one record batch, as they grow."""

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] = []
        self.properties: dict[int, list[tuple[str, str]]] = {}
        self.event_times: dict[int, int] = {}
        """By row: most have neither."""
        self.topics = _Names()
        self.producers = _Names()
        self.longs = {name: array("q") for name in _LONGS}
        self.ints = {name: array("i") for name in _INTS}

    def add_rows(self, rows: EntryRows) -> None:
        found, count, at = rows.columns, rows.num_rows, len(self.values)
        self.values += found.values
        self.keys += found.keys
        self.longs["sequence_id"].extend(found.sequence_ids)
        self.ints["batch_index"].extend(found.indexes)
        if found.rare:
            for row, index in enumerate(found.indexes, at):
                if (single := found.rare.get(index)) is not None:
                    self._add_rare(row, single)
        self._repeat(rows, count, rows.position, rows.partition, rows.batch_size)

    def _add_rare(self, row: int, single: pb.SingleMessageMetadata) -> None:
        if single.properties:
            self.properties[row] = [(each.key, each.value) for each in single.properties]
        if single.event_time:
            self.event_times[row] = signed(single.event_time)

    def add_message(self, message: Message[Any]) -> None:
        raw = message.raw_id
        trouble = message.trouble
        has_value = trouble is None and not message.is_null
        told = {} if trouble is None else {UNREADABLE: str(trouble)}
        if properties := message.properties | told:
            self.properties[len(self.values)] = list(properties.items())
        if message.event_time_ms is not None:
            self.event_times[len(self.values)] = signed(message.event_time_ms)
        self.values.append(message.data if has_value else None)
        self.keys.append(_key(message))
        self.longs["sequence_id"].append(signed(message.sequence_id))
        self.ints["batch_index"].append(raw.batch_index)
        self._repeat(message, 1, raw.position, raw.partition, max(0, raw.batch_size))

    def _repeat(
        self,
        of: Message[Any] | EntryRows,
        count: int,
        position: Position,
        partition: int,
        batch_size: int,
    ) -> None:
        """What all rows of an entry have in common."""
        self.topics.add(of.source.topic, count)
        self.producers.add(_producer(of.metadata.producer_name), count)
        segment_id = of.source.segment_id
        longs = {
            "publish_time": signed(of.metadata.publish_time),
            "segment_id": _NO_SEGMENT if segment_id is None else segment_id,
            "ledger_id": position.ledger_id,
            "entry_id": position.entry_id,
        }
        for name, number in longs.items():
            self.longs[name].extend(array("q", (number,)) * count)
        ints = {
            "partition": partition,
            "batch_size": batch_size,
            "redelivery_count": min(of.redelivery_count, _INT32_MAX),
        }
        for name, number in ints.items():
            self.ints[name].extend(array("i", (number,)) * count)

    def _properties(self, arrow: Any, kind: Any) -> Any:
        count = len(self.values)
        if self.properties:
            return arrow.array([self.properties.get(row, ()) for row in range(count)], kind)
        offsets = _numbers(arrow, arrow.int32(), array("i", (0,)) * (count + 1))
        nothing = arrow.array([], arrow.string())
        return arrow.MapArray.from_arrays(offsets, nothing, nothing)

    def _event_times(self, arrow: Any, kind: Any) -> Any:
        count = len(self.values)
        if not self.event_times:
            return arrow.nulls(count, kind)
        return arrow.array([self.event_times.get(row) for row in range(count)], kind)

    def built(self) -> Any:
        arrow, schema = pyarrow(), columns()
        found = {
            "value": arrow.array(self.values, arrow.binary()),
            "key": arrow.array(self.keys, arrow.binary()),
            "properties": self._properties(arrow, schema.field("properties").type),
            "event_time": self._event_times(arrow, schema.field("event_time").type),
            "topic": self.topics.built(arrow),
            "producer": self.producers.built(arrow),
        }
        for name, numbers in (*self.longs.items(), *self.ints.items()):
            found[name] = _numbers(arrow, schema.field(name).type, numbers)
        segments = found["segment_id"]
        is_regular = arrow.compute.equal(segments, _NO_SEGMENT)
        found["segment_id"] = arrow.compute.if_else(is_regular, None, segments)
        return arrow.RecordBatch.from_arrays([found[name] for name in schema.names], schema=schema)


_LONGS: Final = ("publish_time", "sequence_id", "segment_id", "ledger_id", "entry_id")
_INTS: Final = ("redelivery_count", "partition", "batch_index", "batch_size")


def record_batch(taken: Sequence[Message[Any] | EntryRows]) -> pa.RecordBatch:
    """What was taken out of an inbox."""
    import_module("pyarrow.compute")
    built = _Columns()
    for each in taken:
        if isinstance(each, EntryRows):
            built.add_rows(each)
        else:
            built.add_message(each)
    return built.built()


def _numbers(arrow: Any, kind: Any, numbers: array[int]) -> Any:
    return arrow.Array.from_buffers(kind, len(numbers), [None, arrow.py_buffer(numbers)])


def _key(message: Message[Any]) -> bytes | None:
    """Its key; none if that should be base64 and is not."""
    try:
        return message.key_bytes
    except UnreadableMessage:
        return None


def _producer(name: str) -> str:
    given, separator, segment = name.rpartition(_SEGMENT_SUFFIX)
    return given if separator and segment.isdigit() else name


# --- acknowledged


class EntryIn(NamedTuple):
    """The messages of one entry that a record batch has."""

    topic: str
    segment_id: int | None
    position: Position
    mask: int
    batch_size: int
    last_index: int


def entries_in(batch: pa.RecordBatch) -> Iterator[EntryIn]:
    """What a record batch names, entry by entry; raises `InvalidValue` if it has no ids."""
    missing = [name for name in _ID_COLUMNS if name not in batch.schema.names]
    if missing:
        raise InvalidValue(f"a batch to acknowledge has no {missing[0]}: keep the id columns")
    for part in batch.to_batches() if isinstance(batch, pyarrow().Table) else (batch,):
        yield from _entries_in(part)


def _entries_in(batch: pa.RecordBatch) -> Iterator[EntryIn]:
    compute = import_module("pyarrow.compute")
    ends: set[int] = set()
    for name in _ENTRY_COLUMNS:
        column = batch.column(name)
        ends.update(compute.run_end_encode(getattr(column, "indices", column)).run_ends.to_pylist())
    indexes = batch.column("batch_index").to_pylist()
    start = 0
    for end in sorted(ends):
        part = {name: batch.column(name)[start].as_py() for name in _ID_COLUMNS}
        yield EntryIn(
            part["topic"],
            part["segment_id"],
            Position(part["ledger_id"], part["entry_id"]),
            _mask(indexes[start:end]),
            part["batch_size"],
            max(indexes[start:end]),
        )
        start = end


def _mask(indexes: list[int]) -> int:
    first, count = indexes[0], len(indexes)
    if first >= 0 and indexes == list(range(first, first + count)):
        return ((1 << count) - 1) << first
    mask = 0
    for index in indexes:
        mask |= 1 << max(0, index)
    return mask


# --- sent


class Row(NamedTuple):
    """One message of a record batch for a producer."""

    value: bytes | None
    key: bytes | str | None
    properties: Mapping[str, str]
    event_time_ms: int | None


def outgoing(batch: pa.RecordBatch) -> Iterator[Row]:
    """The messages of a batch: `value`, and if it has them `key`, `properties`, `event_time`."""
    arrow = pyarrow()
    if not isinstance(batch, arrow.RecordBatch | arrow.Table):
        raise InvalidValue(f"{type(batch).__name__} is no record batch of Arrow")
    if "value" not in batch.schema.names:
        names = ", ".join(batch.schema.names)
        raise InvalidValue(f"a batch to send has no column `value`, but {names}")
    found = {name: _sent(batch, name, arrow) for name in _SENT_COLUMNS}
    for value, key, properties, time in zip(*found.values(), strict=True):
        yield Row(value, key, dict(properties) if properties else {}, time)


def _sent(batch: pa.RecordBatch, name: str, arrow: Any) -> list[Any]:
    if name not in batch.schema.names:
        return [None] * batch.num_rows
    column = batch.column(name)
    if name == "value":
        column = column.cast(arrow.binary())
    if name == "event_time" and not arrow.types.is_integer(column.type):
        column = column.cast(arrow.timestamp("ms", tz="UTC")).cast(arrow.int64())
    found: list[Any] = column.to_pylist()
    return found
