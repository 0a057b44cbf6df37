"""The load of the crash tests: ledgers and metadata together, every step reported.

Owns: `CrashLoad`. It appends one by one and pipelined, closes, fences, deletes and creates
ledgers, puts records with index entries, compares and sets, deletes, and appends to sequences. It
reports each operation before it submits it and each answer when it has it (`crash_history`).

Invariants:
1. Only the reporter sees what was acknowledged: the load keeps nothing that a check relies on.
2. An answer that a healthy store never gives ends the load with that error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Final

from harness.crash.storage.history import (
    EPHEMERAL_FOLDER,
    SEQUENCE_FOLDER,
    Acknowledged,
    Event,
    Kind,
    Refused,
    Submitted,
    entry_payload,
    record_indexes,
    record_value,
)
from magnetar.errors import BadVersion, InvariantBroken
from magnetar.ledger.api import LedgerState, LedgerWriter
from magnetar.metadata.api import ABSENT, MetadataStore, Stat
from magnetar.model.ids import Position
from magnetar.runtime.limits import Limits
from magnetar.server.embedded import Storage

CRASH_LIMITS: Final = Limits(
    # Cuts copy the whole folder, each time.
    disk_reserve_bytes=64 * 1024,
    journal_file_bytes=64 * 1024,
    journal_files_max=4,
    journal_batch_bytes=24 * 1024,
    metadata_apply_records=40,
    ledger_cache_bytes=256 * 1024,
    ledger_open_files=16,
    storage_settle_seconds=0.03,
)
"""Small, so that files are recycled, records settled and caches emptied all the time."""

_LEDGER_WRITERS: Final = 3
_RECORD_WRITERS: Final = 3
_KEYS_PER_WRITER: Final = 30
_SEQUENCES: Final = 2


class CrashLoad:
    """A load on one open storage; `report` must have taken an event in when it returns."""

    def __init__(
        self, storage: Storage, seed: int, first_token: int, report: Callable[[Event], None]
    ) -> None:
        self._storage = storage
        self._seed = seed
        self._next_token = first_token
        self._report = report
        self._random = Random(f"{seed} {first_token}")
        self._left = 0
        self._ended: list[int] = []

    async def run(self, operations: int) -> None:
        """Submit about so many operations, then finish what is under way."""
        self._left = operations
        self._ended = [each async for each in self._storage.ledgers.list()]
        async with asyncio.TaskGroup() as group:
            for _ in range(_LEDGER_WRITERS):
                group.create_task(self._write_ledgers())
            for place in range(_RECORD_WRITERS):
                group.create_task(self._change_records(place))
            group.create_task(self._append_to_sequences())
            group.create_task(self._end_ledgers())

    # --- reporting

    def _submit(self, kind: Kind, target: str = "", entry: int = -1) -> int:
        token = self._next_token
        self._next_token += 1
        self._left -= 1
        self._report(Submitted(token, kind, target, entry))
        return token

    # --- ledgers

    async def _write_ledgers(self) -> None:
        while self._left > 0:
            token = self._submit(Kind.CREATE)
            writer = await self._storage.ledgers.create()
            self._report(Acknowledged(token, writer.ledger_id))
            count = 0
            for _ in range(self._random.randrange(1, 12)):
                width = self._random.choice((1, 1, 1, 5, 20, 60))
                await self._acknowledge(self._append(writer, count, width))
                count += width
            await self._check_reads(writer, count)
            await self._finish(writer, count)

    def _append(
        self, writer: LedgerWriter, first: int, width: int
    ) -> list[tuple[int, asyncio.Future[Position]]]:
        submitted = []
        for entry_id in range(first, first + width):
            token = self._submit(Kind.APPEND, str(writer.ledger_id), entry_id)
            submitted.append((token, writer.append(entry_payload(self._seed, token))))
        return submitted

    async def _acknowledge(self, submitted: list[tuple[int, asyncio.Future[Position]]]) -> None:
        for token, future in submitted:
            position = await future
            self._report(Acknowledged(token, position.entry_id))

    async def _check_reads(self, writer: LedgerWriter, count: int) -> None:
        """Readers see what was acknowledged, in tail or file, while others write."""
        entry_id = self._random.randrange(count)
        found = await self._storage.ledgers.read(writer.ledger_id, entry_id, count)
        if not found or found[0].position != Position(writer.ledger_id, entry_id):
            raise InvariantBroken(f"entry {writer.ledger_id}:{entry_id} cannot be read back")

    async def _finish(self, writer: LedgerWriter, count: int) -> None:
        late = self._append(writer, count, self._random.choice((0, 0, 1, 8)))
        how = self._random.choice((Kind.CLOSE, Kind.CLOSE, Kind.FENCE, None))
        if how is None:
            await self._acknowledge(late)
        else:
            await self._end(writer.ledger_id, how, late)
        self._ended.append(writer.ledger_id)

    async def _end(
        self, ledger_id: int, how: Kind, late: list[tuple[int, asyncio.Future[Position]]]
    ) -> None:
        """Fence or close; the end that is acknowledged covers the late appends."""
        ledgers = self._storage.ledgers
        token = self._submit(how, str(ledger_id))
        end = ledgers.fence if how is Kind.FENCE else ledgers.close_ledger
        info = await end(ledger_id)
        await self._acknowledge(late)
        if info.state is LedgerState.OPEN:
            raise InvariantBroken(f"ledger {ledger_id} is open after a {how.value}")
        self._report(Acknowledged(token, info.last_entry))

    async def _end_ledgers(self) -> None:
        """Take ledgers over and delete some: those of former processes too."""
        ledgers = self._storage.ledgers
        while self._left > 0:
            await asyncio.sleep(0.01)
            if len(self._ended) < 3:
                continue
            ledger_id = self._ended.pop(self._random.randrange(len(self._ended)))
            how = self._random.choice((Kind.FENCE, Kind.CLOSE, Kind.DROP, Kind.DROP))
            if how is Kind.DROP:
                token = self._submit(how, str(ledger_id))
                await ledgers.delete(ledger_id)
                self._report(Acknowledged(token))
            else:
                await self._end(ledger_id, how, [])

    # --- metadata

    async def _change_records(self, place: int) -> None:
        versions: dict[str, int] = {}
        async with self._storage.connect() as store:
            await self._put_ephemeral(store, place)
            while self._left > 0:
                burst = []
                for _ in range(self._random.choice((1, 1, 4, 25))):
                    key = f"/crash/{place}/{self._random.randrange(_KEYS_PER_WRITER)}"
                    burst.append((key, *self._change(store, key, versions.get(key, ABSENT))))
                for key, token, answer in burst:
                    await self._take_answer(store, versions, key, token, answer)

    async def _put_ephemeral(self, store: MetadataStore, place: int) -> None:
        key = f"{EPHEMERAL_FOLDER}/{place}"
        token = self._submit(Kind.EPHEMERAL, key)
        stat = await store.put(key, record_value(self._seed, token), ephemeral=True)
        self._report(Acknowledged(token, stat.version))

    def _change(
        self, store: MetadataStore, key: str, version: int
    ) -> tuple[int, Awaitable[Stat] | Awaitable[bool]]:
        chance = self._random.random()
        if chance < 0.2:
            token = self._submit(Kind.REMOVE, key)
            return token, store.delete(key)
        token = self._submit(Kind.PUT, key)
        value, indexes = record_value(self._seed, token), record_indexes(token)
        expected = version if chance < 0.6 else None
        return token, store.put(key, value, expected=expected, indexes=indexes)

    async def _take_answer(
        self,
        store: MetadataStore,
        versions: dict[str, int],
        key: str,
        token: int,
        answer: Awaitable[Stat] | Awaitable[bool],
    ) -> None:
        try:
            result = await answer
        except BadVersion:
            self._report(Refused(token))
            record = await store.get(key)
            versions[key] = ABSENT if record is None else record.version
            return
        if isinstance(result, Stat):
            versions[key] = result.version
            self._report(Acknowledged(token, result.version))
        else:
            versions[key] = ABSENT
            self._report(Acknowledged(token))

    async def _append_to_sequences(self) -> None:
        async with self._storage.connect() as store:
            while self._left > 0:
                burst = []
                for _ in range(self._random.choice((1, 1, 6))):
                    prefix = f"{SEQUENCE_FOLDER}/s{self._random.randrange(_SEQUENCES)}"
                    token = self._submit(Kind.SEQUENCE, prefix)
                    value, indexes = record_value(self._seed, token), record_indexes(token)
                    burst.append((token, store.append(prefix, value, indexes=indexes)))
                for token, answer in burst:
                    stat = await answer
                    self._report(Acknowledged(token, stat.version, stat.key))
