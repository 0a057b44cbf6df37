"""One transaction in one segment, and the sends of one producer in it.

Owns: `SegmentTransaction`, `PinnedTransaction` and `TxnFastPath`, and what a buffer tells:
`Answered` and `Sequences`.

Invariants:
1. What a fast path takes is certainly new in its transaction, and certainly carries its id;
   whatever it does not take is judged by the buffer.
2. A fast path takes nothing of a transaction that is not admitted, or decided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from magnetar.errors import NotAllowed
from magnetar.model.ids import Position
from magnetar.txn.buffer.txn_dedup import Sent, TxnRuns, TxnSequences
from magnetar.txn.records import State
from magnetar.txn.store import StoredOp
from magnetar.wire.messages import TxnId, TxnSend, txn_trailer

Answered = Callable[[TxnId, NotAllowed | None], None]
"""Told whether a transaction may write; from no task of its own, so that it must not raise."""


class Sequences(Protocol):
    """Where the sequences of transactions count for dedup, and how they get there."""

    def began(self, name: str, stored: TxnRuns) -> None:
        """A producer stores in a transaction that is not decided: so much, and what is to come."""
        ...

    def ended(self, state: State, name: str, stored: TxnRuns) -> None:
        """What it stored counts from now on (COMMITTED) or is forgotten."""
        ...

    def late(self, state: State, sent: Sent) -> None:
        """The same for what became durable after the end."""
        ...

    async def stored_in(self, txns: set[TxnId], first: Position, end: Position) -> None:
        """Call `note` for each entry of these in [first, end): of what a former owner stored."""
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
        self.decision: State | None = None
        self.is_admitted = False


class PinnedTransaction(SegmentTransaction):
    """One that a pin holds: its end is known from its header alone."""

    __slots__ = ("is_admitting", "is_recovered", "op", "waiting")

    def __init__(self, txn: TxnId, bound: Position, sequences: TxnSequences) -> None:
        super().__init__(txn, bound, sequences)
        self.op: StoredOp | None = None
        """Its pin, once that is durable."""
        self.is_recovered = False
        self.is_admitting = False
        self.waiting: list[Answered] = []
        """Called when the attempt to admit it is over."""


class TxnFastPath:
    """The sends of one producer in one transaction.

    One message, above all before it, with the transaction as the last field of its metadata: that
    one is certainly new and certainly the transaction's, and is noted here without being judged.
    """

    __slots__ = ("name", "runs", "trailer", "work")

    def __init__(self, work: SegmentTransaction, name: str) -> None:
        self.work = work
        self.name = name
        self.runs = work.sequences.of(name)
        self.trailer = txn_trailer(work.txn)

    def takes(self, send: TxnSend) -> bool:
        """Whether it is so; then it is in flight, and `settled` is owed."""
        work, runs, sequence_id = self.work, self.runs, send.sequence_id
        if sequence_id <= runs.pushed or work.decision is not None or not work.is_admitted:
            return False
        if not send.metadata_ends_with(self.trailer):
            return False
        runs.pushed = sequence_id
        runs.plain += 1
        return True

    def sent(self, sequence_id: int) -> Sent:
        """A send that does not go this way any more."""
        self.runs.plain -= 1
        return Sent(self.name, sequence_id, sequence_id)
