"""A thread with an event loop of its own, and how other threads have things done there.

Owns: `LoopThread`, one per blocking client.

Invariants:
1. Everything of the asyncio client happens in this thread; others only wait for its results.
2. Whoever waits is woken: by a result, an error, or `AlreadyClosed` once the loop is stopped.
3. A wait that is interrupted (Ctrl-C) cancels what it waits for, and does not return before that
   has ended: nothing goes on behind the back of the application.
4. After `stop` the thread has ended and the loop is closed. A client that is forgotten is stopped
   with a `ResourceWarning` when it is collected, or when the process ends; neither hangs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Final, TypeVar

from magnetar.errors import AlreadyClosed, NotAllowed

R = TypeVar("R")

INTERRUPTED_S: Final = 5.0
"""How long an interrupted wait waits for the end of what it cancelled."""
# Both are bounds against hanging: what is cancelled ends at once unless it catches that.
STOP_S: Final = 10.0


class LoopThread:
    """An event loop for threads that have none."""

    def __init__(self) -> None:
        self._loop = _new_event_loop()
        # Between `_schedule` and `stop`: nothing is handed to a loop that will not run it
        # (invariant 2).
        self._lock = threading.Lock()
        self._is_stopping = False
        # A daemon: a client that is forgotten must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="magnetar client", daemon=True)
        self._thread.start()

    @property
    def is_stopped(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, make: Callable[[], Awaitable[R]]) -> R:
        """The result of a coroutine, which is made and run in the loop."""
        self._refuse_own_thread()
        done: Future[R] = Future()
        task: list[asyncio.Task[None]] = []

        # The coroutine is made inside of the loop: much of asyncio looks for the running loop when
        # it is made.
        async def run() -> None:
            try:
                result = await make()
            # The loop is being stopped, or the waiting thread was interrupted.
            except asyncio.CancelledError:
                done.cancel()
                done.set_running_or_notify_cancel()
                raise
            except BaseException as error:  # noqa: BLE001 - whoever waits raises it
                done.set_exception(error)
            else:
                done.set_result(result)

        def start() -> None:
            task.append(self._loop.create_task(run(), name="blocking call"))

        self._schedule(start)
        # The task is in the list once `start` has run; before that there is nothing to cancel.
        return self._result(done, lambda: [each.cancel() for each in task])

    def call(self, function: Callable[[], R]) -> R:
        """The result of a plain function, which runs in the loop's thread."""
        self._refuse_own_thread()
        done: Future[R] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:  # noqa: BLE001 - whoever waits raises it
                done.set_exception(error)

        try:
            self._schedule(run)
        except AlreadyClosed:
            # Nobody else is left: there is nothing to be kept apart from.
            self._thread.join(STOP_S)
            return function()
        return self._result(done, lambda: None)

    def stop(self) -> None:
        """End the loop and the thread; whatever still runs there is cancelled."""
        with self._lock:
            is_first, self._is_stopping = not self._is_stopping, True
        # Any number of threads may stop it; the loop is told once.
        if is_first:
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            # In its own thread (a forgotten client is collected anywhere) nobody can wait for it.
            self._thread.join(STOP_S)

    def _schedule(self, function: Callable[[], None]) -> None:
        with self._lock:
            if self._is_stopping:
                raise AlreadyClosed("the client is closed")
            self._loop.call_soon_threadsafe(function)

    def _result(self, done: Future[R], cancel: Callable[[], object]) -> R:
        try:
            return done.result()
        # Only a stop cancels from inside; to who waits, that is a closed client.
        except CancelledError as error:
            raise AlreadyClosed("the client was closed meanwhile") from error
        # An error of the coroutine, or Ctrl-C in this thread: then it is not done (invariant 3).
        except BaseException:
            if not done.done():
                self._interrupt(done, cancel)
            raise

    def _interrupt(self, done: Future[R], cancel: Callable[[], object]) -> None:
        try:
            self._schedule(lambda: (cancel(), None)[1])
            done.exception(INTERRUPTED_S)
        except (CancelledError, FutureTimeoutError, AlreadyClosed):
            return

    def _refuse_own_thread(self) -> None:
        # From a callback, say: the loop would wait for a result that it has to make itself.
        if threading.current_thread() is self._thread:
            raise NotAllowed(
                "a blocking call in the thread of the client would wait for itself",
                hint="call it from another thread, or use the asyncio client",
            )

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            # What was scheduled before the stop still begins, to be cancelled with the rest.
            loop.run_until_complete(asyncio.sleep(0))
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
