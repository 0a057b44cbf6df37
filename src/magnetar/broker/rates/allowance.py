"""Pure: what a policy of rates lets through, in messages and bytes at once.

Owns: `RateLimit`, the numbers of a policy, and `Allowance`, what is left of them now.

Invariants:
1. Both rates hold at the same time; 0 is none. A limit has at least one of them.
2. A change keeps what a rate has counted; a rate that was not there before begins full.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from magnetar.broker.policy.values import DispatchRate, PublishRate
from magnetar.broker.rates.token_bucket import TokenBucket


class RateLimit(NamedTuple):
    """The messages and bytes that may pass in a period; 0: any number."""

    messages: float
    bytes: float
    period_seconds: float = 1.0

    @classmethod
    def of_publishing(cls, rate: PublishRate) -> RateLimit | None:
        """None: there is no limit."""
        return _limit(rate.publish_throttling_rate_in_msg, rate.publish_throttling_rate_in_byte)

    @classmethod
    def of_dispatching(cls, rate: DispatchRate) -> RateLimit | None:
        """The fixed part of it; None: there is no limit."""
        return _limit(
            rate.dispatch_throttling_rate_in_msg,
            rate.dispatch_throttling_rate_in_byte,
            float(rate.rate_period_in_second),
        )

    def raised(self, messages_per_second: float, bytes_per_second: float) -> RateLimit:
        """A limit that lets so much more through, in what it limits at all."""
        seconds = self.period_seconds
        return RateLimit(
            self.messages and self.messages + messages_per_second * seconds,
            self.bytes and self.bytes + bytes_per_second * seconds,
            seconds,
        )

    def __str__(self) -> str:
        seconds = self.period_seconds
        per = "s" if seconds == 1 else f"{seconds:g} s"
        named = ((self.messages, "messages"), (self.bytes, "bytes"))
        return " and ".join(f"{count:g} {unit}/{per}" for count, unit in named if count)


def _limit(messages: int, size: int, period_seconds: float = 1.0) -> RateLimit | None:
    found = RateLimit(max(messages, 0), max(size, 0), period_seconds)
    return found if found.messages or found.bytes else None


class Allowance:
    """The messages and bytes that a limit has left now."""

    def __init__(self, limit: RateLimit, now: float) -> None:
        self._messages = _changed(None, limit.messages, limit.period_seconds, now)
        self._bytes = _changed(None, limit.bytes, limit.period_seconds, now)

    def change(self, limit: RateLimit, now: float) -> None:
        """Go on under another limit."""
        self._messages = _changed(self._messages, limit.messages, limit.period_seconds, now)
        self._bytes = _changed(self._bytes, limit.bytes, limit.period_seconds, now)

    def is_open(self, now: float) -> bool:
        """Whether something may pass: one thing, whatever its size."""
        return all(each.has_token(now) for each in self._buckets())

    def room(self, now: float) -> tuple[float, float]:
        """How many messages and bytes may pass; `inf`: any number."""
        messages, size = self._messages, self._bytes
        return (
            inf if messages is None else messages.available(now),
            inf if size is None else size.available(now),
        )

    def take(self, messages: float, size: float, now: float) -> None:
        """Count what passed; below 0: it did not, after all."""
        if self._messages is not None:
            self._messages.take(messages, now)
        if self._bytes is not None:
            self._bytes.take(size, now)

    def seconds_left(self, now: float) -> float:
        """How long until it is open; 0: it is."""
        return max((each.seconds_until_next(now) for each in self._buckets()), default=0.0)

    def _buckets(self) -> list[TokenBucket]:
        return [each for each in (self._messages, self._bytes) if each is not None]


def _changed(
    bucket: TokenBucket | None, rate: float, period_seconds: float, now: float
) -> TokenBucket | None:
    if not rate:
        return None
    if bucket is None:
        return TokenBucket(rate, period_seconds, now)
    bucket.change(rate, period_seconds, now)
    return bucket
