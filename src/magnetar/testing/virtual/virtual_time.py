"""An event loop on virtual time: what waits for a timer takes no time, and runs repeat exactly.

Owns: `VirtualTimeLoop`, whose clock jumps to the next timer when nothing else is ready, and
`run`, the counterpart of `asyncio.run` on it.

Invariants:
1. Time moves only when no callback is ready, and then exactly to the next timer.
2. Nothing ready and no timer is a deadlock: it is raised with the waiting tasks, never waited out.
   So is the opposite: callbacks without end at one moment (`TURNS_MAX`).
3. Coroutines that take randomness from equal seeds only run through equal steps: callbacks run in
   the order in which they were scheduled, timers of one moment in an order that the run fixes.

Relies on: everything happening on this loop. A real thread or socket would have to be waited for
in real time, so code that uses them must not run here: a loop that is told of a file descriptor
refuses it, and `call_soon_threadsafe` from a thread is refused as well.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from magnetar.errors import DeadlineExceeded, InvariantBroken, NotSupported

Result = TypeVar("Result")

UNTIL_S: Final = 30 * 24 * 3600.0
"""How far `run` lets virtual time go unless told otherwise: background timers never end."""

TURNS_MAX: Final = 1_000_000
"""How often the loop may go round at one moment: more is a loop that never waits."""

_TASKS_SHOWN = 10
# A task that starts another one at every cancellation is not waited for.
_CANCEL_ROUNDS = 5


class _JumpingSelector(selectors.BaseSelector):
    """Waits for nothing: the time it was asked to wait is added to the loop's clock instead."""

    def __init__(self) -> None:
        self._keys: dict[int, selectors.SelectorKey] = {}
        self.jump: Callable[[float | None], None] | None = None

    def register(self, fileobj: Any, events: int, data: object = None) -> selectors.SelectorKey:
        if self.jump is not None:
            raise NotSupported("a loop on virtual time has no sockets, pipes or child processes")
        # Only the loop's own wake-up pipe, registered while it is being made.
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[number] = selectors.SelectorKey(fileobj, number, events, data)
        return self._keys[number]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        return self._keys.pop(number)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.jump is not None:
            self.jump(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and is virtual. `until` is the moment at which the loop gives up."""

    def __init__(self, until: float = UNTIL_S) -> None:
        selector = _JumpingSelector()
        super().__init__(selector)
        self._now = 0.0
        self._until = until
        self._still = 0
        # By it a call from a thread is told from one of our own: threads have no virtual time.
        self._owner = threading.get_ident()
        # asyncio treats timers within one clock tick as due together; virtual time is exact, but
        # a sum of floats is not: without a tick a timer could be asked for again and again.
        self._clock_resolution = 1e-9
        # The order of birth, for `tasks`: sets of tasks have another order in every run.
        self._born: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self._births = 0
        self.set_task_factory(self._number)
        selector.jump = self._jump

    def time(self) -> float:
        return self._now

    def tasks(self) -> list[asyncio.Task[Any]]:
        """The unfinished tasks, oldest first (a set would be in another order at every run)."""
        return sorted(asyncio.all_tasks(self), key=self._born.__getitem__)

    def _number(
        self, loop: asyncio.AbstractEventLoop, main: Any, /, **options: Any
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(main, loop=loop, **options)
        self._births += 1
        self._born[task] = self._births
        return task

    def call_soon_threadsafe(  # type: ignore[override]  # the same, said without TypeVarTuple
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._owner:
            raise NotSupported("a thread called into a loop on virtual time")
        return self.call_soon(callback, *args, context=context)

    def _jump(self, timeout: float | None) -> None:
        # No timer is left and nothing is ready: a real loop would wait for ever (invariant 2).
        if timeout is None:
            raise InvariantBroken(f"deadlock at {self._now:.3f} s: {self._waiting()}")
        # Callbacks are ready: time stands still, but not without end (invariant 2).
        if timeout <= 0:
            self._still += 1
            if self._still > TURNS_MAX:
                raise InvariantBroken(f"time stands still at {self._now:.3f} s: {self._waiting()}")
            return
        self._still = 0
        # Background timers always wait for something: without an
        # end a lost wake-up would never show.
        if self._now + timeout > self._until:
            raise DeadlineExceeded(f"virtual time reached {self._until:g} s: {self._waiting()}")
        self._now += timeout

    def _waiting(self) -> str:
        tasks = self.tasks()
        shown = "; ".join(_place(task) for task in tasks[:_TASKS_SHOWN])
        return f"{len(tasks)} tasks wait: {shown}"


def run(main: Coroutine[Any, Any, Result], *, until: float | None = None) -> Result:
    """Run `main` from virtual time 0. `until` limits how far the time may go."""
    loop = VirtualTimeLoop(UNTIL_S if until is None else until)
    try:
        return loop.run_until_complete(main)
    finally:
        try:
            _cancel_all(loop)
        finally:
            loop.close()


def _cancel_all(loop: VirtualTimeLoop) -> None:
    for _ in range(_CANCEL_ROUNDS):  # who is cancelled may start others to clean up
        tasks = loop.tasks()
        if not tasks:
            break
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())


def _place(task: asyncio.Task[Any]) -> str:
    """Where a task waits, for a message."""
    frames = task.get_stack(limit=1)
    where = f"{frames[0].f_code.co_qualname}:{frames[0].f_lineno}" if frames else "?"
    return f"{task.get_name()} at {where}"
