"""A real `magnetar serve` process for tests with official clients, and its admin interface.

Owns: `ServerProcess`: start, ready line, SIGTERM, the exit code, and what it wrote to stderr; and
`served`, one that ends with code 0 on SIGTERM and wrote no error while tests ran.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import urlsplit

from harness.limits import PATIENCE_S

_MAGNETAR = Path(sys.executable).with_name("magnetar")
_STOP_SECONDS = PATIENCE_S
_ADMIN_SECONDS = PATIENCE_S
NO_SETTINGS: Final[Mapping[str, str]] = {}
"""By the names of their variables."""


class ServerProcess:
    """One server on one data folder; after the first start it keeps its ports."""

    def __init__(self, folder: Path, settings: Mapping[str, str] = NO_SETTINGS) -> None:
        self.folder = folder
        self._settings = settings
        self.service_url = ""
        self.admin_url = ""
        self._process: subprocess.Popen[str] | None = None
        self._stderr: IO[bytes] | None = None

    @property
    def written(self) -> str:
        """What it has written to stderr, of all its starts."""
        return self._stderr_file.read_text("utf-8")

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stderr = self._stderr_file.open("ab")
        port, admin_port = _port(self.service_url), _port(self.admin_url)
        self._process = subprocess.Popen(
            [
                str(_MAGNETAR),
                "serve",
                f"--data={self.folder / 'data'}",
                f"--port={port}",
                f"--admin-port={admin_port}",
                "--json",
            ],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={name: value for name, value in os.environ.items() if "MAGNETAR_" not in name}
            | dict(self._settings),
        )
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        assert ready, f"it did not become ready:\n{self.written}"
        described = json.loads(ready)
        self.service_url = described["service_url"]
        self.admin_url = described["admin_url"]

    def stop(self) -> None:
        """SIGTERM; it must end by itself, with code 0."""
        self.signal(signal.SIGTERM)
        self.ended()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL)
        self.ended(-signal.SIGKILL)

    def ended(self, code: int = 0) -> None:
        assert self._process is not None
        assert self._stderr is not None
        try:
            assert self._process.wait(_STOP_SECONDS) == code, self.written
        finally:
            self._process.kill()
            self._process.wait()
            self._stderr.close()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def admin(self, method: str, path: str, body: object = None) -> Any:
        """What the admin interface answers under `/admin/v2/`; it must be a success."""
        status, answer = ask_admin(self.admin_url, method, f"/admin/v2/{path}", body)
        assert status < 300, f"{method} {path}: {status} {answer}"
        return answer

    @property
    def _stderr_file(self) -> Path:
        return self.folder / "stderr"


@contextmanager
def served(folder: Path, settings: Mapping[str, str] = NO_SETTINGS) -> Iterator[ServerProcess]:
    process = ServerProcess(folder, settings)
    process.start()
    try:
        yield process
    finally:
        process.stop()
    errors = [line for line in process.written.splitlines() if _is_error(line)]
    assert not errors, "\n".join(errors)


def _is_error(line: str) -> bool:
    return line.split(" ")[1:2] == ["error"] or line.startswith("Traceback")


def ask_admin(url: str, method: str, path: str, body: object = None) -> tuple[int, Any]:
    """Status and answer (JSON where it is that, else text; None if empty) of an admin interface."""
    host, port = urlsplit(url).hostname, _port(url)
    assert host is not None
    connection = HTTPConnection(host, port, timeout=_ADMIN_SECONDS)
    try:
        given = None if body is None else json.dumps(body)
        connection.request(method, path, given, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode("utf-8")
    finally:
        connection.close()
    if not text:
        return answer.status, None
    try:
        return answer.status, json.loads(text)
    except ValueError:
        return answer.status, text


def _port(url: str) -> int:
    """The port of a URL; 0, which takes a free one, if there is none yet."""
    return urlsplit(url).port or 0
