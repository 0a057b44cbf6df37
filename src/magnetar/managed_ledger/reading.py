"""Reading a managed ledger: ranges over several ledgers, and the search by publish time.

Owns: `Reading`. It changes nothing.

Invariants:
1. Entries come in order, each once; nothing past the last durable entry is returned.
2. A position that was trimmed, or that never got an entry, means the next one that exists.
3. Ledgers may be trimmed while a read is under way: that moves the read on, it does not fail it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from magnetar.errors import InvalidArgument, LedgerMissing
from magnetar.ledger.api import Entry, LedgerStore
from magnetar.managed_ledger.ledger_list import LedgerList
from magnetar.model.ids import Position

SCAN_ENTRIES: Final = 500
SCAN_BYTES: Final = 4 * 1024 * 1024
"""How much whoever goes through many entries, to serve nobody directly, reads at a time."""

PublishTimeOf = Callable[[bytes], int]
"""The publish time (ms) that an entry's payload carries."""


class Reading:
    """Reads the ledgers of one managed ledger, as of now."""

    def __init__(self, store: LedgerStore, ledgers: Callable[[], LedgerList]) -> None:
        self._store = store
        self._ledgers = ledgers

    async def read(self, position: Position, entries_max: int, bytes_max: int) -> list[Entry]:
        """Entries from the first existing position at or after `position`.

        At least one if there is any, then as many as fit both limits.
        """
        if entries_max < 1 or bytes_max < 1:
            raise InvalidArgument(f"cannot read {entries_max} entries, {bytes_max} bytes")
        found: list[Entry] = []
        room = bytes_max
        following = self._ledgers().at_or_after(position)
        while following is not None and len(found) < entries_max and room > 0:
            last = self._last_asked(following, entries_max - len(found))
            part = await self._read_part(following, last, room)
            # Trimmed before it could be read: go on with what exists now (invariant 3).
            if part is None:
                following = self._ledgers().at_or_after(following)
                continue
            size = sum(len(entry.payload) for entry in part)
            if found and size > room:  # one entry comes whatever its size, but only at the start
                break
            found += part
            room -= size
            # A short answer: the rest is damaged, or does not fit. The next call begins there.
            if not part or part[-1].position.entry_id < last:
                break
            following = self._ledgers().after(part[-1].position)
        return found

    async def find_by_time(self, ms: int, publish_time_of: PublishTimeOf) -> Position | None:
        """The first entry published at or after `ms`, None if there is none.

        Entries are searched as if ordered by publish time. Producers' clocks differ, so near the
        border the answer is one place where an earlier entry is followed by a later one.
        """
        ledgers = self._ledgers()
        low: Position | None = ledgers.first
        high: Position | None = None
        # The answer is in [low, high); positions, because trimming renumbers the entries.
        while low is not None and (high is None or low < high):
            ledgers = self._ledgers()
            first = ledgers.rank(low) - 1
            last = ledgers.total if high is None else ledgers.rank(high) - 1
            # Trimmed since the last step: what is left begins later.
            if first < 0 or not ledgers.exists(low):
                low = ledgers.at_or_after(low)
                continue
            middle = ledgers.at((first + last) // 2)
            part = await self._read_part(middle, middle.entry_id, bytes_max=1)
            if part and publish_time_of(part[0].payload) >= ms:
                high = middle
            else:  # earlier, or trimmed meanwhile
                low = self._ledgers().after(middle)
        return high

    def _last_asked(self, start: Position, count: int) -> int:
        return min(start.entry_id + count, self._ledgers().entries_of(start.ledger_id)) - 1

    async def _read_part(self, start: Position, last: int, bytes_max: int) -> list[Entry] | None:
        """Entries of one ledger; None: it was trimmed before they could be read."""
        try:
            return await self._store.read(
                start.ledger_id, start.entry_id, last, bytes_max=bytes_max
            )
        except LedgerMissing:
            # Not trimmed, and yet missing: data is lost, and the reader has to know.
            if start.ledger_id in self._ledgers():
                raise
            return None
