"""The rates of one topic, as its policies want them: of publishing, and of dispatching.

Owns: `TopicRates`.

Invariants:
1. Without such a policy there is no limiter, and nothing on the way of a message asks for one.
2. A changed policy holds at once: what waits goes on at the new rate, or right away if there is
   none any more. What the former one has counted still counts.
3. Subscriptions share `dispatchRate`; each has `subscriptionDispatchRate`, or what was set for it
   alone, for itself. A subscription that comes later gets the same.
4. When the topic ends nobody waits any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from magnetar.broker.dispatch.dispatch_throttle import DispatchThrottle
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.values import DispatchRate
from magnetar.broker.publish.producers import TopicProducers
from magnetar.broker.rates.allowance import RateLimit
from magnetar.broker.rates.rate_limiter import Extra, RateLimiter
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.model.names import TopicName
from magnetar.runtime.clock import Clock
from magnetar.runtime.metrics import DISPATCH_THROTTLED, PUBLISH_THROTTLED
from magnetar.runtime.slices import SlicePace

_PUBLISHED_S: Final = 1.0
"""A measured rate of publishing is taken for so long: it is a sum over all producers."""


def _nothing_published() -> tuple[float, float]:
    return 0.0, 0.0


class TopicRates:
    """See the module."""

    def __init__(
        self,
        name: TopicName,
        producers: TopicProducers,
        policies: TopicPolicies,
        clock: Clock,
        published: Extra = _nothing_published,
    ) -> None:
        """`published`: messages and bytes in a second, by which `relativeToPublishRate` goes."""
        self._name = name
        self._producers = producers
        self._clock = clock
        self._publishing: RateLimiter | None = None
        self._times_before = 0
        self._policies = policies
        self._dispatching: RateLimiter | None = None
        self._measure = published
        self._measured, self._measured_at = (0.0, 0.0), -_PUBLISHED_S
        self._follow_publishing(policies)
        self._dispatching = self._changed(None, "dispatchRate", policies.dispatch_rate)

    @property
    def publish_limited_times(self) -> int:
        """How often a connection had to wait, since the topic was loaded."""
        now = 0 if self._publishing is None else self._publishing.times
        return self._times_before + now

    async def follow(self, policies: TopicPolicies, subscriptions: Iterable[Subscription]) -> None:
        """Let changed policies hold; those of one topic one after the other."""
        before, self._policies = self._policies, policies
        if policies.publish_rate != before.publish_rate:
            self._follow_publishing(policies)
        if _dispatching(policies) == _dispatching(before):
            return
        former = self._dispatching
        self._dispatching = self._changed(former, "dispatchRate", policies.dispatch_rate)
        # Whoever still knows it from here on passes it.
        if former is not None and self._dispatching is None:
            former.close()
        pace = SlicePace()
        # One that comes in the pauses gets the same.
        for each in list(subscriptions):
            self.limit(each)
            await pace.after()

    def limit(self, subscription: Subscription) -> None:
        """Let the present rates hold for a subscription."""
        name, policies, before = subscription.name, self._policies, subscription.throttle
        rate = policies.own_dispatch_rates.get(name, policies.subscription_dispatch_rate)
        limiter = None if before is None else before.own
        own = self._changed(limiter, "subscriptionDispatchRate", rate)
        # Nearly always: none of the two is set.
        if before is None and own is None and self._dispatching is None:
            return
        throttle: DispatchThrottle | None = None
        if own is not None or self._dispatching is not None:
            by_entries = policies.dispatch_by_entries
            throttle = DispatchThrottle(own, self._dispatching, by_entries=by_entries)
        subscription.limit_rates(throttle)

    def close(self) -> None:
        """End with the topic: its producers take nothing any more, its subscriptions will leave."""
        self._end_publishing()

    # --- publishing

    def _follow_publishing(self, policies: TopicPolicies) -> None:
        limit = RateLimit.of_publishing(policies.publish_rate)
        if limit is None:
            self._end_publishing()
        elif self._publishing is not None:
            self._publishing.change(limit)
        else:
            self._publishing = self._limiter(limit, "publishRate", PUBLISH_THROTTLED.inc)
            self._producers.limit_rate(self._publishing)

    def _end_publishing(self) -> None:
        limiter, self._publishing = self._publishing, None
        if limiter is not None:
            self._times_before += limiter.times
            # First: who goes on must not meet it again.
            self._producers.limit_rate(None)
            limiter.close()

    # --- dispatching

    def _changed(
        self, limiter: RateLimiter | None, what: str, rate: DispatchRate
    ) -> RateLimiter | None:
        limit = RateLimit.of_dispatching(rate)
        if limit is None:
            return None
        extra = self._published if rate.relative_to_publish_rate else None
        if limiter is None:
            return self._limiter(limit, what, DISPATCH_THROTTLED.inc, extra=extra)
        limiter.change(limit, extra)
        return limiter

    def _published(self) -> tuple[float, float]:
        now = self._clock.monotonic()
        if now - self._measured_at >= _PUBLISHED_S:
            self._measured, self._measured_at = self._measure(), now
        return self._measured

    def _limiter(
        self,
        limit: RateLimit,
        what: str,
        on_wait: Callable[[], object],
        *,
        extra: Extra | None = None,
    ) -> RateLimiter:
        return RateLimiter(
            limit,
            self._clock,
            what=what,
            where=str(self._name),
            on_wait=on_wait,
            extra=extra,
        )


def _dispatching(policies: TopicPolicies) -> tuple[object, ...]:
    return (
        policies.dispatch_rate,
        policies.subscription_dispatch_rate,
        policies.own_dispatch_rates,
        policies.dispatch_by_entries,
    )
