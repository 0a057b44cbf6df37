"""Pure: the messages of one batch as they wait for an application that takes columns.

Owns: `EntryRows`. It has no object for each message; `messages` makes them, for an application that
takes messages after all.

Invariant: it holds exactly those messages of its entry that were let in, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from magnetar.client.batch import OpenedEntry, Single
from magnetar.client.message import Message, MessageId, Source
from magnetar.model.ids import Position
from magnetar.wire.pb import pulsar_pb2 as pb


class EntryRows:
    """Some or all messages of one batch."""

    __slots__ = (
        "generation",
        "indexes",
        "metadata",
        "partition",
        "position",
        "redelivery_count",
        "singles",
        "size",
        "source",
    )

    def __init__(
        self,
        *,
        source: Source,
        position: Position,
        partition: int,
        metadata: pb.MessageMetadata,
        singles: Sequence[Single],
        size: int,
        indexes: Sequence[int],
        redelivery_count: int,
        generation: int,
    ) -> None:
        self.source = source
        self.position = position
        self.partition = partition
        self.metadata = metadata
        self.singles = singles
        """Of the messages at `indexes`."""
        self.size = size
        """Of the whole batch."""
        self.indexes = indexes
        self.redelivery_count = redelivery_count
        self.generation = generation

    @classmethod
    def of(
        cls,
        source: Source,
        body: pb.CommandMessage,
        position: Position,
        opened: OpenedEntry,
        mask: int,
        generation: int,
        singles: Sequence[Single],
    ) -> EntryRows:
        """Those messages of a batch that are set in `mask`."""
        found, size = singles, len(singles)
        indexes: Sequence[int] = range(size)
        if mask != (1 << size) - 1:
            indexes = [index for index in indexes if mask >> index & 1]
            found = [found[index] for index in indexes]
        return cls(
            source=source,
            position=position,
            partition=body.message_id.partition,
            metadata=opened.metadata,
            singles=found,
            size=size,
            indexes=indexes,
            redelivery_count=body.redelivery_count,
            generation=generation,
        )

    def __len__(self) -> int:
        return len(self.indexes)

    @property
    def schema_version(self) -> bytes:
        return self.metadata.schema_version

    @property
    def last_id(self) -> MessageId:
        """Of its last message."""
        return MessageId(*self.position, self.partition, self.indexes[-1], self.size)

    def take(self, count: int) -> tuple[EntryRows, EntryRows]:
        """The first so many messages, and the others."""
        return self._part(0, count), self._part(count, len(self))

    def _part(self, start: int, stop: int) -> EntryRows:
        return EntryRows(
            source=self.source,
            position=self.position,
            partition=self.partition,
            metadata=self.metadata,
            singles=self.singles[start:stop],
            size=self.size,
            indexes=self.indexes[start:stop],
            redelivery_count=self.redelivery_count,
            generation=self.generation,
        )

    def messages(self, decode: Callable[[bytes, bytes], Any]) -> list[Message[Any]]:
        """A message object for each."""
        return [
            Message(
                source=self.source,
                raw_id=MessageId(*self.position, self.partition, index, self.size),
                data=payload,
                metadata=self.metadata,
                single=single,
                decode=decode,
                redelivery_count=self.redelivery_count,
                generation=self.generation,
            )
            for index, (single, payload) in zip(self.indexes, self.singles, strict=True)
        ]
