"""A rate and those who wait for it, in the order in which they came.

Owns: `RateLimiter`: one policy of rates on one topic or subscription, its line and its one timer.

Invariants:
1. Who is refused by `admits` stands in the line until it is called, leaves, or the limiter is
   closed. A timer runs exactly while somebody stands there; without anybody nothing runs at all.
2. Nobody passes those who wait: who comes while there is a line joins it. One that was called may
   pass until the next call, which is for others.
3. Each call takes one out of the line, so nobody who does not use its turn holds others up.
4. A call comes when something may pass, and `PAUSE_S` after the one before it at the earliest: a
   high rate is let through in portions. Where a turn ends later than its call (`settle`) and leaves
   as much as a portion, the next one follows at once.
5. The line is as long as there are connections or subscriptions: each stands in it once.

Relies on: `go_on`, a bound method that is equal to itself each time, and does not raise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeAlias

from magnetar.broker.rates.allowance import Allowance, RateLimit
from magnetar.runtime.clock import Clock

PAUSE_S: Final = 0.02
"""Fifty portions in a second: each costs a turn of whoever waits."""

GoOn: TypeAlias = Callable[[], object]

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
        called_at_once: int = 1,
        extra: Extra | None = None,
    ) -> None:
        """`what`, `where`: the policy and the topic, as people are told; `on_wait` counts.

        `called_at_once`: how many may be called one after the other; more than one only if each has
        counted what it lets through (`take`) when its `go_on` returns.
        """
        self.times = 0
        """How often somebody had to wait."""
        self._clock = clock
        self._what = what
        self._where = where
        self._on_wait = on_wait
        self._called_at_once = called_at_once
        self._limit = limit
        self._extra = extra
        self._allowance = Allowance(limit, clock.monotonic())
        # Who waits, in order; and who was called by the last call, and may pass the others.
        self._line: dict[GoOn, None] = {}
        self._called: set[GoOn] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __str__(self) -> str:
        return f"{self._what} of {self._limit} on {self._where}"

    @property
    def waiting(self) -> int:
        return len(self._line)

    def admits(self, go_on: GoOn) -> bool:
        """Whether one thing may pass now; if not, `go_on` is called when to ask again."""
        now = self._now()
        may_pass = not self._line or go_on in self._called
        if (may_pass and self._allowance.is_open(now)) or self._is_closed:
            return True
        self._called.discard(go_on)
        if go_on not in self._line:
            self._line[go_on] = None
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
        self._allowance.take(messages, size, self._clock.monotonic())

    def settle(self, messages: float, size: float) -> None:
        """Count what passed beyond what was taken for it (below 0: less), at the end of a turn."""
        now = self._clock.monotonic()
        self._allowance.take(messages, size, now)
        # A little that has come in since the turn began is no portion (invariant 4).
        if self._line:
            self._arm(now, 0.0 if self._allowance.has_portion(PAUSE_S, now) else PAUSE_S)

    def change(self, limit: RateLimit, extra: Extra | None = None) -> None:
        """Follow another policy, with what the one before has counted."""
        self._limit, self._extra = limit, extra
        now = self._clock.monotonic()
        self._allowance.change(limit, now)
        if self._line:
            self._arm(now, 0.0 if self._allowance.is_open(now) else PAUSE_S)

    def leave(self, go_on: GoOn) -> None:
        """Take out of the line who waits no more; one that is not there is ignored."""
        self._called.discard(go_on)
        self._line.pop(go_on, None)
        if not self._line:
            self._disarm()

    def close(self) -> None:
        """There is no rate any more: all that wait go on."""
        self._is_closed = True
        self._disarm()
        line, self._line = self._line, {}
        self._called.clear()
        for go_on in line:
            go_on()

    # --- the line

    def _now(self) -> float:
        now = self._clock.monotonic()
        if self._extra is not None:
            self._allowance.change(self._limit.raised(*self._extra()), now)
        return now

    def _call(self) -> None:
        """Call the first ones, and look again later if others wait."""
        self._timer = None
        now = self._now()
        # Invariant 2: who was called before has had its turn.
        self._called.clear()
        try:
            for _ in range(self._called_at_once):
                if not self._line or not self._allowance.is_open(now):
                    break
                go_on = next(iter(self._line))
                del self._line[go_on]
                self._called.add(go_on)
                go_on()
        finally:
            # It may have been closed by one of them.
            if self._line and not self._is_closed:
                self._arm(now, PAUSE_S)
            elif not self._line:
                self._called.clear()

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
