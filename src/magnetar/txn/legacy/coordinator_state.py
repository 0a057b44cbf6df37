"""The states of a legacy transaction, as the entries of its coordinator's log make them (pure).

Owns: `LegacyTransaction`, and how each entry of the log changes it. The same function makes the
state in memory and, after a restart, the state from the log.

    OPEN -> COMMITTING -> COMMITTED
    OPEN -> ABORTING   -> ABORTED

Invariants:
1. The first decision in the log is the decision: a later one changes nothing.
2. Topics and subscriptions are added only while a transaction is open.
3. A finished transaction never changes.
4. An entry of a transaction that the log does not know (its beginning is gone) makes none, unless
   it is `Ended`, which says all that is left to know.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from magnetar.txn.ids import to_text
from magnetar.txn.legacy.coordinator_entries import (
    Acknowledging,
    Began,
    Decided,
    Decision,
    Ended,
    Entry,
    LegacyState,
    Outcome,
    PartitionsAdded,
    SubscriptionsAdded,
)
from magnetar.txn.records import Header
from magnetar.wire.messages import TxnId

Name = TypeVar("Name", bound=str | Acknowledging)

NEVER: Final = -1

OUTCOMES: Final[dict[LegacyState, Outcome]] = {
    "COMMITTING": "COMMITTED",
    "COMMITTED": "COMMITTED",
    "ABORTING": "ABORTED",
    "ABORTED": "ABORTED",
}
"""What a state that is decided comes to."""


class LegacyTransaction(msgspec.Struct, frozen=True):
    """A legacy transaction, as its coordinator knows it."""

    number: int
    start_ms: int
    timeout_ms: int
    owner: str = ""
    """Who began it; empty: nobody was identified."""
    state: LegacyState = "OPEN"
    topics: tuple[str, ...] = ()
    subscriptions: tuple[Acknowledging, ...] = ()
    has_copy: bool = False
    """Whether topics find its state in a header, which is a copy of what the log says."""
    decided_ms: int = NEVER
    ended_ms: int = NEVER
    client: str = ""
    decided_by: str = ""

    @property
    def deadline_ms(self) -> int:
        return self.start_ms + self.timeout_ms

    @property
    def is_open(self) -> bool:
        return self.state == "OPEN"

    @property
    def is_ending(self) -> bool:
        return self.state in ("COMMITTING", "ABORTING")

    @property
    def is_finished(self) -> bool:
        return self.state in ("COMMITTED", "ABORTED")

    @property
    def commits(self) -> bool:
        """Whether it was decided to commit it."""
        return OUTCOMES.get(self.state) == "COMMITTED"


def after(known: LegacyTransaction | None, entry: Entry) -> LegacyTransaction | None:
    """What an entry makes of a transaction; None: there is none."""
    if known is None:
        return _first(entry)
    # A case whose guard fails falls through and changes nothing: an addition or a second decision
    # that a former leader managed to append behind the first one (invariants 1 to 3).
    match entry:
        case PartitionsAdded() if known.is_open:
            topics = _merged(known.topics, entry.topics)
            return replace(known, topics=topics, has_copy=known.has_copy or entry.copied)
        case SubscriptionsAdded() if known.is_open:
            merged = _merged(known.subscriptions, entry.subscriptions)
            has_copy = known.has_copy or entry.copied
            return replace(known, subscriptions=merged, has_copy=has_copy)
        case Decided() if known.is_open:
            return replace(known, state=entry.state, decided_ms=entry.at_ms, decided_by=entry.by)
        case Ended() if known.is_ending and OUTCOMES[known.state] == entry.state:
            return _first_ended(entry)  # who took part is not asked any more
    return known


def decision(
    known: LegacyTransaction, *, commit: bool, now_ms: int, by: str = ""
) -> Decided | None:
    """The entry that decides an open transaction; None: it is decided already."""
    # Decided before: the caller compares, and the same end again is no error.
    if not known.is_open:
        return None
    state: Decision = "COMMITTING" if commit else "ABORTING"
    return Decided(known.number, state, now_ms, by)


def ending(known: LegacyTransaction, now_ms: int) -> Ended:
    """The entry that finishes a transaction whose participants are done."""
    return Ended(
        known.number,
        OUTCOMES[known.state],
        known.start_ms,
        known.timeout_ms,
        known.owner,
        known.decided_ms,
        now_ms,
        known.client,
        known.decided_by,
    )


def header_of(txn: TxnId, known: LegacyTransaction) -> Header:
    """Make the header in which open transactions and the admin interface know both kinds."""
    return Header(
        to_text(txn),
        known.start_ms,
        known.deadline_ms,
        # NEVER while it is open; the state itself is OPEN, and `HeaderCopies.end` makes it final.
        finalized_ms=known.decided_ms,
        owner=known.owner,
        client=known.client,
        decided_by=known.decided_by,
    )


def _first(entry: Entry) -> LegacyTransaction | None:
    # Normally `Began`. Only `Ended` is left of a finished one; any other entry is the remainder of
    # one that was forgotten (invariant 4).
    match entry:
        case Began():
            return LegacyTransaction(
                entry.number, entry.start_ms, entry.timeout_ms, entry.owner, client=entry.client
            )
        case Ended():
            return _first_ended(entry)
    return None


def _first_ended(entry: Ended) -> LegacyTransaction:
    return LegacyTransaction(
        entry.number,
        entry.start_ms,
        entry.timeout_ms,
        entry.owner,
        entry.state,
        decided_ms=entry.decided_ms,
        ended_ms=entry.at_ms,
        client=entry.client,
        decided_by=entry.by,
    )


def _merged(known: tuple[Name, ...], new: tuple[Name, ...]) -> tuple[Name, ...]:
    return tuple(dict.fromkeys((*known, *new)))
