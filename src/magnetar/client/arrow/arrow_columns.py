"""The columns of one record batch as they grow, entry by entry.

Owns: `GrowingColumns` and `SharedColumns`, what all messages of an entry have in common.

What is kept of a message are offsets into the payload of its entry. At the end the payloads are put
one behind the other, the offsets become those of one Arrow array, and Arrow itself takes out of
that what a column is made of: every fourth piece is a key, every fourth one a value.

Invariants:
1. A row for each message that was added, in that order.
2. Columns that the schema does not have cost nothing but the walk through the batch.

Relies on: `BatchColumns`, whose offsets never go back; pyarrow, given by who makes one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from magnetar.client.message.batch_columns import CUTS, BatchColumns, decoded_key

_INT32_MAX: Final = 2**31 - 1
_NO_SEGMENT: Final = -1
_KEYS: Final = b"\x11"
_VALUES: Final = b"\x44"
"""Which pieces of a byte's worth of them (two rows) these are."""

# Indexes inside a batch begin at 0: slices of this one are faster than counting.
_FIRST_INDEXES: Final = array("i", range(4096))


class SharedColumns(NamedTuple):
    """The facts that all messages of an entry have in common; the names are those of columns."""

    topic: str
    producer: str
    publish_time: int
    ledger_id: int
    entry_id: int
    batch_size: int
    """0: it is no batch."""
    sequence_id: int = 0
    """Of messages that have none of their own."""
    segment_id: int | None = None
    partition: int = -1
    redelivery_count: int = 0
    schema_version: bytes = b""


class _Names:
    """A column of few different texts."""

    def __init__(self) -> None:
        self._numbers: dict[str | bytes, int] = {}
        self._column = array("i")

    def add(self, text: str | bytes, count: int) -> None:
        number = self._numbers.setdefault(text, len(self._numbers))
        self._column.extend(array("i", (number,)) * count)

    def built(self, arrow: Any, kind: Any) -> Any:
        indexes = _numbers(arrow, arrow.int32(), self._column)
        names = arrow.array(list(self._numbers), kind.value_type)
        return arrow.DictionaryArray.from_arrays(indexes, names)


class GrowingColumns:
    """The columns of a schema that has any of the names of `SharedColumns`, and `value`, `key`,
    `ordering_key`, `properties`, `event_time` and `batch_index`.
    """

    def __init__(self, arrow: Any, schema: Any) -> None:
        self._arrow = arrow
        self._schema = schema
        # Which columns are wanted is looked up once: `_add_run` is called for every entry
        # (invariant 2).
        names = set(schema.names)
        self._has_properties = "properties" in names
        self._has_event_times = "event_time" in names
        self._has_sequence_ids = "sequence_id" in names
        self._has_indexes = "batch_index" in names
        self._has_ordering_keys = "ordering_key" in names
        self._longs = {name: array("q") for name in _LONGS if name in names}
        self._ints = {name: array("i") for name in _INTS if name in names}
        self._names = {name: _Names() for name in _NAMES if name in names}
        # Per row, growing: offsets as they are in their entry, and beside them the base to add,
        # which is where the data of that entry begins. Arrow adds the two at the end, all at once.
        self._rows = 0
        self._data: list[bytes] = []
        self._size = self._base = 0
        self._cuts = array("q")
        self._cut_bases = array("q")
        self._base64_keys: list[int] = []
        self._null_values: list[int] = []
        self._properties = array("q")
        self._property_bases = array("q")
        self._property_ends = array("q", (0,))
        self._property_end_bases = array("q", (0,))
        self._event_times = array("q")
        self._sequence_ids = array("q")
        self._indexes = array("i")
        self._ordering_keys: dict[int, bytes] = {}
        """By row: most have none."""

    def __len__(self) -> int:
        return self._rows

    # --- growing

    def add(self, columns: BatchColumns, indexes: Sequence[int], facts: SharedColumns) -> None:
        """Some messages of an entry: those with these indexes."""
        # An entry of which every message is compacted out, or not asked for.
        if not indexes:
            return
        # All of the entry, also if few of its messages are wanted: copying pieces would cost more.
        # Entries of one page have the same bytes, which are there once; offsets never go back.
        is_there = bool(self._data) and self._data[-1] is columns.data
        if not is_there or columns.cuts[indexes[0] * CUTS] < self._cuts[-1]:
            self._data.append(columns.data)
            self._base = self._size
            self._size += len(columns.data)
        parts = [indexes] if isinstance(indexes, range) else _runs(indexes)
        for part in parts:
            self._add_run(columns, part[0], part[-1] + 1)
        self._repeat(facts, len(indexes))

    def _add_run(self, columns: BatchColumns, start: int, stop: int) -> None:
        count, base = stop - start, self._base
        cuts = columns.cuts
        self._cuts.extend(cuts if len(cuts) == count * CUTS else cuts[start * CUTS : stop * CUTS])
        self._cut_bases.extend(array("q", (base,)) * (count * CUTS))
        # From numbers within the batch to rows of all.
        shift = self._rows - start
        if columns.base64_keys:
            self._base64_keys += [r + shift for r in columns.base64_keys if start <= r < stop]
        if columns.null_values:
            self._null_values += [r + shift for r in columns.null_values if start <= r < stop]
        if self._has_properties:
            self._add_properties(columns, start, stop)
        if self._has_event_times:
            times = columns.event_times
            self._event_times.extend(times[start:stop] if times else array("q", (0,)) * count)
        if self._has_indexes:
            first, end = columns.first_index + start, columns.first_index + stop
            # -1 marks a message that is no batch.
            is_known = first >= 0 and end <= len(_FIRST_INDEXES)
            self._indexes.extend(_FIRST_INDEXES[first:end] if is_known else range(first, end))
        if self._has_sequence_ids:
            self._sequence_ids.extend(columns.sequence_ids[start:stop])
        if self._has_ordering_keys and columns.ordering_keys:
            for row, key in columns.ordering_keys.items():
                if start <= row < stop:
                    self._ordering_keys[row + shift] = key
        self._rows += count

    def _add_properties(self, columns: BatchColumns, start: int, stop: int) -> None:
        count, before = stop - start, len(self._properties)
        # No message of the entry has properties: the rows end where the last one ended.
        ends = columns.property_ends
        if not ends:
            self._property_ends.extend(array("q", (0,)) * count)
            self._property_end_bases.extend(array("q", (before,)) * count)
            return
        # Properties of rows before `start` are left out, so ends are moved back by as much.
        first = ends[start - 1] if start else 0
        self._properties.extend(columns.properties[first : ends[stop - 1]])
        added = len(self._properties) - before
        self._property_bases.extend(array("q", (self._base,)) * added)
        self._property_ends.extend(ends[start:stop])
        self._property_end_bases.extend(array("q", (before - first,)) * count)

    def _repeat(self, facts: SharedColumns, count: int) -> None:
        # The run brought none: all messages have that of their entry.
        if self._has_sequence_ids and len(self._sequence_ids) < self._rows:
            self._sequence_ids.extend(array("q", (facts.sequence_id,)) * count)
        for name, longs in self._longs.items():
            number = getattr(facts, name)
            longs.extend(array("q", (_NO_SEGMENT if number is None else number,)) * count)
        for name, ints in self._ints.items():
            ints.extend(array("i", (min(getattr(facts, name), _INT32_MAX),)) * count)
        for name, names in self._names.items():
            names.add(getattr(facts, name), count)

    # --- the end

    def built(self) -> Any:
        """The record batch."""
        arrow, schema = self._arrow, self._schema
        found: dict[str, Any] = {}
        for name, names in self._names.items():
            found[name] = names.built(arrow, schema.field(name).type)
        for name, numbers in (*self._longs.items(), *self._ints.items()):
            found[name] = _numbers(arrow, schema.field(name).type, numbers)
        if self._has_sequence_ids:
            found["sequence_id"] = _numbers(arrow, arrow.int64(), self._sequence_ids)
        if self._has_indexes:
            found["batch_index"] = _numbers(arrow, arrow.int32(), self._indexes)
        # Numbers first, nulls afterwards: an array of Python has no null.
        if "segment_id" in found:
            segments = found["segment_id"]
            is_regular = arrow.compute.equal(segments, _NO_SEGMENT)
            found["segment_id"] = arrow.compute.if_else(is_regular, None, segments)
        if self._has_event_times:
            kind = schema.field("event_time").type
            times = _numbers(arrow, arrow.int64(), self._event_times)
            # Event time 0 is none, as on the wire; the bits of the comparison are the validity of
            # the column.
            is_there = arrow.compute.not_equal(times, 0)
            found["event_time"] = _where(arrow, kind, is_there, times.buffers()[1:])
        if self._has_ordering_keys:
            found["ordering_key"] = arrow.nulls(self._rows, arrow.binary())
            if self._ordering_keys:
                keys = [self._ordering_keys.get(row) for row in range(self._rows)]
                found["ordering_key"] = arrow.array(keys, arrow.binary())
        data = arrow.py_buffer(b"".join(self._data))
        if "value" in schema.names or "key" in schema.names:
            self._build_pieces(found, data)
        if self._has_properties:
            found["properties"] = self._built_properties(data)
        return arrow.RecordBatch.from_arrays([found[name] for name in schema.names], schema=schema)

    def _build_pieces(self, found: dict[str, Any], data: Any) -> None:
        arrow, count = self._arrow, self._rows
        # One array over all bytes, cut at every offset; keys and values are every fourth piece of
        # it.
        pieces = _pieces(arrow, arrow.binary(), self._cuts, self._cut_bases, data)
        if "value" in self._schema.names:
            values = found["value"] = _picked(arrow, pieces, _VALUES, count)
            if self._null_values:
                # Arrow's validity: a bit per row, the lowest first.
                valid = bytearray(b"\xff") * (count // 8 + 1)
                for row in self._null_values:
                    valid[row >> 3] &= ~(1 << (row & 7))
                is_there = _bits(arrow, valid, count)
                found["value"] = _where(arrow, values.type, is_there, values.buffers()[1:])
        if "key" in self._schema.names:
            ends = _numbers(arrow, arrow.int64(), self._cuts[1::CUTS])
            values_begin = _numbers(arrow, arrow.int64(), self._cuts[2::CUTS])
            # A key that ends where the value begins is none: that is how `cuts` says it.
            has_key = arrow.compute.not_equal(ends, values_begin)
            if has_key.true_count == 0:
                found["key"] = arrow.nulls(count, arrow.binary())
            else:
                keys = _picked(arrow, pieces, _KEYS, count)
                keys = _where(arrow, keys.type, has_key, keys.buffers()[1:])
                found["key"] = self._decoded(keys)

    def _decoded(self, keys: Any) -> Any:
        if not self._base64_keys:
            return keys
        # Keys of bytes are rare, and only they need Python for each.
        texts = keys.to_pylist()
        for row in self._base64_keys:
            if texts[row] is not None:
                texts[row] = decoded_key(texts[row])
        return self._arrow.array(texts, keys.type)

    def _built_properties(self, data: Any) -> Any:
        arrow, text = self._arrow, self._arrow.string()
        count = len(self._properties) // CUTS
        ends = arrow.compute.add(
            _numbers(arrow, arrow.int64(), self._property_ends),
            _numbers(arrow, arrow.int64(), self._property_end_bases),
        )
        offsets = arrow.compute.divide(ends, CUTS).cast(arrow.int32())
        names = texts = arrow.array([], text)
        if count:
            pieces = _pieces(arrow, text, self._properties, self._property_bases, data)
            names = _picked(arrow, pieces, _KEYS, count)
            texts = _picked(arrow, pieces, _VALUES, count)
        return arrow.MapArray.from_arrays(offsets, names, texts)


_LONGS: Final = ("publish_time", "segment_id", "ledger_id", "entry_id")
_INTS: Final = ("redelivery_count", "partition", "batch_size")
_NAMES: Final = ("topic", "producer", "schema_version")


def _runs(indexes: Sequence[int]) -> Iterable[range]:
    """Indexes that grow, as runs without a gap."""
    start = before = indexes[0]
    for index in indexes[1:]:
        if index != before + 1:
            yield range(start, before + 1)
            start = index
        before = index
    yield range(start, before + 1)


def _numbers(arrow: Any, kind: Any, numbers: array[int]) -> Any:
    return arrow.Array.from_buffers(kind, len(numbers), [None, arrow.py_buffer(numbers)])


def _bits(arrow: Any, bits: bytes | bytearray, count: int) -> Any:
    return arrow.Array.from_buffers(arrow.bool_(), count, [None, arrow.py_buffer(bits)])


def _where(arrow: Any, kind: Any, is_there: Any, buffers: Sequence[Any]) -> Any:
    """An array of these buffers, null where something is not there."""
    return arrow.Array.from_buffers(kind, len(is_there), [is_there.buffers()[1], *buffers])


def _pieces(arrow: Any, kind: Any, cuts: array[int], bases: array[int], data: Any) -> Any:
    """What is between one cut and the next."""
    # All payloads of a batch together may be longer than 2 GiB, what a column takes of them not.
    wide = arrow.large_string() if kind == arrow.string() else arrow.large_binary()
    if not cuts:
        return arrow.array([], wide)
    offsets = arrow.compute.add(
        _numbers(arrow, arrow.int64(), cuts), _numbers(arrow, arrow.int64(), bases)
    )
    return arrow.Array.from_buffers(wide, len(cuts) - 1, [None, offsets.buffers()[1], data])


def _picked(arrow: Any, pieces: Any, which: bytes, count: int) -> Any:
    """One piece of each row, as an array with offsets of 32 bits."""
    chosen = _bits(arrow, which * (count // 2 + 1), len(pieces))
    narrow = arrow.string() if pieces.type == arrow.large_string() else arrow.binary()
    return pieces.filter(chosen).cast(narrow)
