"""Pure: what a topic consists of for somebody who reads it range by range.

Owns: `RangePosition`, `RangeSegment`, `RangeLayout`, `RangeState`, `RangeCount`: the words in which
the broker answers, and in which a reader says what it wants.

Invariants:
1. A position names the next message to read, so a range is half open and two ranges that meet
   have no message in common.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class RangePosition:
    """The next message to read in a segment."""

    ledger: int
    entry: int
    batch_index: int = 0


@dataclass(frozen=True, slots=True)
class RangeSegment:
    """A segment of a scalable topic, a partition, or the whole of a regular topic."""

    number: int
    name: str
    parents: tuple[int, ...] = ()
    children: tuple[int, ...] = ()
    is_sealed: bool = False
    created_ms: int = 0
    """When it began to take messages, by the broker's clock; 0: not told."""


@dataclass(frozen=True, slots=True)
class RangeLayout:
    """Every segment that can still be read, sealed ones too."""

    topic: str
    creation_id: str
    """Another one when the topic was deleted and made again."""
    epoch: int
    segments: tuple[RangeSegment, ...]


@dataclass(frozen=True, slots=True)
class RangeState:
    """What of a segment can be read now."""

    first: RangePosition
    """The first message that is kept."""
    stable: RangePosition
    """The end: below every undecided transaction, or the tail if uncommitted ones are read too."""
    is_sealed: bool
    """Nothing will ever be written to it again."""


@dataclass(frozen=True, slots=True)
class RangeCount:
    """What a range holds: exact where that is cheap, else estimated."""

    messages: int
    bytes: int
