"""One coordinator of legacy transactions, from the opening of its log on.

Owns: `LegacyCoordinator`: the transactions of one coordinator in memory, and everything that it
does to them: begin, add, decide, have the decision carried out, remember and forget.

Invariants:
1. Memory follows the log: every change is durable there before it counts, and the same function
   makes the state of both (`coordinator_state.after`).
2. The decision is the durable `Decided`. From then on it is carried out until all participants are
   done, by this coordinator or by whoever opens the log next; then `Ended` is written.
3. An end is answered when `Ended` is durable. The same end again gets the same answer, the opposite
   one InvalidTxnStatus, as long as the transaction is remembered.
4. What is done to one transaction is done in turn: what was added before the decision takes part.
5. Numbers ascend in the log, over all leaders. No transaction at or below the low watermark is
   open or ending, and none will begin there.
6. Once the log has failed for good nothing more is done: whoever opens it next knows what is true.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from magnetar.errors import (
    DeadlineExceeded,
    InvalidTxnStatus,
    InvariantBroken,
    MagnetarError,
    NotAllowed,
    TooManyRequests,
    TransactionCoordinatorNotFound,
    TransactionNotFound,
)
from magnetar.metadata.recipes import Counter
from magnetar.model.ids import Position
from magnetar.runtime.background import BackgroundTasks
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import TXN_BEGUN
from magnetar.runtime.signal import Signal
from magnetar.txn.ids import METADATA_BIT, to_text
from magnetar.txn.legacy.coordinator_entries import (
    Acknowledging,
    Began,
    Entry,
    PartitionsAdded,
    SubscriptionsAdded,
)
from magnetar.txn.legacy.coordinator_log import CoordinatorLog
from magnetar.txn.legacy.coordinator_state import (
    OUTCOMES,
    LegacyTransaction,
    after,
    decision,
    ending,
    header_of,
)
from magnetar.txn.legacy.ends import RETRY_SECONDS, Ends, HeaderCopies
from magnetar.txn.open_transactions import Cause, OpenTransactions, cause_of
from magnetar.txn.records import Header
from magnetar.wire.messages import TxnId

_Addition = Callable[[LegacyTransaction], Entry | None]
"""What must be written to add something; None: it is there already."""

_LOG: Final = logger(__name__)


class _Held:
    """A transaction that is open or ending."""

    __slots__ = ("is_copied", "known", "positions", "progress", "turn")

    def __init__(self, known: LegacyTransaction) -> None:
        self.known = known
        self.positions: list[Position] = []
        """Of its entries in the log."""
        self.is_copied = False
        """Whether its header is known to be there, if it has one."""
        self.turn = asyncio.Lock()
        self.progress = Signal()
        """Advances when it is finished."""


class _Finished(NamedTuple):
    known: LegacyTransaction
    position: Position
    """Of `Ended`, the only entry that is left."""


class LegacyCoordinator:
    """One coordinator, at its leader. `recover` comes first, `close` last."""

    def __init__(
        self,
        partition: int,
        log: CoordinatorLog,
        numbers: Counter,
        open_transactions: OpenTransactions,
        ends: Ends,
        copies: HeaderCopies,
        *,
        clock: Clock,
        limits: Limits,
    ) -> None:
        self.partition = partition
        self.log = log
        self._numbers = numbers
        self._open_transactions = open_transactions
        self._ends = ends
        self._copies = copies
        self._clock = clock
        self._limits = limits
        # By number: open or ending, then finished ones that are remembered for repeated END_TXNs,
        # and the numbers that hold the low watermark back.
        self._live: dict[int, _Held] = {}
        self._finished: OrderedDict[int, _Finished] = OrderedDict()
        """In the order in which they ended."""
        self._unfinished: OrderedDict[int, None] = OrderedDict()
        """Ascending: the numbers of those that are being begun, open or ending."""
        # Numbers must stand in the log in ascending order, though taking one may be a put.
        self._numbering = asyncio.Lock()
        self._background = BackgroundTasks()
        self._drives: set[asyncio.Task[None]] = set()
        self.last_number = 0

    # --- the beginning and the end of a leadership

    async def recover(self) -> None:
        """Read the log, and go on with what is in it."""
        async for position, entry in self.log.replay():
            self._replayed(position, entry)
        # Sorted: the log has them in the order in which they began, and the
        # low watermark relies on it.
        self._unfinished.update((number, None) for number in sorted(self._live))
        self.last_number = max((*self._live, *self._finished), default=0)
        for held in self._live.values():
            # Open: its deadline runs on. Decided, but not ended when the former leader died:
            # carried out again, which participants do not mind ('all or nothing').
            if held.known.is_open:
                self._open_transactions.add(self._header(held.known))
            else:
                self._decided(held, "asked")
        if self._live or self._finished:
            counts = {"live": len(self._live), "finished": len(self._finished)}
            _LOG.info("txn-log-replayed", coordinator=self.partition, **counts)

    def _replayed(self, position: Position, entry: Entry) -> None:
        number = entry.number
        held = self._live.get(number)
        done = self._finished.get(number)
        before = held.known if held is not None else done.known if done is not None else None
        now = after(before, entry)
        # A crash may bring back entries that were forgotten: those of a transaction whose beginning
        # is gone, or that is finished, say nothing.
        if now is None or done is not None:
            self.log.forget((position,))  # a leftover of what was forgotten
        elif now.is_finished:
            self._note_finished(now, position, () if held is None else held.positions)
        else:
            held = self._live.setdefault(number, _Held(now))
            held.known = now
            held.positions.append(position)

    async def close(self) -> None:
        """Do nothing more; what is being decided is decided first."""
        # Decisions that were begun become durable; carrying them out is cut short, because whoever
        # opens the log next does it again; who waits hears that before the log is closed.
        self._background.close()
        await self._background.over()
        for drive in self._drives:
            drive.cancel()
        if self._drives:
            await asyncio.wait(self._drives)
        for held in self._live.values():
            held.progress.close(
                TransactionCoordinatorNotFound(f"coordinator {self.partition} leaves this broker")
            )
        await self.log.close()

    # --- what it knows

    @property
    def low_watermark(self) -> int:
        """No transaction with this number or a lower one is, or will be, open or ending."""
        return next(iter(self._unfinished), self.last_number + 1) - 1

    def find(self, txn: TxnId) -> LegacyTransaction | None:
        held = self._live.get(txn.least)
        if held is not None:
            return held.known
        done = self._finished.get(txn.least)
        return None if done is None else done.known

    def live(self) -> Iterator[LegacyTransaction]:
        """Transactions that are open or ending, the oldest first."""
        for held in self._live.values():
            yield held.known

    # --- what clients ask

    async def begin(self, timeout_ms: int, owner: str, client: str = "") -> TxnId:
        self._check()
        most = self._limits.txn_open_per_coordinator_max
        # Those that are ending count, too: a topic that cannot be loaded must not let them pile up.
        if len(self._unfinished) >= most:
            raise TooManyRequests(
                f"{most} transactions of coordinator {self.partition} are open, the limit",
                hint="end some of them, or raise txn_open_per_coordinator_max",
            )
        self._open_transactions.reserve(owner)
        try:
            return await self._background.apart(self._begin(timeout_ms, owner, client))
        finally:
            self._open_transactions.release(owner)

    async def add_partitions(
        self, txn: TxnId, topics: Iterable[str], owner: str | None, *, copied: bool
    ) -> None:
        """Let topics take part; durable when this returns. `copied`: they need a header."""
        held = self._owned_open(txn, owner)
        wanted = tuple(topics)

        def entry(known: LegacyTransaction) -> Entry | None:
            new = tuple(each for each in dict.fromkeys(wanted) if each not in known.topics)
            # A header that is needed only now must be in the log, too: the
            # next leader ends it as well.
            is_new = new or (copied and not known.has_copy)
            return PartitionsAdded(known.number, new, copied) if is_new else None

        await self._background.apart(self._add(held, entry, copied=copied))

    async def add_subscriptions(
        self,
        txn: TxnId,
        subscriptions: Iterable[Acknowledging],
        owner: str | None,
        *,
        copied: bool,
    ) -> None:
        """Let subscriptions take part; durable when this returns. `copied`: they need a header."""
        held = self._owned_open(txn, owner)
        wanted = tuple(subscriptions)

        def entry(known: LegacyTransaction) -> Entry | None:
            new = tuple(each for each in dict.fromkeys(wanted) if each not in known.subscriptions)
            is_new = new or (copied and not known.has_copy)
            return SubscriptionsAdded(known.number, new, copied) if is_new else None

        await self._background.apart(self._add(held, entry, copied=copied))

    async def end(self, txn: TxnId, *, commit: bool, owner: str | None, by: str = "") -> None:
        """Decide, and return once everyone has carried it out."""
        found = await self.decide(txn, commit=commit, owner=owner, by=by)
        if found is not None:
            await self._over(found)

    async def decide(
        self, txn: TxnId, *, commit: bool, owner: str | None, by: str = ""
    ) -> _Held | None:
        """Decide; None: it is finished already, with that decision."""
        self._check()
        known = self._owned(txn, owner)
        held = self._live.get(known.number)
        # END_TXN again, after a lost answer or a failover: the remembered end answers.
        if held is None:
            _check_same(txn, known, commit=commit)
            return None
        await self._background.apart(self._decide(held, commit=commit, by=by))
        return held

    async def _over(self, held: _Held) -> None:
        """Wait for the end of a transaction that was decided."""
        seconds = self._limits.txn_end_wait_seconds
        try:
            async with asyncio.timeout(seconds):
                # The version of `progress` moves once, when `Ended` is
                # durable; closing raises instead.
                while not held.known.is_finished:
                    await held.progress.past(0)
        except TimeoutError:
            raise DeadlineExceeded(
                f"transaction {to_text(self._id(held.known))} is {held.known.state}: not all its "
                f"topics and subscriptions could end it within {seconds:g} s",
                hint="the decision stays; ask again",
            ) from None

    # --- in turn, in tasks of their own

    async def _begin(self, timeout_ms: int, owner: str, client: str) -> TxnId:
        async with self._numbering:
            # Awaited under the lock: whoever took a number first submits first (invariant 5).
            number = await self._numbers.next()
            if not self.last_number < number < METADATA_BIT:
                raise InvariantBroken(f"the number {number} follows {self.last_number}")
            # The log may have failed while a block of numbers was taken.
            self._check()
            began = Began(number, self._clock.now_ms(), timeout_ms, owner, client)
            submitted = self.log.submit(began)
            # Counted before it is durable: no low watermark that is told meanwhile may pass it.
            self.last_number = number
            self._unfinished[number] = None
        try:
            # Outside the lock: transactions that begin at the same time share a sync.
            position = await self.log.durable(submitted)
        except BaseException:
            # It never was: left there it would hold the low watermark back for good.
            del self._unfinished[number]
            raise
        known = after(None, began)
        assert known is not None
        held = self._live[number] = _Held(known)
        held.positions.append(position)
        self._open_transactions.add(self._header(known))
        TXN_BEGUN.labels(str(self.partition)).inc()
        return self._id(known)

    async def _add(self, held: _Held, entry: _Addition, *, copied: bool) -> None:
        async with held.turn:
            known = held.known
            # Checked in turn: what comes after the decision would not be told of it.
            if not known.is_open:
                raise InvalidTxnStatus(f"transaction {to_text(self._id(known))} is {known.state}")
            new = entry(known)
            if new is not None:
                self._check_participants(known, new)
                await self._write(held, new)
            if copied and not held.is_copied:
                # The log first: what it does not know of would never be ended.
                await self._copies.open(self._header(held.known))
                held.is_copied = True

    def _check_participants(self, known: LegacyTransaction, new: Entry) -> None:
        most, then = self._limits.txn_participants_max, after(known, new)
        if then is not None and len(then.topics) + len(then.subscriptions) > most:
            raise NotAllowed(
                f"transaction {to_text(self._id(known))} would have more than {most} "
                "topics and subscriptions, the limit",
                hint="use several transactions, or raise txn_participants_max",
            )

    async def _decide(self, held: _Held, *, commit: bool, by: str) -> None:
        async with held.turn:
            now_ms = self._clock.now_ms()
            entry = decision(held.known, commit=commit, now_ms=now_ms, by=by)
            # A second client, the deadline or a retry came after the decision: the same answer, or
            # the opposite one is refused; and whoever is still asked gets asked now.
            if entry is None:
                _check_same(self._id(held.known), held.known, commit=commit)
                self._ends.hurry(self._id(held.known))
                return
            await self._write(held, entry)
            self._decided(held, cause_of(by))

    async def _write(self, held: _Held, entry: Entry) -> None:
        self._check()
        position = await self.log.append(entry)
        # After the append, by the function that also replays: memory never says more than the log.
        now = after(held.known, entry)
        assert now is not None
        held.known = now
        held.positions.append(position)

    # --- carrying out

    def _decided(self, held: _Held, cause: Cause) -> None:
        """The decision is in the log: tell everyone, and see to it that it is carried out."""
        txn, now = self._id(held.known), self._clock.now_ms()
        # Participants here that keep it in records change in this turn; all others are asked.
        self._open_transactions.over(txn, OUTCOMES[held.known.state], now, cause)
        drive = asyncio.create_task(self._carry_out(held), name=f"end {to_text(txn)}")
        self._drives.add(drive)
        drive.add_done_callback(self._drive_done)

    async def _carry_out(self, held: _Held) -> None:
        # The watermark is asked for at each attempt, which may be hours later.
        await self._ends.carry_out(self._id(held.known), held.known, lambda: self.low_watermark)
        while not held.known.is_finished:
            entry = ending(held.known, self._clock.now_ms())
            try:
                position = await self.log.append(entry)
            except MagnetarError as error:
                # The log is lost: `_drive_done` has it opened again, which begins this anew.
                if not error.retryable:
                    raise
                await self._clock.sleep(RETRY_SECONDS)
                continue
            known = after(held.known, entry)
            assert known is not None
            self._note_finished(known, position, held.positions)
            held.known = known
            held.progress.advance()

    def _drive_done(self, drive: asyncio.Task[None]) -> None:
        self._drives.discard(drive)
        if not drive.cancelled() and (error := drive.exception()) is not None:
            # The log is opened again, and what is not finished is carried out then.
            _LOG.warning("txn-end-interrupted", task=drive.get_name(), error=repr(error))
            if self.log.failure is None:
                self.log.give_up(InvariantBroken(f"{drive.get_name()}: {error!r}"))

    def _note_finished(
        self, known: LegacyTransaction, position: Position, earlier: Iterable[Position]
    ) -> None:
        self._live.pop(known.number, None)
        self._unfinished.pop(known.number, None)
        self._finished[known.number] = _Finished(known, position)
        # Only now: until `Ended` is durable these entries are what a new leader needs.
        self.log.forget(earlier)
        if len(self._finished) > self._limits.txn_finished_per_coordinator_max:
            self._forget_oldest()

    # --- forgetting

    async def collect(self, before_ms: int) -> None:
        """Forget what was finished before a time, and let its place in the log go."""
        # In the order of ends, so the first one that is young enough ends the search.
        while self._finished and next(iter(self._finished.values())).known.ended_ms < before_ms:
            self._forget_oldest()
        await self.log.trim()

    def _forget_oldest(self) -> None:
        number = next(iter(self._finished))
        self.log.forget((self._finished.pop(number).position,))

    # --- who may

    def _check(self) -> None:
        if self.log.failure is not None:
            raise TransactionCoordinatorNotFound(
                f"coordinator {self.partition} lost its log ({self.log.failure})"
            )

    def _owned(self, txn: TxnId, owner: str | None) -> LegacyTransaction:
        """A transaction, if there is one and it is this owner's; None: every owner's."""
        known = self.find(txn)
        if known is None or (owner is not None and known.owner and known.owner != owner):
            raise TransactionNotFound(f"there is no transaction {to_text(txn)}")
        return known

    def _owned_open(self, txn: TxnId, owner: str | None) -> _Held:
        self._check()
        known = self._owned(txn, owner)
        held = self._live.get(known.number)
        if held is None:
            raise InvalidTxnStatus(f"transaction {to_text(txn)} is {known.state}")
        return held

    def _id(self, known: LegacyTransaction) -> TxnId:
        return TxnId(self.partition, known.number)

    def _header(self, known: LegacyTransaction) -> Header:
        return header_of(self._id(known), known)


def _check_same(txn: TxnId, known: LegacyTransaction, *, commit: bool) -> None:
    if known.commits != commit:
        wanted = "COMMITTED" if commit else "ABORTED"
        raise InvalidTxnStatus(f"transaction {to_text(txn)} is {known.state}, not {wanted}")
