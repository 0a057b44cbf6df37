"""A subscription of a non-persistent topic: no cursor, no backlog, no second delivery.

Owns: `NonPersistentSubscription`.

Invariants:
1. A message goes at once to a consumer that can take it, or is dropped and counted. Nothing waits.
2. Nothing is unacknowledged: acknowledgements, redelivery requests and seeks change nothing.
3. The choice between consumers is that of persistent subscriptions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from magnetar.broker.api import Delivery, SubscribeRequest
from magnetar.broker.dispatch.consumer import Consumer
from magnetar.broker.dispatch.dispatcher import Unsent, messages_in
from magnetar.broker.dispatch.membership import JoinedTopic, Membership
from magnetar.broker.policy.stats import Rate, SubscriptionStats
from magnetar.broker.subscribe.ack import Ack
from magnetar.broker.subscribe.subscription import TYPE_NAMES
from magnetar.errors import ConsumerBusy, MagnetarError, ServiceNotReady
from magnetar.model.ids import Position
from magnetar.model.isolation import ReadIsolation
from magnetar.model.subscriptions import SubscriptionType
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.metrics import DISPATCHED_ENTRIES, DROPPED_ENTRIES
from magnetar.runtime.signal import Signal

SENT_POSITION: Final = Position(0, 0)
"""Where every message of a non-persistent topic seems to stand."""


class NonPersistentSubscription:
    """A named group of consumers of a non-persistent topic."""

    durable: Final = False

    isolation: Final = ReadIsolation.COMMITTED
    """There are no transactions here."""

    def __init__(
        self,
        topic: JoinedTopic,
        name: str,
        *,
        clock: Clock,
        limits: Limits,
        consistent_hashing: bool = True,
    ) -> None:
        self.name = name
        self.wake = Signal()
        """Nobody waits for it: what cannot be delivered now never is."""
        # For msgDropRate: the one sign that a consumer is too slow, since there is no backlog.
        self.dropped = 0
        self._membership = Membership(
            topic,
            name,
            wake=self.wake,
            clock=clock,
            limits=limits,
            consistent_hashing=consistent_hashing,
        )
        self._closing = False
        self._number = 0
        self._rate_out = Rate(clock)
        self._throughput_out = Rate(clock)
        self._rate_dropped = Rate(clock)

    # --- what it knows

    @property
    def type(self) -> SubscriptionType | None:
        return self._membership.type

    @property
    def consumers(self) -> Collection[Consumer]:
        return self._membership.consumers

    @property
    def active_consumer(self) -> Consumer | None:
        return self._membership.active

    def backlog(self) -> int:
        return 0

    def visible_backlog(self) -> int:
        return 0

    def stats(self, *, consumers: bool = True) -> SubscriptionStats:
        """What the admin interface shows, with or without each consumer."""
        active, totals = self._membership.active, self._membership.totals()
        return SubscriptionStats(
            type=TYPE_NAMES[self.type],
            msg_rate_out=self._rate_out.of(totals.messages),
            msg_throughput_out=self._throughput_out.of(totals.bytes),
            msg_drop_rate=self._rate_dropped.of(self.dropped),
            msg_out_counter=totals.messages,
            bytes_out_counter=totals.bytes,
            active_consumer_name=None if active is None else active.name,
            last_consumed_flow_timestamp=totals.last_flow_ms,
            consumers=[each.stats() for each in self.consumers] if consumers else [],
            is_durable=False,
        )

    # --- consumers

    def add_consumer(self, options: SubscribeRequest) -> Consumer:
        """Let a consumer in; it has no permits yet."""
        if self._closing:
            raise ServiceNotReady(f"subscription {self.name} is being closed")
        consumer, rewind = self._membership.join(options)
        self._settle(rewind)
        return consumer

    def remove_consumer(self, consumer: Consumer) -> None:
        self._settle(self._membership.leave(consumer))

    def _settle(self, rewind: bool) -> None:
        """There is nothing to rewind to: a new active consumer gets what comes from now on."""
        if rewind and self._membership.state is not None:
            self._membership.state.on_rewound()

    def ack(self, consumer: Consumer, acks: Sequence[Ack], *, cumulative: bool = False) -> None:
        """Nothing waits for it."""

    async def ack_durable(self) -> None:
        """Nothing is stored."""

    def redeliver(
        self,
        consumer: Consumer,
        positions: Iterable[Position] | None = None,
        epoch: int | None = None,
    ) -> None:
        """Nothing comes twice."""

    async def seek(self, position: Position, unacked: int = 0) -> None:
        """There is no other place than now."""

    async def seek_time(self, ms: int) -> None:
        """There is no other place than now."""

    # --- messages

    def publish(self, payload: bytes) -> bool:
        """Hand a message to a consumer now; False: it was dropped."""
        state = self._membership.state
        # A number of its own for the choice alone: clients see SENT_POSITION, and never acknowledge
        # it.
        self._number += 1
        position = Position(0, self._number)
        if state is None:
            return self._drop()
        unsent = Unsent(position, payload, messages_in(payload))
        plan = state.plan([unsent])
        if not plan.deliveries:
            # Invariant 1: the choice would let it wait for a consumer.
            state.on_acked_through(position)
            return self._drop()
        key = plan.deliveries[0][0]
        # Invariant 2: permits are used, but nothing counts as unacknowledged.
        state.on_ack(key, position)
        self._membership.get(key).offer([Delivery(SENT_POSITION, payload, unsent.num_messages)])
        DISPATCHED_ENTRIES.inc()
        return True

    def _drop(self) -> bool:
        self.dropped += 1
        DROPPED_ENTRIES.inc()
        return False

    # --- the end

    async def close(self, error: MagnetarError | None = None) -> None:
        """Stop every consumer (`error` tells them why)."""
        self._closing = True
        self._membership.stop_all(error)

    async def unsubscribe(self, *, by: Consumer | None = None, force: bool = False) -> None:
        """Close it; refused while it has consumers other than `by`, unless `force`."""
        if not force and any(each is not by for each in self.consumers):
            raise ConsumerBusy(f"subscription {self.name} has connected consumers")
        await self.close(ServiceNotReady(f"subscription {self.name} was removed"))
