"""The two passes of one compaction: over the log to find what survives, and to write that.

Owns: `CompactionRun`, and `CompactionPace`, by which it leaves the event loop to others.

Invariants:
1. It reads what the former compacted view holds, then the log behind that view's horizon, up to an
   end that is fixed before: nothing above the maxReadPosition of that moment, no markers, nothing
   of aborted transactions. What the log has dropped since the former compaction is not missed.
2. The second pass reads only entries of which something survives, in the order of the log. One that
   is not there any more ends the run: nothing is left out in silence.
3. No step holds the event loop for more than a few milliseconds: after every slice it is left for
   as long as `compaction_messages_per_second` says, and large entries are opened elsewhere.
4. Memory: what `LatestKeys` holds (`compaction_keys`), and a page of entries.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from typing import Final, Protocol, TypeVar

from magnetar.broker.compact import batches
from magnetar.broker.compact.batches import LARGE_BYTES, SLICE_MESSAGES, Opened
from magnetar.broker.compact.compacted_ledger import CompactedLedger, CompactedWriter
from magnetar.broker.compact.latest_keys import LatestKeys, Survivors
from magnetar.errors import EntryMissing, UnreadableMessage
from magnetar.ledger.api import Entry
from magnetar.managed_ledger.managed_ledger import ManagedLedger
from magnetar.managed_ledger.reading import SCAN_BYTES, SCAN_ENTRIES
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits

Result = TypeVar("Result")

_TAKEN: Final = 256
"""Surviving entries that are looked for at a time."""
_BYTES_PER_MESSAGE: Final = 1024
"""So many bytes are as much work as a message."""


class CompactionPace:
    """Counts work in messages, and sleeps after every slice of it."""

    def __init__(self, clock: Clock, limits: Limits, check: Callable[[], None]) -> None:
        self._clock = clock
        self._seconds = 1 / limits.compaction_messages_per_second
        self._check = check
        self._done = 0

    async def after(self, messages: int, size: int = 0) -> None:
        """Note that so much is done; `check` may end it all here."""
        self._done += max(messages, size // _BYTES_PER_MESSAGE)
        if self._done >= SLICE_MESSAGES:
            done, self._done = self._done, 0
            # A pause after the work, not a date for the next: where the loop is busy, the work
            # takes less of it, not more.
            await self._clock.sleep(done * self._seconds)
            self._check()

    async def all_of(self, work: Generator[None, None, Result]) -> Result:
        """Carry out work that yields after each slice."""
        while True:
            try:
                next(work)
            except StopIteration as done:
                result: Result = done.value
                return result
            await self.after(SLICE_MESSAGES)


class CompactedSource(Protocol):
    """The log that is compacted."""

    @property
    def ledger(self) -> ManagedLedger: ...

    def is_visible(self, entry: Entry) -> bool:
        """Whether an entry up to the maxReadPosition is for consumers."""
        ...


class CompactionRun:
    """One compaction, up to `end`."""

    def __init__(
        self,
        source: CompactedSource,
        former: CompactedLedger | None,
        end: Position,
        pace: CompactionPace,
        *,
        keys_max: int,
        keeps_deletions: bool,
    ) -> None:
        self.messages = 0
        """How many were looked at."""
        self.kept = 0
        """How many of them survive, those in entries that cannot be judged as one each."""
        self._source = source
        self._former = former
        self._begin = Position(0, 0) if former is None else former.horizon.next
        self._end = end
        self._pace = pace
        self._keys = LatestKeys(keys_max, keeps_deletions=keeps_deletions)

    # --- the first pass

    async def survivors(self) -> Survivors:
        """Find what survives."""
        if self._former is not None:
            async for page in self._former.pages():
                for entry in page:
                    await self._judge(entry)
        async for page in self._log():
            for entry in page:
                # What is decided stays so, and everything up to the end is.
                if self._source.is_visible(entry):
                    await self._judge(entry)
                else:
                    await self._pace.after(1)
        return await self._pace.all_of(self._keys.survivors())

    async def _log(self) -> AsyncIterator[list[Entry]]:
        at, ledger = self._begin, self._source.ledger
        while at <= self._end:
            page = await ledger.read(at, SCAN_ENTRIES, SCAN_BYTES)
            if not page:
                return
            yield [each for each in page if each.position <= self._end]
            at = page[-1].position.next

    async def _judge(self, entry: Entry) -> None:
        position, payload = entry
        found = batches.opened(payload)
        if found is None or not found.is_batch:
            self.messages += 1
            if found is None:
                self._keys.keep(position)
            else:
                self._keys.note(position, found)
            await self._pace.after(1, len(payload))
            return
        self.messages += found.messages
        batch = await _unfolded(found)
        try:
            # Batches that cannot be opened, or not be read to their end, survive whole.
            if batch is None:
                self._keys.keep(position)
            else:
                last = await self._pace.all_of(batches.last_of_keys(batch))
                await self._pace.all_of(self._keys.note_batch(position, last))
        except UnreadableMessage:
            self._keys.keep(position)
        await self._pace.after(found.messages % SLICE_MESSAGES, len(payload))

    # --- the second pass

    async def write(self, survivors: Survivors, writer: CompactedWriter) -> None:
        """Write what survives; `survivors` is used up."""
        wanted = survivors.entries
        if self._former is not None:
            async for page in self._former.pages():
                for entry in page:
                    if entry.position in wanted:
                        wanted.discard(entry.position)
                        await self._write(entry, survivors, writer)
                    await self._pace.after(1)
        while taken := wanted.take(_TAKEN):
            await self._write_taken(taken, survivors, writer)

    async def _write_taken(
        self, taken: list[Position], survivors: Survivors, writer: CompactedWriter
    ) -> None:
        ledger, number = self._source.ledger, 0
        # One read for those that stand close to each other; what is between them is read along.
        while number < len(taken):
            at = taken[number]
            close = bisect_left(taken, Position(at.ledger_id, at.entry_id + SCAN_ENTRIES)) - 1
            count = taken[close].entry_id - at.entry_id + 1
            for entry in await ledger.read(at, count, SCAN_BYTES):
                if number < len(taken) and entry.position == taken[number]:
                    number += 1
                    await self._write(entry, survivors, writer)
                await self._pace.after(1)
            # A read brings the first that it was asked for, if that is there.
            if number < len(taken) and taken[number] == at:
                raise EntryMissing(f"{at} went while its topic was being compacted")

    async def _write(self, entry: Entry, survivors: Survivors, writer: CompactedWriter) -> None:
        indexes = survivors.indexes.pop(entry.position, None)
        if indexes is None:
            self.kept += 1
            await writer.add(entry)
            return
        self.kept += len(indexes)
        found = batches.opened(entry.payload)
        batch = None if found is None else await _unfolded(found)
        assert batch is not None, "the first pass opened it"
        left = await self._pace.all_of(batches.rebuilt(batch, indexes))
        if left is not None:
            work = partial(batches.packed_entry, entry.payload, batch.metadata, left, indexes)
            large = batch.size >= LARGE_BYTES
            entry = Entry(entry.position, await asyncio.to_thread(work) if large else work())
        await writer.add(entry)
        await self._pace.after(1, len(entry.payload))


async def _unfolded(batch: Opened) -> Opened | None:
    # Large ones would hold the loop; the library lets go of the interpreter meanwhile.
    if batch.size >= LARGE_BYTES:
        return await asyncio.to_thread(batches.unfolded, batch)
    return batches.unfolded(batch)
