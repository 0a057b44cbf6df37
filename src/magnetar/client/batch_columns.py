"""Pure: the messages of a batch as columns, without an object for each.

Owns: `BatchColumns` and `columns_in`, which reads what most messages have (a size, a key that is
text, a sequence id) by hand, and hands every other message to protobuf.

Invariants:
1. The columns say what `messages_in` would, message by message.
2. Nothing read here is believed: sizes and counts that do not fit raise `UnreadableMessage`.
"""

from __future__ import annotations

import struct
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from magnetar.client.batch import OpenedEntry
from magnetar.errors import UnreadableMessage
from magnetar.wire.pb import pulsar_pb2 as pb

_SIZE: Final = struct.Struct(">I")
_INT64_MAX: Final = 2**63 - 1
_UINT64: Final = 2**64
_KEY: Final = 0x12
_PAYLOAD_SIZE: Final = 0x18
_SEQUENCE_ID: Final = 0x40


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """Some messages of a batch, in their order."""

    indexes: Sequence[int]
    values: Sequence[bytes | None]
    """None: a message without a value."""
    keys: Sequence[bytes | None]
    sequence_ids: Sequence[int]
    """Signed."""
    rare: dict[int, pb.SingleMessageMetadata]
    """By index in the batch: those that may have more than this."""

    def __len__(self) -> int:
        return len(self.indexes)

    def among(self, mask: int) -> BatchColumns:
        """Those of a whole batch that are set in `mask`."""
        chosen = [index for index in self.indexes if mask >> index & 1]
        return BatchColumns(
            chosen,
            [self.values[index] for index in chosen],
            [self.keys[index] for index in chosen],
            [self.sequence_ids[index] for index in chosen],
            self.rare,
        )

    def without(self, indexes: Set[int]) -> BatchColumns:
        """But those with these indexes in the batch."""
        kept = [at for at, index in enumerate(self.indexes) if index not in indexes]
        return BatchColumns(
            [self.indexes[at] for at in kept],
            [self.values[at] for at in kept],
            [self.keys[at] for at in kept],
            [self.sequence_ids[at] for at in kept],
            self.rare,
        )

    def part(self, start: int, stop: int) -> BatchColumns:
        return BatchColumns(
            self.indexes[start:stop],
            self.values[start:stop],
            self.keys[start:stop],
            self.sequence_ids[start:stop],
            self.rare,
        )


def signed(number: int) -> int:
    """Numbers are unsigned on the wire; those of columns are not."""
    return number if number <= _INT64_MAX else number - _UINT64


def columns_in(entry: OpenedEntry) -> BatchColumns:
    """The messages of a batch, all of them."""
    data, count, at = entry.payload, entry.num_messages, 0
    first = signed(entry.metadata.sequence_id)
    values: list[bytes | None] = []
    keys: list[bytes | None] = []
    numbers: list[int] = []
    rare: dict[int, pb.SingleMessageMetadata] = {}
    end, size_at = len(data), _SIZE.unpack_from
    for index in range(count):
        start = at + 4
        if start > end or (stop := start + size_at(data, at)[0]) > end:
            raise UnreadableMessage("a batch ends inside the metadata of a message")
        common = _common(data, start, stop)
        if common is None:
            single = rare[index] = _parsed(data[start:stop])
            key, size = _key_of(single), single.payload_size
            number = signed(single.sequence_id) if single.HasField("sequence_id") else first
            has_value = not single.null_value
        else:
            key, size, number = common
            has_value = True
            if number < 0:
                number = first
        at = stop + size
        if not stop <= at <= end:
            raise UnreadableMessage("a batch ends inside the payload of a message")
        values.append(data[stop:at] if has_value else None)
        keys.append(key)
        numbers.append(number)
    return BatchColumns(range(count), values, keys, numbers, rare)


def _common(data: bytes, at: int, stop: int) -> tuple[bytes | None, int, int] | None:
    """Key, payload size and sequence id (-1: none) of a message that has no more than these.

    None: it has, or it is written in another way; protobuf can tell.
    """
    if stop - at < 2:
        return None
    key = None
    if data[at] == _KEY:
        length = data[at + 1]
        start = at + 2
        at = start + length
        if length > 127 or at + 2 > stop:
            return None
        key = data[start:at]
        if not key.isascii():
            return None
    if data[at] != _PAYLOAD_SIZE:
        return None
    size = data[at + 1]
    at += 2
    if size > 127:
        if at >= stop or (more := data[at]) > 127:
            return None
        size = size & 127 | more << 7
        at += 1
    if at == stop:
        return key, size, -1
    if data[at] != _SEQUENCE_ID or data[stop - 1] > 127 or stop - at > 9:
        return None
    number = shift = 0
    for byte in data[at + 1 : stop - 1]:
        if byte < 128:
            return None
        number |= (byte & 127) << shift
        shift += 7
    return key, size, number | data[stop - 1] << shift


def _parsed(data: bytes) -> pb.SingleMessageMetadata:
    try:
        return pb.SingleMessageMetadata.FromString(data)
    except DecodeError as error:
        raise UnreadableMessage(f"a batch cannot be taken apart: {error}") from error


def _key_of(single: pb.SingleMessageMetadata) -> bytes | None:
    """Its key; none if that should be base64 and is not."""
    if not single.HasField("partition_key"):
        return None
    if not single.partition_key_b64_encoded:
        return single.partition_key.encode()
    try:
        return b64decode(single.partition_key, validate=True)
    except Base64Error:
        return None
