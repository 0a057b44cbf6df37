"""Pure: the messages of one batch as they wait for an application that takes columns.

Owns: `EntryRows`. It has no object for each message; `messages` makes them, for an application that
takes messages after all.

Invariant: it holds exactly those messages of its entry that were let in, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from magnetar.client.batch import OpenedEntry, messages_in
from magnetar.client.batch_columns import BatchColumns
from magnetar.client.message import Message, MessageId, Source
from magnetar.model.ids import Position
from magnetar.wire.pb import pulsar_pb2 as pb


@dataclass(frozen=True, slots=True)
class EntryRows:
    """Some or all messages of one batch."""

    source: Source
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
    def batch_size(self) -> int:
        """Of the whole batch."""
        return self.opened.num_messages

    @property
    def metadata(self) -> pb.MessageMetadata:
        return self.opened.metadata

    @property
    def schema_version(self) -> bytes:
        return self.opened.metadata.schema_version

    @property
    def last_id(self) -> MessageId:
        """Of its last message."""
        return self._id(self.indexes[-1])

    def take(self, count: int) -> tuple[EntryRows, EntryRows]:
        """The first so many messages, and the others."""
        first, rest = self.indexes[:count], self.indexes[count:]
        return replace(self, indexes=first), replace(self, indexes=rest)

    def messages(self, decode: Callable[[bytes, bytes], Any]) -> list[Message[Any]]:
        """A message object for each."""
        singles = messages_in(self.opened)
        return [
            Message(
                source=self.source,
                raw_id=self._id(index),
                data=singles[index].payload,
                metadata=self.opened.metadata,
                single=singles[index].metadata,
                decode=decode,
                redelivery_count=self.redelivery_count,
                generation=self.generation,
            )
            for index in self.indexes
        ]

    def _id(self, index: int) -> MessageId:
        return MessageId(*self.position, self.partition, index, self.batch_size)
