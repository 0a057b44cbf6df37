"""Time, as everything above the backends sees it.

Owns: the `Clock` contract, `SystemClock` (the machine's) and `LoopClock` (the event loop's, so a
loop on virtual time drives it).

Invariants:
1. `monotonic` never goes back; deadlines and intervals are computed from it alone.
2. `now_ms` is for records and people: it may jump, so nothing is ordered by it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """The time, as a component may ask for it."""

    def now_ms(self) -> int:
        """Wall time in milliseconds since 1970."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class LoopClock:
    """The running event loop's time; `epoch_ms` is the wall time at loop time zero."""

    def __init__(self, epoch_ms: int) -> None:
        self._epoch_ms = epoch_ms

    def now_ms(self) -> int:
        # Wall time follows the loop's, so on virtual time records are dated alike in every run.
        return self._epoch_ms + round(self.monotonic() * 1000)

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
