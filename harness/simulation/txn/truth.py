"""What was durable of transactions, and when (pure).

Owns: `Truth` (a transaction), `PinStory` and `AbortedStory` (records about it, while they were
there), `Stored` (an entry) and `Place` (a log with all of them).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from magnetar.managed_ledger.records import CursorRecord, ManagedLedgerRecord
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.txn.records import Header, State


@lru_cache(maxsize=4096)
def place_of(topic: str) -> str:
    return TopicName.parse(topic).managed_ledger_name


class Stored(NamedTuple):
    """An entry."""

    txn: str | None
    numbers: tuple[int, ...]
    """Of its messages."""


@dataclass(slots=True)
class Truth:
    """A transaction."""

    txn: str
    header: Header | None = None
    decision: State | None = None
    decided_at: float | None = None

    def was(self, state: State, moment: float) -> bool:
        return self.decision == state and self.decided_at is not None and self.decided_at <= moment

    @property
    def is_open(self) -> bool:
        return self.decision is None


@dataclass(slots=True)
class PinStory:
    """A pin, from its writing to its end."""

    txn: str
    bound: Position
    since: float
    until: float | None = None
    is_late: bool = False
    """It was written when its writer was the owner no more."""


@dataclass(slots=True)
class AbortedStory:
    """An aborted record, while it covers up to one position."""

    last: Position
    since: float
    until: float | None = None


@dataclass(slots=True)
class Place:
    """A log."""

    entries: dict[Position, Stored] = field(default_factory=dict)
    record: ManagedLedgerRecord | None = None
    pins: list[PinStory] = field(default_factory=list)
    cursors: dict[str, CursorRecord] = field(default_factory=dict)

    @property
    def is_deleted(self) -> bool:
        return self.record is None or self.record.deleted
