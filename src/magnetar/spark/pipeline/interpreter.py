"""The Python that Spark starts its workers with, on the machine of the driver.

Spark puts a zip file of PySpark in front of all other modules. A zip has no bytecode, so each of
the eight or more processes of a query compiled all of PySpark again: 0.4 s of processor each,
before anything of ours is loaded. The installed PySpark, which is the same, has it compiled.

Owns: `workers_python`, the program for PYSPARK_PYTHON.

Invariants:
1. It is the interpreter of this process, and finds the modules that this process does.
2. Where no script can be made, it is that interpreter itself: slower, and otherwise the same.
"""

from __future__ import annotations

import os
import shlex
import sys
from typing import Final

from magnetar.spark.pipeline.scripts import written

_SCRIPT: Final = """#!/bin/sh
# Made by Magnetar: Python for the workers of Spark, which import PySpark where it is installed.
set -f
kept=
IFS=:
for place in $PYTHONPATH; do
    case $place in
        */pyspark.zip | */py4j-*-src.zip | */spark-core_*.jar) ;;
        *) kept=$kept${{kept:+:}}$place ;;
    esac
done
PYTHONPATH=$kept
export PYTHONPATH
exec {python} "$@"
"""


def workers_python() -> str:
    """The interpreter of this process, without the zip files that Spark puts before its modules."""
    # The script needs a shell.
    if os.name != "posix":
        return sys.executable
    found = written("python", _SCRIPT.format(python=shlex.quote(sys.executable)))
    return sys.executable if found is None else str(found)
