"""A segment whose messages are acknowledged one by one.

Owns: `QueueSegment`, for queue consumers and all consumers of regular topics, and
`SharedStreamSegment`, for a segment that several stream consumers share by entry buckets.

Invariants:
1. What the application has, or a transaction that is not decided has acknowledged, is not handed
   out again, whatever the broker delivers; what it gave back, or had for longer than
   `processing_timeout`, is asked for again.
2. No more is fetched while `unacked_max` entries are not settled.
3. A message that was delivered too often goes to the dead letters instead of the application, once
   however often it is given back or delivered meanwhile.
4. Where consumers share messages, one with a time of delivery is not handed out before it, by a
   broker without delayed delivery either; meanwhile it counts as not settled.
5. In a shared stream, a cumulative acknowledgement covers exactly what was handed out of this
   segment up to that turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, Final, Protocol

from magnetar.client.consume.segment.ack_outbox import AckTransaction
from magnetar.client.consume.segment.ack_state import (
    AckItem,
    IndividualAcks,
    SegmentMark,
    ack_item,
    all_of,
    bit_of,
    size_from,
)
from magnetar.client.consume.segment.acknowledged import NOTHING_TO_DO, Acknowledged
from magnetar.client.consume.segment.nacks import Deadlines
from magnetar.client.consume.segment.segment_consumer import (
    ParentConsumer,
    SegmentConsumer,
    SegmentSpec,
)
from magnetar.client.message.entry_rows import EntryRows
from magnetar.client.message.message import Message, MessageId
from magnetar.client.message.message_ids import wire_position
from magnetar.errors import DeadlineExceeded, RequestError
from magnetar.model.ids import Position
from magnetar.runtime.logs import logger

_LOG: Final = logger(__name__)

REDELIVERIES_PER_COMMAND: Final = 1000
EARLY_S: Final = 1.0
"""A message may be handed out so much before its time, as Pulsar does."""
_EVERYTHING: Final = 1 << 62


class DeadLetterBox(Protocol):
    """Takes messages that were delivered too often."""

    def wants(self, message: Message[Any], *, is_given_back: bool) -> bool:
        """Whether it was delivered too often."""
        ...

    def put(self, message: Message[Any], *, then: Callable[[], None]) -> None:
        """Store it elsewhere and acknowledge it, or give it back; in any case call `then`."""
        ...


class QueueSegment(SegmentConsumer):
    """One segment, each message on its own."""

    def __init__(
        self,
        parent: ParentConsumer,
        spec: SegmentSpec,
        *,
        dead_letters: DeadLetterBox | None = None,
        takes_redelivery_ids: bool = True,
    ) -> None:
        super().__init__(parent, spec)
        # What the application has, per entry; what is to come again, and when.
        self._acks = IndividualAcks()
        self._nacked = Deadlines()
        self._processing = Deadlines()
        self._has_deadlines = bool(self.settings.processing_timeout)
        self._held: dict[Position, int] = {}
        """How many messages of each entry the application has."""
        self._chunks: dict[Position, tuple[MessageId, ...]] = {}
        """The chunks of the large messages among them, by the entry of the last one."""
        # What does not reach the application: put aside, or before its time of delivery.
        self._dead_letters = dead_letters
        self._put_aside: set[MessageId] = set()
        """On their way to the dead letters."""
        self._takes_ids = takes_redelivery_ids
        self._early: list[tuple[float, int, Message[Any]]] = []
        """A heap of those that came before their time, and when that is."""
        self._early_count = 0

    # --- the application's side

    def ack(self, message_id: MessageId, chunk_ids: Sequence[MessageId] = ()) -> Acknowledged:
        """Acknowledge one message."""
        position, index = message_id.position, message_id.batch_index
        return self.ack_at(position, index, message_id.batch_size, chunk_ids)

    def ack_at(
        self, position: Position, index: int, size: int, chunk_ids: Sequence[MessageId]
    ) -> Acknowledged:
        """Acknowledge one message, by the parts of its id."""
        if self._acks.ack(position, index, size):
            self._settled_one(position)
        for each in chunk_ids:
            self._acks.ack(each.position, each.batch_index, each.batch_size)
        return self.acked()

    def ack_in(
        self,
        txn: AckTransaction,
        message_id: MessageId,
        chunk_ids: Sequence[MessageId] = (),
    ) -> Acknowledged:
        """Acknowledge one message in a transaction; an abort brings it back."""
        parts: list[AckItem] = []
        masks: list[int] = []
        # A large message is acknowledged with all its chunks: each is an entry.
        for each in chunk_ids or (message_id,):
            size = size_from(each.batch_index, each.batch_size) if each.batch_index >= 0 else 1
            left = all_of(size) & ~bit_of(each.batch_index)
            parts.append(AckItem(each.position, left, each.batch_size))
            masks.append(bit_of(each.batch_index))
        # First, because it raises if the transaction takes no more: then nothing has changed here.
        acked = self._acked_in(txn, parts, masks)
        self._settle(message_id.position, message_id.batch_index)
        self._now_pending(parts, masks)
        return acked

    def _acked_in(
        self, txn: AckTransaction, items: Sequence[AckItem], masks: Sequence[int]
    ) -> Acknowledged:
        """`masks`: the messages that are acknowledged, where the items have those that are not."""
        generation = self.generation

        def on_end(committed: bool) -> None:
            # After a seek nothing that was received before it counts.
            if generation != self.generation:
                return
            for item, mask in zip(items, masks, strict=True):
                missed = self._acks.decided(item.position, mask, committed=committed)
                # What the broker had is delivered again by itself.
                if missed or (not committed and acked.has_failed):
                    self._nacked.set(item.position, self.loop.time())
            self.news.advance()

        acked = self.acked_in(txn, items, cumulative=False, on_end=on_end)
        return acked

    def _now_pending(self, items: Sequence[AckItem], masks: Sequence[int]) -> None:
        for item, mask in zip(items, masks, strict=True):
            self._acks.ack_in_txn(item.position, mask, item.batch_size)

    def ack_rows(self, position: Position, mask: int, size: int) -> Acknowledged:
        """Acknowledge those messages of an entry that are set in `mask`."""
        self._settle_rows(position, mask)
        self._acks.ack_all(position, mask, size)
        return self.acked()

    def ack_rows_in(
        self, txn: AckTransaction, position: Position, mask: int, size: int
    ) -> Acknowledged:
        """Acknowledge messages of an entry in a transaction; an abort brings them back."""
        items, masks = [AckItem(position, all_of(size) & ~mask, size)], [mask]
        acked = self._acked_in(txn, items, masks)
        self._settle_rows(position, mask)
        self._now_pending(items, masks)
        return acked

    def _settle_rows(self, position: Position, mask: int) -> None:
        # Rows may be acknowledged twice: only those that the application has are counted off.
        left = self._held.get(position, 0) - self._acks.held_among(position, mask)
        if left > 0:
            self._held[position] = left
        else:
            self._forget(position)

    def ack_through(self, message_id: MessageId) -> Acknowledged:
        """Acknowledge everything that was handed out of this segment up to a message."""
        mark = SegmentMark(message_id.position, message_id.batch_index, message_id.batch_size)
        # Entries of which nothing is the application's any more, the chunks of large messages with
        # them.
        for position in self._acks.ack_through(mark):
            for each in self._chunks.get(position, ()):
                self._acks.ack(each.position, each.batch_index, each.batch_size)
            self._forget(position)
        return self.acked()

    def ack_through_in(self, txn: AckTransaction, message_id: MessageId) -> Acknowledged:
        """Acknowledge up to a message in a transaction; an abort brings everything back."""
        generation = self.generation

        def on_end(committed: bool) -> None:
            if generation != self.generation or self.has_ended:
                return
            if committed:
                self.ack_through(message_id)  # here it counts as acknowledged only from now on
            else:
                self._begin_anew()

        mark = SegmentMark(message_id.position, message_id.batch_index, message_id.batch_size)
        return self.acked_in(txn, [ack_item(mark)], cumulative=True, on_end=on_end)

    def has(self, message: Message[Any]) -> bool:
        """Whether the application has it, and has not settled it."""
        raw = message._raw_id
        is_had = self._acks.is_held(raw.position, raw.batch_index) and raw not in self._put_aside
        return is_had and message._generation == self.generation and not self.has_ended

    def nack(self, message: Message[Any]) -> None:
        """Have it delivered again after a while."""
        if not self.has(message):
            return  # it is given back, or settled, already
        # Invariant 3: given back for the last time, it is put aside at once and not delivered
        # again.
        if self._dead_letters is not None and self._dead_letters.wants(message, is_given_back=True):
            self._put(message, lambda: None)
            return
        self.give_back_later(message, self.settings.nack_delay.after(message.redelivery_count))

    def give_back_later(self, message: Message[Any], delay_s: float) -> None:
        """Have it delivered again after this time, and never send it to the dead letters."""
        at = self.loop.time() + delay_s
        for each in message._chunk_ids or (message._raw_id,):
            self._nacked.set(each.position, at)
        self._give_back(message)
        self.news.advance()

    async def seek(self, **target: Any) -> None:
        """Move the subscription; nothing that was received before counts any more."""
        if self._outbox.has_work:
            # Behind the seek, an acknowledgement from before it would be one of what comes again.
            await self._until_sent()
        await self.ask_again("SEEK", **target)
        self._begin_anew()

    async def _until_sent(self) -> None:
        timeout_s = self.connections.settings.operation_timeout
        try:
            async with asyncio.timeout(timeout_s):
                await self.acked()
        except TimeoutError as error:
            text = f"{self.wire_topic}: acknowledgements were not sent within {timeout_s} s"
            raise DeadlineExceeded(text) from error
        except RequestError as error:  # whoever acknowledged that was told
            _LOG.info("refused-before-seek", topic=self.wire_topic, reason=str(error))

    def _begin_anew(self) -> None:
        """Nothing that was received counts any more: the broker decides what comes."""
        # Acknowledgements of messages of the old generation do nothing from now on.
        self.generation += 1
        self._acks.forget()
        self._nacked.clear()
        self._processing.clear()
        self._held.clear()
        self._chunks.clear()
        self._early.clear()
        self.reached_end = self.end_is_final = False
        self.restart()

    # --- what is let in

    def admit(self, position: Position, size: int, unacked: int) -> int:
        return self._acks.admit(position, size, unacked)

    @property
    def takes_rows(self) -> bool:
        """Dead letters are chosen one by one."""
        return self._dead_letters is None

    def deliver(self, message: Message[Any] | EntryRows) -> None:
        if self._keeps_times and isinstance(message, Message) and message.deliver_at_ms is not None:
            # Invariant 4. It takes no permit meanwhile, but room among `unacked_max`.
            wait_s = (message.deliver_at_ms - self.connections.clock.now_ms()) / 1000
            if wait_s > EARLY_S:
                self._early_count += 1
                heappush(self._early, (self.loop.time() + wait_s, self._early_count, message))
                self.give_permits(1)
                self.news.advance()
                return
        self._deliver(message)

    @property
    def _keeps_times(self) -> bool:
        """Whether messages wait here for their time of delivery: not where there is an order.

        Other brokers keep the times themselves, by their own clocks.
        """
        return self._takes_ids and self._open is not None and self._open[0].is_magnetar

    def _deliver(self, message: Message[Any] | EntryRows) -> None:
        # Without dead letters there is nothing to look at; with them no rows come (`takes_rows`).
        if isinstance(message, EntryRows) or self._dead_letters is None:
            self.receive_queue.add(message)
        # Delivered again while it is on its way there (a lost connection, an early redelivery).
        elif message._raw_id in self._put_aside:
            self.give_permits(1)
        elif self._dead_letters.wants(message, is_given_back=False):
            self._put(message, lambda: self.give_permits(1))
        else:
            self.receive_queue.add(message)

    def _put(self, message: Message[Any], then: Callable[[], None]) -> None:
        """Put a message aside for the dead letters, once."""

        def is_over() -> None:
            self._put_aside.discard(message._raw_id)
            then()

        assert self._dead_letters is not None, "it wants the message"
        self._put_aside.add(message._raw_id)
        self._dead_letters.put(message, then=is_over)

    def discard(self, position: Position, index: int, size: int) -> None:
        self._acks.ack(position, index, size)
        self.news.advance()

    def give_up_chunks(self, ids: Sequence[MessageId]) -> bool:
        # Chunks are delivered again like messages that were given back: the rest may have come by
        # then.
        at = self.loop.time() + self.settings.nack_delay.after(0)
        for each in ids:
            self._nacked.set(each.position, at)
        self.news.advance()
        return True

    def _handed_out(self, message: Message[Any]) -> None:
        if message._chunk_ids:
            self._chunks[message._position] = message._chunk_ids
        self._count_held(message._position, 1, message.redelivery_count)

    def _handed_out_rows(self, rows: EntryRows, turn: int) -> None:
        self._count_held(rows.position, rows.num_rows, rows.redelivery_count)

    def _count_held(self, position: Position, count: int, redelivery_count: int) -> None:
        self._held[position] = self._held.get(position, 0) + count
        # Per entry, from its last message that was handed out.
        if self._has_deadlines:
            settings = self.settings
            extra = 0.0
            if settings.processing_delay is not None:
                extra = settings.processing_delay.after(redelivery_count)
            self._processing.set(position, self.loop.time() + settings.processing_timeout + extra)
            self.news.advance()

    def _dropped(self, messages: Sequence[Message[Any]]) -> None:
        for message in messages:
            self._acks.give_back(message._position, message._batch_index)

    def _settle(self, position: Position, index: int) -> None:
        if self._acks.is_held(position, index):
            self._settled_one(position)

    def _settled_one(self, position: Position) -> None:
        """The application has one message less of an entry."""
        left = self._held.get(position)
        if left is None:
            return
        if left > 1:
            self._held[position] = left - 1
        else:
            self._forget(position)

    def _forget(self, position: Position) -> None:
        """Nothing of an entry is the application's any more."""
        self._held.pop(position, None)
        if self._chunks:
            self._chunks.pop(position, None)
        if self._has_deadlines:
            self._processing.drop(position)
        if self._returned >= self._returned_enough:
            self.give_permits(0)  # there may be room for more

    def _give_back(self, message: Message[Any]) -> None:
        self._settle(message._position, message._batch_index)
        for each in message._chunk_ids or (message._raw_id,):
            self._acks.give_back(each.position, each.batch_index)

    # --- acknowledgements and redelivery

    @property
    def has_acks(self) -> bool:
        return self._acks.waiting > 0

    def take_acks(self) -> tuple[list[AckItem], bool]:
        return self._acks.take(_EVERYTHING), False

    def confirm_acks(self, items: Sequence[AckItem]) -> None:
        self._acks.confirm(items)

    @property
    def is_settled(self) -> bool:
        return not self._held

    @property
    def _may_ask(self) -> bool:
        return len(self._held) + len(self._early) < self.settings.unacked_max

    def _disconnected(self) -> None:
        super()._disconnected()
        self._dropped([message for _, _, message in self._early])
        self._early.clear()

    def _reconnected(self) -> None:
        self._acks.reconnected()
        # The broker delivers everything that is not acknowledged, the sooner the better.
        self._nacked.clear()

    def _next_due(self) -> float | None:
        # While it is released nothing is handed out, so nothing becomes due.
        early = self._early[0][0] if self._early and not self.is_releasing else None
        dues = (super()._next_due(), self._nacked.next_at, self._processing.next_at, early)
        return min((each for each in dues if each is not None), default=None)

    def _do_due(self, now: float) -> None:
        super()._do_due(now)
        # Three things become due: messages whose time has come, entries that were given back, and
        # entries that the application has had for too long.
        while self._early and self._early[0][0] <= now and not self.is_releasing:
            self._returned -= 1  # it is given once more when the message is handed out
            self._deliver(heappop(self._early)[2])
        positions = self._nacked.due(now)
        for position in self._processing.due(now):
            chunks = [each.position for each in self._chunks.get(position, ())]
            self._acks.give_back_all(position)
            self._forget(position)
            positions += chunks or [position]
        # Exclusive and Failover subscriptions cannot redeliver single entries: the broker would
        # deliver out of order. Everything that is not acknowledged comes again.
        if positions and not self._takes_ids:
            self.restart()
            return
        for start in range(0, len(positions), REDELIVERIES_PER_COMMAND):
            part = positions[start : start + REDELIVERIES_PER_COMMAND]
            ids = [wire_position(position) for position in part]
            self.tell("REDELIVER_UNACKNOWLEDGED_MESSAGES", message_ids=ids)


class SharedStreamSegment(QueueSegment):
    """A segment of a stream consumer, shared with others by entry buckets."""

    def __init__(self, parent: ParentConsumer, spec: SegmentSpec) -> None:
        super().__init__(parent, spec)
        self._order: deque[tuple[int, MessageId, tuple[MessageId, ...]]] = deque()

    @property
    def takes_rows(self) -> bool:
        """The order is kept message by message."""
        return False

    @property
    def _keeps_times(self) -> bool:
        return False

    def _handed_out(self, message: Message[Any]) -> None:
        super()._handed_out(message)
        self._order.append((message._turn, message._raw_id, message._chunk_ids))

    def ack_turns(self, turn: int, txn: AckTransaction | None) -> Acknowledged:
        """Acknowledge what was handed out up to this turn."""
        acked = NOTHING_TO_DO
        while self._order and self._order[0][0] <= turn:
            _, message_id, chunk_ids = self._order.popleft()
            if txn is None:
                acked = self.ack(message_id, chunk_ids)
            else:
                acked = self.ack_in(txn, message_id, chunk_ids)
        return acked

    def last_handed(self, turn: int) -> MessageId | None:
        """The last message that was handed out up to this turn and is not acknowledged."""
        found = None
        for at, message_id, _ in tuple(self._order):  # other threads ask too
            if at > turn:
                break
            found = message_id
        return found
