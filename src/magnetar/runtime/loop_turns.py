"""The turns of the event loop, measured by how late a timer comes.

Owns: `LoopTurns`. It measures what a client feels: for so long nobody was served. What others do on
the machine counts, too; how much of it was the loop's own work says its processor time. Works with
whatever kind of loop.

Invariants:
1. A turn that is longer than the period is always met, for the timer falls due within it. It is
   shown by up to one period too short; what is shown is never longer than it was. The period is
   `PERIOD_S` while the loop is used, and `IDLE_PERIOD_S` after one in which it hardly was: so the
   first turn after a rest may be shorter than it and not be met.
2. The longest are those of the minute that runs and of the one before: they do not stay for ever,
   and whoever looks once a minute misses none.
3. An idle loop is woken by it ten times a second, for some tens of microseconds each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from magnetar.runtime.clock import Clock
from magnetar.runtime.metrics import (
    LOOP_LONGEST_TURN_CPU_SECONDS,
    LOOP_LONGEST_TURN_SECONDS,
    LOOP_TURN_SECONDS,
)

PERIOD_S: Final = 0.005
IDLE_PERIOD_S: Final = 0.1
WORK_S: Final = 0.001
"""Processor time in one period, above which the loop counts as used. To look takes less."""
WINDOW_S: Final = 60.0


class LoopTurns:
    """Looks at the running loop until `stop`."""

    def __init__(self, clock: Clock, own_time: Callable[[], float] = time.thread_time) -> None:
        """`own_time`: processor time of the loop's thread."""
        self._clock = clock
        self._own_time = own_time
        self._loop = asyncio.get_running_loop()
        now = clock.monotonic()
        self._window_ends = now + WINDOW_S
        # The longest turn, and the most processor time of one, in this window and the one before.
        self._now = self._before = (0.0, 0.0)
        self._begin(now, PERIOD_S)

    @property
    def longest(self) -> float:
        """Seconds, of the longest turn lately."""
        return max(self._before[0], self._now[0])

    @property
    def longest_cpu(self) -> float:
        """Seconds of processor time, the most in one turn lately."""
        return max(self._before[1], self._now[1])

    def stop(self) -> None:
        self._timer.cancel()

    def _begin(self, now: float, period: float) -> None:
        # From now, and not from when it was due: a long turn is counted once.
        self._due = now + period
        self._used = self._own_time()
        self._timer = self._loop.call_later(period, self._look)

    def _look(self) -> None:
        now = self._clock.monotonic()
        # A loop counts in milliseconds, perhaps, and wakes that much too early.
        late = max(now - self._due, 0.0)
        LOOP_TURN_SECONDS.observe(late)
        # What was used before it was due is in it, but never more than it was late.
        used = self._own_time() - self._used
        cpu = min(late, used)
        if now >= self._window_ends:
            self._window_ends = now + WINDOW_S
            self._before, self._now = self._now, (late, cpu)
            self._tell()
        elif late > self._now[0] or cpu > self._now[1]:
            self._now = (max(late, self._now[0]), max(cpu, self._now[1]))
            self._tell()
        self._begin(now, PERIOD_S if used > WORK_S else IDLE_PERIOD_S)

    def _tell(self) -> None:
        LOOP_LONGEST_TURN_SECONDS.set(self.longest)
        LOOP_LONGEST_TURN_CPU_SECONDS.set(self.longest_cpu)
