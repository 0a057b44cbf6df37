"""A server process to be killed: `magnetar serve`, or one that dies at a named point.

    python -m harness.crash.server.process FOLDER --point after:sync:journal --nth 12

Owns: the command lines, the wait until the server says that it is ready, the kill, and (run as a
program) a server on a disk that kills its own process at a crash point (`crash_points`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from harness.limits import PATIENCE_S, expire, within
from magnetar.errors import StorageError

_SAID_CHARACTERS: Final = 1000

SERVE: Final = (sys.executable, "-c", "from magnetar.cli.main import main; main()", "serve")
"""`magnetar serve`, whatever the PATH."""

SERVE_TO_A_POINT: Final = (sys.executable, "-m", "harness.crash.server.process")

SMALL_LIMITS: Final = {
    "MAGNETAR_JOURNAL_FILE_BYTES": str(256 * 1024),
    "MAGNETAR_JOURNAL_FILES_MAX": "4",
    "MAGNETAR_JOURNAL_BATCH_BYTES": str(64 * 1024),
    "MAGNETAR_STORAGE_SETTLE_SECONDS": "0.05",
    "MAGNETAR_LEDGER_CACHE_BYTES": str(512 * 1024),
    "MAGNETAR_MANAGED_LEDGER_LEDGER_ENTRIES": "200",
    "MAGNETAR_CURSOR_RECORD_BYTES": "2048",
    "MAGNETAR_LOG_LEVEL": "error",
}
"""Small, so that files are recycled, ledgers rolled and cursors split within one short life."""


@dataclass(slots=True)
class ServerProcess:
    """One server process on a data folder. End it with `kill`."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    port: int = 0
    admin_url: str = ""
    ready_seconds: float = 0.0
    """From the start of the process until it said that it is ready."""

    @classmethod
    def start(
        cls, folder: Path, command: Sequence[str] = SERVE, arguments: Sequence[str] = ()
    ) -> ServerProcess:
        """Start it and wait for nothing."""
        folder.mkdir(parents=True, exist_ok=True)
        ports = ("--port", "0", "--admin-port", "0", "--json")
        errors = (folder.with_name(f"{folder.name}.stderr")).open("ab")
        try:
            process = subprocess.Popen(
                [*command, "--data", str(folder), *ports, *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **SMALL_LIMITS},
            )
        except BaseException:
            errors.close()
            raise
        return cls(process, errors)

    async def until_ready(self) -> bool:
        """Wait until it serves; False: it died before that."""
        assert self.process.stdout is not None
        started = time.monotonic()
        reading = asyncio.to_thread(self.process.stdout.readline)
        async with within("the server serves"):
            line = await asyncio.shield(asyncio.ensure_future(reading))
        if not line:
            return False
        self.ready_seconds = time.monotonic() - started
        ready = json.loads(line)
        self.port = int(ready["service_url"].rpartition(":")[2])
        self.admin_url = str(ready["admin_url"] or "")
        return True

    async def part_of_start(self, seconds: float) -> None:
        """Let it start for so long, whether it is ready then or not."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.until_ready()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def said(self) -> str:
        """The end of what it wrote to its standard error."""
        text = Path(self.errors.name).read_text(errors="replace")
        return text[-_SAID_CHARACTERS:].strip()

    async def died_within(self, seconds: float) -> bool:
        try:
            await asyncio.to_thread(self.process.wait, seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> int:
        """SIGKILL, unless it is dead already; its exit code."""
        self.process.kill()
        return self._ended()

    async def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        if not await self.died_within(PATIENCE_S):
            self.kill()
            expire("the server stops")
        return self._ended()

    def _ended(self) -> int:
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            expire("a killed server is gone")
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.errors.close()
        return code


def died_by_kill(code: int) -> bool:
    return code == -signal.SIGKILL


# --- the program: a server that kills itself


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    import uvloop

    uvloop.run(_serve(options))
    return 0


async def _serve(options: argparse.Namespace) -> None:
    # What only the program needs, the tests that start it need not load.
    from harness.crash.storage.points import CrashCount, CrashingDisk
    from magnetar.server.admin import create_admin
    from magnetar.server.app import Server
    from magnetar.server.config import load
    from magnetar.server.machine import Machine

    config = load({"data": options.data, "port": 0, "admin_port": 0}, os.environ)
    disk = CrashingDisk(CrashCount(options.point, options.nth))
    server = Server(config, create_admin=create_admin, machine=Machine(disk=disk))
    await server.start()
    ready = {"service_url": server.service_url, "admin_url": server.admin_url}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    await server.failed.past(0)
    raise StorageError("the server failed")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="harness.crash.server.process")
    parser.add_argument("--data", required=True)
    parser.add_argument("--port", type=int)
    parser.add_argument("--admin-port", type=int)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--point", required=True)
    parser.add_argument("--nth", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
