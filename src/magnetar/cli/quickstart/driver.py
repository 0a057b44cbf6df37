"""The driver process of `magnetar quickstart`: started, killed in mid-batch, started again.

Owns: `magnetar pipeline run` in a session of its own, so that a kill takes the JVM with it.

Invariants:
1. `kill_in_batch` strikes after Spark wrote down what a batch reads and before it wrote down that
   the batch is done: the moment in which a sink without transactions repeats rows.
2. `alive` leaves no process behind. Every wait has a deadline, and ends early if the driver does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Final

from magnetar.errors import DeadlineExceeded, SparkError

_PIPELINE: Final = (sys.executable, "-c", "from magnetar.cli.main import main; main()", "pipeline")
_FILE: Final = "quickstart.yaml"
_SINK: Final = "settled"
# A JVM and its Python workers have to start; machines differ much in that.
_START_SECONDS: Final = 300.0
_BATCH_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 90.0
_LOOK_SECONDS: Final = 0.1
# Far below the time of a batch, to find one that is under way.
_STRIKE_SECONDS: Final = 0.005


class PipelineDriver:
    """One pipeline, over as many processes as it takes."""

    def __init__(self, folder: Path, service_url: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / _FILE
        self._file.write_text(pipeline_text(), "utf-8")
        self._checkpoint = folder / "checkpoint"
        # Of all processes one after the other: its last words explain a failure.
        self._said = folder / "driver.txt"
        self._environment = os.environ | {"MAGNETAR_SERVICE_URL": service_url}
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Start it, and kill whatever runs at the end of the block."""
        try:
            self.start()
            yield
        finally:
            self._kill()

    def start(self) -> None:
        with self._said.open("ab") as said:
            self._process = subprocess.Popen(
                [*_PIPELINE, "run", str(self._file)],
                stdout=said,
                stderr=said,
                env=self._environment,
                # Its own process group: killing Python alone would leave the JVM committing.
                start_new_session=True,
            )

    async def until_working(self) -> None:
        """Until it has committed a batch. Its first one takes seconds: the workers start."""
        # Counted from here: after a kill the commits of the former process are still in the folder.
        before = self._newest("commits")
        await self._until(
            lambda: self._newest("commits") > before, _START_SECONDS, _LOOK_SECONDS, "did not start"
        )

    async def kill_in_batch(self) -> int:
        """Kill it with a batch under way; the number of that batch."""
        found = -1

        def is_in_batch() -> bool:
            nonlocal found
            found = self._newest("offsets")
            # Spark writes `offsets/N` before a batch and `commits/N` after it
            # (invariant 1). Not the first one, in which the workers still start.
            return found > self._newest("commits") >= 0

        await self._until(is_in_batch, _BATCH_SECONDS, _STRIKE_SECONDS, "had no batch under way")
        self._kill()
        return found

    async def stop(self) -> None:
        """Let it end in order."""
        assert self._process is not None
        # SIGTERM lets it commit its batch; only then is the output complete.
        self._process.terminate()
        try:
            code = await asyncio.to_thread(self._process.wait, _STOP_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise DeadlineExceeded("the pipeline did not stop in time") from error
        if code != 0:
            raise SparkError(f"the pipeline failed: {self._last_words()}")

    @property
    def batches(self) -> int:
        """How many were committed, by all processes together."""
        return self._newest("commits") + 1

    def check(self) -> None:
        """Raise if it has ended."""
        if self._process is None or self._process.poll() is not None:
            raise SparkError(f"the pipeline ended: {self._last_words()}")

    # --- inside

    async def _until(
        self, reached: Callable[[], bool], seconds: float, pause: float, what: str
    ) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            # Invariant 2: a driver that has ended will never reach it.
            self.check()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"the pipeline {what} within {seconds:g} s")
            await asyncio.sleep(pause)

    def _newest(self, kind: str) -> int:
        """The last batch in one of Spark's two lists; -1: none yet."""
        folder = self._checkpoint / _SINK / kind
        # Spark puts `.crc` and temporary files beside them.
        names = os.listdir(folder) if folder.is_dir() else []
        return max((int(name) for name in names if name.isdecimal()), default=-1)

    def _last_words(self) -> str:
        lines = self._said.read_text("utf-8", "replace").splitlines()
        # Errors of ours are one line each; of Spark's many lines the last is all that is shown.
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["it said nothing"])[-1]

    def _kill(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def pipeline_text() -> str:
    """The file, as it is run."""
    return (files("magnetar.cli.quickstart") / _FILE).read_text("utf-8")
