"""Kill loops: a process with a load, SIGKILLed, its folder reopened and compared.

Owns: starting a `crash_child`, killing it at a named point or at a random moment, and keeping what
it reported. Children follow each other on one folder, at times several before a check, so that
the recovery of a store that was recovered, or was killed while it recovered, is tested too.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from harness.crash.storage.check import Fault, Verdict, Violation, check_store
from harness.crash.storage.history import Event, History, Submitted, Told, decode_event
from harness.crash.storage.load import CRASH_LIMITS
from harness.crash.storage.points import CRASH_POINTS, CrashPoint
from harness.limits import PATIENCE_S, expire

_POINT_OPERATIONS: Final = 20_000
"""A point that so many operations did not pass is given up: the child is killed anyway."""
_RANDOM_OPERATIONS: Final = 8000
"""Before a kill at random: told by the work, as a slow machine must have done as much."""
_START_SECONDS: Final = 0.6
"""Before a kill at random that may come while the child starts."""
_START_SHARE: Final = 0.2
_READ_BYTES: Final = 1 << 16
_STORE_LIVES: Final = 8
"""Kills before a new, empty folder is taken."""


@dataclass(frozen=True, slots=True)
class Kill:
    """How one child died."""

    planned: str
    """A point and its count, or `random`."""
    reached: bool
    """It died where it was to die."""
    verdict: Verdict | None
    """None: the next child took the folder over without a check."""


@dataclass(slots=True)
class _Lifetime:
    """One child."""

    process: subprocess.Popen[bytes]
    events: int
    history: History
    failure: str = ""
    operations: int = 0
    """That the child has begun."""
    _rest: bytes = b""

    def read(self, seconds: float) -> bool:
        """Take in what was reported, waiting at most so long; False: the child is dead."""
        ready, _, _ = select.select([self.events], [], [], max(0.0, seconds))
        if not ready:
            return True
        data = os.read(self.events, _READ_BYTES)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(decode_event(line))
        return bool(data)

    def _take(self, event: Event) -> None:
        self.history.add(event)
        self.operations += isinstance(event, Submitted)
        if isinstance(event, Told) and event.what == "failed":
            self.failure = event.detail


def kill_loop(folder: Path, kills: int, seed: int) -> Iterator[Kill]:
    """Run children on folders below `folder` and kill so many of them."""
    chance = Random(f"kills {seed}")
    points = list(CRASH_POINTS)
    chance.shuffle(points)
    history = History(seed)
    store = folder
    for number in range(kills):
        if number % _STORE_LIVES == 0:
            store = folder / f"store-{number}"
            history = History(seed)
        point = None  # every fourth child dies at a random moment
        if number % 4 != 3:
            point = points[(number - number // 4) % len(points)]
        if point is not None and point.often == 1:
            # Passed only while a store is young.
            store = folder / f"young-{number}"
            history = History(seed)
        planned, reached, failure = _run_child(store, history, point, chance)
        is_last = number == kills - 1 or (number + 1) % _STORE_LIVES == 0
        verdict = None
        if is_last or failure or point is not None or chance.random() < 0.6:
            verdict = asyncio.run(check_store(store, history, CRASH_LIMITS))
        if failure and verdict is not None:
            verdict.violations.append(Violation(Fault.LOST, f"the load failed: {failure}"))
        yield Kill(planned, reached, verdict)


def _run_child(
    store: Path, history: History, point: CrashPoint | None, chance: Random
) -> tuple[str, bool, str]:
    """How the child was to die, whether it did, and why its load failed if it did that."""
    nth = 0 if point is None else chance.randrange(1, point.often + 1)
    child = _start(store, history, point, nth)
    try:
        if point is not None:
            reached = not _follow(child, _POINT_OPERATIONS)
        elif chance.random() < _START_SHARE:
            reached = _follow_start(child, chance.random() * _START_SECONDS)
        else:
            reached = _follow(child, chance.randrange(_RANDOM_OPERATIONS))
        child.process.kill()
        deadline = time.monotonic() + PATIENCE_S
        while child.read(deadline - time.monotonic()):
            if time.monotonic() > deadline:
                expire("a killed process closes its pipe")
    finally:
        child.process.kill()
        child.process.wait()
        os.close(child.events)
    died_by_signal = child.process.returncode == -signal.SIGKILL
    failure = child.failure
    if not died_by_signal and not failure:
        failure = f"exit code {child.process.returncode}"
    planned = "random" if point is None else f"{point.name} #{nth}"
    return planned, reached and died_by_signal, failure


def _start(store: Path, history: History, point: CrashPoint | None, nth: int) -> _Lifetime:
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "harness.crash.storage.child", str(store)]
    command += [f"--seed={history.seed}", f"--first-token={history.next_token}"]
    command += [f"--events={writing}"]
    if point is not None:
        command += [f"--point={point.name}", f"--nth={nth}"]
    try:
        process = subprocess.Popen(command, pass_fds=[writing])
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return _Lifetime(process, reading, history)


def _follow(child: _Lifetime, operations: int) -> bool:
    """Read until the child has begun so many operations; False: it died before."""
    deadline = time.monotonic() + PATIENCE_S
    while child.operations <= operations:
        if not child.read(deadline - time.monotonic()):
            return False
        if time.monotonic() > deadline:
            expire(f"{operations} operations of a child")
    return True


def _follow_start(child: _Lifetime, seconds: float) -> bool:
    """Read for so long, whatever the child does then; False: it died before."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if not child.read(left):
            return False
    return True
