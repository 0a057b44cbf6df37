"""Pure ids: positions in a managed ledger, message ids and checkpoints, and their byte forms.

A position is (ledger id, entry id). Ledger ids grow along a managed ledger's list, so tuple order
is log order, and a position is never used twice.

Byte forms (applications store them, and exchange them with other clients, so they are fixed):
- `MessageId` (v4): the protobuf message MessageIdData.
- `ScalableMessageId` (v5): big-endian; segment, v4 bytes, then sections that may be absent at the
  end: position vector, parent topic, position vectors by topic.
- `Checkpoint`: big-endian; a kind, then for a regular one a position vector.

Invariants:
1. `X.from_bytes(x.to_bytes()) == x` for each of them, and `from_bytes` of anything else raises
   `RequestError`.
2. Of a v5 id, only segment and v4 id count in comparisons: the rest says where to resume.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

from magnetar.errors import RequestError

NO_SEGMENT: Final = -1
"""The segment id of the earliest and the latest message id of a scalable topic."""

_INT64_MAX: Final = 2**63 - 1
_UINT64_MASK: Final = 2**64 - 1
# 64 bits in groups of seven.
_VARINT_BYTES_MAX: Final = 10
# The length, or count, that stands for an absent section of a v5 id.
_NONE: Final = -1
_NEW_TUPLE: Final = tuple.__new__
_I32: Final = struct.Struct(">i")
_I64: Final = struct.Struct(">q")

# Protobuf wire types, and the sizes of the fixed ones.
_VARINT: Final = 0
_DELIMITED: Final = 2
_FIXED_SIZES: Final = {1: 8, 5: 4}

# Field numbers of MessageIdData.
_LEDGER: Final = 1
_ENTRY: Final = 2
_PARTITION: Final = 3
_BATCH_INDEX: Final = 4
_BATCH_SIZE: Final = 6


class Position(NamedTuple):
    """The place of an entry in a managed ledger: tuple order is log order."""

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"

    @property
    def next(self) -> Position:
        """Behind it in its ledger; whether there is an entry, the ledger knows."""
        return _NEW_TUPLE(Position, (self[0], self[1] + 1))

    @property
    def previous(self) -> Position:
        """Before it in its ledger; -1 as an entry is before all of them."""
        return _NEW_TUPLE(Position, (self[0], self[1] - 1))


@dataclass(frozen=True, slots=True, order=True)
class MessageId:
    """A message of a regular topic or of one segment; -1 stands for "none"."""

    ledger_id: int
    """The ledger that holds its entry; ids grow along a topic."""
    entry_id: int
    """The number of its entry in that ledger."""
    partition: int = -1
    """The partition of a partitioned topic."""
    batch_index: int = -1
    """Its place among the messages of its entry; -1: the entry is this message."""
    # Not compared: the same message may be named by an id
    # that tells the size and by one that does not.
    batch_size: int = field(default=0, compare=False)
    """How many messages the entry has; 0: not known, or no batch."""

    @property
    def position(self) -> Position:
        """The entry that it is in."""
        # Not by its constructor, which costs three times as much: each message is asked for it.
        return _NEW_TUPLE(Position, (self.ledger_id, self.entry_id))

    def __str__(self) -> str:
        parts = [self.ledger_id, self.entry_id, self.partition]
        if self.batch_index >= 0:
            parts.append(self.batch_index)
        return ":".join(map(str, parts))

    # Ids stand in logs and tracebacks by the thousand.
    def __repr__(self) -> str:
        return f"<MessageId {self}>"

    def to_bytes(self) -> bytes:
        """The bytes that Java clients write: batch size always, partition and index if any."""
        out = bytearray()
        _put_field(out, _LEDGER, self.ledger_id)
        _put_field(out, _ENTRY, self.entry_id)
        if self.partition >= 0:
            _put_field(out, _PARTITION, self.partition)
        if self.batch_index >= 0:
            _put_field(out, _BATCH_INDEX, self.batch_index)
        _put_field(out, _BATCH_SIZE, self.batch_size)
        return bytes(out)

    @classmethod
    def from_bytes(cls, data: bytes) -> MessageId:
        """Fields that are not part of the id (an ack set, a first chunk) are skipped."""
        fields = _varint_fields(_Reader(data))
        if _LEDGER not in fields or _ENTRY not in fields:
            raise RequestError(f"message id {data.hex()} names no ledger or no entry")
        return cls(
            fields[_LEDGER],
            fields[_ENTRY],
            fields.get(_PARTITION, -1),
            fields.get(_BATCH_INDEX, -1),
            fields.get(_BATCH_SIZE, 0),
        )


# `MessageId.earliest` and `MessageId.latest` of Pulsar's clients: below and above every position.
EARLIEST: Final = MessageId(-1, -1)
LATEST: Final = MessageId(_INT64_MAX, _INT64_MAX)


class SegmentPosition(NamedTuple):
    """Up to where one segment was read."""

    segment_id: int
    message_id: MessageId


class TopicPositions(NamedTuple):
    """Up to where one topic of a consumer over many topics was read."""

    topic: str
    positions: tuple[SegmentPosition, ...]


@dataclass(frozen=True, slots=True, order=True)
class ScalableMessageId:
    """A message of a scalable topic (a v5 id), with where its consumer stood at that moment."""

    segment_id: int
    """The segment that it is in; -1: that of no message, but an end of the topic."""
    message_id: MessageId
    """The id within that segment."""
    # Invariant 2: from here on, what the consumer had read when it got the message.
    positions: tuple[SegmentPosition, ...] = field(default=(), compare=False)
    """What its consumer had received of each segment by then."""
    parent_topic: str | None = field(default=None, compare=False)
    """The scalable topic, if the consumer said it."""
    topics: tuple[TopicPositions, ...] | None = field(default=None, compare=False)
    """What its consumer had received of other topics, as clients of many topics write it."""

    # The message alone, as ids are compared: positions can be as many as there are segments.
    def __str__(self) -> str:
        return f"{self.segment_id}/{self.message_id}"

    def __repr__(self) -> str:
        return f"<ScalableMessageId {self}>"

    def to_bytes(self) -> bytes:
        """The byte form, to be stored: `from_bytes` reads it, and so do other clients."""
        out = bytearray()
        out += _I64.pack(self.segment_id)
        _put_bytes(out, self.message_id.to_bytes())
        _put_positions(out, self.positions)
        # Both optional sections are written even if they are
        # absent: the one behind needs its place.
        if self.parent_topic is None:
            out += _I32.pack(_NONE)
        else:
            _put_bytes(out, self.parent_topic.encode())
        if self.topics is None:
            out += _I32.pack(_NONE)
        else:
            out += _I32.pack(len(self.topics))
            for topic, positions in self.topics:
                _put_bytes(out, topic.encode())
                _put_positions(out, positions)
        return bytes(out)

    @classmethod
    def from_bytes(cls, data: bytes) -> ScalableMessageId:
        """Read an id from its bytes; raises `RequestError` if they are none."""
        reader = _Reader(data)
        segment_id = reader.i64()
        message_id = MessageId.from_bytes(reader.sized())
        # An id may stop after any section: what is behind the end was not told.
        positions = () if reader.at_end() else reader.positions()
        parent_topic = None if reader.at_end() else reader.optional_text()
        topics = None if reader.at_end() else reader.optional_topics()
        reader.expect_end()
        return cls(segment_id, message_id, positions, parent_topic, topics)


SCALABLE_EARLIEST: Final = ScalableMessageId(NO_SEGMENT, EARLIEST)
SCALABLE_LATEST: Final = ScalableMessageId(NO_SEGMENT, LATEST)


class CheckpointKind(IntEnum):
    REGULAR = 0
    EARLIEST = 1
    LATEST = 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The place where a checkpoint consumer resumes: a position per segment, or an end."""

    kind: CheckpointKind
    """Whether it is the earliest or the latest end, or positions say where it is."""
    positions: tuple[SegmentPosition, ...] = ()
    """What was received of each segment."""

    def __post_init__(self) -> None:
        if self.positions and self.kind is not CheckpointKind.REGULAR:
            raise RequestError(f"a checkpoint at the {self.kind.name.lower()} has no positions")

    def to_bytes(self) -> bytes:
        """The byte form, to be stored: `from_bytes` reads it, and so do other clients."""
        out = bytearray([self.kind])
        if self.kind is CheckpointKind.REGULAR:
            _put_positions(out, self.positions)
        return bytes(out)

    @classmethod
    def from_bytes(cls, data: bytes) -> Checkpoint:
        """Read a checkpoint from its bytes; raises `RequestError` if they are none."""
        reader = _Reader(data)
        number = reader.take(1)[0]
        # Applications keep these bytes for years: an unknown kind is damage, or a
        # newer client's, and a guess would resume at the wrong place.
        if number not in tuple(CheckpointKind):
            raise RequestError(f"checkpoint of unknown kind {number}")
        kind = CheckpointKind(number)
        # EARLIEST and LATEST are this one byte alone.
        positions = reader.positions() if kind is CheckpointKind.REGULAR else ()
        reader.expect_end()
        return cls(kind, positions)


# --- writing


def _put_field(out: bytearray, number: int, value: int) -> None:
    _put_varint(out, number << 3 | _VARINT)
    # A negative number is written as the 64-bit pattern of its two's complement.
    _put_varint(out, value & _UINT64_MASK)


def _put_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _put_bytes(out: bytearray, data: bytes) -> None:
    out += _I32.pack(len(data))
    out += data


def _put_positions(out: bytearray, positions: tuple[SegmentPosition, ...]) -> None:
    out += _I32.pack(len(positions))
    for segment_id, message_id in positions:
        out += _I64.pack(segment_id)
        _put_bytes(out, message_id.to_bytes())


# --- reading


class _Reader:
    """Takes the bytes of an id apart; every length is checked against what is left."""

    __slots__ = ("_data", "_offset")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 0

    def at_end(self) -> bool:
        return self._offset == len(self._data)

    def expect_end(self) -> None:
        if not self.at_end():
            raise RequestError(f"{len(self._data) - self._offset} bytes too many after an id")

    def take(self, size: int) -> bytes:
        # Lengths come out of the bytes themselves: damaged ones
        # are negative, or reach beyond the end.
        if not 0 <= size <= len(self._data) - self._offset:
            raise RequestError(f"an id of {len(self._data)} bytes is cut short or damaged")
        taken = self._data[self._offset : self._offset + size]
        self._offset += size
        return taken

    def varint(self) -> int:
        value = 0
        for index in range(_VARINT_BYTES_MAX):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                # The tenth byte has room for bits above the 64th; protobuf drops them as well.
                return value & _UINT64_MASK
        raise RequestError("an id holds a number of more than 64 bits")

    def i32(self) -> int:
        value: int = _I32.unpack(self.take(_I32.size))[0]
        return value

    def i64(self) -> int:
        value: int = _I64.unpack(self.take(_I64.size))[0]
        return value

    def sized(self) -> bytes:
        return self.take(self.i32())

    def positions(self) -> tuple[SegmentPosition, ...]:
        count = self._count()
        return tuple(
            SegmentPosition(self.i64(), MessageId.from_bytes(self.sized())) for _ in range(count)
        )

    def optional_text(self) -> str | None:
        size = self.i32()
        return None if size == _NONE else _text(self.take(size))

    def optional_topics(self) -> tuple[TopicPositions, ...] | None:
        count = self.i32()
        if count == _NONE:
            return None
        if count < 0:
            raise RequestError(f"an id announces {count} topics")
        return tuple(TopicPositions(_text(self.sized()), self.positions()) for _ in range(count))

    def _count(self) -> int:
        count = self.i32()
        if count < 0:
            raise RequestError(f"an id announces {count} positions")
        return count


def _varint_fields(reader: _Reader) -> dict[int, int]:
    """The number fields of a protobuf message, signed; the last of a repeated one wins."""
    fields: dict[int, int] = {}
    while not reader.at_end():
        tag = reader.varint()
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            value = reader.varint()
            # Ids are signed here: -1 (EARLIEST, no partition) travels as its 64-bit pattern.
            fields[number] = value if value <= _INT64_MAX else value - 2**64
        elif wire_type == _DELIMITED:
            # A nested message, as the id of a first chunk: no part of this id.
            reader.take(reader.varint())
        elif wire_type in _FIXED_SIZES:
            # MessageIdData has no such field; what a newer one adds is skipped, as protobuf does.
            reader.take(_FIXED_SIZES[wire_type])
        else:
            # Groups (3 and 4), and types that do not exist: only damaged bytes have them.
            raise RequestError(f"an id holds a field of unknown wire type {wire_type}")
    return fields


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestError("an id holds a topic name that is not UTF-8") from error
