"""A server in a process of its own, and what the kernel says of it: memory, processor time.

Only for Linux's /proc; tests that measure are skipped elsewhere.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from harness.limits import PATIENCE_S, expire
from harness.patient_clients import PatientDriver

MIB = 1024 * 1024

_MAGNETAR = Path(sys.executable).with_name("magnetar")
_PROC = Path("/proc")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# What only a bug writes.
_BUG_EVENTS = ("command-failed", "crashed", "session-end-failed", "leaving-failed", "Traceback")

measured = pytest.mark.skipif(not (_PROC / "self" / "statm").exists(), reason="needs /proc")


class Running:
    """A server process that answers."""

    def __init__(self, process: subprocess.Popen[str], ready: dict[str, Any], errors: Path) -> None:
        url = urlsplit(ready["service_url"])
        assert url.hostname is not None
        assert url.port is not None
        self.host, self.port = url.hostname, url.port
        self.admin_url: str = ready["admin_url"]
        self.process = process
        self.was_killed = False
        self._errors = errors

    async def connect(self, **fields: Any) -> PatientDriver:
        return await PatientDriver.connect(self.host, self.port, **fields)

    def rss(self) -> int:
        """Bytes of memory that are resident now."""
        pages = (_PROC / str(self.process.pid) / "statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def peak_rss(self) -> int:
        """The most bytes that were resident since `forget_peak`."""
        for line in (_PROC / str(self.process.pid) / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmHWM")

    def forget_peak(self) -> None:
        (_PROC / str(self.process.pid) / "clear_refs").write_text("5")

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far."""
        fields = (_PROC / str(self.process.pid) / "stat").read_text().rpartition(")")[2].split()
        user, system = fields[11:13]
        return (int(user) + int(system)) / _TICKS_PER_SECOND

    def log(self) -> str:
        return self._errors.read_text()

    def bugs(self) -> list[str]:
        """Lines of its log that only a bug writes."""
        lines = self.log().splitlines()
        return [line for line in lines if any(event in line for event in _BUG_EVENTS)]

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9; a server may be started in the same folder, at the same port, afterwards."""
        self.was_killed = True
        self.process.kill()
        self.process.wait()

    def exit_code(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            expire("the end of a server")


def _lower_descriptors(count: int) -> None:
    # The soft one is lower still: a server raises it as far as it may.
    resource.setrlimit(resource.RLIMIT_NOFILE, (count // 2, count))


@contextmanager
def served(
    folder: Path, *, port: int = 0, descriptors: int | None = None, **settings: object
) -> Iterator[Running]:
    """A server, on a free port unless one is given; `settings` as in its environment.

    With `descriptors` the kernel lets it open no more files than that.

    At the end it is stopped, if it runs, and unless it was killed must have left without an error
    or a bug.
    """
    errors = folder / "stderr.txt"
    environ = {name: text for name, text in os.environ.items() if not name.startswith("MAGNETAR_")}
    environ |= {f"MAGNETAR_{name.upper()}": str(value) for name, value in settings.items()}
    command = [_MAGNETAR, "serve", "--data", folder / "data", "--admin-port", "0"]
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            [*map(str, command), "--port", str(port), "--json"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environ,
            preexec_fn=None if descriptors is None else partial(_lower_descriptors, descriptors),
        ) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, errors.read_text()
        running = Running(process, json.loads(line), errors)
        try:
            yield running
            if process.poll() is None:
                running.terminate()
            code = running.exit_code()
            assert running.was_killed or code == 0, running.log()
            assert not running.bugs()
        finally:
            if process.poll() is None:
                process.kill()
