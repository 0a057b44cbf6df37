"""The event loop on virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import threading
import time

import pytest

from harness.limits import PATIENCE_S
from magnetar.errors import DeadlineExceeded, InvariantBroken, NotSupported
from magnetar.testing.virtual.virtual_time import VirtualTimeLoop, run


def test_a_long_sleep_takes_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    started = time.monotonic()
    assert run(main()) == pytest.approx(86_400)
    assert time.monotonic() - started < PATIENCE_S


def test_timers_fire_in_order_and_exactly() -> None:
    async def main() -> list[tuple[float, int]]:
        fired = []

        async def after(seconds: float, number: int) -> None:
            await asyncio.sleep(seconds)
            fired.append((asyncio.get_running_loop().time(), number))

        await asyncio.gather(after(3, 3), after(1, 1), after(2, 2))
        return fired

    assert run(main()) == [(1, 1), (2, 2), (3, 3)]


def test_a_timeout_is_virtual() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await asyncio.Event().wait()

    run(main())


def test_a_deadlock_names_who_waits() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(InvariantBroken, match=r"deadlock at 0\.000 s: 1 tasks wait: .*main"):
        run(main())


def test_time_has_an_end() -> None:
    async def tick_for_ever() -> None:
        for _ in itertools.count():
            await asyncio.sleep(1)

    with pytest.raises(DeadlineExceeded, match="virtual time reached 100 s"):
        run(tick_for_ever(), until=100)


def test_what_is_left_is_cancelled_in_order_of_birth() -> None:
    ended = []

    async def wait_for_ever(number: int) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(number)

    async def main() -> None:
        tasks = [asyncio.ensure_future(wait_for_ever(number)) for number in range(30)]
        await asyncio.sleep(1)
        assert len(tasks) == 30

    run(main())
    assert ended == list(range(30))


def test_an_error_comes_through() -> None:
    async def main() -> None:
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        run(main())


@pytest.mark.parametrize("seed", range(3))
def test_equal_seeds_run_equally(seed: int) -> None:
    async def main() -> list[tuple[float, int]]:
        choose = random.Random(seed)
        steps: list[tuple[float, int]] = []

        async def wander(number: int) -> None:
            for _ in range(20):
                # Whole numbers, so that many timers fall on one moment.
                await asyncio.sleep(choose.randrange(4))
                steps.append((asyncio.get_running_loop().time(), number))

        await asyncio.gather(*(wander(number) for number in range(20)))
        return steps

    assert run(main()) == run(main())


def test_threads_and_sockets_are_refused() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        refused: list[BaseException] = []

        def call_in() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except NotSupported as error:
                refused.append(error)

        thread = threading.Thread(target=call_in)
        thread.start()
        thread.join()
        assert len(refused) == 1
        left, right = socket.socketpair()
        left.setblocking(False)
        with left, right, pytest.raises(NotSupported):
            await loop.sock_recv(left, 1)

    run(main())


def test_the_loop_works_with_a_runner() -> None:
    async def main() -> float:
        await asyncio.sleep(5)
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(main()) == 5
