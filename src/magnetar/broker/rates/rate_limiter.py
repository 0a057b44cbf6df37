"""A rate and those who wait for it, in the order in which they came.

Owns: `RateLimiter`: one policy of rates on one topic or subscription, its line and its one timer.

Invariants:
1. Who is refused by `admits` stands in the line until it is called, leaves, or the limiter is
   closed. A timer runs exactly while somebody stands there; without anybody nothing runs at all.
2. Nobody passes those who wait: who comes while there is a line joins it. One that was called may
   pass until the next call, which is for another one.
3. Each call takes one out of the line, so nobody who does not use its turn holds others up for
   longer than `PAUSE_S`.
4. A high rate is let through in portions: what has come in by one call is shared out, turn by turn
   (each ends with `settle`), and what comes in meanwhile is for the next one, `PAUSE_S` later.
5. The line is as long as there are connections or subscriptions: each stands in it once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeAlias

from magnetar.broker.rates.allowance import Allowance, RateLimit
from magnetar.runtime.clock import Clock
from magnetar.runtime.signal import Signal

PAUSE_S: Final = 0.02
"""Fifty portions in a second: each costs a turn of whoever waits."""

Extra: TypeAlias = Callable[[], tuple[float, float]]
"""Messages and bytes in a second that come on top of the limit, now."""

# A rate that follows another one may have become higher while somebody waits.
_LOOK_S: Final = 10.0


class RateLimiter:
    """The rate of a topic or subscription. End it with `close`."""

    def __init__(
        self,
        limit: RateLimit,
        clock: Clock,
        *,
        what: str,
        where: str,
        on_wait: Callable[[], object],
        extra: Extra | None = None,
    ) -> None:
        """`what`, `where`: the policy and the topic, as people are told; `on_wait` counts."""
        self.times = 0
        """How often somebody had to wait."""
        self._clock = clock
        self._what = what
        self._where = where
        self._on_wait = on_wait
        self._limit = limit
        self._extra = extra
        self._allowance = Allowance(limit, clock.monotonic())
        # Who waits, by what wakes it; and who was called last, and may pass the others.
        self._line: dict[Signal, None] = {}
        self._called: Signal | None = None
        # What is left of the present portion, in messages and bytes (invariant 4).
        self._portion = (0.0, 0.0)
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __str__(self) -> str:
        return f"{self._what} of {self._limit} on {self._where}"

    @property
    def waiting(self) -> int:
        return len(self._line)

    def admits(self, wake: Signal) -> bool:
        """Whether one thing may pass now; if not, `wake` advances when to ask again."""
        now = self._now()
        may_pass = not self._line or wake is self._called
        if (may_pass and self._allowance.is_open(now)) or self._is_closed:
            return True
        if wake is self._called:
            self._called = None
        if wake not in self._line:
            self._line[wake] = None
            self.times += 1
            self._on_wait()
        if self._timer is None:
            self._arm(now, PAUSE_S)
        return False

    def room(self) -> tuple[float, float]:
        """How many messages and bytes may pass now."""
        return self._allowance.room(self._now())

    def take(self, messages: float, size: float) -> None:
        """Count what passed."""
        left, left_bytes = self._portion
        self._portion = left - messages, left_bytes - size
        self._allowance.take(messages, size, self._clock.monotonic())

    def settle(self, messages: float = 0, size: float = 0) -> None:
        """End a turn; what passed beyond what was taken for it (below 0: less) is counted."""
        self.take(messages, size)
        if self._line:
            now = self._clock.monotonic()
            is_left = min(self._portion) >= 1 and self._allowance.is_open(now)
            self._arm(now, 0.0 if is_left else PAUSE_S)

    def change(self, limit: RateLimit, extra: Extra | None = None) -> None:
        """Follow another policy, with what the one before has counted."""
        self._limit, self._extra = limit, extra
        now = self._clock.monotonic()
        self._allowance.change(limit, now)
        if self._line:
            self._arm(now, 0.0 if self._allowance.is_open(now) else PAUSE_S)

    def leave(self, wake: Signal) -> None:
        """Take out of the line who waits no more; one that is not there is ignored."""
        self._line.pop(wake, None)
        if wake is self._called:
            self._called = None
        if not self._line:
            self._disarm()

    def close(self) -> None:
        """There is no rate any more: all that wait go on."""
        self._is_closed = True
        self._disarm()
        line, self._line, self._called = self._line, {}, None
        for wake in line:
            wake.advance()

    # --- the line

    def _now(self) -> float:
        now = self._clock.monotonic()
        if self._extra is not None:
            self._allowance.change(self._limit.raised(*self._extra()), now)
        return now

    def _call(self) -> None:
        """Call the first one; others follow when its turn is over, or after a pause."""
        self._timer = None
        now = self._now()
        if self._allowance.is_open(now):
            # A new portion, unless this one has something left.
            if min(self._portion) < 1:
                self._portion = self._allowance.room(now)
            self._called = next(iter(self._line))
            del self._line[self._called]
            self._called.advance()
        if self._line:
            self._arm(now, PAUSE_S)

    def _arm(self, now: float, least: float) -> None:
        self._disarm()
        seconds = max(self._allowance.seconds_left(now), least)
        if self._extra is not None:
            seconds = min(seconds, _LOOK_S)
        self._timer = asyncio.get_running_loop().call_later(seconds, self._call)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
