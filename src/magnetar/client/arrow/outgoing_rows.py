"""Rows of an Arrow record batch on their way into entries, without an object for each.

Owns: `OutgoingRows`: which segment and entry bucket each row is for, how many make a batch, and the
bytes of that batch. Everything but the sequence ids is encoded once, for all rows; columns of short
fields are taken out of tables that hold the encoded form of every small number.

Invariants:
1. The bytes of a batch are those that `batch_entry` makes of the same messages.
2. Rows of one key keep their order. Rows that were ordered by where they go (`placed`) are next to
   each other if they are for the same segment and entry bucket.
3. `OutgoingRows.of` answers None for what it cannot encode (very long keys or properties, columns
   of unusual types): such rows are sent one by one.

Relies on: pyarrow, which whoever has a record batch has imported.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Final, NamedTuple

from magnetar.client.arrow import arrow
from magnetar.client.message.routing import Router
from magnetar.errors import InvalidValue
from magnetar.model.hashing import bucket_hash, key_hash
from magnetar.model.segments import Segment
from magnetar.wire.frames import varint

# Two bytes of a varint: lengths of nearly all keys, properties and payloads are below 16 Ki.
_TABLE_BITS: Final = 14
_TABLE_SIZE: Final = 1 << _TABLE_BITS
_TABLE_MASK: Final = _TABLE_SIZE - 1
_ROOM_BYTES: Final = 24
"""For what follows the heads in the metadata of a message, and for its size."""

_SIZE: Final = struct.Struct(">I")
# Tags of SingleMessageMetadata, in the order in which protobuf writes the fields.
_PROPERTY: Final = b"\x0a"
_NAME: Final = b"\x0a"
_TEXT: Final = b"\x12"
_KEY: Final = b"\x12"
_PAYLOAD_SIZE: Final = b"\x18"
_EVENT_TIME: Final = b"\x28"
_KEY_IS_BASE64: Final = b"\x30\x01"
_SEQUENCE_ID: Final = b"\x40"
_NULL_VALUE: Final = b"\x48\x01"


class RowRun(NamedTuple):
    """Rows that are for one segment and entry bucket: up to, and without, `end`."""

    segment: Segment | None
    """None: they have no key, so any segment will do."""
    end: int


class OutgoingRows:
    """Some rows, in the order in which they are to be sent."""

    __slots__ = (
        "_before",
        "_codes",
        "_ends",
        "_hashes",
        "_heads",
        "_keys",
        "_order",
        "_source",
        "_tails",
        "_values",
        "num_rows",
    )

    def __init__(self) -> None:
        self.num_rows = 0
        self._source: Any
        """The columns as they were given, and None or which of its rows these are."""
        self._order: Any = None
        self._heads: Any
        """Of each row's metadata, what stands before the sequence id."""
        self._tails: Any = None
        """What stands behind it; None: nothing."""
        self._values: Any
        self._keys: Sequence[str | bytes] = ()
        """The different ones; and which of them, or null, each row has."""
        self._codes: Any = None
        self._hashes: Any = None
        """Of each key, its place among entry buckets, once that is known."""
        self._ends: memoryview
        """For each row, about how many bytes there are up to it; before the first, `_before`."""
        self._before = 0

    @classmethod
    def of(cls, batch: Any) -> OutgoingRows | None:
        """The rows of a record batch with the columns that `arrow.outgoing` takes."""
        pa = arrow.computing()
        made = cls()
        made.num_rows = batch.num_rows
        made._source = batch
        found = {name: batch.column(name) for name in batch.schema.names}
        values = found["value"].cast(pa.binary())
        # A message without a value: `null_value` stands behind the sequence id, its payload is
        # empty.
        if values.null_count:
            is_null = values.is_null()
            made._tails = pa.compute.if_else(is_null, _one(pa, _NULL_VALUE), _one(pa, b""))
            values = values.fill_null(b"")
        made._values = values
        parts = _heads(pa, found, made)
        if parts is None:
            return None
        made._heads = parts[0] if len(parts) == 1 else _joined(pa, parts)
        lengths = pa.compute.binary_length(made._heads)
        # Invariant 3: the size in front of a message comes from a table, too.
        if made.num_rows and pa.compute.max(lengths).as_py() + _ROOM_BYTES >= _TABLE_SIZE:
            return None
        made._measure(pa)
        return made

    def _measure(self, pa: Any) -> None:
        sizes = pa.compute.add(
            pa.compute.binary_length(self._heads), pa.compute.binary_length(self._values)
        )
        room = _number(pa, _ROOM_BYTES)
        total = pa.compute.cumulative_sum(pa.compute.add(sizes, room).cast(pa.int64()))
        self._ends = memoryview(total.buffers()[1] or b"").cast("q")

    def slice(self, start: int, count: int) -> OutgoingRows:
        """Some of them, next to each other; sizes are counted from the same beginning."""
        part = OutgoingRows()
        part.num_rows = count
        part._keys, part._hashes = self._keys, self._hashes
        if self._order is None:
            part._source = self._source.slice(start, count)
        else:
            part._source, part._order = self._source, self._order.slice(start, count)
        part._heads = self._heads.slice(start, count)
        part._values = self._values.slice(start, count)
        if self._tails is not None:
            part._tails = self._tails.slice(start, count)
        if self._codes is not None:
            part._codes = self._codes.slice(start, count)
        part._ends = self._ends[start : start + count]
        part._before = self._ends[start - 1] if start else self._before
        return part

    # --- where they go

    def placed(self, router: Router) -> tuple[OutgoingRows, list[RowRun]]:
        """All of them ordered by where they go, and which go where."""
        pa = arrow.computing()
        # Hashes are computed once per key, not per row: keys repeat.
        segments = router.segments
        only = segments[0] if len(segments) == 1 else None
        # No keys: any segment will do, and the caller takes turns.
        if self._codes is None:
            return self, [RowRun(None, self.num_rows)]
        numbers: dict[tuple[int, int], int] = {}
        hashes: list[int] = []
        group_of: list[int] = []
        targets: list[Segment | None] = []
        for key in self._keys:
            segment, bucket = only, 0
            # Regular topics have no entry buckets; scalable ones do, in every segment.
            if router.is_legacy:
                segment = segment or router.for_key(key)
            else:
                hash32 = key_hash(key)
                segment = segment or router.for_hash(hash32)
                hashes.append(bucket_hash(hash32))
                bucket = segment.bucket_of(hashes[-1])
            number = numbers.setdefault((segment.segment_id, bucket), len(numbers))
            if number == len(targets):
                targets.append(segment)
            group_of.append(number)
        self._hashes = pa.array(hashes, pa.int32()) if hashes else None
        # Rows without a key in a batch that has keys form a group of their own, the last.
        if self._codes.null_count:
            targets.append(None)
        # All for one place: nothing to order.
        if len(targets) == 1:
            return self, [RowRun(targets[0], self.num_rows)]
        # The group of each row by the code of its key; sorting by it is stable, so rows of one key
        # keep their order (invariant 2).
        groups = pa.array(group_of, pa.int32()).take(self._codes).fill_null(len(targets) - 1)
        counts = {
            each["values"]: each["counts"] for each in pa.compute.value_counts(groups).to_pylist()
        }
        ends = accumulate(counts.get(number, 0) for number in range(len(targets)))
        places = [RowRun(segment, end) for segment, end in zip(targets, ends, strict=True)]
        return self._taken(pa, pa.compute.array_sort_indices(groups)), places

    def _taken(self, pa: Any, order: Any) -> OutgoingRows:
        part = OutgoingRows()
        part.num_rows = self.num_rows
        part._source = self._source
        part._order = order if self._order is None else self._order.take(order)
        part._heads, part._values = self._heads.take(order), self._values.take(order)
        part._tails = None if self._tails is None else self._tails.take(order)
        part._keys, part._hashes = self._keys, self._hashes
        part._codes = self._codes.take(order)
        part._measure(pa)
        return part

    def fitting(self, start: int, end: int, *, messages_max: int, bytes_max: int) -> int:
        """How many from `start` on make a batch: one at least, and none from `end` on."""
        before = self._ends[start - 1] if start else self._before
        # Sizes were summed up once, so a batch is found by halving. From `start + 1`: one row at
        # least, even if it alone is too large.
        found = bisect_right(self._ends, before + bytes_max, start + 1, end)
        return min(found - start, messages_max)

    @property
    def size(self) -> int:
        """About how many bytes they have."""
        return self._ends[-1] - self._before if self.num_rows else 0

    # --- what they are

    def payload(self, first_sequence: int) -> bytes:
        """The payload of a batch of them, numbered from here on."""
        pa = arrow.computing()
        # Only sequence ids are new here: they are given out when the batch is sent.
        numbers, rest = _sequence_fields(pa, first_sequence, self.num_rows)
        length = pa.compute.binary_length
        sizes = pa.compute.add(length(self._heads), length(numbers))
        sizes = pa.compute.add(sizes, _number(pa, len(rest)))
        parts = [None, self._heads, numbers, _one(pa, rest)]
        if self._tails is not None:
            sizes = pa.compute.add(sizes, length(self._tails))
            parts.append(self._tails)
        parts[0] = _sizes_table().take(sizes)
        return _bytes_of(_joined(pa, [*parts, self._values]))

    @property
    def hash_span(self) -> tuple[int, int]:
        """The lowest and the highest place among entry buckets."""
        if self._codes is None or self._hashes is None:
            return 0, 0
        found = arrow.computing().compute.min_max(self._hashes.take(self._codes))
        low, high = found["min"].as_py(), found["max"].as_py()
        # No row of this slice has a key, which hashes to place 0.
        if low is None:
            return 0, 0
        return (0 if self._codes.null_count else low), high

    @property
    def only_key(self) -> str | bytes | None:
        """The key of all of them, if they have the same."""
        if self._codes is None or self._codes.null_count:
            return None
        # `_keys` are those of all rows; this slice may have but one of them.
        if len(self._keys) > 1:
            found = arrow.computing().compute.min_max(self._codes)
            if found["min"] != found["max"]:
                return None
        number: int = self._codes[0].as_py()
        return self._keys[number]

    def rows(self) -> Iterator[arrow.Row]:
        """An object for each, for those that must be sent one by one."""
        source = self._source if self._order is None else self._source.take(self._order)
        return arrow.outgoing(source)


# --- columns of encoded fields


def _heads(pa: Any, found: dict[str, Any], made: OutgoingRows) -> list[Any] | None:
    """Columns of the fields that stand before the sequence id; None: too long, or unusual."""
    parts: list[Any] = []
    if "properties" in found:
        properties = _encoded_properties(pa, found["properties"])
        if properties is None:
            return None
        parts.append(properties)
    is_base64 = None
    if "key" in found:
        # Text or bytes, plain or as a dictionary; other types are sent one by one, which says what
        # is wrong.
        column = found["key"]
        kind = getattr(column.type, "value_type", column.type)
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if not is_text and not pa.types.is_binary(kind) and not pa.types.is_large_binary(kind):
            return None
        coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        # A null hidden in the dictionary would be a key to `_codes`.
        if coded.dictionary.null_count:
            return None
        keys: list[Any] = coded.dictionary.to_pylist()
        made._keys = keys
        made._codes = coded.indices.cast(pa.int32())
        texts = coded.dictionary.cast(pa.binary())
        # Pulsar keeps keys as text: bytes go as base64, with a flag.
        if not is_text:
            encoded = [b64encode(each) for each in keys]
            texts = pa.array(encoded, pa.binary())
            is_base64 = column.is_valid()
        fields = _joined(pa, [_fields(pa, _KEY, pa.compute.binary_length(texts)), texts])
        parts.append(fields.take(made._codes).fill_null(b""))
    # In protobuf's order of fields (invariant 1): properties, key, payload size, event time,
    # base64.
    parts.append(_fields(pa, _PAYLOAD_SIZE, pa.compute.binary_length(made._values)))
    if "event_time" in found:
        parts.append(_event_times(pa, found["event_time"]))
    if is_base64 is not None:
        parts.append(pa.compute.if_else(is_base64, _one(pa, _KEY_IS_BASE64), _one(pa, b"")))
    return parts


def _event_times(pa: Any, column: Any) -> Any:
    times = arrow.milliseconds(column).fill_null(0)
    if len(times) and pa.compute.min(times).as_py() < 0:
        raise InvalidValue("an event time is before 1970")
    fields = _fields(pa, _EVENT_TIME, times)
    is_there = pa.compute.not_equal(times, 0)
    return pa.compute.if_else(is_there, fields, _one(pa, b""))


def _encoded_properties(pa: Any, column: Any) -> Any:
    """The properties of each row; None: not a map of text to text."""
    kind = column.type
    if not pa.types.is_map(kind) or not all(
        pa.types.is_string(each) for each in (kind.key_type, kind.item_type)
    ):
        return None
    # A slice of a larger batch: only from its first offset to its last.
    offsets = column.offsets
    count = len(column)
    first, last = (offsets[0].as_py(), offsets[count].as_py()) if count else (0, 0)
    if column.null_count:
        sizes = pa.compute.subtract(offsets.slice(1), offsets.slice(0, count))
        if pa.compute.any(pa.compute.not_equal(sizes, 0).filter(column.is_null())).as_py():
            return None  # something is hidden behind a null
    names = column.keys.slice(first, last - first).cast(pa.binary())
    texts = column.items.slice(first, last - first).cast(pa.binary())
    if texts.null_count:
        raise InvalidValue("a property has no text, but null")
    name_fields = _fields(pa, _NAME, pa.compute.binary_length(names))
    text_fields = _fields(pa, _TEXT, pa.compute.binary_length(texts))
    bodies = _joined(pa, [name_fields, names, text_fields, texts])
    encoded = _joined(pa, [_fields(pa, _PROPERTY, pa.compute.binary_length(bodies)), bodies])
    # All properties are encoded one behind the other; new edges at the offsets of the rows join
    # those of one row, without copying.
    _, ends, data = encoded.buffers()
    edges = pa.Array.from_buffers(pa.int32(), len(encoded) + 1, [None, ends], offset=encoded.offset)
    edges = edges.take(pa.compute.subtract(offsets, first))
    return pa.Array.from_buffers(pa.binary(), count, [None, edges.buffers()[1], data])


def _fields(pa: Any, tag: bytes, numbers: Any) -> Any:
    """A field of each number."""
    if not len(numbers):
        return pa.array([], pa.binary())
    span = pa.compute.min_max(numbers)
    low, high = span["min"].as_py(), span["max"].as_py()
    # Three ways: small numbers out of one table; numbers of five and six bytes, such as times of
    # this century, out of three; all others one by one, each different one once.
    if low >= 0 and high < _TABLE_SIZE:
        return _table(tag).take(numbers)
    if low >> _TABLE_BITS >= _TABLE_SIZE and high >> 3 * _TABLE_BITS == 0:
        compute = pa.compute
        middle = compute.shift_right(numbers, _TABLE_BITS)
        return _joined(
            pa,
            [
                _pieces(tag).take(compute.bit_wise_and(numbers, _TABLE_MASK)),
                _pieces(b"").take(compute.bit_wise_and(middle, _TABLE_MASK)),
                _table(b"").take(compute.shift_right(middle, _TABLE_BITS)),
            ],
        )
    coded = numbers.dictionary_encode()
    encoded = [tag + varint(each) for each in coded.dictionary.to_pylist()]
    return pa.array(encoded, pa.binary()).take(coded.indices)


def _sequence_fields(pa: Any, first: int, count: int) -> tuple[Any, bytes]:
    """The sequence ids from `first` on: what differs, and the end, which they have in common."""
    last = first + count - 1
    high = first >> _TABLE_BITS
    # Numbers of one batch mostly agree in all but the lowest 14 bits; this one crosses an edge.
    if high != last >> _TABLE_BITS:
        numbers = [_SEQUENCE_ID + varint(each) for each in range(first, last + 1)]
        return pa.array(numbers, pa.binary()), b""
    low = first & _TABLE_MASK
    if not high:
        return _table(_SEQUENCE_ID).slice(low, count), b""
    return _pieces(_SEQUENCE_ID).slice(low, count), varint(high)


@cache
def _table(tag: bytes) -> Any:
    """A field of each small number."""
    pa = arrow.pyarrow()
    return pa.array([tag + varint(number) for number in range(_TABLE_SIZE)], pa.binary())


@cache
def _pieces(tag: bytes) -> Any:
    """The first two bytes of a longer number, by its lowest bits."""
    pa = arrow.pyarrow()
    pieces = [
        tag + bytes((number & 0x7F | 0x80, number >> 7 | 0x80)) for number in range(_TABLE_SIZE)
    ]
    return pa.array(pieces, pa.binary())


@cache
def _sizes_table() -> Any:
    pa = arrow.pyarrow()
    return pa.array([_SIZE.pack(number) for number in range(_TABLE_SIZE)], pa.binary())


@cache
def _one(pa: Any, value: bytes) -> Any:
    return pa.scalar(value, pa.binary())


@cache
def _number(pa: Any, value: int) -> Any:
    """A scalar for sums with lengths. Kept: without pandas, Arrow looks for it at every number,
    in all folders of the path."""
    return pa.scalar(value, pa.int32())


def _joined(pa: Any, parts: Sequence[Any]) -> Any:
    """The columns put together, row by row."""
    return pa.compute.binary_join_element_wise(*parts, _one(pa, b""))


def _bytes_of(column: Any) -> bytes:
    """All bytes of a column, one row behind the other."""
    count = len(column)
    _, ends, data = column.buffers()
    edges = memoryview(ends).cast("i")
    start, stop = edges[column.offset], edges[column.offset + count]
    found: bytes = data.slice(start, stop - start).to_pybytes()
    return found
