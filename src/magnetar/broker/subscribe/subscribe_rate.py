"""Pure: how often each consumer of one topic may subscribe.

Owns: `SubscribeCounts`.

Invariants:
1. From the first request of a consumer on, at most so many are admitted in a period; then a new
   period begins with the next one. Refused ones do not count.
2. At most `consumers_max` are remembered: of more, those whose period began first are forgotten,
   which can only let them in. Nothing is remembered without a rate.
"""

from __future__ import annotations

from typing import NamedTuple

from magnetar.broker.policy.values import SubscribeRate


class ConsumerKey(NamedTuple):
    """A consumer as the rate knows it, over all its connections."""

    host: str
    name: str
    consumer_id: int


class SubscribeCounts:
    """The requests of one topic's consumers."""

    def __init__(self, consumers_max: int) -> None:
        self._consumers_max = consumers_max
        # When its period began, and how many were admitted in it; in the order of beginnings.
        self._periods: dict[ConsumerKey, tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._periods)

    def admits(self, key: ConsumerKey, rate: SubscribeRate, now: float) -> bool:
        """Whether this one may subscribe now; if so, it counts."""
        most, periods = rate.subscribe_throttling_rate_per_consumer, self._periods
        if most <= 0:
            periods.clear()
            return True
        began, count = periods.get(key, (now, 0))
        if now - began >= rate.rate_period_in_second:
            del periods[key]
            began, count = now, 0
        if count >= most:
            return False
        periods[key] = began, count + 1
        # Invariant 2. The one that has just come is the last to go.
        while len(periods) > self._consumers_max:
            del periods[next(iter(periods))]
        return True
