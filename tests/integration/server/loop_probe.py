"""A server on a loop and a thread of its own, and how long each turn of that loop takes.

Owns: `Probed`. Turns are measured in the processor time of the server's thread: neither a busy
machine nor the test's own work counts. The collector of garbage is the process's, and switched off.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from harness.limits import PATIENCE_S
from magnetar.runtime.limits import Limits
from magnetar.server.admin import create_admin
from magnetar.server.app import Server
from magnetar.server.config import ServerConfig

T = TypeVar("T")


class Turns(NamedTuple):
    """What the loop did between two looks at it."""

    longest_ms: float
    total_ms: float
    longest_in: str = ""
    """The callback that took longest."""


class Probed:
    """The server, and the turns of its loop since the last `turns`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: Server) -> None:
        self.loop = loop
        self.server = server
        self._longest = 0.0
        self._total = 0.0
        self._longest_in = ""

    def count(self, seconds: float, handle: asyncio.Handle) -> None:
        if seconds > self._longest:
            self._longest, self._longest_in = seconds, repr(handle)
        self._total += seconds

    async def on_loop(self, work: Callable[[Server], Coroutine[Any, Any, T]]) -> T:
        """Run something in the server's loop, from the test's."""
        future = asyncio.run_coroutine_threadsafe(work(self.server), self.loop)
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.wrap_future(future)

    def turns(self) -> Turns:
        found = Turns(self._longest * 1000, self._total * 1000, self._longest_in)
        self._longest = self._total = 0.0
        return found


@contextmanager
def probed(folder: Path, patch: pytest.MonkeyPatch, limits: Limits, kind: str) -> Iterator[Probed]:
    """A server in a thread, whose every callback is timed."""
    started: list[Probed] = []
    ready, ending = threading.Event(), asyncio.Event()

    async def serve() -> None:
        config = ServerConfig(
            data=str(folder), port=0, admin_port=0, limits=limits, transaction_kind=kind
        )
        async with Server(config, create_admin=create_admin) as server:
            started.append(Probed(asyncio.get_running_loop(), server))
            ready.set()
            await ending.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="probed server")
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        if threading.current_thread() is not thread or not started:
            run(handle)
            return
        begun = time.thread_time()
        run(handle)
        started[0].count(time.thread_time() - begun, handle)

    patch.setattr(asyncio.Handle, "_run", timed)
    gc.disable()
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield started[0]
    finally:
        started[0].loop.call_soon_threadsafe(ending.set)
        thread.join()
        gc.enable()
