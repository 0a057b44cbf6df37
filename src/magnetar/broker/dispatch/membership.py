"""The consumers of one subscription: who may join, and what their coming and going tells them.

Owns: `Membership`: the connected consumers and the `DispatchState` that chooses between them.

Invariants:
1. There is a `state` exactly while there is a consumer; it is a new one whenever the first joins,
   so the type may change while nobody is connected, and nothing of former consumers is left in it.
2. All consumers of a subscription have the same type, and the same Key_Shared mode and order.
   They share entry buckets all or not at all, and those that do name the same buckets.
3. Failover: each change of the active consumer is told to every consumer; one that joins and is
   not chosen is told so.

4. Nobody joins above the topic's limits of consumers; those who are there stay when one is lowered.

Relies on: its owner to rewind the cursor when `join` or `leave` say so, and to call
`limits_changed` when the topic has other policies.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple, Protocol

from magnetar.broker.api import SubscribeRequest
from magnetar.broker.dispatch.consumer import Consumer
from magnetar.broker.dispatch.dispatch_state import DispatchState
from magnetar.broker.dispatch.plan import DispatchLimits, JoinRefused, MembershipChange, RefusalKind
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.errors import ConsumerAssign, ConsumerBusy, MagnetarError
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import KeySharedPolicy, SubscriptionType
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.signal import Signal

_DEFAULT_POLICY: Final = KeySharedPolicy()


class JoinedTopic(Protocol):
    """The part of a topic that its consumers are let in by."""

    @property
    def name(self) -> TopicName: ...

    @property
    def policies(self) -> TopicPolicies: ...

    @property
    def consumers(self) -> int:
        """How many are connected, of all subscriptions."""
        ...


class Joined(NamedTuple):
    """A new consumer, and whether the cursor must be rewound for another active one."""

    consumer: Consumer
    rewind: bool


class Totals(NamedTuple):
    """Totals of the messages that present and former consumers got."""

    messages: int = 0
    bytes: int = 0
    redelivered: int = 0
    last_flow_ms: int = 0
    """When one of them last gave permits."""

    def plus(self, consumer: Consumer) -> Totals:
        return Totals(
            self.messages + consumer.messages_out,
            self.bytes + consumer.bytes_out,
            self.redelivered + consumer.redelivered,
            max(self.last_flow_ms, consumer.last_flow_ms),
        )


class Membership:
    """The consumers that are connected to one subscription."""

    def __init__(
        self,
        topic: JoinedTopic,
        subscription: str,
        *,
        wake: Signal,
        clock: Clock,
        limits: Limits,
        consistent_hashing: bool = True,
    ) -> None:
        self._topic = topic
        self._subscription = subscription
        self._wake = wake
        self._clock = clock
        self._limits = limits
        self._consistent_hashing = consistent_hashing
        # Set by the first consumer, and binding for all that join while one is connected (invariant
        # 2).
        self._policy = _DEFAULT_POLICY
        self._by_key: dict[int, Consumer] = {}
        self._next_key = 0
        # Counters of consumers that left: without them the subscription's totals would go down.
        self._former = Totals()
        self.type: SubscriptionType | None = None
        """That of the present or last consumers."""
        self.state: DispatchState | None = None

    @property
    def consumers(self) -> Collection[Consumer]:
        return self._by_key.values()

    @property
    def active(self) -> Consumer | None:
        """The active consumer of an Exclusive or Failover subscription."""
        key = None if self.state is None else self.state.active
        return None if key is None else self._by_key[key]

    def __contains__(self, consumer: object) -> bool:
        return isinstance(consumer, Consumer) and self._by_key.get(consumer.key) is consumer

    def get(self, key: int) -> Consumer:
        return self._by_key[key]

    def totals(self) -> Totals:
        total = self._former
        for consumer in self._by_key.values():
            total = total.plus(consumer)
        return total

    def join(self, options: SubscribeRequest) -> Joined:
        """Let a consumer in, or raise ConsumerBusy or ConsumerAssign."""
        state = self.state
        if state is None:
            state = self._new_state(options)
        else:
            self._check_fits(options)
        self._check_room()
        key = self._next_key
        ranges = () if options.key_shared is None else options.key_shared.ranges
        change = state.on_join(key, options.name, options.priority_level, ranges)
        # Nothing was kept yet, so a refused first consumer leaves no state and no type behind.
        if isinstance(change, JoinRefused):
            kind = ConsumerBusy if change.kind is RefusalKind.BUSY else ConsumerAssign
            raise kind(f"{self._subscription}: {change.reason}")
        # Keys are never used twice: a late event for a former consumer finds nobody.
        self._next_key += 1
        # Only now: the first one was let in, and decides on type and policy for the others.
        if self.state is None:
            self.state, self.type = state, options.type
            self._policy = options.key_shared or _DEFAULT_POLICY
        consumer = self._by_key[key] = Consumer(
            options,
            key=key,
            state=state,
            wake=self._wake,
            clock=self._clock,
            limits=self._limits,
        )
        self._tell_active(change, consumer)
        return Joined(consumer, change.rewind)

    def leave(self, consumer: Consumer, error: MagnetarError | None = None) -> bool:
        """A consumer is gone; True: the cursor must be rewound for another active one."""
        if consumer not in self:
            return False
        assert self.state is not None
        del self._by_key[consumer.key]
        change = self.state.on_leave(consumer.key)
        self._former = self._former.plus(consumer)
        consumer.stop(error)
        # The owner rewinds when the next first consumer comes: there is nobody to deliver to.
        if not self._by_key:
            self.state = None
            return False
        self._tell_active(change, None)
        return change.rewind

    def stop_all(self, error: MagnetarError | None) -> None:
        """Everybody must go; each learns why."""
        self.state = None
        consumers, self._by_key = self._by_key, {}
        for consumer in consumers.values():
            self._former = self._former.plus(consumer)
            consumer.stop(error)

    def limits_changed(self) -> None:
        """Follow the topic's limits of unacknowledged messages."""
        policies = self._topic.policies
        if self.state is not None:
            self.state.limit_unacked(
                policies.max_unacked_per_consumer, policies.max_unacked_per_subscription
            )
            self._wake.advance()

    def _new_state(self, options: SubscribeRequest) -> DispatchState:
        limits, policies = self._limits, self._topic.policies
        return DispatchState(
            options.type,
            DispatchLimits(
                read_entries=limits.subscription_read_entries,
                look_ahead_entries=limits.subscription_look_ahead_entries,
                unacked_per_consumer=policies.max_unacked_per_consumer,
                unacked_per_subscription=policies.max_unacked_per_subscription,
            ),
            topic=str(self._topic.name),
            partition=self._topic.name.partition,
            key_shared=options.key_shared or _DEFAULT_POLICY,
            consistent_hashing=self._consistent_hashing,
        )

    def _check_room(self) -> None:
        policies = self._topic.policies
        limit = policies.max_consumers_per_subscription
        if limit and len(self._by_key) >= limit:
            raise ConsumerBusy(f"{self._subscription} has {limit} consumers, its limit")
        limit = policies.max_consumers
        if limit and self._topic.consumers >= limit:
            raise ConsumerBusy(f"{self._topic.name} has {limit} consumers, its limit")

    def _check_fits(self, options: SubscribeRequest) -> None:
        mine, theirs = self._policy, options.key_shared or _DEFAULT_POLICY
        if self.type is not None and options.type is not self.type:
            # Stream consumers have a segment alone, or share it by entry buckets: between the two
            # the newcomer may come before the former one has left, and the place is only taken.
            shares_anew = mine.entry_buckets != theirs.entry_buckets
            if shares_anew and _is_stream(self.type, mine) and _is_stream(options.type, theirs):
                raise ConsumerBusy(
                    f"{self._subscription} still has consumers that do not share by entry buckets"
                    if theirs.entry_buckets
                    else f"{self._subscription} still has consumers that share by entry buckets"
                )
            raise ConsumerBusy(
                f"{self._subscription} is a {_words(self.type, mine)}, and this consumer is "
                f"of another type, {options.type.name.capitalize()}",
                hint="use a consumer of that type, or a subscription of another name",
            )
        # Consumers of both kinds at once would give a position of the ring two owners.
        if mine.entry_buckets != theirs.entry_buckets:
            shared = "share" if mine.entry_buckets else "do not share"
            raise ConsumerAssign(f"{self._subscription} has consumers that {shared} entry buckets")
        if (mine.mode, mine.out_of_order) != (theirs.mode, theirs.out_of_order):
            raise ConsumerBusy(f"{self._subscription} has consumers of another key-shared policy")

    def _tell_active(self, change: MembershipChange, newcomer: Consumer | None) -> None:
        # ACTIVE_CONSUMER_CHANGE is for Failover only: clients of other types do not expect it.
        if self.type is not SubscriptionType.FAILOVER:
            return
        if change.active_changed:
            for each in self._by_key.values():
                each.tell_activity(each.key == change.active)
        # The active one stays: only the newcomer has to learn that it is a standby.
        elif newcomer is not None:
            newcomer.tell_activity(False)


def _is_stream(kind: SubscriptionType, policy: KeySharedPolicy) -> bool:
    """Whether consumers of this type take a segment in order, as stream consumers do."""
    is_queue = kind in (SubscriptionType.SHARED, SubscriptionType.KEY_SHARED)
    return not is_queue or policy.entry_buckets


def _words(kind: SubscriptionType, policy: KeySharedPolicy) -> str:
    """A type as applications know it: by the consumers of scalable topics, and by Pulsar's name."""
    name = "stream" if _is_stream(kind, policy) else "queue"
    return f"{name} subscription ({kind.name.capitalize()})"
