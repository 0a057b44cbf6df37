"""What one answer brought of a range, as entries, as rows, or as columns.

Owns: `RangePage`, `RangeEntry`, and `RangeSource`, the segment that they come from.

Invariants:
1. The messages of a page are those of its range: of an entry that the range begins or ends in, only
   the messages that belong to it.
2. There is an object for each entry at most, never one for each message of a batch.
3. What cannot be read is a row too, whose value raises: nothing is lost without being noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from magnetar.client.arrow import record_batch
from magnetar.client.batch import OpenedEntry, open_entry, unpacked
from magnetar.client.batch_columns import columns_in
from magnetar.client.entry_rows import EntryRows
from magnetar.client.message import AnyMessageId, Message, MessageId, ScalableMessageId, Unreadable
from magnetar.errors import UnreadableMessage
from magnetar.model.ids import Position
from magnetar.model.ranges import RangePosition, RangeSegment
from magnetar.wire.messages import ReceivedEntries, checksum_holds
from magnetar.wire.pb import pulsar_pb2 as pb

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class RangeSource:
    """A segment, as the source of messages."""

    topic: str
    segment: RangeSegment
    segment_id: int | None
    """None: of a regular topic."""
    partition: int
    """-1: none."""

    @property
    def wire_topic(self) -> str:
        return self.segment.name

    def id_of(self, message_id: MessageId, _turn: int) -> AnyMessageId:
        if self.segment_id is None:
            return message_id
        return ScalableMessageId(self.segment_id, message_id, (), self.topic)

    def handing_out(self, message: Message[Any]) -> None:
        """Nobody keeps track of what is read."""

    def handing_out_rows(self, rows: Any, turn: int) -> None:
        """Nobody keeps track of what is read."""


class RangeEntry(NamedTuple):
    """An entry of a range: one message, or a batch."""

    position: Position
    first_index: int
    """Of its messages in the range; 0 but for a batch that the range begins in."""
    stop_index: int | None
    """Behind the last of its messages in the range; None: all."""
    data: bytes
    """headers_and_payload, as stored."""


@dataclass(frozen=True, slots=True)
class RangePage:
    """Some entries of a range, in order."""

    source: RangeSource
    start: RangePosition
    """Of the page."""
    end: RangePosition
    """Of the whole range."""
    next: RangePosition
    """Where the next page begins; `end`, if this is the last one."""
    positions: tuple[Position, ...]
    sizes: tuple[int, ...]
    data: bytes
    """All entries, one behind the other."""

    @classmethod
    def of(
        cls, source: RangeSource, start: RangePosition, end: RangePosition, answer: ReceivedEntries
    ) -> RangePage:
        body = answer.body
        positions = tuple(
            Position(run.ledger_id, entry_id)
            for run in body.runs
            for entry_id in range(run.first_entry_id, run.first_entry_id + run.count)
        )
        following = position_from(body.next)
        return cls(source, start, end, following, positions, tuple(body.sizes), answer.data)

    @property
    def segment(self) -> RangeSegment:
        return self.source.segment

    def __len__(self) -> int:
        """How many entries it has."""
        return len(self.positions)

    def entries(self) -> Iterator[RangeEntry]:
        """Entry by entry; batches are not opened."""
        first, last = self.start.at, self.end.at
        at, data = 0, self.data
        for position, size in zip(self.positions, self.sizes, strict=True):
            low = self.start.batch_index if position == first else 0
            high = self.end.batch_index if position == last else None
            yield RangeEntry(position, low, high, data[at : at + size])
            at += size

    def rows(self) -> list[Message[bytes] | EntryRows]:
        """What columns are made of: a batch as a whole, other messages one by one."""
        chunks: list[OpenedEntry] = []
        rows = (self._row(entry, chunks) for entry in self.entries())
        return [row for row in rows if row is not None]

    def record_batch(self) -> pa.RecordBatch:
        """The messages as Arrow columns, those of `receive_arrow` of a consumer."""
        return record_batch(self.rows())

    def _row(
        self, entry: RangeEntry, chunks: list[OpenedEntry]
    ) -> Message[bytes] | EntryRows | None:
        """None: no message ends with it, or none that is in the range."""
        try:
            if not checksum_holds(entry.data):
                raise UnreadableMessage(f"the checksum of {entry.position} does not hold")
            opened = open_entry(entry.data)
            if opened.metadata.num_chunks_from_msg > 1:
                payload = _assembled(chunks, opened)
                if payload is None:
                    return None
                return self._message(entry, opened.metadata, payload, _as_it_is)
            if not opened.is_batch:
                return self._message(entry, opened.metadata, opened.payload, _as_it_is)
            columns = columns_in(opened)
        except UnreadableMessage as error:
            metadata = pb.MessageMetadata(producer_name="", sequence_id=0, publish_time=0)
            return self._message(entry, metadata, entry.data, Unreadable(error))
        if entry.first_index or entry.stop_index is not None:
            columns = columns.part(entry.first_index, entry.stop_index or len(columns))
        if any(single.compacted_out for single in columns.rare.values()):
            gone = {index for index, each in columns.rare.items() if each.compacted_out}
            columns = columns.without(gone)
        if not len(columns):
            return None
        return EntryRows(self.source, entry.position, self.source.partition, opened, columns, 0, 0)

    def _message(
        self,
        entry: RangeEntry,
        metadata: pb.MessageMetadata,
        data: bytes,
        decode: Callable[[bytes, bytes], bytes],
    ) -> Message[bytes]:
        raw_id = MessageId(*entry.position, self.source.partition)
        return Message(
            source=self.source, raw_id=raw_id, data=data, metadata=metadata, single=None,
            decode=decode,
        )  # fmt: skip


def _assembled(chunks: list[OpenedEntry], chunk: OpenedEntry) -> bytes | None:
    """The payload of a message, once this is its last chunk; the server sends them in a row."""
    metadata = chunk.metadata
    chunks.append(chunk)
    if metadata.chunk_id < metadata.num_chunks_from_msg - 1:
        return None
    parts = [each for each in chunks if each.metadata.uuid == metadata.uuid]
    chunks.clear()
    payload = b"".join(each.payload for each in parts)
    if len(parts) != metadata.num_chunks_from_msg or len(payload) != metadata.total_chunk_msg_size:
        raise UnreadableMessage(f"{len(parts)} of {metadata.num_chunks_from_msg} chunks are there")
    return unpacked(payload, metadata) if metadata.compression else payload


def _as_it_is(data: bytes, _version: bytes) -> bytes:
    return data


def position_from(wire: pb.RangePosition) -> RangePosition:
    return RangePosition(wire.ledger_id, wire.entry_id, wire.batch_index)


def wire_position(position: RangePosition) -> dict[str, int]:
    return {
        "ledger_id": position.ledger,
        "entry_id": position.entry,
        "batch_index": position.batch_index,
    }
