"""Transactions begin and end here: the coordinators of one broker.

Owns: `Coordinators`: what clients may ask of the coordinators that this broker leads, and the loops
that abort what nobody ends and forget what is finished. It decides on metadata-driven transactions
itself and knows who decides on the others (`of`); deadlines and limits are the same for both.

Invariants:
1. To begin is one durable put; to end is one compare-and-set, of the header or, for the member of a
   group, of the group's record. The answer comes after it, and after everyone on this broker has
   learned it.
2. A decision that was begun runs to its end, whatever becomes of who asked: by callbacks if one put
   is all it takes, else in a task of its own.
3. The same end again gets the same answer, the opposite one InvalidTxnStatus, as long as the header
   is kept. Who is not the owner is told that there is no such transaction.
4. Nothing is replayed when a coordinator moves to another broker: the records are the state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import lru_cache, partial
from typing import Any, Final

from prometheus_client import Counter

from magnetar.errors import (
    BadVersion,
    InvalidTxnStatus,
    MagnetarError,
    NotAllowed,
    OutcomeUnknown,
    TransactionNotFound,
)
from magnetar.metadata.api import Stat
from magnetar.runtime.background import BackgroundTasks, future_of, stopping
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import TXN_BEGUN
from magnetar.runtime.service import Service
from magnetar.txn import transitions
from magnetar.txn.api import TransactionCoordinator
from magnetar.txn.coordinator.gc import Repair, TransactionGc
from magnetar.txn.coordinator.groups import TransactionGroups
from magnetar.txn.coordinator.timeouts import TransactionTimeouts
from magnetar.txn.coordinator_partitions import CoordinatorPartitions, partition_of
from magnetar.txn.ids import METADATA_BIT, is_metadata, to_text
from magnetar.txn.legacy.coordinator_entries import Acknowledging
from magnetar.txn.legacy.coordinators import LegacyCoordinators
from magnetar.txn.open_transactions import OpenTransactions, cause_of
from magnetar.txn.records import Group, GroupMembership, Header, State, header_indexes, header_key
from magnetar.txn.store import TxnStore
from magnetar.txn.transitions import Committed
from magnetar.wire.messages import TxnId

_LOG: Final = logger(__name__)


class Coordinators(Service):
    """The coordinators of one broker; `partitions` and `legacy` start and stop with them."""

    def __init__(
        self,
        store: TxnStore,
        partitions: CoordinatorPartitions,
        open_transactions: OpenTransactions,
        legacy: LegacyCoordinators,
        *,
        clock: Clock,
        limits: Limits,
        repair: Repair,
    ) -> None:
        super().__init__("coordinators", stop_seconds=limits.close_seconds)
        self.partitions = partitions
        self.legacy = legacy
        """Those of the transactions that end by markers."""
        self._store = store
        self._clock = clock
        self._limits = limits
        self._background = BackgroundTasks()
        self._open_transactions = open_transactions
        # Three parts, which share the list of open transactions: decisions
        # of groups, deadlines, GC.
        self._groups = TransactionGroups(
            store,
            partitions,
            self._open_transactions,
            clock,
            limits,
            self._background.in_background,
        )
        self._deadlines = TransactionTimeouts(
            store, partitions, self._open_transactions, clock, self._expire
        )
        self._collector = TransactionGc(
            store, partitions, clock, limits, repair, self._groups.forget_old
        )

    async def _start(self) -> None:
        await self.partitions.start()
        await self.legacy.start()
        self.spawn(self._deadlines.run(), "deadlines")
        self.spawn(self._collector.run(), "collection")

    async def _stop(self) -> None:
        self._background.close()
        # Legacy coordinators first, which tells those who wait for an end; then what is being
        # decided gets decided; a leadership is given away only after that.
        async with AsyncExitStack() as stops:  # of all, though one fails; the last one first
            stops.push_async_callback(self.partitions.stop)
            stops.push_async_callback(self._background.over)
            stops.push_async_callback(self.legacy.stop)

    @property
    def open_count(self) -> int:
        """Open transactions that this broker knows of."""
        return len(self._open_transactions)

    def open_by_coordinator(self) -> dict[int, int]:
        """Count the open transactions of each coordinator that this broker leads."""
        counts = self._open_transactions.by_coordinator()
        return {number: counts[number] for number in self.partitions.led}

    # --- the two kinds

    def of(self, txn: TxnId, *, scalable: bool = False) -> TransactionCoordinator:
        """The coordinator that decides on a transaction, by the kind that its id tells.

        `scalable`: as v5 clients ask, who never have one of the legacy kind.
        """
        if txn.least & METADATA_BIT:  # `is_metadata`, on the way of every END_TXN
            return self
        # A v5 client holds a v4 client's id: said clearly, because the number alone looks valid.
        if scalable:
            raise TransactionNotFound(
                f"there is no transaction {to_text(txn)}",
                hint="this is the id of a legacy transaction; ask without `scalable`",
            )
        return self.legacy

    # --- what clients ask

    async def begin(
        self,
        coordinator: int,
        timeout_ms: int,
        owner: str = "",
        membership: GroupMembership | None = None,
        client: str = "",
    ) -> Header:
        """A new transaction, alone or in a group."""
        self._check_new(coordinator, timeout_ms)
        # Should nobody wait for it any more, its deadline ends it.
        if membership is None:
            txn = await self.partitions.new_id(coordinator)
            return await asyncio.shield(self._beginning(txn, timeout_ms, owner, client))
        # Held from before the put until the list of open transactions counts it itself.
        self._open_transactions.reserve(owner)
        try:
            return await self._begin_member(coordinator, timeout_ms, owner, membership, client)
        finally:
            self._open_transactions.release(owner)

    def _check_new(self, coordinator: int, timeout_ms: int) -> None:
        self.partitions.check(coordinator)
        transitions.check_timeout(timeout_ms, self._limits.txn_timeout_max_seconds)
        if self.stopping:
            raise stopping()

    def beginning(
        self, coordinator: int, timeout_ms: int, owner: str = "", client: str = ""
    ) -> asyncio.Future[Header] | None:
        """A new transaction alone, without a task; None: `begin`, for ids must be fetched first.

        Not to be cancelled: whoever may be cancelled himself awaits a shield of it.
        """
        self._check_new(coordinator, timeout_ms)
        txn = self.partitions.new_id_at_once(coordinator)
        return None if txn is None else self._beginning(txn, timeout_ms, owner, client)

    async def end(self, txn: TxnId, *, commit: bool, owner: str | None = "", by: str = "") -> State:
        """Decide a transaction; what was decided."""
        # Shielded from the session: a client that disconnects must not leave a decision half made.
        return await asyncio.shield(self.ending(txn, commit=commit, owner=owner, by=by))

    def ending(
        self, txn: TxnId, *, commit: bool, owner: str | None = "", by: str = ""
    ) -> asyncio.Future[State]:
        """Decide a transaction: in work of its own, which is not to be cancelled."""
        # A legacy id has no header here, and gets TransactionNotFound as any unknown one does.
        self.partitions.check(txn.most)
        return self._ending(txn, "COMMITTED" if commit else "ABORTED", owner, by)

    async def add_partitions(
        self, txn: TxnId, topics: Iterable[str], owner: str | None = "", *, in_records: bool = False
    ) -> None:
        """Nothing is noted: topics write pins of their own."""
        await self.check_open(txn, owner)

    async def add_subscriptions(
        self,
        txn: TxnId,
        subscriptions: Iterable[Acknowledging],
        owner: str | None = "",
        *,
        in_records: bool = False,
    ) -> None:
        """Nothing is noted: subscriptions write ack records of their own."""
        await self.check_open(txn, owner)

    def is_open_here(self, txn: TxnId, owner: str | None = "") -> bool:
        """Whether `check_open` would find it open without asking the store."""
        self.partitions.check_txn(txn)
        header = self._open_transactions.get(txn)
        return header is not None and _owned(header, txn, owner).state == "OPEN"

    async def check_open(self, txn: TxnId, owner: str | None = "") -> None:
        """Raise unless a transaction is open and this owner's."""
        self.partitions.check_txn(txn)
        # A courtesy to the client: what counts is the check that each participant makes itself.
        header = self._open_transactions.get(txn) or await self._store.header(txn)
        _owned(header, txn, owner)
        if header is not None and header.is_final:
            raise InvalidTxnStatus(f"transaction {to_text(txn)} is {header.state}")

    async def open_group(
        self, application: str, generation: str, run: str, owner: str = ""
    ) -> Group:
        """A run of a distributed writer begins."""
        return await self._background.apart(self._groups.open(application, generation, run, owner))

    async def commit_group(
        self,
        application: str,
        epoch: int,
        sequence: int,
        txns: Sequence[TxnId],
        owner: str = "",
        note: str = "",
    ) -> Committed:
        """Commit these transactions of a sequence, and abort the others."""
        return await self._background.apart(
            self._groups.commit(application, epoch, sequence, txns, owner, note)
        )

    async def group_status(self, application: str, owner: str = "") -> Group:
        """What a group decided last."""
        found = await self._background.apart(self._groups.status(application, owner))
        if found is None:
            raise TransactionNotFound(f"there is no group {application!r}", hint="open it first")
        return found

    # --- beginning

    def _beginning(
        self, txn: TxnId, timeout_ms: int, owner: str, client: str
    ) -> asyncio.Future[Header]:
        header = transitions.begun(
            txn,
            now_ms=self._clock.now_ms(),
            timeout_ms=timeout_ms,
            owner=owner,
            client=client,
        )
        # Held from before the put until the list of open transactions counts it itself.
        self._open_transactions.reserve(owner)
        try:
            put = future_of(self._store.create(header))
        except BaseException:
            self._open_transactions.release(owner)
            raise
        begun: asyncio.Future[Header] = asyncio.get_running_loop().create_future()
        put.add_done_callback(partial(self._created, header, txn, begun))
        return begun

    def _created(
        self,
        header: Header,
        txn: TxnId,
        begun: asyncio.Future[Header],
        put: asyncio.Future[Stat],
    ) -> None:
        """The header of a transaction that is alone is stored, or not."""
        self._open_transactions.release(header.owner)
        error = put.exception()
        if error is None:
            self._began(header, txn, put.result().version)
            begun.set_result(header)
        elif isinstance(error, OutcomeUnknown):
            self._background.keep(begun, self._looked_for(header, txn))
        else:
            begun.set_exception(error)
            begun.exception()  # who asked may be gone: it is told, or nobody is

    async def _looked_for(self, header: Header, txn: TxnId) -> Header:
        """A header of which nobody knows whether it was stored."""
        # Ids are given once, so the very header there is this put.
        if await self._store.header(txn) != header:
            # Should it arrive later, its deadline ends it.
            raise OutcomeUnknown(f"whether transaction {header.txn} began is not known")
        self._began(header, txn, None)
        return header

    def _began(self, header: Header, txn: TxnId, version: int | None) -> None:
        _begun_count(txn.most).inc()
        # The leadership went away during the put. The transaction is good; only this broker's list
        # of open ones has no business with it: the next leader finds it by its deadline.
        if self.partitions.leads(txn.most):
            self._open_transactions.began(header, version)

    async def _begin_member(
        self,
        coordinator: int,
        timeout_ms: int,
        owner: str,
        membership: GroupMembership,
        client: str,
    ) -> Header:
        # All changes of a group are made under one lock, at its coordinator: one begun elsewhere
        # could slip past a COMMIT_GROUP.
        expected = partition_of(membership.application)
        if coordinator != expected:
            raise NotAllowed(
                f"{membership.application!r} has the coordinator {expected}, not {coordinator}",
                hint="begin its transactions at the one that OPEN_GROUP named",
            )
        await self._groups.check_new(membership, owner)
        header = transitions.begun(
            await self.partitions.new_id(coordinator),
            now_ms=self._clock.now_ms(),
            timeout_ms=timeout_ms,
            owner=owner,
            group=membership,
            client=client,
        )
        await self._create(header)
        _begun_count(coordinator).inc()
        # Checked once more under the group's lock: OPEN_GROUP or COMMIT_GROUP may have come between
        # the first check and the put. (Without the leadership it is the next leader's.)
        if self.partitions.leads(coordinator):
            await self._groups.began(header)
        return header

    async def _create(self, header: Header) -> None:
        """Store the header of a new member."""
        try:
            await self._store.create(header)
        except OutcomeUnknown:
            # Ids are given once, so the very header there is this put.
            if await self._store.header(header.id) != header:
                raise  # should it arrive later, its deadline ends it

    # --- ending

    def _ending(
        self, txn: TxnId, state: State, owner: str | None, by: str
    ) -> asyncio.Future[State]:
        now = self._clock.now_ms()
        known, version = self._open_transactions.get(txn), self._open_transactions.version(txn)
        # A member of a group, or one that a former leader began: the store is read.
        if known is None or version is None:
            work = self._end_as_stored(txn, state, owner, now, by)
            return self._background.in_task(work)
        # The usual END_TXN: begun here, nobody else has written it, so one
        # put decides without a read.
        after = transitions.ended(_owned(known, txn, owner), state, now, by)
        decided = self._background.promise()
        try:
            put = future_of(self._store.replace(after, version))
        except BaseException as error:  # noqa: BLE001  told to who asked
            decided.set_exception(error)
        else:
            put.add_done_callback(partial(self._replaced, txn, after, owner, by, decided))
        return decided

    def _replaced(
        self,
        txn: TxnId,
        after: Header,
        owner: str | None,
        by: str,
        decided: asyncio.Future[State],
        put: asyncio.Future[Stat],
    ) -> None:
        """The put that decides a transaction is durable, or lost its race."""
        error = put.exception()
        self._store.count_replaced(error)
        if error is None:
            self._open_transactions.over(txn, after.state, self._clock.now_ms(), cause_of(by))
            decided.set_result(after.state)
        # Only the store tells what stands there.
        elif isinstance(error, BadVersion | OutcomeUnknown):
            again = self._end_as_stored(txn, after.state, owner, after.finalized_ms, by)
            self._background.keep(decided, again)
        else:
            decided.set_exception(error)

    async def _end(self, txn: TxnId, state: State, owner: str | None, by: str) -> State:
        return await asyncio.shield(self._ending(txn, state, owner, by))

    async def _end_as_stored(
        self, txn: TxnId, state: State, owner: str | None, now: int, by: str
    ) -> State:
        """End a transaction that others may have changed, or that its group decides."""

        def ended(header: Header | None) -> Header | None:
            known = _owned(header, txn, owner)
            if known.group is not None and not known.is_final:
                return None  # its group decides
            return transitions.ended(known, state, now, by)

        after = await self._store.change(header_key(txn), Header, ended, header_indexes)
        # A member whose header is still open: only the group's record tells what became of it.
        if after is None:
            return await self._end_member(txn, state, by)
        self._open_transactions.over(txn, after.state, self._clock.now_ms(), cause_of(by))
        return after.state

    async def _end_member(self, txn: TxnId, state: State, by: str) -> State:
        found = await self._store.state(txn)
        header = await self._store.header(txn)
        if found is None or header is None or header.group is None:
            raise _missing(txn)
        # END_TXN of a member may abort it, at any time; to commit it alone would tear its sequence
        # apart ('all or nothing').
        if found == "OPEN":
            if state == "COMMITTED":
                raise NotAllowed(
                    f"transaction {header.txn} is one of {header.group.application!r}",
                    hint="COMMIT_GROUP commits it",
                )
            # Through the group's record: a header changed by itself would contradict it.
            found = (await self._groups.abort(header.group.application, [header], by)).get(txn)
        if found is None:
            raise _missing(txn)
        # COMMIT_GROUP came first, or the deadline did: the answer is what stands.
        if found != state:
            raise InvalidTxnStatus(f"transaction {header.txn} is {found}, not {state}")
        return state

    async def _expire(self, due: Sequence[Header]) -> None:
        """Abort transactions whose deadline has passed; members of one group together."""
        groups: dict[str, list[Header]] = {}
        work: list[Coroutine[Any, Any, object]] = []
        for header in due:
            # Each kind ends its own way: by its coordinator's log, by its
            # header, by its group's record.
            if not is_metadata(header.id):
                work.append(self.legacy.expire(header))
            elif header.group is None:
                work.append(self._end(header.id, "ABORTED", None, transitions.BY_DEADLINE))
            else:
                groups.setdefault(header.group.application, []).append(header)
        work += [
            self._groups.abort(name, each, transitions.BY_DEADLINE) for name, each in groups.items()
        ]
        results = await asyncio.gather(
            *(self._background.apart(each) for each in work), return_exceptions=True
        )
        for result in results:
            # Every other error leaves the transaction in the list, and it is
            # tried again in a second.
            if isinstance(result, InvalidTxnStatus | TransactionNotFound):
                continue  # it was ended at another broker a moment ago
            if isinstance(result, MagnetarError):
                _LOG.warning("txn-timeout-late", error=str(result))
            elif isinstance(result, BaseException):
                raise result


def _owned(header: Header | None, txn: TxnId, owner: str | None) -> Header:
    """The header, if there is one and it is this owner's; None: every owner's."""
    # The answer does not tell a stranger whether the transaction exists. Without an identity (no
    # authentication) everybody may end it.
    if header is None or (owner is not None and header.owner and header.owner != owner):
        raise _missing(txn)
    return header


@lru_cache
def _begun_count(coordinator: int) -> Counter:
    return TXN_BEGUN.labels(str(coordinator))


def _missing(txn: TxnId) -> TransactionNotFound:
    return TransactionNotFound(f"there is no transaction {to_text(txn)}")
