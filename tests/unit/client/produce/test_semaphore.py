"""A limit that callers wait for in the order of their coming."""

from __future__ import annotations

import asyncio
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.produce.semaphore import WeightedSemaphore
from magnetar.testing.virtual import virtual_time


@given(st.integers(0, 2**32), st.integers(1, 10))
def test_nobody_overtakes_and_nothing_is_lost(seed: int, limit: int) -> None:
    chance = Random(seed)
    budget = WeightedSemaphore(limit)
    granted: list[int] = []

    async def one(number: int) -> None:
        units = chance.randrange(1, limit + 3)
        await budget.take(units)
        granted.append(number)
        assert budget.taken <= limit or budget.taken == units
        try:
            await asyncio.sleep(chance.random())
        finally:
            budget.give(units)

    async def main() -> None:
        tasks = []
        for number in range(30):
            tasks.append(asyncio.create_task(one(number)))
            await asyncio.sleep(0.1 * chance.random())
            if chance.random() < 0.2:
                chance.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    virtual_time.run(main())
    assert granted == sorted(granted)
    assert budget.taken == 0


def test_a_cancelled_waiter_leaves_nothing_taken() -> None:
    async def main() -> None:
        budget = WeightedSemaphore(2)
        await budget.take(2)
        waiting = [asyncio.create_task(budget.take(1)) for _ in range(3)]
        await asyncio.sleep(1)
        assert not budget.try_take(0), "others wait"
        waiting[0].cancel()
        budget.give(2)
        waiting[1].cancel()  # it has been granted, and has not run yet
        await asyncio.gather(*waiting, return_exceptions=True)
        assert budget.taken == 1
        budget.give(1)
        assert budget.try_take(2)

    virtual_time.run(main())
