"""Service lifecycle: order of stop, crashes that are seen, deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from magnetar.errors import DeadlineExceeded, InvariantBroken, StorageFenced
from magnetar.runtime.service import Service
from magnetar.testing.virtual.virtual_time import run


class Story(Service):
    """Two loops that tell when they end."""

    def __init__(self) -> None:
        super().__init__("story", stop_seconds=5.0)
        self.told: list[str] = []

    async def _start(self) -> None:
        self.told.append("start")
        self.spawn(self._loop("first"), "first")
        self.spawn(self._loop("second"), "second")

    async def _stop(self) -> None:
        self.told.append("flush")

    async def _loop(self, name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.5)
            self.told.append(f"{name} ended")


def test_stop_flushes_then_ends_the_loops_in_reverse() -> None:
    async def story() -> None:
        async with Story() as service:
            await asyncio.sleep(1)
        assert service.told == ["start", "flush", "second ended", "first ended"]
        assert len(asyncio.all_tasks()) == 1

    run(story())


def test_stop_runs_once_for_all_callers() -> None:
    async def story() -> None:
        service = Story()
        await service.start()
        await asyncio.gather(service.stop(), service.stop())
        await service.stop()
        assert service.told.count("flush") == 1

    run(story())


def test_a_cancelled_caller_does_not_cut_the_stop_short() -> None:
    async def story() -> None:
        service = Story()
        await service.start()
        await asyncio.sleep(0)
        caller = asyncio.create_task(service.stop())
        await asyncio.sleep(0.1)
        caller.cancel()
        await service.stop()
        assert service.told[-1] == "first ended"

    run(story())


def test_a_crashed_loop_is_seen() -> None:
    async def crash() -> None:
        raise StorageFenced("the disk is gone")

    async def story() -> None:
        service = Story()
        await service.start()
        service.spawn(crash(), "crash")
        assert await service.failed.past(0) == 1
        assert isinstance(service.error, StorageFenced)
        with pytest.raises(StorageFenced, match="the disk is gone"):
            await service.stop()
        assert service.told[-1] == "first ended"

    run(story())


def test_a_loop_cancelled_by_another_counts_as_crashed() -> None:
    async def story() -> None:
        service = Service("s", stop_seconds=1.0)
        service.spawn(asyncio.sleep(9), "loop").cancel()
        await service.failed.past(0)
        with pytest.raises(InvariantBroken, match="s: loop was cancelled from outside"):
            await service.stop()

    run(story())


def test_a_crash_while_the_last_loop_is_cancelled_is_seen() -> None:
    async def loop() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise StorageFenced("while cleaning up")

    async def story() -> None:
        service = Service("s", stop_seconds=1.0)
        service.spawn(loop(), "loop")
        await asyncio.sleep(0)
        with pytest.raises(StorageFenced):
            await service.stop()

    run(story())


def test_a_loop_may_return() -> None:
    async def story() -> None:
        async with Service("s", stop_seconds=1.0) as service:
            await service.spawn(asyncio.sleep(1), "once")
        assert service.error is None

    run(story())


def test_a_failed_start_is_undone() -> None:
    class Failing(Story):
        async def _start(self) -> None:
            await super()._start()
            await asyncio.sleep(0)
            raise StorageFenced("cannot open")

        async def _stop(self) -> None:
            raise InvariantBroken("half open")

    async def story() -> None:
        service = Failing()
        with pytest.raises(StorageFenced, match="cannot open"):
            await service.start()
        assert service.told == ["start", "second ended", "first ended"]

    run(story())


def test_a_slow_flush_is_cut_off_at_the_deadline() -> None:
    class Slow(Story):
        async def _stop(self) -> None:
            await asyncio.sleep(3600)

    async def story() -> None:
        service = Slow()
        await service.start()
        await asyncio.sleep(0)
        before = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded, match="did not finish within"):
            await service.stop()
        assert asyncio.get_running_loop().time() - before == pytest.approx(6.0)
        assert service.told[-1] == "first ended"

    run(story())


def test_a_timeout_inside_the_flush_is_not_taken_for_the_deadline() -> None:
    class Timing(Story):
        async def _stop(self) -> None:
            raise TimeoutError("mine")

    async def story() -> None:
        service = Timing()
        await service.start()
        with pytest.raises(TimeoutError, match="mine"):
            await service.stop()

    run(story())


def test_a_loop_that_ignores_cancellation_is_named() -> None:
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async def story() -> None:
        service = Service("s", stop_seconds=2.0)
        task = service.spawn(stubborn(), "stubborn")
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded, match="s: stubborn did not end"):
            await service.stop()
        release.set()
        await task

    run(story())


def test_nothing_is_spawned_while_stopping() -> None:
    async def story() -> None:
        service = Service("s", stop_seconds=1.0)
        await service.stop()
        with pytest.raises(InvariantBroken, match="stopping"):
            service.spawn(asyncio.sleep(1), "late")

    run(story())


def test_a_stop_whose_loop_is_gone_ends_quietly() -> None:
    class Stuck(Service):
        async def _stop(self) -> None:
            await asyncio.Event().wait()

    async def begun() -> Coroutine[Any, Any, None]:
        service = Stuck("stuck", stop_seconds=5.0)
        await service.start()
        work = service._run_stop()
        work.send(None)
        return work

    run(begun()).close()  # as the collector of garbage does
