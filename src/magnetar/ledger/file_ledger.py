"""One ledger of the file backend, as it is in memory.

Owns: `FileLedger`: where its entries are (file or tail), its state, and what its file lacks. No
I/O: `FileLedgers` does that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import Any, Final

from magnetar.errors import LedgerClosed, LedgerFenced, StorageError
from magnetar.ledger.api import NO_ENTRY, Entry, LedgerInfo, LedgerState
from magnetar.ledger.file_format import ENTRIES_START, ENTRY_OVERHEAD, LedgerHeader
from magnetar.ledger.file_home import Loaded, Move
from magnetar.model.ids import Position
from magnetar.runtime.signal import Signal

# Makes a named tuple of a tuple without a call of Python.
_new: Final[Any] = tuple.__new__


@dataclass(slots=True)
class FileLedger:
    """A ledger as the file backend knows it; `tail` are the records from entry `moved` on."""

    ledger_id: int
    state: LedgerState = LedgerState.OPEN
    """What writers find: it is ended as soon as somebody has asked for that."""
    recorded: LedgerState = LedgerState.OPEN
    """The state that is durable in the journal, or in the file. Only this one goes to the file:
    replaying the journal would otherwise undo what the file says."""
    # Along the ledger: in the file below `moved`, readable up to `last_durable`, submitted below
    # `next_entry`. What is readable and not moved yet is what settling takes.
    last_durable: int = NO_ENTRY
    next_entry: int = 0
    moved: int = 0
    moved_end: int = ENTRIES_START
    tail: list[bytes] = field(default_factory=list)
    header: LedgerHeader | None = None
    """As it is on disk; None: the ledger has no file yet."""
    header_unsure: bool = False
    """It was read, and may not be on disk: after a failed sync a file reads as if it had been
    written, and no later sync writes it. As long as the journal has the state, write it again."""
    failure: StorageError | None = None
    """Why its writer may not go on."""
    homeless: bool = False
    """Replayed entries stand behind others whose file is gone: a delete must follow."""
    durable: Signal = field(default_factory=Signal)

    def info(self) -> LedgerInfo:
        # The tail also holds entries that still wait for their sync: nobody is told of them.
        durable_tail = self.tail[: self.last_durable + 1 - self.moved]
        moved_bytes = self.moved_end - ENTRIES_START - self.moved * ENTRY_OVERHEAD
        size = moved_bytes + sum(map(len, durable_tail)) - ENTRY_OVERHEAD * len(durable_tail)
        return LedgerInfo(self.ledger_id, self.recorded, self.last_durable, size)

    def wanted_header(self) -> LedgerHeader | None:
        """The header that the file should get, or None if it has it."""
        header = self.header
        # An open ledger's header need not keep up: the index tells how many entries there are.
        if header is not None and header.state is self.recorded is LedgerState.OPEN:
            return None
        # Ended, and the file says so already. If that is in doubt, it is written once more.
        if header is not None and not self.header_unsure:
            held = (header.state, header.last_entry)
            if held == (self.recorded, self.last_durable):
                return None
        info = self.info()
        # The higher counter wins over a copy that this write does not reach.
        counter = 0 if self.header is None else self.header.counter + 1
        return LedgerHeader(
            self.ledger_id, self.recorded, counter, info.last_entry, info.size_bytes
        )

    def read_tail(self, first: int, last: int, bytes_max: int) -> list[Entry]:
        records = self.tail[first - self.moved : last + 1 - self.moved]
        count, overhead = len(records), ENTRY_OVERHEAD
        # As `_count_within` counts, before a payload is copied that will not be returned.
        if sum(map(len, records)) - overhead * count > bytes_max:
            count = _count_within([len(each) - overhead for each in records], bytes_max)
        payloads = [record[overhead:] for record in records[:count]]
        return _entries(self.ledger_id, first, payloads)


def loaded_ledger(ledger_id: int, loaded: Loaded) -> FileLedger:
    # A file holds only what was durable when it was moved: all of it is readable at once.
    return FileLedger(
        ledger_id,
        state=loaded.header.state,
        recorded=loaded.header.state,
        last_durable=loaded.count - 1,
        next_entry=loaded.count,
        moved=loaded.count,
        moved_end=loaded.end,
        header=loaded.header,
    )


def move_of(ledger: FileLedger) -> Move:
    records = ledger.tail[: ledger.last_durable + 1 - ledger.moved]
    header = ledger.wanted_header()
    return Move(header, ledger.ledger_id, ledger.moved, ledger.moved_end, records)


def entries_of(
    ledger_id: int, first: int, last: int, payloads: Sequence[bytes], bytes_max: int
) -> list[Entry]:
    """Entries of payloads that begin with that of `first`: up to `last`, as many as fit."""
    payloads = payloads[: last + 1 - first]
    if sum(map(len, payloads)) > bytes_max:
        payloads = payloads[: _count_within([len(each) for each in payloads], bytes_max)]
    return _entries(ledger_id, first, payloads)


def _count_within(sizes: Sequence[int], bytes_max: int) -> int:
    """How many of the first entries have no more than so many bytes."""
    # One entry comes whatever its size: a reader must get on.
    return max(bisect_right(list(accumulate(sizes)), bytes_max), 1)


def _entries(ledger_id: int, first: int, payloads: Sequence[bytes]) -> list[Entry]:
    # Without a line of Python per entry: a backlog is read through here.
    ids = zip(repeat(ledger_id), range(first, first + len(payloads)), strict=False)
    positions = map(_new, repeat(Position), ids)
    return list(map(_new, repeat(Entry), zip(positions, payloads, strict=False)))


def not_writable(ledger: FileLedger) -> StorageError:
    # A failed append or a delete is the better reason: the state only says that it has ended.
    if ledger.failure is not None:
        return ledger.failure
    if ledger.state is LedgerState.FENCED:
        return LedgerFenced(f"ledger {ledger.ledger_id} was fenced")
    return LedgerClosed(f"ledger {ledger.ledger_id} is closed")
