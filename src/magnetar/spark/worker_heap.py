"""Garbage collection in Spark's Python workers.

Spark's daemon runs a full collection in a worker after every task. With the modules of Arrow and
of a client loaded that takes 20 to 30 ms of processor, more than the rest of a small task.

Owns: `keep_loaded`, which takes what was loaded out of what those collections look through.

Invariants:
1. Only what is alive when modules have been loaded is kept, so the number of times is small.
2. Processes that are not Spark's workers (a driver, a user's program) are left alone.
"""

from __future__ import annotations

import gc
import sys
from typing import Final

_DAEMON: Final = "pyspark.daemon"
_modules_kept = 0


def keep_loaded() -> None:
    """Call it where a worker begins something: garbage of before has just been collected."""
    global _modules_kept
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    # Workers are forked from the daemon, so its name stays theirs. Without a new module since the
    # last time, freezing would only keep garbage (invariant 1).
    if spec is None or spec.name != _DAEMON or len(sys.modules) == _modules_kept:
        return
    _modules_kept = len(sys.modules)
    gc.freeze()
