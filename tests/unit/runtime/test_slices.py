"""Long work gives others a turn after every slice."""

from __future__ import annotations

import asyncio

from magnetar.runtime.slices import SlicePace, slices


def test_a_sequence_is_cut_into_slices() -> None:
    assert [list(each) for each in slices(range(5), 2)] == [[0, 1], [2, 3], [4]]
    assert list(slices([], 2)) == []


def test_others_get_a_turn_after_every_slice() -> None:
    seen: list[int] = []

    async def work() -> None:
        pace = SlicePace(3)
        for number in range(7):
            seen.append(number)
            await pace.after()

    async def scene() -> None:
        long = asyncio.create_task(work())
        while not long.done():
            seen.append(-1)
            await asyncio.sleep(0)

    asyncio.run(scene())
    assert seen == [-1, 0, 1, 2, -1, 3, 4, 5, -1, 6]
