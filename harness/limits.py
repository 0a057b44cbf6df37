"""Limits on real time: how long tests and crash runs wait before they give a run up.

Owns: `PATIENCE_S`, the limit of a single wait; `LimitExpired`, which ends whatever ran into a
limit; `within`, a wait with a limit; `reported`, how a program says that one ran out; `OwnTime`,
the clock for what has to be quick.

Invariants:
1. An expired limit says nothing about what was tested: the machine may have been busy. It is never
   a finding, a violation or a broken rule that was caught; it ends the run and is reported as such.
2. What must be done in a given time is measured by `OwnTime`, or on virtual time, where limits are
   findings.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, NoReturn

PATIENCE_S: Final = 300.0
"""Seconds a test or a crash run waits for one thing: many times what it takes on a busy machine."""

EXIT_CODE: Final = 3
"""The exit code of a program that ran into a limit; 1 is one that found something."""


class LimitExpired(KeyboardInterrupt):
    """A limit on real time ran out.

    A KeyboardInterrupt, since that is what ends a run from outside: asyncio hands it on instead of
    keeping it in a task, hypothesis does not take it for an example that fails, and neither
    `except Exception` nor `gather(return_exceptions=True)` swallows it.
    """

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(what, seconds)
        self.what = what
        self.seconds = seconds

    def __str__(self) -> str:
        return f"limit of {self.seconds:g} s expired: {self.what}"


def expire(what: str, seconds: float | None = None) -> NoReturn:
    """End the run: what was waited for did not happen in time."""
    raise LimitExpired(what, PATIENCE_S if seconds is None else seconds)


@asynccontextmanager
async def within(what: str, seconds: float | None = None) -> AsyncIterator[None]:
    """Wait in the body for what is named; a TimeoutError of the body's own passes through."""
    try:
        async with asyncio.timeout(PATIENCE_S if seconds is None else seconds) as limit:
            yield
    except TimeoutError:
        if limit.expired():
            expire(what, seconds)
        raise


def reported(program: Callable[[], int]) -> int:
    """The exit code of a program; one that ran into a limit says so."""
    try:
        return program()
    except LimitExpired as error:
        sys.stderr.write(f"{error}; that shows nothing, neither a fault nor its absence\n")
        return EXIT_CODE


class OwnTime:
    """Seconds in which the event loop got to run, counted in ticks of its timer.

    A process that is not given the processor counts nothing meanwhile, so that limits on this time
    hold on a busy machine, too. Whoever waits for a timer too long is found out all the same.
    """

    _TICK_S: Final = 0.01

    def __init__(self) -> None:
        self._ticks = 0
        self._ticking = asyncio.get_running_loop().create_task(self._tick(), name="own time")

    @property
    def seconds(self) -> float:
        return self._ticks * self._TICK_S

    def stop(self) -> None:
        self._ticking.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._TICK_S)
            self._ticks += 1
