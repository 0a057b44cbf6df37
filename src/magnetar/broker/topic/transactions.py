"""The transactions of one topic, as the topic sees them.

Owns: `TopicTransactions`: how far consumers may read, which entries are for them, and where the
sequences of transactional sends count. Without `parts.transactions` there are no transactions.

Invariants:
1. A topic without aborted entries looks into none; one that has some looks into those at or below
   the last of them that name a transaction.
2. The last message is the last one that a consumer could get: below the maxReadPosition, not
   aborted, and no marker.
3. Entries of aborted transactions count as acknowledged for every subscription that does not read
   them: at once for the subscriptions that there are, and as dispatch comes to them for later
   ones; where nobody reads, after each load and before each trim, if nothing else is before them.
4. What transactions store reaches the topic's dedup at their commit; until then it is unknown
   there, and after an abort it may be sent again.
5. Transactions of both kinds write here: what the one holds, the other's consumers do not see.
   Markers, which only legacy ones have, are for nobody and count as acknowledged.

Relies on: `txn.buffer` and `txn.legacy.legacy_buffer` for decisions and durability.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias

from magnetar.broker.dispatch.dispatcher import ReadWindow
from magnetar.broker.entries import EntryView
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.publish.dedup import Dedup
from magnetar.broker.publish.lineage import dedup_name
from magnetar.broker.publish.txn_writes import TransactionWrites
from magnetar.broker.subscribe.txn_acks import AckParts
from magnetar.broker.subscribe.txn_kind import TxnKind
from magnetar.errors import MagnetarError
from magnetar.ledger.api import Entry, LedgerStore
from magnetar.managed_ledger.managed_ledger import ManagedLedger
from magnetar.managed_ledger.reading import SCAN_BYTES, SCAN_ENTRIES
from magnetar.metadata.api import MetadataStore
from magnetar.model.ids import Position
from magnetar.model.isolation import ReadIsolation
from magnetar.model.names import Domain, TopicName
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.signal import Signal
from magnetar.runtime.slices import SlicePace
from magnetar.txn.api import Transactions
from magnetar.txn.buffer.transaction_buffer import MetadataTransactionBuffer
from magnetar.txn.buffer.txn_dedup import Sent, SequenceNews
from magnetar.txn.ids import is_metadata
from magnetar.txn.legacy.legacy_buffer import LegacyTransactionBuffer
from magnetar.txn.legacy.markers import is_txn_marker, trace_of
from magnetar.txn.legacy.pending_ack_log import PendingAckLogs
from magnetar.txn.records import State
from magnetar.wire.messages import TxnId

# The span of a long transaction holds mostly others' entries: all of them would be
# read once more for every abort.
PASSED_OVER_MAX: Final = 100_000
"""Entries among which those of one aborted transaction are looked for at once; of one that stands
among more, dispatch finds them as it comes to them."""

Span: TypeAlias = tuple[Position, Position]
"""From a position to another one, both included."""

_LOG: Final = logger(__name__)


class Waiting(Protocol):
    """The subscriptions of the topic."""

    def first_unacked(self) -> Position | None:
        """The first entry that any of them has not acknowledged; None: there is none of them."""
        ...

    def wake(self) -> None:
        """Consumers may see more."""
        ...

    def pass_over(self, positions: Sequence[Position]) -> None:
        """Entries that are for nobody count as acknowledged."""
        ...

    async def pass_over_aborted(self, positions: Sequence[Position]) -> None:
        """Count entries of aborted transactions as acknowledged, but for who reads them."""
        ...

    async def pass_aborted(self, last: Position) -> None:
        """Count entries of aborted transactions as acknowledged while they come next, to `last`."""
        ...


class Governed(Protocol):
    """A topic, as the owner of policies that may change."""

    @property
    def policies(self) -> TopicPolicies: ...


class TransactionParts(Protocol):
    """The parts that the topics of one broker share, as far as transactions need them."""

    @property
    def metadata(self) -> MetadataStore: ...
    @property
    def ledgers(self) -> LedgerStore: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def transactions(self) -> Transactions | None: ...


class TopicTransactions:
    """Made with its topic, right after the managed ledger was opened."""

    def __init__(
        self,
        name: TopicName,
        ledger: ManagedLedger,
        parts: TransactionParts,
        topic: Governed,
    ) -> None:
        self._name = name
        self._ledger = ledger
        self._gone_below: Position | None = None
        """Up to where data was trimmed since this was loaded."""
        self._dedup: Dedup | None = None
        # One for both buffers: dedup takes what they tell in the order in which it happened.
        self._sequence_news = SequenceNews()
        self.buffer: MetadataTransactionBuffer | None = None
        self.legacy: LegacyTransactionBuffer | None = None
        """None on segments too: there are no markers in them."""
        self._ack_logs: PendingAckLogs | None = None
        self.acks: AckParts | None = None
        """What subscriptions ask; None: they take no transactional acknowledgements."""
        self.writes: TransactionWrites | None = None
        """What producers ask; None: they take no transactional messages."""
        transactions, clock = parts.transactions, parts.clock

        def in_records() -> bool:
            # Asked each time: the policy may change while the topic is loaded.
            return topic.policies.legacy_in_records

        if transactions is not None:
            self.buffer = MetadataTransactionBuffer(
                str(name),
                ledger,
                transactions.store,
                transactions.outcomes,
                epoch=ledger.epoch,
                clock=clock,
                news=self._sequence_news,
                stored=self,
                shares_journal=transactions.shares_journal,
            )
            # A regular topic takes both kinds; its buffers share the signals it follows.
            if name.domain is not Domain.SEGMENT:
                self.legacy = LegacyTransactionBuffer(
                    str(name),
                    ledger,
                    transactions.store,
                    self.buffer,
                    epoch=ledger.epoch,
                    clock=clock,
                    news=self._sequence_news,
                    stored=self,
                    moved=self.buffer.moved,
                    failed=self.buffer.failed,
                    outcomes=transactions.outcomes,
                )
                self._ack_logs = PendingAckLogs(
                    name.managed_ledger_name,
                    self.legacy,
                    parts.metadata,
                    parts.ledgers,
                    clock=clock,
                    limits=parts.limits,
                )
            kinds = TxnKind(has_markers=self.legacy is not None, in_records=in_records)
            self.acks = AckParts(transactions, self._ack_logs, kinds)
            self.writes = TransactionWrites(self.buffer, self.legacy, kinds)

    async def recover(self) -> None:
        """Nothing may be read before."""
        if self.buffer is not None:
            await self.buffer.recover()
        if self.legacy is not None:
            await self.legacy.recover()  # the aborted records are read by now
            # Cursors may have lost, with the process, which markers they had passed.
            if self.buffer is not None and (marker := self.legacy.last_marker) is not None:
                self.buffer.newly_aborted.append((self._ledger.first_position(), marker))
        if self._ack_logs is not None:
            await self._ack_logs.sweep(self._ledger.cursor_names())

    def loops(
        self, subscriptions: Waiting, lose: Callable[[MagnetarError], None]
    ) -> Iterator[Coroutine[Any, Any, None]]:
        """What its topic runs: it tells who waits for more; `lose` if it cannot go on."""
        if self.buffer is not None:
            yield self._follow_moves(self.buffer.moved, subscriptions)
            yield self._follow_aborts(self.buffer, subscriptions)
            yield self._follow_failure(self.buffer.failed, lose)

    async def _follow_moves(self, moved: Signal, subscriptions: Waiting) -> None:
        seen = 0
        while True:
            seen = await moved.past(seen)
            if self._dedup is not None:
                # Before END_TXN is answered: a resend behind that answer meets the outcome.
                self._dedup.catch_up()
            if self.legacy is not None:
                subscriptions.pass_over(self.legacy.take_passed())
            # What dispatch behind an open transaction waits for ('no poll, no spin').
            subscriptions.wake()

    async def _follow_failure(self, failed: Signal, lose: Callable[[MagnetarError], None]) -> None:
        # Once: a buffer that failed stays so, and goes with the topic.
        await failed.past(0)
        for buffer in (self.buffer, self.legacy):
            if buffer is not None and buffer.failure is not None:
                lose(buffer.failure)

    async def _follow_aborts(
        self, buffer: MetadataTransactionBuffer, subscriptions: Waiting
    ) -> None:
        seen, known = 0, None
        while True:
            seen = await buffer.moved.past(seen)
            last = buffer.aborted_last
            # Most moves are commits: no subscription is looked at for them.
            if last == known and not buffer.newly_aborted:
                continue
            known, spans = last, self._to_pass(buffer.newly_aborted, subscriptions)
            # Before the awaits: what is aborted during them makes the signal advance once more.
            buffer.newly_aborted.clear()
            try:
                for first, end in spans:
                    max_read_position = self.max_read_position()
                    if end > max_read_position:
                        # Backlogs count up to it: the rest waits until it moves.
                        buffer.newly_aborted.append((max(first, max_read_position.next), end))
                    await self._pass_over(first, min(end, max_read_position), subscriptions)
                if last is not None:
                    await subscriptions.pass_aborted(last)
            except MagnetarError as error:
                # Who reads finds out too, and tells; the next trim tries again.
                _LOG.warning("aborted-not-passed", topic=str(self._name), error=str(error))

    def _to_pass(self, spans: Iterable[Span], subscriptions: Waiting) -> list[Span]:
        """Where some subscription may still count entries of these spans, but for long ones."""
        lowest = subscriptions.first_unacked()
        if lowest is None:
            return []
        # After a load most of what is known to be aborted was acknowledged long ago.
        clipped = ((max(first, lowest), last) for first, last in spans if last >= lowest)
        # Each for itself: many short ones that overlap are worth reading, one long one is not.
        count = self._ledger.count_between
        return merged(each for each in clipped if count(*each) <= PASSED_OVER_MAX)

    async def _pass_over(self, first: Position, last: Position, subscriptions: Waiting) -> None:
        while first <= last:
            entries = await self._ledger.read(first, SCAN_ENTRIES, SCAN_BYTES)
            if not entries:
                break
            aborted = [each.position for each in entries if not self.is_visible(each)]
            await subscriptions.pass_over_aborted([each for each in aborted if each <= last])
            first = entries[-1].position.next

    async def pass_aborted(self, subscriptions: Waiting) -> None:
        """What is aborted holds no subscription back, and so no data."""
        if self.buffer is not None and self.buffer.aborted_last is not None:
            await subscriptions.pass_aborted(self.buffer.aborted_last)

    # --- what consumers may see

    def max_read_position(self) -> Position:
        """The last position that consumers may see."""
        buffer, legacy = self.buffer, self.legacy
        if buffer is None:
            return self._ledger.last_position()
        # Whichever kind holds it back, it does so for consumers of both (invariant 5).
        end = buffer.max_read_position()
        return min(end, legacy.max_read_position()) if legacy is not None and legacy.holds else end

    def read_window(self) -> ReadWindow:
        """The `max_read_position`, and up to where `is_visible` has to be asked."""
        buffer, legacy = self.buffer, self.legacy
        if buffer is None:
            return ReadWindow(self._ledger.last_position(), None)
        hidden, gone = buffer.aborted_last, self._gone_below
        if legacy is not None and (marker := legacy.last_marker) is not None:
            hidden = marker if hidden is None else max(hidden, marker)
        if gone is not None:
            # Entries that were trimmed after they had been read: what is known of them has gone.
            hidden = gone if hidden is None else max(hidden, gone)
        return ReadWindow(self.max_read_position(), hidden)

    def is_visible(self, entry: Entry) -> bool:
        """Whether an entry up to `max_read_position` is for consumers."""
        buffer, legacy = self.buffer, self.legacy
        if buffer is None:
            return True
        gone = self._gone_below
        if gone is not None and entry.position < gone:
            # It was read before the trim, and what was known of its transaction went with that.
            return trace_of(entry.payload) is None
        aborted, marker = buffer.aborted_last, None if legacy is None else legacy.last_marker
        # Invariant 1: most topics hide nothing, and most entries stand behind the last one
        # that is hidden. Neither is parsed.
        if aborted is None and marker is None:
            return True
        position = entry.position
        if (aborted is None or position > aborted) and (marker is None or position > marker):
            return True
        trace = trace_of(entry.payload)
        if trace is None:
            return True
        # A marker, which is for nobody.
        if trace.end is not None and legacy is not None and not is_metadata(trace.txn):
            return False
        # Below the maxReadPosition it is decided: what is not aborted is
        # committed, whatever its kind.
        return buffer.is_visible(trace.txn, position)

    async def last_entry(self, isolation: ReadIsolation | None = None) -> Entry | None:
        """The last entry that is for consumers; those that read what is not committed get all."""
        # One entry at first: nearly always the last one is a message.
        wanted, all_of_it = 1, isolation is ReadIsolation.UNCOMMITTED
        last = self._at_or_before(
            self._ledger.last_position() if all_of_it else self.max_read_position()
        )
        pace = SlicePace()
        while last is not None:
            first = Position(last.ledger_id, max(last.entry_id - wanted + 1, 0))
            found = await self._between(first, last)
            shows = _is_message if all_of_it else self.is_visible
            visible = [each for each in found if shows(each)]
            if visible:
                return visible[-1]
            wanted = SCAN_ENTRIES  # behind many of a large transaction that was aborted
            last = self._at_or_before(first.previous)
            await pace.after(len(found))
        return None

    async def _between(self, first: Position, last: Position) -> list[Entry]:
        """Entries of one ledger."""
        found: list[Entry] = []
        while first <= last:
            count = last.entry_id - first.entry_id + 1
            part = await self._ledger.read(first, count, SCAN_BYTES)
            if not part or part[-1].position.ledger_id != last.ledger_id:
                break  # trimmed meanwhile
            found += [each for each in part if each.position <= last]
            first = part[-1].position.next
        return found

    def _at_or_before(self, position: Position) -> Position | None:
        for span in reversed(self._ledger.ledger_spans):
            end = span.entries - 1
            if span.ledger_id == position.ledger_id:
                end = min(end, position.entry_id)
            if span.ledger_id <= position.ledger_id and end >= 0:
                return Position(span.ledger_id, end)
        return None

    # --- what is kept

    def lowest_pin(self, other: Position | None) -> Position | None:
        """Nothing at or above it may be trimmed; `other` is somebody else's."""
        # An undecided transaction's entries have to be there when it commits, however long that
        # takes ('sealing is irrelevant'). The other is dedup's.
        bounds = [other]
        if self.buffer is not None:
            bounds.append(self.buffer.lowest_bound())
        if self.legacy is not None:
            bounds.append(self.legacy.lowest_bound())
        return min((each for each in bounds if each is not None), default=None)

    @property
    def undecided(self) -> int:
        """How many transactions of either kind are undecided here."""
        buffers = (self.buffer, self.legacy)
        return sum(each.undecided for each in buffers if each is not None)

    async def trimmed(self) -> None:
        """Data has gone."""
        # Before the records go: a read under way may still bring entries that they spoke of.
        self._gone_below = self._ledger.first_position()
        if self.buffer is not None:
            await self.buffer.trimmed(self._ledger.first_position())
        if self.legacy is not None:
            self.legacy.trimmed(self._ledger.first_position())

    async def close(self) -> None:
        # The legacy one first: its ends hide entries in the other.
        if self.legacy is not None:
            await self.legacy.close()
        if self.buffer is not None:
            await self.buffer.close()

    async def delete(self) -> None:
        """Delete all that is stored of transactions here: the topic goes, its data is gone."""
        await self.close()
        if self.buffer is not None:
            await self.buffer.delete()
        if self._ack_logs is not None:
            await self._ack_logs.delete_all()
        if self.legacy is not None:
            await self.legacy.delete()

    # --- sequences

    def replayed(self, view: EntryView, name: str) -> State:
        """What the transaction of an entry is; COMMITTED also of one without a transaction."""
        txn = view.txn_id
        if txn is None or self.writes is None:
            return "COMMITTED"
        buffer = self.writes.holder(txn)
        state = buffer.state_of(txn, view.position)
        # The replay at a load is also how an open transaction learns what it stored: a
        # resend in it is a duplicate.
        if state == "OPEN" and view.is_last_chunk:
            buffer.note(txn, Sent(name, view.sequence_id, view.highest_sequence_id))
        return state

    def count_in(self, dedup: Dedup | None) -> None:
        """The topic has dedup from now on, or none: it takes the news of transactions itself."""
        self._dedup = dedup
        # What came before says nothing to a new dedup, which is told below what is being stored.
        self._sequence_news.is_followed = dedup is not None
        self._sequence_news.take()
        if dedup is not None:
            dedup.follow(self._sequence_news)
        for buffer in (self.buffer, self.legacy):
            if dedup is not None and buffer is not None:
                for name, stored in buffer.storing():
                    dedup.began_in_txn(name, stored)

    async def stored_in(self, txns: set[TxnId], first: Position, end: Position) -> None:
        pace = SlicePace()
        while entries := await self._ledger.read(first, SCAN_ENTRIES, SCAN_BYTES):
            for entry in entries:
                if entry.position >= end:
                    return
                trace = trace_of(entry.payload)
                # Markers store nothing; entries without a transaction are dedup's own affair.
                if trace is not None and trace.end is None and trace.txn in txns:
                    self._note(trace.txn, EntryView.of(entry))
            first = entries[-1].position.next
            await pace.after(len(entries))

    def _note(self, txn: TxnId, view: EntryView) -> None:
        if self.writes is not None and view.is_last_chunk:
            name = dedup_name(self._name, view.producer_name)
            sent = Sent(name, view.sequence_id, view.highest_sequence_id)
            self.writes.holder(txn).note(txn, sent)


def _is_message(entry: Entry) -> bool:
    return not is_txn_marker(entry.payload)


def merged(spans: Iterable[Span]) -> list[Span]:
    """Put spans in order and join those that overlap: each position is in one."""
    found: list[Span] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found
