"""The inside of a transaction: what takes part in it, its time, its end.

Owns: `TransactionCore`. `Transaction`, which applications have, stands on it; producers and
consumers that get one talk to this (`SendTransaction` and `AckTransaction` are their parts of it).

Invariants:
1. A commit is asked for only when every send and acknowledgement of the transaction is durable. If
   one of them failed for good, the transaction is aborted and the commit raises why. A send that a
   split moved to another segment has not failed.
2. An abort drops what was not sent yet, and waits for what is under way.
3. A segment, or a subscription of one, is made known to the coordinator once, before the first
   message or acknowledgement goes there.
4. `on_end` of every acknowledgement is called once: when the outcome is known, or, if it never is,
   once the time of the transaction is over.
5. Cancelling the wait for a commit or an abort takes nothing back: it goes on.
6. The client's clock for the timeout starts before the broker's: here the time is over first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from magnetar.client.connection.server_errors import is_passing
from magnetar.client.message.message import AnyMessageId
from magnetar.client.transaction.coordinators import CoordinatorClients
from magnetar.client.transaction.participants import Sender
from magnetar.client.transaction.state import TransactionState, TxnEvent, after
from magnetar.errors import (
    InvalidTxnStatus,
    MagnetarError,
    NotAllowed,
    TransactionAborted,
    TransactionConflict,
    TransactionEnded,
    TransactionNotFound,
)
from magnetar.runtime.logs import logger
from magnetar.runtime.signal import Signal
from magnetar.wire.messages import TxnId
from magnetar.wire.pb import pulsar_pb2 as pb

_LOG: Final = logger(__name__)


class TransactionCore:
    """One transaction, from its beginning until its outcome is known."""

    def __init__(
        self,
        coordinators: CoordinatorClients,
        txn_id: TxnId,
        *,
        deadline: float,
        on_close: Callable[[TransactionCore], None],
        is_member: bool = False,
    ) -> None:
        self._coordinators = coordinators
        self._txn_id = txn_id
        self._deadline = deadline
        self._on_close = on_close
        self._is_member = is_member
        self._is_prepared = False
        self._loop = asyncio.get_running_loop()
        self._state = TransactionState.OPEN
        # What takes part: who sends (in the order of coming), what the coordinator knows of, what
        # is on its way, and why it cannot be committed any more.
        self._senders: dict[Sender, None] = {}
        self._enlisted: dict[tuple[str, ...], asyncio.Task[Any]] = {}
        self._pending: set[asyncio.Future[Any]] = set()
        self._quiet = Signal()
        """Advances when nothing is pending."""
        self._failure: MagnetarError | None = None
        # Its end: whom to tell, whether a commit may have reached the coordinator, and the one task
        # that is ending it.
        self._on_end: list[Callable[[bool], None]] = []
        self._was_commit_asked = False
        self._ending: asyncio.Task[None] | None = None
        self._timer = self._loop.call_at(deadline, self._expire)

    # --- what it is

    @property
    def txn_id(self) -> TxnId:
        """The id that the coordinator gave it."""
        return self._txn_id

    @property
    def state(self) -> TransactionState:
        """How far it is, as this client knows."""
        return self._state

    def __repr__(self) -> str:
        return f"<Transaction ({self._txn_id.most},{self._txn_id.least}) {self._state.value}>"

    # --- its end

    async def commit(self) -> None:
        """Commit; raises why it was aborted instead, or why nobody knows."""
        if self._is_member:
            hint = "commit its group with it, or commit it where it was begun"
            raise NotAllowed(f"{self!r} is decided elsewhere", hint=hint)
        # Somebody commits it already: this call waits for the same end.
        if self._state is not TransactionState.COMMITTING:
            self._check_not_over()
            # Nobody knew the outcome of an earlier end. A commit may be repeated; an abort that is
            # under way cannot be turned into a commit.
            was_tried = self._state is TransactionState.ERROR
            if was_tried and not self._was_commit_asked:
                raise TransactionAborted("an abort of the transaction is under way")
            self._move(TxnEvent.COMMIT)
            if self._state is TransactionState.COMMITTED:
                return
            self._run(self._end(commit=True) if was_tried else self._flush_and_commit())
        await self._ended()

    async def abort(self) -> None:
        """Abort; does nothing if it is aborted."""
        # A prepared one is given up from COMMITTING; all others are aborted from where they are.
        if self._state is not TransactionState.ABORTING and not self._state.is_aborted:
            self._move(TxnEvent.GIVE_UP if self._is_prepared else TxnEvent.ABORT)
            self._is_prepared = False
            self._run(self._drop_and_abort(TransactionAborted("the application aborted it")))
        try:
            await self._ended()
        except MagnetarError:
            # Why a commit was given up is for who asked for that.
            if not self._state.is_aborted:
                raise

    async def prepare(self) -> None:
        """Wait until everything of a member is durable; it then takes no more."""
        if not self._is_member:
            raise NotAllowed(f"{self!r} is decided here", hint="commit it")
        if self._state is TransactionState.OPEN:
            self._move(TxnEvent.COMMIT)
            self._run(self._flush())
        # Looked at on both sides of the wait: its time may be over meanwhile.
        self._check_not_over()
        await self._ended()
        self._check_not_over()
        self._is_prepared = True

    async def close(self) -> None:
        """Abort it, unless it is ending, ended, or prepared."""
        # Open: the application left it. Unknown or prepared: others decide, and it is only
        # forgotten. Ending: that is waited for.
        if self._state is TransactionState.OPEN:
            await self.abort()
        elif self._state is TransactionState.ERROR or self._is_prepared:
            self._forget()
        elif self._ending is not None:
            await self._ended()

    def decided(self, *, committed: bool) -> None:
        """Note that its group was committed, with or without it."""
        if not self._state.is_final:
            self._over(TxnEvent.COMMITTED if committed else TxnEvent.ABORTED)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._ending = self._loop.create_task(work, name=f"end of {self!r}")

    async def _ended(self) -> None:
        if self._ending is not None:
            await asyncio.shield(self._ending)

    async def _flush_and_commit(self) -> None:
        await self._flush()
        await self._end(commit=True)

    async def _flush(self) -> None:
        """Wait until everything is durable; abort and raise if something is not."""
        # Batches that are being filled would wait for their timers, and the commit for them.
        for sender in self._senders:
            sender.hurry()
        if not await self._until_quiet(self._deadline) and self._failure is None:
            self._failure = TransactionAborted("its time was over before everything was stored")
        failure = self._failure
        if failure is None:
            return
        # Invariant 1: aborted first, so that the error that is raised is true.
        self._move(TxnEvent.GIVE_UP)
        await self._drop_and_abort(failure)
        if isinstance(failure, TransactionConflict | TransactionAborted):
            raise failure
        raise TransactionAborted(f"a part of the transaction failed: {failure}") from failure

    async def _drop_and_abort(self, reason: MagnetarError) -> None:
        # Invariant 2: what nobody has written yet is never written; then what is under way is
        # waited for, so that no late message arrives at a transaction that is gone.
        for sender in self._senders:
            sender.drop(self._txn_id, reason)
        timeout_s = self._coordinators.connections.settings.operation_timeout
        await self._until_quiet(self._loop.time() + timeout_s)
        await self._end(commit=False)

    async def _until_quiet(self, deadline: float) -> bool:
        try:
            async with asyncio.timeout_at(deadline):
                while self._pending:
                    await self._quiet.past(self._quiet.version)
        except TimeoutError:
            return False
        return True

    async def _end(self, *, commit: bool) -> None:
        self._was_commit_asked |= commit
        action = pb.COMMIT if commit else pb.ABORT
        try:
            await self._coordinators.ask(self._txn_id, "END_TXN", txn_action=action)
        except InvalidTxnStatus as error:
            # It has come to its other end. Nobody but this client can have committed it.
            # It was asked to commit, or has never been: the other end is an abort, by a timeout
            # mostly.
            if commit or not self._was_commit_asked:
                self._over(TxnEvent.ABORTED)
            else:
                self._over(TxnEvent.COMMITTED)
                raise
            if commit:
                raise TransactionAborted(f"the coordinator had aborted it: {error}") from error
        # The coordinator has forgotten it. After a commit that may have come through nobody knows;
        # an abort of what was never committed has what it wanted.
        except TransactionNotFound:
            if commit or self._was_commit_asked:
                self._over(TxnEvent.LOST)
                raise
            self._over(TxnEvent.ABORTED)
        # Not reached in time: the end may have been carried out all the same.
        except MagnetarError as error:
            _LOG.warning("transaction-end-unknown", transaction=repr(self), reason=str(error))
            self._over(TxnEvent.LOST)
            raise
        else:
            self._over(TxnEvent.COMMITTED if commit else TxnEvent.ABORTED)

    def _move(self, event: TxnEvent) -> None:
        self._state = after(self._state, event)

    def _check_not_over(self) -> None:
        """Raise if it cannot be committed any more."""
        if self._state.is_aborted:
            raise TransactionAborted(f"the transaction is {self._state.value}")

    def _over(self, event: TxnEvent) -> None:
        self._move(event)
        if self._state is TransactionState.ERROR and self._loop.time() < self._deadline:
            return  # until then the broker has it: what it acknowledged must wait
        self._tell(committed=self._state is TransactionState.COMMITTED)
        self._forget()

    def _tell(self, *, committed: bool) -> None:
        # Invariant 4: taken away before anybody is called, so that nobody is called twice.
        on_end, self._on_end = self._on_end, []
        for each in on_end:
            each(committed)

    def _forget(self) -> None:
        self._timer.cancel()
        self._senders.clear()
        # What is still being told to the coordinator concerns nobody any more.
        for enlisting in self._enlisted.values():
            enlisting.cancel()
        self._on_close(self)

    def _expire(self) -> None:
        """End it when its time is over: the broker has the same timeout, but is told as well."""
        # Three that may meet their deadline: one that nobody ended, a member whose group did not
        # decide, and one whose outcome is unknown, which the broker has now aborted or not.
        if self._state is TransactionState.OPEN:
            self._move(TxnEvent.EXPIRE)
            _LOG.warning("transaction-timed-out", transaction=repr(self))
            self._run(self._abort_expired())
        elif self._is_prepared and self._state is TransactionState.COMMITTING:
            self._over(TxnEvent.LOST)  # its group was committed elsewhere, or never will be
        elif self._state is TransactionState.ERROR:
            self._tell(committed=False)
            self._forget()

    async def _abort_expired(self) -> None:
        try:
            await self._drop_and_abort(TransactionAborted("the transaction timed out"))
        except MagnetarError as error:
            # The broker has the same timeout.
            _LOG.info("timed-out-not-told", transaction=repr(self), reason=str(error))

    # --- what takes part

    async def enlist(self, topic: str) -> None:
        """Tell the coordinator, once, that a topic or segment gets messages."""
        self._check_takes()
        await self._enlist((topic,), "ADD_PARTITION_TO_TXN", partitions=[topic])

    def sending(self, receipt: asyncio.Future[AnyMessageId], sender: Sender) -> None:
        """Make a message a part of it; raises if it takes no more."""
        self._check_takes()
        self._senders[sender] = None
        self._watch(receipt)

    async def enlist_subscription(self, topic: str, subscription: str) -> None:
        """Tell the coordinator, once, that something is acknowledged on a subscription."""
        # While it is committed its last acknowledgements are still sent: the commit waits for them.
        if self._state not in (TransactionState.OPEN, TransactionState.COMMITTING):
            raise self._takes_no_more()
        added = [{"topic": topic, "subscription": subscription}]
        await self._enlist((topic, subscription), "ADD_SUBSCRIPTION_TO_TXN", subscription=added)

    def acking(self, done: asyncio.Future[None], on_end: Callable[[bool], None]) -> None:
        """Make acknowledgements a part of it; raises if it takes no more."""
        self._check_takes()
        self._on_end.append(on_end)
        self._watch(done)

    async def _enlist(self, part: tuple[str, ...], what: str, /, **fields: Any) -> None:
        # Invariant 3: whoever comes second waits for the first one's request; whoever comes after
        # its answer does not wait at all.
        asking = self._enlisted.get(part)
        if asking is None:
            work = self._coordinators.ask(self._txn_id, what, **fields)
            asking = self._enlisted[part] = self._loop.create_task(work, name=f"{what} {part}")
        elif asking.done() and not asking.cancelled() and asking.exception() is None:
            return
        try:
            await asyncio.shield(asking)
        except MagnetarError as error:
            # It cannot be committed without this part. To the sender a passing error would look as
            # if it could be tried again.
            self._failed(error)
            if is_passing(error):
                raise TransactionAborted(
                    f"the coordinator was not told of a part: {error}"
                ) from error
            raise
        except asyncio.CancelledError:
            if not asking.cancelled():
                raise
            raise self._takes_no_more() from None

    def _check_takes(self) -> None:
        if self._state is not TransactionState.OPEN:
            raise self._takes_no_more()
        if self._failure is not None:
            raise TransactionAborted(f"a part of the transaction failed: {self._failure}")

    def _takes_no_more(self) -> MagnetarError:
        """Why nothing can be added: one whose work is to be done again, and one whose is not."""
        state = self._state
        text = f"the transaction is {state.value} and takes no more"
        if state.is_aborted or state is TransactionState.ABORTING:
            return TransactionAborted(text)
        if state is TransactionState.ERROR:
            hint = "end it again to learn its outcome before anything of it is done again"
            return TransactionEnded(f"nobody knows whether {self!r} was committed", hint=hint)
        return TransactionEnded(text)

    def _watch(self, part: asyncio.Future[Any]) -> None:
        self._pending.add(part)
        part.add_done_callback(self._part_done)

    def _part_done(self, part: asyncio.Future[Any]) -> None:
        self._pending.discard(part)
        # Cancelled, a receipt says nothing any more: whether it is stored is not known.
        if part.cancelled():
            self._failed(TransactionAborted("the application cancelled a receipt of it"))
        elif (error := part.exception()) is not None:
            assert isinstance(error, MagnetarError), (
                "producers and consumers fail with nothing else"
            )
            self._failed(error)
        if not self._pending:
            self._quiet.advance()

    def _failed(self, error: MagnetarError) -> None:
        if self._failure is None:
            self._failure = error

    # --- as a block

    async def leave(self, error: BaseException | None) -> None:
        """End an `async with` block: commit or prepare, or abort if there was an error in it."""
        if error is None:
            if self._state is TransactionState.OPEN:
                await (self.prepare() if self._is_member else self.commit())
            elif self._state is TransactionState.TIMED_OUT:
                self._check_not_over()
        elif self._state is TransactionState.OPEN:
            try:
                await self.abort()
            except MagnetarError as failure:
                # The error of the block matters more; the broker aborts it in time.
                _LOG.warning("abort-failed", transaction=repr(self), reason=str(failure))
