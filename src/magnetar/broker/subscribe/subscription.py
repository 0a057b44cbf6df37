"""A subscription of a persistent topic: its cursor, its consumers, and what they may ask for.

Owns: `Subscription`, and where a new one begins (`first_mark_delete`).

Invariants:
1. Acknowledgements count at once; they are durable when `ack_durable` returns. Concurrent calls
   share one write of the cursor.
2. Only what is unacknowledged is delivered. An entry goes to another consumer, or again to the same
   one, only after a redelivery request, the end of its consumer, the abort of a transaction that
   had acknowledged it, a rewind or a seek.
3. When the last consumer leaves, everything unacknowledged is delivered again to the next ones;
   redelivery counts are forgotten.
4. During a seek nobody is connected and nobody gets in: consumers are stopped first, so what was
   read before the seek cannot be acknowledged after it.
5. The backlog is counted in entries: the broker does not open batches. What a transaction has
   acknowledged counts until it is committed, and is given to nobody until it is aborted.
6. A subscription that reads what is not committed sees its topic through `Uncommitted`, in all that
   it does; it changes nothing for any other.
7. Without a first consumer there is no coroutine, once what transactions left is read: idle
   subscriptions cost memory alone.

Relies on: the topic (`ReadableTopic`) to advance `wake`, and to drop a non-durable subscription
once it has no consumers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from magnetar.broker.api import SubscribeRequest
from magnetar.broker.dispatch.consumer import Consumer
from magnetar.broker.dispatch.dispatch_throttle import DispatchThrottle
from magnetar.broker.dispatch.dispatcher import Dispatcher, ReadableTopic, Uncommitted
from magnetar.broker.dispatch.membership import Membership
from magnetar.broker.entries import publish_time_of
from magnetar.broker.policy.stats import Rate, SubscriptionStats
from magnetar.broker.subscribe.ack import Ack, run_end
from magnetar.broker.subscribe.pending_ack_messages import PendingAckMessages
from magnetar.broker.subscribe.txn_acks import AckParts, TransactionalAcks
from magnetar.broker.subscribe.visible_cursor import VisibleCursor
from magnetar.errors import (
    ConsumerBusy,
    ConsumerNotFound,
    InvalidArgument,
    MagnetarError,
    NotAllowed,
    ServiceNotReady,
)
from magnetar.ledger.api import Entry
from magnetar.managed_ledger.cursor import Cursor
from magnetar.managed_ledger.managed_ledger import EARLIEST
from magnetar.model.ids import Position
from magnetar.model.isolation import ReadIsolation, isolation_properties
from magnetar.model.names import Domain
from magnetar.model.position_set import PositionSet
from magnetar.model.subscriptions import COMPACTION, InitialPosition, SubscriptionType
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.metrics import EXPIRED_ENTRIES
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.runtime.slices import SlicePace, slices
from magnetar.txn.acks.pending_acks import PendingAcks
from magnetar.wire.messages import TxnId

TYPE_NAMES: Final = {
    None: "None",
    SubscriptionType.EXCLUSIVE: "Exclusive",
    SubscriptionType.SHARED: "Shared",
    SubscriptionType.FAILOVER: "Failover",
    SubscriptionType.KEY_SHARED: "Key_Shared",
}
"""As statistics name them."""

_MS_PER_SECOND: Final = 1000
_NONE_SPARED: Final = PositionSet()
_RUN_ENTRIES_MIN: Final = 4
"""Fewer are acknowledged faster one by one."""
# Small: mostly the next entry is one for consumers, and the search ends there.
_PASSED_PER_READ: Final = 100


def first_mark_delete(options: SubscribeRequest, last: Position) -> Position:
    """Behind which position a new subscription begins; `last` is the topic's last one."""
    start = options.start
    # A durable subscription begins at one of the two ends; only a reader's cursor names a message.
    if options.durable or start is None:
        earliest = options.initial_position is InitialPosition.EARLIEST
        return EARLIEST if earliest else last
    if start.ledger_id >= 0 and start.entry_id >= 0:
        # The entry itself is sent: the client skips what it has of a batch, and a message that it
        # has, unless it wants that one too. Only the client knows which.
        return start.position.previous
    # MessageId.earliest, or a ledger without an entry: there is no message to include.
    return start.position


class Subscription:
    """A named reading position of a persistent topic. End it with `close`."""

    def __init__(
        self,
        topic: ReadableTopic,
        cursor: Cursor,
        *,
        clock: Clock,
        limits: Limits,
        consistent_hashing: bool = True,
        transactions: AckParts | None = None,
        isolation: ReadIsolation = ReadIsolation.COMMITTED,
    ) -> None:
        self.name = cursor.name
        self.cursor = cursor
        self.isolation = isolation
        # Invariant 6: the wrapper shows the durable end instead of the maxReadPosition.
        if isolation is ReadIsolation.UNCOMMITTED:
            topic = Uncommitted(topic)
        self.wake = Signal()
        """Advanced by the topic when there may be more to read, or when it was terminated."""
        self._topic = topic
        self._clock = clock
        self._limits = limits
        self._loops = Service(
            f"subscription {cursor.name} of {topic.name}", stop_seconds=limits.close_seconds
        )
        self._membership = Membership(
            topic,
            cursor.name,
            wake=self.wake,
            clock=clock,
            limits=limits,
            consistent_hashing=consistent_hashing,
        )
        # A repeated cumulative ack fails in v4; v5 clients repeat theirs for every segment.
        pending = PendingAcks(repeats_allowed=topic.name.domain is Domain.SEGMENT)
        self._open_cursor = VisibleCursor(cursor, pending)
        self._dispatcher = Dispatcher(
            topic, self._open_cursor, self._membership, wake=self.wake, clock=clock, limits=limits
        )
        self._held = PendingAckMessages(
            topic,
            cursor,
            pending,
            self._open_cursor,
            self._membership,
            self._dispatcher,
            wake=self.wake,
            tasks=self._loops,
        )
        self._txn_acks: TransactionalAcks | None = None
        if transactions is not None and cursor.durable:
            self._txn_acks = TransactionalAcks(
                topic, cursor, self._held, transactions, tasks=self._loops, clock=clock
            )
            self._txn_acks.begin()
        self._kept_at: Position | None = None
        """An entry that is for consumers: nothing is passed before it is acknowledged."""
        # Changed by `add_consumer`, `close` and seeks; no await stands between a check and its use.
        self._dispatching = False
        self._closing = False
        self._seeking = False
        self._rate_out = Rate(clock)
        self._throughput_out = Rate(clock)
        self._rate_redeliver = Rate(clock)
        self._rate_expired = Rate(clock)
        self._expired = self._last_expire_ms = 0
        self._used_at = clock.monotonic()

    # --- what it knows

    @property
    def type(self) -> SubscriptionType | None:
        """The type of the present or last consumers; None: it had none yet."""
        return self._membership.type

    @property
    def durable(self) -> bool:
        return self.cursor.durable

    @property
    def consumers(self) -> Collection[Consumer]:
        return self._membership.consumers

    @property
    def reads_compacted(self) -> bool:
        """Whether somebody who is here asked for the compacted view."""
        return any(each.options.read_compacted for each in self.consumers)

    def unused_seconds(self) -> float:
        """How long nobody has been connected; since it was loaded, if nobody was."""
        return 0.0 if self.consumers else self._clock.monotonic() - self._used_at

    @property
    def active_consumer(self) -> Consumer | None:
        """The one that gets everything (Exclusive, Failover)."""
        return self._membership.active

    @property
    def transactional_acks(self) -> TransactionalAcks | None:
        """None: it takes none."""
        return self._txn_acks

    @property
    def failure(self) -> MagnetarError | None:
        """Why nothing is dispatched any more, if so; a seek or a skip starts it again."""
        return self._dispatcher.failure

    @property
    def failed(self) -> Signal:
        """Advances if the dispatch coroutine itself crashed: a bug."""
        return self._loops.failed

    def backlog(self) -> int:
        """Entries that are not acknowledged as a whole."""
        return self.cursor.backlog()

    def visible_backlog(self) -> int:
        """Backlog without entries above the maxReadPosition, unless those are read too."""
        ledger = self._topic.ledger
        end = self._topic.max_read_position()
        hidden = ledger.count_between(end, ledger.last_position())
        # What undecided transactions keep back is in the cursor's backlog, but no consumer could
        # have it yet.
        if hidden:
            hidden -= self.cursor.acked_above(end)  # markers, for instance
        return max(self.backlog() - hidden, 0)

    def stats(self, *, consumers: bool = True) -> SubscriptionStats:
        """What the admin interface shows, with or without each consumer."""
        state, active = self._membership.state, self._membership.active
        totals = self._membership.totals()
        # What waits for its time is known once it was read; all of it is part of the backlog.
        backlog, delayed = self.visible_backlog(), self._dispatcher.delayed
        found = SubscriptionStats(
            type=TYPE_NAMES[self.type],
            msg_backlog=backlog,
            msg_delayed=delayed,
            msg_backlog_no_delayed=max(backlog - delayed, 0),
            delayed_message_index_size_in_bytes=self._dispatcher.delayed_bytes,
            unacked_messages=0 if state is None else state.unacked,
            msg_rate_out=self._rate_out.of(totals.messages),
            msg_throughput_out=self._throughput_out.of(totals.bytes),
            msg_rate_redeliver=self._rate_redeliver.of(totals.redelivered),
            msg_rate_expired=self._rate_expired.of(self._expired),
            total_msg_expired=self._expired,
            last_expire_timestamp=self._last_expire_ms,
            msg_out_counter=totals.messages,
            bytes_out_counter=totals.bytes,
            blocked_subscription_on_unacked_msgs=state is not None and state.blocked,
            active_consumer_name=None if active is None else active.name,
            last_consumed_flow_timestamp=totals.last_flow_ms,
            consumers=[each.stats() for each in self.consumers] if consumers else [],
            is_durable=self.durable,
            subscription_properties=self.cursor.properties,
            read_isolation=self.isolation.value,
        )
        throttled = self._dispatcher.throttle_counts
        if throttled is not None:
            found.dispatch_throttled_msg_events_by_subscription_limit = throttled.own_messages
            found.dispatch_throttled_bytes_events_by_subscription_limit = throttled.own_bytes
            found.dispatch_throttled_msg_events_by_topic_limit = throttled.topic_messages
            found.dispatch_throttled_bytes_events_by_topic_limit = throttled.topic_bytes
        return found

    # --- consumers

    def limits_changed(self) -> None:
        """The topic has other limits of unacknowledged messages."""
        self._membership.limits_changed()

    @property
    def throttle(self) -> DispatchThrottle | None:
        """The rates that it waits for; None: there are none."""
        return self._dispatcher.throttle

    def limit_rates(self, throttle: DispatchThrottle | None) -> None:
        """Deliver no faster than this from now on; None: as fast as consumers take it."""
        self._dispatcher.limit_rates(throttle)

    def add_consumer(self, options: SubscribeRequest) -> Consumer:
        """Let a consumer in; it has no permits yet."""
        # Invariant 4: a consumer that got in now would read from before the seek. Its client
        # retries.
        if self._closing or self._seeking:
            raise ServiceNotReady(f"subscription {self.name} is being closed or reset")
        # As Pulsar: a durable and a non-durable subscription cannot have one name on a topic.
        if options.durable != self.durable:
            kind = "durable" if self.durable else "non-durable"
            raise NotAllowed(f"subscription {self.name} is {kind}")
        is_first = not self.consumers
        consumer, rewind = self._membership.join(options)
        # Invariant 3: the dispatch state is new, so the cursor has to be back at the mark-delete
        # position.
        if is_first:
            self._dispatcher.rewind()
        # A better consumer joined a Failover subscription. The former active one is still there:
        # its acks get some time to arrive (activeConsumerFailoverDelayTimeMillis), or they would
        # come twice.
        elif rewind:
            self._dispatcher.rewind_after(self._limits.failover_switch_seconds)
        if not self._dispatching:
            self._dispatching = True
            self._loops.spawn(self._dispatch(), "dispatch")
        if self._txn_acks is not None:
            self._txn_acks.begin()
        self.wake.advance()
        return consumer

    async def _dispatch(self) -> None:
        # Without this a message would be delivered that a transaction of a former owner has
        # acknowledged.
        if self._txn_acks is not None:
            await self._txn_acks.ready.wait()
        await self._dispatcher.run()

    def remove_consumer(self, consumer: Consumer) -> None:
        """A consumer closed or lost its connection; one that is not here any more is ignored."""
        self._used_at = self._clock.monotonic()
        if self._membership.leave(consumer):
            # The former active one is gone: no acknowledgement of it can come any more.
            self._dispatcher.rewind()
        self.wake.advance()

    # --- acknowledging

    def ack(self, consumer: Consumer, acks: Sequence[Ack], *, cumulative: bool = False) -> None:
        """Acknowledge entries, or (cumulative) everything up to the last of `acks`.

        A cumulative one is ignored where several consumers share the messages. What a transaction
        has acknowledged, undecided, is left out: it is the transaction's.
        """
        state = self._membership.state
        if state is None or consumer not in self._membership:
            raise ConsumerNotFound(f"consumer {consumer.name} is not connected to {self.name}")
        # The last ack on a terminated topic means REACHED_END, which dispatch tells.
        woken = self._topic.ledger.sealed
        if not cumulative:
            if self._held.pending:
                acks = self._held.plain_parts(acks)
            self._ack_in_cursor(acks)
            whole = [position for position, unacked in acks if not unacked]
            woken = state.on_acks(consumer.key, whole) or woken
            for position, unacked in acks if len(whole) < len(acks) else ():
                if not unacked:
                    continue
                # Asked of the cursor: others may have acknowledged more of this batch than the
                # client knows.
                remaining = self.cursor.unacked_indexes(position) or 0
                if state.on_ack(consumer.key, position, remaining.bit_count()):
                    woken = True
        # Up to the cursor's mark-delete position, which may be lower than what was asked for: what
        # a transaction has acknowledged stays behind.
        elif state.type.takes_cumulative_acks and acks:
            self._held.ack_through(acks[-1])
            through, asked = self.cursor.mark_delete, acks[-1].position
            # What the log has dropped is done with, though no mark can stand there.
            if through < asked < self._topic.ledger.first_position():
                through = asked
            state.on_acked_through(through)
        if woken:
            self.wake.advance()

    def _ack_in_cursor(self, acks: Sequence[Ack]) -> None:
        """A run is one step, wherever it begins."""
        cursor, at = self.cursor, 0
        # Clients group acks, so most come as runs. Of several consumers each has runs of its own,
        # which begin behind what others have: a few steps on bitmaps.
        while at < len(acks):
            end = max(run_end(acks, at), at + 1)
            following = self._topic.ledger.next_valid(cursor.mark_delete.next)
            if end - at > 1 and following == acks[at].position:
                cursor.ack_cumulative(acks[end - 1].position)
            elif end - at >= _RUN_ENTRIES_MIN:
                cursor.ack_all_but(_NONE_SPARED, acks[at].position, acks[end - 1].position)
            else:
                for position, unacked in acks[at:end]:
                    cursor.ack(position, unacked)
            at = end

    def pass_over(self, positions: Sequence[Position]) -> None:
        """Entries that are for nobody: acknowledged for good, before dispatch comes to them."""
        # A cursor that has lost its ledger to another broker takes nothing more; that one passes
        # them.
        if self.cursor.failure is None:
            for position in positions:
                self.cursor.ack(position)
            if positions and self._topic.ledger.sealed:
                self.wake.advance()  # the end may have been reached

    def ack_in_txn(
        self, consumer: Consumer, txn: TxnId, acks: Sequence[Ack], *, cumulative: bool = False
    ) -> asyncio.Future[None]:
        """Acknowledge if and when a transaction commits; durable when the outcome is there.

        It is not to be cancelled. TransactionConflict: others have a message, or the transaction
        has ended; nothing is stored.
        """
        state = self._membership.state
        if state is None or consumer not in self._membership:
            raise ConsumerNotFound(f"consumer {consumer.name} is not connected to {self.name}")
        if self._txn_acks is None:
            raise NotAllowed(f"subscription {self.name} takes no transactional acknowledgements")
        if cumulative and not state.type.takes_cumulative_acks:
            raise NotAllowed(f"consumers of subscription {self.name} share its messages")
        return self._txn_acks.ack(txn, acks, cumulative=cumulative, consumer=consumer.key)

    @property
    def pending_txns(self) -> Collection[TxnId]:
        """Undecided transactions of either kind that have acknowledged something here."""
        return self._held.pending.txns

    async def undecided_txns(self) -> list[TxnId]:
        """Read `pending_txns` once what former owners left is known."""
        if self._txn_acks is not None:
            await self._txn_acks.until_ready()
        return list(self.pending_txns)

    async def end_legacy(self, txn: TxnId, *, commit: bool, low_watermark: int) -> None:
        """What the coordinator of a legacy transaction decided; durable when this returns."""
        if self._txn_acks is not None:
            await self._txn_acks.end_legacy(txn, commit=commit, low_watermark=low_watermark)

    async def rescan_transactions(self) -> None:
        """Finish what decided transactions have left behind here."""
        if self._txn_acks is not None:
            await self._txn_acks.rescan()

    async def pass_aborted(self, last: Position) -> None:
        """Acknowledge what is next as long as it is of aborted transactions: nobody else will, if
        nobody reads. Behind `last` there is none.
        """
        # Each round reads from the first unacknowledged entry and ends at one that consumers must
        # see.
        while self.cursor.failure is None and self.first_unacked() <= last:
            first = self.first_unacked()
            # Found last time to be for consumers; or undecided yet, which the topic tells when it
            # changes.
            if first == self._kept_at or first > self._topic.max_read_position():
                return
            for entry in await self._topic.ledger.read(first, _PASSED_PER_READ):
                if self.cursor.is_acked(entry.position):
                    continue
                # The read went beyond the maxReadPosition.
                if entry.position > self._topic.max_read_position():
                    return
                if self._topic.is_visible(entry):
                    self._kept_at = entry.position
                    break
                self.cursor.ack(entry.position)
            # Not a step further: the next entry is for consumers, or could not be read.
            if self.first_unacked() == first:
                return
            if self._topic.ledger.sealed:
                self.wake.advance()  # the end may have been reached

    def first_unacked(self) -> Position:
        """The first entry that is not acknowledged, or where the next one will stand."""
        ledger = self._topic.ledger
        return ledger.next_valid(self.cursor.mark_delete.next) or ledger.next_append_floor()

    async def ack_durable(self) -> None:
        """Return once every acknowledgement before this call is durable."""
        await self.cursor.flush()

    def redeliver(
        self,
        consumer: Consumer,
        positions: Iterable[Position] | None = None,
        epoch: int | None = None,
    ) -> None:
        """A consumer wants entries again: these, or all that it has.

        Where order is promised that means everything that is not acknowledged. What is still in
        the outbox comes anyhow, and is no redelivery.
        """
        state = self._membership.state
        if state is None or consumer not in self._membership:
            return
        # Exclusive, Failover. The epoch first (PIP-84): what is read from now on carries it, and
        # the client drops older deliveries that are still on their way.
        if state.type.takes_cumulative_acks:
            if epoch is not None:
                consumer.epoch = epoch
            if state.on_redeliver(consumer.key).rewind:
                self._dispatcher.rewind()
            return
        # Withheld ones stay with their consumer until the transaction ends.
        unseen, is_withheld = consumer.unseen(), self._open_cursor.is_withheld
        asked = consumer.pending() if positions is None else positions
        wanted = [each for each in asked if each not in unseen and not is_withheld(each)]
        state.on_redeliver(consumer.key, wanted)
        self.wake.advance()

    # --- moving the cursor

    async def seek(self, position: Position, unacked: int = 0) -> None:
        """Begin again at an entry, itself included; of a batch, with the messages in `unacked`.

        Every consumer is stopped first and may come back afterwards.
        """
        # Invariant 4: consumers are gone before the first await, so no ack can meet the new
        # position.
        self._begin_seek()
        try:
            await self.cursor.reset(position.previous)
            # A message inside a batch: those before it are acknowledged by index (PIP-54).
            if unacked and self.cursor.ack(position, unacked):
                await self.cursor.flush()
        finally:
            self._end_seek()
        self._dispatcher.resume()

    async def seek_time(self, ms: int) -> None:
        """Begin again at the first entry published at or after a moment, or else at the end."""
        compacted = self.reads_compacted
        self._begin_seek()
        try:
            # Taken before the search: what is published meanwhile is later than the moment, and
            # delivered.
            end = self._topic.max_read_position()
            found = await self._topic.ledger.find_by_time(ms, publish_time_of)
            if compacted and (view := self._topic.compacted) is not None:
                # The log may have dropped what is in the view.
                earlier = await view.find_by_time(ms, publish_time_of)
                found = min((each for each in (found, earlier) if each is not None), default=None)
            await self.cursor.reset(end if found is None else found.previous)
        finally:
            self._end_seek()
        self._dispatcher.resume()

    def _begin_seek(self) -> None:
        if self._closing or self._seeking:
            raise ServiceNotReady(f"subscription {self.name} is being closed or reset already")
        self._seeking = True
        self._dispatcher.drop_delayed()
        self._membership.stop_all(ServiceNotReady(f"subscription {self.name} was reset"))

    def _end_seek(self) -> None:
        self._seeking = False
        # Also after a failed reset: the new incarnation has begun in memory by then.
        if self._txn_acks is not None:
            self._txn_acks.reset()

    async def skip(self, entries: int) -> int:
        """Acknowledge the next unacknowledged entries; how many they were."""
        found = await self._next_unacked(entries)
        for some in slices(found):
            for position in some:
                self.cursor.ack(position)
                self._dispatcher.drop_delayed(position)
                # Connected consumers may have these, or wait for them.
                if self._membership.state is not None:
                    self._membership.state.on_ack(None, position)
            await asyncio.sleep(0)
        self._dispatcher.resume()
        return len(found)

    async def move_to(self, position: Position, unacked: int = 0) -> None:
        """Acknowledge everything up to an entry, of that one all but `unacked`, durably.

        Never back: what is acknowledged stays so. ConsumerBusy if somebody is connected.
        """
        if self._closing or self._seeking:
            raise ServiceNotReady(f"subscription {self.name} is being closed or reset")
        if self.name == COMPACTION:
            raise NotAllowed(f"{COMPACTION} is moved by the topic's compaction alone")
        # Range readers move a cursor that nobody reads; beside consumers it would take their
        # messages.
        if self.consumers:
            raise ConsumerBusy(
                f"subscription {self.name} has connected consumers",
                hint="they acknowledge for themselves; use a subscription of its own",
            )
        self._used_at = self._clock.monotonic()
        self._held.ack_through(Ack(position, unacked))
        if self._topic.ledger.sealed:
            self.wake.advance()  # the end may have been reached
        await self.ack_durable()

    def skip_all(self) -> None:
        """Acknowledge everything that consumers may see now."""
        self._ack_through(self._topic.max_read_position())

    async def expire(self, seconds: float) -> None:
        """Acknowledge everything published more than so long ago."""
        # Taken before the search: what is published meanwhile is not as old. Not beyond the
        # maxReadPosition: messages of an open transaction have not been seen by anybody.
        end = self._topic.max_read_position()
        self._last_expire_ms = self._clock.now_ms()
        if not self.cursor.backlog():
            return
        moment = self._last_expire_ms - round(seconds * _MS_PER_SECOND)
        found = await self._topic.ledger.find_by_time(moment, publish_time_of)
        through = end if found is None else min(found.previous, end)
        if self._closing or self._seeking or through <= self.cursor.mark_delete:
            return
        before = self.cursor.backlog()
        self._ack_through(through)
        gone = before - self.cursor.backlog()
        self._expired += gone
        EXPIRED_ENTRIES.inc(gone)

    def expire_through(self, position: Position) -> None:
        """Acknowledge everything up to an entry, as far as consumers may see it."""
        self._ack_through(min(position, self._topic.max_read_position()))

    async def change_properties(self, properties: dict[str, str]) -> None:
        """Replace what it was made with, but for its isolation, which does not change."""
        if not self.durable:
            raise NotAllowed(f"subscription {self.name} is not durable: nothing of it is stored")
        if self.name == COMPACTION:
            raise NotAllowed(f"{COMPACTION} has properties of its own, which name a ledger")
        kept = isolation_properties(self.cursor.properties)
        if isolation_properties(properties) not in ({}, kept):
            raise NotAllowed(f"the isolation of subscription {self.name} cannot be changed")
        await self.cursor.change_properties(properties | kept)

    async def peek(self, number: int) -> Entry | None:
        """The unacknowledged entry with that number, from 1 on; None: there are fewer."""
        # The number counts visible entries, but positions do not tell: each round looks at those
        # found last, and asks for one more per entry that is not for consumers.
        seen, wanted, pace = 0, number, SlicePace()
        while True:
            found = await self._next_unacked(wanted)
            for position in found[seen:]:
                entries = await self._topic.ledger.read(position, 1)
                if not entries or not self._topic.is_visible(entries[0]):
                    wanted += 1  # one of an aborted transaction is not for consumers
                await pace.after()  # what is in memory is read without a turn for others
            if len(found) < wanted and len(found) == seen:
                return None
            if len(found) == wanted:
                entries = await self._topic.ledger.read(found[-1], 1)
                return entries[0] if entries else None
            seen = len(found)

    def _ack_through(self, position: Position) -> None:
        self.cursor.ack_cumulative(position)
        self._dispatcher.drop_delayed(position)
        if self._membership.state is not None:
            self._membership.state.on_acked_through(self.cursor.mark_delete)
        self._dispatcher.resume()

    async def _next_unacked(self, count: int) -> list[Position]:
        if count < 1:
            raise InvalidArgument(f"{count} entries")
        found: list[Position] = []
        pace = SlicePace()
        position = self._topic.ledger.next_valid(self.cursor.mark_delete.next)
        # Asked in every step: the walk gives others their turn, and the topic may be trimmed or
        # grow.
        while position is not None and position <= self._topic.max_read_position():
            if not self.cursor.is_acked(position):
                found.append(position)
                if len(found) == count:
                    break
            position = self._topic.ledger.next_valid(position.next)
            await pace.after()
        return found

    # --- the end

    @property
    def is_closed(self) -> bool:
        """Whether nobody can use it any more, or it is about to be so."""
        return self._closing

    async def close(self, error: MagnetarError | None = None) -> None:
        """Stop dispatching, stop every consumer (`error` tells them why), write the cursor."""
        self._closing = True
        # Consumers first, then loops, then the cursor: the last write has every ack that was
        # accepted.
        self._membership.stop_all(error)
        if self._txn_acks is not None:
            self._txn_acks.close()
        await self._loops.stop()
        self._dispatcher.drop_delayed()
        self._dispatcher.limit_rates(None)
        if self._txn_acks is not None:
            await self._txn_acks.closed()
        if self.cursor.failure is None:
            await self.cursor.flush()

    async def unsubscribe(self, *, by: Consumer | None = None, force: bool = False) -> None:
        """Close it and remove the cursor; refused while it has consumers other than `by`."""
        if not force and any(each is not by for each in self.consumers):
            raise ConsumerBusy(f"subscription {self.name} has connected consumers")
        await self.close(ServiceNotReady(f"subscription {self.name} was removed"))
        # The cursor goes first: ack records without a cursor are garbage that is found, a cursor
        # without its records would lose what open transactions acknowledged.
        if self.durable:
            await self._topic.ledger.delete_cursor(self.name)
            if self._txn_acks is not None:
                await self._txn_acks.forget()
        else:
            await self.cursor.delete()
