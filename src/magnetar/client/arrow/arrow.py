"""Messages as Arrow record batches, without an object for each message.

Owns: the columns of a received batch (`columns`), the way from what waits in a receive queue to a
record batch (`record_batch`), and from entries as a broker has them (`entries_batch`), which
messages a record batch names (`entries_in`), and the messages that one holds for a producer
(`outgoing`).

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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from magnetar.client.arrow.arrow_columns import GrowingColumns, SharedColumns
from magnetar.client.message.batch import OpenedEntry, open_entry
from magnetar.client.message.batch_columns import (
    BatchColumns,
    columns_in,
    one_row,
    signed,
    single_columns,
)
from magnetar.client.message.chunks import assembled
from magnetar.client.message.entry_rows import EntryRows
from magnetar.client.message.message import Message, given_name
from magnetar.errors import InvalidSetting, InvalidValue, UnreadableMessage
from magnetar.model.ids import Position
from magnetar.wire.messages import checksum_holds
from magnetar.wire.pb import pulsar_pb2 as pb

if TYPE_CHECKING:
    import pyarrow as pa

UNREADABLE: Final = "magnetar-unreadable"
"""A property of rows that stand for something that cannot be read: why. Their value is null."""

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


# Kept: a schema is built of Python objects, and is needed with every batch.
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


def record_batch(taken: Sequence[Message[Any] | EntryRows]) -> pa.RecordBatch:
    """What was taken out of a receive queue."""
    # A receive queue holds whole batches as columns (`EntryRows`), and single messages as objects:
    # those that came alone, in chunks, or could not be read.
    growing = GrowingColumns(computing(), columns())
    for each in taken:
        if isinstance(each, EntryRows):
            metadata, source, raw = each.metadata, each.source, each.last_id
            sequence_id = metadata.sequence_id
        else:
            metadata, source, raw = each._entry_metadata, each._source, each._raw_id
            sequence_id = each.sequence_id
        facts = SharedColumns(
            source.topic,
            given_name(metadata.producer_name),
            signed(metadata.publish_time),
            *raw.position,
            max(0, raw.batch_size),
            signed(sequence_id),
            source.segment_id,
            raw.partition,
            each.redelivery_count,
        )
        if isinstance(each, EntryRows):
            growing.add(each.columns, each.indexes, facts)
        else:
            growing.add(_columns_of(each), range(1), facts)
    return growing.built()


def _columns_of(message: Message[Any]) -> BatchColumns:
    # Invariant 2: a row all the same, so that its id can be acknowledged.
    trouble = message.trouble
    told = {} if trouble is None else {UNREADABLE: str(trouble)}
    return one_row(
        None if trouble is not None or message.is_null else message.data,
        _key(message),
        message.properties | told,
        signed(message.event_time_ms or 0),
        index=message._batch_index,
    )


def _key(message: Message[Any]) -> bytes | None:
    """The key of a message; none if that should be base64 and is not."""
    try:
        return message.key_bytes
    except UnreadableMessage:
        return None


class RawEntry(NamedTuple):
    """An entry as a broker has it, and which of its messages are asked for."""

    ledger_id: int
    entry_id: int
    headers_and_payload: bytes
    first: int = 0
    end: int | None = None
    """Behind the last one; None: all of the batch."""
    page: bytes | None = None
    """What the entry was cut out of, if it is to be read there."""
    ends_at: int = 0
    """Where in the page it ends."""


ENTRY_COLUMNS: Final = (
    "value",
    "key",
    "properties",
    "publish_time",
    "event_time",
    "producer",
    "sequence_id",
    "ledger_id",
    "entry_id",
    "batch_index",
    "batch_size",
    "schema_version",
    "topic",
    "segment_id",
    "partition",
    "ordering_key",
)
"""What `entries_batch` can make. Types are as in `columns`; `schema_version` is a dictionary of
bytes, and `ordering_key` bytes or null.
"""


def entries_schema(names: Iterable[str] = ENTRY_COLUMNS) -> pa.Schema:
    """The schema of what `entries_batch` makes of these columns, in this order."""
    arrow, fields = pyarrow(), []
    for name in names:
        if name not in ENTRY_COLUMNS:
            known = ", ".join(ENTRY_COLUMNS)
            raise InvalidValue(f"entries have no column {name!r}", hint=f"they have {known}")
        # Two columns that consumers do not have; all others are of the types that those know.
        if name == "schema_version":
            kind = arrow.dictionary(arrow.int32(), arrow.binary())
            fields.append(arrow.field(name, kind, nullable=False))
        elif name == "ordering_key":
            fields.append(arrow.field(name, arrow.binary()))
        else:
            fields.append(columns().field(name))
    return arrow.schema(fields)


def entries_batch(
    entries: Iterable[RawEntry],
    schema: pa.Schema,
    *,
    topic: str = "",
    segment_id: int | None = None,
    partition: int = -1,
) -> pa.RecordBatch:
    """The messages of entries that were read from a segment, one row each, in their order.

        schema = entries_schema(("value", "key", "entry_id", "batch_index"))
        batch = entries_batch(entries, schema)

    Entries that are not for the application (markers, aborted ones) must have been left out;
    messages that compaction took out are left out here. What cannot be read is a row with a null
    value and the reason as its property `UNREADABLE`. The chunks of a message must come in a row;
    they are one message, with the id of the last.
    """
    growing = GrowingColumns(computing(), schema)
    wanted = frozenset(schema.names)
    # Chunks of the message that is being put together; `raw` is the last entry, whose id it gets.
    chunks: list[OpenedEntry] = []
    raw = None
    for raw in entries:
        try:
            opened = _checked(raw)
            if opened.metadata.num_chunks_from_msg > 1:
                whole = assembled(chunks, opened)
                # Not the last chunk: no row yet.
                if whole is None:
                    continue
                opened = opened._replace(payload=whole)
            found, indexes = _messages(opened, raw, wanted)
        # One entry that is broken must not hide those behind it (invariant 2).
        except UnreadableMessage as error:
            opened, found, indexes = _unreadable(error)
        growing.add(found, indexes, _facts(opened, raw, topic, segment_id, partition))
    # The entries end inside a message: that is told as a row as well.
    if chunks and raw is not None:
        told = UnreadableMessage("a chunk of a message whose last chunk did not come")
        opened, found, indexes = _unreadable(told)
        growing.add(found, indexes, _facts(opened, raw, topic, segment_id, partition))
    return growing.built()


def _unreadable(error: UnreadableMessage) -> tuple[OpenedEntry, BatchColumns, Sequence[int]]:
    """A row that says why there is none."""
    opened = OpenedEntry(pb.MessageMetadata(), b"", is_batch=False)
    return opened, one_row(None, None, {UNREADABLE: str(error)}), range(1)


def _facts(
    opened: OpenedEntry, raw: RawEntry, topic: str, segment_id: int | None, partition: int
) -> SharedColumns:
    metadata = opened.metadata
    return SharedColumns(
        topic,
        given_name(metadata.producer_name),
        signed(metadata.publish_time),
        raw.ledger_id,
        raw.entry_id,
        opened.num_messages if opened.is_batch else 0,
        signed(metadata.sequence_id),
        segment_id,
        partition,
        schema_version=metadata.schema_version,
    )


def _checked(raw: RawEntry) -> OpenedEntry:
    if not checksum_holds(raw.headers_and_payload):
        raise UnreadableMessage(f"the checksum of {raw.ledger_id}:{raw.entry_id} does not hold")
    return open_entry(raw.headers_and_payload)


def _messages(
    opened: OpenedEntry, raw: RawEntry, wanted: frozenset[str]
) -> tuple[BatchColumns, Sequence[int]]:
    """The messages of an entry, and which of them are asked for."""
    if not opened.is_batch:
        return single_columns(opened), range(1)
    within = None
    # What is not compressed is read where it stands; the payload is the end of an entry.
    if raw.page is not None and not opened.metadata.compression:
        within = raw.page, raw.ends_at - len(opened.payload)
    found = columns_in(
        opened,
        with_properties="properties" in wanted,
        with_ordering_keys="ordering_key" in wanted,
        within=within,
    )
    # A range may begin or end inside a batch; and compaction leaves messages in it that are gone.
    indexes: Sequence[int] = range(len(found))[raw.first : raw.end]
    if found.compacted_out:
        indexes = [index for index in indexes if not found.compacted_out >> index & 1]
    return found, indexes


def computing() -> Any:
    """pyarrow with its functions over arrays."""
    arrow = pyarrow()
    import_module("pyarrow.compute")
    return arrow


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
    # A table may consist of many batches: entries are counted in each.
    for part in batch.to_batches() if isinstance(batch, pyarrow().Table) else (batch,):
        yield from _entries_in(part)


def _entries_in(batch: pa.RecordBatch) -> Iterator[EntryIn]:
    compute = import_module("pyarrow.compute")
    # Rows of one entry mostly stand together: where any column of the id changes, another entry
    # begins. An entry that comes in two runs gives two items, whose masks add up at the consumer.
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
    # The usual case: a run without a gap, as it was received.
    first, count = indexes[0], len(indexes)
    if first >= 0 and indexes == list(range(first, first + count)):
        return ((1 << count) - 1) << first
    mask = 0
    # -1, a message that is no batch, is bit 0.
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
    """The messages of a batch that `sent_columns` gave, each as an object."""
    found = {name: _sent(batch, name) for name in _SENT_COLUMNS}
    for value, key, properties, time in zip(*found.values(), strict=True):
        yield Row(value, key, dict(properties) if properties else {}, time)


def sent_columns(batch: pa.RecordBatch | pa.Table) -> list[pa.RecordBatch]:
    """The columns of a batch that are sent; raises `InvalidValue` if it is none."""
    arrow = pyarrow()
    if not isinstance(batch, arrow.RecordBatch | arrow.Table):
        raise InvalidValue(f"{type(batch).__name__} is no record batch of Arrow")
    names = batch.schema.names
    if "value" not in names:
        raise InvalidValue(f"a batch to send has no column `value`, but {', '.join(names)}")
    # Other columns are ignored: a batch that was received can be sent on as it is.
    chosen = batch.select([name for name in _SENT_COLUMNS if name in names])
    return chosen.to_batches() if isinstance(chosen, arrow.Table) else [chosen]


def milliseconds(times: pa.Array) -> pa.Array:
    """Times, or milliseconds since 1970 as they are, as integers."""
    arrow = pyarrow()
    # Safe casts: a time finer than milliseconds raises instead of being cut off.
    if not arrow.types.is_integer(times.type):
        times = times.cast(arrow.timestamp("ms", tz="UTC"))
    return times.cast(arrow.int64())


def _sent(batch: pa.RecordBatch, name: str) -> list[Any]:
    if name not in batch.schema.names:
        return [None] * batch.num_rows
    column = batch.column(name)
    if name == "value":
        column = column.cast(pyarrow().binary())
    if name == "event_time":
        column = milliseconds(column)
    found: list[Any] = column.to_pylist()
    return found
