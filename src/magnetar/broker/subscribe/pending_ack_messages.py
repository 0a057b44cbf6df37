"""Messages of a subscription that transactions hold, and what that means for its consumers.

Owns: `PendingAckMessages`: the holds in memory, and their effect on cursor and dispatch.

Invariants:
1. A held message stays at its consumer, counted as unacknowledged; it waits for nobody, and goes to
   nobody if its consumer leaves or asks for it again.
2. A commit enters the cursor at once. After an abort every message that was held, and that is not
   acknowledged otherwise, is delivered again: where order is promised by a rewind, else alone.
3. A hold that ends as if it had never been brings back only what dispatch went by meanwhile.
4. A plain acknowledgement leaves out what is held. What an operator skips or lets expire is
   acknowledged all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from magnetar.broker.dispatch.dispatch_state import DispatchState
from magnetar.broker.dispatch.dispatcher import Dispatcher, ReadableTopic
from magnetar.broker.dispatch.membership import Membership
from magnetar.broker.entries import EntryView
from magnetar.broker.subscribe.ack import Ack
from magnetar.broker.subscribe.visible_cursor import VisibleCursor
from magnetar.errors import MagnetarError
from magnetar.managed_ledger.cursor import Cursor
from magnetar.model.ids import Position
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.txn.acks.pending_acks import WHOLE, Acked, EndedAcks, PendingAcks
from magnetar.wire.messages import TxnId

_LOG: Final = logger(__name__)


class PendingAckMessages:
    """The holds on one subscription."""

    def __init__(
        self,
        topic: ReadableTopic,
        cursor: Cursor,
        pending: PendingAcks,
        opened: VisibleCursor,
        membership: Membership,
        dispatcher: Dispatcher,
        *,
        wake: Signal,
        tasks: Service,
    ) -> None:
        self.pending = pending
        self.membership = membership
        self._topic = topic
        self._cursor = cursor
        self._opened = opened
        self._dispatcher = dispatcher
        self._wake = wake
        self._tasks = tasks
        self._consumers: dict[Position, int] = {}
        """Who has acknowledged an entry: nearly always its holder, which is found without a search.
        """

    # --- holding

    def hold(
        self, txn: TxnId, acks: Sequence[Acked], cumulative: bool, consumer: int | None = None
    ) -> None:
        """Messages that were judged to be free are held from now on; by that consumer's wish."""
        self.pending.add(txn, acks, cumulative)
        state, opened = self.membership.state, self._opened
        if state is None:
            return
        for position, messages, _ in acks:
            if consumer is not None and not cumulative:
                self._consumers[position] = consumer
            # It waited for redelivery. Noted, because an abort must bring it back to a queue it was
            # taken from.
            is_withheld = messages == WHOLE or opened.is_withheld(position)
            if is_withheld and state.on_withheld(position):
                opened.note_passed(position)

    def release(self, txn: TxnId, acks: Sequence[Acked], cumulative: bool) -> None:
        """End a hold as if it had never been."""
        self.pending.drop(txn, acks, cumulative)
        through = acks[-1] if cumulative else None
        # Nobody ends what never was: entries that stay unacknowledged would be kept for good.
        for position, _, _ in acks:
            self._consumers.pop(position, None)
        # A failed write: only what dispatch would have handed out meanwhile is missing (invariant
        # 3).
        missed = self._passed(EndedAcks(() if cumulative else tuple(acks), through))
        if missed:
            self._deliver_again(missed, rewind=cumulative)

    def clear(self) -> list[TxnId]:
        """A seek: nothing is held; who held something."""
        self._consumers.clear()
        self._opened.passed.clear()
        return self.pending.clear()

    # --- the end of holding

    def commit(self, ended: EndedAcks) -> None:
        """What a transaction held is acknowledged."""
        # Only to forget them: what is acknowledged is not offered again.
        self._passed(ended)
        cursor, state = self._cursor, self.membership.state
        for ack in ended.entries:
            position = ack.position
            consumer = self._consumers.pop(position, None)
            is_whole = ack.messages == WHOLE
            cursor.ack(position, 0 if is_whole else ack.unacked)
            if state is not None:
                acked = is_whole or cursor.is_acked(position)
                left = None if acked else cursor.unacked_indexes(position)
                # Whoever has it: the consumer that acknowledged may be gone, and the entry at
                # another one.
                state.on_ack(consumer, position, (left or 0).bit_count())
        if ended.through is not None:
            cursor.ack_cumulative(ended.through.position, ended.through.unacked)
            if state is not None:
                state.on_acked_through(cursor.mark_delete)
        self._wake.advance()

    def abort(self, ended: EndedAcks) -> None:
        """What a transaction held is to be delivered again."""
        positions = {each.position for each in ended.entries} | self._passed(ended)
        for each in ended.entries:
            self._consumers.pop(each.position, None)
        state = self.membership.state
        # Where everything is read again that comes once, behind the last slice of the end.
        if ended.is_all or (state is not None and not state.type.takes_cumulative_acks):
            self._deliver_again(positions, rewind=ended.through is not None)

    def _passed(self, ended: EndedAcks) -> set[Position]:
        """Entries of these that dispatch went by because they were held."""
        if not self._opened.passed:
            return set()
        positions = {each.position for each in ended.entries}
        if ended.through is None:
            missed = positions & self._opened.passed
        else:
            # The entry at or below the end of a cumulative hold stands for all that were skipped
            # with it.
            last = ended.through.position
            missed = {each for each in self._opened.passed if each in positions or each <= last}
        self._opened.passed -= missed
        return missed

    # --- delivering again

    def _deliver_again(self, positions: set[Position], *, rewind: bool) -> None:
        """Deliver released messages; where order is promised, all from the first open one."""
        state = self.membership.state
        if state is None:
            return  # the first consumer reads everything
        # Single entries would come behind later ones: the whole is read again, in order.
        if rewind or state.type.takes_cumulative_acks:
            self._dispatcher.rewind_soon()
            return
        unknown = state.on_returned([each for each in sorted(positions) if self._is_missing(each)])
        # Key_Shared, at nobody: the queue is by hash, which only the stored entry tells.
        if unknown:
            self._tasks.spawn(self._return(state, state.rewinds, unknown), "return of messages")
        self._wake.advance()

    def _is_missing(self, position: Position) -> bool:
        """Open again, and dispatch will not come to it by itself."""
        # Dispatch comes to it by itself, or nothing is left to deliver.
        if position >= self._cursor.read_position or self._cursor.is_acked(position):
            return False
        if self._dispatcher.is_delayed(position):
            return False
        return not self._opened.is_withheld(position)

    async def _return(self, state: DispatchState, rewinds: int, positions: list[Position]) -> None:
        """Entries at nobody, of which the hash must be read (Key_Shared)."""
        for position in positions:
            try:
                entries = await self._topic.ledger.read(position, 1)
            except MagnetarError as error:
                _LOG.warning("message-not-returned", position=str(position), error=str(error))
                self._dispatcher.rewind()  # dispatch meets the same error and says so
                return
            if self.membership.state is not state or state.rewinds != rewinds:
                return  # everything is read again anyhow
            # Judged again after the read: it may have been acknowledged, or held by another
            # transaction.
            if entries and entries[0].position == position and self._is_missing(position):
                state.on_returned_entry(EntryView.of(entries[0]))
        self._wake.advance()

    # --- plain acknowledgements

    def plain_parts(self, acks: Sequence[Ack]) -> list[Ack]:
        """What is left of plain acknowledgements."""
        parts = [(each.position, self.pending.plain_part(*each)) for each in acks]
        return [Ack(position, unacked) for position, unacked in parts if unacked is not None]

    def ack_through(self, ack: Ack) -> None:
        """Acknowledge everything up to an entry but what is held."""
        cursor = self._cursor
        if not self.pending:
            cursor.ack_cumulative(*ack)
            return
        # A cumulative hold: all up to it belongs to the transaction, so begin at its end.
        start = self.pending.through()
        first = self.pending.first_entry()
        if start is None and (first is None or first > ack.position):
            cursor.ack_cumulative(*ack)
            return
        start = cursor.mark_delete if start is None else max(start, cursor.mark_delete)
        # Between the holds as a whole. At either end, and of batches that are held in part, some
        # messages may be left: those one by one.
        cursor.ack_all_but(self.pending.entries, start.next, ack.position.previous)
        inner = [start, *(each for each in self.pending.batches if each > start)]
        parts = [Ack(each) for each in inner if each < ack.position]
        for part in self.plain_parts([*parts, ack]):
            cursor.ack(*part)
