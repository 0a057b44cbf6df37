"""kill -9 of a driver, its JVM and its workers, at the points of the source: F1, F2, F8."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.meta.tree import ROOT
from tests.spark.files import PATIENCE_S, Files
from tests.spark.stage import Stage, check

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(900)]

_POLL_S = 0.05
_PROC = Path("/proc")


class Driver:
    """A process of `tests.spark.source_driver`, and everything that it starts."""

    def __init__(self, folder: Path, options: dict[str, str], hold: str = "") -> None:
        self._folder = folder
        self._reached = folder / "reached"
        self._reached.unlink(missing_ok=True)
        plan = json.dumps({"folder": str(folder), "options": options, "hold": hold})
        with (folder / "text").open("ab") as text:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.source_driver", plan],
                stdout=text,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )

    def kill_when_reached(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self._reached.exists():
            assert self._process.poll() is None, self._text()
            assert time.monotonic() < deadline, self._text()
            time.sleep(_POLL_S)
        self.kill()

    def kill(self) -> None:
        """Those of its session: the driver, its JVM, and the Python processes of both."""
        while found := self._living():
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)
        self._process.wait()

    def ended(self) -> None:
        assert self._process.wait(PATIENCE_S) == 0, self._text()

    def _living(self) -> list[int]:
        found = []
        for each in _PROC.iterdir():
            if each.name.isdecimal():
                with suppress(OSError):
                    fields = (each / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[3]) == self._process.pid and fields[0] != "Z":
                        found.append(int(each.name))
        return found

    def _text(self) -> str:
        return (self._folder / "text").read_text()[-4000:]


@pytest.mark.parametrize(
    "point",
    ["before-wal:0", "before-wal:1", "after-wal:0", "after-wal:2", "in-read", "in-commit:1"],
)
def test_a_killed_driver_goes_on_exactly(on: Stage, tmp_path: Path, point: str) -> None:
    options = on.options(
        {
            "startingOffsets": "earliest",
            "maxMessagesPerTrigger": "20",
            "subscription": "spark",
        }
    )
    on.send(80)
    killed = Driver(tmp_path, options, point)
    try:
        killed.kill_when_reached()
    finally:
        killed.kill()
    on.split(0)
    on.send(40)
    again = Driver(tmp_path, options | {"maxMessagesPerTrigger": "35"})
    try:
        again.ended()
    finally:
        again.kill()
    check(Files(tmp_path).rows(), on.sent)
