"""What every test gets: a hypothesis profile, and a check that it left nothing behind.

Also which tests run on one worker, when several run at a time.

Invariants:
1. Property tests are derandomized: the same commit runs the same examples everywhere.
2. A test that leaves a thread or an open file descriptor behind fails, by name. Fixtures of a
   wider scope are exempt: they are set up before the check looks and torn down after it.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("magnetar", derandomize=True, deadline=None, print_blob=True)
# `make check`, which has to be quick, runs fewer examples; `make test` runs all.
settings.register_profile("quick", settings.get_profile("magnetar"), max_examples=20)
settings.load_profile("magnetar")

# JVMs of tests live for seconds: the second compiler would take most of their time.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# A thread that was told to stop may need this long to be gone.
_GRACE_S = 1.0
_PAUSE_S = 0.01
_DESCRIPTORS = Path("/proc/self/fd") if Path("/proc/self/fd").is_dir() else Path("/dev/fd")


# One JVM after the other, and one session for the tests that share it. (Marks of the scheduler's
# own do not work with this version of pytest.)
_TOGETHER = {
    "tests/integration/spark/test_sink_in_spark.py": "session",
    "tests/integration/spark/test_source_in_spark.py": "session",
    "tests/integration/spark/test_pipeline_run.py": "pipelines",
    "tests/integration/spark/test_quickstart.py": "pipelines",
    "tests/integration/spark/test_sink_kills.py": "kills",
}


class _Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Tests of some files run on one worker, and begin first: those that are many, and long."""

    def _split_scope(self, nodeid: str) -> str:
        return _TOGETHER.get(nodeid.partition("::")[0], nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling | None:
    return _Scheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test after which new threads or file descriptors exist."""
    threads_before = set(threading.enumerate())
    descriptors_before = _open_descriptors()
    yield
    left = _left_behind(threads_before, descriptors_before)
    deadline = time.monotonic() + _GRACE_S
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(_PAUSE_S)
        left = _left_behind(threads_before, descriptors_before)
    if left:
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)


def _left_behind(threads: set[threading.Thread], descriptors: set[tuple[int, str]]) -> list[str]:
    new_threads = [thread for thread in threading.enumerate() if thread not in threads]
    new_descriptors = sorted(_open_descriptors() - descriptors)
    return [f"thread {thread.name}" for thread in new_threads] + [
        f"descriptor {number} ({target})" for number, target in new_descriptors
    ]


def _open_descriptors() -> set[tuple[int, str]]:
    """Number and target of each open descriptor (the one that lists them is gone by then)."""
    found = set()
    for name in os.listdir(_DESCRIPTORS):
        try:
            found.add((int(name), _target(_DESCRIPTORS / name)))
        except FileNotFoundError:
            continue
    return found


def _target(descriptor: Path) -> str:
    if descriptor.is_symlink():
        return str(descriptor.readlink())
    # Without /proc, inode and device tell one open file from another.
    status = descriptor.stat()
    return f"device {status.st_dev} inode {status.st_ino}"
