"""MESSAGEs of the common form, taken out of a stream by hand.

Owns: `take_deliveries`, for clients: a fraction of what protobuf takes for a command.

Invariants:
1. What is handed out is what protobuf would: anything unexpected is left to it.
2. Nothing is read beyond the bytes that are there, whatever they claim.
"""

from __future__ import annotations

import struct
from typing import Final

from crc32c import crc32c

from magnetar.model.ids import Position
from magnetar.wire.messages import (
    CHECKSUM,
    CHECKSUM_BYTES,
    MAGIC_CHECKSUM,
    Command,
    Delivered,
)

MESSAGE_START: Final = b"\x08\x09\x4a"
"""With which the command of a MESSAGE begins."""

# Total, size of the command, and the command's first five bytes, which are `08 09 4a n 08` for a
# MESSAGE with a body of n bytes that starts with its consumer.
_HEAD: Final = struct.Struct(">IIIB")
_LEAD: Final = 0x08094A00
_LEAD_BYTES: Final = 4
_SIZES_BYTES: Final = 8
_SIZE_BYTES: Final = 4
_BODY: Final = 12
# What this may look at from the beginning of a body on before it notices that the body is shorter.
_LOOK_AHEAD_BYTES: Final = 32
_SHIFT_MAX: Final = 56
_NEW_TUPLE: Final = tuple.__new__


# Each `return offset` below leaves a frame to the slow path, which knows every form (invariant 1):
# another command, one that is not here as a whole, or one whose checksum fails.
def take_deliveries(data: bytes, offset: int, limit: int, commands: list[Command]) -> int:
    """Take MESSAGEs of the common form, one after the other; where another frame begins.

    The common form: a consumer (below 2^14), a ledger and an entry (below 2^63), perhaps a
    partition and a count of redeliveries (below 2^7, the latter not 0), and a checksum that holds.
    """
    view, end, take = memoryview(data), len(data), commands.append
    last = end - _HEAD.size
    read_head, read_checksum = _HEAD.unpack_from, CHECKSUM.unpack_from
    # Up to the entry, all messages of a ledger for a consumer begin alike but for one length.
    known, consumer_id, ledger, id_start = b"", 0, 0, 0
    while offset <= last:
        total, size, lead, tag = read_head(data, offset)
        body_end = offset + _SIZES_BYTES + size
        stop = offset + _SIZE_BYTES + total
        start = offset + _BODY
        if (
            lead != _LEAD + size - _LEAD_BYTES
            or tag != 0x08
            or stop > end
            or body_end + CHECKSUM_BYTES > stop
            or start + _LOOK_AHEAD_BYTES > end
            or total > limit
        ):
            return offset
        if known and data.startswith(known, start):
            at = start + len(known)
        else:
            found = _id_before_entry(data, start)
            if found is None:
                return offset
            consumer_id, ledger, id_start, at = found
            known = data[start:at]
            id_start -= start
        id_end = start + id_start + data[start + id_start - 1]
        entry = data[at]
        at += 1
        if entry > 0x7F:
            entry &= 0x7F
            shift = 7
            while (byte := data[at]) > 0x7F:
                entry |= (byte & 0x7F) << shift
                shift += 7
                at += 1
                if shift > _SHIFT_MAX:
                    return offset
            entry |= byte << shift
            at += 1
        partition, redeliveries = -1, 0
        if at != id_end and data[at] == 0x18 and data[at + 1] <= 0x7F:
            partition = data[at + 1]
            at += 2
        # The id says more (a batch index, an ack set, a first chunk).
        if at != id_end:
            return offset
        # A 0 that was written out is left to protobuf: here it would look like an absent one.
        if at != body_end and data[at] == 0x18 and 0 < data[at + 1] <= 0x7F:
            redeliveries = data[at + 1]
            at += 2
        magic, stored = read_checksum(data, body_end)
        if (
            at != body_end
            or magic != MAGIC_CHECKSUM
            or crc32c(view[body_end + CHECKSUM_BYTES : stop]) != stored
        ):
            return offset
        position: Position = _NEW_TUPLE(Position, (ledger, entry))
        take(Delivered(consumer_id, position, data[body_end:stop], partition, redeliveries))
        offset = stop
    return offset


def _id_before_entry(data: bytes, at: int) -> tuple[int, int, int, int] | None:
    """Consumer and ledger, where the message's id begins, and where its entry does."""
    consumer_id = data[at + 1]
    at += 2
    if consumer_id > 0x7F:
        high = data[at]
        at += 1
        if high > 0x7F:
            return None
        consumer_id += (high << 7) - 0x80
    if data[at] != 0x12 or data[at + 1] > 0x7F or data[at + 2] != 0x08:
        return None
    id_start = at + 2
    at += 3
    ledger = shift = 0
    while (byte := data[at]) > 0x7F:
        ledger |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if shift > _SHIFT_MAX:
            return None
    ledger |= byte << shift
    return None if data[at + 1] != 0x10 else (consumer_id, ledger, id_start, at + 2)
