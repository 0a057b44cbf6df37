"""A server with its admin interface on a thread of its own, for verbs that have loops of theirs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from click.testing import CliRunner, Result

from harness.limits import PATIENCE_S
from magnetar.cli.main import main
from magnetar.runtime.limits import Limits
from magnetar.server.admin import create_admin
from magnetar.server.app import Server
from magnetar.server.config import ServerConfig

_MIB = 1024 * 1024
_SECONDS = PATIENCE_S


class Running:
    """A server that runs, and the verbs called against it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.admin_url = ""
        self.ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told_to_stop: asyncio.Event | None = None

    def serve(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        limits = Limits(journal_file_bytes=_MIB, journal_files_max=3)
        config = ServerConfig(data=str(self.folder), port=0, admin_port=0, limits=limits)
        async with Server(config, create_admin=create_admin) as server:
            assert server.admin_url is not None
            self.url, self.admin_url = server.service_url, server.admin_url
            self._loop, self._told_to_stop = asyncio.get_running_loop(), asyncio.Event()
            self.ready.set()
            await self._told_to_stop.wait()

    def stop(self) -> None:
        assert self._loop is not None
        assert self._told_to_stop is not None
        self._loop.call_soon_threadsafe(self._told_to_stop.set)

    def admin(self, *arguments: str) -> Result:
        """A verb that asks the admin interface."""
        return CliRunner().invoke(main, [*arguments, "--admin-url", self.admin_url])

    def done(self, *arguments: str) -> str:
        """As `admin`, of a call that succeeds."""
        result = self.admin(*arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    def client(self, *arguments: str, stdin: str | None = None) -> Result:
        """A verb that speaks the protocol."""
        return CliRunner().invoke(main, [*arguments, "--url", self.url], input=stdin)


@contextmanager
def running_server(folder: Path) -> Iterator[Running]:
    running = Running(folder)
    thread = threading.Thread(target=running.serve, name="server")
    thread.start()
    assert running.ready.wait(_SECONDS)
    try:
        yield running
    finally:
        running.stop()
        thread.join(_SECONDS)
        assert not thread.is_alive()
