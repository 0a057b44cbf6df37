"""The ledger of a compacted view: entries under their original positions.

Owns: `CompactedLedger`, which reads one, and `CompactedWriter`, which fills one.

Invariants:
1. An entry is the position that it has in the log, then what it was there, or what is left of it.
   Positions ascend.
2. `read` begins at the first entry at or behind a position. Where that stands is searched once per
   reader: where a read ends, the next one goes on.
3. A writer has one run of bounded size in flight; a full journal is waited for, within a limit.

Relies on: nobody reading a ledger here before it is closed, so that its end is known.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Final

from magnetar.errors import CorruptEntry, InvalidArgument, TooManyRequests
from magnetar.ledger.api import ENTRY_BYTES_MAX, Entry, LedgerInfo, LedgerStore, LedgerWriter
from magnetar.managed_ledger.reading import SCAN_BYTES, SCAN_ENTRIES, PublishTimeOf
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock

_HEAD: Final = struct.Struct(">QQ")
"""Ledger and entry."""

_RUN_BYTES: Final = 1024 * 1024
_RUN_ENTRIES: Final = 500
_PLACES_MAX: Final = 1024
"""Readers whose place is remembered; another one's is searched."""

# Ten seconds in all: a journal that takes nothing for so long has other troubles.
_PAUSE_S: Final = 0.1
_ATTEMPTS: Final = 100


class CompactedLedger:
    """A compacted view, as it is read."""

    def __init__(self, store: LedgerStore, ledger_id: int, horizon: Position) -> None:
        self.ledger_id = ledger_id
        self.horizon = horizon
        """The last position of the log that it stands for."""
        self._store = store
        self._info: LedgerInfo | None = None
        # By the position at which they go on: the number of the entry here.
        self._places: dict[Position, int] = {}

    async def info(self) -> LedgerInfo:
        """How much it holds; asked of the store once."""
        if self._info is None:
            self._info = await self._store.info(self.ledger_id)
        return self._info

    async def read(
        self, position: Position, entries_max: int, bytes_max: int = ENTRY_BYTES_MAX
    ) -> list[Entry]:
        """Entries from the first one at or behind a position, at least one; empty at the end."""
        number = self._places.get(position)
        if number is None:
            number = await self._number_of(position)
        end = (await self.info()).last_entry
        if number > end:
            return []
        last = min(number + entries_max - 1, end)
        stored = await self._store.read(self.ledger_id, number, last, bytes_max=bytes_max)
        found = [_placed(each) for each in stored]
        if found:
            self._remember(found[-1].position.next, stored[-1].position.entry_id + 1)
        return found

    async def last(self) -> Entry | None:
        """The last entry; None: nothing is left of the log."""
        end = (await self.info()).last_entry
        return await self._at(end) if end >= 0 else None

    async def find_by_time(self, ms: int, publish_time_of: PublishTimeOf) -> Position | None:
        """The first entry published at or after `ms`, as in the log; None: there is none."""
        low, high, found = 0, (await self.info()).last_entry + 1, None
        while low < high:
            middle = (low + high) // 2
            position, payload = await self._at(middle)
            if publish_time_of(payload) >= ms:
                high, found = middle, position
            else:
                low = middle + 1
        return found

    async def pages(self) -> AsyncIterator[list[Entry]]:
        """All entries, some at a time."""
        number, end = 0, (await self.info()).last_entry
        while number <= end:
            last = min(number + SCAN_ENTRIES - 1, end)
            found = await self._store.read(self.ledger_id, number, last, bytes_max=SCAN_BYTES)
            number = found[-1].position.entry_id + 1
            yield [_placed(each) for each in found]

    async def _number_of(self, position: Position) -> int:
        low, high = 0, (await self.info()).last_entry + 1
        while low < high:
            middle = (low + high) // 2
            if (await self._at(middle)).position < position:
                low = middle + 1
            else:
                high = middle
        self._remember(position, low)
        return low

    async def _at(self, number: int) -> Entry:
        return _placed((await self._store.read(self.ledger_id, number, number, bytes_max=1))[0])

    def _remember(self, position: Position, number: int) -> None:
        # The oldest goes: a dict keeps the order in which places came.
        if len(self._places) >= _PLACES_MAX:
            del self._places[next(iter(self._places))]
        self._places[position] = number


def _placed(stored: Entry) -> Entry:
    if len(stored.payload) < _HEAD.size:
        raise CorruptEntry(f"entry {stored.position} of a compacted ledger has no head")
    ledger_id, entry_id = _HEAD.unpack_from(stored.payload)
    return Entry(Position(ledger_id, entry_id), stored.payload[_HEAD.size :])


class CompactedWriter:
    """A compacted view, as it is written."""

    def __init__(self, writer: LedgerWriter, clock: Clock) -> None:
        self.ledger_id = writer.ledger_id
        self._writer = writer
        self._clock = clock
        self._run: list[bytes] = []
        self._size = 0
        self._run_bytes = min(_RUN_BYTES, writer.run_bytes_max)
        self._run_entries = _RUN_ENTRIES

    async def add(self, entry: Entry) -> None:
        """Take an entry; it is durable once the ledger is closed."""
        stored = _HEAD.pack(*entry.position) + entry.payload
        if self._run and (
            self._size + len(stored) > self._run_bytes or len(self._run) >= self._run_entries
        ):
            await self._flush()
        self._run.append(stored)
        self._size += len(stored)

    async def close(self) -> LedgerInfo:
        """Return once everything is durable and the ledger is closed."""
        if self._run:
            await self._flush()
        return await self._writer.close()

    async def _flush(self) -> None:
        waiting, self._run, self._size = [self._run], [], 0
        # One that is larger than any run goes alone; a run that the store does not take as a
        # whole goes in halves, and later ones are no larger.
        while waiting:
            run = waiting.pop()
            try:
                written = await self._submitted(run, sum(map(len, run)))
            except InvalidArgument:
                half = len(run) // 2
                if not half:
                    raise
                self._run_entries = min(self._run_entries, half)
                waiting += [run[half:], run[:half]]
                continue
            await written

    async def _submitted(self, run: list[bytes], size: int) -> asyncio.Future[Position]:
        for _ in range(_ATTEMPTS):
            try:
                if len(run) == 1:
                    return self._writer.append(run[0])
                return self._writer.append_run(run, size)
            except TooManyRequests:
                await self._clock.sleep(_PAUSE_S)
        return self._writer.append(run[0]) if len(run) == 1 else self._writer.append_run(run, size)
