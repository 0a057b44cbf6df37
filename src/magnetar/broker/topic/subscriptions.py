"""The subscriptions of one persistent topic: which there are, and how they begin and end.

Owns: `TopicSubscriptions`; `TopicEnds`, the signal for those who wait until a terminated topic is
drained.

Invariants:
1. Every durable cursor of the managed ledger has a subscription here once the topic is loaded.
2. One name is one subscription, durable or not, for as long as it is here.
3. A subscription is here from the moment at which its cursor exists until that is gone.
4. The isolation of a subscription is that with which it was created; a consumer that asks for
   another one is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from magnetar.broker.api import SubscribeRequest
from magnetar.broker.dispatch.consumer import Consumer
from magnetar.broker.dispatch.dispatcher import ReadableTopic
from magnetar.broker.entries import publish_time_of
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.subscribe.subscribe_rate import ConsumerKey, SubscribeCounts
from magnetar.broker.subscribe.subscription import TYPE_NAMES, Subscription, first_mark_delete
from magnetar.broker.subscribe.txn_acks import AckParts
from magnetar.broker.topic.rates import TopicRates
from magnetar.errors import (
    ConsumerBusy,
    MagnetarError,
    NotAllowed,
    ProducerBusy,
    SubscriptionNotFound,
)
from magnetar.managed_ledger.cursor import Cursor
from magnetar.model.ids import Position
from magnetar.model.isolation import ReadIsolation, asked_isolation, stored_isolation
from magnetar.model.subscriptions import COMPACTION, check_subscription_name
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal

_MS_PER_SECOND: Final = 1000
_READ: Final = "read the topic compacted, with a subscription or reader of your own"


class TopicSubscriptions:
    """All subscriptions of one topic."""

    def __init__(
        self,
        topic: ReadableTopic,
        *,
        clock: Clock,
        limits: Limits,
        consistent_hashing: bool = True,
        transactions: AckParts | None = None,
        rates: TopicRates | None = None,
    ) -> None:
        self._topic = topic
        self._rates = rates
        self._transactions = transactions
        self._clock = clock
        self._limits = limits
        self._consistent_hashing = consistent_hashing
        self._subscribes = SubscribeCounts(limits.subscribe_rate_consumers)
        self._by_name: dict[str, Subscription] = {}
        # They are woken also below the maxReadPosition, and get aborted messages too.
        self._uncommitted: set[Subscription] = set()
        # Creating and deleting a cursor awaits: without turns a name could be made twice (invariant
        # 2).
        self._turn = asyncio.Lock()
        self.unfinished: str | None = None
        """The subscription whose deletion stopped half-way, if one did."""
        self.woken = Signal()
        """Advances when somebody may see more, whether there is a subscription or not."""

    @property
    def by_name(self) -> Mapping[str, Subscription]:
        return MappingProxyType(self._by_name)

    @property
    def consumers(self) -> int:
        return sum(len(each.consumers) for each in self._by_name.values())

    def wake(self) -> None:
        self.woken.advance()
        for subscription in self._by_name.values():
            subscription.wake.advance()

    def limits_changed(self) -> None:
        for subscription in self._by_name.values():
            subscription.limits_changed()

    def first_unacked(self) -> Position | None:
        """The first entry that any of them has not acknowledged; None: there is none of them."""
        return min((each.first_unacked() for each in self._by_name.values()), default=None)

    def pass_over(self, positions: Sequence[Position]) -> None:
        """Entries that are for nobody count as acknowledged."""
        for subscription in self._by_name.values():
            subscription.pass_over(positions)

    def appended(self, *, is_readable: bool) -> None:
        """More is durable; if it is not readable, behind an undecided transaction."""
        # The usual case: the maxReadPosition moved with the last append.
        if is_readable:
            self.wake()
        else:
            self.wake_uncommitted()

    def wake_uncommitted(self) -> None:
        self.woken.advance()
        for subscription in self._uncommitted:
            subscription.wake.advance()

    async def pass_over_aborted(self, aborted: Sequence[Position]) -> None:
        """Pass over entries of aborted transactions, but not where uncommitted ones are read."""
        for subscription in list(self._by_name.values()):
            if subscription not in self._uncommitted:
                subscription.pass_over(aborted)
                await asyncio.sleep(0)  # they may be many

    async def pass_aborted(self, last: Position) -> None:
        """Entries of aborted transactions, up to `last`, count as acknowledged everywhere."""
        for subscription in list(self._by_name.values()):
            await subscription.pass_aborted(last)

    def end_for(self, isolation: ReadIsolation | None) -> Position:
        """The last position that such a subscription may see."""
        # `READ_UNCOMMITTED` of Kafka's consumers: everything durable, decided or not.
        if isolation is ReadIsolation.UNCOMMITTED:
            return self._topic.ledger.last_position()
        return self._topic.max_read_position()

    def load(self) -> None:
        """Open a subscription for every durable cursor."""
        ledger = self._topic.ledger
        for name in ledger.cursor_names():
            self._open(ledger.cursor(name))

    async def subscribe(self, options: SubscribeRequest, policies: TopicPolicies) -> Subscription:
        """The subscription that a consumer asks for, created if need be and allowed."""
        check_consumer_options(options, policies)
        self._check_rate(options, policies)
        # Here as well as when it joins: no cursor is made for who is refused.
        if policies.max_consumers and self.consumers >= policies.max_consumers:
            raise ConsumerBusy(f"{self._topic.name} has {self.consumers} consumers, its limit")
        async with self._turn:
            present = self._by_name.get(options.subscription)
            if present is not None:
                # Refused as in Pulsar: a reader's name must not take over a durable position.
                if present.durable != options.durable:
                    kind = "durable" if present.durable else "not durable"
                    raise NotAllowed(f"subscription {options.subscription!r} is {kind}")
                _check_isolation(options, present)
                return present
            # Readers (non-durable) are always made: they leave nothing behind.
            if options.durable and not policies.auto_subscription_creation:
                raise _missing(options.subscription)
            return await self._create(options, policies)

    def _check_rate(self, options: SubscribeRequest, policies: TopicPolicies) -> None:
        rate = policies.subscribe_rate
        host = options.address.rpartition(":")[0]  # each of its connections has a port of its own
        key = ConsumerKey(host, options.name, options.consumer_id)
        if not self._subscribes.admits(key, rate, self._clock.monotonic()):
            raise NotAllowed(
                f"consumer {options.name!r} subscribed to {self._topic.name}"
                f" {rate.subscribe_throttling_rate_per_consumer} times within"
                f" {rate.rate_period_in_second} s",
                hint="wait for the end of that period, or raise subscribeRate",
            )

    async def create(
        self,
        name: str,
        mark_delete: Position,
        policies: TopicPolicies,
        properties: Mapping[str, str] | None = None,
    ) -> bool:
        """A durable subscription without a consumer; False: it exists already."""
        check_subscription_name(name)
        asked_isolation(properties or {})
        async with self._turn:
            if name in self._by_name:
                return False
            if name != COMPACTION:
                self._check_room(policies)
            ledger = self._topic.ledger
            self._open(await ledger.create_cursor(name, mark_delete, dict(properties or {})))
            return True

    async def _create(self, options: SubscribeRequest, policies: TopicPolicies) -> Subscription:
        ledger = self._topic.ledger
        isolation = asked_isolation(options.subscription_properties)
        mark_delete = first_mark_delete(options, self.end_for(isolation))
        # startMessageRollbackDuration: back in time, whatever the initial position says.
        if options.rollback_seconds > 0:
            mark_delete = await self._rolled_back(options.rollback_seconds, isolation)
        # In memory alone: it goes with its last consumer, so no limit on subscriptions either.
        if not options.durable:
            return self._open(ledger.open_reader(options.subscription, mark_delete), isolation)
        self._check_room(policies)
        properties = dict(options.subscription_properties)
        cursor = await ledger.create_cursor(options.subscription, mark_delete, properties)
        return self._open(cursor)

    async def _rolled_back(self, seconds: int, isolation: ReadIsolation | None) -> Position:
        ms = self._clock.now_ms() - seconds * _MS_PER_SECOND
        found = await self._topic.ledger.find_by_time(ms, publish_time_of)
        # Nothing is that recent: begin at the end.
        if found is None:
            return self.end_for(isolation)
        return found.previous

    def _open(self, cursor: Cursor, asked: ReadIsolation | None = None) -> Subscription:
        """Durable ones have what was asked for among their properties."""
        subscription = Subscription(
            self._topic,
            cursor,
            clock=self._clock,
            limits=self._limits,
            consistent_hashing=self._consistent_hashing,
            transactions=self._transactions,
            isolation=asked or stored_isolation(cursor.properties),
        )
        self._by_name[cursor.name] = subscription
        if self._rates is not None:
            self._rates.limit(subscription)
        if subscription.isolation is ReadIsolation.UNCOMMITTED:
            self._uncommitted.add(subscription)
        return subscription

    def _check_room(self, policies: TopicPolicies) -> None:
        limit = policies.max_subscriptions
        # The broker's own is none that a user made.
        if limit and len(self._by_name) - (COMPACTION in self._by_name) >= limit:
            raise NotAllowed(f"{self._topic.name} has {limit} subscriptions, its limit")

    # --- the end

    async def delete(self, name: str, *, by: Consumer | None = None, force: bool = False) -> None:
        """Remove a subscription and its cursor; refused while others than `by` are connected."""
        async with self._turn:
            subscription = self._by_name.get(name)
            if subscription is None:
                raise _missing(name)
            try:
                await subscription.unsubscribe(by=by, force=force)
            except BaseException:
                # Half-way: nobody can use it any more, and only a load finds what is left of it.
                if subscription.is_closed:
                    self.unfinished = name
                raise
            self._forget(subscription)

    async def release(self, subscription: Subscription) -> None:
        """A consumer left: drop what lives only as long as it has consumers."""
        async with self._turn:
            present = self._by_name.get(subscription.name)
            # Made anew under the same name, or somebody has joined while this waited for its turn.
            if present is not subscription or subscription.durable or subscription.consumers:
                return
            self._forget(subscription)
            await subscription.close()

    def _forget(self, subscription: Subscription) -> None:
        del self._by_name[subscription.name]
        self._uncommitted.discard(subscription)

    async def close(self, error: MagnetarError | None) -> None:
        """Close all; raises the first error once every one of them had its turn."""
        async with self._turn:
            # Side by side: each writes its cursor, and they share the journal's syncs.
            closing = [each.close(error) for each in self._by_name.values()]
            results = await asyncio.gather(*closing, return_exceptions=True)
            self._by_name.clear()
            self._uncommitted.clear()
        for result in results:
            if isinstance(result, BaseException):
                raise result


class TopicEnds:
    """Watches the subscriptions of one terminated topic."""

    def __init__(self, tasks: Service) -> None:
        self.moved = Signal()
        self._tasks = tasks
        self._watched: set[Subscription] = set()

    def watch(self, subscriptions: Iterable[Subscription]) -> None:
        """Watch those of them that are new."""
        for subscription in subscriptions:
            if subscription not in self._watched:
                self._watched.add(subscription)
                # The version is taken now, not when the coroutine first runs: a step in between
                # must be seen.
                watch = self._watch(subscription, subscription.wake.version)
                self._tasks.spawn(watch, f"end of {subscription.name}")
        self.moved.advance()

    def unwatch(self, subscription: Subscription) -> None:
        """Stop watching a subscription that is gone; one that was not watched is ignored."""
        if subscription in self._watched:
            # Out of the set first, then woken: its coroutine looks there and ends.
            self._watched.remove(subscription)
            subscription.wake.advance()

    async def _watch(self, subscription: Subscription, seen: int) -> None:
        while subscription in self._watched:
            seen = await subscription.wake.past(seen)
            self.moved.advance()


def _check_isolation(options: SubscribeRequest, present: Subscription) -> None:
    asked = asked_isolation(options.subscription_properties)
    if asked is not None and asked is not present.isolation:
        raise NotAllowed(
            f"subscription {present.name!r} is {present.isolation}, not {asked}",
            hint="ask for what it is, or use another subscription",
        )


def check_consumer_options(options: SubscribeRequest, policies: TopicPolicies) -> None:
    """What a SUBSCRIBE may not ask for, whatever subscriptions there are."""
    if not options.subscription.strip():
        # The protocol's own error for names has this code.
        raise ProducerBusy("a subscription needs a name")
    check_subscription_name(options.subscription)
    if options.subscription == COMPACTION:
        raise NotAllowed(f"{COMPACTION} is the position of the topic's compaction", hint=_READ)
    if options.read_compacted and not options.type.takes_cumulative_acks:
        raise NotAllowed("compacted reading needs an Exclusive or Failover subscription")
    kind = TYPE_NAMES[options.type]
    if policies.subscription_types and kind not in policies.subscription_types:
        allowed = ", ".join(sorted(policies.subscription_types))
        raise NotAllowed(f"subscriptions of type {kind} are switched off", hint=f"use {allowed}")


def _missing(name: str) -> SubscriptionNotFound:
    return SubscriptionNotFound(f"there is no subscription {name!r}")
