"""What the client of Spark Connect needs, pandas among it, apart from the environment of the tests.

With pandas installed Spark carries rows in another way, and `magnetar.spark.pipeline.session` sets
less: so the environment that all other tests run in has none. These packages are put into a folder
of the build, from a lock of their own, for the processes of one test.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.tree import ROOT

_LOCK = ROOT / "requirements" / "connect.txt"
_PLACE = ROOT / "build" / "connect"
_SECONDS = 900


def connect_packages() -> Path:
    """The folder, filled once for each content of the lock; skips the test if that cannot be."""
    stamp, wanted = _PLACE / "made-from", _LOCK.read_text("utf-8")
    if stamp.exists() and stamp.read_text("utf-8") == wanted:
        return _PLACE
    shutil.rmtree(_PLACE, ignore_errors=True)
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes")
    done = subprocess.run(
        [*install, "--only-binary", ":all:", "--target", str(_PLACE), "-r", str(_LOCK)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
    )
    if done.returncode != 0:
        said = done.stdout.strip().splitlines() or ["nothing was said"]
        pytest.skip(f"Spark Connect needs {_LOCK.name}, which cannot be installed: {said[-1]}")
    stamp.write_text(wanted, "utf-8")
    return _PLACE
