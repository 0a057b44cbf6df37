"""A server with a loop and a thread of its own, for clients that block or are other processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from magnetar.client.blocking.loop_thread import LoopThread
from tests.unit.server.serving import serving

LoopThread().stop()  # the first loop of a process opens a pipe for signals that stays


@contextmanager
def service(folder: Path) -> Iterator[str]:
    """Its URL."""
    thread = LoopThread()
    try:
        context = serving(folder)
        server = thread.wait(context.__aenter__)
        try:
            yield server.service_url
        finally:
            thread.wait(lambda: context.__aexit__(None, None, None))
    finally:
        thread.stop()
