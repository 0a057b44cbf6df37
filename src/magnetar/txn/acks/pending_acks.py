"""Pure: what undecided transactions have acknowledged on one subscription.

Owns: `PendingAcks`: which messages are held by which transaction, the judgement of new
acknowledgements, and what a decision does to what was held.

A message is open, held by a transaction, or acknowledged (the cursor's). An acknowledgement in a
transaction makes open messages held; a commit makes them acknowledged, an abort open again.

Invariants:
1. A judged acknowledgement holds open messages only. What another transaction holds, one by one or
   as a part of everything up to a position, or the cursor has, is a conflict, whoever came first.
   Within one transaction only the same message one by one, twice, is a conflict.
2. One transaction at a time holds everything up to a position, and moves it only forward.
3. A plain acknowledgement of a held message is dropped: only the decision ends the hold.
4. What was read back from the store is not judged: two owners may have taken the same message, and
   it is open again only when nobody holds it any more.

Messages of an entry are the set bits of an integer. `WHOLE` has them all, however many they are.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from typing import Final, NamedTuple, Protocol

from magnetar.model.ids import Position
from magnetar.model.position_set import PositionSet
from magnetar.wire.messages import TxnId

WHOLE: Final = -1
"""As a set of messages: all of the entry. Every bit of -1 is set, so `&`, `|`, `~` just work."""


class CursorView(Protocol):
    """The part of a cursor that the judgement looks at."""

    @property
    def mark_delete(self) -> Position: ...

    def is_acked(self, position: Position) -> bool: ...

    def unacked_indexes(self, position: Position) -> int | None: ...


class Acked(NamedTuple):
    """Messages of one entry that a transaction acknowledges, itself or all before it too."""

    position: Position
    messages: int = WHOLE
    size: int = 0
    """How many messages the entry holds; it counts unless they are `WHOLE`."""

    @property
    def named(self) -> int:
        """The messages that were named one by one; 0: the entry was, whatever is in it."""
        return self.messages & _all_of(self.size)

    @property
    def unacked(self) -> int:
        """The messages that are left out, as set bits: the form of cursors and records."""
        return 0 if self.messages == WHOLE else ~self.messages & _all_of(self.size)

    def plus(self, other: Acked) -> Acked:
        """Unite the messages of two acknowledgements of one entry."""
        messages, size = self.messages | other.messages, max(self.size, other.size)
        # Batch indexes acknowledged one by one add up to the entry, which
        # then is stored without bits.
        if messages == _all_of(size):
            messages = WHOLE
        return Acked(self.position, messages, size)

    def covers(self, other: Acked) -> bool:
        """Whether everything up to this includes everything up to the other."""
        if other.position == self.position:
            return other.messages & ~self.messages == 0
        return other.position < self.position


def acked_of(position: Position, unacked: int, size: int) -> Acked:
    """Make an acknowledgement of the form in which set bits are messages that are left out."""
    left_out = unacked & _all_of(size)
    return Acked(position, ~left_out & _all_of(size), size) if left_out else Acked(position)


def combined(acks: Iterable[Acked]) -> list[Acked]:
    """One for each entry; those that acknowledge nothing are left out."""
    found = AckedByEntry()
    for ack in acks:
        found.add(ack)
    return found.all()


class AckedByEntry:
    """Acknowledgements of one command, united by entry."""

    def __init__(self) -> None:
        self._found: dict[Position, Acked] = {}

    def add(self, ack: Acked) -> None:
        if ack.messages:
            present = self._found.get(ack.position)
            self._found[ack.position] = ack if present is None else present.plus(ack)

    def all(self) -> list[Acked]:
        return list(self._found.values())


class AckVerdict(Enum):
    ACCEPTED = "accepted"
    REPEATED = "repeated"
    """It says nothing new, and may: there is nothing to store."""


class AckConflict(NamedTuple):
    """Refused."""

    reason: str
    holders: tuple[TxnId, ...] = ()
    """Other transactions that stand in the way; should one of them be decided, ask again."""


class EndedAcks(NamedTuple):
    """The messages that a transaction held when it was decided."""

    entries: tuple[Acked, ...]
    through: Acked | None
    """Everything up to here, too."""
    is_all: bool = True
    """Whether it holds nothing any more."""


class PendingAcks:
    """The held messages of one subscription."""

    def __init__(self, *, repeats_allowed: bool) -> None:
        self._repeats_allowed = repeats_allowed
        """Everything up to where it is held or acknowledged already may be acknowledged again."""
        # Individual acks by entry, for judging, and their positions by transaction, for its end;
        # cumulative acks by transaction, a list because each command may fail on its own.
        self._entries: dict[Position, dict[TxnId, Acked]] = {}
        self._positions: dict[TxnId, PositionSet] = {}
        self.entries = PositionSet()
        """All entries of which messages are held one by one."""
        self.batches = PositionSet()
        """Those of them of which perhaps not all messages are held."""
        self._points: dict[TxnId, list[Acked]] = {}

    # --- what is held

    def __bool__(self) -> bool:
        return bool(self._entries or self._points)

    def __len__(self) -> int:
        """Entries that are held one by one."""
        return len(self._entries)

    @property
    def txns(self) -> Collection[TxnId]:
        return self._positions.keys() | self._points.keys()

    def held(self, position: Position) -> int:
        """The messages of an entry that anybody holds."""
        messages = 0
        for ack in self._holding(position):
            messages |= ack.messages
        return messages

    def open_messages(self, position: Position, unacked: int | None) -> int | None:
        """Messages neither acknowledged nor held; None: all. `unacked` is what the cursor says."""
        held, size = 0, 0
        for ack in self._holding(position):
            held, size = held | ack.messages, max(size, ack.size)
        # The usual entry: no transaction has a part of it, and the cursor alone says what is open.
        if held == 0:
            return unacked
        return (_all_of(size) if unacked is None else unacked) & ~held

    def first_entry(self) -> Position | None:
        """The lowest entry of which messages are held one by one."""
        return self.entries.first()

    def through(self) -> Position | None:
        """Up to where everything is held; of the last entry perhaps only some messages."""
        return max((point.position for point in self._effective_points()), default=None)

    def _holding(self, position: Position) -> Iterator[Acked]:
        for point in self._effective_points():
            # Below a cumulative ack the whole entry is held; at its position perhaps only the
            # first messages of the batch.
            if position < point.position:
                yield Acked(position)
            elif position == point.position:
                yield point
        yield from self._entries.get(position, {}).values()

    def _effective_points(self) -> Iterator[Acked]:
        return (_highest(points) for points in self._points.values())

    # --- new acknowledgements

    def judge(
        self, txn: TxnId, acks: Sequence[Acked], cumulative: bool, cursor: CursorView
    ) -> AckVerdict | AckConflict:
        """Whether a transaction may acknowledge these; nothing changes."""
        for ack in acks:
            if cumulative:
                verdict = self._judge_through(txn, ack, cursor)
            else:
                verdict = self._judge_entry(txn, ack, cursor)
            if verdict is not AckVerdict.ACCEPTED:
                return verdict
        return AckVerdict.ACCEPTED if acks else AckVerdict.REPEATED

    def _judge_entry(self, txn: TxnId, ack: Acked, cursor: CursorView) -> AckVerdict | AckConflict:
        position = ack.position
        # PIP-31's conflict rules, in the order of what can still change: acknowledged for good
        # first, then held by a transaction that may yet abort.
        if cursor.is_acked(position):
            return AckConflict(f"{position} is acknowledged already")
        unacked = cursor.unacked_indexes(position)
        if unacked is not None and ack.named & ~unacked:
            return AckConflict(f"messages of {position} are acknowledged already")
        # Held by nobody, as nearly all are.
        if not self._points and position not in self._entries:
            return AckVerdict.ACCEPTED
        # The own transaction is not left out here: the same message twice in it is a conflict, too.
        holders = [
            other
            for other, held in self._entries.get(position, {}).items()
            if held.messages & ack.messages
        ]
        # But below its own cumulative ack it may name messages: other
        # transactions' are what counts.
        holders += [
            other
            for other, points in self._points.items()
            if other != txn and _overlap(_highest(points), ack)
        ]
        if holders:
            # Only others are worth waiting for: the own hold ends with the transaction that asks.
            others = tuple(each for each in holders if each != txn)
            return AckConflict(f"a transaction has acknowledged {position} already", others)
        return AckVerdict.ACCEPTED

    def _judge_through(
        self, txn: TxnId, ack: Acked, cursor: CursorView
    ) -> AckVerdict | AckConflict:
        position, points = ack.position, self._points.get(txn)
        # A client repeats a cumulative ack whose answer it lost. Segment topics say yes to that, as
        # v5 clients expect; regular ones refuse it, as PIP-31 does.
        if position <= cursor.mark_delete or (points and _highest(points).covers(ack)):
            if self._repeats_allowed:
                return AckVerdict.REPEATED
            return AckConflict(f"everything up to {position} is acknowledged already")
        # Invariant 2: two transactions that both commit "everything up to" could not be told apart.
        others = tuple(each for each in self._points if each != txn)
        if others:
            return AckConflict(
                "another transaction has acknowledged everything up to a message", others
            )
        holders = {
            other
            for other, positions in self._positions.items()
            if other != txn and self._has_below(other, positions, ack, cursor)
        }
        if holders:
            reason = f"other transactions have acknowledged messages up to {position}"
            return AckConflict(reason, tuple(sorted(holders)))
        return AckVerdict.ACCEPTED

    def _has_below(
        self, txn: TxnId, positions: PositionSet, through: Acked, cursor: CursorView
    ) -> bool:
        """Whether it holds messages up to a point."""
        # From the lowest on, so that mostly the first one tells.
        for position in positions:
            if position > through.position:
                return False
            # What the cursor has meanwhile is decided: a hold on it changes nothing any more.
            if not cursor.is_acked(position) and _overlap(through, self._entries[position][txn]):
                return True
        return False

    def add(self, txn: TxnId, acks: Iterable[Acked], cumulative: bool) -> None:
        """Hold these: they were judged, or read back from the store."""
        for ack in acks:
            if cumulative:
                self._points.setdefault(txn, []).append(ack)
                continue
            held = self._entries.setdefault(ack.position, {})
            present = held.get(txn)
            held[txn] = ack if present is None else present.plus(ack)
            positions = self._positions.get(txn)
            if positions is None:
                positions = self._positions[txn] = PositionSet()
            positions.add(ack.position)
            self.entries.add(ack.position)
            if ack.messages != WHOLE:
                self.batches.add(ack.position)

    def drop(self, txn: TxnId, acks: Iterable[Acked], cumulative: bool) -> None:
        """Take back acknowledgements that never became durable, whatever was added since."""
        for ack in acks:
            if cumulative:
                self._points[txn].remove(ack)
                if not self._points[txn]:
                    del self._points[txn]
                continue
            held = self._entries[ack.position][txn]
            # An earlier command of the same transaction may hold other messages
            # of this entry: they stay.
            left = _without(held, ack)
            if left is not None:
                self._entries[ack.position][txn] = left
                continue
            self._forget_entry(txn, ack.position)
            self._positions[txn].discard(ack.position)
            if not self._positions[txn]:
                del self._positions[txn]

    def plain_part(self, position: Position, unacked: int) -> int | None:
        """What a plain acknowledgement leaves out once held messages are dropped from it.

        None: nothing remains of it.
        """
        held = self.held(position)
        return None if held == WHOLE else unacked | held

    # --- decisions

    def end(self, txn: TxnId, most: int = sys.maxsize) -> EndedAcks | None:
        """What a decided transaction held; None: nothing. It holds no more.

        Of more than `most` entries the first ones, until another call brings the last of them.
        """
        positions = self._positions.get(txn)
        if positions is None and txn not in self._points:
            return None
        taken = [] if positions is None else positions.take(most)
        entries = tuple([self._forget_entry(txn, each) for each in taken])
        if positions:
            return EndedAcks(entries, None, is_all=False)
        self._positions.pop(txn, None)
        points = self._points.pop(txn, None)
        # Cumulative acks of several commands: the furthest one includes the others.
        return EndedAcks(entries, None if points is None else _highest(points))

    def clear(self) -> list[TxnId]:
        """Forget everything: a seek. Who held something."""
        txns = sorted(self.txns)
        self._entries.clear()
        self.entries.clear()
        self.batches.clear()
        self._positions.clear()
        self._points.clear()
        return txns

    def _forget_entry(self, txn: TxnId, position: Position) -> Acked:
        held = self._entries[position]
        ack = held.pop(txn)
        if not held:
            del self._entries[position]
            self.entries.discard(position)
            self.batches.discard(position)
        return ack


def _all_of(size: int) -> int:
    return (1 << size) - 1


def _highest(points: Sequence[Acked]) -> Acked:
    """Up to where several of one transaction reach."""
    highest = points[0]
    for point in points[1:]:
        if point.position > highest.position:
            highest = point
        elif point.position == highest.position:
            highest = highest.plus(point)
    return highest


def _overlap(through: Acked, ack: Acked) -> bool:
    """Whether everything up to a point has messages of an entry."""
    if ack.position == through.position:
        return bool(through.messages & ack.messages)
    return ack.position < through.position


def _without(held: Acked, gone: Acked) -> Acked | None:
    """What is left of an entry; None: nothing."""
    messages = _all_of(held.size) if held.messages == WHOLE else held.messages
    left = 0 if gone.messages == WHOLE else messages & ~gone.messages
    return Acked(held.position, left, held.size) if left else None
