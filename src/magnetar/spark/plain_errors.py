"""Errors of ours, as Spark hands them on from its Python processes: the sentence, and no trace.

Owns: `told_plainly`, around everything that Spark calls there.

Invariants:
1. An error of Magnetar says what happened and what to do: its sentence is all that the JVM is told,
   so that it comes first in what the user reads. Of any other error the trace is kept.
2. Nothing changes in a process that is not Spark's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from magnetar.errors import MagnetarError

_HIDE: Final = "SPARK_HIDE_TRACEBACK"


@contextmanager
def told_plainly() -> Iterator[None]:
    """Around a method that Spark calls, as a decorator; in one that yields rows, as a block."""
    try:
        yield
    except MagnetarError:
        # Spark looks at this variable when it writes down the error that ends the process, which it
        # does next: nothing else is hidden by it.
        if _is_of_spark():
            os.environ[_HIDE] = "1"
        raise


def _is_of_spark() -> bool:
    """Whether Spark started this process, by `python -m pyspark...`."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.partition(".")[0] == "pyspark"
