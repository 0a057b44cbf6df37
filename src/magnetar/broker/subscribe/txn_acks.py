"""Acknowledgements in transactions, for one subscription: from the command to the durable cursor.

Owns: `TransactionalAcks`, the participant of transactions that a subscription is.

Invariants:
1. Nothing is dispatched, and no transaction acknowledges anything, before `recover` has rebuilt
   what former owners' transactions hold (`ready`).
2. An acknowledgement is held from before the transaction's state is read, so a decision meets it.
   It is answered once its intent is durable and this was still the owner after that. If the intent
   could not be written it is held no more.
3. A decision is applied in memory before anything is judged, and at the latest in the turn of the
   loop after it was learnt; or, with commands of that transaction in flight, when the last of them
   is over: what was in flight is covered by the decision. Until then its messages stay held. A
   transaction that is decided acknowledges nothing more.
4. Commit: into the cursor in memory; ops are deleted after a durable cursor write. Abort, or no
   header any more: what was held is delivered again, ops are deleted.
5. What was acknowledged before a seek does not count after it: an incarnation of the cursor ends
   with everything that is held. Without a cursor there are no ops.
6. Commands run to their end whatever becomes of who sent them; each ends with its store's deadline.

Legacy transactions keep their intents in a log, and are told their ends: see `legacy_txn_acks`.

Relies on: `Outcomes` to tell how each transaction ended that was joined, or that it is gone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from magnetar.broker.dispatch.dispatcher import ReadableTopic, messages_in
from magnetar.broker.subscribe.ack import Ack
from magnetar.broker.subscribe.legacy_txn_acks import LegacyTxnAcks
from magnetar.broker.subscribe.pending_ack_messages import PendingAckMessages
from magnetar.broker.subscribe.txn_kind import TxnKind
from magnetar.errors import (
    MagnetarError,
    MetadataError,
    OutcomeUnknown,
    ServiceNotReady,
    StorageError,
    TooManyRequests,
    TransactionConflict,
)
from magnetar.managed_ledger.cursor import Cursor
from magnetar.metadata.api import Stat
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.runtime.slices import SLICE_ITEMS, SlicePace, slices
from magnetar.txn.acks.ack_store import MetadataPendingAckStore, Submitted
from magnetar.txn.acks.pending_acks import (
    AckConflict,
    Acked,
    AckedByEntry,
    AckVerdict,
    acked_of,
    combined,
)
from magnetar.txn.api import Transactions
from magnetar.txn.ids import METADATA_BIT, from_text, to_text
from magnetar.txn.legacy.pending_ack_log import PendingAckLogs
from magnetar.txn.outcomes import DecisionQueue
from magnetar.txn.records import AckOp, State
from magnetar.txn.store import FoundAck, StoredOp
from magnetar.wire.messages import TxnId

# About ten seconds. Then consumers are sent away, and the next one that connects begins anew.
RECOVERY_ATTEMPTS: Final = 10
RECOVERY_PAUSE_SECONDS: Final = 1.0
READY_SECONDS: Final = 30.0
"""How long a command waits for the recovery."""

_LOG: Final = logger(__name__)


class AckParts(NamedTuple):
    """The parts that the subscriptions of one topic share for transactions."""

    transactions: Transactions
    logs: PendingAckLogs | None
    """None: this topic has no markers, and so no logs."""
    kinds: TxnKind


class _Command(NamedTuple):
    """A command that holds messages while its intent is written."""

    txn: TxnId
    acks: list[Acked]
    cumulative: bool
    incarnation: int


def _plain(acks: Sequence[Ack]) -> list[Acked] | None:
    """What is acknowledged, if the size of no batch has to be read; else None."""
    if len(acks) == 1:
        position, unacked = acks[0]
        return None if unacked else [Acked(position)]
    if any(each.unacked for each in acks):
        return None
    return combined(acked_of(each.position, 0, 0) for each in acks)


class TransactionalAcks:
    """One subscription as a participant of transactions. End it with `close`."""

    def __init__(
        self,
        topic: ReadableTopic,
        cursor: Cursor,
        held: PendingAckMessages,
        parts: AckParts,
        *,
        tasks: Service,
        clock: Clock,
    ) -> None:
        self.ready = asyncio.Event()
        """Set once recovery is over."""
        self._topic = topic
        self._cursor = cursor
        self._held = held
        self._pending = held.pending
        transactions = parts.transactions
        self._outcomes = transactions.outcomes
        self._limits = transactions.limits
        self._store = transactions.store
        self._tasks = tasks
        self._clock = clock
        self._incarnation = cursor.incarnation
        """That of all that is held; the cursor's is another one while a seek is under way."""
        self._ops = MetadataPendingAckStore(
            str(topic.name),
            cursor,
            transactions.store,
            managed_ledger=topic.name.managed_ledger_name,
            epoch=topic.ledger.epoch,
            clock=clock,
        )
        self.ends: Counter[State] = Counter()
        """How many transactions that acknowledged something here ended, by how."""
        self._kinds = parts.kinds
        self._legacy: LegacyTxnAcks | None = None
        if parts.logs is not None:
            self._legacy = LegacyTxnAcks(
                cursor, held, parts.logs, self._outcomes, self.ends, tasks=tasks, clock=clock
            )
        # Commands that must read (sizes of batches, other transactions) take turns, in their order.
        self._turn = asyncio.Lock()
        self._queued = 0
        """Commands that have not come to their turn: later ones wait behind them."""
        # By transaction: ops that are durable, commands whose op is being written, and decisions
        # that wait for those commands (invariant 3).
        self._stored: dict[TxnId, set[StoredOp]] = {}
        self._in_flight: dict[TxnId, int] = {}
        self._decided: dict[TxnId, State] = {}
        """Learnt while commands of that transaction are in flight."""
        self._ending: dict[TxnId, State] = {}
        """Whose decision is being applied, in slices; until then the rest stays held."""
        self._ended = Signal()
        """Advances when one has been applied."""
        self._queue = DecisionQueue()
        """The participant: `_follow` and whatever judges take from it."""
        self._is_following = False
        self._is_sole_owner = transactions.shares_journal
        """Whether nobody but this broker can own the subscription, or decide what it decides."""
        self._commands: set[asyncio.Future[None]] = set()
        self._settling: set[asyncio.Task[StoredOp]] = set()
        self._recovering = False
        self._closed = False

    @property
    def held(self) -> int:
        """Entries that open transactions have acknowledged."""
        return len(self._pending)

    # --- recovery

    def begin(self) -> None:
        """Recover, unless that is done or under way."""
        if not self._recovering and not self.ready.is_set():
            self._recovering = True
            self._tasks.spawn(self._recover(), "transactional acks")

    async def _recover(self) -> None:
        try:
            if await self._recovered():
                self.ready.set()
        finally:
            self._recovering = False

    async def _recovered(self) -> bool:
        for attempt in range(RECOVERY_ATTEMPTS):
            try:
                await self.recover()
            except MagnetarError as error:
                _LOG.warning(
                    "acks-not-recovered",
                    topic=str(self._topic.name),
                    subscription=self._cursor.name,
                    attempt=attempt,
                    error=str(error),
                )
                await self._clock.sleep(RECOVERY_PAUSE_SECONDS)
            else:
                return True
        # Who comes again begins anew.
        unready = f"subscription {self._cursor.name} cannot read its transactions"
        self._held.membership.stop_all(ServiceNotReady(unready))
        return False

    async def recover(self) -> None:
        """Hold again what former owners' transactions held, and apply what was decided.

        The cursor was fenced and read before: what a former owner deleted is in it.
        """
        for found in await self._ops.found():
            txn = from_text(found.ack.txn)
            # A second attempt skips what the first one adopted.
            if found.op not in self._stored.get(txn, ()) and await self._adopt(txn, found):
                self._join(txn)
        # Asked after joining: a decision in between is told, so none is missed.
        for txn in list(self._stored):
            await self._ask(txn)
        if self._legacy is not None:
            await self._legacy.recover()

    async def _adopt(self, txn: TxnId, found: FoundAck) -> bool:
        """Hold what an op says; False: it is of another incarnation, and goes."""
        acks = await self._restored(found.ack)
        if found.ack.incarnation != self._cursor.incarnation:
            # Only once the cursor's present one is durable: it may be that of a seek under way.
            self._ops.merged([found.op])
            self._settle()
            return False
        self._pending.add(txn, acks, found.ack.cumulative)
        self._stored.setdefault(txn, set()).add(found.op)
        return True

    async def _ask(self, txn: TxnId) -> None:
        state = await self._outcomes.state(txn)
        self._catch_up()  # the question itself may have brought the decision
        # No header: aborted and collected, or never begun. A committed one keeps its header for its
        # ops.
        if state is None:
            self._gone(txn)
        elif txn in self._stored:
            self._decide(txn, state)

    async def rescan(self) -> None:
        """Deal with ops of decided transactions that were left behind, or came from elsewhere."""
        await self.until_ready()
        for found in await self._ops.found():
            txn = from_text(found.ack.txn)
            state = await self._outcomes.read(txn)
            if state == "OPEN" or txn in self._in_flight:
                continue  # the decision will be told; or the op is that command's own
            if found.op not in self._stored.get(txn, ()):
                await self._adopt(txn, found)
            self._decide(txn, state or "ABORTED")

    async def _restored(self, op: AckOp) -> list[Acked]:
        return await self._sized([Ack(each.position, each.unacked_bits) for each in op.entries])

    async def _sized(self, acks: Sequence[Ack]) -> list[Acked]:
        """Add the sizes of batches, which the entries know: clients need not say."""
        pace, found = SlicePace(), AckedByEntry()
        for position, unacked in acks:
            size = await self._size_of(position, unacked) if unacked else 0
            found.add(acked_of(position, unacked, size))
            await pace.after()
        return found.all()

    async def _size_of(self, position: Position, unacked: int) -> int:
        entries = await self._topic.ledger.read(position, 1)
        if entries and entries[0].position == position:
            return messages_in(entries[0].payload)
        return unacked.bit_length()  # trimmed: nobody will ask for it

    # --- commands

    def ack(
        self,
        txn: TxnId,
        acks: Sequence[Ack],
        *,
        cumulative: bool,
        consumer: int | None = None,
    ) -> asyncio.Future[None]:
        """Acknowledge in a transaction; with the outcome it is durable. TransactionConflict: no.

        It is not to be cancelled: whoever may be cancelled himself awaits a shield of it. If
        nothing has to be read first the messages are held when this returns: commands that come
        later find them so.
        """
        if not txn.least & METADATA_BIT:
            refusal = self._kinds.refusal(txn, TransactionConflict)
            if refusal is not None:
                raise refusal
        self._catch_up()
        command = None
        # The usual case: nothing to read and nobody before it. The hold is there before the next
        # command of this connection is looked at.
        is_short = len(acks) <= SLICE_ITEMS and not self._ending
        wanted = _plain(acks) if is_short and self._is_free else None
        if wanted is not None and (
            self._pending.judge(txn, wanted, cumulative, self._cursor) is AckVerdict.ACCEPTED
        ):
            command = self._begin(txn, wanted, cumulative, consumer)
        work: asyncio.Future[None]
        if command is None:
            self._queued += 1
            work = asyncio.create_task(self._ack_queued(txn, acks, cumulative))
        else:
            work = self._ack_at_once(command) or asyncio.create_task(self._ack_held(command))
        # The loop keeps only weak references to tasks.
        self._commands.add(work)
        work.add_done_callback(self._over)
        return work

    @property
    def _is_free(self) -> bool:
        """Whether a command need not wait for its turn."""
        return self.ready.is_set() and not self._queued

    def _ack_at_once(self, command: _Command) -> asyncio.Future[None] | None:
        """Do what `_ack_held` does, by callbacks; None: somebody has to be asked.

        What a task would ask about is known: the transaction is open, for this broker decides on
        it, and nobody else becomes the owner of the subscription between the write and the answer.
        """
        txn, acks, cumulative, _ = command
        if (
            not self._is_sole_owner
            or not self._outcomes.is_open_here(txn)
            or txn in self._decided
            or self._log_of(txn) is not None
        ):
            return None
        try:
            writing = self._ops.submit(txn, acks, cumulative)
        except MagnetarError:
            return None  # nothing was submitted: the attempt that follows tells why
        if writing is None:
            return None
        submitted, put = writing
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        put.add_done_callback(partial(self._intent_written, command, submitted, answer))
        return answer

    def _intent_written(
        self,
        command: _Command,
        submitted: Submitted,
        answer: asyncio.Future[None],
        put: asyncio.Future[Stat],
    ) -> None:
        error = put.exception()
        if error is None:
            self._answer_intent(command, answer, self._ops.written(put.result()), None)
        elif isinstance(error, OutcomeUnknown):
            # Only the store tells.
            settling = asyncio.create_task(self._ops.settled(submitted))
            self._settling.add(settling)
            settling.add_done_callback(self._settling.discard)
            settling.add_done_callback(partial(self._intent_settled, command, answer))
        else:
            self._answer_intent(command, answer, None, error)

    def _intent_settled(
        self, command: _Command, answer: asyncio.Future[None], settling: asyncio.Task[StoredOp]
    ) -> None:
        error = settling.exception()
        op = None if error is not None else settling.result()
        self._answer_intent(command, answer, op, error)

    def _answer_intent(
        self,
        command: _Command,
        answer: asyncio.Future[None],
        op: StoredOp | None,
        error: BaseException | None,
    ) -> None:
        txn, acks, cumulative, incarnation = command
        if incarnation == self._incarnation:
            if op is None:
                self._held.release(txn, acks, cumulative)
            else:
                self._stored.setdefault(txn, set()).add(op)
        # Before the answer is decided, as in `_ack_held`.
        self._finish(txn)
        if op is not None:
            try:
                self._check_serving(incarnation)
            except ServiceNotReady as refusal:
                error = refusal
                if not self._tasks.stopping:
                    gone = self._store.delete_ops([op])
                    self._tasks.spawn(gone, "an ack record that came too late")
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)

    def _over(self, work: asyncio.Future[None]) -> None:
        self._commands.discard(work)
        if not work.cancelled():
            work.exception()  # told to who asked, if anybody is left

    async def _ack_queued(self, txn: TxnId, acks: Sequence[Ack], cumulative: bool) -> None:
        try:
            command = await self._admitted(txn, acks, cumulative)
        finally:
            self._queued -= 1
        # A repeated command: its answer is that of the first, if the transaction is still open.
        if command is None:
            await self._check_undecided(txn)
        else:
            await self._ack_held(command)

    def _log_of(self, txn: TxnId) -> LegacyTxnAcks | None:
        """Where its intents are, if not in records."""
        legacy = self._legacy
        if legacy is None or txn.least & METADATA_BIT:  # `is_metadata`, on the way of every ack
            return None
        is_legacy = self._kinds.is_legacy(
            txn,
            is_in_records=txn in self._stored or txn in self._in_flight,
            is_in_log=legacy.knows(txn),
        )
        return legacy if is_legacy else None

    async def _ack_held(self, command: _Command) -> None:
        # A v4 client's transaction on a topic with markers: its intents go to the pending-ack log.
        if (log := self._log_of(command.txn)) is not None:
            await log.store(*command)
            return
        try:
            ops = await self._written(command)
        # Before the answer is decided: a decision that arrived meanwhile is applied with this ack
        # in it.
        finally:
            self._finish(command.txn)
        # Invariant 2: the ownership is confirmed after the write; a former owner must not answer.
        await self._ops.confirm()
        try:
            self._check_serving(command.incarnation)
        except ServiceNotReady:
            # A seek or the end came during the write: nothing of it counts, and the client tries
            # again.
            await self._store.delete_ops(ops)
            raise

    async def until_ready(self) -> None:
        """Wait until what former owners left is held again."""
        try:
            async with asyncio.timeout(READY_SECONDS):
                await self.ready.wait()
        except TimeoutError as error:
            text = f"subscription {self._cursor.name} still reads its transactions"
            raise ServiceNotReady(text) from error

    async def _admitted(self, txn: TxnId, acks: Sequence[Ack], cumulative: bool) -> _Command | None:
        """Held from now on; None: there is nothing new in it. One at a time, in order."""
        await self.until_ready()
        async with self._turn:
            wanted = await self._sized(acks)
            if len(wanted) > SLICE_ITEMS:
                return await self._begin_in_slices(txn, wanted)
            if not await self._judged(txn, wanted, cumulative):
                return None
            return self._begin(txn, wanted, cumulative)

    async def _judged(self, txn: TxnId, wanted: list[Acked], cumulative: bool) -> bool:
        """Whether it may be held from this moment on; False: there is nothing new in it."""
        await self._caught_up()
        verdict = self._pending.judge(txn, wanted, cumulative, self._cursor)
        # The other transaction may be over without our knowing: worth one read before a refusal.
        if isinstance(verdict, AckConflict) and verdict.holders:
            await self._ask_again(verdict.holders)
            await self._caught_up()
            verdict = self._pending.judge(txn, wanted, cumulative, self._cursor)
        if isinstance(verdict, AckConflict):
            raise TransactionConflict(f"subscription {self._cursor.name}: {verdict.reason}")
        return verdict is AckVerdict.ACCEPTED

    async def _begin_in_slices(self, txn: TxnId, wanted: list[Acked]) -> _Command:
        """Judge and hold many entries; all of them, or none."""
        first, *rest = [list(each) for each in slices(wanted)]
        self._check_room(txn, len(wanted))
        await self._judged(txn, first, False)
        # From here on a decision waits for this command, whatever comes between the slices.
        command = self._begin(txn, first, False)
        held = [*first]
        try:
            for part in rest:
                await asyncio.sleep(0)
                await self._judged(txn, part, False)
                self._check_serving(command.incarnation)
                self._check_exist(part)
                self._held.hold(txn, part, False)
                held += part
        except BaseException:
            await self._give_up(command._replace(acks=held))
            raise
        return command._replace(acks=wanted)

    async def _give_up(self, command: _Command) -> None:
        """End the hold of a command of which nothing was written."""
        for part in slices(command.acks):
            # A seek has cleared all holds.
            if command.incarnation == self._incarnation:
                self._held.release(command.txn, part, False)
            await asyncio.sleep(0)
        if (log := self._log_of(command.txn)) is not None:
            log.give_up(command.txn)
        else:
            self._finish(command.txn)

    def _begin(
        self, txn: TxnId, wanted: list[Acked], cumulative: bool, consumer: int | None = None
    ) -> _Command:
        """Hold what was judged, while its intent is written."""
        # All that can refuse stands before the hold: a refused command leaves nothing behind.
        self._check_serving(self._incarnation)
        if (log := self._log_of(txn)) is not None:
            log.check_open(txn)
        self._check_room(txn, 0 if cumulative else len(wanted))
        self._check_exist(wanted)
        self._held.hold(txn, wanted, cumulative, consumer)
        if log is not None:
            log.begin(txn)
        else:
            self._in_flight[txn] = self._in_flight.get(txn, 0) + 1
            self._join(txn)
        return _Command(txn, wanted, cumulative, self._incarnation)

    def _check_exist(self, wanted: Sequence[Acked]) -> None:
        for ack in wanted:
            # Trimmed, or never stored: a commit could not acknowledge it.
            if self._topic.ledger.next_valid(ack.position) != ack.position:
                raise TransactionConflict(f"there is no message at {ack.position}")

    def _check_room(self, txn: TxnId, entries: int) -> None:
        self._outcomes.check_room(txn, self._queue)
        # Two limits: memory of this subscription, and records that one transaction may leave in the
        # store.
        most = self._limits.txn_pending_acks_max
        if len(self._pending) + entries > most:
            raise TooManyRequests(
                f"open transactions have acknowledged {len(self._pending)} entries of subscription "
                f"{self._cursor.name}; the limit is {most}",
                hint="end transactions, or raise txn_pending_acks_max",
            )
        log = self._log_of(txn)
        if log is not None:
            records = log.records(txn)
        else:
            records = len(self._stored.get(txn, ())) + self._in_flight.get(txn, 0)
        most = self._limits.txn_ack_records_max
        if records >= most:
            raise TooManyRequests(
                f"transaction {to_text(txn)} has {records} acknowledgements on subscription "
                f"{self._cursor.name}, the limit",
                hint="acknowledge more messages at once, or raise txn_ack_records_max",
            )

    def _check_serving(self, incarnation: int) -> None:
        if self._closed or incarnation != self._cursor.incarnation:
            raise ServiceNotReady(f"subscription {self._cursor.name} was closed or reset")

    async def _ask_again(self, holders: Sequence[TxnId]) -> None:
        """Read the state of transactions in the way: the news of an end may be on its way."""
        for holder in holders:
            if self._log_of(holder) is None and await self._outcomes.read(holder) is None:
                self._gone(holder)

    async def _written(self, command: _Command) -> list[StoredOp]:
        txn, acks, cumulative, incarnation = command
        # The state is read after the hold, so a decision taken since then meets it (invariant 2).
        try:
            await self._check_undecided(txn)
            self._check_serving(incarnation)
            ops = await self._ops.write(txn, acks, cumulative)
        except BaseException:
            # A seek has cleared all holds already, and newer ones may stand there.
            if incarnation == self._incarnation:
                self._held.release(txn, acks, cumulative)
            raise
        if incarnation == self._incarnation:
            self._stored.setdefault(txn, set()).update(ops)
        return ops

    async def _check_undecided(self, txn: TxnId) -> None:
        if (log := self._log_of(txn)) is not None:
            log.check_open(txn)
            return
        state = await self._outcomes.state(txn)
        # `_decided` may know more than the state that was read: it was told while this waited.
        if state != "OPEN" or txn in self._decided:
            said = self._decided.get(txn, state) or "unknown"
            raise TransactionConflict(f"transaction {to_text(txn)} is {said}")

    def _finish(self, txn: TxnId) -> None:
        """A command of this transaction is over."""
        self._in_flight[txn] -= 1
        # Others of this transaction are still being written, and are covered by the same decision.
        if self._in_flight[txn]:
            return
        del self._in_flight[txn]
        decided = self._decided.pop(txn, None)
        if decided is not None:
            self._apply(txn, decided)
        if txn not in self._stored:
            self._outcomes.leave(txn, self._queue)

    # --- decisions

    def _join(self, txn: TxnId) -> None:
        """Be told how a transaction ends."""
        self._outcomes.join(txn, self._queue, self._queue.missing)
        if not self._is_following:
            self._is_following = True
            self._tasks.spawn(self._follow(), "decisions")

    async def _follow(self) -> None:
        seen = 0
        while True:
            seen = await self._queue.news.past(seen)
            self._catch_up()

    async def _caught_up(self) -> None:
        """Apply what was decided until now, to its end."""
        self._catch_up()
        while self._ending and not self._closed:
            await self._ended.past(self._ended.version)
            self._catch_up()

    def _catch_up(self) -> None:
        """Apply what was decided since the last call."""
        for txn, state in self._queue.take():
            if state is None:
                self._gone(txn)
            else:
                self._decide(txn, state)

    def _decide(self, txn: TxnId, state: State) -> None:
        """A transaction that was joined has come to its end."""
        if state == "OPEN" or self._closed:
            return
        # Invariant 3: applied by `_finish` of the last command in flight.
        if txn in self._in_flight:
            self._decided[txn] = state
        else:
            self._apply(txn, state)

    async def end_legacy(self, txn: TxnId, *, commit: bool, low_watermark: int) -> None:
        """Apply what its coordinator says of a legacy transaction; durable when this returns."""
        if self._legacy is not None:
            await self.until_ready()
            await self._legacy.end(txn, commit=commit, low_watermark=low_watermark)

    def _gone(self, txn: TxnId) -> None:
        """Abort a transaction without a header; a committed one keeps it while it has ops."""
        self._decide(txn, "ABORTED")
        if txn not in self._in_flight:
            self._outcomes.leave(txn, self._queue)

    def _apply(self, txn: TxnId, state: State) -> None:
        # Told twice, by a rescan for instance: the first one goes on.
        if txn in self._ending:
            return
        # Nearly all end here. Of what is longer a task of its own applies the rest.
        if not self._apply_slice(txn, state, is_first=True):
            self._ending[txn] = state
            self._tasks.spawn(self._apply_rest(txn, state), "end of a transaction")

    async def _apply_rest(self, txn: TxnId, state: State) -> None:
        try:
            is_over = False
            while not is_over:
                await asyncio.sleep(0)
                is_over = self._apply_slice(txn, state, is_first=False)
        finally:
            del self._ending[txn]
            self._ended.advance()

    def _apply_slice(self, txn: TxnId, state: State, *, is_first: bool) -> bool:
        """Apply a decision to some of what is held; True: nothing is left to do."""
        # Fenced: another broker owns the cursor, and finds the ops.
        if self._closed or self._cursor.failure is not None:
            return True  # whoever owns the subscription next does it
        ended = self._pending.end(txn, SLICE_ITEMS)
        if is_first and ended is not None:
            self.ends[state] += 1
        is_current = self._incarnation == self._cursor.incarnation
        if ended is not None and is_current:
            if state == "COMMITTED":
                self._held.commit(ended)
            else:
                self._held.abort(ended)
            if not ended.is_all:
                return False
        ops = self._stored.pop(txn, set())
        # Deleted only after a durable cursor write: until then the op is all that says so
        # (invariant 4); or once the seek is durable.
        if state == "COMMITTED" or ended is None or not is_current:
            self._ops.merged(ops)
        else:
            # Nothing of it is in the cursor, so its ops may go at once.
            self._ops.dropped(ops)
        self._settle()
        return True

    def _settle(self) -> None:
        """Have ops deleted that are done with."""
        if not self._closed:
            self._ops.settle_soon(self._tasks)

    # --- the end

    def reset(self) -> None:
        """If the cursor has begun a new incarnation nothing is held any more."""
        # The seek failed before it changed anything.
        if self._incarnation == self._cursor.incarnation:
            return
        self._incarnation = self._cursor.incarnation
        for txn in self._held.clear():
            self._outcomes.leave(txn, self._queue)
        # Not at once: if the cursor's new incarnation is not durable, a restart needs them.
        for ops in self._stored.values():
            self._ops.merged(ops)
        self._stored.clear()
        self._settle()
        if self._legacy is not None:
            self._legacy.reset()

    def close(self) -> None:
        """Take part in nothing any more; what is held stays so for the next owner."""
        self._closed = True
        for txn in {*self._stored, *self._in_flight}:
            self._outcomes.leave(txn, self._queue)
        if self._legacy is not None:
            self._legacy.stop()

    async def closed(self) -> None:
        """Closed, and nothing of it runs any more: let go of what it has open."""
        if self._legacy is not None:
            await self._legacy.close()

    async def forget(self) -> None:
        """The cursor is gone, and with it all ops."""
        try:
            await self._ops.delete_all()
            if self._legacy is not None:
                await self._legacy.forget()
        except (MetadataError, StorageError) as error:
            # Whoever looks for the ops of a transaction that is over comes across them.
            _LOG.warning("acks-left-behind", subscription=self._cursor.name, error=str(error))
