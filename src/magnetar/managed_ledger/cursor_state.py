"""Pure: what a cursor knows: mark-delete position, acknowledgements above it, incarnation.

Owns: `CursorState` and its transitions.

Invariants (`check_invariants`):
1. Every position at or below `mark_delete` is acknowledged; nothing of it is in `acked`.
2. The first existing position above `mark_delete` is not acknowledged: the mark moves as far as
   it can, over the ends of ledgers and over empty ones.
3. `acked` holds existing positions, and trimmed ones until it is looked at as a whole:
   acknowledging anything else changes nothing.
4. Acknowledgements only add up. The one way back is `reset`, which begins a new incarnation.

Relies on: the caller's `LedgerList`, as of the moment of each call.
"""

from __future__ import annotations

from typing import Final

from magnetar.errors import InvariantBroken
from magnetar.ledger.api import NO_ENTRY, Entry
from magnetar.managed_ledger.acked import AckedSet
from magnetar.managed_ledger.ledger_list import LedgerList
from magnetar.model.ids import Position
from magnetar.model.position_set import PositionSet

NOTHING: Final = Position(0, -1)
"""As a mark-delete position: nothing is acknowledged."""

_ENTRY_MAX: Final = 2**63 - 1


class CursorState:
    """The state of one cursor. `changes` grows with every change, for who must store it."""

    def __init__(self, mark_delete: Position, incarnation: int) -> None:
        self.mark_delete = mark_delete
        self.incarnation = incarnation
        self.acked = AckedSet()
        self.changes = 0

    @classmethod
    def behind(cls, position: Position, ledgers: LedgerList, incarnation: int) -> CursorState:
        """Nothing acknowledged but what exists up to a position.

        What does not exist yet stays unacknowledged, so a position past the end means the end.
        """
        return cls(_mark_behind(position, ledgers), incarnation)

    def ack(self, position: Position, ledgers: LedgerList, unacked: int = 0) -> bool:
        """Acknowledge one entry, or of a batch the messages whose bits in `unacked` are clear.

        False: nothing is new, or there is no such entry.
        """
        # Acknowledged before: a client repeats itself, or had it redelivered.
        if position <= self.mark_delete:
            return False
        if unacked == 0 and position == ledgers.after(self.mark_delete):
            # In order, as most are: without a detour over the bitmaps.
            self.mark_delete = position
            self.changes += 1
            if self.acked:
                self.acked.drop_through(position)
                self._move_mark(ledgers)
            return True
        # Trimmed, or never there (invariant 3); or nothing that is new.
        if not ledgers.exists(position) or not self.acked.merge_batch(position, unacked):
            return False
        self.changes += 1
        # Whole by now, maybe by the last message of its batch: the mark may move (invariant 2).
        if position in self.acked:
            self._move_mark(ledgers)
        return True

    def ack_cumulative(self, position: Position, ledgers: LedgerList, unacked: int = 0) -> bool:
        """Acknowledge everything up to `position`; with `unacked`, that entry only in part.

        A position that does not exist means the last existing one before it.
        """
        # Within a batch: everything before it as a whole, then its own messages.
        if unacked and ledgers.exists(position):
            before = ledgers.before(position)
            moved = before is not None and self.ack_cumulative(before, ledgers)
            return self.ack(position, ledgers, unacked) or moved
        target = ledgers.at_or_before(position)
        if target is None or target <= self.mark_delete:
            return False
        self.mark_delete = target
        self.acked.drop_through(target)
        self.changes += 1
        self._move_mark(ledgers)
        return True

    def ack_all_but(
        self, spared: PositionSet, first: Position, last: Position, ledgers: LedgerList
    ) -> bool:
        """Acknowledge the entries from `first` to `last` but some, however many they are."""
        changed = False
        at = ledgers.at_or_after(max(first, self.mark_delete.next))
        # By ledgers: each is a few steps on bitmaps.
        while at is not None and at <= last:
            ledger_id, start = at
            end = ledgers.entries_of(ledger_id) - 1
            if ledger_id == last.ledger_id:
                end = min(end, last.entry_id)
            held = spared.within(ledger_id, start, end)
            changed = self.acked.add_range(ledger_id, start, end, held) or changed
            at = ledgers.after(Position(ledger_id, end))
        if changed:
            self.changes += 1
            self._move_mark(ledgers)
        return changed

    def reset(self, position: Position, ledgers: LedgerList, incarnation: int) -> None:
        """Forget all acknowledgements and begin again behind `position`: a seek."""
        if incarnation == self.incarnation:
            raise InvariantBroken(f"incarnation {incarnation} is in use already")
        self.mark_delete = _mark_behind(position, ledgers)
        self.incarnation = incarnation
        self.acked.clear()
        self.changes += 1

    def settle(self, ledgers: LedgerList) -> None:
        """After loading: drop what the mark covers or a trim took, and move it on."""
        self.acked.drop_through(self.mark_delete)
        self._drop_trimmed(ledgers)
        self._move_mark(ledgers)

    def is_acked(self, position: Position) -> bool:
        return position <= self.mark_delete or position in self.acked

    def unacked(self, entries: list[Entry]) -> list[Entry]:
        """Pick, of consecutive entries, those that are not acknowledged as a whole."""
        if not self.acked and entries and entries[0].position > self.mark_delete:
            return entries  # no holes: most subscriptions, most of the time
        return [entry for entry in entries if not self.is_acked(entry.position)]

    def unacked_indexes(self, position: Position) -> int | None:
        """Which messages of a partly acknowledged batch are still to be delivered."""
        return self.acked.unacked_indexes(position)

    def next_to_read(self, start: Position, ledgers: LedgerList) -> Position | None:
        """The first existing position from `start` on that is not acknowledged."""
        position = ledgers.at_or_after(max(start, self.mark_delete))
        if position is not None and position <= self.mark_delete:
            position = ledgers.after(self.mark_delete)
        # From run to run, not from entry to entry: there may be a million of them.
        while position is not None:
            end = self.acked.run_end(position)
            if end is None:
                return position
            position = ledgers.after(Position(position.ledger_id, end))
        return None

    def backlog(self, ledgers: LedgerList) -> int:
        """How many existing entries are not acknowledged as a whole."""
        self._drop_trimmed(ledgers)
        return ledgers.total - ledgers.rank(self.mark_delete) - self.acked.count

    def acked_above(self, position: Position) -> int:
        """How many entries above a position, and above the mark-delete, are acknowledged."""
        count = 0
        for ledger_id, first, last in self.acked.ranges():
            if ledger_id == position.ledger_id:
                first = max(first, position.entry_id + 1)
            if ledger_id >= position.ledger_id and first <= last:
                count += last - first + 1
        return count

    def check_invariants(self, ledgers: LedgerList) -> None:
        self._drop_trimmed(ledgers)
        # Invariant 2, then 1 and 3 for whole entries and the count that backlogs
        # rest on, then for batches.
        first = ledgers.after(self.mark_delete)
        if first is not None and first in self.acked:
            raise InvariantBroken(f"mark-delete {self.mark_delete} stands before acked {first}")
        count = 0
        for run in self.acked.ranges():
            low, high = Position(run.ledger_id, run.first), Position(run.ledger_id, run.last)
            if low <= self.mark_delete or not ledgers.exists(high):
                raise InvariantBroken(f"acked {low}..{high}, mark-delete {self.mark_delete}")
            count += run.last - run.first + 1
        if count != self.acked.count:
            raise InvariantBroken(f"{count} positions are acked, counted {self.acked.count}")
        for position, unacked in self.acked.partial():
            whole = position in self.acked or unacked == 0
            if whole or position <= self.mark_delete or not ledgers.exists(position):
                raise InvariantBroken(f"batch-index set {unacked:#x} at {position}")

    def _drop_trimmed(self, ledgers: LedgerList) -> None:
        """A trim goes by acknowledgements that need not be durable, and never by a reader's.

        So a state that was loaded, or a reader's, can hold positions that do not exist any more.
        """
        if not self.acked:
            return
        first = ledgers.first
        if first is None:
            self.acked.clear()
        else:
            self.acked.drop_through(first.previous)

    def _move_mark(self, ledgers: LedgerList) -> None:
        """Over everything acknowledged that follows the mark."""
        before = self.mark_delete
        following = ledgers.after(before)
        # `after` leads over the ends of ledgers and over empty ones; a run ends with its ledger.
        while following is not None:
            end = self.acked.run_end(following)
            if end is None:
                break
            self.mark_delete = Position(following.ledger_id, end)
            following = ledgers.after(self.mark_delete)
        if self.mark_delete != before:
            self.acked.drop_through(self.mark_delete)


def _mark_behind(position: Position, ledgers: LedgerList) -> Position:
    """The mark of a cursor that begins behind a position."""
    found = ledgers.at_or_before(position)
    if found is not None:
        return found
    # Nothing that exists is up to there, and nothing to come may be: but where it was trimmed the
    # place still counts for who reads it in a compacted view.
    spans = ledgers.spans
    if not spans or position.ledger_id < 0:
        return NOTHING
    # A client may ask for any place: what is stored is one that there could have been.
    place = Position(position.ledger_id, min(max(position.entry_id, NO_ENTRY), _ENTRY_MAX))
    return min(place, Position(spans[0].ledger_id, NO_ENTRY))
