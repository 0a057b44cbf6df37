"""A cursor: what one reader of a managed ledger has read and acknowledged.

Owns: `Cursor`, its state in memory, its read position, and the writing of its state.

Invariants:
1. Acknowledgements count at once in memory; they are durable after the next write, which comes
   within `cursor_flush_seconds` or by an explicit `flush`.
2. `flush` returns once a state taken at or after the call is durable. At most one write per cursor
   is in flight; the next one covers everything since.
3. A write that lost its compare-and-set, or whose outcome cannot be found out, stops the cursor:
   every later change is refused with that error.
4. A cursor without a store (a reader's) has the same behaviour and forgets everything at its end.

Relies on: the managed ledger's list of ledgers as of now (`ledgers`), and its `read`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from magnetar.errors import MagnetarError, ManagedLedgerFenced, OutcomeUnknown, StorageClosed
from magnetar.ledger.api import ENTRY_BYTES_MAX, Entry
from magnetar.managed_ledger.acked import AckedRange
from magnetar.managed_ledger.cursor_state import CursorState
from magnetar.managed_ledger.cursor_store import CursorStore
from magnetar.managed_ledger.ledger_list import LedgerList
from magnetar.model.ids import Position
from magnetar.model.position_set import PositionSet
from magnetar.runtime.metrics import CURSOR_FLUSHES
from magnetar.runtime.signal import Signal

ReadEntries = Callable[[Position, int, int], Awaitable[list[Entry]]]
"""Entries from a position on, at most so many and so many bytes."""

READ_BYTES_MAX: Final = ENTRY_BYTES_MAX


class Cursor:
    """One reader's state. Get it from the managed ledger."""

    def __init__(
        self,
        name: str,
        state: CursorState,
        *,
        ledgers: Callable[[], LedgerList],
        read: ReadEntries,
        new_incarnation: Callable[[], int],
        changed: Signal,
        store: CursorStore | None = None,
    ) -> None:
        self.name = name
        self._state = state
        self._ledgers = ledgers
        self._read = read
        self._new_incarnation = new_incarnation
        self._changed = changed
        self._store = store
        self._failure: MagnetarError | None = None
        # Writes are numbered when they take the state: `_taken` have begun, `_written` is the last
        # durable one. `_flight` is the only one under way (invariant 2).
        self._stored_changes = state.changes
        self._taken = 0
        self._written = 0
        self._flight: asyncio.Task[None] | None = None
        self._moves = 0
        """Counts moves of the read position that are not reads."""
        self.read_position = state.mark_delete.next

    # --- what it knows

    @property
    def durable(self) -> bool:
        return self._store is not None

    @property
    def properties(self) -> dict[str, str]:
        return {} if self._store is None else dict(self._store.record.properties)

    @property
    def mark_delete(self) -> Position:
        return self._state.mark_delete

    @property
    def incarnation(self) -> int:
        return self._state.incarnation

    @property
    def dirty(self) -> bool:
        """Whether memory is ahead of the store."""
        return self._store is not None and self._state.changes != self._stored_changes

    @property
    def failure(self) -> MagnetarError | None:
        """Why the cursor stopped, if it did."""
        return self._failure

    def backlog(self) -> int:
        """How many entries are not acknowledged as a whole."""
        return self._state.backlog(self._ledgers())

    def acked_above(self, position: Position) -> int:
        """How many entries above a position, and above the mark-delete, are acknowledged."""
        return self._state.acked_above(position)

    def acked_ranges(self) -> Iterator[AckedRange]:
        """Runs of acknowledged entries above the mark-delete position, ascending."""
        return self._state.acked.ranges()

    def is_acked(self, position: Position) -> bool:
        return self._state.is_acked(position)

    def unacked_indexes(self, position: Position) -> int | None:
        """Which messages of a partly acknowledged batch are still to be delivered."""
        return self._state.unacked_indexes(position)

    def check_invariants(self) -> None:
        self._state.check_invariants(self._ledgers())

    # --- acknowledging: in memory at once

    def ack(self, position: Position, unacked: int = 0) -> bool:
        """Acknowledge an entry, or of a batch all messages but those set in `unacked`."""
        self._check()
        return self._note(self._state.ack(position, self._ledgers(), unacked))

    def ack_cumulative(self, position: Position, unacked: int = 0) -> bool:
        """Acknowledge everything up to a position, that entry in part if `unacked` says so."""
        self._check()
        return self._note(self._state.ack_cumulative(position, self._ledgers(), unacked))

    def ack_all_but(self, spared: PositionSet, first: Position, last: Position) -> bool:
        """Acknowledge the entries from `first` to `last`, both included, but some."""
        self._check()
        return self._note(self._state.ack_all_but(spared, first, last, self._ledgers()))

    # --- reading

    async def read(self, entries_max: int, bytes_max: int = READ_BYTES_MAX) -> list[Entry]:
        """The next entries that are not acknowledged; empty at the end. Moves the read position."""
        while True:
            self._check()
            moves = self._moves
            start = self._state.next_to_read(self.read_position, self._ledgers())
            if start is None:
                return []
            found = await self._read(start, entries_max, bytes_max)
            # Anything may have happened meanwhile: a stop, a rewind, acknowledgements.
            self._check()
            if moves != self._moves:
                continue  # rewound or reset meanwhile: these are not the next entries any more
            if found:
                self.read_position = found[-1].position.next
            # All acknowledged by now? Then read on: an empty answer means the end.
            wanted = self._state.unacked(found)
            if wanted or not found:
                return wanted

    def rewind(self) -> None:
        """Read again everything that is not acknowledged."""
        self._move_to(self._state.mark_delete.next)

    async def reset(self, mark_delete: Position) -> None:
        """Begin a new incarnation behind a position: a seek. Returns once that is durable."""
        self._check()
        self._state.reset(mark_delete, self._ledgers(), self._new_incarnation())
        self._move_to(self._state.mark_delete.next)
        self._note(True)
        await self.flush()

    # --- writing

    async def flush(self) -> None:
        """Return once a state taken at or after this call is durable."""
        self._check()
        if self._flight is None and not self.dirty:
            return
        # A write that is under way took its state before this call: only the next one counts.
        needed = self._taken + 1
        while self._written < needed:
            self._check()
            if self._flight is None:
                self._flight = asyncio.create_task(self._write(), name=f"cursor {self.name}: write")
            flight = self._flight
            # Not awaited itself: others wait for it too, so a cancelled caller must not cancel it.
            await asyncio.wait({flight})
            error = flight.exception()
            # An older write's failure belongs to others; ours is still to be tried.
            if error is not None and self._taken >= needed:
                raise error

    async def change_properties(self, properties: dict[str, str]) -> None:
        """Replace the properties, durably."""
        self._check()
        # One write at a time (invariant 2): whoever waits for this one tries again afterwards.
        while self._flight is not None:
            await asyncio.wait({self._flight})
            self._check()
        flight = asyncio.create_task(
            self._write_properties(properties), name=f"cursor {self.name}: properties"
        )
        self._flight = flight
        await asyncio.shield(flight)

    async def _write_properties(self, properties: dict[str, str]) -> None:
        assert self._store is not None
        try:
            await self._store.change_properties(properties)
        # As of a state (invariant 3).
        except (ManagedLedgerFenced, OutcomeUnknown) as error:
            self.stop(error)
            raise
        finally:
            self._flight = None

    async def _write(self) -> None:
        assert self._store is not None
        self._taken += 1
        # Together with the state, which `write` takes before it awaits: what
        # comes later stays dirty.
        number, changes = self._taken, self._state.changes
        try:
            await self._store.write(self._state)
        # Another owner has the record, or may have: this state counts no longer (invariant 3).
        except (ManagedLedgerFenced, OutcomeUnknown) as error:
            self.stop(error)
            raise
        else:
            CURSOR_FLUSHES.inc()
            self._written = number
            self._stored_changes = changes
        finally:
            self._flight = None

    async def delete(self) -> None:
        """Remove it from the store; nobody can use it any more."""
        self.stop(StorageClosed(f"cursor {self.name!r} was deleted"))
        # Its chunk records would come back behind the deletion.
        if self._flight is not None:
            await asyncio.wait({self._flight})
        if self._store is not None:
            await self._store.delete()

    def stop(self, error: MagnetarError) -> None:
        """Refuse everything from now on; the first reason stays."""
        if self._failure is None:
            self._failure = error

    # --- parts

    def _note(self, changed: bool) -> bool:
        if changed and self._store is not None:
            self._changed.advance()
        return changed

    def _move_to(self, position: Position) -> None:
        self._moves += 1
        self.read_position = position

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
