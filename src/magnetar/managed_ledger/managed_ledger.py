"""The managed ledger: an endless sequence of entries over many ledgers, with cursors.

Owns: `ManagedLedger`, one owner's view: taking ownership, and the parts it is made of (the
appender, reading, the cursors). Each part states its own invariants.

Invariants:
1. One owner at a time: opening writes a higher epoch into the record, then fences and closes every
   ledger that the former owner left open. From the first step on the former owner cannot change
   the record, from the second on none of its appends is acknowledged.
2. Every opening begins a ledger with a higher id, so no position is ever used twice.
3. What `append` acknowledged is readable until retention trims its whole ledger, and never trimmed
   at or above the lowest pin, or before every durable cursor has acknowledged it.
4. Sealing and deleting are durable decisions: whoever opens next finds or finishes them.

Relies on: `metadata/api.py` and `ledger/api.py`, nothing of their backends.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import msgspec

from magnetar.errors import (
    MagnetarError,
    ManagedLedgerFenced,
    ManagedLedgerSealed,
    StorageClosed,
    StorageError,
)
from magnetar.ledger.api import ENTRY_BYTES_MAX, NO_ENTRY, Entry, LedgerStore
from magnetar.managed_ledger.appender import Appender
from magnetar.managed_ledger.cursor import Cursor
from magnetar.managed_ledger.cursor_state import NOTHING
from magnetar.managed_ledger.cursors import Cursors
from magnetar.managed_ledger.ledger_list import LedgerList, LedgerSpan, Retention
from magnetar.managed_ledger.names import managed_ledger_key
from magnetar.managed_ledger.owned_record import OwnedRecord, take
from magnetar.managed_ledger.reading import PublishTimeOf, Reading
from magnetar.managed_ledger.records import ManagedLedgerRecord, decode_managed_ledger, encode
from magnetar.metadata.api import MetadataStore
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal

EARLIEST: Final = NOTHING
"""As the position of a cursor: before everything that exists."""

# Drawn at random, so that a cursor that is deleted and created again does not repeat one.
INCARNATION_BITS: Final = 62
# Each one finishes a deletion that was found under the name; others may begin more of them.
DELETE_ATTEMPTS: Final = 3

_LOG: Final = logger(__name__)


LEDGERS_KEPT: Final = 4
"""Into at least so many ledgers a size that is to be kept is divided, so that it can be kept to."""

LEDGER_BYTES_MIN: Final = 256 * 1024
"""A ledger is not made smaller than that for it: each costs a file and a place in a record."""


async def stored(name: str, metadata: MetadataStore) -> tuple[tuple[LedgerSpan, ...], bool]:
    """The ledgers of a managed ledger that nobody has open, and whether it is sealed."""
    key = managed_ledger_key(name)
    found = await metadata.get(key)
    if found is None:
        return (), False
    record = decode_managed_ledger(key, name, found.value)
    return record.ledgers, record.sealed


class ManagedLedger(Service):
    """One owner's managed ledger. Get it from `open`, end it with `close`."""

    def __init__(
        self,
        name: str,
        metadata: MetadataStore,
        ledgers: LedgerStore,
        record: OwnedRecord[ManagedLedgerRecord],
        *,
        clock: Clock,
        limits: Limits,
        rng: random.Random,
    ) -> None:
        super().__init__(f"managed ledger {name}", stop_seconds=limits.close_seconds)
        self._record = record
        self._rng = rng
        self._clock = clock
        self._store = ledgers
        # The parts share the appender's list of ledgers; `refresh` brings it up to what is durable.
        self._appender = Appender(name, record, ledgers, clock=clock, limits=limits)
        self._reading = Reading(ledgers, self._appender.refresh)
        self._cursors = Cursors(
            name,
            record.value.epoch,
            metadata,
            clock=clock,
            limits=limits,
            ledgers=self._appender.refresh,
            read=self._reading.read,
            new_incarnation=lambda: rng.getrandbits(INCARNATION_BITS),
        )
        self.append = self._appender.append
        self.append_run = self._appender.append_run
        """Submit an entry now: `append(payload)` is a future of its position (see `Appender`)."""
        self.stopped = Signal()
        """Advances when it stopped by itself; `failure` then says why."""

    @classmethod
    async def open(
        cls,
        name: str,
        metadata: MetadataStore,
        ledgers: LedgerStore,
        *,
        clock: Clock,
        limits: Limits,
        rng: random.Random | None = None,
    ) -> ManagedLedger:
        """Take a managed ledger over, creating it if there is none."""
        rng = rng or random.SystemRandom()
        for _ in range(DELETE_ATTEMPTS):
            record = await _take_over(name, metadata, clock)
            opened = cls(name, metadata, ledgers, record, clock=clock, limits=limits, rng=rng)
            if not record.value.deleted:
                await opened.start()
                return opened
            # An owner died while deleting it, or is at it still: take the cursors over to finish
            # that (invariant 4), then begin anew.
            await opened._cursors.load()
            await opened._finish_deletion()
        raise ManagedLedgerFenced(f"{name} is being deleted by another owner")

    # --- what it knows

    @property
    def epoch(self) -> int:
        return self._record.value.epoch

    @property
    def appended(self) -> Signal:
        """Advances when entries have become durable, once per batch."""
        return self._appender.appended

    @property
    def failure(self) -> MagnetarError | None:
        """Why no entry can be appended any more, if so: sealed, fenced, closed, or the disk."""
        return self._appender.failure

    @property
    def sealed(self) -> bool:
        return self._record.value.sealed

    @property
    def ledger_spans(self) -> tuple[LedgerSpan, ...]:
        return self._appender.refresh().spans

    @property
    def entries(self) -> int:
        """How many entries are kept."""
        return self._appender.refresh().total

    @property
    def size_bytes(self) -> int:
        return self._appender.refresh().size_bytes

    @property
    def pending(self) -> int:
        """Appends that are not durable yet."""
        return self._appender.pending

    def first_position(self) -> Position:
        """The first entry; if there is none, the place before the first to come."""
        ledgers = self._appender.refresh()
        return ledgers.first or _empty(ledgers)

    def last_position(self) -> Position:
        """The last durable entry; if there is none, the place before the first to come."""
        ledgers = self._appender.refresh()
        return ledgers.last or _empty(ledgers)

    def next_valid(self, position: Position) -> Position | None:
        """The first existing position at or after this one; None: it is still to come."""
        return self._appender.refresh().at_or_after(position)

    def last_valid(self, position: Position) -> Position | None:
        """The last existing position at or before this one; None: there is none."""
        return self._appender.refresh().at_or_before(position)

    @property
    def trimmed_through(self) -> Position | None:
        """The last entry that was trimmed; None: none ever was."""
        return self._record.value.trimmed_through

    def next_append_floor(self) -> Position:
        """No later append will be below it, and none so far is at or above it."""
        return self._appender.floor()

    def count_between(self, above: Position, through: Position) -> int:
        """How many entries stand in (above, through]."""
        return self._appender.refresh().count_between(above, through)

    # --- reading

    async def read(
        self, position: Position, entries_max: int, bytes_max: int = ENTRY_BYTES_MAX
    ) -> list[Entry]:
        """Entries from the first existing position at or after `position`; empty at the end."""
        self._check_open()
        return await self._reading.read(position, entries_max, bytes_max)

    async def find_by_time(self, ms: int, publish_time_of: PublishTimeOf) -> Position | None:
        """The first entry published at or after `ms` (see `Reading.find_by_time`)."""
        self._check_open()
        return await self._reading.find_by_time(ms, publish_time_of)

    # --- cursors

    def cursor(self, name: str) -> Cursor:
        return self._cursors.get(name)

    def cursor_names(self) -> list[str]:
        return self._cursors.names()

    async def create_cursor(
        self, name: str, mark_delete: Position, properties: dict[str, str] | None = None
    ) -> Cursor:
        """A durable cursor behind a position: EARLIEST, `last_position()`, or any other."""
        self._check_open()
        return await self._cursors.create(name, mark_delete, properties)

    def open_reader(self, name: str, mark_delete: Position) -> Cursor:
        """A cursor that is never stored and keeps no data from being trimmed."""
        self._check_open()
        return self._cursors.open_volatile(name, mark_delete)

    async def delete_cursor(self, name: str) -> None:
        self._check_open()
        await self._cursors.delete(name)

    # --- the end of data, and of it all

    async def seal(self) -> Position:
        """Let no entry be appended any more, durably; the last position. Again: the same."""
        self._check_open()
        if not self.sealed:
            await self._appender.seal()
        # Not the last that is kept: the end stays where it is when its ledger is trimmed.
        return self._record.value.sealed_at or EARLIEST

    async def trim(self, retention: Retention, lowest_pin: Position | None = None) -> list[int]:
        """Drop whole ledgers that nobody needs and retention lets go; their ids."""
        self._check_open()
        # Only whole ledgers go: of a little that is kept, each may hold a part of it only.
        if retention.size_bytes:
            self._appender.bound_ledgers(
                max(retention.size_bytes // LEDGERS_KEPT, LEDGER_BYTES_MIN)
            )
        # By the marks in memory: a crash may bring an older mark back, and the cursor then goes on
        # with what exists (`CursorState.settle`).
        gone = self._appender.refresh().trimmable(
            retention,
            self._clock.now_ms(),
            acked_through=self._cursors.lowest_mark_delete(),
            lowest_pin=lowest_pin,
        )
        await self._appender.drop(gone)
        return gone

    async def delete(self, also: Sequence[int] = ()) -> None:
        """Remove everything. Once decided it cannot be undone: a crash leaves it to the next.

        `also`: ledgers of others that go with it, of a compacted view, say.
        """
        self._check_open()
        # The decision comes first: whatever happens from here on, the next to open finishes it.
        await self._record.update(
            lambda record: msgspec.structs.replace(
                record, deleted=True, dropping=tuple(sorted({*record.dropping, *also}))
            )
        )
        self._appender.stop(StorageClosed(f"{self._record.value.name} was deleted"))
        await self._finish_deletion()
        await self.stop()

    async def close(self) -> None:
        """Finish appends, close the ledger and write the cursors, within `close_seconds`."""
        await self.stop()

    # --- lifecycle

    async def _start(self) -> None:
        # The second step of invariant 1. The cursors come after it: what their acknowledgements
        # mean depends on where the ledgers end.
        await self._appender.recover()
        if self.sealed:
            self._appender.stop(ManagedLedgerSealed(f"{self._record.value.name} is sealed"))
        else:
            await self._appender.begin()
        await self._cursors.load()
        await self._delete_dropped()
        self.spawn(self._keep_ledgers(), "ledgers")
        self.spawn(self._keep_cursors(), "cursors")

    async def _stop(self) -> None:
        fenced = isinstance(self._appender.failure, ManagedLedgerFenced)
        deleted = self._record.value.deleted
        try:
            await self._appender.close()
            # Else the cursors' records are another owner's, or gone.
            if not fenced and not deleted:
                await self._cursors.flush()
        except ManagedLedgerFenced as error:
            # A later owner has fenced it all; there is nothing left to finish.
            _LOG.info("closed-after-take-over", service=self.name, error=str(error))
        finally:
            self._cursors.stop(StorageClosed(f"{self._record.value.name} was closed"))

    async def _keep_ledgers(self) -> None:
        await self._appender.keep()
        # Sealed is no failure: there is nothing to append, and readers go on.
        if not self.sealed and not self.stopping:
            self._halt(self._appender.failure)

    async def _keep_cursors(self) -> None:
        try:
            await self._cursors.keep_flushed()
        except ManagedLedgerFenced as error:
            # A cursor met the next owner first: appends will be fenced as well.
            self._appender.stop(error)
            self._halt(error)

    def _halt(self, error: MagnetarError | None) -> None:
        # Other failures (a disk's) leave the cursors ours: acknowledgements go on.
        if isinstance(error, ManagedLedgerFenced):
            self._cursors.stop(error)
        self.stopped.advance()

    async def _delete_dropped(self) -> None:
        try:
            await self._appender.delete_dropped()
        except StorageError as error:
            # Their space comes back with the next trim or opening; serving comes first.
            _LOG.warning("trimmed-ledgers-kept", service=self.name, error=str(error))

    async def _finish_deletion(self) -> None:
        """Ledgers and cursors first, the record last: until then the rest can be found."""
        await self._cursors.delete_all()
        record = self._record.value
        for ledger_id in [*(span.ledger_id for span in record.ledgers), *record.dropping]:
            await self._store.delete(ledger_id)
        await self._record.delete()

    def _check_open(self) -> None:
        if self.stopping:
            raise StorageClosed(f"{self._record.value.name} was closed")


def _empty(ledgers: LedgerList) -> Position:
    """Before the first entry to come, where nothing is kept."""
    spans = ledgers.spans
    return Position(spans[-1].ledger_id, NO_ENTRY) if spans else EARLIEST


async def _take_over(
    name: str, metadata: MetadataStore, clock: Clock
) -> OwnedRecord[ManagedLedgerRecord]:
    key = managed_ledger_key(name)
    first_seen: list[int] = []

    def decode(data: bytes) -> ManagedLedgerRecord:
        return decode_managed_ledger(key, name, data)

    def claim(present: ManagedLedgerRecord | None) -> ManagedLedgerRecord:
        epoch = 0 if present is None else present.epoch
        # A race lost to the former owner's last writes is tried again. A new epoch is another
        # opener, who came first: otherwise the two would take it from each other.
        if first_seen and first_seen[0] != epoch:
            raise ManagedLedgerFenced(f"{name}: another owner opened it at the same time")
        first_seen.append(epoch)
        found = present or ManagedLedgerRecord(name, 0)
        return msgspec.structs.replace(found, epoch=epoch + 1)

    return await take(metadata, clock, key, decode, claim, encode=encode)
