"""A worker: blocking calls, one after the other, off the event loop.

Owns: the `Worker` contract and `ThreadWorker`, the real one (simulations bring their own, on
virtual time). Jobs run in the order of `run` calls and finish in that order.

The lock of the interpreter decides the speed here: a job should be a few calls that release it
(a write, a sync, one SQL statement), not a Python loop. See ADR 0003.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from magnetar.errors import StorageClosed

Result = TypeVar("Result")


class Worker(Protocol):
    """Runs blocking jobs in order and completes a future of the calling loop for each."""

    def run(self, job: Callable[..., Result], /, *args: Any) -> asyncio.Future[Result]: ...

    async def close(self) -> None:
        """Let the jobs already given finish, then stop."""
        ...


class ThreadWorker:
    """One daemon thread. `run` is called from one event loop only."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]]
        self._jobs = SimpleQueue()
        # Set by the first `run`, together with the thread: a worker without a job costs none.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def run(self, job: Callable[..., Result], /, *args: Any) -> asyncio.Future[Result]:
        if self._closed:
            raise StorageClosed(f"worker {self._thread.name} was closed")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._thread.start()
        future: asyncio.Future[Result] = self._loop.create_future()
        self._jobs.put((future, job, args))
        return future

    async def close(self) -> None:
        if self._closed:
            return
        # The end is a job like any other, so all that were given before are done first.
        stopped = self.run(_stop) if self._loop is not None else None
        self._closed = True
        if stopped is not None:
            await stopped
            self._thread.join()

    def _work(self) -> None:
        assert self._loop is not None
        while True:
            future, job, args = self._jobs.get()
            try:
                result = job(*args)
            except BaseException as error:  # noqa: BLE001  the future carries it to the caller
                self._finish(_fail, future, error)
            else:
                self._finish(_succeed, future, result)
            if job is _stop:
                return

    def _finish(self, how: Callable[..., None], future: asyncio.Future[Any], value: Any) -> None:
        assert self._loop is not None
        # The loop may end before its last jobs do; nobody waits for their results then.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(how, future, value)


def _stop() -> None:
    """The last job of a worker."""


def _succeed(future: asyncio.Future[Any], value: Any) -> None:
    # Cancelled meanwhile: the job has run all the same.
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
