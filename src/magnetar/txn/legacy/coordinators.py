"""The coordinators of legacy transactions that one broker leads.

Owns: `LegacyCoordinators`: which logs are open here, and who answers for which transaction.

Invariants:
1. Whoever leads a coordinator leads it for both kinds: a log is opened under a leadership, and left
   when that is over. Opening fences whoever had it before.
2. A log is opened when the first legacy transaction begins, or, if there is one, when a leadership
   begins: a broker without legacy transactions opens none, and reads one record per coordinator.
3. While a log is being opened or opened again, requests wait a moment and then get
   TransactionCoordinatorNotFound: clients try again.
4. A topic or subscription lets a legacy transaction in only on its coordinator's word, which has
   noted by then that it takes part there: whatever is held anywhere is ended with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from magnetar.errors import (
    MagnetarError,
    StoreClosed,
    TransactionCoordinatorNotFound,
    TransactionNotFound,
)
from magnetar.ledger.api import LedgerStore
from magnetar.metadata.recipes import Counter
from magnetar.runtime.background import BackgroundTasks, stopping
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.txn import transitions
from magnetar.txn.coordinator_partitions import PARTITIONS, CoordinatorPartitions
from magnetar.txn.ids import to_text
from magnetar.txn.legacy.coordinator import LegacyCoordinator
from magnetar.txn.legacy.coordinator_entries import Acknowledging
from magnetar.txn.legacy.coordinator_log import CoordinatorLog, log_exists
from magnetar.txn.legacy.coordinator_state import LegacyTransaction
from magnetar.txn.legacy.ends import Ends, HeaderCopies, Participants
from magnetar.txn.open_transactions import OpenTransactions
from magnetar.txn.records import Header, State
from magnetar.txn.store import TxnStore
from magnetar.wire.messages import TxnId

NUMBERS: Final = "/txn/legacy-ids"

# A put of the store per so many transactions; what a leadership leaves of its block is lost.
_NUMBER_BLOCK: Final = 10_000
# Well below clients' operation timeouts: they rather ask again, here or elsewhere.
_OPEN_WAIT_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 1.0
"""Between two looks at what is led here, if nobody tells of a change."""

_LOG: Final = logger(__name__)


class _Seat(NamedTuple):
    """A leadership, and its coordinator or the opening of it."""

    epoch: int
    opening: asyncio.Task[LegacyCoordinator]

    @property
    def coordinator(self) -> LegacyCoordinator | None:
        """None: it is not open yet, or could not be opened."""
        task = self.opening
        # A failed opening counts as lost, and `_follow` tries again.
        if not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    @property
    def is_lost(self) -> bool:
        """Whether it must be opened again."""
        if not self.opening.done():
            return False
        own = self.coordinator
        return own is None or own.log.failure is not None


class LegacyCoordinators(Service):
    """All that this broker leads."""

    def __init__(
        self,
        partitions: CoordinatorPartitions,
        open_transactions: OpenTransactions,
        participants: Participants,
        store: TxnStore,
        ledgers: LedgerStore,
        *,
        clock: Clock,
        limits: Limits,
    ) -> None:
        super().__init__("legacy coordinators", stop_seconds=limits.close_seconds)
        self._partitions = partitions
        self._open_transactions = open_transactions
        self.participants = participants
        # Shared by all coordinators: one limit for what this broker asks of participants at once.
        self._copies = HeaderCopies(store)
        self._ends = Ends(participants, self._copies)
        self._metadata = store.metadata
        self._ledgers = ledgers
        self._clock = clock
        self._limits = limits
        self._background = BackgroundTasks()
        # One per coordinator whose log is open, or being opened, under the present leadership.
        self._seats: dict[int, _Seat] = {}
        self._leaving = asyncio.Lock()
        self._looked: dict[int, int] = {}
        """Leaderships, by their epochs, of which it is known whether there is a log."""

    async def _start(self) -> None:
        self.spawn(self._follow(), "leaderships")
        self.spawn(self._collect(), "collection")

    async def _stop(self) -> None:
        self._background.close()
        # What waits for participants is told that the coordinator leaves,
        # so that `over` can return.
        for partition in list(self._seats):
            await self._leave(partition)
        await self._background.over()  # whoever waited for an end is told by now

    # --- what clients ask

    async def begin(
        self, partition: int, timeout_ms: int, owner: str = "", client: str = ""
    ) -> TxnId:
        """A new transaction; durable when this returns."""
        self._check(partition)
        transitions.check_timeout(timeout_ms, self._limits.txn_timeout_max_seconds)
        own = await self._coordinator(partition, create=True)
        return await own.begin(timeout_ms, owner, client)

    async def add_partitions(
        self, txn: TxnId, topics: Iterable[str], owner: str | None = "", *, in_records: bool = False
    ) -> None:
        own = await self._of(txn)
        await own.add_partitions(txn, topics, owner, copied=in_records)

    async def add_subscriptions(
        self,
        txn: TxnId,
        subscriptions: Iterable[Acknowledging],
        owner: str | None = "",
        *,
        in_records: bool = False,
    ) -> None:
        own = await self._of(txn)
        await own.add_subscriptions(txn, subscriptions, owner, copied=in_records)

    async def end(self, txn: TxnId, *, commit: bool, owner: str | None = "", by: str = "") -> State:
        """Decide a transaction; what was decided, once everyone has carried it out."""
        await (await self._of(txn)).end(txn, commit=commit, owner=owner, by=by)
        return "COMMITTED" if commit else "ABORTED"

    def ending(
        self, txn: TxnId, *, commit: bool, owner: str | None = "", by: str = ""
    ) -> asyncio.Task[State]:
        """Decide a transaction in a task of its own, which is not to be cancelled."""
        return self._background.in_task(self.end(txn, commit=commit, owner=owner, by=by))

    async def expire(self, due: Header) -> None:
        """Decide to abort a transaction whose deadline has passed."""
        own = await self._of(due.id)
        await own.decide(due.id, commit=False, owner=None, by=transitions.BY_DEADLINE)

    # --- what it knows

    def here(self) -> Iterator[LegacyCoordinator]:
        """The coordinators that are open here."""
        for seat in self._seats.values():
            if (own := seat.coordinator) is not None:
                yield own

    def at(self, partition: int) -> LegacyCoordinator | None:
        """A coordinator, if it is open here."""
        seat = self._seats.get(partition)
        return None if seat is None else seat.coordinator

    def takes_part(self, txn: TxnId, topic: str, subscription: str | None = None) -> bool | None:
        """Whether it is open and will be ended there; False: it may not; None: ask `take_part`."""
        if txn.most >= PARTITIONS:
            return False
        own = self.at(txn.most)
        # None, not False: a log that is not open, or was lost, may still come to know it.
        if own is None or own.log.failure is not None:
            return None
        known = own.find(txn)
        if known is None or not known.is_open:
            return False
        if subscription is None:
            is_added = topic in known.topics
        else:
            is_added = Acknowledging(topic, subscription) in known.subscriptions
        return True if is_added else None

    async def take_part(self, txn: TxnId, topic: str, subscription: str | None = None) -> None:
        """Have it ended there too, as ADD_PARTITION and ADD_SUBSCRIPTION do; durably.

        TransactionNotFound, InvalidTxnStatus: no coordinator says that it is open.
        """
        if subscription is None:
            await self.add_partitions(txn, (topic,), None)
        else:
            await self.add_subscriptions(txn, (Acknowledging(topic, subscription),), None)

    async def find(self, txn: TxnId) -> LegacyTransaction | None:
        """A transaction that is coordinated here, unless it is forgotten."""
        try:
            return (await self._of(txn)).find(txn)
        except TransactionNotFound:
            return None

    # --- who answers

    async def _of(self, txn: TxnId) -> LegacyCoordinator:
        try:
            return await self._coordinator(txn.most, create=False)
        except TransactionNotFound:
            raise TransactionNotFound(f"there is no transaction {to_text(txn)}") from None

    async def _coordinator(self, partition: int, *, create: bool) -> LegacyCoordinator:
        self._check(partition)
        if partition not in self._seats:
            # A request about an id whose coordinator never had a log: none is created for it.
            if not create and not await log_exists(self._metadata, partition):
                raise TransactionNotFound(f"coordinator {partition} has no log")
            # Once more after the read: the leadership may be over, and opening
            # would fence its successor.
            self._check(partition)
            self._take(partition)
        seat = self._seats[partition]
        if not seat.opening.done():
            await asyncio.wait({seat.opening}, timeout=_OPEN_WAIT_SECONDS)
        own = seat.coordinator
        # Not open within that second, or left meanwhile: both look the same to the client.
        if own is None or self._seats.get(partition) is not seat:
            raise TransactionCoordinatorNotFound(
                f"coordinator {partition} is reading its log", hint="try again in a moment"
            )
        return own

    def _check(self, partition: int) -> None:
        if self.stopping:
            raise stopping()
        self._partitions.check(partition)

    # --- leaderships

    async def _follow(self) -> None:
        changes = self._partitions.changes
        while not self.stopping:
            # The version first: a change while logs are opened or left makes
            # the next look immediate.
            seen = changes.version
            try:
                await self._leave_lost()
                await self._take_new()
            except StoreClosed:
                return
            except MagnetarError as error:
                _LOG.warning("txn-leaderships-late", error=str(error))
            await changes.past_within(seen, _LOOK_SECONDS)

    async def _leave_lost(self) -> None:
        led = self._partitions.led
        for partition, seat in list(self._seats.items()):
            # Led by another broker, led again under a new epoch, or the log has failed: in each
            # case only an opening tells what is true.
            if led.get(partition) != seat.epoch or seat.is_lost:
                self._looked.pop(partition, None)
                await self._leave(partition)

    async def _take_new(self) -> None:
        new = [
            partition
            for partition, epoch in self._partitions.led.items()
            # Remembered by epoch: no log was there, and under this
            # leadership only `begin` makes one.
            if partition not in self._seats and self._looked.get(partition) != epoch
        ]
        epochs = self._partitions.led
        exist = await asyncio.gather(*(log_exists(self._metadata, each) for each in new))
        for partition, exists in zip(new, exist, strict=True):
            self._looked[partition] = epochs[partition]
            # Once more after the read: opening fences, and must not fence a newer leader.
            if exists and self._partitions.leads(partition) and not self.stopping:
                self._take(partition)

    def _take(self, partition: int) -> None:
        if partition in self._seats:
            return
        opening = asyncio.create_task(self._open(partition), name=f"log of {partition}")
        self._seats[partition] = _Seat(self._partitions.led[partition], opening)

    async def _leave(self, partition: int) -> None:
        """Let a coordinator go, unless that was done; whoever opens its log next goes on.

        One at a time: who stops must wait for one that a lost leadership began.
        """
        async with self._leaving:
            seat = self._seats.pop(partition, None)
            if seat is not None:
                await self._closed(partition, seat)

    async def _closed(self, partition: int, seat: _Seat) -> None:
        await asyncio.wait({seat.opening})  # half open it could not be closed
        own = seat.coordinator
        try:
            if own is not None:
                await own.close()
            else:
                await seat.opening  # why it was not opened
        except MagnetarError as error:
            _LOG.warning("txn-log-left", coordinator=partition, error=str(error))

    async def _open(self, partition: int) -> LegacyCoordinator:
        log = await CoordinatorLog.open(
            partition, self._metadata, self._ledgers, clock=self._clock, limits=self._limits
        )
        # A block of its own: numbers of this leadership are above all that were given before.
        numbers = Counter(self._metadata, f"{NUMBERS}/{partition}", block=_NUMBER_BLOCK)
        own = LegacyCoordinator(
            partition,
            log,
            numbers,
            self._open_transactions,
            self._ends,
            self._copies,
            clock=self._clock,
            limits=self._limits,
        )
        try:
            await own.recover()
        # Half recovered: carrying out may have begun, and must not go on without its log.
        except BaseException:
            await own.close()
            raise
        return own

    # --- forgetting

    async def _collect(self) -> None:
        while True:
            await self._clock.sleep(self._limits.txn_collect_seconds)
            await self.collect()

    async def collect(self) -> None:
        """Forget finished transactions that are no longer kept."""
        before = self._clock.now_ms() - round(self._limits.txn_retention_seconds * 1000)
        for own in list(self.here()):
            try:
                await own.collect(before)
            except MagnetarError as error:
                _LOG.warning("txn-log-not-trimmed", coordinator=own.partition, error=str(error))
