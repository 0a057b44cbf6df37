"""Pure: what dispatch is asked, and what it answers.

Owns: the values that pass between a subscription and its `DispatchState`.

Invariants:
1. A consumer is named by the key under which it joined; an entry by its position.
2. Entries in a plan are the objects that were given, so the owner finds its payloads in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Generic, NamedTuple, Protocol, TypeVar

from magnetar.broker.dispatch.key_shared import Moved
from magnetar.model.ids import Position


class EntryFacts(Protocol):
    """The facts of an entry that a choice needs."""

    @property
    def position(self) -> Position: ...
    @property
    def num_messages(self) -> int: ...
    @property
    def key_hash(self) -> int:
        """The 32-bit hash of its key; asked for on Key_Shared only."""

    @property
    def payload(self) -> bytes:
        """The stored bytes; asked for where consumers share entry buckets, which they name."""

    @property
    def open_indexes(self) -> int | None:
        """Messages of a partly acknowledged batch that are to be delivered: set bits; None: all."""


E = TypeVar("E", bound=EntryFacts)


class DispatchLimits(NamedTuple):
    """Limits of one subscription; 0 unacknowledged messages means no limit."""

    # Pulsar's dispatcherMaxReadBatchSize, and the round robin's share of it per consumer.
    read_entries: int = 500
    """Asked for at a time."""
    entries_per_turn: int = 20
    """To one consumer of a Shared subscription before the next one's turn."""
    look_ahead_entries: int = 2000
    """Waiting for their consumer while entries for others are read."""
    # As Pulsar's maxUnackedMessagesPerConsumer and maxUnackedMessagesPerSubscription.
    unacked_per_consumer: int = 50_000
    unacked_per_subscription: int = 200_000


class Read(NamedTuple):
    """The next read: positions that wait, or else so many new entries."""

    waiting: list[Position]
    new_entries: int


class DispatchPlan(NamedTuple, Generic[E]):
    """Hand each consumer its entries, in this order; a consumer may come more than once."""

    deliveries: list[tuple[int, Sequence[E]]]
    held_back: int
    """Entries that were given and wait now."""
    read_more: bool
    """Somebody could take more."""


class RefusalKind(Enum):
    BUSY = "busy"
    """ConsumerBusy on the wire."""
    ASSIGN = "assign"
    """ConsumerAssignError on the wire."""


class JoinRefused(NamedTuple):
    kind: RefusalKind
    reason: str


class MembershipChange(NamedTuple):
    """The consequences of a consumer's coming or going."""

    active: int | None
    """The active consumer of an Exclusive or Failover subscription."""
    active_changed: bool
    rewind: bool
    """Rewind the cursor, then call `on_rewound`."""
    moved: list[Moved]


class Redelivery(NamedTuple):
    """The consequences of a redelivery request."""

    entries: int
    """How many wait again."""
    rewind: bool
    """Rewind the cursor, then call `on_rewound`."""
