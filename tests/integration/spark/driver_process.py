"""A driver in a process of its own, killed with everything that it started.

Owns: `DriverProcess`: a program with a plan, its JVM, and the Python processes of both. They are
one session of the kernel, so that a kill finds all of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.meta.tree import ROOT

_POLL_S = 0.05
_PATIENCE_S = 900.0
_PROC = Path("/proc")


class DriverProcess:
    """`python -m module plan`; what it writes goes to a file."""

    def __init__(self, module: str, plan: dict[str, Any], text: Path) -> None:
        self._text = text
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        with text.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(plan)],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environ,
                start_new_session=True,
            )

    def text(self) -> str:
        return self._text.read_text()

    def until(self, is_so: Callable[[], bool]) -> None:
        """Until something is so; it must not end before."""
        deadline = time.monotonic() + _PATIENCE_S
        while not is_so():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(_POLL_S)

    @property
    def is_alive(self) -> bool:
        """Whether it, or anything that it started, still runs."""
        return self.process.poll() is None or bool(self._living())

    def kill(self) -> None:
        """kill -9 of the driver, its JVM and all their processes."""
        for pid in self._living():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + _PATIENCE_S
        while self._living() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def ended(self) -> int:
        """Its exit code."""
        return self.process.wait(_PATIENCE_S)

    def _living(self) -> list[int]:
        found = []
        for each in _PROC.iterdir():
            if not each.name.isdecimal():
                continue
            with suppress(OSError):
                fields = (each / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    found.append(int(each.name))
        return found
