"""A worker on virtual time: jobs take as long as a seed says, and none in reality.

Owns: `VirtualWorker`, a `runtime.worker.Worker` for the loop of `virtual_time`. A job takes effect
at one moment within its time, and its caller learns of it at the end: between the two, everything
else may happen, a crash among it.

Invariants:
1. Jobs take effect, and finish, in the order of `run` calls.
2. After a crash nothing runs and nothing finishes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any, Final, TypeVar

from magnetar.runtime.signal import Signal
from magnetar.testing.virtual.faults import SimulatedCrash

Result = TypeVar("Result")

# The most that a job takes, by kind: as a fast disk, a slow one, and one that hangs for a
# moment. The last is longer than the server waits between two flushes of a cursor.
_FAST_S: Final = 0.0005
_SLOW_S: Final = 0.05
_STUCK_S: Final = 2.0


class VirtualWorker:
    """Runs jobs in order. `chance` decides how long they take.

    `stopped` is past 0 once the machine has stopped: a job that is given then does not wait for
    ever, for whoever gives it is only being cleared away.
    """

    def __init__(self, chance: Random, stopped: Signal | None = None) -> None:
        self._chance = chance
        self._busy_until = 0.0
        self._stopped = stopped or Signal()

    def run(self, job: Callable[..., Result], /, *args: Any) -> asyncio.Future[Result]:
        if self._stopped.version:
            raise SimulatedCrash
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        # Invariant 1: a job begins when the one before it has ended, as on one thread.
        start = max(loop.time(), self._busy_until)
        seconds = self._seconds()
        self._busy_until = start + seconds
        # Somewhere within its time: a crash may come before the effect, or after
        # it and before the caller hears of it. Both must be survived.
        effect = start + seconds * self._chance.random()
        loop.call_at(effect, self._do, future, self._busy_until, job, args)
        return future

    async def close(self) -> None:
        await self.run(_nothing)

    def _seconds(self) -> float:
        kind = self._chance.random()
        most = _FAST_S if kind < 0.8 else _SLOW_S if kind < 0.99 else _STUCK_S
        return most * self._chance.random()

    def _do(
        self,
        future: asyncio.Future[Any],
        finish: float,
        job: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> None:
        # Invariant 2: the machine stopped while the job was waiting.
        if self._stopped.version:
            return
        loop = asyncio.get_running_loop()
        try:
            result = job(*args)
        # The job itself met the crash: its caller is never answered.
        except SimulatedCrash:
            return
        except BaseException as error:  # noqa: BLE001  the future carries it to the caller
            loop.call_at(finish, self._tell, future.set_exception, future, error)
        else:
            loop.call_at(finish, self._tell, future.set_result, future, result)

    def _tell(self, how: Callable[[Any], None], future: asyncio.Future[Any], answer: Any) -> None:
        # Done but not told: what a client cannot tell from not done.
        if not self._stopped.version and not future.done():
            how(answer)


def _nothing() -> None:
    """The last job of a worker."""
