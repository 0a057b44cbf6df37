"""The folder of a run: one at a time, found by others, bound to its sources."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from random import Random

import pytest

from harness.crash.storage.recording_disk import RecordingDisk, Replay
from magnetar.errors import ConfigError, NotAllowed
from magnetar.spark.pipeline.file import parsed
from magnetar.spark.pipeline.progress import QueryState
from magnetar.spark.pipeline.state import (
    RunState,
    StateFolder,
    is_running,
    read_state,
    state_folder,
    stop,
)
from magnetar.testing.virtual.disk_model import DiskModel


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


def test_a_new_run_knows_what_earlier_ones_have_committed(tmp_path: Path) -> None:
    ends = "sources: {s: {format: rate}}\nsinks: {copied: {format: noop}}"
    text = f"name: c\ncheckpoint: checkpoint\n{ends}"
    pipeline = parsed(text, path=tmp_path / "copy.yaml", environment={})
    query = tmp_path / "checkpoint" / "copied"
    with StateFolder(state_folder(pipeline)) as folder:
        assert folder.committed(pipeline, "copied") == QueryState()
        folder.write(_state())
        assert folder.committed(pipeline, "copied") == QueryState(), "its checkpoint is gone"
        (query / "commits").mkdir(parents=True)
        (query / "metadata").write_text('{"id": "q"}')
        for number in (9, 10):
            (query / "commits" / f"{number}").touch()
            (query / "commits" / f".{number}.crc").touch()
        os.utime(query / "commits" / "10", (1000.0, 1000.0))
        assert folder.committed(pipeline, "copied") == QueryState(
            query_id="q", batch=10, committed_at="1970-01-01T00:16:40.000+00:00"
        )


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


DAMAGED = (b"", b"{", b"[]", b'{"name": 1}', bytes(40), b'{"\xff": []}')


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_state_is_told(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "state.json").write_bytes(text)
    with pytest.raises(ConfigError, match="is damaged") as no:
        read_state(tmp_path)
    assert "remove that file" in str(no.value)


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_claim_is_told_and_not_taken_for_none(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "identity.json").write_bytes(text)
    with StateFolder(tmp_path) as folder:
        with pytest.raises(ConfigError, match=r"identity.json is damaged") as no:
            folder.claim({"copied": ["magnetar orders"]})
        assert "remove that file" in str(no.value)
        assert (tmp_path / "identity.json").read_bytes() == text
        (tmp_path / "identity.json").unlink()
        folder.claim({"copied": ["magnetar orders"]})


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="checkpoint: "), StateFolder(tmp_path / "file" / "c"):
        pass


def test_a_power_loss_leaves_the_old_claim_or_the_new_one(tmp_path: Path) -> None:
    """At every step of the disk; and once `claim` has returned, the new one."""
    disk = RecordingDisk(tmp_path)
    first, second = {"copied": ["magnetar orders"]}, {"more": ["magnetar payments"]}
    steps = []
    try:
        with StateFolder(tmp_path / "checkpoint" / ".pipeline", disk) as folder:
            for identity in (first, second):
                folder.claim(identity)
                steps.append(len(disk.recording.steps))
    finally:
        disk.close()
    replay, chance = Replay({}, disk.recording.steps), Random(8)
    for place in range(steps[-1] + 1):
        replay.forward(place)
        survivors = {_claim_in(replay.model, chance) for _ in range(20)}
        allowed = {None, first["copied"][0], second["more"][0]}
        assert survivors <= allowed
        if place >= steps[0]:
            assert None not in survivors, f"after step {place} the claim is gone"
    assert survivors == {second["more"][0]}


def _claim_in(model: DiskModel, chance: Random) -> str | None:
    """Whose a checkpoint is by what a power loss left: the last source that is named."""
    text = model.survive(chance).get("checkpoint/.pipeline/identity.json")
    if text is None:
        return None
    claims: dict[str, list[str]] = json.loads(text)
    return list(claims.values())[-1][0]


def test_where_the_folder_is(tmp_path: Path) -> None:
    ends = "sources: {{s: {{format: rate}}}}\nsinks: {{n: {{format: noop}}}}"
    text = f"name: a b\ncheckpoint: {{}}\n{ends}"
    here = parsed(text.format("./c"), path=tmp_path / "p.yaml", environment={})
    assert state_folder(here) == tmp_path / "c" / ".pipeline"
    far = parsed(text.format("hdfs://n/c"), path=tmp_path / "p.yaml", environment={})
    assert state_folder(far) == tmp_path / ".magnetar" / "a-b"
