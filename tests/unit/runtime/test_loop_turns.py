"""Turns of the loop are measured: long ones are seen, and forgotten after a while."""

from __future__ import annotations

import asyncio
import time

import pytest

from magnetar.runtime.clock import LoopClock, SystemClock
from magnetar.runtime.loop_turns import IDLE_PERIOD_S, PERIOD_S, WINDOW_S, LoopTurns
from magnetar.runtime.metrics import LOOP_LONGEST_TURN_SECONDS
from magnetar.testing.virtual import virtual_time

LONG_S = 0.05


def test_a_turn_that_holds_the_loop_up_is_seen() -> None:
    async def main() -> None:
        turns = LoopTurns(SystemClock())
        await asyncio.sleep(0)
        time.sleep(LONG_S)  # noqa: ASYNC251  it is what is measured
        await asyncio.sleep(3 * PERIOD_S)
        turns.stop()
        assert turns.longest >= LONG_S - PERIOD_S
        assert LOOP_LONGEST_TURN_SECONDS._value.get() == turns.longest

    asyncio.run(main())


class Late(LoopClock):
    """A loop of virtual time never lags; this one says so when told to."""

    lag = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.lag


@pytest.mark.parametrize("windows", [0, 1, 2])
def test_a_long_turn_is_told_for_one_window_and_then_forgotten(windows: int) -> None:
    async def main() -> None:
        clock, own = Late(0), [0.0]
        turns = LoopTurns(clock, lambda: own[0])
        await asyncio.sleep(1)
        assert turns.longest == pytest.approx(0, abs=1e-9)
        clock.lag = 0.3
        own[0] += 0.1
        await asyncio.sleep(IDLE_PERIOD_S)
        # Much of its own work, and nobody had to wait for it.
        own[0] += 0.2
        # Once: from then on the timer is due by the new time.
        await asyncio.sleep(1 + windows * WINDOW_S)
        is_told = windows < 2
        assert turns.longest == pytest.approx(0.3 * is_told, abs=1e-9)
        assert turns.longest_cpu == pytest.approx(0.1 * is_told, abs=1e-9)
        turns.stop()

    virtual_time.run(main())


def test_a_loop_that_rests_is_seldom_looked_at() -> None:
    """Each look at what its thread has used is one time that an idle server is woken."""

    async def main() -> None:
        looks, working = 0, True

        def own() -> float:
            nonlocal looks
            looks += 1
            return float(looks) if working else 0.0

        turns = LoopTurns(LoopClock(0), own)
        await asyncio.sleep(1)
        busy, looks, working = looks, 0, False
        await asyncio.sleep(1)
        turns.stop()
        # Two for each period: one at its beginning and one at its end.
        assert busy >= 2 * 0.9 / PERIOD_S
        assert looks <= 2 * (1 / IDLE_PERIOD_S + 2)

    virtual_time.run(main())
