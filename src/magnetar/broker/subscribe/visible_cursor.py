"""A cursor as dispatch sees it: without what undecided transactions have acknowledged.

Owns: `VisibleCursor`.

Invariants:
1. An entry of which no message is open is passed over like an acknowledged one; of a batch with
   some open messages only those are offered. Without held messages it is the cursor itself.
2. `passed` names every held entry that dispatch went by, wholly or in part, since it is held: if
   the hold ends without an acknowledgement, these must be offered again by whoever ends it. Where
   everything up to an entry is held, that entry stands for all of them.
3. The backlog is the cursor's: what is held counts until it is acknowledged.
"""

from __future__ import annotations

from magnetar.ledger.api import Entry
from magnetar.managed_ledger.cursor import Cursor
from magnetar.model.ids import Position
from magnetar.runtime.slices import SlicePace
from magnetar.txn.acks.pending_acks import PendingAcks


class VisibleCursor:
    """Reads what is open on a subscription."""

    def __init__(self, cursor: Cursor, pending: PendingAcks) -> None:
        self._cursor = cursor
        self._pending = pending
        self.passed: set[Position] = set()
        self._pace = SlicePace()

    @property
    def name(self) -> str:
        return self._cursor.name

    @property
    def read_position(self) -> Position:
        return self._cursor.read_position

    @read_position.setter
    def read_position(self, position: Position) -> None:
        self._cursor.read_position = position

    def backlog(self) -> int:
        return self._cursor.backlog()

    def is_withheld(self, position: Position) -> bool:
        """Whether all that is not acknowledged of an entry is held."""
        # Asked for every entry: without open transactions it costs nothing.
        if not self._pending:
            return False
        unacked = self._cursor.unacked_indexes(position)
        return self._pending.open_messages(position, unacked) == 0

    def is_acked(self, position: Position) -> bool:
        """Acknowledged, or withheld."""
        if self._cursor.is_acked(position):
            return True
        withheld = self.is_withheld(position)
        if withheld:
            self.note_passed(position)
        return withheld

    def unacked_indexes(self, position: Position) -> int | None:
        """Which messages of a batch are to be delivered, if not all."""
        unacked = self._cursor.unacked_indexes(position)
        if not self._pending:
            return unacked
        opened = self._pending.open_messages(position, unacked)
        if opened != unacked:
            self.note_passed(position)
        return opened

    def note_passed(self, position: Position) -> None:
        """Dispatch goes by a held entry."""
        through = self._pending.through()
        # A cumulative hold covers all up to `through`: one entry stands for them (invariant 2).
        self.passed.add(position if through is None else max(position, through))

    def ack(self, position: Position, unacked: int = 0) -> bool:
        return self._cursor.ack(position, unacked)

    async def read(self, entries_max: int, bytes_max: int) -> list[Entry]:
        """The next entries with open messages; empty at the end. Moves the read position."""
        while True:
            # Asked again in each round: commands may come while the cursor reads.
            through = self._pending.through()
            if through is not None and self._cursor.read_position < through:
                self.passed.add(through)
                self._cursor.read_position = through
            found = await self._cursor.read(entries_max, bytes_max)
            if not self._pending:
                return found
            opened = [entry for entry in found if not self.is_acked(entry.position)]
            # All that was read is held: reading on, since an empty answer would mean the end of the
            # topic.
            if opened or not found:
                return opened
            # What is in memory is read without a turn for others, and very many may be held.
            await self._pace.after(len(found))

    def rewind(self) -> None:
        """Read again everything that is not acknowledged."""
        self._cursor.rewind()
