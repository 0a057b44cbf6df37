"""Pure: a token bucket, the measure of a rate; who asks brings the time.

Owns: `TokenBucket`.

Invariants:
1. What is taken in any span of time, while takers wait for `seconds_until_next` to be 0, is at most
   what the rate gives in that span, what one period gives beside it, and the last thing taken.
2. However long nobody takes anything, no more than one period's tokens wait.
3. What is taken may be more than there is: then the next taker waits until that is made up for.
4. A change of rate makes nobody wait longer for what was taken before it, and, of two rates, the
   higher one is ready no later.
"""

from __future__ import annotations

from typing import Final

_WHOLE: Final = 1 - 1e-6
"""A token, but for what rounding takes of it: a wait that was computed must be long enough."""


class TokenBucket:
    """A balance of tokens that grows at a rate, up to what one period brings."""

    __slots__ = ("_at", "_balance", "_capacity", "_per_second")

    def __init__(self, per_period: float, period_seconds: float, now: float) -> None:
        # Full: what was not used before counts as saved.
        self._capacity = max(per_period, 1.0)
        self._per_second = per_period / period_seconds
        self._balance = self._capacity
        self._at = now

    def available(self, now: float) -> float:
        """How many tokens there are; below 0: so many were taken too many."""
        if now > self._at:
            gained = (now - self._at) * self._per_second
            self._balance = min(self._balance + gained, self._capacity)
            self._at = now
        return self._balance

    def take(self, tokens: float, now: float) -> None:
        """Take them, also if there are fewer; below 0: give them back."""
        self._balance = min(self.available(now) - tokens, self._capacity)

    def has_token(self, now: float) -> bool:
        return self.available(now) >= _WHOLE

    def seconds_until_next(self, now: float) -> float:
        """How long until there is a token; 0: there is one."""
        missing = 1 - self.available(now)
        return 0.0 if self.has_token(now) else missing / self._per_second

    def change(self, per_period: float, period_seconds: float, now: float) -> None:
        """Go on at another rate, with what there is."""
        balance, before = self.available(now), self._per_second
        self._capacity = max(per_period, 1.0)
        self._per_second = per_period / period_seconds
        # Invariant 4: a lower rate would take longer to make up for what a higher one let through.
        if balance < 1 and self._per_second < before:
            balance = 1 - (1 - balance) * self._per_second / before
        self._balance = min(balance, self._capacity)
