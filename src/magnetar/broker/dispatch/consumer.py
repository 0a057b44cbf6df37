"""A consumer: its permits, the deliveries on their way to it, and the news it must be told.

Owns: `Consumer`, the one object that a subscription (which fills it) and a session (which empties
it) share, and `News`.

Invariants:
1. `permits` counts messages: `flow` adds, every delivery takes `num_messages`. It may become
   negative, because a batch is never split; the choice never offers without permits.
2. Once the outbox holds `consumer_outbox_entries` or `consumer_outbox_bytes` nothing more is chosen
   for it until the session takes: it exceeds them by one read of the subscription at most.
3. Deliveries leave in the order in which they were offered. What `drop_outbox` took out was never
   seen by the session, and its permits are given back.
4. After `stop` nothing is offered or taken any more. The first reason stays.
5. News are bounded: the last change of activity, and the end of the topic, once.

Relies on: the subscription's `DispatchState`, which keeps the permits, and its `wake`, which is
advanced when the consumer can take more.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from enum import Enum

from magnetar.broker.api import Delivery, SubscribeRequest
from magnetar.broker.dispatch.dispatch_state import DispatchState
from magnetar.broker.policy.stats import ConsumerStats, Rate
from magnetar.errors import MagnetarError
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.metrics import OUTBOX_BYTES
from magnetar.runtime.signal import Signal


class News(Enum):
    """The news that a session must tell its client besides messages."""

    ACTIVE = "active"
    """It is the active consumer of a Failover subscription now."""
    INACTIVE = "inactive"
    """It is not, or not any more."""
    REACHED_END = "reached-end"
    """The topic was terminated, and everything in it is acknowledged."""


class Consumer:
    """One consumer of one subscription. Get it from `add_consumer`."""

    def __init__(
        self,
        options: SubscribeRequest,
        *,
        key: int,
        state: DispatchState,
        wake: Signal,
        clock: Clock,
        limits: Limits,
    ) -> None:
        self.options = options
        self.name = options.name
        self.key = key
        """Tells the consumers of one subscription apart, whatever their names."""
        self.connected_ms = clock.now_ms()
        self.last_flow_ms = 0
        """When its client last gave permits; 0: it gave none yet."""
        self.epoch = options.consumer_epoch
        """Stamped on deliveries, so that a client can drop those from before its last rewind."""
        self.outbox_ready = Signal()
        """Advances with deliveries, with news, and when the consumer stops."""
        self.stopped = Signal()
        """Advances once, when the broker or its client ended it; `error` says why."""
        self.error: MagnetarError | None = None
        # Counters for stats (msgOutCounter, bytesOutCounter): kept for the whole life, because
        # rates are made of their differences.
        self.messages_out = 0
        self.bytes_out = 0
        self.redelivered = 0
        """Entries that were delivered here after a consumer had asked for them again."""
        # Permits and unacknowledged messages stand in the dispatch state alone, so that they cannot
        # differ between the two.
        self._state = state
        self._clock = clock
        self._member = state.members[key]
        self._wake = wake
        self._entries_max = limits.consumer_outbox_entries
        self._bytes_max = limits.consumer_outbox_bytes
        # Between subscription and session: filled by dispatch, emptied by the session's loop.
        self._outbox: list[Delivery] = []
        self._outbox_bytes = 0
        self._full = False
        # At most one of each kind is due: only the last change of activity matters to a client.
        self._activity: News | None = None
        self._end_told = False
        self._end_due = False
        self._rate_out = Rate(clock)
        self._throughput_out = Rate(clock)
        self._rate_redeliver = Rate(clock)

    # --- what it knows

    @property
    def is_stopped(self) -> bool:
        return self.stopped.version > 0

    @property
    def permits(self) -> int:
        """Messages that it still takes; a batch may have made it negative."""
        return self._member.permits

    @property
    def unacked(self) -> int:
        """Messages that it has not acknowledged (Shared, Key_Shared)."""
        return self._member.unacked

    @property
    def blocked(self) -> bool:
        """Whether it gets nothing because too much is unacknowledged."""
        return self._member.blocked

    @property
    def outbox_entries(self) -> int:
        return len(self._outbox)

    @property
    def outbox_bytes(self) -> int:
        return self._outbox_bytes

    def pending(self) -> list[Position]:
        """Entries that it has not acknowledged (Shared, Key_Shared)."""
        return list(self._member.pending)

    def stats(self) -> ConsumerStats:
        moment = datetime.fromtimestamp(self.connected_ms / 1000, UTC)
        return ConsumerStats(
            consumer_name=self.name,
            available_permits=self.permits,
            unacked_messages=self.unacked,
            msg_rate_out=self._rate_out.of(self.messages_out),
            msg_throughput_out=self._throughput_out.of(self.bytes_out),
            msg_rate_redeliver=self._rate_redeliver.of(self.redelivered),
            msg_out_counter=self.messages_out,
            bytes_out_counter=self.bytes_out,
            last_consumed_flow_timestamp=self.last_flow_ms,
            blocked_consumer_on_unacked_msgs=self.blocked,
            key_hash_ranges=[
                f"[{each.start}, {each.end}]" for each in self._state.ranges_of(self.key)
            ],
            address=self.options.address,
            connected_since=moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            client_version=self.options.client_version,
            metadata=dict(self.options.metadata),
        )

    # --- the subscription's side

    def offer(self, deliveries: Sequence[Delivery]) -> None:
        """Put deliveries into its outbox; the choice has taken their permits."""
        # Invariant 4: what was chosen for a consumer that has stopped goes back when it leaves.
        if self.is_stopped or not deliveries:
            return
        size = sum([len(each.payload) for each in deliveries])
        self.messages_out += sum([each.num_messages for each in deliveries])
        self.bytes_out += size
        self._outbox += deliveries
        self._outbox_bytes += size
        OUTBOX_BYTES.inc(size)
        # Backpressure: dispatch passes this consumer over until its session has taken all of it.
        if self._outbox_bytes >= self._bytes_max or len(self._outbox) >= self._entries_max:
            self._full = True
            self._state.on_outbox(self.key, False)
        self.outbox_ready.advance()

    def drop_outbox(self) -> None:
        """Take back what the session has not seen, with its permits: it will be read again."""
        dropped = self._empty()
        messages = sum([each.num_messages for each in dropped])
        self.messages_out -= messages
        self.bytes_out -= sum([len(each.payload) for each in dropped])
        # The client never saw these messages, so it will send no FLOW in their place.
        self._state.on_flow(self.key, messages)

    def unseen(self) -> set[Position]:
        """What is in the outbox: the client cannot have it yet."""
        return {each.position for each in self._outbox}

    def tell_activity(self, active: bool) -> None:
        self._activity = News.ACTIVE if active else News.INACTIVE
        self.outbox_ready.advance()

    def tell_end(self) -> None:
        """Tell, once, that no message will come any more."""
        if not self._end_told:
            self._end_told = self._end_due = True
            self.outbox_ready.advance()

    def stop(self, error: MagnetarError | None = None) -> None:
        """Take no more; its session learns it and closes it. None: at its own wish."""
        if not self.is_stopped:
            self.error = error
            # The outbox is emptied first: whoever wakes finds nothing to send after the
            # CLOSE_CONSUMER.
            self._empty()
            self.stopped.advance()
            # The session's loop waits on this one; the other is for those that wait for the end
            # alone.
            self.outbox_ready.advance()

    # --- the session's side

    def flow(self, permits: int) -> None:
        """The client takes so many messages more."""
        self.last_flow_ms = self._clock.now_ms()
        if self._state.on_flow(self.key, permits):
            self._wake.advance()

    def take(self) -> list[Delivery]:
        """Take all deliveries from the outbox, in order; empty if there are none."""
        return self._empty()

    def take_news(self) -> list[News]:
        """What the client must be told now, before the deliveries of the next `take`."""
        # Activity first: a Failover client must know that it is active before messages arrive.
        news = [] if self._activity is None else [self._activity]
        self._activity = None
        if self._end_due:
            news.append(News.REACHED_END)
            self._end_due = False
        return news

    def _empty(self) -> list[Delivery]:
        taken = self._outbox
        if not taken:
            return taken
        self._outbox = []
        OUTBOX_BYTES.dec(self._outbox_bytes)
        self._outbox_bytes = 0
        # Only a full outbox is told of: otherwise every delivery would wake dispatch for nothing.
        if self._full:
            self._full = False
            if self._state.on_outbox(self.key, True):
                self._wake.advance()
        return taken
