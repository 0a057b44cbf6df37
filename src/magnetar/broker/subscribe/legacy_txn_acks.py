"""Acknowledgements in legacy transactions, for one subscription: its log, and the ends.

Owns: `LegacyTxnAcks`: what `TransactionalAcks` does by metadata records for the other kind. Judging
and holding are the same; what differs is where the intents are, and who tells the end.

Invariants:
1. `recover` has read the log, if there is one, before anything is dispatched or acknowledged in a
   transaction: what is not ended is held again, what was committed is in the cursor.
2. An acknowledgement is answered once its coordinator has confirmed that the transaction is open
   and will be ended here, and its entry is durable. If that could not be written it is held
   no more. Being the log's owner is what lets an entry become durable.
3. From the moment of an end nothing more is accepted of its transaction. The end waits for what is
   in flight, is durable behind it, and is then applied; only then `end` returns.
4. Commit: into the cursor in memory; entries are discarded after a durable cursor write that was
   begun after that. Abort: what was held is delivered again, entries are discarded.
5. What was acknowledged before a seek does not count after it.
6. The log begins with the first acknowledgement in a legacy transaction. One that has failed for
   good is not used any more: its topic is loaded anew, and reads what is in it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from magnetar.broker.subscribe.pending_ack_messages import PendingAckMessages
from magnetar.errors import (
    InvalidTxnStatus,
    ServiceNotReady,
    TransactionConflict,
    TransactionNotFound,
)
from magnetar.managed_ledger.cursor import Cursor
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.runtime.slices import SLICE_ITEMS
from magnetar.txn.acks.ack_cleanup import AckCleanup
from magnetar.txn.acks.pending_acks import Acked
from magnetar.txn.ids import to_text
from magnetar.txn.legacy.ended_ids import EndedIds
from magnetar.txn.legacy.pending_ack_entries import AcksEnded, AcksHeld, PendingAckEntry, held
from magnetar.txn.legacy.pending_ack_log import PendingAckLog, PendingAckLogs
from magnetar.txn.outcomes import Outcomes
from magnetar.txn.records import State
from magnetar.wire.messages import TxnId

# Long enough for any append in flight; the coordinator asks again after a refusal.
END_SECONDS: Final = 30.0
"""How long an end waits for what is in flight of its transaction."""

_LOG: Final = logger(__name__)


class LegacyTxnAcks:
    """One subscription as a participant of legacy transactions."""

    def __init__(
        self,
        cursor: Cursor,
        messages: PendingAckMessages,
        logs: PendingAckLogs,
        outcomes: Outcomes,
        ends: Counter[State],
        *,
        tasks: Service,
        clock: Clock,
    ) -> None:
        self._cursor = cursor
        self._held = messages
        self._logs = logs
        self._outcomes = outcomes
        self._ends = ends
        """Counted for the subscription, with those of the other kind."""
        self._tasks = tasks
        self._log: PendingAckLog | None = None
        # One opener at a time: the log fences its former writer, so two would fence each other.
        self._opening = asyncio.Lock()
        self._incarnation = cursor.incarnation
        """That of all that is held; the cursor's is another one while a seek is under way."""
        self._ended = EndedIds()
        self._ending: set[TxnId] = set()
        """Whose end is under way."""
        self._stored: dict[TxnId, list[Position]] = {}
        """Entries in the log of those that are not ended."""
        self._in_flight: dict[TxnId, int] = {}
        self._landed = Signal()
        """Advances when a command is over."""
        self._entries: AckCleanup[Position] = AckCleanup(cursor, self._discard, clock=clock)
        """Of the log, that are done with."""
        self._is_recovered = False
        self._closed = False

    # --- recovery

    async def recover(self) -> None:
        """Hold again what was held, apply what was decided. The cursor was read before."""
        if self._is_recovered:
            return
        if self._logs.exists(self._cursor.name):
            log = await self._opened()
            # All of it first: what is applied in part could not be read again.
            for position, entry in [each async for each in log.replay()]:
                await self._replay(position, entry)
        self._is_recovered = True
        self._settle()

    async def _replay(self, position: Position, entry: PendingAckEntry) -> None:
        txn, pending = entry.txn, self._held.pending
        # The end of a transaction: what its earlier entries hold is settled, or was before.
        if isinstance(entry, AcksEnded):
            await self._apply(txn, commit=entry.committed, entry=position)
            self._ended.add(txn)
        # From before a seek: it counts no more, once the cursor's present incarnation is durable.
        elif entry.incarnation != self._cursor.incarnation:
            self._entries.merged([position])  # it may be that of a seek under way
        else:
            pending.add(txn, entry.acks, entry.cumulative)
            self._stored.setdefault(txn, []).append(position)

    async def _opened(self) -> PendingAckLog:
        async with self._opening:
            if self._closed:
                raise ServiceNotReady(f"subscription {self._cursor.name} was closed")
            if self._log is None:
                self._log = await self._logs.open(self._cursor.name)
            # Invariant 6: the topic is loaded anew, which opens and reads the log again.
            elif (failure := self._log.failure) is not None:
                self._logs.lost(failure)
                text = f"the log of subscription {self._cursor.name} has failed ({failure})"
                raise ServiceNotReady(text, hint="its topic is loaded anew; try again")
            return self._log

    # --- commands

    def knows(self, txn: TxnId) -> bool:
        """Whether it has acknowledged something here that its end will settle."""
        return txn in self._stored or txn in self._in_flight or txn in self._ending

    def records(self, txn: TxnId) -> int:
        """How many entries of the log it has, or is about to have."""
        return len(self._stored.get(txn, ())) + self._in_flight.get(txn, 0)

    def begin(self, txn: TxnId) -> None:
        """A command of a transaction, which is open, holds messages: `store` follows."""
        self._in_flight[txn] = self._in_flight.get(txn, 0) + 1

    def check_open(self, txn: TxnId) -> None:
        """TransactionConflict if it has ended here, or its coordinator says that it is not open.

        If that cannot tell without waiting, `store` has it asked.
        """
        if txn in self._ended:
            raise TransactionConflict(f"transaction {to_text(txn)} has ended")
        if self._takes_part(txn) is False:
            raise _not_open(txn)

    async def store(
        self, txn: TxnId, acks: list[Acked], cumulative: bool, incarnation: int
    ) -> None:
        """Make durable what was held with `begin`, or hold it no more."""
        try:
            await self._store(held(txn, incarnation, acks, cumulative))
        except BaseException:
            # A seek has cleared the hold already.
            if incarnation == self._cursor.incarnation:
                self._held.release(txn, acks, cumulative)
            raise
        finally:
            # In `finally`: an end waits until nothing of its transaction is in flight.
            self.give_up(txn)
        self._check_serving(incarnation)

    def give_up(self, txn: TxnId) -> None:
        """A command that was begun is over, stored or not."""
        self._in_flight[txn] -= 1
        if not self._in_flight[txn]:
            del self._in_flight[txn]
        self._landed.advance()

    async def _store(self, entry: AcksHeld) -> None:
        # The end was told after the hold: nothing more is accepted (invariant 3).
        if entry.txn in self._ended:
            raise TransactionConflict(f"transaction {to_text(entry.txn)} has ended")
        if entry.txn not in self._stored and self._takes_part(entry.txn) is not True:
            await self._take_part(entry.txn)
        log = await self._opened()
        self._check_serving(entry.incarnation)
        position = await log.submit(entry)
        # A seek came during the write: the entry is discarded once that is durable.
        if entry.incarnation == self._cursor.incarnation:
            self._stored.setdefault(entry.txn, []).append(position)
        else:
            self._entries.merged([position])
            self._settle()

    def _takes_part(self, txn: TxnId) -> bool | None:
        return self._outcomes.legacy.takes_part(txn, self._logs.topic, self._cursor.name)

    async def _take_part(self, txn: TxnId) -> None:
        """Have its coordinator say that it is open, and end it here too."""
        try:
            await self._outcomes.legacy.take_part(txn, self._logs.topic, self._cursor.name)
        except (TransactionNotFound, InvalidTxnStatus) as error:
            raise _not_open(txn) from error

    def _check_serving(self, incarnation: int) -> None:
        if self._closed or incarnation != self._cursor.incarnation:
            raise ServiceNotReady(f"subscription {self._cursor.name} was closed or reset")

    # --- ends

    async def end(self, txn: TxnId, *, commit: bool, low_watermark: int) -> None:
        """What its coordinator has decided; durable when this returns."""
        self._check_open()
        if txn in self._ending:
            raise ServiceNotReady(f"transaction {to_text(txn)} is being ended already")
        # Invariant 3: before the first await, so that nothing new gets in while it waits.
        self._ended.add(txn)
        self._ending.add(txn)
        try:
            await self._end(txn, commit=commit)
        finally:
            self._ending.discard(txn)
        # Ids that the low watermark has passed need not be remembered one by one.
        self._ended.note_low(txn.most, min(low_watermark, txn.least - 1))
        # The coordinator knows nothing open below its low watermark: what is left here lost its
        # end.
        for left in [each for each in self._stored if self._ended.is_below(each)]:
            _LOG.warning("acks-left-open", txn=to_text(left), subscription=self._cursor.name)
            await self._end(left, commit=False)

    async def _end(self, txn: TxnId, *, commit: bool) -> None:
        try:
            async with asyncio.timeout(END_SECONDS):
                while txn in self._in_flight:
                    await self._landed.past(self._landed.version)
        except TimeoutError as error:
            raise ServiceNotReady(f"acknowledgements of {to_text(txn)} are in flight") from error
        # Nothing was acknowledged here, or a repeated end: both are done.
        if txn not in self._stored:
            return
        log = await self._opened()
        position = await log.submit(AcksEnded(*txn, commit))
        # Asked again after the write: if the subscription was closed, the next owner replays it.
        self._check_open()
        self._ends["COMMITTED" if commit else "ABORTED"] += 1
        await self._apply(txn, commit=commit, entry=position)
        self._settle()

    async def _apply(self, txn: TxnId, *, commit: bool, entry: Position) -> None:
        entries = [*self._stored.pop(txn, []), entry]
        is_dropped = False
        # In slices: what is not yet taken from it stays held meanwhile. A seek between two of them
        # clears all that is left.
        while (ended := self._held.pending.end(txn, SLICE_ITEMS)) is not None:
            if self._incarnation != self._cursor.incarnation:
                continue
            if commit:
                self._held.commit(ended)
            else:
                self._held.abort(ended)
            is_dropped = not commit
            if not ended.is_all:
                await asyncio.sleep(0)
                self._check_open()
        # Invariant 4: a commit's entries stay until the cursor is durable, as they do until a seek
        # is; those of an abort need not.
        if is_dropped:
            self._entries.dropped(entries)
        else:
            self._entries.merged(entries)

    # --- entries that are done with

    def _settle(self) -> None:
        if not self._closed:
            self._entries.settle_soon(self._tasks)

    async def _discard(self, entries: list[Position]) -> None:
        await (await self._opened()).discard(entries)

    # --- the end

    def reset(self) -> None:
        """The cursor has begun a new incarnation: nothing is held any more."""
        self._incarnation = self._cursor.incarnation
        for entries in self._stored.values():
            self._entries.merged(entries)
        self._stored.clear()
        self._settle()

    def stop(self) -> None:
        """Take part in nothing any more; what is held stays so for the next owner."""
        self._closed = True

    async def close(self) -> None:
        """Let go of the log, once nothing uses it any more."""
        async with self._opening:
            log, self._log = self._log, None
        if log is not None:
            await log.close()

    async def forget(self) -> None:
        """The cursor is gone, and with it the log."""
        await self._logs.delete(self._cursor.name)

    def _check_open(self) -> None:
        if self._closed or self._cursor.failure is not None:
            raise ServiceNotReady(f"subscription {self._cursor.name} was closed")


def _not_open(txn: TxnId) -> TransactionConflict:
    return TransactionConflict(
        f"transaction {to_text(txn)} is not open", hint="begin a new transaction"
    )
