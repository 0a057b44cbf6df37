"""One producer on a topic: sends go in, receipts come out in the same order.

Owns: `Producer`: what is in flight, the order of receipts, and the judgement of dedup.

Invariants:
1. `send` starts work in call order and never waits. Everything that it accepted is settled: its
   receipt is given, or the producer is stopped, and dedup learns the outcome either way.
2. Receipts come in the order of the sends. Once an append failed there is no receipt any more (a
   later one would overtake what the client must send again): the producer has stopped.
3. A send after `stop` is ignored, as the protocol demands of sends that crossed a close.
4. No task per message: whoever gives receipts looks when the first send in flight is settled
   (`first_in_flight`), or when something else has `changed`, and then gets all that are due.
5. A send whose transaction is not admitted yet is held, and all later ones of this producer behind
   it; once that is settled they go on in order. What is held when the broker stops the producer is
   dropped: its client sends it again. What is held when its client closes it still goes on.
6. Sends inside a transaction are judged by what that transaction has stored, and by nothing else.
7. A run (sends that came together) has the outcome that its sends would have one by one. It goes as
   a whole only where each of them would go the plain way; its append is durable as a whole, or not.

Relies on: `append`, whose futures resolve in order, and a session that calls `take_receipts` until
it `has_ended`. `trouble` tells the topic of a failed append.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from magnetar.broker.api import (
    DROPPED,
    NO_SEQUENCE,
    AccessMode,
    ProducerRequest,
    Receipt,
    ReceiptRun,
)
from magnetar.broker.entries import (
    BATCH_SIZE_TAG,
    UNPLACED,
    EntryView,
    may_have_batches,
    wrong_count,
)
from magnetar.broker.policy.stats import PublisherStats, Rate, time_text
from magnetar.broker.publish.dedup import Dedup, DedupFastPath, SendVerdict
from magnetar.broker.publish.held_sends import HeldSends
from magnetar.broker.publish.send_limits import SendLimits
from magnetar.broker.publish.txn_writes import TransactionWrites
from magnetar.broker.rates.rate_limiter import RateLimiter
from magnetar.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    MagnetarError,
    ManagedLedgerSealed,
    NotAllowed,
    StorageClosed,
    StorageError,
    TooManyRequests,
    TopicTerminated,
)
from magnetar.model.hashing import key_hash, segment_hash
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock
from magnetar.runtime.signal import Signal
from magnetar.txn.buffer.segment_transactions import (
    BEGIN_ANEW,
    SegmentTransaction,
    TxnFastPath,
)
from magnetar.txn.buffer.txn_dedup import Sent, TxnVerdict
from magnetar.txn.ids import to_text
from magnetar.wire.messages import Send, SendRun, TxnId, TxnSend, with_txn

# Where the metadata of an entry with a checksum has its size and its size's last byte, and where it
# begins; the first three bytes of its size, if it has less than 256.
_SIZE_AT: Final = 6
_SIZE_LOW: Final = 9
_METADATA: Final = 10
_SHORT: Final = bytes(_SIZE_LOW - _SIZE_AT)

# Faster than the call of a named tuple, and this is once per message.
_new: Final = tuple.__new__

Append = Callable[[bytes], asyncio.Future[Position]]
AppendRun = Callable[[list[bytes], int], asyncio.Future[Position] | None]
"""Takes payloads and their size; None: not as a whole."""

_MODE_NAMES: Final = {
    AccessMode.SHARED: "Shared",
    AccessMode.EXCLUSIVE: "Exclusive",
    AccessMode.WAIT_FOR_EXCLUSIVE: "WaitForExclusive",
    AccessMode.EXCLUSIVE_WITH_FENCING: "ExclusiveWithFencing",
}


_LEFT_OVER: Final = (
    f"{BEGIN_ANEW}; if the message is a plain one, its client has left the id of an earlier "
    "transaction on it: send plain messages by another producer, or without batching"
)


class _Sent:
    """The facts of a send beyond its append; a plain one has none of them."""

    __slots__ = (
        "answer",
        "counted",
        "dedup",
        "error",
        "fast_path",
        "highest_sequence_id",
        "is_last_chunk",
        "segment_txn",
    )

    def __init__(
        self,
        highest_sequence_id: int | None,
        *,
        dedup: Dedup | None = None,
        fast_path: DedupFastPath | None = None,
        is_last_chunk: bool = True,
        answer: Receipt | None = None,
        segment_txn: SegmentTransaction | None = None,
        counted: Sent | None = None,
    ) -> None:
        # At most one of `fast_path`, `dedup` and `segment_txn` is owed the outcome: the one that
        # judged it.
        self.highest_sequence_id = highest_sequence_id
        self.fast_path = fast_path
        """Where its outcome is owed, if it was judged there."""
        self.dedup = dedup
        """Where its outcome is owed."""
        self.is_last_chunk = is_last_chunk
        self.answer = answer
        """It was answered without an append."""
        self.error: MagnetarError | None = None
        """Its append was refused at once."""
        self.segment_txn = segment_txn
        """The transaction to which its outcome is owed."""
        self.counted = counted
        """Its sequences, if they count there."""


_Noted: TypeAlias = _Sent | DedupFastPath | TxnFastPath | None


class Producer:
    """One producer. Its topic makes it; its session sends and waits for receipts."""

    def __init__(
        self,
        name: str,
        options: ProducerRequest,
        append: Append,
        *,
        clock: Clock,
        trouble: Signal,
        schema_version: bytes = b"",
        dedup: Dedup | None = None,
        dedup_name: str | None = None,
        transactions: TransactionWrites | None = None,
        append_run: AppendRun | None = None,
    ) -> None:
        self.name = name
        self.dedup_name = dedup_name or name
        """Under which its sequences count: one for all segments of a scalable topic."""
        self.options = options
        self.schema_version = schema_version
        self.topic_epoch: int | None = None
        self.last_sequence_id = NO_SEQUENCE
        """What PRODUCER_SUCCESS tells the client: up to where nothing need be sent again."""
        self._dedup = dedup
        self._fast_path: DedupFastPath | None = None
        self.failure: MagnetarError | None = None
        """Why the broker stopped it; None if its client did."""
        self.readiness = Signal()
        """Advances when it may send (`ready`) and when it stopped."""
        self.limiter: RateLimiter | None = None
        """The rate that its session waits for before it sends; None: there is none."""
        self.messages_in = 0
        self.bytes_in = 0
        self._connected_ms = clock.now_ms()
        self._message_rate = Rate(clock)
        self._byte_rate = Rate(clock)
        self._append = append
        self._append_run = append_run
        self._trouble = trouble
        # `_stopped`: no more sends. `_failed`: no more receipts either (invariant 2). `_ready`: the
        # access mode lets it send.
        self._stopped = False
        self._failed = False
        self._ready = False
        self._transactions = transactions
        self._direct = False
        """It may send, is not stopped, nothing is held, and its messages have no limits."""
        self._send_limits: SendLimits | None = None
        self._held: HeldSends | None = None
        if transactions is not None:
            self._held = HeldSends(transactions, self.send, self._nothing_held)
        self._txn_fast_path: TxnFastPath | None = None
        """Of the transaction of the last send that was plain in one."""
        # In the order of sends, each with its sequence, or those of a run. Receipts leave from the
        # front only, so one that is done may wait here.
        self._pending: deque[tuple[asyncio.Future[Position], int | list[int], _Noted]] = deque()
        self._receipts: list[Receipt | ReceiptRun] = []
        self.changed = Signal()
        """Advances when it stops or has ended, and when sends go on that were held."""

    # --- what it is

    @property
    def producer_id(self) -> int:
        return self.options.producer_id

    @property
    def epoch(self) -> int:
        return self.options.epoch

    @property
    def access_mode(self) -> AccessMode:
        return self.options.access_mode

    @property
    def connection(self) -> object:
        return self.options.connection

    @property
    def dedup(self) -> Dedup | None:
        """None: nothing is judged. The topic changes it with its policy."""
        return self._dedup

    @dedup.setter
    def dedup(self, dedup: Dedup | None) -> None:
        self._dedup = dedup
        self._fast_path = None

    @property
    def ready(self) -> bool:
        """False while it waits to have the topic for itself."""
        return self._ready

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def pending(self) -> int:
        """Sends that are accepted and not settled: what back-pressure counts."""
        return self._in_flight + self.held

    @property
    def _in_flight(self) -> int:
        return sum(len(each) if isinstance(each, list) else 1 for _, each, _ in self._pending)

    @property
    def held(self) -> int:
        """Sends that wait for their transaction, or behind one that does."""
        return 0 if self._held is None else len(self._held)

    def is_successor_of(self, other: Producer) -> bool:
        """Whether it is the other one come again: same connection, higher epoch."""
        return (
            self.connection is other.connection
            and self.producer_id == other.producer_id
            and self.name == other.name
            and self.epoch > other.epoch
        )

    def stats(self) -> PublisherStats:
        messages, size = self.messages_in, self.bytes_in
        return PublisherStats(
            producer_id=self.producer_id,
            producer_name=self.name,
            access_mode=_MODE_NAMES[self.access_mode],
            msg_rate_in=self._message_rate.of(messages),
            msg_throughput_in=self._byte_rate.of(size),
            average_msg_size=size / messages if messages else 0.0,
            address=self.options.address,
            connected_since=time_text(self._connected_ms),
            client_version=self.options.client_version,
            metadata=dict(self.options.metadata),
        )

    def grant(self, topic_epoch: int | None) -> None:
        """Let it send from now on."""
        self.topic_epoch = topic_epoch
        self._ready = True
        self._direct = self._send_limits is None
        self.readiness.advance()

    def limit_sends(self, limits: SendLimits | None) -> None:
        """Refuse messages beyond these limits; None: there are none."""
        self._send_limits = limits
        # With a limit every send is judged, and looked at. Without one, nothing is looked at.
        self._direct = self._ready and not self._stopped and not self.held and limits is None

    async def until_ready(self) -> bool:
        """Wait until it may send; False: it was stopped before (`failure` says why)."""
        while not self._ready and not self._stopped:
            await self.readiness.past(self.readiness.version)
        return not self._stopped

    # --- sends

    def send(self, send: Send) -> None:
        """Start one send. Its outcome comes from `receipts`."""
        # What is durable by now is noted first: dedup judges this send by it.
        pending = self._pending
        if pending and pending[0][0].done():
            self.settle()
        sent: _Noted = None
        sequence_id, fast_path, payload = (
            send.sequence_id,
            self._fast_path,
            send.headers_and_payload,
        )
        # Not the plain way: a `TxnSend` or `RareSend` (a chunk, a highest sequence id, a bad
        # checksum), or the producer is stopped, waits for its topic, or has sends held.
        if type(send) is not Send or not self._direct:
            held = self._held
            is_released = held is not None and held.is_releasing
            # Invariant 3. What was held when its client closed it still goes on (invariant 5).
            if self._stopped and not is_released:
                return
            if (
                type(send) is TxnSend
                and (self._direct or (is_released and self._send_limits is None))
                and wrong_count(send) is None
            ):
                sent = self._fast_path_in(send)
            if sent is None:
                # A released send was held before: its transaction is admitted or refused by now.
                if not is_released and self._is_held(send):
                    return
                sent = self._judged(send)
        # A batch, or perhaps one (as `may_be_batch`, with a checksum): its client may lie about the
        # number of its messages.
        elif (
            send.num_messages != 1
            or payload.find(BATCH_SIZE_TAG, _METADATA, _METADATA + payload[_SIZE_LOW]) > 0
            or payload[_SIZE_AT:_SIZE_LOW] != _SHORT
        ) and (refusal := wrong_count(send)) is not None:
            sent = _refused(send, refusal)
        elif fast_path is not None:
            # The hot path of dedup: above all that was pushed and inherited, so certainly new.
            if sequence_id > fast_path.pushed and sequence_id > fast_path.floor:
                fast_path.pushed = sequence_id
                fast_path.plain += 1
                sent = fast_path
            else:
                sent = self._judged(send)
        elif self._dedup is not None:
            sent = self._judged(send)
        # A duplicate or a refusal: it has its place in the queue, so its receipt comes in order.
        if type(sent) is _Sent and sent.answer is not None:
            self._queue(self._resolved(), sequence_id, sent)
            return
        payload = send.headers_and_payload  # of a transaction it may be another one by now
        try:
            future = self._append(payload)
        # Refused at once: the journal's queue is full, the topic is sealed, or another broker owns
        # it.
        except MagnetarError as error:
            self._not_appended(send, sent, error)
            return
        self.messages_in += send.num_messages
        self.bytes_in += len(payload)
        pending.append((future, sequence_id, sent))
        # As `_queue` does.
        if len(pending) == 1 and self._held is not None and self._held.is_releasing:
            self.changed.advance()

    def send_run(self, run: SendRun) -> None:
        """Start sends that came together: as a whole, or else one by one (invariant 7)."""
        pending = self._pending
        if pending and pending[0][0].done():
            self.settle()
        noted: DedupFastPath | TxnFastPath | None = self._fast_path
        if run.txn_id is not None:
            # Asking may admit its transaction: not for sends that wait behind others.
            noted = self._txn_fast_path_of(run.txn_id) if self._direct else None
        # A fast path knows that all are new; without dedup, nothing has to be known of plain ones.
        fits = self._dedup is None and run.txn_id is None if noted is None else noted.fits(run)
        future: asyncio.Future[Position] | None = None
        # With a lie in it they go one by one: that one is refused in its place.
        if fits and self._direct and self._append_run is not None and not _has_lie(run):
            try:
                future = self._append_run(run.payloads, run.size)
            # Nothing was appended: the first one, alone, meets the same reason, and tells it.
            except MagnetarError:
                future = None
        if future is None:
            for each in run.sends():
                self.send(each)
            return
        if noted is not None:
            noted.push(run.sequence_ids)
        self.messages_in += sum(run.counts)
        self.bytes_in += run.size
        self._queue(future, run.sequence_ids, noted)

    def _judged(self, send: Send) -> _Sent:
        """What is special about a send; with an answer, if it is not to be appended."""
        highest = send.highest_sequence_id
        # Refusals before dedup: what is refused must not count as pushed.
        refusal = self._refusal(send)
        if refusal is not None:
            return _refused(send, refusal)
        if send.txn_id is not None:
            return self._judged_in(send.txn_id, send)
        # Markers are written by brokers: they have no sequence of their own.
        if self.dedup is None or send.marker:
            return _Sent(highest)
        # Chunks share one sequence id, and only the last one counts; others are not worth a parse.
        last = not send.is_chunk or EntryView(UNPLACED, send.headers_and_payload).is_last_chunk
        by_key = self.dedup.needs_key(self.dedup_name, send.sequence_id)
        verdict = self.dedup.decide(
            self.dedup_name,
            send.sequence_id,
            NO_SEQUENCE if highest is None else highest,
            is_last_chunk=last,
            key_hash=_hash_of(send.headers_and_payload) if by_key else None,
        )
        # After UNKNOWN every later send is judged, until the producer comes again (dedup's
        # invariant 6).
        self._fast_path = (
            None if verdict is SendVerdict.UNKNOWN else self.dedup.fast_path(self.dedup_name)
        )
        if verdict is SendVerdict.STORE:
            return _Sent(highest, dedup=self.dedup, is_last_chunk=last)
        if verdict is SendVerdict.DUPLICATE:
            return _Sent(highest, answer=Receipt(send.sequence_id, highest, DROPPED))
        return _refused(send, _unknown(self.name, send))

    def _refusal(self, send: Send) -> MagnetarError | None:
        # ChecksumError: the client checks its own copy, and sends it again if that is intact.
        if not send.checksum_ok:
            return ChecksumMismatch(f"{self.name}: message {send.sequence_id} is damaged")
        # PIP-68: WaitForExclusive, and another producer has the topic.
        if not self._ready:
            return NotAllowed(f"{self.name} waits to have the topic for itself")
        if (wrong := wrong_count(send)) is not None:
            return wrong
        if (limits := self._send_limits) and (beyond := limits.refusal(send)) is not None:
            return beyond
        txn, transactions = send.txn_id, self._transactions
        if txn is None:
            return None
        if transactions is None:
            return NotAllowed("this topic takes no transactional messages")
        if not transactions.is_admitted(txn):
            known = transactions.refusal(txn)
            # Known since it was asked about: the client is told that reason, not a general one.
            if known is None and self._held is not None:
                known = self._held.refusal_of(txn)
            known = known or NotAllowed(f"transaction {to_text(txn)} is not admitted")
            return _maybe_left_over(known, send)
        return None

    # --- transactions

    def _fast_path_in(self, send: TxnSend) -> TxnFastPath | None:
        """Where a send of a transaction is noted that need not be judged; None: it must."""
        fast_path = self._txn_fast_path_of(send.txn_id)
        return fast_path if fast_path is not None and fast_path.takes(send) else None

    def _txn_fast_path_of(self, txn: TxnId) -> TxnFastPath | None:
        fast_path = self._txn_fast_path
        # Transactions of one producer come in runs: the last one's fast path mostly fits.
        if fast_path is None or fast_path.segment_txn.txn != txn:
            if self._transactions is None:
                return None
            fast_path = self._txn_fast_path = self._transactions.fast_path(txn, self.dedup_name)
        return fast_path

    def _judged_in(self, txn: TxnId, send: Send) -> _Sent:
        """Judge a send of an admitted transaction."""
        transactions, highest = self._transactions, send.highest_sequence_id
        assert transactions is not None, "it has admitted the transaction"
        view = EntryView(UNPLACED, send.headers_and_payload)
        # Only the metadata is stored, so it must tell whose entry it is. The client for Go names
        # the transaction in the command alone: what it left out is written for it.
        if view.txn_id is None and view.readable:
            send.headers_and_payload = with_txn(send.headers_and_payload, txn)
        elif view.txn_id != txn:
            return _refused(send, _not_of(txn, view, send))
        counted: Sent | None = None
        # Earlier chunks have no sequence that counts; they are appended unjudged.
        if view.is_last_chunk:
            last = max(send.sequence_id, send.sequence_id if highest is None else highest)
            counted = Sent(self.dedup_name, send.sequence_id, last)
            verdict = transactions.judge(txn, counted)
            if verdict is TxnVerdict.DUPLICATE:
                return _Sent(highest, answer=Receipt(send.sequence_id, highest, DROPPED))
            if verdict is TxnVerdict.UNKNOWN:
                return _refused(send, _unknown(self.name, send))
        return _Sent(highest, segment_txn=transactions.appending(txn), counted=counted)

    def _is_held(self, send: Send) -> bool:
        """Whether a send waits: for its transaction, or behind one that does."""
        held = self._held
        # A send that `_judged` will refuse need not wait for its transaction.
        if held is None or (not held and (not self._ready or not send.checksum_ok)):
            return False
        if not held.takes(send):
            return False
        # It may have gone on at once: then nothing is held, and the next send goes the plain way.
        self._direct = self._direct and not held
        return True

    def _nothing_held(self) -> None:
        self._direct = self._ready and not self._stopped and self._send_limits is None
        self.changed.advance()

    def _not_appended(self, send: Send, noted: _Noted, error: MagnetarError) -> None:
        """Queue the failure: what is in flight of this producer is settled before it."""
        sent = _special(noted, send.sequence_id, send.highest_sequence_id)
        sent.error = error
        # An answer, not a failure: clients take TopicTerminated as final and keep their connection.
        if isinstance(error, ManagedLedgerSealed):
            sent.error = TopicTerminated(f"{self.name}: the topic was terminated")
        self._queue(self._resolved(), send.sequence_id, sent)
        if not isinstance(sent.error, TopicTerminated):
            self._stop_for(error)

    def _queue(
        self, future: asyncio.Future[Position], sequence: int | list[int], noted: _Noted
    ) -> None:
        self._pending.append((future, sequence, noted))
        # Whoever sent looks by itself at what is in flight now; nobody sent this one just now.
        if len(self._pending) == 1 and self._held is not None and self._held.is_releasing:
            self.changed.advance()

    def _resolved(self) -> asyncio.Future[Position]:
        """Stands in the queue for what needs no append."""
        future: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        future.set_result(DROPPED)
        return future

    # --- receipts

    @property
    def first_in_flight(self) -> asyncio.Future[Position] | None:
        """Receipts are due when this is done; None: nothing is in flight."""
        return self._pending[0][0] if self._pending else None

    @property
    def has_ended(self) -> bool:
        """Whether there will be no receipt any more."""
        # Stopped by its client: what is in flight is waited for. Stopped by a failure: it is not.
        return self._stopped and not self._receipts and (self._failed or not self.pending)

    def take_receipts(self) -> list[Receipt | ReceiptRun]:
        """Take all receipts that are due, in order; empty if there are none now."""
        self.settle()
        due, self._receipts = self._receipts, []
        if self._stopped and self.has_ended:
            self.changed.advance()
        return due

    def settle(self) -> None:
        """Take what is done from the front of what is in flight."""
        pending = self._pending
        while pending and pending[0][0].done():
            future, sequence_id, sent = pending.popleft()
            if isinstance(sequence_id, list):
                self._settle_run(future, sequence_id, sent)
                continue
            done = not future.cancelled() and future.exception() is None
            # The two plain kinds stand here in full, because this is once per message.
            if done and (sent is None or isinstance(sent, DedupFastPath)):
                if sent is not None:  # as `plain_persisted` does
                    sent.plain -= 1
                    if sequence_id > sent.persisted:
                        sent.persisted = sequence_id
                if not self._failed:
                    self._receipts.append(_new(Receipt, (sequence_id, None, future.result(), None)))
            # Of a transaction that is open: what was decided meanwhile needs more than a note.
            elif done and type(sent) is TxnFastPath and sent.segment_txn.decision is None:
                sent.runs.plain_stored(sequence_id)
                if not self._failed:
                    self._receipts.append(_new(Receipt, (sequence_id, None, future.result(), None)))
            else:
                position, error = _outcome_of(future)
                self._settle_special(position, error, sequence_id, _special(sent, sequence_id))

    def _settle_run(
        self, future: asyncio.Future[Position], sequence_ids: list[int], noted: _Noted
    ) -> None:
        first, error = _outcome_of(future)
        if error is None and noted is None:
            pass
        elif error is None and isinstance(noted, DedupFastPath):
            noted.plain_run_persisted(sequence_ids)
        # Of a transaction that is open, as `settle` says.
        elif error is None and type(noted) is TxnFastPath and noted.segment_txn.decision is None:
            noted.runs.plain_run_stored(sequence_ids)
        # Failed, or its transaction was decided meanwhile: each has an outcome of its own.
        else:
            for number, each in enumerate(sequence_ids):
                position = Position(first.ledger_id, first.entry_id + number)
                self._settle_special(position, error, each, _special(noted, each))
            return
        if not self._failed:
            self._receipts.append(ReceiptRun(sequence_ids, first))

    def _settle_special(
        self,
        position: Position,
        error: MagnetarError | None,
        sequence_id: int,
        sent: _Sent,
    ) -> None:
        # Whoever is owed the outcome learns it, also when no receipt follows (invariant 1).
        error = sent.error or error
        if sent.dedup is not None:
            settled = sent.dedup.persisted if error is None else sent.dedup.failed
            settled(self.dedup_name, sequence_id, is_last_chunk=sent.is_last_chunk)
        if sent.segment_txn is not None:
            assert self._transactions is not None, "it has admitted the transaction"
            self._transactions.settled(sent.segment_txn, sent.counted, stored=error is None)
        if sent.fast_path is not None:
            settle = (
                sent.fast_path.plain_persisted if error is None else sent.fast_path.plain_failed
            )
            settle(sequence_id)
        if sent.answer is not None:
            receipt = sent.answer
        elif error is None:
            receipt = Receipt(sequence_id, sent.highest_sequence_id, position)
        # Terminated: refused for good, but what was sent before it has its receipts.
        elif isinstance(error, TopicTerminated):
            receipt = Receipt(sequence_id, sent.highest_sequence_id, DROPPED, error)
        else:
            # Invariant 2: the client sends this one and all later ones again, on a new producer.
            self._failed = True
            self._stop_for(error)
        if not self._failed:
            self._receipts.append(receipt)

    # --- the end

    def _stop_for(self, error: MagnetarError) -> None:
        self.stop(error)
        # A full queue passes by itself: the topic stays as it is, and only this producer is closed.
        if not isinstance(error, TooManyRequests):
            self._trouble.advance()

    def stop(self, error: MagnetarError | None = None) -> None:
        """Take no more sends; receipts of what is in flight still come. The first reason stays."""
        # Invariant 5: stopped by the broker; at its client's wish they still go on.
        if error is not None and self._held is not None:
            self._held.clear()
        if not self._stopped:
            self._stopped, self._direct = True, False
            self.failure = error
            self.readiness.advance()
            self.changed.advance()

    async def close(self, seconds: float) -> None:
        """Stop, and wait until everything in flight is settled."""
        self.stop()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self.pending:
            left = max(deadline - loop.time(), 0)
            # What is in flight first: held sends join it behind, in their order.
            if self._pending:
                await asyncio.wait({self._pending[0][0]}, timeout=left)
            elif self._held is not None:
                await self._held.until_empty(left)
            self.settle()
            if self.pending and loop.time() >= deadline:
                raise DeadlineExceeded(f"{self.name}: appends take longer than {seconds} s")
        # The two point at each other: without this its memory, and that of its connection, would
        # wait for the garbage collector.
        self._held = None
        self.changed.advance()


def _special(sent: _Noted, sequence_id: int, highest_sequence_id: int | None = None) -> _Sent:
    """A send that does not go the plain way any more."""
    if isinstance(sent, _Sent):
        return sent
    if isinstance(sent, TxnFastPath):
        return _Sent(
            highest_sequence_id, segment_txn=sent.segment_txn, counted=sent.sent(sequence_id)
        )
    return _Sent(highest_sequence_id, fast_path=sent)


def _has_lie(run: SendRun) -> bool:
    """Whether one of them claims a number of messages that cannot be; as `send` judges it."""
    counts = run.counts
    # Nearly always: each claims one message, and no metadata says otherwise.
    if counts.count(1) == len(counts) and not may_have_batches(run.payloads):
        return False
    return any(
        wrong_count(Send(run.producer_id, 0, count, payload)) is not None
        for count, payload in zip(counts, run.payloads, strict=True)
    )


def _refused(send: Send, error: MagnetarError) -> _Sent:
    highest = send.highest_sequence_id
    return _Sent(highest, answer=Receipt(send.sequence_id, highest, DROPPED, error))


def _unknown(name: str, send: Send) -> StorageError:
    text = f"{name}: whether message {send.sequence_id} is stored is not known"
    return StorageError(text, hint="send it again later")


def _not_of(txn: TxnId, view: EntryView, send: Send) -> NotAllowed:
    """Why a message is refused whose metadata does not agree with its command."""
    named = view.txn_id
    said = "unreadable metadata" if named is None else f"{to_text(named)} in its metadata"
    text = f"message {send.sequence_id} has transaction {to_text(txn)} in its command and {said}"
    return NotAllowed(text, hint="name the same transaction in both, or in the command alone")


def _maybe_left_over(refusal: MagnetarError, send: Send) -> MagnetarError:
    """A refusal that says more if the message may have been meant as a plain one.

    It is not stored as one: a message of a transaction that its deadline has aborted looks the
    same, and nobody may ever see that.
    """
    is_named = EntryView(UNPLACED, send.headers_and_payload).txn_id is not None
    if is_named or refusal.hint != BEGIN_ANEW:
        return refusal
    return NotAllowed(refusal.args[0], hint=_LEFT_OVER)


def _hash_of(payload: bytes) -> int | None:
    """Where a message stands on the ring, as it or its key says; None: unknown, or a batch."""
    view = EntryView(UNPLACED, payload)
    metadata = view.metadata
    if metadata.HasField("ring_position"):
        return metadata.ring_position
    # Of an encoded key nobody says whether clients route by its text or by its bytes.
    if view.is_batch or not metadata.partition_key or metadata.partition_key_b64_encoded:
        return None
    return segment_hash(key_hash(metadata.partition_key))


def _outcome_of(future: asyncio.Future[Position]) -> tuple[Position, MagnetarError | None]:
    """Where an append went, and why it did not."""
    if future.cancelled():
        return DROPPED, StorageClosed("the append was cancelled")
    error = future.exception()
    if error is None:
        return future.result(), None
    if isinstance(error, MagnetarError):
        return DROPPED, error
    return DROPPED, StorageError(f"the append failed: {error!r}")
