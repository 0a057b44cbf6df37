"""Brokers in one process, each of which can be killed: its tasks end, and nobody else's.

Owns: `Life`, one broker from its start to its end, and `follow`, which has an event loop tell every
task's life. What a life does runs in a context that names it; whatever it starts inherits that.

Invariants:
1. A task belongs to the life in whose context it was made, and none of a dead life goes on: those
   that are made while others are cleared away are cancelled too.
2. Whoever asks a life for something (`Life.ask`) gets the result, its error, or Unavailable if the
   life ended meanwhile; it is never cancelled by that end, and its own end does not undo what it
   asked for.
3. A protocol that was put into a life (`housed`) runs in it, whoever wrote the bytes.

Relies on: what a life reaches outside (network, stores) being cut by whoever kills it, before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from magnetar.errors import Unavailable

Result = TypeVar("Result")

_LIFE: ContextVar[Life | None] = ContextVar("life", default=None)


class Life:
    """One broker from its start to its end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_over = False
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._context = copy_context()
        self._context.run(_LIFE.set, self)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        if self.is_over:
            task.cancel()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    def kill(self) -> None:
        """Nothing of it goes on."""
        self.is_over = True
        for task in list(self._tasks):
            task.cancel()

    async def cleared(self, seconds: float) -> list[str]:
        """Wait until its tasks are over; the names of those that are not in time."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=seconds)
        return [task.get_name() for task in self._tasks]

    async def ask(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run something in this life."""
        if self.is_over:
            work.close()
            raise Unavailable(f"{self.name} is dead")
        loop = asyncio.get_running_loop()
        task = loop.create_task(work, context=self._context.copy())
        await asyncio.wait({task})
        if task.cancelled():
            raise Unavailable(f"{self.name} died")
        return task.result()

    def housed(self, new_protocol: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """A protocol of this life."""
        context = self._context.copy()
        return Housed(context.run(new_protocol), self._context)


class Housed(asyncio.Protocol):
    """Gives what a transport tells to a protocol, in that protocol's own context."""

    def __init__(self, protocol: asyncio.Protocol, context: Context) -> None:
        self._protocol = protocol
        self._context = context

    @classmethod
    def here(cls, protocol: asyncio.Protocol) -> Housed:
        """In the context of the caller."""
        return cls(protocol, copy_context())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._run(self._protocol.connection_made, transport)

    def data_received(self, data: bytes) -> None:
        self._run(self._protocol.data_received, data)

    def eof_received(self) -> bool | None:
        return self._run(self._protocol.eof_received)

    def pause_writing(self) -> None:
        self._run(self._protocol.pause_writing)

    def resume_writing(self) -> None:
        self._run(self._protocol.resume_writing)

    def connection_lost(self, exc: Exception | None) -> None:
        self._run(self._protocol.connection_lost, exc)

    def _run(self, call: Callable[..., Result], *args: Any) -> Result:
        # A copy: a protocol that writes may be told to pause before it returns.
        return self._context.copy().run(call, *args)


def present_life() -> Life | None:
    """Whose code runs now; None: nobody's that can be killed."""
    return _LIFE.get()


def follow(loop: asyncio.AbstractEventLoop) -> None:
    """Have every task of this loop belong to the life that makes it."""
    make = loop.get_task_factory()
    assert make is not None, "a loop that numbers its tasks"

    def make_adopted(
        loop: asyncio.AbstractEventLoop, main: Any, /, **options: Any
    ) -> asyncio.Task[Any]:
        context: Context | None = options.get("context")
        life = _LIFE.get() if context is None else context.get(_LIFE)
        task = make(loop, main, **options)
        assert isinstance(task, asyncio.Task)
        if life is not None:
            life.adopt(task)
        return task

    loop.set_task_factory(make_adopted)
