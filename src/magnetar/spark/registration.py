"""Making Spark know the source and the sink in a program that starts its session itself.

Owns: `register`.

Invariants:
1. After it `format("magnetar")` and `format("pulsar")` are known, however the program was started
   and whether or not Spark had found them by itself.
2. An interpreter that the user chose for Python workers is never replaced.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from pyspark.errors import AnalysisException, PySparkException

from magnetar.errors import SparkError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PYTHON: Final = "PYSPARK_PYTHON"
_CHOSEN: Final = ("spark.pyspark.python", "spark.pyspark.driver.python")
_KNOWN: Final = "DATA_SOURCE_ALREADY_EXISTS"


def register(spark: SparkSession) -> None:
    """Make `format("magnetar")` and `format("pulsar")` known to a session.

        spark = SparkSession.builder.getOrCreate()
        magnetar.spark.register(spark)

    Spark looks for sources with the `python3` of the search path unless PYSPARK_PYTHON names
    another interpreter, and that one need not be the program's. On a local master the Python
    workers of the session run the program's own from here on.
    """
    from pyspark_magnetar import DefaultSource as Magnetar
    from pyspark_pulsar import DefaultSource as Pulsar

    _use_this_interpreter(spark)
    for source in (Magnetar, Pulsar):
        try:
            spark.dataSource.register(source)
        except AnalysisException as error:
            # Spark's own search has found it: nothing is left to do.
            if _condition(error) != _KNOWN:
                raise SparkError(f"Spark does not take the source: {error}") from error


def _use_this_interpreter(spark: SparkSession) -> None:
    # Spark Connect has no context: its workers are the server's.
    try:
        context = spark.sparkContext
    except PySparkException:
        return
    is_chosen = _PYTHON in os.environ or any(spark.conf.get(key, None) for key in _CHOSEN)
    # Executors elsewhere have no file of that name, or another one.
    if not is_chosen and (context.master or "").startswith("local"):
        context.pythonExec = sys.executable


def _condition(error: AnalysisException) -> str | None:
    found: str | None = error.getCondition()
    return found
