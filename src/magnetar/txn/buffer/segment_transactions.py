"""The transactions that are undecided in one segment, whatever their kind.

Owns: `SegmentTransactions`, which both buffers are: who writes, what is stored of whom, and what
that holds back. How a transaction is admitted, and what its end does, is each buffer's own.

Invariants:
1. The maxReadPosition is below the bound of every work, and "nothing" until the gate is open.
2. An append of a transaction stands at or above its bound.
3. What becomes durable after the end of its transaction counts as that end says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from magnetar.errors import InvariantBroken, NotAllowed
from magnetar.managed_ledger.managed_ledger import ManagedLedger
from magnetar.model.ids import Position
from magnetar.txn.buffer.txn_dedup import Sent, TxnRuns, TxnVerdict
from magnetar.txn.buffer.txn_work import SegmentTransaction, Sequences, TxnFastPath
from magnetar.txn.buffer.visibility import Visibility
from magnetar.txn.ids import to_text
from magnetar.txn.records import State
from magnetar.wire.messages import TxnId

BEGIN_ANEW: Final = "begin a new transaction"
"""What helps if one is over."""

OneWork = TypeVar("OneWork", bound=SegmentTransaction)


class SegmentTransactions(Generic[OneWork]):
    """The part that is the same of a buffer of either kind."""

    def __init__(self, segment: str, ledger: ManagedLedger, sequences: Sequences) -> None:
        self.ends: Counter[State] = Counter()
        """How many transactions ended here since it was loaded, by how."""
        self._segment = segment
        self._ledger = ledger
        self._counting = sequences
        self._visibility = Visibility()
        self._works: dict[TxnId, OneWork] = {}

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
        return len(self._works)

    def tracks(self, txn: TxnId) -> bool:
        """Whether it writes, or has written, here, and its end is not applied yet."""
        return txn in self._works

    # --- sends

    def note(self, txn: TxnId, sent: Sent) -> None:
        """A former owner stored this for a transaction that is undecided."""
        work = self._works.get(txn)
        if work is not None:
            work.sequences.note(sent)

    def storing(self) -> Iterator[tuple[str, TxnRuns]]:
        """What each producer has stored in each transaction that is undecided."""
        for work in self._works.values():
            yield from work.sequences

    def is_admitted(self, txn: TxnId) -> bool:
        """Whether its next message may be appended at once."""
        work = self._works.get(txn)
        return work is not None and work.is_admitted and work.decision is None

    def judge(self, txn: TxnId, sent: Sent) -> TxnVerdict:
        """Whether an admitted transaction has this message already; STORE: `appending` follows."""
        return self._admitted(txn).sequences.judge(sent)

    def appending(self, txn: TxnId) -> OneWork:
        """An admitted transaction's message is appended now, without an await in between."""
        work = self._admitted(txn)
        work.has_entries = True
        floor = self._ledger.next_append_floor()
        if floor < work.bound:
            raise InvariantBroken(f"{to_text(txn)} appends at {floor}, below {work.bound}")
        return work

    def fast_path(self, txn: TxnId, name: str) -> TxnFastPath | None:
        """Where plain sends of an admitted transaction may be noted; None: it is not admitted."""
        if not self.is_admitted(txn):
            return None
        fast_paths = self._admitted(txn).fast_paths
        if name not in fast_paths:
            fast_paths[name] = TxnFastPath(self.appending(txn), name)
        return fast_paths[name]

    def settled(self, work: OneWork, sent: Sent | None, *, stored: bool) -> None:
        """What became of an append; `sent` is None if its sequence does not count."""
        if sent is None:
            return
        work.sequences.settled(sent, stored=stored)
        if stored and work.decision is not None and self._works.get(work.txn) is not work:
            self._counting.late(work.decision, sent)

    # --- for the buffers

    def _admitted(self, txn: TxnId) -> OneWork:
        """One that `is_admitted`."""
        return self._works[txn]

    def _count_end(self, work: OneWork, state: State) -> None:
        """Its sequences count, or do not, from now on."""
        self.ends[state] += 1
        for name, runs in work.sequences:
            self._counting.ended(state, name, runs)

    def _refused(self, txn: TxnId, why: str) -> NotAllowed:
        text = f"transaction {to_text(txn)} may not write to {self._segment}: {why}"
        return NotAllowed(text, hint="abort it, and begin a new transaction")

    def _unloading(self) -> NotAllowed:
        text = f"{self._segment} is being unloaded"
        return NotAllowed(text, hint="abort the transaction, look the topic up again and retry")
