"""Lifecycle of a long-lived component: start, background loops, stop with a deadline.

Owns: `Service`, the base of everything that runs loops of its own.

Invariants:
1. Every background task belongs to one service and is over when `stop` returns, unless it
   ignored its cancellation; then `stop` raises and names it.
2. A loop that crashes is never silent: it is logged, `failed` advances, and `stop` raises its
   error. A loop that is cancelled by anyone but `stop` counts as crashed.
3. `stop` runs once; every caller waits for that one run and gets its result.
4. Order of stop: the component's own `_stop` (finish, flush), then the tasks, last spawned first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Final, Self

from magnetar.errors import DeadlineExceeded, InvariantBroken
from magnetar.runtime.logs import logger
from magnetar.runtime.signal import Signal

_LOG: Final = logger(__name__)

_CANCEL_SECONDS: Final = 1.0
"""What a cancelled task gets to clean up once the deadline of `stop` has passed."""


class Service:
    """A component with a beginning, loops of its own, and an end. Subclasses add the hooks."""

    def __init__(self, name: str, *, stop_seconds: float) -> None:
        self.name = name
        self.failed = Signal()
        """Advances when a background loop crashes; `error` then holds the first crash."""
        self.error: BaseException | None = None
        self._stop_seconds = stop_seconds
        # A dict for its order: tasks are cancelled last spawned first (invariant 4).
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._stopping: asyncio.Task[None] | None = None

    # --- hooks

    async def _start(self) -> None:
        """Open what the component needs and spawn its loops."""

    async def _stop(self) -> None:
        """Finish what was accepted; the loops still run. Cancelled when the deadline passes.

        Also called when `_start` failed half-way.
        """

    # --- lifecycle

    async def start(self) -> None:
        """Start, or undo what was started and raise."""
        try:
            await self._start()
        except BaseException:
            try:
                await self.stop()
            except Exception as error:  # noqa: BLE001  the reason of the failed start matters more
                _LOG.error("service-undo-failed", error, service=self.name)
            raise

    async def stop(self) -> None:
        """Stop within the deadline. Raises the first crash of a loop or of the hook."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._run_stop(), name=f"{self.name}: stop")
        # Invariant 3: a caller that gives up must not take the one run with it.
        await asyncio.shield(self._stopping)

    @property
    def stopping(self) -> bool:
        return self._stopping is not None

    def spawn(self, loop: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a background loop that lives until it returns or the service stops."""
        # A loop that began now would be in nobody's list of tasks to end.
        if self.stopping:
            loop.close()
            raise InvariantBroken(f"{self.name} is stopping and cannot start {name!r}")
        task = asyncio.create_task(loop, name=f"{self.name}: {name}")
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    # --- the parts

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled():
            # Cancelled by somebody else: the loop is gone all the same (invariant 2).
            if not self.stopping:
                self._fail(task, InvariantBroken(f"{task.get_name()} was cancelled from outside"))
        elif (error := task.exception()) is not None:
            self._fail(task, error)

    def _fail(self, task: asyncio.Task[None], error: BaseException) -> None:
        _LOG.error("service-task-crashed", error, service=self.name, task=task.get_name())
        if self.error is None:
            self.error = error
        self.failed.advance()

    async def _run_stop(self) -> None:
        # One deadline for the hook and the tasks together: what
        # the hook takes is not theirs any more.
        deadline = asyncio.get_running_loop().time() + self._stop_seconds
        problem: BaseException | None = None
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                await self._stop()
        except GeneratorExit:
            raise  # its loop is gone, and so are the tasks
        except BaseException as error:  # noqa: BLE001  raised below, once the tasks are over
            problem = error
            # The hook was cut off by the deadline, not by an error of its own.
            if timeout.expired():
                text = f"{self.name} did not finish within {self._stop_seconds} s and was cut off"
                problem = DeadlineExceeded(text)
        stuck = await self._cancel_tasks(deadline)
        # The oldest reason first: a crash explains why the hook or a task did not end well.
        if self.error is not None:
            raise self.error
        if problem is not None:
            raise problem
        if stuck:
            raise DeadlineExceeded(f"{', '.join(stuck)} did not end when cancelled")

    async def _cancel_tasks(self, deadline: float) -> list[str]:
        """Cancel the tasks, last spawned first, each over before the next; who did not end."""
        now = asyncio.get_running_loop().time
        stuck = []
        for task in reversed(list(self._tasks)):
            # One after the other: a loop may still need those that were spawned before it.
            task.cancel()
            await asyncio.wait({task}, timeout=max(deadline - now(), _CANCEL_SECONDS))
            if not task.done():
                stuck.append(task.get_name())
        # Callbacks of the last task run one turn after it: a crash in its clean-up is seen too.
        await asyncio.sleep(0)
        return stuck
