"""Clocks: the machine's, and the one that a loop on virtual time drives."""

from __future__ import annotations

import asyncio

from magnetar.runtime.clock import Clock, LoopClock, SystemClock
from magnetar.testing.virtual.virtual_time import run


def test_the_loop_drives_the_clock() -> None:
    async def story(clock: Clock) -> tuple[int, float]:
        before = clock.monotonic()
        await clock.sleep(3600.001)
        return clock.now_ms(), clock.monotonic() - before

    now_ms, slept = run(story(LoopClock(1_700_000_000_000)))
    assert now_ms == 1_700_003_600_001
    assert abs(slept - 3600.001) < 1e-6


def test_the_system_clock() -> None:
    async def story(clock: Clock) -> None:
        first = clock.monotonic()
        await clock.sleep(0)
        assert clock.monotonic() >= first
        assert clock.now_ms() > 1_700_000_000_000

    asyncio.run(story(SystemClock()))
