"""The folder in which a running pipeline can be found: who runs it, how far it is.

Owns: the lock, the state file and the note of what the checkpoint belongs to, beside the checkpoint
(`<checkpoint>/.pipeline`; for a checkpoint behind a URL, `.magnetar/<name>` beside the file).

Invariants:
1. A run holds the lock from its first step to its end. Whoever has the lock is the only run on
   this machine, and a state without a lock is one of the past, whatever it says.
2. Files are replaced as a whole, and durably: neither a reader nor a power loss finds half of one.
3. A checkpoint belongs to the sources that made it. Another pipeline is refused before it can read
   with positions that are not its own; so is any, if it cannot be read whose the checkpoint is.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, Self

import msgspec
from msgspec import Struct

from magnetar.errors import ConfigError, DeadlineExceeded, FolderInUse, NotAllowed, StorageError
from magnetar.runtime.disk import Disk, FolderLock, LocalDisk, replace_file
from magnetar.spark.pipeline.file import Pipeline
from magnetar.spark.pipeline.progress import QueryState

Phase = Literal["starting", "running", "stopping", "stopped", "finished", "failed"]
ENDED: Final = frozenset({"stopped", "finished", "failed"})

_PAUSE_SECONDS: Final = 0.1


class RunState(Struct, kw_only=True):
    """One run, now or in the past."""

    name: str
    file: str
    pid: int
    host: str
    master: str
    phase: Phase = "starting"
    problem: str | None = None
    started_at: float = 0.0
    updated_at: float = 0.0
    metrics_url: str | None = None
    queries: dict[str, QueryState] = {}


def state_folder(pipeline: Pipeline) -> Path:
    checkpoint = pipeline.checkpoint_path
    # A lock needs a local disk: for a checkpoint behind a URL it stands beside the file, and keeps
    # out a second run on this machine only.
    if "://" not in checkpoint:
        return Path(checkpoint) / ".pipeline"
    return Path(pipeline.folder) / ".magnetar" / re.sub(r"[^A-Za-z0-9._-]", "-", pipeline.name)


class StateFolder:
    """The folder as the run that has it sees it. Use it with `with`."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self.path = path
        self._disk: Disk = disk or LocalDisk()
        self._lock: FolderLock | None = None

    @property
    def driver_log(self) -> Path:
        """What Spark says goes there."""
        return self.path / "driver.log"

    def __enter__(self) -> Self:
        # The folder above is the checkpoint itself or `.magnetar`, which the first run makes.
        try:
            self._disk.make_folder(self.path.parent)
            self._disk.make_folder(self.path)
        except StorageError as error:
            raise ConfigError(f"checkpoint: {error}") from error
        try:
            self._lock = self._disk.lock(self.path / "lock")
        except FolderInUse as error:
            # The lock says that somebody runs; the file says who, if it was written already.
            state = read_state(self.path)
            who = "another process" if state is None else f"process {state.pid}"
            raise NotAllowed(
                f"{who} runs a pipeline with this checkpoint already",
                hint="stop it with `magnetar pipeline stop FILE`, or wait for its end",
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def write(self, state: RunState) -> None:
        state.updated_at = time.time()
        text = msgspec.json.format(msgspec.json.encode(state))
        replace_file(self._disk, self.path / "state.json", text)

    def committed(self, pipeline: Pipeline, sink: str) -> QueryState:
        """What earlier runs have committed to a sink, as a new run begins with it."""
        past = read_state(self.path)
        known = QueryState() if past is None else past.queries.get(sink, QueryState())
        names = ("query_id", "batch", "committed_at", "group")
        # Only Spark can read a checkpoint behind a URL.
        if "://" in pipeline.checkpoint_path:
            return QueryState(**{name: getattr(known, name) for name in names})
        # Spark's own log is right where the state is not: a run that was killed wrote its state up
        # to a second before, and a checkpoint may have been removed.
        query = Path(pipeline.checkpoint_path) / sink
        done = [each for each in query.glob("commits/*") if each.name.isdecimal()]
        if not done:
            return QueryState()
        last = max(done, key=lambda each: int(each.name))
        at = datetime.fromtimestamp(last.stat().st_mtime, UTC).isoformat(timespec="milliseconds")
        with suppress(OSError, msgspec.DecodeError):
            query_id = str(msgspec.json.decode((query / "metadata").read_bytes())["id"])
            group = known.group if known.query_id == query_id else None
            return QueryState(query_id=query_id, batch=int(last.name), committed_at=at, group=group)
        return QueryState()

    def remove(self, pipeline: Pipeline) -> bool:
        """Remove the checkpoint and this folder; False: the checkpoint is where only Spark can."""
        checkpoint = Path(pipeline.checkpoint_path)
        is_local = "://" not in pipeline.checkpoint_path
        # By the names of sinks, those of earlier versions of the file too: nothing else that
        # stands in the folder is ours to remove.
        sinks = {*self._claimed(self.path / "identity.json"), *pipeline.sinks}
        folders = [checkpoint / sink for sink in sorted(sinks)] if is_local else []
        try:
            # Last the folder with the lock, which is held: a run that begins now begins anew.
            for each in (*folders, self.path):
                if each.exists():
                    shutil.rmtree(each)
        except OSError as error:
            raise StorageError(f"{error.filename} cannot be removed: {error.strerror}") from error
        with suppress(OSError):
            self.path.parent.rmdir()
        return is_local

    def claim(self, identity: dict[str, list[str]]) -> None:
        """Note to which sources each sink's checkpoint belongs, or refuse others."""
        path = self.path / "identity.json"
        known = self._claimed(path)
        # A sink that is new to the checkpoint may join; one that was there must read what it read.
        for sink, sources in identity.items():
            if sink in known and known[sink] != sources:
                raise NotAllowed(
                    f"the checkpoint of sink {sink} was made by a query over "
                    f"{', '.join(known[sink])}; this one reads {', '.join(sources)}",
                    hint="give the pipeline a `checkpoint` of its own, or the sink another name",
                )
        if known | identity != known:
            replace_file(self._disk, path, msgspec.json.encode(known | identity))

    def _claimed(self, path: Path) -> dict[str, list[str]]:
        if not self._disk.exists(path):
            return {}
        file = self._disk.open(path)
        try:
            text = file.read(0, file.size())
        finally:
            file.close()
        try:
            return msgspec.json.decode(text, type=dict[str, list[str]])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} is damaged: {error}",
                hint="if the checkpoint is this pipeline's, remove that file; it is made again",
            ) from error


def read_state(folder: Path) -> RunState | None:
    """None: nothing ever ran here."""
    try:
        return msgspec.json.decode((folder / "state.json").read_bytes(), type=RunState)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{folder / 'state.json'} is damaged: {error}",
            hint="remove that file; the next run makes it again",
        ) from error


def is_running(folder: Path) -> bool:
    if not (folder / "lock").exists():
        return False
    try:
        # Invariant 1: only the lock tells, since a run that was killed has written no end.
        LocalDisk().lock(folder / "lock").release()
    except FolderInUse:
        return True
    return False


def stop(folder: Path, seconds: float) -> RunState:
    """Ask the run to end after its batch, and wait for that."""
    state = read_state(folder)
    if state is None or not is_running(folder):
        raise NotAllowed("this pipeline does not run", hint="`magnetar pipeline status` says more")
    # The folder may be on a shared disk; a pid of another machine may be anybody's here.
    if state.host != socket.gethostname():
        raise NotAllowed(f"it runs on {state.host}", hint="stop it there")
    os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    # The lock goes last, after Spark has stopped and the state is written.
    while is_running(folder):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"process {state.pid} has not ended after {seconds:g} s",
                hint="wait with a larger --timeout; a kill is safe, too: a restart repeats a batch",
            )
        time.sleep(_PAUSE_SECONDS)
    return read_state(folder) or state
