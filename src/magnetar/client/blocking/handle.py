"""The bases of all blocking handles: an asyncio one, and the thread that it lives in.

Owns: `Threaded`, `Handle` and `Root`, the bases of the classes that `scripts/make_blocking.py`
writes from their asyncio counterparts; `Acknowledged`, which a thread can wait for.

Invariants:
1. Names and parameters are those of the asyncio classes; only the waiting is different.
2. A handle may be used by any number of threads at once.
3. After its client is closed every call raises `AlreadyClosed`; `close` does nothing then.
4. A message that arrives while Ctrl-C interrupts the wait for it may be received by nobody here: it
   is not acknowledged, and so comes again.
"""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from magnetar.client.blocking.loop_thread import LoopThread
from magnetar.client.consume.segment import acknowledged
from magnetar.errors import AlreadyClosed, DeadlineExceeded

R = TypeVar("R")


class Closes(Protocol):
    """The asyncio counterpart of a handle."""

    async def close(self) -> None: ...


W = TypeVar("W")
H = TypeVar("H", bound=Closes)


class Threaded(Generic[W]):
    """An asyncio object for threads."""

    def __init__(self, thread: LoopThread, wrapped: W) -> None:
        self._thread = thread
        self._wrapped = wrapped

    def _wait(self, make: Callable[[], Awaitable[R]]) -> R:
        return self._thread.wait(make)

    def _call(self, function: Callable[[], R]) -> R:
        return self._thread.call(function)

    def _acknowledged(self, make: Callable[[], acknowledged.Acknowledged]) -> Acknowledged:
        return Acknowledged(self._thread, self._thread.call(make))

    def _stored_later(self, make: Callable[[], Awaitable[asyncio.Future[R]]]) -> Future[R]:
        later: Future[R] = Future()
        # Two futures: the thread's one is made at once, the receipt of asyncio only when there was
        # room.
        later.set_running_or_notify_cancel()  # a message that was handed in is not taken back

        async def begin() -> None:
            # Two waits: here until the message is taken, which may need room; `later` until it is
            # stored.
            (await make()).add_done_callback(lambda receipt: _copy(receipt, later))

        self._thread.wait(begin)
        return later

    def _iterate(self, begin: Callable[[], AsyncIterator[R]]) -> Iterator[R]:
        iterator = self._thread.call(begin)
        while True:
            try:
                yield self._thread.wait(iterator.__anext__)
            # A loop over messages just ends when another thread closes the client.
            except (StopAsyncIteration, AlreadyClosed):
                return

    def _pull(self, begin: Callable[[], AsyncGenerator[R, None]]) -> Iterator[R]:
        """Iterate over something that has an end: a client that is closed is an error, no end."""
        iterator = self._thread.call(begin)
        try:
            # The `yield` is outside of the inner `try`: what the application raises there is its
            # own.
            while True:
                try:
                    found = self._thread.wait(iterator.__anext__)
                except StopAsyncIteration:
                    return
                yield found
        # A `break` in the middle: pages that are read ahead must be given up on the loop's thread.
        finally:
            with suppress(AlreadyClosed):  # then it ended with its client
                self._thread.wait(iterator.aclose)

    def __repr__(self) -> str:
        return f"<blocking {self._wrapped!r}>"


class Handle(Threaded[H]):
    """One that is closed at the end."""

    def close(self) -> None:
        """Close it as in asyncio; does nothing if its client is closed."""
        try:
            self._thread.wait(self._wrapped.close)
        except AlreadyClosed:
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Root(Handle[H]):
    """A handle that owns its thread: with its end the thread ends."""

    def __init__(self, make: Callable[[], H]) -> None:
        # The thread comes first, since the asyncio client must be made in its loop; and it must end
        # if that fails.
        thread = LoopThread()
        try:
            super().__init__(thread, thread.call(make))
        except BaseException:
            thread.stop()
            raise
        # Holds the thread and not the client: the client can be collected (`loop_thread`, invariant
        # 4).
        self._finalizer = weakref.finalize(self, _forgotten, thread)

    def run(self, do: Callable[[H], Awaitable[R]]) -> R:
        """What a coroutine function does with the asyncio client, in its thread.

        For what takes several calls at once: `client.run(lambda asked: asked.producer("orders"))`.
        """
        return self._wait(lambda: do(self._wrapped))

    def close(self) -> None:
        """Close every producer and consumer, then every connection, and end the thread."""
        if not self._finalizer.alive:
            return
        try:
            super().close()
        # Also if closing failed or was interrupted: the thread ends in any case.
        finally:
            self._finalizer.detach()
            self._thread.stop()


class Acknowledged:
    """`wait` for it to know that the broker has it for good; it is sent anyway."""

    __slots__ = ("_thread", "_wrapped")

    def __init__(self, thread: LoopThread, wrapped: acknowledged.Acknowledged) -> None:
        self._thread = thread
        self._wrapped = wrapped

    def done(self) -> bool:
        """Whether the broker has it, or never will."""
        return self._wrapped.done()

    def wait(self, timeout: float | None = None) -> None:
        """Until the broker has it; raises if it never will, or `DeadlineExceeded`."""

        async def wait() -> None:
            try:
                async with asyncio.timeout(timeout):
                    await self._wrapped
            except TimeoutError as error:
                late = f"no answer to an acknowledgement within {timeout} s"
                raise DeadlineExceeded(late) from error

        # Known already: no trip to the other thread.
        if self._wrapped.done():
            self._wrapped.raise_failure()
        else:
            self._thread.wait(wait)


def wrapped_of(given: Any) -> Any:
    """The asyncio counterpart of an object that was given as an argument; others as they are."""
    return given._wrapped if isinstance(given, Threaded) else given


def _copy(receipt: asyncio.Future[R], later: Future[R]) -> None:
    # Cancelled with its client. Asked first: `exception` raises on a cancelled one.
    if receipt.cancelled():
        later.set_exception(AlreadyClosed("the client was closed meanwhile"))
        return
    error = receipt.exception()
    if error is not None:
        later.set_exception(error)
    else:
        later.set_result(receipt.result())


def _forgotten(thread: LoopThread) -> None:
    warnings.warn("a magnetar client was not closed", ResourceWarning, stacklevel=2)
    thread.stop()
