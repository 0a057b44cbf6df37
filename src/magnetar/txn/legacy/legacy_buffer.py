"""The legacy transactions of one topic: messages and markers in one stream.

Owns: `LegacyTransactionBuffer`, the sibling of `MetadataTransactionBuffer` for transactions whose
decision their coordinator's log holds, and whose end it tells each topic (`end`);
`MarkedTransaction`, one of them until its end is durable.

Invariants:
1. A stream record (`stream_state`) is durable before the first message of any legacy transaction:
   a topic without one has none, and nothing is scanned. Nothing is visible before `recover` has
   read the record and the stream behind it.
2. A transaction is tracked from before its first message is appended until its end is durable here.
   What stands at or above the first message of any that is tracked is not for consumers.
3. Once the end is told nothing more is appended. Commit: the marker is durable, then all shows.
   Abort: the aborted record, which covers every position that was handed to the log, is durable,
   then the marker, then the maxReadPosition passes. On a stream that takes no entries any more the
   stream record says what the marker would.
4. `end` returns once that is durable; again, or of a transaction that has nothing here: at once. It
   raises what may pass, and is then to be asked again.
5. What a coordinator's low watermark has passed writes no more; what it left open here is aborted.
6. None is tracked that its coordinator has not confirmed: it is open, and will be ended here.
7. An owner that finds another's record, or cannot end what it must, says so: `failed` advances, and
   its topic must be loaded anew. It shares the signals `moved` and `failed` of its sibling, which
   then say the same of either.

Relies on: a managed ledger that was opened (which fences) before `recover`; `AbortedEntries` that
has read the aborted records of the topic; callers as `MetadataTransactionBuffer` has them.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from magnetar.errors import (
    InvalidTxnStatus,
    MagnetarError,
    ManagedLedgerFenced,
    ManagedLedgerSealed,
    NotAllowed,
    OutcomeUnknown,
    ServiceNotReady,
    StoreClosed,
)
from magnetar.managed_ledger.managed_ledger import ManagedLedger
from magnetar.managed_ledger.reading import SCAN_BYTES, SCAN_ENTRIES
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.runtime.slices import SlicePace
from magnetar.txn.buffer.segment_transactions import (
    BEGIN_ANEW,
    Answered,
    SegmentTransaction,
    SegmentTransactions,
    StoredEntries,
)
from magnetar.txn.buffer.transaction_buffer import ADMIT_SECONDS, MATERIALISE_SECONDS
from magnetar.txn.buffer.txn_dedup import SequenceNews, TxnSequences
from magnetar.txn.ids import to_text
from magnetar.txn.legacy.markers import marker, trace_of
from magnetar.txn.legacy.stream_state import OPEN_MAX, StreamRecord, StreamState
from magnetar.txn.legacy.stream_store import StreamStore
from magnetar.txn.outcomes import Outcomes
from magnetar.txn.records import State
from magnetar.txn.store import TxnStore
from magnetar.wire.messages import TxnId


class MarkedTransaction(SegmentTransaction):
    """A legacy transaction in its topic, until its end is durable there."""

    __slots__ = ("ending", "trouble")

    def __init__(self, txn: TxnId, bound: Position, sequences: TxnSequences) -> None:
        super().__init__(txn, bound, sequences)
        self.ending: asyncio.Task[None] | None = None
        """The attempt to end it that is under way."""
        self.trouble: MagnetarError | None = None
        """Why the last attempt failed."""


# Bounds what a recovery must scan; small enough for a start, large enough that the record is no
# cost beside the entries.
RECORD_ENDS: Final = 1000
"""After so many ends, or entries of any kind, the stream record is written again."""

RECORD_SECONDS: Final = 5.0
"""Or so long after the first of them."""

_PAUSE_SECONDS: Final = 1.0
_STOP_SECONDS: Final = 5.0
_LOG: Final = logger(__name__)


class AbortedEntries(Protocol):
    """The aborted entries of the topic, of transactions of either kind."""

    def hide(self, txn: TxnId, first: Position, last: Position) -> None:
        """Hide the entries of a transaction, from `first` up to `last`; the record is durable."""
        ...

    def is_visible(self, txn: TxnId, position: Position) -> bool: ...


class LegacyTransactionBuffer(SegmentTransactions[MarkedTransaction]):
    """Made, then recovered before anything is dispatched, at last closed."""

    def __init__(
        self,
        segment: str,
        ledger: ManagedLedger,
        store: TxnStore,
        aborted: AbortedEntries,
        *,
        epoch: int,
        clock: Clock,
        news: SequenceNews,
        stored: StoredEntries,
        moved: Signal,
        failed: Signal,
        outcomes: Outcomes,
    ) -> None:
        # The signals of the topic's other buffer: dispatch waits for one, whichever kind moved.
        super().__init__(segment, ledger, news=news, stored=stored, moved=moved)
        self._failed = failed
        self.failure: MagnetarError | None = None
        """Why the topic must be loaded anew, if so."""
        self._outcomes = outcomes
        self._store = store
        self._aborted = aborted
        self._epoch = epoch
        self._clock = clock
        # The stream record and what it does not say yet: `_news` and
        # `_recorded` tell when it is due.
        self._record = StreamStore(segment, store.metadata, epoch, clock=clock)
        self._stream = StreamState()
        self._passed: list[Position] = []
        self._recovered_end = ledger.next_append_floor()
        self._recorded = self._recovered_end
        """Up to where the record says it all."""
        self._news = 0
        """Ends that it does not have."""
        self._crowded = Signal()
        self._is_keeping = False
        self._waiting: list[tuple[TxnId, Answered | None]] = []
        """Called when the attempt to admit transactions is over."""
        self._is_admitting = False
        self._tasks = Service(f"legacy transactions of {segment}", stop_seconds=_STOP_SECONDS)

    # --- what consumers may see

    @property
    def segment(self) -> str:
        """The name of the topic."""
        return self._segment

    @property
    def holds(self) -> bool:
        """Whether the maxReadPosition may be below the end of the log."""
        return bool(self._tracked) or not self._visibility.is_open

    @property
    def last_marker(self) -> Position | None:
        """Behind it there is no marker; None: there is none at all."""
        return self._stream.last_marker

    def state_of(self, txn: TxnId, position: Position) -> State:
        """What an entry of the log is: its transaction is undecided here, aborted or committed."""
        if txn in self._tracked:
            return "OPEN"
        return "COMMITTED" if self._aborted.is_visible(txn, position) else "ABORTED"

    def first_of(self, txn: TxnId) -> Position | None:
        """None of its messages stands before this; None: it is not undecided here."""
        segment_txn = self._tracked.get(txn)
        return None if segment_txn is None else segment_txn.bound

    def take_passed(self) -> list[Position]:
        """Markers, which are for nobody. Each is told once."""
        passed, self._passed = self._passed, []
        return passed

    # --- recovery

    async def recover(self) -> None:
        """Find what former owners left, then open the gate. Aborted records were read before."""
        # Adopting fences a former owner's late writes of the record, before anything is read of it.
        record = await self._record.adopt()
        if record is not None:
            self._stream = StreamState.of(record)
            # The record may be older than the last trim: what that took away is none of this state.
            self._stream.trimmed(self._ledger.first_position())
            if self._ledger.trimmed_through is not None:
                self._stream.ended_before(self._ledger.trimmed_through)
            await self._scan(Position(*record.scanned_to))
            # Undecided here until its coordinator asks for the end again: the maxReadPosition stays
            # below it ('gate'). Whether it has entries is not known any more: assume so.
            for txn, first in self._stream.open.items():
                segment_txn = self._track(txn, first)
                segment_txn.has_entries = True
                if not self._aborted.is_visible(txn, first):
                    segment_txn.decision = "ABORTED"  # its owner died before the marker
            self._begin_keeping()
        # Only now ('gate'): every transaction that may have entries is tracked.
        self._visibility.open_gate()
        # Their aborted records are durable, the markers are missing: no coordinator need ask again.
        for segment_txn in list(self._tracked.values()):
            if segment_txn.decision is not None:
                self._tasks.spawn(self._persist(segment_txn), f"abort {to_text(segment_txn.txn)}")
        self._abort_leftovers()
        self.moved.advance()

    async def _scan(self, position: Position) -> None:
        """The stream from here on; what it has of markers is to be passed."""
        pace = SlicePace()
        while entries := await self._ledger.read(position, SCAN_ENTRIES, SCAN_BYTES):
            for entry in entries:
                # Messages open their transaction, markers end it; markers are also
                # to be passed by cursors.
                trace = trace_of(entry.payload)
                if trace is not None:
                    self._stream.scan(entry.position, trace)
                    if trace.end is not None:
                        self._passed.append(entry.position)
            position = entries[-1].position.next
            await pace.after(len(entries))  # topics that are served already go on

    # --- writing

    def is_admitted(self, txn: TxnId) -> bool:
        """Whether its next message may be appended at once."""
        segment_txn = self._tracked.get(txn)
        # Tracked: one that a former owner left must first recall what it has stored, for dedup.
        if segment_txn is not None:
            return segment_txn.is_admitted and segment_txn.decision is None
        # New here: with the record in place (invariant 1), and noted by its coordinator
        # (invariant 6), there is nothing to wait for.
        return (
            self._record.exists
            and self.refusal(txn) is None
            and self._outcomes.legacy.takes_part(txn, self._segment) is True
        )

    def refusal(self, txn: TxnId) -> NotAllowed | None:
        """Why a message is refused without waiting; None: `ask` tells."""
        segment_txn = self._tracked.get(txn)
        # Three ways not to be let in: ended here ('fence'), not open by the word of its
        # coordinator, or the record has no room for one more.
        if self._stream.is_over(txn) or (
            segment_txn is not None and segment_txn.decision is not None
        ):
            text = f"transaction {to_text(txn)} has ended on {self._segment}"
            return NotAllowed(text, hint=BEGIN_ANEW)
        if segment_txn is None and self._outcomes.legacy.takes_part(txn, self._segment) is False:
            return NotAllowed(f"transaction {to_text(txn)} is not open", hint=BEGIN_ANEW)
        if segment_txn is None and len(self._tracked) >= OPEN_MAX:
            text = f"{self._segment} has {OPEN_MAX} open transactions, its limit"
            return NotAllowed(text, hint="commit or abort some of them first")
        return None

    def ask(self, txn: TxnId, then: Answered | None = None) -> bool:
        """Have a transaction admitted, as its first message may need; True: it is.

        Else an attempt is under way, which all who ask share, and which calls `then` at its end.
        NotAllowed: it may not write here, for a reason that is known without waiting.
        """
        refusal = self.refusal(txn)
        if refusal is not None:
            raise refusal
        if self._tasks.stopping or self.failure is not None:
            raise self._unloading()
        if self.is_admitted(txn):
            return True
        self._waiting.append((txn, then))
        if not self._is_admitting:
            self._is_admitting = True
            self._tasks.spawn(self._admission(), "admit")
        return False

    async def _admission(self) -> None:
        """What transactions may wait for: their coordinators' word, the record, what was stored."""
        unconfirmed: dict[TxnId, str] = {}
        # Stands if the task is cancelled: whoever waits is called in every case.
        refusal: str | None = f"{self._segment} was unloaded"
        try:
            async with asyncio.timeout(ADMIT_SECONDS):
                await self._confirm(unconfirmed)
                # The first legacy transaction this topic ever has: the record
                # comes before its message. Ids that nobody gave out leave none behind.
                if not self._record.exists and any(
                    txn not in unconfirmed for txn, _ in self._waiting
                ):
                    await self.write_record()
                await self._recall()
            refusal = None
        except TimeoutError:
            refusal = f"it could not be admitted within {ADMIT_SECONDS:g} s"
        except MagnetarError as error:
            refusal = str(error)
        finally:
            self._is_admitting = False
            waiting, self._waiting = self._waiting, []
            for txn, then in waiting:
                why = refusal or unconfirmed.get(txn)
                if then is not None:
                    # Asked again, for each: its end may have come during the attempt.
                    then(txn, self._still_refused(txn) if why is None else self._refused(txn, why))

    async def _confirm(self, unconfirmed: dict[TxnId, str]) -> None:
        """Have the coordinators of those that are new here say that they are open (invariant 6)."""
        legacy, asked = self._outcomes.legacy, set[TxnId]()

        async def confirm(txn: TxnId) -> None:
            try:
                await legacy.take_part(txn, self._segment)
            except MagnetarError as error:
                unconfirmed[txn] = str(error)

        # Again for those who came while this waited: they share the attempt.
        while new := {txn for txn, _ in self._waiting if txn not in self._tracked} - asked:
            asked |= new
            if unsure := [txn for txn in new if legacy.takes_part(txn, self._segment) is not True]:
                await asyncio.gather(*map(confirm, unsure))

    def _still_refused(self, txn: TxnId) -> NotAllowed | None:
        """Why one is not let in after an attempt that succeeded; None: it is."""
        refusal = self.refusal(txn)
        if refusal is None and not self.is_admitted(txn):
            return self._refused(txn, "its coordinator does not answer")  # it lost its log
        return refusal

    async def _recall(self) -> None:
        """Know what recovered transactions have stored before they store more."""
        # New ones are admitted as they come, so these are a former owner's.
        recovered = [
            segment_txn for segment_txn in self._tracked.values() if not segment_txn.is_admitted
        ]
        if not recovered:
            return
        first = min(segment_txn.bound for segment_txn in recovered)
        txns = {segment_txn.txn for segment_txn in recovered}
        await self._stored_entries.stored_in(txns, first, self._recovered_end)
        for segment_txn in recovered:
            segment_txn.is_admitted = True

    def _admitted(self, txn: TxnId) -> MarkedTransaction:
        """One that `is_admitted`: it is tracked from its first message on."""
        segment_txn = self._tracked.get(txn)
        if segment_txn is None:
            # The next append lands at or above this floor, so the bound
            # stands before the entry does.
            segment_txn = self._track(txn, self._ledger.next_append_floor())
            segment_txn.is_admitted = True
        return segment_txn

    # --- ends

    async def end(self, txn: TxnId, *, commit: bool, low_watermark: int) -> None:
        """What its coordinator has decided; durable when this returns."""
        self._check_serving()
        state: State = "COMMITTED" if commit else "ABORTED"
        segment_txn = self._tracked.get(txn)
        # It wrote nothing here, or has ended before: remembered, so that a late message is refused.
        if segment_txn is None:
            self._stream.over(txn)
            self._note_news()
        # Set before any await: from this line on it appends nothing more ('fence').
        elif segment_txn.decision is None:
            segment_txn.decision = state
        elif segment_txn.decision != state:
            raise InvalidTxnStatus(f"transaction {to_text(txn)} is {segment_txn.decision} here")
        # Its own number is not over before its end is durable here: the watermark stops below it.
        if self._stream.note_low(txn.most, min(low_watermark, txn.least - 1)):
            self._abort_leftovers()
        if segment_txn is not None:
            await self._ended(segment_txn)

    def _abort_leftovers(self) -> None:
        # Their coordinator has finished them without this topic, as if it had not been added:
        # nobody will ever ask for their end here.
        for txn in self._stream.leftovers():
            segment_txn = self._tracked[txn]
            if segment_txn.decision is None:
                _LOG.warning("transaction-left-open", txn=to_text(txn), segment=self._segment)
                segment_txn.decision = "ABORTED"
                self._tasks.spawn(self._persist(segment_txn), f"abort {to_text(txn)}")

    async def _persist(self, segment_txn: MarkedTransaction) -> None:
        """End what no coordinator will ask for again."""
        # Trying forever would hold the maxReadPosition unseen; a topic that is
        # loaded anew starts over.
        deadline = self._clock.monotonic() + MATERIALISE_SECONDS
        while True:
            try:
                await self._ended(segment_txn)
                return
            except StoreClosed:
                return  # nobody is served any more
            except MagnetarError as error:
                if self._clock.monotonic() >= deadline:
                    self.fail(error)
                    return
            await self._clock.sleep(_PAUSE_SECONDS)

    async def _ended(self, segment_txn: MarkedTransaction) -> None:
        """Wait for the one attempt to end it; done already: nothing."""
        if self._tracked.get(segment_txn.txn) is not segment_txn:
            return
        # One attempt that all who ask share: the end is written once.
        if segment_txn.ending is None:
            segment_txn.ending = self._tasks.spawn(
                self._attempt(segment_txn), f"end {to_text(segment_txn.txn)}"
            )
        await asyncio.wait({segment_txn.ending})
        # Still tracked: the attempt failed, or was cancelled by an unload before it could say why.
        if self._tracked.get(segment_txn.txn) is segment_txn:
            raise segment_txn.trouble or ServiceNotReady(f"{self._segment} was unloaded")

    async def _attempt(self, segment_txn: MarkedTransaction) -> None:
        try:
            await self._finish(segment_txn)
        except MagnetarError as error:
            segment_txn.trouble = error.with_traceback(None)
            # Another broker has the stream: nothing that this owner does counts any more.
            if isinstance(error, ManagedLedgerFenced):
                self.fail(error)
        finally:
            segment_txn.ending = None

    async def _finish(self, segment_txn: MarkedTransaction) -> None:
        txn, state = segment_txn.txn, segment_txn.decision
        assert state is not None, "that is why it is finished"
        # The order of invariant 3. A crash behind the aborted record is finished by
        # `recover`; one before it leaves the transaction open, and its coordinator asks again
        # ('aborted stays known').
        if state == "ABORTED" and segment_txn.has_entries:
            # Whatever it has in flight was handed to the log before this, and stands below.
            last = self._ledger.next_append_floor().previous
            await self._store.write_aborted(txn, self._segment, last, first=segment_txn.bound)
            self._aborted.hide(txn, segment_txn.bound, last)
        # Terminated, or a sealed segment: no marker can follow, so the record ends it.
        if self._ledger.sealed:
            await self._write(txn)
            self._stream.over(txn, self._ledger.last_position())
        # Tracked, but nothing was appended: no entries, no marker to tell of.
        elif not segment_txn.has_entries:
            self._stream.over(txn)
        else:
            await self._mark(txn, state)
        # From here on it is over: what it stored counts for dedup,
        # consumers see it, dispatch wakes.
        self._count_end(segment_txn, state)
        del self._tracked[txn]
        self._visibility.commit(txn)
        self._note_news()
        self.moved.advance()

    async def _mark(self, txn: TxnId, state: State) -> None:
        """Append the marker: what was in flight of the transaction stands before it."""
        # Before the append: a record written meanwhile must not claim the marker's place
        # (invariant 1 of `stream_state`).
        self._stream.marking(txn, self._ledger.next_append_floor())
        try:
            position = await self._ledger.append(marker(txn, state, self._clock.now_ms()))
        except ManagedLedgerSealed as error:
            # Once it is sealed nothing is in flight, and the record can say it.
            raise ServiceNotReady(f"{self._segment} is being terminated") from error
        self._stream.marked(txn, position)
        self._passed.append(position)

    # --- the stream record

    async def write_record(self) -> None:
        """The state of this moment, durably; it is written whatever becomes of the caller."""
        self._check_serving()
        await self._write()

    async def _write(self, over: TxnId | None = None) -> None:
        news, scanned_to = 0, self._recorded

        # Called when its turn has come, not now: the latest state is what gets written.
        def made() -> StreamRecord:
            nonlocal news, scanned_to
            news, end = self._news, self._ledger.last_position().next
            record = self._stream.record(self._segment, self._epoch, end, over)
            scanned_to = Position(*record.scanned_to)
            return record

        # News that came during the write stays due.
        def written() -> None:
            self._news -= news
            self._recorded = scanned_to
            self._begin_keeping()

        try:
            await self._record.write(made, written)
        # Whether the record is this owner's is not certain any more: only a load tells.
        except (ManagedLedgerFenced, OutcomeUnknown) as error:
            self.fail(error)
            raise

    def _note_news(self) -> None:
        self._news += 1
        # Many ends wake the keeper at once; few of them wait for the others.
        if self._news % RECORD_ENDS == 0:
            self._crowded.advance()

    def _begin_keeping(self) -> None:
        if not self._is_keeping and not self._tasks.stopping:
            self._is_keeping = True
            self._tasks.spawn(self._keep(), "keep the record")

    async def _keep(self) -> None:
        """Write the record as it becomes due, until the stream takes no more entries."""
        appended = self._ledger.appended
        seen = appended.version
        while True:
            crowds = self._crowded.version
            try:
                # A topic without traffic writes nothing and wakes nobody ('no poll, no spin').
                seen = await appended.past(seen)
            except MagnetarError:
                return  # what ends from now on is written as it ends
            await self._crowded.past_within(crowds, RECORD_SECONDS)
            if self._is_due():
                await self._try_to_write()

    def _is_due(self) -> bool:
        # Due for ends that it does not say, or for the length of what a recovery would scan.
        end = self._ledger.last_position()
        behind = self._ledger.count_between(self._recorded.previous, end)
        return bool(self._news) or behind >= RECORD_ENDS

    async def _try_to_write(self) -> None:
        try:
            await self._write()
        except MagnetarError as error:
            # The stream has it all: a recovery scans more of it.
            _LOG.warning("stream-record-failed", segment=self._segment, error=str(error))

    # --- logs of pending acknowledgements

    def has_ack_log(self, subscription: str) -> bool:
        """Whether there is, or may be, a log of a subscription's pending acknowledgements."""
        return subscription in self._stream.ack_logs

    @property
    def ack_logs(self) -> list[str]:
        """All subscriptions with such a log."""
        return sorted(self._stream.ack_logs)

    async def note_ack_log(self, subscription: str) -> None:
        """A subscription is about to have such a log, and whoever loads the topic finds it."""
        # In the record before the log begins: a log that no record names
        # would never be found again.
        self._stream.ack_logs.add(subscription)
        try:
            await self.write_record()
        except BaseException:
            self._stream.ack_logs.discard(subscription)
            raise

    async def forget_ack_log(self, subscription: str) -> None:
        """Forget the log of a subscription, which is gone with it."""
        if subscription in self._stream.ack_logs:
            self._stream.ack_logs.discard(subscription)
            await self.write_record()

    # --- the end of data, and of it all

    def trimmed(self, first_kept: Position) -> None:
        """Entries below this position are gone."""
        self._stream.trimmed(first_kept)

    async def close(self) -> None:
        """Leave everything to the next owner, with little to scan."""
        # A failed owner writes nothing: the record may be its successor's by now.
        is_kept = self._record.exists and self.failure is None and not self._tasks.stopping
        if is_kept and self._is_due():
            await self._try_to_write()
        await self._tasks.stop()

    async def delete(self) -> None:
        """The stream is gone with its data: so is the record. Closed before."""
        if self._record.exists:
            await self._record.delete()

    # --- parts

    def _track(self, txn: TxnId, bound: Position) -> MarkedTransaction:
        segment_txn = self._tracked[txn] = MarkedTransaction(
            txn, bound, TxnSequences(self._sequence_news.began)
        )
        self._stream.wrote(txn, bound)
        self._visibility.track(txn, bound)
        return segment_txn

    def _check_serving(self) -> None:
        if self._tasks.stopping or self.failure is not None:
            raise ServiceNotReady(f"{self._segment} is being unloaded")

    def fail(self, error: MagnetarError) -> None:
        """Have the topic loaded anew; the first reason stays."""
        if self.failure is None:
            self.failure = error
            self._failed.advance()
