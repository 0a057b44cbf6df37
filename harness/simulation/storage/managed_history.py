"""Pure: what was asked of managed ledgers, what they answered, and whether the two fit together.

Owns: `ManagedHistory`: one `ManagedStory` for each managed ledger of a run, and one `CursorStory`
for each of its cursors. Each is told of every call, answer and read, and adds what it finds broken
to `Findings`. The ledgers below have a history of their own (`history.LedgerHistory`).

Invariants:
1. Every payload is appended once, so that it tells its append.
2. What a new owner finds is settled: an append that it does not see never comes back, and an
   acknowledgement that it does not know was lost for good (which only a flush forbids).
3. Acknowledgements are masks of messages: every entry counts as a batch of `BATCH` of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from harness.simulation.storage.history import Findings, Outcome
from magnetar.ledger.api import Entry
from magnetar.managed_ledger.ledger_list import MS_PER_SECOND, Retention
from magnetar.model.ids import Position

BATCH: Final = 8
WHOLE: Final = (1 << BATCH) - 1
"""The mask of an entry all of whose messages are acknowledged."""

_START: Final = Position(0, -1)
_END: Final = Position(1 << 62, 0)


@dataclass(slots=True)
class ManagedAppend:
    """A payload that was submitted."""

    number: int
    """Counts the appends of one managed ledger."""
    payload: bytes
    position: Position | None = None
    outcome: Outcome = Outcome.PENDING


@dataclass(slots=True)
class Acks:
    """Acknowledged messages: everything up to a position, and masks of entries above it."""

    through: Position = _START
    above: dict[Position, int] = field(default_factory=dict)

    def mask(self, position: Position) -> int:
        return WHOLE if position <= self.through else self.above.get(position, 0)

    def add(self, position: Position, mask: int) -> None:
        if position > self.through:
            self.above[position] = self.above.get(position, 0) | mask

    def add_through(self, position: Position) -> None:
        if position > self.through:
            self.through = position
            self.above = {each: mask for each, mask in self.above.items() if each > position}

    def add_all(self, other: Acks) -> None:
        self.add_through(other.through)
        for position, mask in other.above.items():
            self.add(position, mask)

    def copy(self) -> Acks:
        return Acks(self.through, dict(self.above))

    @property
    def highest(self) -> Position:
        """The highest entry that is acknowledged as a whole."""
        return max((p for p, mask in self.above.items() if mask == WHOLE), default=self.through)


@dataclass(slots=True)
class CursorStory:
    """What is known of one cursor."""

    name: str
    starts: list[Position] = field(default_factory=list)
    """Behind which positions it was asked to begin; the first one that took effect counts."""
    sure: bool = False
    """It was created, and nobody asked to delete it."""
    asked: Acks = field(default_factory=Acks)
    """Nothing else may be acknowledged."""
    durable: Acks = field(default_factory=Acks)
    """At least this is acknowledged, whatever happens."""

    def flushed(self, begun_with: Acks) -> None:
        """A flush was answered; `begun_with` is what was asked before it began."""
        self.durable.add_all(begun_with)


class CursorView(NamedTuple):
    """A cursor as a new owner found it; the masks stand beside the entries found."""

    mark_delete: Position
    masks: Sequence[int]
    backlog: int


class Trim(NamedTuple):
    """A trim that was asked for."""

    retention: Retention
    bound: Position
    """No entry behind it may go."""
    allowed_before: Position
    """The bound of former trims whose answer was an error."""


class ManagedStory:
    """All that happened to one managed ledger."""

    def __init__(self, name: str, findings: Findings) -> None:
        self.name = name
        self.cursors: dict[str, CursorStory] = {}
        self.positions: list[Position] = []
        """Of the entries that are there for certain, ascending."""
        self.sealed = False
        self._findings = findings
        self._appends: dict[bytes, ManagedAppend] = {}
        self._at: dict[Position, ManagedAppend] = {}
        """Every position that was ever used."""
        self._heard_ms: dict[int, int] = {}
        """By ledger, when the last answer came: it was closed later."""
        self._trim_allowed = _START
        self._trimmed: set[int] = set()
        self._seal_asked = False
        self._sealed_end: Position | None = None

    # --- appends

    def submitted(self, payload: bytes) -> ManagedAppend:
        self._findings.operations += 1
        append = self._appends[payload] = ManagedAppend(len(self._appends), payload)
        return append

    def acknowledged(self, append: ManagedAppend, position: Position, now_ms: int) -> None:
        if append.outcome is Outcome.FAILED:
            self._broken(f"{position} was acknowledged, though it had been lost")
        if self.sealed and (self._sealed_end is None or position > self._sealed_end):
            self._broken(f"{position} was acknowledged behind the end {self._sealed_end}")
        self._heard_ms[position.ledger_id] = now_ms
        self._stands(append, position)

    def refused(self, append: ManagedAppend) -> None:
        """The answer was that it was not stored, now or ever."""
        if append.outcome is Outcome.DONE:
            self._broken(f"{append.position} was read, then refused")
        append.outcome = Outcome.FAILED

    # --- reads

    def read(self, start: Position, entries: Sequence[Entry]) -> None:
        """Entries from a position on: all of them, up to the last that was returned."""
        self._take(entries)
        self._check_complete(start, entries, None)

    def cursor_read(self, cursor: CursorStory, start: Position, entries: Sequence[Entry]) -> None:
        """What a cursor delivered from its read position on: all that is not acknowledged."""
        self._take(entries)
        for entry in entries:
            if cursor.asked.mask(entry.position) == WHOLE:
                self._broken(f"cursor {cursor.name} delivered the acknowledged {entry.position}")
        self._check_complete(start, entries, cursor)

    def _check_complete(
        self, start: Position, entries: Sequence[Entry], cursor: CursorStory | None
    ) -> None:
        if not entries:
            return
        found = {entry.position for entry in entries}
        first = bisect_left(self.positions, start)
        last = bisect_right(self.positions, entries[-1].position)
        wanted = [
            position
            for position in self.positions[first:last]
            if cursor is None or cursor.asked.mask(position) != WHOLE
        ]
        missing = [position for position in wanted if position not in found]
        for position in missing:
            # A trim that was answered with an error may have dropped it all the same.
            if position > self._trim_allowed or position > entries[0].position:
                self._broken(f"{position} was left out between {start} and {entries[-1].position}")
        self._forget(sorted({each.ledger_id for each in missing}))

    def _take(self, entries: Sequence[Entry]) -> None:
        """Entries that somebody got: each known, in order, at its place."""
        last_position, last_number = _START, -1
        for entry in entries:
            append = self._appends.get(entry.payload)
            if append is None:
                self._broken(f"{entry.position} holds what was never appended")
                continue
            if entry.position <= last_position or append.number <= last_number:
                self._broken(f"{entry.position} (append {append.number}) came after its successor")
            if append.outcome is Outcome.FAILED:
                self._broken(f"{entry.position} is readable, though it was refused or lost")
            last_position, last_number = entry.position, append.number
            self._stands(append, entry.position)

    def _stands(self, append: ManagedAppend, position: Position) -> None:
        if append.position not in (None, position):
            self._broken(f"{append.position} became {position}")
        append.outcome, append.position = Outcome.DONE, position
        owner = self._at.setdefault(position, append)
        if owner is not append:
            self._broken(f"{position} was used for appends {owner.number} and {append.number}")
        place = bisect_left(self.positions, position)
        known = place < len(self.positions) and self.positions[place] == position
        if position.ledger_id in self._trimmed:
            self._broken(f"{position} was trimmed and is there")
        elif not known:
            insort(self.positions, position)

    # --- trimming

    def trim_asked(self, retention: Retention, pin: Position | None) -> Trim:
        """Say how far this trim may go, by what all cursors have acknowledged."""
        self._findings.operations += 1
        holding = [each for each in self.cursors.values() if each.sure]
        bound = min(map(self._acked_through, holding), default=_END)
        if pin is not None:
            bound = min(bound, pin.previous)
        if retention == Retention(None, None):
            bound = _START
        asked = Trim(retention, bound, self._trim_allowed)
        self._trim_allowed = max(self._trim_allowed, bound)
        return asked

    def trimmed(self, ledger_ids: Sequence[int], asked: Trim, now_ms: int) -> None:
        """A trim was answered."""
        retention, bound, self._trim_allowed = asked
        for ledger_id in ledger_ids:
            gone = [each for each in self.positions if each.ledger_id == ledger_id]
            if gone and gone[-1] > bound:
                self._broken(f"{gone[-1]} was trimmed; allowed was {bound}")
            if retention.size_bytes is None and retention.seconds is not None:
                age_ms = now_ms - self._heard_ms.get(ledger_id, 0)
                if age_ms < retention.seconds * MS_PER_SECOND:
                    self._broken(f"ledger {ledger_id} was trimmed {age_ms} ms after an append")
        self._forget(ledger_ids)

    def _acked_through(self, cursor: CursorStory) -> Position:
        """The last entry before the first that a cursor still needs."""
        last = cursor.asked.through
        for position in self.positions[bisect_right(self.positions, last) :]:
            if cursor.asked.mask(position) != WHOLE:
                break
            last = position
        return last

    def _forget(self, ledger_ids: Sequence[int]) -> None:
        self._trimmed.update(ledger_ids)
        self.positions = [each for each in self.positions if each.ledger_id not in self._trimmed]

    # --- sealing

    def seal_asked(self) -> None:
        self._findings.operations += 1
        self._seal_asked = True

    def seal_answered(self, end: Position) -> None:
        if not self._seal_asked:
            self._broken("it is sealed, and nobody sealed it")
        if self.sealed and end != self._sealed_end:
            self._broken(f"its end was {self._sealed_end} and is {end}")
        if self.positions and end < self.positions[-1]:
            self._broken(f"its end is {end}, but {self.positions[-1]} exists")
        self.sealed, self._sealed_end = True, end

    # --- cursors

    def cursor_asked(self, name: str, start: Position) -> CursorStory:
        self._findings.operations += 1
        cursor = self.cursors.setdefault(name, CursorStory(name))
        cursor.starts.append(start)
        cursor.asked.add_through(start)
        return cursor

    def cursor_created(self, cursor: CursorStory, mark_delete: Position) -> None:
        if mark_delete not in cursor.starts:
            self._broken(f"cursor {cursor.name} begins at {mark_delete}, asked: {cursor.starts}")
        cursor.sure = True
        cursor.asked, cursor.durable = Acks(mark_delete), Acks(mark_delete)

    def cursor_deleted(self, cursor: CursorStory) -> None:
        self.cursors.pop(cursor.name)

    # --- a new owner

    def opened(
        self, entries: Sequence[Entry], cursors: dict[str, CursorView], end: Position | None
    ) -> None:
        """Everything that a new owner found, before it did anything. `end`: it is sealed."""
        self._findings.operations += 1
        found = {entry.position for entry in entries}
        self._check_missing([each for each in self.positions if each not in found], entries)
        self._take(entries)
        for append in self._appends.values():
            if append.outcome is Outcome.PENDING:
                append.outcome = Outcome.FAILED
        self._trim_allowed = _START
        if end is not None:
            self.seal_answered(end)
        elif self.sealed:
            self._broken("it was sealed and is not any more")
        self._seal_asked = self.sealed
        self._check_cursors(entries, cursors)

    def _check_missing(self, missing: Sequence[Position], entries: Sequence[Entry]) -> None:
        first = entries[0].position if entries else _END
        kept = {entry.position.ledger_id for entry in entries}
        for position in missing:
            whole = position < first and position.ledger_id not in kept
            if position > self._trim_allowed or not whole:
                self._broken(f"{position} is lost; trimmed up to {self._trim_allowed}")
        self._forget(sorted({each.ledger_id for each in missing}))

    def _check_cursors(self, entries: Sequence[Entry], views: dict[str, CursorView]) -> None:
        for name in views:
            if name not in self.cursors:
                self._broken(f"cursor {name} exists, and nobody created it")
        for name, cursor in sorted(self.cursors.items()):
            view = views.get(name)
            if view is not None:
                self._check_cursor(cursor, view, entries)
            elif cursor.sure:
                self._broken(f"cursor {name} is lost")
        self.cursors = {name: each for name, each in self.cursors.items() if name in views}

    def _check_cursor(
        self, cursor: CursorStory, view: CursorView, entries: Sequence[Entry]
    ) -> None:
        name = f"cursor {cursor.name}"
        if view.mark_delete > cursor.asked.highest:
            self._broken(f"{name} stands at {view.mark_delete}, behind {cursor.asked.highest}")
        unacked = sum(mask != WHOLE for mask in view.masks)
        if view.backlog != unacked:
            self._broken(f"{name} counts {view.backlog} entries, {unacked} are not acknowledged")
        now = Acks(view.mark_delete)
        for entry, mask in zip(entries, view.masks, strict=True):
            position = entry.position
            if lost := cursor.durable.mask(position) & ~mask:
                self._broken(f"{name} lost {lost:#x} of {position} after a flush")
            if more := mask & ~cursor.asked.mask(position):
                self._broken(f"{name} has {more:#x} of {position}; nobody acknowledged that")
            if mask:
                now.add(position, mask)
        cursor.sure = True
        cursor.asked, cursor.durable = now, now.copy()

    def _broken(self, text: str) -> None:
        self._findings.broken(f"{self.name}: {text}")


class ManagedHistory:
    """All managed ledgers of a run."""

    def __init__(self, findings: Findings) -> None:
        self.stories: dict[str, ManagedStory] = {}
        self.ledger_ids: set[int] = set()
        """Ledgers that belong to one of them: nobody else may end or delete those."""
        self._findings = findings

    def story(self, name: str) -> ManagedStory:
        if name not in self.stories:
            self.stories[name] = ManagedStory(name, self._findings)
        return self.stories[name]
