"""A segment whose messages are acknowledged in order, all up to one.

Owns: `StreamSegment`, an exclusive consumer of a segment; `ReaderSegment`, one that keeps no
subscription: it begins behind a position, and remembers how far it was read.

Invariants:
1. Messages are handed out in the order of the segment, each once in the life of this object: what a
   new connection delivers again is skipped. Only `rewind` brings back what is not acknowledged.
2. A cumulative acknowledgement in a transaction counts as acknowledged here once the transaction is
   committed. If it is aborted, everything after the last acknowledgement is delivered again, and
   what the application still has of it cannot be acknowledged in another transaction.
3. A reader's position is that of the last message that the application took. A reader that began at
   the latest message has a position of its own before it is subscribed.
4. No more is fetched while `unacked_max` entries are not acknowledged.
5. What a reader handed out is acknowledged once none of its own messages waits in the receive
   queue, however many of other segments do: the broker tells the end of a segment only then.
6. A reader that is owed all messages behind a place does not begin behind a gap unless it was told
   that it may (`fail_on_data_loss`): it asks before each subscription, where a broker can say it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from magnetar.client.connection.connection import CONSUMER, BrokerConnection
from magnetar.client.connection.server_errors import raise_refusal
from magnetar.client.consume.segment.ack_outbox import AckTransaction
from magnetar.client.consume.segment.ack_state import (
    BEFORE_ALL,
    WHOLE,
    AckItem,
    CumulativeAcks,
    HandOffs,
    SegmentMark,
    ack_item,
)
from magnetar.client.consume.segment.acknowledged import NOTHING_TO_DO, Acknowledged
from magnetar.client.consume.segment.segment_consumer import (
    ParentConsumer,
    SegmentConsumer,
    SegmentSpec,
)
from magnetar.client.message.entry_rows import EntryRows
from magnetar.client.message.message import Message, MessageId
from magnetar.client.message.message_ids import id_from, wire_id
from magnetar.errors import DataLost, MagnetarError, TopicNotFound
from magnetar.model.ids import EARLIEST, LATEST, Position
from magnetar.model.ranges import ORIGIN, RangePosition
from magnetar.runtime.logs import logger
from magnetar.wire.messages import Command

_LOG: Final = logger(__name__)


class StreamSegment(SegmentConsumer):
    """One segment, in order."""

    def __init__(
        self, parent: ParentConsumer, spec: SegmentSpec, start: SegmentMark = BEFORE_ALL
    ) -> None:
        super().__init__(parent, spec)
        self._acks = CumulativeAcks(start)
        self._hand_offs = HandOffs()
        self._in_transactions: list[SegmentMark] = []

    # --- the application's side

    def ack_turns(self, turn: int, txn: AckTransaction | None) -> Acknowledged:
        """Acknowledge what was handed out up to this turn."""
        mark = self._hand_offs.through(turn)
        if mark is None:
            return NOTHING_TO_DO
        return self.ack_through(mark) if txn is None else self.ack_through_in(txn, mark)

    def ack_through(self, mark: SegmentMark) -> Acknowledged:
        """Acknowledge everything up to a message."""
        # Acknowledged before, and the broker has it: there is nothing to wait for.
        if not self._acks.ack_through(mark) and not self._outbox.is_waited_for:
            return NOTHING_TO_DO
        self.give_permits(0)  # there may be room for more
        return self.acked()

    def ack_through_in(self, txn: AckTransaction, mark: SegmentMark) -> Acknowledged:
        """Acknowledge everything up to a message in a transaction."""
        # Another transaction has acknowledged up to here or further, and may still be aborted: then
        # its abort brings everything back.
        latest = max([self._acks.acked_through, *self._in_transactions], key=lambda m: m.place)
        if mark.place <= latest.place:
            return NOTHING_TO_DO
        generation = self.generation

        def on_end(committed: bool) -> None:
            if mark in self._in_transactions:
                self._in_transactions.remove(mark)
            if committed:
                self._acks.confirmed_elsewhere(mark)
                self.news.advance()
            # Invariant 2: the first abort brings everything back; a later one finds it on its way.
            elif generation == self.generation:
                self.rewind()

        self._in_transactions.append(mark)
        try:
            acked = self.acked_in(txn, [ack_item(mark)], cumulative=True, on_end=on_end)
        except MagnetarError:
            self._in_transactions.remove(mark)
            raise
        self._acks.settle_through(mark)
        self.give_permits(0)
        return acked

    def last_handed(self, turn: int) -> MessageId | None:
        """The last message that was handed out up to this turn and is not acknowledged."""
        mark = self._hand_offs.last_before(turn)
        return None if mark is None else mark_id(mark)

    def rewind(self) -> None:
        """Have everything delivered again that is not acknowledged."""
        self.generation += 1
        self._acks.rewind()
        self._hand_offs.clear()
        self.restart()

    # --- what is let in

    def admit(self, position: Position, size: int, unacked: int) -> int:
        return self._acks.arrived(position, size, unacked)

    def discard(self, position: Position, index: int, size: int) -> None:
        """Do nothing: the next cumulative acknowledgement covers it."""

    def give_up_chunks(self, ids: Sequence[MessageId]) -> bool:
        """Later messages were handed out: what comes before them does not come again."""
        return False

    def _handed_out(self, message: Message[Any]) -> None:
        mark = SegmentMark(message._position, message._batch_index, message._batch_size)
        self._acks.handed(mark)
        self._hand_offs.add(message._turn, mark)

    def _handed_out_rows(self, rows: EntryRows, turn: int) -> None:
        mark = _mark(rows.last_id)
        self._acks.handed(mark)
        self._hand_offs.add(turn, mark)

    def _dropped(self, messages: Sequence[Message[Any]]) -> None:
        """Do nothing: what was dropped comes again, in its order."""

    # --- acknowledgements

    @property
    def has_acks(self) -> bool:
        return self._acks.has_news

    def take_acks(self) -> tuple[list[AckItem], bool]:
        item = self._acks.take()
        return ([] if item is None else [item]), True

    def confirm_acks(self, items: Sequence[AckItem]) -> None:
        if items:
            self._acks.confirm()

    @property
    def is_settled(self) -> bool:
        return self._acks.is_settled

    @property
    def _may_ask(self) -> bool:
        return self._acks.held_entries < self.settings.unacked_max

    def _reconnected(self) -> None:
        self._acks.reconnected()


class ReaderSegment(StreamSegment):
    """One segment without a subscription, from a position on."""

    def __init__(
        self,
        parent: ParentConsumer,
        spec: SegmentSpec,
        *,
        start: MessageId,
        inclusive: bool = False,
        owed_from: MessageId | None = None,
    ) -> None:
        super().__init__(parent, spec, _begin(start, inclusive=inclusive))
        self._start = start
        self._owed_from = owed_from
        """Everything behind it must still be there; None: what is gone is not missed."""
        self._start_ms: int | None = None
        """It is to begin at what was published then or later; None: its place is known."""
        self._attempts = 0
        self._waiting = 0
        """Its messages in the receive queue."""

    @property
    def position(self) -> MessageId:
        """Up to where it was read; `LATEST` only until it is subscribed."""
        handed = self._acks.handed_through
        return self._start if handed is BEFORE_ALL else mark_id(handed)

    def jump(
        self, start: MessageId, *, inclusive: bool = False, published_from_ms: int | None = None
    ) -> None:
        """Go on from elsewhere, and there from a time; what is in the receive queue is dropped.

        It is there when it is subscribed again.
        """
        # `until_subscribed` waits for the new place.
        self.generation += 1
        self.is_subscribed = False
        self._start_ms = published_from_ms
        self._acks = CumulativeAcks(_begin(start, inclusive=inclusive))
        self._hand_offs.clear()
        self._start = start
        self.reached_end = self.end_is_final = False
        self.restart()

    def deliver(self, message: Message[Any] | EntryRows) -> None:
        # Invariant 5: its own messages are counted, those of other segments in the queue are not.
        self._waiting += message.num_rows if isinstance(message, EntryRows) else 1
        super().deliver(message)

    def _handed_out(self, message: Message[Any]) -> None:
        super()._handed_out(message)
        self._was_read(1)

    def _handed_out_rows(self, rows: EntryRows, turn: int) -> None:
        super()._handed_out_rows(rows, turn)
        self._was_read(rows.num_rows)

    def _dropped(self, messages: Sequence[Message[Any]]) -> None:
        self._waiting = 0

    def _was_read(self, count: int) -> None:
        self._waiting -= count
        self._hand_offs.clear()
        self._acks.ack_through(self._acks.handed_through)
        if self._waiting == 0:
            self.news.advance()

    @property
    def is_settled(self) -> bool:
        return True

    def _reconnected(self) -> None:
        # The broker delivers the entry of the start again. Only once that is acknowledged can it
        # tell that everything was read.
        self._acks.started_anew()

    def _may_go_on(self, error: MagnetarError) -> bool:
        # Retention took the segment with all its messages: its children may be read now.
        if isinstance(error, TopicNotFound) and self.spec.segment_id is not None:
            if self._owed is not None:
                gone = f"segment {self.spec.segment_id} of {self.topic} was deleted"
                lost = DataLost(f"{gone} before all of it was read")
                if self.settings.fail_on_data_loss:
                    self.trouble = self.failure = lost
                    return False
                _LOG.warning("data-lost", what=str(lost.args[0]))
            self.reached_end = True  # a segment that is deleted has nothing more to read
            return False
        return super()._may_go_on(error)

    async def _subscribe(self, connection: BrokerConnection, number: int) -> None:
        # The latest message, or one by time, is known to the broker alone: it is made a position
        # first, so that a lost connection goes on from there (invariant 3).
        if self._start_ms is not None:
            await self._find_time(connection, number, self._start_ms)
        elif self.position == LATEST:
            await self._find_latest(connection, number)
        if self._owed is not None and connection.features.supports_ranges:
            await self._check_kept(connection, self._owed)
        await self._subscribe_at(connection, number, self.position)

    @property
    def _owed(self) -> MessageId | None:
        """The message behind which all must be there, if it is known where that is."""
        if self._owed_from is None or self._start_ms is not None:
            return None
        # What was received counts; before that, what its checkpoint says.
        place = self._owed_from if self.position == EARLIEST else self.position
        return None if place == LATEST else place

    async def _check_kept(self, connection: BrokerConnection, place: MessageId) -> None:
        """Raise `DataLost` (or warn) if messages behind a place were trimmed (invariant 6)."""
        answer = await connection.request("RANGE_STATES", topics=[self.wire_topic], isolation=0)
        (state,) = answer.states
        raise_refusal(f"the state of {self.wire_topic}", state)
        first = RangePosition(state.first.ledger_id, state.first.entry_id)
        if first == ORIGIN or _behind(place) >= first:
            return
        text = (
            f"segment {self.spec.segment_id} of {self.topic} was to be read from behind {place} "
            f"on, but its first message is now {first}"
        )
        if self.settings.fail_on_data_loss:
            raise DataLost(text)
        _LOG.warning("data-lost", what=text)

    async def _find_latest(self, connection: BrokerConnection, number: int) -> None:
        """Find the last message, so that there is a place that a checkpoint can name."""
        await self._subscribe_at(connection, number, LATEST)
        last = await connection.request("GET_LAST_MESSAGE_ID", consumer_id=number)
        await connection.request("CLOSE_CONSUMER", consumer_id=number)
        found = id_from(last.last_message_id)
        # The topic is empty: whatever comes is later.
        if found.entry_id < 0:
            self._start = EARLIEST
            return
        self._start = MessageId(found.ledger_id, found.entry_id)
        self._acks = CumulativeAcks(SegmentMark(found.position))

    async def _find_time(self, connection: BrokerConnection, number: int, start_ms: int) -> None:
        """Find the place behind all that was published before a time."""
        # By a consumer of its own, because a seek ends the one that asks for it.
        mover = connection.register(CONSUMER, _Deaf())
        try:
            await self._subscribe_at(connection, mover, EARLIEST)
            await connection.request("SEEK", consumer_id=mover, message_publish_time=start_ms)
        except BaseException:
            connection.tell_request("CLOSE_CONSUMER", consumer_id=mover)
            raise
        finally:
            connection.unregister(CONSUMER, mover)
        # A seek ends its consumer, and keeps the subscription for one that comes at once.
        await self._subscribe_at(connection, number, EARLIEST, is_again=True)
        answer = await connection.request("GET_LAST_MESSAGE_ID", consumer_id=number)
        await connection.request("CLOSE_CONSUMER", consumer_id=number)
        found = id_from(answer.consumer_mark_delete_position)
        self._start = MessageId(found.ledger_id, found.entry_id)
        self._acks = CumulativeAcks(SegmentMark(found.position))
        self._start_ms = None

    async def _subscribe_at(
        self,
        connection: BrokerConnection,
        number: int,
        start: MessageId,
        *,
        is_again: bool = False,
    ) -> None:
        self._attempts += not is_again
        fields = self._subscribe_fields(number)
        # A name of its own each time: what is left of an earlier one stands elsewhere.
        fields["subscription"] = f"{self.spec.subscription}-{self.generation}-{self._attempts}"
        fields["durable"] = False
        fields["start_message_id"] = wire_id(start)
        fields.pop("initialPosition")
        await connection.request("SUBSCRIBE", **fields)


class _Deaf:
    """A consumer that asks for no messages, and does not mind its end."""

    def take(self, command: Command) -> None:
        """Nothing was asked for."""

    def lost(self, error: MagnetarError) -> None:
        """Do nothing: the request that waits for an answer raises it."""


def _begin(start: MessageId, *, inclusive: bool) -> SegmentMark:
    """The last message that is not to be read."""
    if start in (EARLIEST, LATEST):
        return BEFORE_ALL
    if not inclusive:
        return _mark(start)
    if start.batch_index <= 0:
        return BEFORE_ALL
    return SegmentMark(start.position, start.batch_index - 1, start.batch_size)


def _behind(message_id: MessageId) -> RangePosition:
    """The next message to read behind this one."""
    if message_id == EARLIEST:
        return ORIGIN
    # Inside of a batch the rest of its entry is still to come.
    index = message_id.batch_index + 1
    if 0 < index < message_id.batch_size:
        return RangePosition(*message_id.position, index)
    return RangePosition.behind(message_id.position)


def _mark(message_id: MessageId) -> SegmentMark:
    return SegmentMark(message_id.position, message_id.batch_index, message_id.batch_size)


def mark_id(mark: SegmentMark) -> MessageId:
    """The id of a message within its segment."""
    size = mark.batch_size if mark.batch_index != WHOLE else 0
    return MessageId(*mark.position, -1, mark.batch_index, size)
