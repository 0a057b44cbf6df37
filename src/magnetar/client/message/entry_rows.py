"""Pure: the messages of one batch as they wait for an application that takes columns.

Owns: `EntryRows`. It has no object for each message; `messages` makes them, for an application that
takes messages after all.

Invariant: it holds exactly those messages of its entry that were let in, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from magnetar.client.message.batch import OpenedEntry, messages_in
from magnetar.client.message.batch_columns import CUTS, BatchColumns
from magnetar.client.message.message import Message, MessageId, MessageSource
from magnetar.model.ids import Position
from magnetar.wire.frames import SIZE_BYTES
from magnetar.wire.pb import pulsar_pb2 as pb


@dataclass(frozen=True, slots=True)
class EntryRows:
    """Some or all messages of one batch."""

    source: MessageSource
    position: Position
    partition: int
    opened: OpenedEntry
    columns: BatchColumns
    """Of all messages of the batch."""
    indexes: Sequence[int]
    """Those that it holds."""
    redelivery_count: int
    generation: int

    @property
    def num_rows(self) -> int:
        return len(self.indexes)

    @property
    def data(self) -> bytes:
        """The payload of the whole entry, which any one of its rows keeps alive."""
        return self.opened.payload

    @property
    def batch_size(self) -> int:
        """The number of messages of the whole batch."""
        return self.opened.num_messages

    @property
    def metadata(self) -> pb.MessageMetadata:
        return self.opened.metadata

    @property
    def schema_version(self) -> bytes:
        return self.opened.metadata.schema_version

    @property
    def last_id(self) -> MessageId:
        """The id of its last message."""
        return self._id(self.indexes[-1])

    def take(self, count: int) -> tuple[EntryRows, EntryRows]:
        """The first so many messages, and the others."""
        first, rest = self.indexes[:count], self.indexes[count:]
        return replace(self, indexes=first), replace(self, indexes=rest)

    def messages(self, decode: Callable[[bytes, bytes], Any]) -> list[Message[Any]]:
        """A message object for each."""
        columns, payload, metadata = self.columns, self.opened.payload, self.opened.metadata
        cuts, size = columns.cuts, self.batch_size
        # What was read by hand is where the payload says; all else protobuf has to read again.
        singles = None if columns.data is payload else messages_in(self.opened)
        found: list[Message[Any]] = []
        for index in self.indexes:
            if singles is None:
                at = CUTS * index
                start = cuts[at + 2]
                # The metadata of a message lies between the end of the one before, behind its size,
                # and its own payload; it stays bytes until somebody asks.
                single: Any = payload[cuts[at - 1] + SIZE_BYTES if index else SIZE_BYTES : start]
                data = payload[start : cuts[at + 3]]
            else:
                single, data = singles[index]
            message: Message[Any] = Message(
                self.source,
                self.position,
                data,
                metadata,
                single,
                decode,
                self.partition,
                index,
                size,
                self.redelivery_count,
                self.generation,
            )
            found.append(message)
        return found

    def _id(self, index: int) -> MessageId:
        return MessageId(*self.position, self.partition, index, self.batch_size)
