"""Work that runs to its end, whatever becomes of who asked for it.

Owns: `BackgroundTasks`: the tasks of one coordinator or set of coordinators.

Invariants:
1. A task outlives the request that began it: cancelling who waits does not cancel it.
2. No error is lost: who waits gets it, and one of the background is logged.
3. Once `close` was called nothing new begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from magnetar.errors import ServiceNotReady
from magnetar.runtime.logs import logger

Result = TypeVar("Result")

_LOG: Final = logger(__name__)


class BackgroundTasks:
    """The background tasks of one owner that are under way."""

    def __init__(self) -> None:
        # Strong references: the event loop keeps none, and a task could be collected half-way.
        self._work: set[asyncio.Future[Any]] = set()
        self._is_closed = False

    async def apart(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run to its end, whatever becomes of who asked."""
        # Invariant 1: the caller may be cancelled here; the task behind the shield goes on.
        return await asyncio.shield(self.in_task(work))

    def in_task(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Begin work in a task that its caller may await and must not cancel."""
        # Closed, not dropped: a coroutine that is never awaited would warn.
        if self._is_closed:
            work.close()
            raise stopping()
        task = asyncio.create_task(work, name="transaction")
        self._work.add(task)
        task.add_done_callback(self._done)
        return task

    def promise(self) -> asyncio.Future[Any]:
        """An outcome that callbacks give, instead of a task; work under way until then."""
        if self._is_closed:
            raise stopping()
        promise: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._work.add(promise)
        promise.add_done_callback(self._done)
        return promise

    def keep(self, promise: asyncio.Future[Result], work: Coroutine[Any, Any, Result]) -> None:
        """Have a task give the outcome of a promise after all, also once this is closed."""
        task = asyncio.create_task(work, name="transaction")
        self._work.add(task)
        task.add_done_callback(self._done)
        task.add_done_callback(partial(pass_on, promise))

    def in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Begin work that nobody waits for; a failure is logged."""
        if self._is_closed:
            work.close()  # whoever comes next does it
            return
        task = asyncio.create_task(work, name=name)
        self._work.add(task)
        task.add_done_callback(self._background_done)

    def close(self) -> None:
        """Begin nothing more."""
        self._is_closed = True

    async def over(self) -> None:
        """Wait until everything that was begun has ended."""
        # Again and again: what is under way may begin more until `close` was called.
        while self._work:
            await asyncio.wait(self._work)

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._work.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits gets it; if nobody does any more, it is not lost

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.warning("txn-background-failed", task=task.get_name(), error=str(error))


def pass_on(promise: asyncio.Future[Result], work: asyncio.Future[Result]) -> None:
    """Give a promise the outcome of work that is over."""
    if promise.done():
        return
    if work.cancelled():
        promise.cancel()
    elif (error := work.exception()) is not None:
        promise.set_exception(error)
    else:
        promise.set_result(work.result())


def future_of(work: Awaitable[Result]) -> asyncio.Future[Result]:
    """What is being done, as a future: the very one, if it is one."""
    return work if isinstance(work, asyncio.Future) else asyncio.ensure_future(work)


def stopping() -> ServiceNotReady:
    return ServiceNotReady("the broker is stopping")
