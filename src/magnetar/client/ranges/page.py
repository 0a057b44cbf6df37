"""The page of a range that one answer brought, as entries or as columns.

Owns: `RangePage`, and `RangeSource`, the segment that it comes from.

Invariants:
1. The messages of a page are those of its range: of an entry that the range begins or ends in, only
   the messages that belong to it.
2. There is an object for each entry at most, never one for each message of a batch.
3. What cannot be read is a row too, which says why: nothing is lost without being noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from magnetar.client.arrow.arrow import ENTRY_COLUMNS, RawEntry, entries_batch, entries_schema
from magnetar.model.ids import Position
from magnetar.model.ranges import RangePosition, RangeSegment
from magnetar.wire.messages import ReceivedEntries
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


@dataclass(frozen=True, slots=True)
class RangePage:
    """Some entries of a range, in order."""

    _source: RangeSource
    start: RangePosition
    """Of the page."""
    end: RangePosition
    """Of the whole range."""
    next: RangePosition
    """Where the next page begins; `end`, if this is the last one."""
    positions: tuple[Position, ...]
    """Where each entry stands."""
    sizes: tuple[int, ...]
    """How many bytes of `data` each entry has."""
    data: bytes
    """All entries, one behind the other."""

    @property
    def segment(self) -> RangeSegment:
        """The segment that it is of."""
        return self._source.segment

    def __len__(self) -> int:
        """How many entries it has."""
        return len(self.positions)

    def entries(self) -> Iterator[RawEntry]:
        """Entry by entry, with the messages that are in the range; batches are not opened."""
        first, last = self.start.at, self.end.at
        at, data = 0, self.data
        for position, size in zip(self.positions, self.sizes, strict=True):
            # Invariant 1: a range may begin and end inside of a batch.
            low = self.start.batch_index if position == first else 0
            high = self.end.batch_index if position == last else None
            entry = data[at : at + size]
            at += size
            yield RawEntry(*position, entry, low, high, data, at)

    def record_batch(self, names: Iterable[str] = ENTRY_COLUMNS) -> pa.RecordBatch:
        """The messages as Arrow columns, a row each; those of a consumer's, as far as they apply.

        What cannot be read is a row too, with the reason as a property: `magnetar-unreadable`.
        """
        return entries_batch(
            self.entries(),
            entries_schema(names),
            topic=self._source.topic,
            segment_id=self._source.segment_id,
            partition=self._source.partition,
        )


def page_of(
    source: RangeSource, start: RangePosition, end: RangePosition, answer: ReceivedEntries
) -> RangePage:
    """The page that an answer to RANGE_READ brought."""
    body = answer.body
    positions = tuple(
        Position(run.ledger_id, entry_id)
        for run in body.runs
        for entry_id in range(run.first_entry_id, run.first_entry_id + run.count)
    )
    following = position_from(body.next)
    return RangePage(source, start, end, following, positions, tuple(body.sizes), answer.data)


def position_from(wire: pb.RangePosition) -> RangePosition:
    return RangePosition(wire.ledger_id, wire.entry_id, wire.batch_index)


def wire_position(position: RangePosition) -> dict[str, int]:
    return {
        "ledger_id": position.ledger,
        "entry_id": position.entry,
        "batch_index": position.batch_index,
    }
