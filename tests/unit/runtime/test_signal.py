"""Signal: level-triggered waits, cancellation, close, and no lost wake-ups in random schedules."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.errors import StorageClosed, StorageFenced
from magnetar.runtime.signal import Signal
from magnetar.testing.virtual.virtual_time import run


async def settle() -> None:
    """Let every callback that is ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_version_already_passed_returns_at_once() -> None:
    async def story() -> None:
        signal = Signal()
        assert signal.advance() == 1
        assert await signal.past(0) == 1
        assert signal.waiters == 0

    run(story())


def test_every_waiter_wakes_at_its_own_version() -> None:
    async def story() -> None:
        signal = Signal()
        waits = [asyncio.create_task(signal.past(n)) for n in (0, 0, 3, 9)]
        await settle()
        signal.advance()
        await settle()
        assert [wait.done() for wait in waits] == [True, True, False, False]
        for _ in range(3):
            signal.advance()
        await settle()
        assert [wait.done() for wait in waits] == [True, True, True, False]
        assert signal.waiters == 1
        for _ in range(6):
            signal.advance()
        assert [await wait for wait in waits] == [1, 1, 4, 10]
        assert signal.waiters == 0

    run(story())


def test_a_cancelled_waiter_leaves_nothing() -> None:
    async def story() -> None:
        signal = Signal()
        waits = [asyncio.create_task(signal.past(0)) for _ in range(3)]
        await settle()
        waits[0].cancel()
        signal.advance()
        waits[1].cancel()
        done = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(each) for each in done] == [
            asyncio.CancelledError,
            asyncio.CancelledError,
            int,
        ]
        assert signal.waiters == 0

    run(story())


def test_a_wait_with_a_limit_ends_with_it() -> None:
    async def story() -> None:
        signal, loop = Signal(), asyncio.get_running_loop()
        began = loop.time()
        assert await signal.past_within(0, 3.0) == 0
        assert loop.time() - began == pytest.approx(3.0)
        loop.call_later(1.0, signal.advance)
        assert await signal.past_within(0, 3.0) == 1
        assert loop.time() - began == pytest.approx(4.0)
        signal.close(StorageClosed("gone"))
        with pytest.raises(StorageClosed, match="gone"):
            await signal.past_within(1, 3.0)
        assert signal.waiters == 0

    run(story())


def test_close_fails_waits_for_more_but_not_for_what_was_reached() -> None:
    async def story() -> None:
        signal = Signal()
        signal.advance()
        wait = asyncio.create_task(signal.past(1))
        await settle()
        signal.close(StorageClosed("gone"))
        signal.close(StorageFenced("later"))
        assert signal.closed
        assert await signal.past(0) == 1
        with pytest.raises(StorageClosed, match="gone"):
            await wait
        with pytest.raises(StorageClosed, match="gone"):
            await signal.past(1)
        assert signal.waiters == 0

    run(story())


def test_an_advance_before_close_still_counts() -> None:
    async def story() -> None:
        signal = Signal()
        wait = asyncio.create_task(signal.past(0))
        await settle()
        signal.advance()
        signal.close(StorageClosed("gone"))
        assert await wait == 1

    run(story())


_STEPS = st.lists(
    st.tuples(st.sampled_from(["advance", "jump", "wait", "cancel", "turn"]), st.integers(0, 5)),
    max_size=40,
)


@given(_STEPS)
def test_no_wake_up_is_lost(steps: Sequence[tuple[str, int]]) -> None:
    """Whatever the order of advances, waits and cancellations: at rest, a wait is over exactly
    if its version is passed."""

    async def story() -> None:
        signal = Signal()
        waits: list[tuple[int, asyncio.Task[int]]] = []
        for step, number in steps:
            match step:
                case "advance":
                    signal.advance()
                case "jump":
                    for _ in range(number):
                        signal.advance()
                case "wait":
                    target = signal.version + number - 2
                    waits.append((target, asyncio.create_task(signal.past(target))))
                case "cancel" if waits:
                    waits[number % len(waits)][1].cancel()
                case "turn":
                    await asyncio.sleep(0)
        await settle()
        alive = [each for each in waits if not (each[1].done() and each[1].cancelled())]
        for target, task in alive:
            assert task.done() == (signal.version > target)
            assert not task.done() or task.result() > target
        assert signal.waiters == sum(not task.done() for _, task in alive)
        signal.close(StorageClosed("the end"))
        await asyncio.gather(*(task for _, task in waits), return_exceptions=True)
        assert signal.waiters == 0

    run(story())


def test_the_first_of_several_wakes_who_waits_for_any() -> None:
    async def story() -> None:
        signals = [Signal(), Signal(), Signal()]
        seen = {each: each.version for each in signals}
        waiting = asyncio.create_task(Signal.past_any(seen))
        await settle()
        assert not waiting.done()
        signals[1].advance()
        await waiting
        assert [each.waiters for each in signals] == [0, 0, 0]
        await Signal.past_any(seen)  # it is past already
        cancelled = asyncio.create_task(Signal.past_any({signals[0]: 0, signals[2]: 0}))
        await settle()
        cancelled.cancel()
        await settle()
        assert [each.waiters for each in signals] == [0, 0, 0]
        closing = asyncio.create_task(Signal.past_any({signals[0]: 0, signals[2]: 0}))
        await settle()
        signals[2].close(StorageClosed("over"))
        await closing

    run(story())
