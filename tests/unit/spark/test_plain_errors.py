"""Errors of ours lose their trace in Spark's processes, others keep it."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from magnetar.errors import InvalidSetting
from magnetar.spark.plain_errors import told_plainly

HIDE = "SPARK_HIDE_TRACEBACK"


@pytest.mark.parametrize(
    ("process", "error", "is_hidden"),
    [
        ("pyspark.daemon", InvalidSetting("x"), True),
        ("pyspark.sql.worker.create_data_source", InvalidSetting("x"), True),
        ("pyspark.daemon", ValueError("x"), False),
        ("pytest", InvalidSetting("x"), False),
        (None, InvalidSetting("x"), False),
    ],
)
def test_only_errors_of_ours_in_processes_of_spark_are_without_a_trace(
    monkeypatch: pytest.MonkeyPatch, process: str | None, error: Exception, is_hidden: bool
) -> None:
    main = ModuleType("__main__")
    vars(main)["__spec__"] = None if process is None else SimpleNamespace(name=process)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setenv(HIDE, "")

    @told_plainly()
    def called() -> None:
        raise error

    with pytest.raises(type(error)):
        called()
    assert bool(os.environ[HIDE]) == is_hidden
