"""The transactions of one segment: who may write, what consumers see, what becomes of decisions.

Owns: `MetadataTransactionBuffer`. "Segment" is any topic that keeps its messages in a log.

Invariants (DESIGN 6.1; the rules of `spec` in brackets):
1. Nothing is visible before recovery has read all pins, headers and aborted records, in this order
   and after former owners were fenced [fence_before_pins, pins_before_aborted]; then what stands
   below the lowest bound of any undecided transaction.
2. A transaction is tracked before its header is read [track_before_read]. Its pin is durable, and
   after that the store still calls it open, before its first entry is appended. So a pin whose
   header is gone has no entries that anything but an aborted record could tell of. Where pins and
   entries share a journal and this broker coordinates the transaction, the order in which they are
   submitted is enough: an entry is durable only if the pin before it is, and a decision that comes
   between the two is this broker's own and covers both.
3. Once the decision is known nothing more is appended. A commit shows at once, what is in flight
   included. An abort shows nothing: the aborted record, which covers every position that was handed
   to the log, is durable before the bound goes.
4. A pin is deleted only as this owner wrote or adopted it, and only after 3 is done.
5. Nothing of this fails silently: a transaction that cannot be admitted is refused; if an aborted
   record cannot be stored, `failed` advances, and its topic must be loaded anew.

Relies on: a managed ledger that was opened (which fences) before `recover`; `Outcomes`; a caller
that asks `is_admitted` right before each append, and calls `appending` and then `settled`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Final

from magnetar.errors import (
    BadVersion,
    MagnetarError,
    ManagedLedgerFenced,
    NotAllowed,
    ServiceNotReady,
    StoreClosed,
    Unavailable,
)
from magnetar.managed_ledger.managed_ledger import ManagedLedger
from magnetar.metadata.api import Stat
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.txn.buffer.pins import adopt_pin, check_epoch, place_pin, submit_pin
from magnetar.txn.buffer.segment_transactions import (
    BEGIN_ANEW,
    Answered,
    PinnedTransaction,
    SegmentTransactions,
    StoredEntries,
    TxnFastPath,
)
from magnetar.txn.buffer.txn_dedup import SequenceNews, TxnSequences
from magnetar.txn.ids import from_text, to_text
from magnetar.txn.outcomes import GATHER_MAX, GATHER_SECONDS, Outcomes
from magnetar.txn.records import State
from magnetar.txn.store import FoundPin, StoredOp, TxnStore
from magnetar.wire.messages import TxnId

# All later sends of that producer are held behind it: a store that does not
# answer has to end in a refusal.
ADMIT_SECONDS: Final = 30.0
"""For all that comes before a transaction's first message in a segment."""

MATERIALISE_SECONDS: Final = 60.0
"""For the records of a decision, however often they have to be tried."""

# Beyond it the oldest spans drop out: dispatch passes over those entries when it comes to them.
_NEWLY_ABORTED_MAX: Final = 10_000
# A segment may have thousands of pins: headers are read side by side, without flooding the store.
_READS_AT_ONCE: Final = 256
_ATTEMPTS: Final = 16
_PAUSE_SECONDS: Final = 0.2
_STOP_SECONDS: Final = 5.0
_LOG: Final = logger(__name__)


class MetadataTransactionBuffer(SegmentTransactions[PinnedTransaction]):
    """A `Participant`. Made, then recovered before anything is dispatched, at last closed."""

    def __init__(
        self,
        segment: str,
        ledger: ManagedLedger,
        store: TxnStore,
        outcomes: Outcomes,
        *,
        epoch: int,
        clock: Clock,
        news: SequenceNews,
        stored: StoredEntries,
        shares_journal: bool = False,
    ) -> None:
        super().__init__(segment, ledger, news=news, stored=stored, moved=Signal())
        self.failed = Signal()
        self.failure: MagnetarError | None = None
        """Why the topic must be loaded anew, if so."""
        self.aborted_last: Position | None = None
        """Behind it there is no aborted entry; None: there is none at all."""
        self.newly_aborted: deque[tuple[Position, Position]] = deque(maxlen=_NEWLY_ABORTED_MAX)
        """Between which positions the transactions stand that were aborted last, both included."""
        self._store = store
        self._outcomes = outcomes
        self._epoch = epoch
        self._clock = clock
        self._shares_journal = shares_journal
        # What former owners stored stands below it. Read once for all recovered transactions, when
        # the first of them wants to write; the task is None before that, and after a failure.
        self._recovered_end = ledger.next_append_floor()
        self._scan: asyncio.Task[None] | None = None
        self._unpinned: list[StoredOp] = []
        """Pins that hold nothing any more, to be deleted."""
        self._unpinning = False
        self._tasks = Service(f"transactions of {segment}", stop_seconds=_STOP_SECONDS)

    # --- what consumers may see

    def is_visible(self, txn: TxnId, position: Position) -> bool:
        """Whether an entry of a transaction, below the maxReadPosition, is for consumers."""
        return not self._visibility.is_aborted(txn, position)

    def state_of(self, txn: TxnId, position: Position) -> State:
        """What an entry of the log is: its transaction is undecided here, aborted or committed."""
        # Neither tracked nor aborted is committed: an end leaves a trace only if it hides
        # something ('aborted stays known').
        if txn in self._tracked:
            return "OPEN"
        return "ABORTED" if self._visibility.is_aborted(txn, position) else "COMMITTED"

    def undecided_ids(self) -> Iterator[TxnId]:
        """The ids of transactions here that have not ended; ask again after an await."""
        return (txn for txn, segment_txn in self._tracked.items() if segment_txn.decision is None)

    @property
    def hidden(self) -> int:
        """How many aborted transactions may have entries here."""
        return len(self._visibility.aborted)

    # --- recovery

    async def recover(self) -> None:
        """Find what former owners left, then open the gate."""
        await self._store.metadata.sync()
        # Pins before aborted records (invariant 1): a former owner may still be finishing an abort,
        # and it deletes the pin only behind the record.
        found = await self._store.pins(self._segment)
        for each in found:
            check_epoch(each, self._epoch)
            # Tracked before any header is read: a decision that comes in between finds it.
            segment_txn = self._track(from_text(each.pin.txn), each.pin.bound)
            segment_txn.is_recovered = True
            segment_txn.op = each.op
            segment_txn.has_entries = True  # perhaps
        late: list[StoredOp] = []
        for at in range(0, len(found), _READS_AT_ONCE):
            some = [self._judged(each) for each in found[at : at + _READS_AT_ONCE]]
            late += [each for each in await asyncio.gather(*some) if each is not None]
        gone = []
        first = self._ledger.first_position()
        for aborted in await self._store.aborted(self._segment):
            txn = from_text(aborted.txn)
            if aborted.last < first:
                gone.append(txn)
            elif txn in self._tracked:
                self._tracked[txn].decision = "ABORTED"  # its owner died before the pin went
            else:
                # Hidden anew: cursors may have lost, with the process, that they had passed it.
                begin = first if aborted.first is None else Position(*aborted.first)
                self.hide(txn, begin, aborted.last)
        # 'Gate': everything that may hide an entry is known now. Decisions that came meanwhile were
        # only noted, and are carried out behind it.
        self._visibility.open_gate()
        for segment_txn in list(self._tracked.values()):
            if segment_txn.decision is not None:
                self._materialise(segment_txn)
        if gone or late:
            self._tasks.spawn(self._sweep(gone, late), "sweep")
        self.moved.advance()

    async def _judged(self, found: FoundPin) -> StoredOp | None:
        """Adopt the pin of an open transaction, note a decision; the pin of none at all."""
        txn = from_text(found.pin.txn)
        segment_txn = self._tracked[txn]
        present: FoundPin | None = found
        for _ in range(_ATTEMPTS):
            state = await self._outcomes.read(txn)
            # Decided while its owner was gone: carried out once the gate is open.
            if segment_txn.decision is None and state in ("COMMITTED", "ABORTED"):
                segment_txn.decision = state
            if segment_txn.decision is not None and present is not None:
                return None
            # Still open. Adopted by compare-and-set, so that the former owner's late delete
            # misses the pin ('GC never forces').
            if state == "OPEN" and present is not None:
                segment_txn.op = await adopt_pin(
                    self._store, present, present.pin.bound, self._epoch
                )
                if segment_txn.op is not None:
                    return None
            # No header, or another wrote the pin meanwhile: the pin as it is now tells which.
            present = await self._store.pin(txn, self._segment)
            if present is not None:
                check_epoch(present, self._epoch)
                segment_txn.op = present.op
                if state is not None:
                    continue
            # Gone: its owner has finished with it, and the aborted record decides. There, without
            # a header: a late write, under which nothing was appended.
            self._forget(segment_txn)
            return None if present is None else present.op
        raise Unavailable(f"the pin of {to_text(txn)} on {self._segment} keeps changing")

    async def _sweep(self, aborted: list[TxnId], late: list[StoredOp]) -> None:
        async def swept() -> None:
            await self._store.forget_aborted(self._segment, aborted)
            await self._store.delete_ops(late)

        await self._tried("sweep", swept)

    # --- writing

    def refusal(self, txn: TxnId) -> NotAllowed | None:
        """Why a message is refused without asking anybody; None: `ask` tells."""
        segment_txn = self._tracked.get(txn)
        # First what this segment knows: while an aborted record is being written it may be the
        # only one here that remembers the decision ('fence'; `Outcomes` keeps so many at most).
        known = None if segment_txn is None else segment_txn.decision
        known = known or self._outcomes.known(txn)
        if known in ("COMMITTED", "ABORTED"):
            return NotAllowed(f"transaction {to_text(txn)} is {known}", hint=BEGIN_ANEW)
        return None

    def fast_path(self, txn: TxnId, name: str) -> TxnFastPath | None:
        """Where plain sends are noted; one that is new here is admitted, if nobody has to be asked.

        None: `ask`.
        """
        if txn not in self._tracked and self._shares_journal and self._outcomes.is_open_here(txn):
            if self._tasks.stopping or self.failure is not None:
                return None
            try:
                self._begin(txn)
            except NotAllowed:
                return None  # who asks is told why
        return super().fast_path(txn, name)

    def ask(self, txn: TxnId, then: Answered | None = None) -> bool:
        """Have a transaction admitted, as its first message needs; True: it is.

        Else an attempt is under way, which all who ask share, and which calls `then` at its end.
        NotAllowed: it may not write here, for a reason that is known without asking anybody.
        """
        refusal = self.refusal(txn)
        if refusal is not None:
            raise refusal
        if self._tasks.stopping or self.failure is not None:
            raise self._unloading()
        segment_txn = self._tracked.get(txn)
        # Its first message in this segment. Tracked in the same step, before anything is
        # read or written (invariant 2).
        if segment_txn is None:
            segment_txn = self._begin(txn)
        if segment_txn.is_admitted and segment_txn.decision is None:
            return True
        if then is not None:
            segment_txn.waiting.append(then)
        if not segment_txn.is_admitting:
            segment_txn.is_admitting = True
            self._tasks.spawn(self._admission(segment_txn), "admit")
        return False

    def _begin(self, txn: TxnId) -> PinnedTransaction:
        """Track a transaction that is new here, and admit it if that is certain now."""
        self._outcomes.check_room(txn, self)
        segment_txn = self._track(txn, self._ledger.next_append_floor())
        if self._shares_journal and self._outcomes.is_open_here(txn):
            self._pin_ahead(segment_txn)
        return segment_txn

    async def _admission(self, segment_txn: PinnedTransaction) -> None:
        # Stands if the task is cancelled: whoever waits is called in every case.
        refusal: str | None = f"{self._segment} was unloaded"
        try:
            async with asyncio.timeout(ADMIT_SECONDS):
                # A recovered one has its pin, but dedup must know what it stored.
                await (self._recall() if segment_txn.is_recovered else self._pin(segment_txn))
            refusal = None
        except TimeoutError:
            refusal = f"it could not be admitted within {ADMIT_SECONDS:g} s"
        # Met the pin of a later owner: the topic has to go.
        except ManagedLedgerFenced as error:
            refusal = str(error)
            self._fail(error)
        except MagnetarError as error:
            refusal = str(error)
        finally:
            segment_txn.is_admitting = False
            # Decided while the pin was being written ('fence').
            if segment_txn.decision is not None:
                refusal = f"it is {segment_txn.decision}"
            segment_txn.is_admitted = refusal is None
            # One that was never admitted has no entries, and its bound goes at once. A recovered
            # one may have some: its bound stays until its end.
            if refusal is not None and not segment_txn.is_recovered:
                self._forget(segment_txn)
                if not self._tasks.stopping:
                    self._tasks.spawn(self._remove_pin(segment_txn.txn), "remove a pin")
            waiting, segment_txn.waiting = segment_txn.waiting, []
            for then in waiting:
                then(
                    segment_txn.txn,
                    None if refusal is None else self._refused(segment_txn.txn, refusal),
                )

    async def _pin(self, segment_txn: PinnedTransaction) -> None:
        """The pin, and around it the certainty that the transaction is open."""
        txn = segment_txn.txn
        self._check_open(segment_txn, await self._outcomes.state(txn))
        segment_txn.op = await place_pin(
            self._store, txn, self._segment, segment_txn.bound, self._epoch
        )
        # From the store: a decision that memory has missed may be old, and its header about to go.
        self._check_open(segment_txn, await self._outcomes.read(txn))

    def _pin_ahead(self, segment_txn: PinnedTransaction) -> None:
        """Submit the pin, and admit at once: what is appended behind it is durable after it.

        For a transaction that is decided by nobody but this broker, which would know by now.
        """
        try:
            pinning = submit_pin(
                self._store, segment_txn.txn, self._segment, segment_txn.bound, self._epoch
            )
        except MagnetarError:
            return  # nothing was submitted: the attempt that follows tells why
        pinning.add_done_callback(partial(self._pinned, segment_txn))
        segment_txn.is_admitted = True

    def _pinned(self, segment_txn: PinnedTransaction, pinning: asyncio.Future[Stat]) -> None:
        error = None if pinning.cancelled() else pinning.exception()
        # Refused alone: what was appended behind it is durable, under the pin that is there.
        if isinstance(error, BadVersion):
            if not self._tasks.stopping:
                self._tasks.spawn(self._take_over_pin(segment_txn), "take a pin over")
        elif isinstance(error, MagnetarError):
            self._fail(error)  # nothing behind it in the journal is durable either
        elif not pinning.cancelled():
            stat = pinning.result()
            self._has_pin(segment_txn, StoredOp(stat.key, stat.version))

    async def _take_over_pin(self, segment_txn: PinnedTransaction) -> None:
        """A late write of a former owner was there: it stood for this transaction before."""
        try:
            op = await place_pin(
                self._store, segment_txn.txn, self._segment, segment_txn.bound, self._epoch
            )
        except MagnetarError as error:
            self._fail(error)
        else:
            self._has_pin(segment_txn, op)

    def _has_pin(self, segment_txn: PinnedTransaction, op: StoredOp) -> None:
        segment_txn.op = op
        if self._tracked.get(segment_txn.txn) is not segment_txn:
            self._unpin(segment_txn)  # it has ended meanwhile

    def _check_open(self, segment_txn: PinnedTransaction, state: State | None) -> None:
        if segment_txn.decision is not None or state != "OPEN":
            # Who is refused for it gets a hint with that.
            raise NotAllowed(f"it is {segment_txn.decision or state or 'not known'}", hint="")

    async def _recall(self) -> None:
        """Know what recovered transactions have stored before they store more."""
        if self._scan is None:
            self._scan = self._tasks.spawn(self._recall_all(), "recall")
        # Not awaited itself: a caller that runs out of time must not cancel what others wait for.
        await asyncio.wait({self._scan})
        if self._scan is None:
            raise ServiceNotReady(f"what is stored in {self._segment} could not be read")

    async def _recall_all(self) -> None:
        recovered = [
            segment_txn for segment_txn in self._tracked.values() if segment_txn.is_recovered
        ]
        first = min((segment_txn.bound for segment_txn in recovered), default=self._recovered_end)
        txns = {segment_txn.txn for segment_txn in recovered}
        try:
            await self._stored_entries.stored_in(txns, first, self._recovered_end)
        except MagnetarError as error:
            _LOG.warning("transactions-not-recalled", segment=self._segment, error=str(error))
            self._scan = None

    # --- decisions

    def decided(self, txn: TxnId, state: State) -> None:
        """COMMITTED or ABORTED: from now on it writes nothing more here."""
        segment_txn = self._tracked.get(txn)
        if segment_txn is None or segment_txn.decision is not None:
            return
        # 'Fence': from this line on `is_admitted` says no.
        segment_txn.decision = state
        # One that is being admitted has no entries: the attempt ends it.
        if self._visibility.is_open and (segment_txn.is_recovered or segment_txn.is_admitted):
            self._materialise(segment_txn)

    def _materialise(self, segment_txn: PinnedTransaction) -> None:
        # Nothing to hide: it shows in this very turn of the loop ('all or nothing'),
        # and the pin goes afterwards.
        if segment_txn.decision == "COMMITTED" or not segment_txn.has_entries:
            self._end(segment_txn)
            self._unpin(segment_txn)
        else:
            # Whatever it has in flight was handed to the log before this, and stands below.
            last = self._ledger.next_append_floor().previous
            self._tasks.spawn(self._abort(segment_txn, last), "abort")

    async def _abort(self, segment_txn: PinnedTransaction, last: Position) -> None:
        # 'Aborted stays known': the bound stays until the record is durable. If that fails the
        # topic is loaded anew, and the next owner finds the pin.
        txn, bound = segment_txn.txn, segment_txn.bound
        record = partial(self._store.write_aborted, txn, self._segment, last, first=bound)
        if not await self._tried("aborted", record):
            return
        self.hide(txn, bound, last)
        self._end(segment_txn)
        self._unpin(segment_txn)

    def hide(self, txn: TxnId, first: Position, last: Position) -> None:
        """Hide the entries of a transaction, from `first` up to `last`; the record is durable."""
        self._note_aborted(txn, last)
        self.newly_aborted.append((first, last))

    def _note_aborted(self, txn: TxnId, last: Position) -> None:
        self._visibility.abort(txn, last)
        known = self.aborted_last
        self.aborted_last = last if known is None else max(last, known)

    def _end(self, segment_txn: PinnedTransaction) -> None:
        """Let a transaction go: it holds nothing any more, and its sequences count or do not."""
        self._forget(segment_txn)
        if segment_txn.decision is not None:
            self._count_end(segment_txn, segment_txn.decision)

    def _forget(self, segment_txn: PinnedTransaction) -> None:
        if self._tracked.get(segment_txn.txn) is segment_txn:
            del self._tracked[segment_txn.txn]
            # The bound, if it is still there: of a commit, or of one that was never admitted.
            self._visibility.commit(segment_txn.txn)
            self._outcomes.leave(segment_txn.txn, self)
            self.moved.advance()

    def _unpin(self, segment_txn: PinnedTransaction) -> None:
        """Delete its pin, with those of others that end within `GATHER_SECONDS`."""
        if segment_txn.op is None:
            return
        self._unpinned.append(segment_txn.op)
        if not self._unpinning and not self._tasks.stopping:
            self._unpinning = True
            self._tasks.spawn(self._unpin_all(), "unpin")

    async def _unpin_all(self) -> None:
        try:
            while self._unpinned:
                if len(self._unpinned) < GATHER_MAX:
                    await self._clock.sleep(GATHER_SECONDS)
                gone = self._unpinned[:GATHER_MAX]
                del self._unpinned[:GATHER_MAX]
                deletion = partial(self._store.delete_ops, gone)
                await self._tried("unpin", deletion, is_vital=False)
        finally:
            self._unpinning = False

    async def _remove_pin(self, txn: TxnId) -> None:
        """Remove the pin of one that was not admitted; its write may have failed, and be there."""

        async def removed() -> None:
            found = await self._store.pin(txn, self._segment)
            # Tried again meanwhile: that attempt has taken the pin over, or will.
            if found is not None and found.pin.epoch == self._epoch and txn not in self._tracked:
                await self._store.delete_ops([found.op])

        await self._tried("remove-pin", removed, is_vital=False)

    async def rescan(self) -> None:
        """Remove pins of finished transactions that this owner knows nothing of: leftovers."""
        for found in await self._store.pins(self._segment):
            txn = from_text(found.pin.txn)
            if txn in self._tracked:
                continue
            if found.pin.epoch > self._epoch:
                self._fail(ManagedLedgerFenced(f"{self._segment} has a later owner"))
                return
            # Whatever has entries was found by `recover`, or is tracked.
            if await self._outcomes.read(txn) != "OPEN" and txn not in self._tracked:
                await self._store.delete_ops([found.op])

    # --- the end of data, and of it all

    async def trimmed(self, first_kept: Position) -> None:
        """Entries below this position are gone: so are the aborted records that spoke of them."""
        gone = self._visibility.forget_aborted(first_kept)
        if gone:
            self.aborted_last = max(self._visibility.aborted.values(), default=None)
            await self._store.forget_aborted(self._segment, gone)

    async def close(self) -> None:
        """Leave everything to the next owner."""
        for segment_txn in list(self._tracked.values()):
            self._outcomes.leave(segment_txn.txn, self)
        await self._tasks.stop()

    async def delete(self) -> None:
        """The segment is gone with its data: so are the records about it. Closed before."""
        await self._store.delete_ops([each.op for each in await self._store.pins(self._segment)])
        left = [from_text(each.txn) for each in await self._store.aborted(self._segment)]
        await self._store.forget_aborted(self._segment, left)

    # --- parts

    def _track(self, txn: TxnId, bound: Position) -> PinnedTransaction:
        segment_txn = self._tracked[txn] = PinnedTransaction(
            txn, bound, TxnSequences(self._sequence_news.began)
        )
        # In one step with the bound: no read passes the entry that is about to come ('gate').
        self._visibility.track(txn, bound)
        self._outcomes.join(txn, self)
        return segment_txn

    async def _tried(
        self, what: str, attempt: Callable[[], Awaitable[None]], *, is_vital: bool = True
    ) -> bool:
        """Try until the deadline; then the topic must be loaded anew, if it is vital."""
        deadline = self._clock.monotonic() + MATERIALISE_SECONDS
        while True:
            try:
                await attempt()
                return True
            except StoreClosed:
                return False  # nobody is served any more
            except MagnetarError as error:
                if self._clock.monotonic() < deadline:
                    await self._clock.sleep(_PAUSE_SECONDS)
                    continue
                _LOG.warning(f"transaction-{what}-failed", segment=self._segment, error=str(error))
                if is_vital:
                    self._fail(error)
                return False

    def _fail(self, error: MagnetarError) -> None:
        if self.failure is None:
            self.failure = error
            self.failed.advance()
