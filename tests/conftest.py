"""What every test gets: a hypothesis profile, a limit, and a check that it left nothing behind.

Also which tests run on one worker, when several run at a time.

Invariants:
1. Property tests are derandomized: the same commit runs the same examples everywhere.
2. A test that leaves a thread or an open file descriptor behind fails, by name. Fixtures of a
   wider scope are exempt: they are set up before the check looks and torn down after it.
3. A test whose limit ran out is reported as that, whatever came of it: code under test may keep the
   error in a task, and a test that looks for broken rules may take it for one.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import pytest_timeout  # type: ignore[import-untyped]
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from harness.limits import LimitExpired

settings.register_profile("magnetar", derandomize=True, deadline=None, print_blob=True)
# `make check`, which has to be quick, runs fewer examples; `make test` runs all.
settings.register_profile("quick", settings.get_profile("magnetar"), max_examples=20)
settings.load_profile("magnetar")

# JVMs of tests live for seconds: the second compiler would take most of their time.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# A thread that was told to stop may need this long to be gone. Looks are counted, not seconds: on a
# busy machine they take longer, and so does the thread.
_LOOKS = 100
_PAUSE_S = 0.01
_DESCRIPTORS = Path("/proc/self/fd") if Path("/proc/self/fd").is_dir() else Path("/dev/fd")


# One JVM after the other, and one session for the tests that share it; one look at the whole tree.
# (Marks of the scheduler's own do not work with this version of pytest.)
_TOGETHER = {
    "tests/meta/test_imports.py": "tree",
    "tests/meta/test_rooms.py": "tree",
    "tests/meta/test_tidy.py": "tree",
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


# --- limits

_EXPIRED = pytest.StashKey[LimitExpired]()


def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    """Raise `LimitExpired` when the limit of a test runs out, in the place of pytest-timeout."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None

    def expire(number: int, frame: FrameType | None) -> None:
        if pytest_timeout.is_debugging():
            return
        item.stash[_EXPIRED] = LimitExpired(item.nodeid, settings.timeout)
        raise item.stash[_EXPIRED]

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, expire)
    # Again and again: what is raised in a finalizer is lost, and the test would go on for ever.
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, settings.timeout)
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _limited(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _limited(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _limited(item))


def _limited(item: pytest.Item) -> Generator[None, Any, Any]:
    """One phase of a test; see invariant 3."""
    try:
        result = yield
    except BaseException as error:
        if isinstance(error, LimitExpired):  # of the test, or of something that it waited for
            item.stash.setdefault(_EXPIRED, error)
        _report_expired(item, error)
        raise
    _report_expired(item, None)
    return result


def _report_expired(item: pytest.Item, cause: BaseException | None) -> None:
    expired = item.stash.get(_EXPIRED, None)
    if expired is not None:
        del item.stash[_EXPIRED]  # once: phases that follow have their own outcomes
        raise pytest.fail.Exception(str(expired)) from cause


# --- what is left behind


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test after which new threads or file descriptors exist."""
    threads_before = set(threading.enumerate())
    descriptors_before = _open_descriptors()
    yield
    left = _left_behind(threads_before, descriptors_before)
    for _ in range(_LOOKS):
        if not left:
            break
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
