"""The transactions that are undecided in one segment, whatever their kind.

Owns: `SegmentTransactions`, which both buffers are: who writes, what is stored of whom, and what
that holds back; `SegmentTransaction` and `PinnedTransaction`, one of them; `TxnFastPath`, the plain
sends of one producer in it. How a transaction is admitted, and what its end does, is each
buffer's own.

Invariants:
1. The maxReadPosition is below the bound of every transaction here, and "nothing" until the gate
   is open.
2. An append of a transaction stands at or above its bound.
3. What becomes durable after the end of its transaction counts as that end says.
4. What a fast path takes is certainly new in its transaction, and certainly carries its id;
   whatever it does not take is judged by the buffer. It takes nothing of a transaction that is not
   admitted, or decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, Generic, Protocol, TypeVar

from magnetar.errors import InvariantBroken, NotAllowed
from magnetar.managed_ledger.managed_ledger import ManagedLedger
from magnetar.model.ids import Position
from magnetar.runtime.signal import Signal
from magnetar.txn.buffer.txn_dedup import (
    Sent,
    SequenceNews,
    TxnRuns,
    TxnSequences,
    TxnVerdict,
)
from magnetar.txn.buffer.visibility import Visibility
from magnetar.txn.ids import to_text
from magnetar.txn.records import State
from magnetar.txn.store import StoredOp
from magnetar.wire.messages import SendRun, TxnId, TxnSend, metadata_ends_with, txn_trailer

Answered = Callable[[TxnId, NotAllowed | None], None]
"""Told whether a transaction may write; from no task of its own, so that it must not raise."""


class StoredEntries(Protocol):
    """The log, which alone tells what a former owner stored of transactions."""

    async def stored_in(self, txns: set[TxnId], first: Position, end: Position) -> None:
        """Call `note` for each entry of these transactions in [first, end)."""
        ...


class SegmentTransaction:
    """One transaction in one segment, whatever its kind."""

    __slots__ = (
        "bound",
        "decision",
        "fast_paths",
        "has_entries",
        "is_admitted",
        "sequences",
        "txn",
    )

    def __init__(self, txn: TxnId, bound: Position, sequences: TxnSequences) -> None:
        self.txn = txn
        self.bound = bound
        """None of its entries stands below."""
        self.has_entries = False
        """Some were handed to the log, by this owner or a former one."""
        self.sequences = sequences
        self.fast_paths: dict[str, TxnFastPath] = {}
        """By the name of the producer."""
        # The 'fence': once it is decided nothing more is appended, admitted or not.
        self.decision: State | None = None
        self.is_admitted = False


class PinnedTransaction(SegmentTransaction):
    """One that a pin holds: its end is known from its header alone."""

    __slots__ = ("is_admitting", "is_recovered", "op", "waiting")

    def __init__(self, txn: TxnId, bound: Position, sequences: TxnSequences) -> None:
        super().__init__(txn, bound, sequences)
        self.op: StoredOp | None = None
        """Its pin, once that is durable."""
        # Found by `recover`: a former owner may have stored entries of it,
        # unknown until the log is read.
        self.is_recovered = False
        self.is_admitting = False
        self.waiting: list[Answered] = []
        """Called when the attempt to admit it is over."""


class TxnFastPath:
    """The sends of one producer in one transaction.

    One message, above all before it, with the transaction as the last field of its metadata: that
    one is certainly new and certainly the transaction's, and is noted here without being judged.
    """

    __slots__ = ("name", "runs", "segment_txn", "trailer")

    def __init__(self, segment_txn: SegmentTransaction, name: str) -> None:
        self.segment_txn = segment_txn
        self.name = name
        self.runs = segment_txn.sequences.of(name)
        # Compared with the last bytes of the metadata: nothing is parsed for a plain send.
        self.trailer = txn_trailer(segment_txn.txn)

    def takes(self, send: TxnSend) -> bool:
        """Whether it is so; then it is in flight, and `settled` is owed."""
        segment_txn, runs, sequence_id = self.segment_txn, self.runs, send.sequence_id
        # At or below `pushed` it may be a resend: `judge` knows what is stored.
        if (
            sequence_id <= runs.pushed
            or segment_txn.decision is not None
            or not segment_txn.is_admitted
        ):
            return False
        # Only the id in the entry tells later whose it is: the slow way
        # parses, and writes one that is missing.
        if not send.metadata_ends_with(self.trailer):
            return False
        runs.pushed = sequence_id
        runs.plain += 1
        return True

    def fits(self, run: SendRun) -> bool:
        """Whether all sends of a run are so."""
        segment_txn, trailer = self.segment_txn, self.trailer
        return (
            run.sequence_ids[0] > self.runs.pushed
            and segment_txn.decision is None
            and segment_txn.is_admitted
            and all(metadata_ends_with(each, trailer) for each in run.payloads)
        )

    def push(self, sequence_ids: list[int]) -> None:
        """Note a run that `fits`: it is in flight now, and `settled` is owed for each."""
        self.runs.pushed = sequence_ids[-1]
        self.runs.plain += len(sequence_ids)

    def sent(self, sequence_id: int) -> Sent:
        """A send that does not go this way any more."""
        self.runs.plain -= 1
        return Sent(self.name, sequence_id, sequence_id)


BEGIN_ANEW: Final = "begin a new transaction"
"""What helps if one is over."""

OneTransaction = TypeVar("OneTransaction", bound=SegmentTransaction)


class SegmentTransactions(Generic[OneTransaction]):
    """The part that is the same of a buffer of either kind."""

    def __init__(
        self,
        segment: str,
        ledger: ManagedLedger,
        *,
        news: SequenceNews,
        stored: StoredEntries,
        moved: Signal,
    ) -> None:
        self.moved = moved
        """Advances when the maxReadPosition has moved for another reason than an append, and when
        there are news of sequences: the topic follows it."""
        self.ends: Counter[State] = Counter()
        """How many transactions ended here since it was loaded, by how."""
        self._segment = segment
        self._ledger = ledger
        self._sequence_news = news
        self._stored_entries = stored
        # The same transactions twice, by id and by bound: they come and go
        # in one step (invariant 1).
        self._visibility = Visibility()
        self._tracked: dict[TxnId, OneTransaction] = {}

    # --- what is held back

    def max_read_position(self) -> Position:
        """The last position that consumers may see, as far as these transactions go."""
        return self._visibility.max_read_position(self._ledger.last_position())

    def lowest_bound(self) -> Position | None:
        """Nothing at or above it may be trimmed; None: no transaction is undecided."""
        return self._visibility.lowest_bound()

    def blocker(self) -> TxnId | None:
        """The transaction that holds the maxReadPosition."""
        return self._visibility.blocker()

    @property
    def undecided(self) -> int:
        """How many transactions hold or may hold the maxReadPosition."""
        return len(self._tracked)

    @property
    def undecided_txns(self) -> list[TxnId]:
        """The transactions that are undecided here, or whose end is being carried out."""
        return list(self._tracked)

    def tracks(self, txn: TxnId) -> bool:
        """Whether it writes, or has written, here, and its end is not applied yet."""
        return txn in self._tracked

    # --- sends

    def note(self, txn: TxnId, sent: Sent) -> None:
        """A former owner stored this for a transaction that is undecided."""
        segment_txn = self._tracked.get(txn)
        # None: it has ended since the reading of the log began.
        if segment_txn is not None:
            segment_txn.sequences.note(sent)

    def storing(self) -> Iterator[tuple[str, TxnRuns]]:
        """What each producer has stored in each transaction that is undecided."""
        for segment_txn in self._tracked.values():
            yield from segment_txn.sequences

    def is_admitted(self, txn: TxnId) -> bool:
        """Whether its next message may be appended at once."""
        segment_txn = self._tracked.get(txn)
        return segment_txn is not None and segment_txn.is_admitted and segment_txn.decision is None

    def judge(self, txn: TxnId, sent: Sent) -> TxnVerdict:
        """Whether an admitted transaction has this message already; STORE: `appending` follows."""
        return self._admitted(txn).sequences.judge(sent)

    def appending(self, txn: TxnId) -> OneTransaction:
        """An admitted transaction's message is appended now, without an await in between."""
        segment_txn = self._admitted(txn)
        # Before the append, and for good: one that fails may be in the log all the same,
        # and an abort has to hide it.
        segment_txn.has_entries = True
        floor = self._ledger.next_append_floor()
        # Below its bound consumers may have read on by now ('read committed').
        if floor < segment_txn.bound:
            raise InvariantBroken(f"{to_text(txn)} appends at {floor}, below {segment_txn.bound}")
        return segment_txn

    def fast_path(self, txn: TxnId, name: str) -> TxnFastPath | None:
        """Where plain sends of an admitted transaction may be noted; None: it is not admitted."""
        if not self.is_admitted(txn):
            return None
        fast_paths = self._admitted(txn).fast_paths
        # `appending` once for all that go this way: what it notes stays, and the floor only rises.
        if name not in fast_paths:
            fast_paths[name] = TxnFastPath(self.appending(txn), name)
        return fast_paths[name]

    def settled(self, segment_txn: OneTransaction, sent: Sent | None, *, stored: bool) -> None:
        """What became of an append; `sent` is None if its sequence does not count."""
        # A chunk before the last one: only that carries the sequence.
        if sent is None:
            return
        segment_txn.sequences.settled(sent, stored=stored)
        # Durable after the end was counted, without this one: it is told alone (invariant 3).
        if (
            stored
            and segment_txn.decision is not None
            and self._tracked.get(segment_txn.txn) is not segment_txn
        ):
            self._sequence_news.late(segment_txn.decision, sent)
            self.moved.advance()

    # --- for the buffers

    def _admitted(self, txn: TxnId) -> OneTransaction:
        """One that `is_admitted`."""
        return self._tracked[txn]

    def _count_end(self, segment_txn: OneTransaction, state: State) -> None:
        """Count the sequences of a transaction, or forget them, as its end says."""
        self.ends[state] += 1
        for name, runs in segment_txn.sequences:
            self._sequence_news.ended(state, name, runs)

    def _refused(self, txn: TxnId, why: str) -> NotAllowed:
        text = f"transaction {to_text(txn)} may not write to {self._segment}: {why}"
        return NotAllowed(text, hint="abort it, and begin a new transaction")

    def _unloading(self) -> NotAllowed:
        text = f"{self._segment} is being unloaded"
        return NotAllowed(text, hint="abort the transaction, look the topic up again and retry")
