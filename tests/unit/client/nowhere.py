"""A source of messages that nobody consumes."""

from __future__ import annotations

from typing import Any

from magnetar.client.message.message import AnyMessageId, Message, MessageId


class Nowhere:
    """For messages that are only looked at."""

    topic = wire_topic = "nowhere"
    segment_id: int | None = None

    def id_of(self, message_id: MessageId, turn: int) -> AnyMessageId:
        return message_id

    def handing_out(self, message: Message[Any]) -> None:
        raise AssertionError("it is not handed out")

    def handing_out_rows(self, rows: Any, turn: int) -> None:
        raise AssertionError("they are not handed out")
