"""The rates of one topic, as its policies want them: of publishing, and of dispatching.

Owns: `TopicRates`.

Invariants:
1. Without such a policy there is no limiter, and nothing on the way of a message asks for one.
2. A changed policy holds at once: what waits goes on at the new rate, or right away if there is
   none any more. What the former one has counted still counts.
3. When the topic ends nobody waits any more.
"""

from __future__ import annotations

from typing import Final

from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.publish.producers import TopicProducers
from magnetar.broker.rates.allowance import RateLimit
from magnetar.broker.rates.rate_limiter import RateLimiter
from magnetar.model.names import TopicName
from magnetar.runtime.clock import Clock
from magnetar.runtime.metrics import PUBLISH_THROTTLED

_CONNECTIONS_AT_ONCE: Final = 500
"""Their work is shared out over turns of the loop; the call alone takes a microsecond or two."""


class TopicRates:
    """See the module."""

    def __init__(self, name: TopicName, producers: TopicProducers, clock: Clock) -> None:
        self._name = name
        self._producers = producers
        self._clock = clock
        self._publishing: RateLimiter | None = None
        self._times_before = 0

    @property
    def publish_limited_times(self) -> int:
        """How often a connection had to wait, since the topic was loaded."""
        now = 0 if self._publishing is None else self._publishing.times
        return self._times_before + now

    def follow(self, policies: TopicPolicies) -> None:
        """Let these policies hold from now on."""
        limit = RateLimit.of_publishing(policies.publish_rate)
        if limit is None:
            self._end_publishing()
        elif self._publishing is not None:
            self._publishing.change(limit)
        else:
            # Connections count what they send while they are called: as many as there is room for.
            self._publishing = RateLimiter(
                limit,
                self._clock,
                what="publishRate",
                where=str(self._name),
                on_wait=PUBLISH_THROTTLED.inc,
                called_at_once=_CONNECTIONS_AT_ONCE,
            )
            self._producers.limit_rate(self._publishing)

    def _end_publishing(self) -> None:
        limiter, self._publishing = self._publishing, None
        if limiter is not None:
            self._times_before += limiter.times
            # First: who goes on must not meet it again.
            self._producers.limit_rate(None)
            limiter.close()

    def close(self) -> None:
        """The topic has ended: its producers take nothing any more."""
        self._end_publishing()
