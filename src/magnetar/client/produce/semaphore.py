"""A limit that is used up and given back, for which callers wait in the order of their coming.

Owns: `WeightedSemaphore`.

Invariants:
1. What is taken never exceeds the limit, but for one taker that alone wants more than all of it:
   it gets everything, and waits until everything is there.
2. Whoever comes later does not overtake one who waits.
3. A waiter that is cancelled leaves nothing taken behind.
"""

from __future__ import annotations

import asyncio
from collections import deque


class WeightedSemaphore:
    """A semaphore whose takers want different amounts of its units."""

    __slots__ = ("_limit", "_resuming", "_taken", "_waiters")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._resuming = 0
        """Waiters that have got what they want, and did not run since."""
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def taken(self) -> int:
        """How many units are taken."""
        return self._taken

    def try_take(self, units: int) -> bool:
        """Take units if that can be done without waiting."""
        taken = self._taken + units
        # Invariant 2: not past those who wait, nor past one that was granted and did not run yet.
        # The last part is invariant 1: alone, a message larger than the limit is let through.
        if self._waiters or self._resuming or (taken > self._limit and self._taken):
            return False
        self._taken = taken
        return True

    async def take(self, units: int) -> None:
        """Take units, waiting until they are there."""
        if self.try_take(units):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((units, granted))
        try:
            await granted
            self._resuming -= 1
            self._grant()
        except asyncio.CancelledError:
            # Cancelled in the turn in which it was granted: nobody will use the units.
            if granted.done() and not granted.cancelled():
                self._resuming -= 1
                self.give(units)
            else:
                # Still waiting, maybe as the first: those behind it may fit now.
                granted.cancel()
                self._grant()
            raise

    def give(self, units: int) -> None:
        """Give back what was taken."""
        self._taken -= units
        if self._waiters:
            self._grant()

    def _grant(self) -> None:
        waiters = self._waiters
        while waiters:
            units, granted = waiters[0]
            # One that was cancelled is only removed from the queue.
            if not granted.done():
                if self._taken and self._taken + units > self._limit:
                    return
                self._taken += units
                self._resuming += 1
                granted.set_result(None)
            waiters.popleft()
