"""The transactions of one topic, as the topic sees them.

Owns: `TopicTransactions`: how far consumers may read, which entries are for them, and where the
sequences of transactional sends count. Without `parts.transactions` there are no transactions.

Invariants:
1. A topic without aborted entries looks into none; one that has some looks into those at or below
   the last of them that name a transaction.
2. The last message is the last one that a consumer could get: below the ceiling, and not aborted.
3. What transactions store reaches the topic's dedup at their commit; until then it is unknown
   there, and after an abort it may be sent again.

Relies on: `txn.buffer` for all that concerns decisions and durability.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

from magnetar.broker.dedup import Dedup
from magnetar.broker.entries import EntryView
from magnetar.broker.lineage import Span, dedup_name
from magnetar.errors import MagnetarError
from magnetar.ledger.api import Entry
from magnetar.managed_ledger.managed_ledger import ManagedLedger
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.runtime.clock import Clock
from magnetar.txn.buffer import MetadataTransactionBuffer
from magnetar.txn.parts import Transactions
from magnetar.txn.records import State
from magnetar.txn.txn_dedup import Sent, TxnRuns
from magnetar.wire.messages import TxnId

READ_ENTRIES: Final = 500
READ_BYTES: Final = 4 * 1024 * 1024

_TXN_TAG: Final = b"\xb0\x01"
"""The bytes with which field 22 (txnid_least_bits, a number) begins in MessageMetadata."""


class TopicTransactions:
    """Made with its topic, right after the managed ledger was opened."""

    def __init__(
        self,
        name: TopicName,
        ledger: ManagedLedger,
        clock: Clock,
        transactions: Transactions | None,
    ) -> None:
        self._name = name
        self._ledger = ledger
        self._dedup: Dedup | None = None
        self.buffer: MetadataTransactionBuffer | None = None
        if transactions is not None:
            self.buffer = MetadataTransactionBuffer(
                str(name),
                ledger,
                transactions.store,
                transactions.decisions,
                epoch=ledger.epoch,
                clock=clock,
                sequences=self,
                shares_journal=transactions.shares_journal,
            )

    async def recover(self) -> None:
        """Nothing may be read before."""
        if self.buffer is not None:
            await self.buffer.recover()

    def loops(
        self, wake: Callable[[], None], lose: Callable[[MagnetarError], None]
    ) -> Iterator[Coroutine[Any, Any, None]]:
        """What its topic runs: `wake` when consumers may see more, `lose` if it cannot go on."""
        if self.buffer is not None:
            yield _follow_ceiling(self.buffer, wake)
            yield _follow_failure(self.buffer, lose)

    # --- what consumers may see

    def readable_end(self) -> Position:
        """The last position that consumers may see."""
        buffer = self.buffer
        return self._ledger.last_position() if buffer is None else buffer.ceiling()

    def is_visible(self, entry: Entry) -> bool:
        """Whether an entry up to `readable_end` is for consumers."""
        buffer = self.buffer
        if buffer is None or buffer.aborted_last is None or entry.position > buffer.aborted_last:
            return True
        txn = _txn_of(entry)
        return txn is None or buffer.is_visible(txn, entry.position)

    async def last_entry(self) -> Entry | None:
        """The last entry that is for consumers."""
        wanted = 1
        last = self._at_or_before(self.readable_end())
        while last is not None:
            first = Position(last.ledger_id, max(last.entry_id - wanted + 1, 0))
            visible = [each for each in await self._between(first, last) if self.is_visible(each)]
            if visible:
                return visible[-1]
            wanted = READ_ENTRIES  # behind many of a large transaction that was aborted
            last = self._at_or_before(Position(first.ledger_id, first.entry_id - 1))
        return None

    async def _between(self, first: Position, last: Position) -> list[Entry]:
        """Entries of one ledger."""
        found: list[Entry] = []
        while first <= last:
            count = last.entry_id - first.entry_id + 1
            part = await self._ledger.read(first, count, READ_BYTES)
            if not part or part[-1].position.ledger_id != last.ledger_id:
                break  # trimmed meanwhile
            found += [each for each in part if each.position <= last]
            first = _after(part[-1].position)
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
        bound = None if self.buffer is None else self.buffer.lowest_bound()
        if bound is None or other is None:
            return other if bound is None else bound
        return min(bound, other)

    async def trimmed(self) -> None:
        """Data has gone."""
        if self.buffer is not None:
            await self.buffer.trimmed(self._ledger.first_position())

    async def close(self) -> None:
        if self.buffer is not None:
            await self.buffer.close()

    async def delete(self) -> None:
        """With the topic, whose data is gone."""
        if self.buffer is not None:
            await self.buffer.close()
            await self.buffer.delete()

    # --- sequences

    def replayed(self, view: EntryView, name: str) -> State:
        """What the transaction of an entry is; COMMITTED also of one without a transaction."""
        txn = view.txn_id
        if self.buffer is None or txn is None:
            return "COMMITTED"
        state = self.buffer.state_of(txn, view.position)
        if state == "OPEN" and view.is_last_chunk:
            self.buffer.note(txn, Sent(name, view.sequence_id, view.highest_sequence_id))
        return state

    def count_in(self, dedup: Dedup | None) -> None:
        """The topic has dedup from now on, or none."""
        self._dedup = dedup
        if dedup is not None and self.buffer is not None:
            for name, stored in self.buffer.storing():
                dedup.began_in_txn(name, stored)

    def began(self, name: str, stored: TxnRuns) -> None:
        if self._dedup is not None:
            self._dedup.began_in_txn(name, stored)

    def ended(self, state: State, name: str, stored: TxnRuns) -> None:
        if self._dedup is not None:
            self._dedup.ended_in_txn(name, stored, committed=state == "COMMITTED")

    def late(self, state: State, sent: Sent) -> None:
        if self._dedup is not None:
            told = self._dedup.txn_committed if state == "COMMITTED" else self._dedup.txn_aborted
            told(sent.name, Span(sent.first, sent.last))

    async def stored_in(self, txns: set[TxnId], first: Position, end: Position) -> None:
        assert self.buffer is not None, "its buffer asks"
        while entries := await self._ledger.read(first, READ_ENTRIES, READ_BYTES):
            for entry in entries:
                if entry.position >= end:
                    return
                txn = _txn_of(entry)
                view = EntryView.of(entry)
                if txn is not None and txn in txns and view.is_last_chunk:
                    name = dedup_name(self._name, view.producer_name)
                    sent = Sent(name, view.sequence_id, view.highest_sequence_id)
                    self.buffer.note(txn, sent)
            first = _after(entries[-1].position)


async def _follow_ceiling(buffer: MetadataTransactionBuffer, wake: Callable[[], None]) -> None:
    seen = 0
    while True:
        seen = await buffer.moved.past(seen)
        wake()


async def _follow_failure(
    buffer: MetadataTransactionBuffer, lose: Callable[[MagnetarError], None]
) -> None:
    await buffer.failed.past(0)
    assert buffer.failure is not None, "that is what the signal says"
    lose(buffer.failure)


def _txn_of(entry: Entry) -> TxnId | None:
    """The transaction of an entry, without parsing those that cannot have one."""
    if entry.payload.find(_TXN_TAG) < 0:
        return None
    return EntryView.of(entry).txn_id


def _after(position: Position) -> Position:
    return Position(position.ledger_id, position.entry_id + 1)
