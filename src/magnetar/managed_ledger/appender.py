"""The write end of a managed ledger: the open ledger, its successor, and what to do when it fails.

Owns: `Appender`: the current writer, those still finishing, and the list of ledgers they fill.

Invariants:
1. A ledger gets entries only after the managed ledger's record names it, by a compare-and-set that
   a former owner cannot win; so a later owner, who reads the record after its own, fences all.
2. Appends never wait for a new ledger: they go to the old one until its successor is recorded.
3. An entry is readable only once every entry before it is durable or known to have failed: while
   an old ledger is finishing, entries of its successor stay hidden.
4. A failed append ends its ledger. Until a new one is recorded, appends fail at once with a
   retryable error. The wait for disk space never ends by itself; other failures are tried
   `REPLACE_ATTEMPTS` times, then the appender stops for good.
5. The hot path makes no future, task or callback of its own per append: a task per ledger follows
   its writer's `durable` signal and advances `appended`, once per batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from magnetar.errors import (
    DiskFull,
    LedgerFenced,
    MagnetarError,
    ManagedLedgerFenced,
    ManagedLedgerSealed,
    OutcomeUnknown,
    StorageClosed,
    StorageError,
    StorageFenced,
    StoreClosed,
    TooManyRequests,
    Unavailable,
)
from magnetar.ledger.api import NO_ENTRY, LedgerInfo, LedgerStore, LedgerWriter
from magnetar.managed_ledger.ledger_list import LedgerList, LedgerSpan, Rollover, last_of
from magnetar.managed_ledger.owned_record import OwnedRecord, may_be_applied
from magnetar.managed_ledger.records import ManagedLedgerRecord
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.signal import Signal

REPLACE_ATTEMPTS: Final = 8
FIRST_PAUSE_S: Final = 0.05
PAUSE_MAX_S: Final = 5.0

# In place of a limit: the keeper was told once that the ledger is full, and need not be again.
_NEVER: Final = 1 << 62
_NOT_SHOWN: Final = NO_ENTRY - 1
_LOG: Final = logger(__name__)

# No new ledger helps: another owner has it, the store has stopped, or only the next owner
# can find out what was written.
_FATAL: Final = (
    ManagedLedgerFenced,
    LedgerFenced,
    StorageFenced,
    StorageClosed,
    StoreClosed,
    OutcomeUnknown,
)


class _Finishing(NamedTuple):
    """A writer that takes no more appends and has some in flight."""

    writer: LedgerWriter
    submitted: int
    size_bytes: int


class Appender:
    """Appends to the newest ledger, and sees to it that there is one."""

    def __init__(
        self,
        name: str,
        record: OwnedRecord[ManagedLedgerRecord],
        store: LedgerStore,
        *,
        clock: Clock,
        limits: Limits,
    ) -> None:
        self.ledgers = LedgerList(record.value.ledgers)
        """As of the last `refresh`."""
        self.appended = Signal()
        self.failure: MagnetarError | None = None
        """Why it stopped for good."""
        self._name = name
        self._record = record
        self._store = store
        self._clock = clock
        self._pending_max = limits.managed_ledger_pending_appends
        self._ledger_bytes = limits.managed_ledger_ledger_bytes
        self._rollover = Rollover(
            self._ledger_bytes,
            limits.managed_ledger_ledger_entries,
            limits.managed_ledger_ledger_seconds,
        )
        # Ledgers on their way out: those that finish their appends, in order, and those that have
        # left the list and are to be deleted.
        self._finishing: list[_Finishing] = []
        self._dropping = set(record.value.dropping)
        self._writer: LedgerWriter | None = None
        self._shown = _NOT_SHOWN
        """The last entry of the open ledger that the list has."""
        self._submit: Callable[[bytes], asyncio.Future[Position]]
        self._submit_run: Callable[[list[bytes], int], asyncio.Future[Position]]
        self._refusal: MagnetarError | None = Unavailable(f"{name} has no open ledger yet")
        self._lost: MagnetarError | None = None
        """Why the current ledger must be replaced."""
        self._ending: MagnetarError | None = None
        """Set while the end is being made: a new ledger does not take appends any more."""
        self._turn = asyncio.Lock()
        """Ledgers begin and end one at a time."""
        self._begun_at = 0.0
        self._floor = Position(0, 0)
        # The hot path compares two numbers. `_gate` is the count at which `_pass_gate` has to look;
        # at 0, every append goes there.
        self._count = 0
        self._bytes = 0
        self._gate = 0
        self._run_bytes_max = 0
        self._full_bytes = 0
        self._full_entries = 0
        self._followers: dict[int, asyncio.Task[None]] = {}
        self._work = Signal()
        """Advances when the keeper has something to do."""

    # --- the hot path

    def append(self, payload: bytes) -> asyncio.Future[Position]:
        """Submit an entry now; the future is the ledger writer's own.

        Raises at once, with nothing submitted: TooManyRequests, InvalidArgument, a retryable
        error while there is no ledger, or the reason why there will be none.
        """
        if self._count >= self._gate or self._bytes >= self._full_bytes:
            self._pass_gate()
        try:
            # TooManyRequests and InvalidArgument pass through: the ledger is sound.
            future = self._submit(payload)
        except StorageError as error:
            self._lose_writer(error)
            assert self._refusal is not None
            raise self._refusal from error
        self._count += 1
        self._bytes += len(payload)
        return future

    def append_run(self, payloads: list[bytes], size: int) -> asyncio.Future[Position] | None:
        """Submit entries that follow one another; the future has the position of the first.

        All of them become durable, or none. None, and nothing submitted, where so many cannot be
        taken as a whole: one by one they can be, up to the limit. Raises as `append` does.
        """
        count = self._count + len(payloads)
        if count > self._gate or self._bytes >= self._full_bytes:
            self._pass_gate()
            if count > self._gate:
                return None
        if size > self._run_bytes_max:
            return None
        try:
            future = self._submit_run(payloads, size)
        except StorageError as error:
            self._lose_writer(error)
            assert self._refusal is not None
            raise self._refusal from error
        self._count = count
        self._bytes += size
        return future

    def _pass_gate(self) -> None:
        """Refuse, or ask for a new ledger, and set the count at which to look again."""
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        # Told once. The append itself still goes to this ledger (invariant 2).
        if self._count >= self._full_entries or self._bytes >= self._full_bytes:
            self._full_entries = self._full_bytes = _NEVER
            self._work.advance()
        # Counted here only, and then good for so many appends more.
        room = self._pending_max - self.pending
        if room <= 0:
            self._gate = 0
            raise TooManyRequests(f"{self._name}: {self._pending_max} appends are not durable yet")
        self._gate = min(self._full_entries, self._count + room)

    @property
    def pending(self) -> int:
        """Appends that are neither durable nor known to have failed."""
        count = sum(each.submitted - each.writer.last_durable - 1 for each in self._finishing)
        if self._writer is not None:
            count += self._count - self._writer.last_durable - 1
        return count

    def floor(self) -> Position:
        """No append from now on lands below this position, and none so far at or above it.

        It never falls: an empty ledger leaves the list when it is closed.
        """
        if self._writer is not None:
            present = Position(self._writer.ledger_id, self._count)
        # The end is being made: no ledger takes appends, the last one's are in flight.
        elif self._finishing:
            last = self._finishing[-1]
            present = Position(last.writer.ledger_id, last.submitted)
        else:
            # Not begun, sealed, or between a failed ledger and the next.
            spans = self.ledgers.spans
            present = Position(spans[-1].ledger_id, spans[-1].entries) if spans else Position(0, 0)
        self._floor = max(self._floor, present)
        return self._floor

    def refresh(self) -> LedgerList:
        """The list of ledgers with what is readable at this moment."""
        writer = self._writer
        # Asked several times for each read and each batch: mostly nothing is new.
        if writer is not None and writer.last_durable == self._shown and not self._finishing:
            return self.ledgers
        for each in self._finishing:
            durable = each.writer.last_durable + 1
            self.ledgers.grow(each.writer.ledger_id, durable, each.size_bytes)
            # What stands behind a gap stays hidden (invariant 3).
            if durable < each.submitted:
                return self.ledgers
        if writer is not None:
            self._shown = writer.last_durable
            self.ledgers.grow(writer.ledger_id, self._shown + 1, self._bytes)
        return self.ledgers

    # --- durability

    async def _follow(self, writer: LedgerWriter) -> None:
        """Tell readers of what has become durable, and notice a failed ledger."""
        seen = writer.durable.version
        while writer.failure is None:
            self.appended.advance()
            seen = await writer.durable.past(seen)
        self.appended.advance()
        if writer is self._writer:
            self._lose_writer(writer.failure)

    def _unfollow(self, ledger_id: int) -> None:
        follower = self._followers.pop(ledger_id, None)
        if follower is not None:
            follower.cancel()

    # --- failures

    def stop(self, error: MagnetarError) -> None:
        """Refuse every append from now on; the first reason stays."""
        if self.failure is None:
            self.failure = error
            self._refuse(error)
            self._work.advance()
            self.appended.close(error)

    def _lose_writer(self, error: BaseException) -> None:
        # The next owner was here: this one is over.
        if isinstance(error, LedgerFenced):
            self.stop(ManagedLedgerFenced(f"{self._name}: its ledger was fenced"))
        # Nothing that another ledger would mend, or a bug.
        elif isinstance(error, _FATAL) or not isinstance(error, MagnetarError):
            self.stop(error if isinstance(error, MagnetarError) else StorageError(repr(error)))
        # Only this ledger is lost: callers may come again, and the keeper begins another.
        elif self._lost is None and self.failure is None:
            _LOG.warning("ledger-lost", managed_ledger=self._name, error=str(error))
            self._lost = error
            full = isinstance(error, DiskFull)
            self._refuse(error if full else Unavailable(f"{self._name}: {error}"))
            self._work.advance()

    def _refuse(self, error: MagnetarError) -> None:
        self._refusal = error
        self._gate = 0

    # --- the keeper: rolls over and replaces

    def bound_ledgers(self, size_bytes: int) -> None:
        """Have no ledger grow larger than this, or than the broker's own limit."""
        bound = min(size_bytes, self._ledger_bytes)
        if bound != self._rollover.size_bytes:
            self._rollover = self._rollover._replace(size_bytes=bound)
            # The open one as well: the keeper looks at it, and the hot path has the new number.
            self._full_bytes = bound
            self._work.advance()

    async def keep(self) -> None:
        """Begin a new ledger whenever one is due. Ends when the appender stops for good."""
        while self.failure is None:
            seen = self._work.version
            # A failed ledger first: until it is replaced, every append is refused (invariant 4).
            if self._lost is not None:
                await self._replace()
            elif self._finishing or self._is_full():
                await self._roll(seen)
            else:
                await self._wait(seen, self._seconds_left())

    def _is_full(self) -> bool:
        age = self._clock.monotonic() - self._begun_at
        return self._writer is not None and self._rollover.due(self._count, self._bytes, age)

    def _seconds_left(self) -> float:
        left = self._begun_at + self._rollover.seconds - self._clock.monotonic()
        # Of age, but empty: look again after another life.
        return left if left > 0 else self._rollover.seconds

    async def _wait(self, seen: int, seconds: float) -> None:
        await self._work.past_within(seen, seconds)

    async def _roll(self, seen: int) -> None:
        try:
            async with self._turn:
                # Looked at again behind the lock: a seal may have come first.
                if self._is_full() and self._ending is None:
                    await self.begin()
                await self._finish_old()
        except _FATAL as error:
            self._stop_for(error)
        except MagnetarError as error:
            # Meanwhile appends go on, to whichever ledger is open (invariant 2).
            _LOG.warning("rollover-failed", managed_ledger=self._name, error=str(error))
            await self._wait(seen, PAUSE_MAX_S)

    async def _replace(self) -> None:
        """End the failed ledger and begin another, with pauses that grow."""
        pause = FIRST_PAUSE_S
        attempts = 0
        while self.failure is None and self._lost is not None:
            try:
                async with self._turn:
                    await self._end_current()
                    await self.begin()
                return
            except _FATAL as error:
                self._stop_for(error)
                return
            except MagnetarError as error:
                # Space comes back when somebody makes room; anything else has its chances.
                attempts += not isinstance(error, DiskFull)
                if attempts >= REPLACE_ATTEMPTS:
                    self.stop(error)
                    return
            await self._clock.sleep(pause)
            pause = min(pause * 2, PAUSE_MAX_S)

    def _stop_for(self, error: MagnetarError) -> None:
        if isinstance(error, LedgerFenced):
            error = ManagedLedgerFenced(f"{self._name}: its ledger was fenced")
        self.stop(error)

    # --- ledgers begin and end

    async def begin(self) -> None:
        """Create a ledger, record it, and append to it from then on."""
        writer = await self._store.create()
        # Recorded before the first append (invariant 1), and switched to in the very step in which
        # the record has it: a cancelled caller leaves no difference.
        span = LedgerSpan(writer.ledger_id, self._clock.now_ms())
        try:
            await self._record.update(
                lambda record: self._with_ledgers(record, span), lambda: self._switch(writer, span)
            )
        except MagnetarError as error:
            # The record may name it: whoever opens next fences it, and finds it empty.
            if may_be_applied(error):
                raise
            # Not recorded, so nobody will ever look for it.
            self._dropping.add(writer.ledger_id)
            await self._store.delete(writer.ledger_id)
            self._dropping.discard(writer.ledger_id)
            raise

    def _switch(self, writer: LedgerWriter, span: LedgerSpan) -> None:
        self.ledgers.add(span)
        if self._writer is not None:
            self._finishing.append(_Finishing(self._writer, self._count, self._bytes))
        self._writer = writer
        self._shown = _NOT_SHOWN
        self._submit = writer.append
        self._submit_run = writer.append_run
        self._run_bytes_max = writer.run_bytes_max
        self._begun_at = self._clock.monotonic()
        self._count = self._bytes = 0
        self._lost = None
        follow = self._follow(writer)
        self._followers[writer.ledger_id] = asyncio.create_task(follow, name="appender-follow")
        self._full_entries = self._rollover.entries
        self._full_bytes = self._rollover.size_bytes
        # None, as a rule. Stopped or being sealed meanwhile: then the new ledger takes nothing.
        self._refusal = self.failure or self._ending
        self._gate = 0

    async def _finish_old(self) -> None:
        """Wait for the appends of former ledgers and close those."""
        while self._finishing:
            old = self._finishing[0]
            try:
                info = await old.writer.close()
            except _FATAL:
                raise
            # Its writer failed. What is durable of it, the store knows.
            except MagnetarError:
                info = await self._store.close_ledger(old.writer.ledger_id)
            self._finishing.pop(0)
            self._close_span(info)
            # Entries of the next ledger become readable by this (invariant 3).
            self.appended.advance()
            await self.record_ledgers()

    async def _end_current(self) -> None:
        """Settle what a failed ledger holds. Done already: nothing."""
        await self._finish_old()
        if self._writer is not None:
            info = await self._store.close_ledger(self._writer.ledger_id)
            self._writer = None
            self._close_span(info)
            self.appended.advance()

    async def seal(self) -> None:
        """End for good, durably. If that fails, appends go on with a new ledger."""
        sealed = ManagedLedgerSealed(f"{self._name} is sealed")
        # Appends are refused before the end is looked for: it must not move while it is recorded.
        self._ending = sealed
        self._refuse(sealed)
        try:
            async with self._turn:
                await self._finish_all()
                await self._record.update(self._with_end, lambda: self.stop(sealed))
        except _FATAL as error:
            self._stop_for(error)
            raise
        # Not sealed (or the caller was cancelled), but its ledgers may be closed by now:
        # have the keeper begin another.
        except BaseException as error:
            self._ending = None
            if self.failure is not None:
                raise
            self._lost = self._lost or Unavailable(f"{self._name}: sealing failed: {error}")
            self._refuse(self._lost)
            self._work.advance()
            raise

    async def close(self) -> None:
        """Finish what was submitted and close its ledger; the next owner then has less to do."""
        ended = self.failure is not None
        self.stop(StorageClosed(f"{self._name} was closed"))
        try:
            # Stopped before: its ledger is for the next owner to close, or is closed already.
            if not ended:
                async with self._turn:
                    await self._finish_all()
                    await self.record_ledgers()
        finally:
            for ledger_id in list(self._followers):
                self._unfollow(ledger_id)

    async def _finish_all(self) -> None:
        await self._finish_old()
        if self._writer is not None:
            self._finishing.append(_Finishing(self._writer, self._count, self._bytes))
            self._writer = None
            await self._finish_old()

    async def recover(self) -> None:
        """Fence and close what a former owner left open."""
        for span in self.ledgers.spans:
            if not span.closed:
                self._close_span(await self._store.close_ledger(span.ledger_id))

    def _close_span(self, info: LedgerInfo) -> None:
        self._unfollow(info.ledger_id)
        # Nobody has a position in it: out of the list, or each opening would leave one behind.
        if info.last_entry == NO_ENTRY:
            self.ledgers.drop([info.ledger_id])
            self._dropping.add(info.ledger_id)
        else:
            count = info.last_entry + 1
            self.ledgers.close(info.ledger_id, count, info.size_bytes, self._clock.now_ms())

    # --- the record

    def _with_ledgers(self, record: ManagedLedgerRecord, *more: LedgerSpan) -> ManagedLedgerRecord:
        if more and record.sealed:
            raise ManagedLedgerSealed(f"{self._name} is sealed")
        return msgspec.structs.replace(
            record,
            ledgers=(*self.ledgers.spans, *more),
            dropping=tuple(sorted(self._dropping)),
        )

    def _with_end(self, record: ManagedLedgerRecord) -> ManagedLedgerRecord:
        changed = self._with_ledgers(record)
        return msgspec.structs.replace(changed, sealed=True, sealed_at=self.ledgers.last)

    async def record_ledgers(self) -> None:
        """Bring the record up to date with the list."""
        await self._record.update(self._with_ledgers)

    async def drop(self, ledger_ids: list[int]) -> None:
        """Take ledgers out of the list, durably, then delete them."""
        # Out of the list and into `dropping` in one write, deleted afterwards: a crash in between
        # leaves no ledger that nobody knows of.
        gone = set(ledger_ids)

        def change(record: ManagedLedgerRecord) -> ManagedLedgerRecord:
            changed = self._with_ledgers(record)
            kept = tuple(span for span in changed.ledgers if span.ledger_id not in gone)
            dropping = tuple(sorted({*changed.dropping, *gone}))
            return msgspec.structs.replace(
                changed,
                ledgers=kept,
                dropping=dropping,
                trimmed_through=last_of(
                    [span for span in changed.ledgers if span.ledger_id in gone],
                    changed.trimmed_through,
                ),
            )

        def applied() -> None:
            self.ledgers.drop(gone)
            self._dropping |= gone

        if gone:
            await self._record.update(change, applied)
        await self.delete_dropped()

    async def delete_dropped(self) -> None:
        """Delete the ledgers that the record names as no longer needed."""
        # Only what the durable record names: one that is dropped in memory alone
        # may still be in its list.
        for ledger_id in sorted(self._dropping & set(self._record.value.dropping)):
            await self._store.delete(ledger_id)
            self._dropping.discard(ledger_id)
