"""The folder of a run: one at a time, found by others, bound to its sources."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from magnetar.errors import ConfigError, NotAllowed
from magnetar.spark.pipeline_file import parsed
from magnetar.spark.pipeline_progress import QueryState
from magnetar.spark.pipeline_state import (
    RunState,
    StateFolder,
    is_running,
    read_state,
    state_folder,
    stop,
)


def _state(host: str | None = None) -> RunState:
    return RunState(
        name="copy",
        file="copy.yaml",
        pid=os.getpid(),
        host=host or socket.gethostname(),
        master="local[*]",
        phase="running",
        queries={"copied": QueryState(batch=3, input_rows=70)},
    )


def test_a_run_is_seen_while_it_lasts(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    assert not is_running(tmp_path)
    with StateFolder(tmp_path) as folder:
        folder.write(_state())
        assert is_running(tmp_path)
    state = read_state(tmp_path)
    assert state is not None
    assert state.queries["copied"].input_rows == 70
    assert not is_running(tmp_path), "what it says is of the past: nobody has the lock"
    with pytest.raises(NotAllowed, match="does not run"):
        stop(tmp_path, 1)


def test_a_second_run_is_refused(tmp_path: Path) -> None:
    with StateFolder(tmp_path) as folder:
        folder.write(_state())
        with pytest.raises(NotAllowed, match=f"process {os.getpid()} runs"), StateFolder(tmp_path):
            pass


def test_a_run_elsewhere_is_not_signalled(tmp_path: Path) -> None:
    with StateFolder(tmp_path) as folder:
        folder.write(_state(host="elsewhere"))
        with pytest.raises(NotAllowed, match="it runs on elsewhere"):
            stop(tmp_path, 1)


def test_a_checkpoint_belongs_to_its_sources(tmp_path: Path) -> None:
    with StateFolder(tmp_path) as folder:
        folder.claim({"copied": ["magnetar orders"]})
        folder.claim({"copied": ["magnetar orders"], "second": ["magnetar payments"]})
        with pytest.raises(NotAllowed, match="a query over magnetar orders; this one reads") as no:
            folder.claim({"copied": ["magnetar payments"]})
        assert "checkpoint` of its own" in str(no.value)
        folder.claim({"second": ["magnetar payments"]})


def test_a_damaged_state_is_told(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        read_state(tmp_path)


def test_where_the_folder_is(tmp_path: Path) -> None:
    ends = "sources: {{s: {{format: rate}}}}\nsinks: {{n: {{format: noop}}}}"
    text = f"name: a b\ncheckpoint: {{}}\n{ends}"
    here = parsed(text.format("./c"), path=tmp_path / "p.yaml", environment={})
    assert state_folder(here) == tmp_path / "c" / ".pipeline"
    far = parsed(text.format("hdfs://n/c"), path=tmp_path / "p.yaml", environment={})
    assert state_folder(far) == tmp_path / ".magnetar" / "a-b"
