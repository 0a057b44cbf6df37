"""Ranges of messages: positions between which a topic is read without a consumer (pure).

Owns: `RangePosition`, and the values that say which ranges there are (`RangeLayout`, `RangeState`).

A position is the next message to read, and ranges are half open: [a, b) and [b, c) together are
[a, c), whatever the messages are. Positions of one segment have the order of its log. A position
need not be that of a message: where the next one is aborted, a marker, trimmed or still to come,
reading goes on with the first behind it. `batch_index` is 0 unless a range begins inside a batch.

Invariants:
1. What a broker answers stands directly behind an entry that was there once, or at one, or is
   `ORIGIN`. So it is the same as long as no entry comes, whatever ledgers begin or end meanwhile;
   and two positions with no entry between them are equal.
2. A segment that never had a message, or lost none, begins at `ORIGIN`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from magnetar.model.ids import Position


@dataclass(frozen=True, slots=True, order=True)
class RangePosition:
    """The next message to read."""

    ledger: int
    """The ledger of its entry."""
    entry: int
    """The number of its entry there."""
    batch_index: int = 0
    """The first message of that entry that is not before it."""

    def __str__(self) -> str:
        text = f"{self.ledger}:{self.entry}"
        return f"{text}:{self.batch_index}" if self.batch_index else text

    @property
    def at(self) -> Position:
        """The entry that it stands at, or in."""
        return Position(self.ledger, self.entry)

    @property
    def stop(self) -> Position:
        """The position as the end of a range: the first entry of which nothing is before it."""
        # An end inside a batch still needs that entry, for the messages before the index.
        return Position(self.ledger, self.entry + (self.batch_index > 0))

    @classmethod
    def before(cls, entry: Position) -> RangePosition:
        """The position whose next message is the first one of an entry."""
        return cls(entry.ledger_id, entry.entry_id)

    @classmethod
    def behind(cls, entry: Position | None) -> RangePosition:
        """None: behind no entry at all."""
        # In the same ledger even if that has ended: the next one may not exist yet,
        # and the answer must not change when it does (invariant 1).
        return ORIGIN if entry is None else cls(entry.ledger_id, entry.entry_id + 1)


ORIGIN: Final = RangePosition(0, 0)
"""Before every message: no ledger has the id 0."""


@dataclass(frozen=True, slots=True)
class RangeSegment:
    """A segment of a scalable topic, a partition, or all of a topic without partitions."""

    number: int
    """Its id among the segments of its topic, or its partition."""
    name: str
    """Of the topic that holds its messages: `segment://...` or `persistent://...`."""
    parents: tuple[int, ...] = ()
    """Those that still exist. Each key's messages in them come before those here."""
    children: tuple[int, ...] = ()
    """The segments that took over from it, by a split or a merge."""
    is_sealed: bool = False
    """Whether its children take the messages."""
    created_ms: int = 0
    """When it began to take messages, by the broker's clock; 0: not known, as of partitions."""


@dataclass(frozen=True, slots=True)
class RangeLayout:
    """The segments of a topic, sealed ones that still exist included."""

    topic: str
    creation_id: str
    """Another one: the topic was deleted, and one of the same name was made."""
    epoch: int
    """Grows with every change; of a partitioned topic it is the number of partitions."""
    segments: tuple[RangeSegment, ...]
    """By number."""


@dataclass(frozen=True, slots=True)
class RangeState:
    """The two ends between which a segment can be read now."""

    first: RangePosition
    """A start below it is lost: an entry at or behind that start was trimmed."""
    stable: RangePosition
    """The end: below every undecided transaction, or (uncommitted) behind the last message."""
    is_sealed: bool
    """Nothing will ever stand behind `stable`: no message is taken, no transaction undecided."""


@dataclass(frozen=True, slots=True)
class RangeCount:
    """The amount of messages and bytes between two positions."""

    messages: int
    """0 only if there is none."""
    bytes: int
    """As stored: compressed, with metadata; aborted entries may be counted in."""
    is_exact: bool = False
    """Of the messages."""
