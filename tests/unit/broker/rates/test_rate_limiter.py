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
from magnetar.runtime.signal import Signal
from magnetar.testing.virtual.virtual_time import run

CLOCK = LoopClock(0)


class Waiter(Signal):
    """One that waits, and tells when it is called."""

    def __init__(self, on_call: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._on_call = on_call

    def advance(self) -> int:
        self._on_call()
        return super().advance()


def limiter_of(limit: RateLimit) -> RateLimiter:
    return RateLimiter(limit, CLOCK, what="rate", where="t", on_wait=lambda: None)


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
        wake = Waiter(lambda: called.append(loop.time()))
        began = loop.time()
        for _ in range(2):
            assert limiter.admits(wake)
            limiter.take(1, 5)
        assert timers() == 0
        assert not limiter.admits(wake)
        assert not limiter.admits(wake)
        assert (limiter.waiting, limiter.times, timers()) == (1, 1, 1)
        await asyncio.sleep(10)
        assert [each - began for each in called] == [pytest.approx(0.5)]
        assert limiter.admits(wake)

    play(scene)


def test_bytes_and_messages_hold_at_the_same_time() -> None:
    async def scene() -> None:
        limiter, wake = limiter_of(RateLimit(1000, 100)), Signal()

        limiter.take(1, 350)
        assert not limiter.admits(wake)
        assert limiter.room() == (999, -250)
        await asyncio.sleep(2.52)
        assert not limiter.waiting
        assert limiter.admits(wake)

    play(scene)


def test_those_who_wait_share_the_rate_in_turns() -> None:
    """Each takes all that there is, as a read does; who comes late joins the line."""

    async def scene() -> None:
        limiter = limiter_of(RateLimit(100, 0))
        got, wakes = dict.fromkeys(range(5), 0.0), [Signal() for _ in range(5)]

        async def reader(number: int) -> None:
            wake = wakes[number]
            while True:
                seen = wake.version
                if limiter.admits(wake):
                    tokens = int(limiter.room()[0])
                    limiter.take(tokens, 0)
                    await asyncio.sleep(0.001)
                    got[number] += tokens
                    limiter.settle(0, 0)
                    continue
                await wake.past(seen)

        async def eager() -> None:
            """One that is woken by every message, and would take each token as it comes."""
            while True:
                await asyncio.sleep(0.0005)
                wakes[0].advance()

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


def test_a_portion_is_shared_out_in_turns_that_follow_at_once() -> None:
    """A thousand that want one message each get as many as the rate says, not one in a pause."""

    async def scene() -> None:
        limiter, got = limiter_of(RateLimit(1000, 0)), list[int]()

        async def sender(number: int, wake: Signal, seen: int) -> None:
            while not limiter.admits(wake):
                seen = await wake.past(seen)
            limiter.take(1, 0)
            got.append(number)
            limiter.settle()

        limiter.take(1000, 0)
        wakes = [Signal() for _ in range(1000)]
        tasks = [asyncio.create_task(sender(number, wakes[number], 0)) for number in range(1000)]
        await asyncio.sleep(0.501)
        assert len(got) == pytest.approx(500, abs=25)
        await asyncio.wait(tasks)
        assert got == list(range(1000))

    play(scene)


def test_one_that_was_called_passes_those_who_wait_and_no_one_else_does() -> None:
    async def scene() -> None:
        limiter, called = limiter_of(RateLimit(10, 0)), list[str]()
        first = Waiter(lambda: called.append("first"))
        other = Waiter(lambda: called.append("other"))
        limiter.take(10, 0)
        assert not limiter.admits(first)
        assert not limiter.admits(other)
        await asyncio.sleep(0.101)
        assert called == ["first"]
        assert not limiter.admits(Signal())
        assert limiter.admits(first)
        # It lets its turn pass: the next one is called all the same.
        await asyncio.sleep(PAUSE_S)
        assert called == ["first", "other"]
        assert not limiter.admits(first)
        limiter.close()
        assert called == ["first", "other", "first"]

    play(scene)


def test_what_a_turn_gives_back_is_for_the_next_ones() -> None:
    async def scene() -> None:
        limiter, called = limiter_of(RateLimit(100, 0)), list[int]()
        limiter.take(100, 0)  # by a read that will find one message
        for number in range(3):
            assert not limiter.admits(Waiter(partial(called.append, number)))
        limiter.settle(-99, 0)
        await asyncio.sleep(PAUSE_S + 0.001)
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
        first, other = (Waiter(partial(called.append, number)) for number in (1, 2))
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
        wake = Waiter(lambda: called.append(loop.time() - began))

        limiter.take(1, 1000)
        assert not limiter.admits(wake)
        await asyncio.sleep(10)
        limiter.change(RateLimit(0, 990))
        await asyncio.sleep(5)
        assert called == [pytest.approx(11, abs=0.03)]

        limiter.take(1, 10_000)
        assert not limiter.admits(wake)
        limiter.change(RateLimit(5, 0))  # bytes are no matter any more
        await asyncio.sleep(0.001)
        assert len(called) == 2

    play(scene)


def test_after_its_end_it_lets_everything_through() -> None:
    async def scene() -> None:
        limiter, wake = limiter_of(RateLimit(1, 0)), Signal()
        limiter.take(1_000_000, 0)
        assert not limiter.admits(wake)
        limiter.close()
        assert wake.version == 1
        assert limiter.admits(wake)

    play(scene)


def test_a_rate_that_follows_another_is_looked_at_again() -> None:
    async def scene() -> None:
        published, wake = [0.0], Signal()
        limiter = RateLimiter(
            RateLimit(1, 0),
            CLOCK,
            what="rate",
            where="t",
            on_wait=lambda: None,
            extra=lambda: (published[0], 0),
        )
        limiter.take(1000, 0)
        assert not limiter.admits(wake)
        published[0] = 999
        await asyncio.sleep(20)
        assert wake.version == 1

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
