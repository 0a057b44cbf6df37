"""The interpreter of workers: this one, without the zip files that Spark puts first."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from magnetar.spark.pipeline.interpreter import workers_python

SHOWN = (
    "import os, sys; print(os.environ['PYTHONPATH']); print(sys.executable); print(sys.argv[1:])"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    return tmp_path / "a cache"


def _said(program: str, *places: str) -> list[str]:
    command = [program, "-c", SHOWN, "a b", "*"]
    environment = os.environ | {"PYTHONPATH": ":".join(places)}
    return subprocess.check_output(command, env=environment, text=True).splitlines()


def test_it_is_this_interpreter_without_the_zip_files_of_spark(cache: Path) -> None:
    program = workers_python()
    assert Path(program).is_relative_to(cache)
    assert workers_python() == program
    lib = "/opt/spark/python/lib"
    places, python, arguments = _said(
        program,
        f"{lib}/pyspark.zip",
        f"{lib}/py4j-0.10.9.9-src.zip",
        "/srv/my code",
        "/opt/spark/jars/spark-core_2.13-4.3.0.jar",
        "/tmp/mine.zip",
    )
    assert places == "/srv/my code:/tmp/mine.zip"
    assert python == sys.executable
    assert arguments == "['a b', '*']"


def test_nothing_but_zip_files_and_nothing_at_all(cache: Path) -> None:
    assert _said(workers_python(), "/opt/spark/python/lib/pyspark.zip")[0] == ""
    assert _said(workers_python())[0] == ""


def test_where_no_script_can_be_made_it_is_this_interpreter_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(blocked))
    assert workers_python() == sys.executable


def test_where_nothing_may_be_run_it_is_this_interpreter_itself(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(cache / "temporary"))
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.X_OK)
    assert workers_python() == sys.executable
    assert list(cache.rglob("python")), "it was written, but is not offered"
