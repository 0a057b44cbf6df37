"""Lines at a rate: the order of those who wait, one timer, and nothing without anybody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from magnetar.broker.policy.values import DispatchRate, PublishRate
from magnetar.broker.rates.allowance import RateLimit
from magnetar.broker.rates.rate_limiter import PAUSE_S, RateLimiter
from magnetar.runtime.clock import LoopClock
from magnetar.testing.virtual.virtual_time import run

CLOCK = LoopClock(0)


def limiter_of(limit: RateLimit, *, called_at_once: int = 1) -> RateLimiter:
    return RateLimiter(
        limit,
        CLOCK,
        what="rate",
        where="t",
        on_wait=lambda: None,
        called_at_once=called_at_once,
    )


def timers() -> int:
    loop = asyncio.get_running_loop()
    return sum(not each.cancelled() for each in loop._scheduled)  # type: ignore[attr-defined]


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scene()
        assert timers() == 0

    run(main())


def test_what_is_refused_is_called_when_there_is_a_token() -> None:
    async def scene() -> None:
        limiter, called = limiter_of(RateLimit(2, 0)), list[float]()
        loop = asyncio.get_running_loop()

        def go_on() -> None:
            called.append(loop.time())

        began = loop.time()
        for _ in range(2):
            assert limiter.admits(go_on)
            limiter.take(1, 5)
        assert timers() == 0
        assert not limiter.admits(go_on)
        assert not limiter.admits(go_on)
        assert (limiter.waiting, limiter.times, timers()) == (1, 1, 1)
        await asyncio.sleep(10)
        assert [each - began for each in called] == [pytest.approx(0.5)]
        assert limiter.admits(go_on)

    play(scene)


def test_bytes_and_messages_hold_at_the_same_time() -> None:
    async def scene() -> None:
        limiter = limiter_of(RateLimit(1000, 100))

        limiter.take(1, 350)
        assert not limiter.admits(go_on := lambda: None)
        assert limiter.room() == (999, -250)
        await asyncio.sleep(2.51)
        assert not limiter.waiting
        assert limiter.admits(go_on)

    play(scene)


def test_those_who_wait_share_the_rate_in_turns() -> None:
    """Each takes all that there is, as a read does; who comes late joins the line."""

    async def scene() -> None:
        limiter = limiter_of(RateLimit(100, 0))
        got, wakes = dict.fromkeys(range(5), 0.0), [asyncio.Event() for _ in range(5)]

        async def reader(number: int) -> None:
            while True:
                if limiter.admits(wakes[number].set):
                    tokens = int(limiter.room()[0])
                    limiter.take(tokens, 0)
                    await asyncio.sleep(0.001)
                    got[number] += tokens
                    limiter.settle(0, 0)
                    continue
                await wakes[number].wait()
                wakes[number].clear()

        async def eager() -> None:
            """One that is woken by every message, and would take each token as it comes."""
            while True:
                await asyncio.sleep(0.0005)
                wakes[0].set()

        tasks = [asyncio.create_task(reader(number)) for number in range(5)]
        tasks.append(asyncio.create_task(eager()))
        await asyncio.sleep(50)
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
        limiter.close()
        assert sum(got.values()) == pytest.approx(100 + 50 * 100, rel=0.02)
        # Without the burst that the first one had.
        assert min(got.values()) > 0.9 * sum(got.values()) / 5 - 20

    play(scene)


def test_all_are_called_one_after_the_other_while_there_is_room() -> None:
    async def scene() -> None:
        limiter, called = limiter_of(RateLimit(10, 0), called_at_once=100), list[int]()

        def go_on(number: int) -> None:
            assert limiter.admits(waiting[number])
            limiter.take(1, 0)
            called.append(number)

        waiting = [partial(go_on, number) for number in range(8)]
        limiter.take(12, 0)
        for each in waiting:
            assert not limiter.admits(each)
        await asyncio.sleep(0.35)
        assert called == [0]
        limiter.change(RateLimit(1000, 0))
        await asyncio.sleep(0.001)
        assert called == [0, *range(1, 8)][: len(called)]
        await asyncio.sleep(1)
        assert called == list(range(8))

    play(scene)


def test_one_that_was_called_passes_those_who_wait_and_no_one_else_does() -> None:
    async def scene() -> None:
        limiter, called = limiter_of(RateLimit(10, 0)), list[str]()
        first, other = partial(called.append, "first"), partial(called.append, "other")
        limiter.take(10, 0)
        assert not limiter.admits(first)
        assert not limiter.admits(other)
        await asyncio.sleep(0.101)
        assert called == ["first"]
        assert not limiter.admits(lambda: None)
        assert limiter.admits(first)
        # It lets its turn pass: the next one is called all the same.
        await asyncio.sleep(PAUSE_S)
        assert called == ["first", "other"]
        assert not limiter.admits(first)
        limiter.close()
        assert called == ["first", "other", "first"]

    play(scene)


def test_a_turn_that_left_something_is_followed_by_the_next_at_once() -> None:
    async def scene() -> None:
        limiter, called = limiter_of(RateLimit(100, 0)), list[int]()
        limiter.take(100, 0)  # by a read that will find one message
        for number in range(3):
            assert not limiter.admits(partial(called.append, number))
        limiter.settle(-99, 0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert called == [0]
        limiter.settle(1, 0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert called == [0, 1]
        limiter.close()

    play(scene)


def test_who_leaves_is_not_called_and_the_last_one_takes_the_timer_along() -> None:
    async def scene() -> None:
        limiter, called = limiter_of(RateLimit(1, 0)), list[int]()
        first, other = partial(called.append, 1), partial(called.append, 2)
        limiter.take(1, 0)
        assert not limiter.admits(first)
        assert not limiter.admits(other)
        limiter.leave(first)
        limiter.leave(first)
        assert timers() == 1
        await asyncio.sleep(1.1)
        assert called == [2]
        limiter.take(1, 0)
        assert not limiter.admits(other)
        limiter.leave(other)
        assert timers() == 0
        await asyncio.sleep(10)
        assert called == [2]

    play(scene)


def test_a_change_wakes_at_the_time_of_the_new_rate() -> None:
    async def scene() -> None:
        limiter, called = limiter_of(RateLimit(0, 1)), list[float]()
        loop = asyncio.get_running_loop()
        began = loop.time()

        def go_on() -> None:
            called.append(loop.time() - began)

        limiter.take(1, 1000)
        assert not limiter.admits(go_on)
        await asyncio.sleep(10)
        limiter.change(RateLimit(0, 990))
        await asyncio.sleep(5)
        assert called == [pytest.approx(11, abs=0.02)]

        limiter.take(1, 10_000)
        assert not limiter.admits(go_on)
        limiter.change(RateLimit(5, 0))  # bytes are no matter any more
        await asyncio.sleep(0.001)
        assert len(called) == 2

    play(scene)


def test_after_its_end_it_lets_everything_through() -> None:
    async def scene() -> None:
        limiter, called = limiter_of(RateLimit(1, 0)), list[int]()
        limiter.take(1_000_000, 0)
        assert not limiter.admits(partial(called.append, 1))
        limiter.close()
        assert called == [1]
        assert limiter.admits(partial(called.append, 1))

    play(scene)


def test_a_rate_that_follows_another_is_looked_at_again() -> None:
    async def scene() -> None:
        published, called = [0.0], list[float]()
        loop = asyncio.get_running_loop()
        limiter = RateLimiter(
            RateLimit(1, 0),
            CLOCK,
            what="rate",
            where="t",
            on_wait=lambda: None,
            extra=lambda: (published[0], 0),
        )
        limiter.take(1000, 0)
        assert not limiter.admits(lambda: called.append(loop.time()))
        published[0] = 999
        await asyncio.sleep(20)
        assert len(called) == 1

    play(scene)


def test_limits_are_said_as_policies_are() -> None:
    assert RateLimit.of_publishing(PublishRate()) is None
    assert RateLimit.of_publishing(PublishRate(0, -1)) is None
    assert str(RateLimit.of_publishing(PublishRate(10))) == "10 messages/s"
    assert RateLimit.of_dispatching(DispatchRate(-1, 0, 5)) is None
    limit = RateLimit.of_dispatching(DispatchRate(10, 2000, 5))
    assert limit is not None
    assert str(limit) == "10 messages/5 s and 2000 bytes/5 s"
    assert limit.raised(2, 3) == (20, 2015, 5)
    assert RateLimit(10, 0).raised(2, 3) == (12, 0, 1)
