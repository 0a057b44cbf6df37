"""Pure: where a subscription or a reader is moved to.

Owns: `SeekTarget`, what an application may name: a message, a time, the earliest or the latest
message; `seek_fields`, what SEEK says of it.

Invariant: a message is of one segment or partition; only the earliest and the latest message, and
times, are of all.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, TypeAlias

from magnetar.client.consume.segment.ack_state import all_of, size_from
from magnetar.client.message.message import AnyMessageId
from magnetar.client.message.message_ids import plain_id, wire_id
from magnetar.client.message.times import milliseconds
from magnetar.model.batch_indexes import words_of
from magnetar.model.ids import EARLIEST, LATEST

SeekTarget: TypeAlias = AnyMessageId | datetime | int
"""Times are datetimes or milliseconds since 1970."""


def one_message(target: SeekTarget) -> AnyMessageId | None:
    """The message that is named; None: it is a place in every segment."""
    if isinstance(target, datetime | int) or plain_id(target) in (EARLIEST, LATEST):
        return None
    return target


def seek_fields(target: SeekTarget) -> dict[str, Any]:
    """Where to, in the terms of SEEK."""
    if isinstance(target, datetime | int):
        return {"message_publish_time": milliseconds(target)}
    message = plain_id(target)
    fields = wire_id(message)
    if message.batch_index > 0:
        # Of a batch, the broker is told which messages are left of it.
        size = size_from(message.batch_index, message.batch_size)
        fields["ack_set"] = list(words_of(all_of(size) & ~all_of(message.batch_index)))
    return {"message_id": fields}
