"""One run of a pipeline, from its first step to its end.

Owns: the order of things (lock, checks, session, queries, end), the loop that watches the queries,
and the orderly stop.

Invariants:
1. Nothing of Spark starts before the checkpoint is known to be ours and free.
2. A stop lets the batch that is under way commit, for `STOP_SECONDS` at most. Whatever ends a run
   earlier is safe too: the next one repeats its last batch, and the sink knows that batch.
3. If one query fails, the others are stopped, and the run fails with that query's reason.
4. The state file tells the end, however it comes about (but for a kill: there the lock tells).
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, Protocol

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from magnetar.errors import MagnetarError, SparkError
from magnetar.spark.pipeline import metrics, session
from magnetar.spark.pipeline.build import check_options, check_steps, identity, query, views
from magnetar.spark.pipeline.errors import explained
from magnetar.spark.pipeline.file import Pipeline
from magnetar.spark.pipeline.groups import PipelineGroups
from magnetar.spark.pipeline.java import java_home
from magnetar.spark.pipeline.progress import doing, taken
from magnetar.spark.pipeline.shipping import environment_settings, pack
from magnetar.spark.pipeline.state import RunState, StateFolder, state_folder

# Long enough for most batches; a batch that takes longer is cut off and repeated (invariant 2).
STOP_SECONDS: Final = 30.0

_LOOK_SECONDS: Final = 0.2
_STATE_SECONDS: Final = 1.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Watcher(Protocol):
    """An observer of a run: the command line, or a test."""

    def told(self, what: str) -> None:
        """A step of the run, in words."""

    def moved(self, name: str, state: RunState) -> None:
        """The query of that sink has committed a batch, or learnt of its lag."""


class Where(NamedTuple):
    """The place on which a run computes, and what it needs there."""

    master: str = session.DEFAULT_MASTER
    environment: str | None = None
    """An archive with a Python environment for executors."""
    metrics_port: int | None = None


def run(pipeline: Pipeline, file: Path, where: Where, watcher: Watcher) -> RunState:
    """Run until the pipeline ends, fails or is stopped by a signal."""
    java_home()  # before anything is locked or written
    # Invariant 1: whatever can be refused is refused before the lock, and the lock comes before
    # Spark.
    check_options(pipeline)
    check_steps(pipeline)
    state = RunState(
        name=pipeline.name,
        file=str(file),
        pid=os.getpid(),
        host=socket.gethostname(),
        master=where.master,
        started_at=time.time(),
    )
    with StateFolder(state_folder(pipeline)) as folder:
        # Under the lock, so that two first runs cannot both claim the checkpoint.
        folder.claim(identity(pipeline))
        state.queries = {name: folder.committed(pipeline, name) for name in pipeline.sinks}
        folder.driver_log.unlink(missing_ok=True)
        with _ending(folder, state), metrics.served(where.metrics_port) as url:
            state.metrics_url = url
            folder.write(state)
            _Run(pipeline, folder, state, watcher).go(where)
    return state


@contextmanager
def _ending(folder: StateFolder, state: RunState) -> Iterator[None]:
    """The end of a run goes to the state file, and what Spark says becomes one line."""
    # Three origins: Spark, whose trace goes to the log and whose reason becomes a line; Magnetar,
    # whose errors say it already; and anything else, a mistake or Ctrl-C. All reach the state file
    # (invariant 4).
    try:
        yield
    except (PySparkException, Py4JError) as error:
        failure = explained(str(error), rest_in=str(folder.driver_log))
        with folder.driver_log.open("a") as file:
            file.write(f"\n{error}\n")
        state.phase, state.problem = "failed", str(failure)
        raise failure from error
    except MagnetarError as error:
        state.phase, state.problem = "failed", str(error)
        raise
    except BaseException as error:
        state.phase, state.problem = "failed", f"{type(error).__name__}: {error}"
        raise
    finally:
        folder.write(state)


class _Run:
    def __init__(
        self, pipeline: Pipeline, folder: StateFolder, state: RunState, watcher: Watcher
    ) -> None:
        self._pipeline = pipeline
        self._folder = folder
        self._state = state
        self._watcher = watcher
        # Set by a signal handler, looked at by the loop: nothing is stopped inside the handler,
        # which may interrupt a call into the JVM.
        self._is_asked_to_stop = False
        self._groups = PipelineGroups(pipeline)
        self._queries: dict[str, StreamingQuery] = {}
        self._written_at = 0.0
        self._told: set[str] = set()

    def go(self, where: Where) -> None:
        with _handled(self._asked_to_stop), tempfile.TemporaryDirectory() as scratch:
            if self._state.metrics_url is not None:
                self._watcher.told(f"metrics at {self._state.metrics_url}")
            self._watcher.told(f"starting Java and Spark on {where.master}")
            spark = self._session(where, Path(scratch))
            try:
                # Spark has put a handler of its own in its place.
                with _handled(self._asked_to_stop):
                    self._start(spark)
                    self._follow()
            finally:
                spark.stop()

    def _asked_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._is_asked_to_stop = True

    def _session(self, where: Where, scratch: Path) -> SparkSession:
        settings = {key: str(value) for key, value in self._pipeline.spark.settings.items()}
        if where.environment is not None:
            settings |= environment_settings(where.environment)
        spark = session.start(
            self._pipeline.name,
            master=where.master,
            settings=settings,
            log_file=self._folder.driver_log,
        )
        # Local workers import the package from this process's path.
        if not session.is_local(where.master):
            spark.sparkContext.addPyFile(str(pack(scratch)))
        return spark

    def _start(self, spark: SparkSession) -> None:
        self._watcher.told("planning: asking for the schemas of sources")
        # All views before the first query: a mistake in the last step must not leave a sink half
        # begun.
        sinks = self._pipeline.sinks
        made = {name: views(spark, self._pipeline, name) for name in sinks}
        for name, sink in sinks.items():
            frame = made[name][self._pipeline.input_of(sink)]
            self._queries[name] = query(self._pipeline, name, frame)
        self._state.phase = "running"
        self._folder.write(self._state)
        self._watcher.told("waiting for the first batch")

    # --- watching

    def _follow(self) -> None:
        # Ends in three ways: a signal, a query that failed, or all of them done (`available-now`).
        while any(each.isActive for each in self._queries.values()):
            self._look()
            if self._is_asked_to_stop:
                self._stop()
                return
            self._fail_if_one_failed()
            time.sleep(_LOOK_SECONDS)
        # Once more: batches may have ended since the last look.
        self._look()
        self._fail_if_one_failed()
        self._state.phase = "finished"

    def _look(self) -> None:
        for name, each in self._queries.items():
            state = self._state.queries[name]
            if not state.batches:
                self._tell_start(name, each)
            # Spark reports idle queries again and again; only what changed is told and counted.
            before = state.batches, state.input_rows, state.lag_messages
            for progress in _news(each, state.batch):
                taken(state, progress, group=self._groups.name_of(name, progress))
            if before == (state.batches, state.input_rows, state.lag_messages):
                continue
            self._groups.ask(name, state)
            metrics.count(name, state, state.batches - before[0], state.input_rows - before[1])
            self._tell_once("running")
            self._watcher.moved(name, self._state)
        if time.monotonic() - self._written_at >= _STATE_SECONDS:
            self._folder.write(self._state)
            self._written_at = time.monotonic()

    def _tell_start(self, name: str, running: StreamingQuery) -> None:
        """What Spark does until its first batch is done, in its words, each of them once."""
        self._tell_once(f"{name}: {doing(running.status['message'])}")

    def _tell_once(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._watcher.told(what)

    def _fail_if_one_failed(self) -> None:
        for name, each in self._queries.items():
            error = each.exception()
            if error is None:
                continue
            # Invariant 3: a pipeline that runs by halves would look healthy to whoever looks at one
            # sink.
            for other in self._queries.values():
                other.stop()
            with self._folder.driver_log.open("a") as file:
                file.write(f"\n{error}\n")
            found = explained(str(error), rest_in=str(self._folder.driver_log))
            raise SparkError(f"sink {name}: {found.args[0]}", hint=found.hint) from error

    # --- stopping

    def _stop(self) -> None:
        self._state.phase = "stopping"
        self._folder.write(self._state)
        self._watcher.told("stopping after the batch that is under way")
        deadline = time.monotonic() + STOP_SECONDS
        # One deadline for all: they are awaited one after the other, and not each for its own time.
        for name, each in self._queries.items():
            self._await_batch(name, each, deadline)
            each.stop()
        self._look()
        self._state.phase = "stopped"

    def _await_batch(self, name: str, running: StreamingQuery, deadline: float) -> None:
        """Until the query waits for work, or has committed one batch more."""
        # `stop` cancels the running job; a batch cut off is repeated, which is safe but costs its
        # work.
        batch = self._state.queries[name].batch
        while running.isActive and running.status["isTriggerActive"]:
            self._look()
            if self._state.queries[name].batch > batch or time.monotonic() > deadline:
                return
            time.sleep(_LOOK_SECONDS)


def _news(running: StreamingQuery, after: int) -> list[Mapping[str, Any]]:
    """What a query has told since that batch; Spark keeps the last hundred."""
    last = running.lastProgress
    if last is None:
        return []
    # The usual case, nothing was missed: the list of all reports is a large text from the JVM.
    if int(last["batchId"]) <= after + 1:
        return [last]
    return [each for each in running.recentProgress if int(each["batchId"]) > after]


@contextmanager
def _handled(handler: Any) -> Iterator[None]:
    """Signals that end a process go to the handler while the block runs."""
    before = [signal.signal(number, handler) for number in _SIGNALS]
    try:
        yield
    finally:
        for number, each in zip(_SIGNALS, before, strict=True):
            signal.signal(number, each)
