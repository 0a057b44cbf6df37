"""Pure: message ids as commands carry them.

Owns: the change between `MessageIdData` and positions.

Invariant: numbers are unsigned on the wire; -1, which stands for the earliest, is 2^64 - 1 there.
"""

from __future__ import annotations

from typing import Any, Final

from magnetar.client.message.message import AnyMessageId, MessageId
from magnetar.model.ids import Position, ScalableMessageId
from magnetar.wire.pb import pulsar_pb2 as pb

_UINT64: Final = 2**64
_INT64_MAX: Final = 2**63 - 1


def position_of(message_id: pb.MessageIdData) -> Position:
    return Position(_signed(message_id.ledgerId), _signed(message_id.entryId))


def id_from(message_id: pb.MessageIdData) -> MessageId:
    """The whole id."""
    position = position_of(message_id)
    return MessageId(*position, message_id.partition, message_id.batch_index, message_id.batch_size)


def wire_position(position: Position) -> dict[str, Any]:
    return {
        "ledgerId": position.ledger_id % _UINT64,
        "entryId": position.entry_id % _UINT64,
    }


def wire_id(message_id: MessageId) -> dict[str, Any]:
    """Where to start or to seek to; of a message in a batch, with its index."""
    fields = wire_position(message_id.position)
    # The partition is left out: a segment or partition is asked for by its own topic.
    if message_id.batch_index >= 0:
        fields["batch_index"] = message_id.batch_index
    return fields


def plain_id(message_id: AnyMessageId) -> MessageId:
    """The id within its segment."""
    return message_id.message_id if isinstance(message_id, ScalableMessageId) else message_id


def _signed(number: int) -> int:
    return number if number <= _INT64_MAX else number - _UINT64
