"""A server process that changes the layout of a topic and dies at a planned step of that change.

Owns: `Child`, the parent's handle of such a process, and what runs in it: a whole `Server` on a
data folder, with a disk that sends SIGKILL to the process at the n-th batch of the journal that is
written after the change was asked for. The same process, without a plan, is the one that recovers.

Processes are forked from a server of `multiprocessing` that has loaded the code: each of them is a
process of its own with files of its own, and starts in a fraction of the time.

Invariants:
1. Counting begins with the request of the change: what starting and setting up wrote is not in it.
2. The process answers one request at a time, in their order.
3. What `Settled` says of time begins when the server serves.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import uvloop

from harness.crash.server.process import SMALL_LIMITS
from harness.crash.storage.points import CrashCount, CrashingDisk
from harness.limits import EXIT_CODE, PATIENCE_S, OwnTime, expire, reported, within
from magnetar.broker.policy.records import dedup_key
from magnetar.broker.topic.ownership import SharedOwnership
from magnetar.broker.topic.topic import Topic
from magnetar.broker.topic.topics import Topics
from magnetar.errors import InvariantBroken, MagnetarError, NotAllowed, ServiceNotReady
from magnetar.managed_ledger.managed_ledger import EARLIEST
from magnetar.managed_ledger.names import cursors_directory, managed_ledger_key
from magnetar.model.names import TopicName
from magnetar.model.segments import SegmentLayout
from magnetar.runtime import logs
from magnetar.scalable.controllers import SLOTS
from magnetar.scalable.layout.changes import begin_migrate
from magnetar.scalable.layout.layout_watchers import LayoutWatchers
from magnetar.scalable.layout.segments import CursorWanted, LocalSegments, SegmentHost
from magnetar.scalable.records import (
    CONTROLLERS,
    LayoutRecord,
    ScalableRecord,
    segment_topic,
    state_directory,
)
from magnetar.scalable.service import ScalableTopics
from magnetar.server.app import Server
from magnetar.server.config import load
from magnetar.server.machine import Machine

LOST: Final = "before:write:journal"
TORN: Final = "torn:write:journal"
SYNCED: Final = "after:sync:journal"

SUBSCRIPTIONS: Final = ("all", "rest")
PARTITIONS: Final = 2

_SETTLE_SECONDS: Final = 3.0
"""A change that takes longer than this, in the process's own time, is reported as it stands."""
_LOOK_SECONDS: Final = 0.002
_ANSWER_SECONDS: Final = PATIENCE_S
UNDO: Final = "undo"
_SEGMENTS: Final = {"split": 2, "merge": 4, "delete": 3, "create": 3, UNDO: 2}
_MERGED: Final = (0, 1, 2)

CHANGES: Final = ("create", "split", "merge", "migrate", "delete", UNDO)


def topic_of(kind: str) -> TopicName:
    """The scalable topic that a change of this kind is about."""
    return TopicName.parse(f"topic://public/default/{kind}")


def regular_of(kind: str) -> TopicName:
    return TopicName.parse(f"persistent://public/default/{kind}")


@dataclass(frozen=True, slots=True)
class Settled:
    """What a server has of a topic once nothing is under way."""

    seconds: float
    """From readiness on, in the process's own time."""
    unfinished: str
    """What is still under way after all; empty: nothing."""
    layout: LayoutRecord | None
    """None: there is no such topic."""
    leftovers: tuple[str, ...]
    """Keys of the records of segments that are not in the layout, or beside no topic."""
    subscriptions: Mapping[str, tuple[str, ...]]
    """Of each topic that holds a segment of the layout."""


class _Plan(NamedTuple):
    folder: Path
    port: int
    point: str
    nth: int
    """0: it lives until it is told otherwise."""
    refuses: bool
    """Whether no segment can be made, so that changes are undone."""
    plant: Callable[[], None]
    """Called before anything else."""


class _Failed(NamedTuple):
    text: str


def nothing() -> None:
    """Of a process in which every rule holds."""


def start_fork_server(*modules: str) -> None:
    """Start what processes are forked from, if it does not run; it ends with this process.

    It loads these modules too: what the main module needs, each process would load again.
    """
    forkserver.set_forkserver_preload([__name__, *modules])
    forkserver.ensure_running()


class Child:
    """One process. End it with `kill` or `stop`."""

    def __init__(
        self,
        folder: Path,
        *,
        point: str = SYNCED,
        nth: int = 0,
        port: int = 0,
        refuses: bool = False,
        plant: Callable[[], None] = nothing,
    ) -> None:
        self.port = 0
        self._code: int | None = None
        context = multiprocessing.get_context("forkserver")
        start_fork_server()
        self._pipe, theirs = context.Pipe()
        plan = _Plan(folder, port, point, nth, refuses, plant)
        self._process: ForkServerProcess = context.Process(target=_run, args=(plan, theirs))
        self._process.start()
        theirs.close()

    async def until_ready(self) -> None:
        self.port = await self._answer("readiness")

    async def prepare(self, kind: str) -> None:
        await self._ask("prepare", kind)

    async def change(self, kind: str) -> int | None:
        """Batches that the journal wrote until the answer; None: it died before that."""
        try:
            return int(await self._ask("change", kind))
        except EOFError:
            return None

    async def settled(self, kind: str) -> Settled:
        answer = await self._ask("settled", kind)
        assert isinstance(answer, Settled)
        return answer

    async def stop(self) -> None:
        """An orderly stop; InvariantBroken if that is not how it ended."""
        await self._ask("stop", "")
        code = await self._ended()
        if code != 0:
            raise InvariantBroken(f"exit code {code} after an orderly stop")

    async def kill(self) -> int:
        """SIGKILL, unless it is dead already; its exit code."""
        if self._code is None:
            self._process.kill()
        return await self._ended()

    async def _ended(self) -> int:
        if self._code is None:
            await asyncio.to_thread(self._process.join, PATIENCE_S)
            self._pipe.close()
            self._code = self._process.exitcode
            if self._code is None:
                expire("the end of a process")
            self._process.close()
            if self._code == EXIT_CODE:
                expire("something within a process")
        return self._code

    async def _ask(self, verb: str, kind: str) -> Any:
        self._pipe.send((verb, kind))
        return await self._answer(f"the answer to {verb!r}")

    async def _answer(self, what: str) -> Any:
        if not await asyncio.to_thread(self._pipe.poll, _ANSWER_SECONDS):
            expire(what, _ANSWER_SECONDS)
        answer = self._pipe.recv()
        if isinstance(answer, _Failed):
            raise InvariantBroken(answer.text)
        return answer


# --- in the process


class _RefusingMachine(Machine):
    """Segments are made, and then called impossible."""

    def segments(
        self, topics: Topics, sharing: SharedOwnership | None, layout_watchers: LayoutWatchers
    ) -> SegmentHost:
        return _RefusingSegments(topics, layout_watchers)


class _RefusingSegments(LocalSegments):
    async def prepare(self, name: TopicName, cursors: Sequence[CursorWanted]) -> None:
        await super().prepare(name, cursors)
        raise NotAllowed(f"{name} is refused")


class _StepCount(CrashCount):
    """Counts nothing before it is armed."""

    def __init__(self, point: str, nth: int) -> None:
        super().__init__(point, nth)
        self.armed = False
        self.steps = 0
        """Batches that were synced since then."""

    def is_due(self, point: str) -> bool:
        if not self.armed:
            return False
        self.steps += point == SYNCED
        return super().is_due(point)


def _run(plan: _Plan, pipe: Connection) -> None:
    def program() -> int:
        uvloop.run(_serve(plan, pipe))
        return 0

    with plan.folder.with_name(f"{plan.folder.name}.text").open("a") as stream:
        logs.configure(stream, level="warning")
        plan.plant()
        sys.exit(reported(program))


async def _serve(plan: _Plan, pipe: Connection) -> None:
    settings = {
        "data": str(plan.folder),
        "port": plan.port,
        "scalable_auto_scale_enabled": False,
        "log_level": "warning",
    }
    count = _StepCount(plan.point, plan.nth)
    config = load(settings, {**os.environ, **SMALL_LIMITS})
    machine = _RefusingMachine if plan.refuses else Machine
    server = Server(config, machine=machine(disk=CrashingDisk(count)))
    await server.start()
    own_time = OwnTime()
    served = _Served(server, count, own_time)
    try:
        pipe.send(int(server.service_url.rpartition(":")[2]))
        while True:
            verb, kind = await asyncio.to_thread(pipe.recv)
            if verb == "stop":
                break
            pipe.send(await served.answer(verb, kind))
    except EOFError:
        return  # the parent is gone
    finally:
        own_time.stop()
        await server.stop()
    pipe.send(None)


class _Served:
    """What the parent can ask of a server."""

    def __init__(self, server: Server, count: _StepCount, own_time: OwnTime) -> None:
        assert server.context.scalable is not None, "scalable topics are switched on"
        self._server = server
        self._scalable: ScalableTopics = server.context.scalable
        self._count = count
        self._own_time = own_time
        """Since it serves."""

    async def answer(self, verb: str, kind: str) -> object:
        work: dict[str, Callable[[str], Awaitable[object]]] = {
            "prepare": self._prepare,
            "change": self._change,
            "settled": self._settled,
        }
        try:
            return await work[verb](kind)
        except MagnetarError as error:
            return _Failed(f"{verb} {kind}: {error!r}")

    async def _prepare(self, kind: str) -> None:
        """The topic as it is before the change, with subscriptions but without messages."""
        topics = self._server.topics
        await topics.change_namespace(
            topic_of(kind).namespace,
            lambda each: msgspec.structs.replace(each, deduplication_enabled=True),
        )
        if kind == "create":
            return
        if kind == "migrate":
            await topics.create_partitioned(regular_of(kind), PARTITIONS)
            for number in range(PARTITIONS):
                topic = await topics.get(regular_of(kind).with_partition(number))
                assert isinstance(topic, Topic), "it is a persistent one"
                for name in SUBSCRIPTIONS:
                    await topic.create_subscription(name, EARLIEST, {})
            return
        await self._scalable.create(topic_of(kind), _SEGMENTS[kind])
        for name in SUBSCRIPTIONS:
            await self._scalable.create_subscription(topic_of(kind), name, "STREAM")

    async def _change(self, kind: str) -> int:
        topic = topic_of(kind)
        await self._until_quiet()
        self._count.armed = True
        match kind:
            case "create":
                await self._scalable.create(topic, _SEGMENTS[kind])
            case "split":
                await self._scalable.split(topic, 0)
            case "undo":
                await self._split_or_undo(topic)
            case "merge":
                await self._scalable.merge(topic, _MERGED)
            case "migrate":
                await self._scalable.migrate(regular_of(kind), force=True)
            case _:
                await self._scalable.delete(topic, force=True)
        self._count.armed = False
        return self._count.steps

    async def _split_or_undo(self, topic: TopicName) -> None:
        try:
            await self._scalable.split(topic, 0)
        except ServiceNotReady:
            record = await self._scalable.get(topic)
            if not record.last_failure:
                raise

    async def _until_quiet(self) -> None:
        """Until the elections, which begin with the server, are over."""
        async with within("the elections of a server that has started"):
            while True:
                if len(await self._server.metadata.scan_keys(CONTROLLERS)) == SLOTS:
                    return
                await asyncio.sleep(_LOOK_SECONDS)

    async def _settled(self, kind: str) -> Settled:
        topic = topic_of(kind)
        deadline = self._own_time.seconds + _SETTLE_SECONDS
        while True:
            record = await self._scalable.store.read(topic)
            seconds = self._own_time.seconds
            unfinished = _under_way(record)
            if not unfinished or seconds > deadline:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        layout = None if record is None else record.layout
        leftovers = await self._leftovers(kind, layout)
        subscriptions = await self._subscriptions(topic, layout)
        return Settled(seconds, unfinished, layout, leftovers, subscriptions)

    async def _leftovers(self, kind: str, layout: LayoutRecord | None) -> tuple[str, ...]:
        topic, metadata = topic_of(kind), self._server.metadata
        shown = set()
        if layout is not None:
            shown = {str(segment_topic(topic, each)) for each in layout.layout().segments.values()}
        found = [
            str(each)
            for each in await self._server.topics.segment_names(topic)
            if str(each) not in shown
        ]
        for name in _segments_ever(kind):
            if str(name) in shown:
                continue
            ledger = name.managed_ledger_name
            for key in (managed_ledger_key(ledger), dedup_key(name)):
                found += [] if await metadata.get(key) is None else [key]
            found += await metadata.scan_keys(cursors_directory(ledger))
        if layout is None:
            found += await metadata.scan_keys(state_directory(topic))
        return tuple(found)

    async def _subscriptions(
        self, topic: TopicName, layout: LayoutRecord | None
    ) -> dict[str, tuple[str, ...]]:
        if layout is None:
            return {}
        found = {}
        for segment in layout.layout().segments.values():
            name = segment_topic(topic, segment)
            loaded = await self._server.topics.get(name, create=False)
            found[str(name)] = tuple(sorted(loaded.subscriptions))
        return found


def _under_way(record: ScalableRecord | None) -> str:
    if record is None:
        return ""
    if record.change is not None:
        return f"{record.change.kind} at {record.change.step}"
    return f"{len(record.garbage)} topics to delete" if record.garbage else ""


def _segments_ever(kind: str) -> list[TopicName]:
    """Every segment that a topic may have had before, during or after the change."""
    topic = topic_of(kind)
    if kind == "migrate":
        regular = [regular_of(kind).with_partition(number) for number in range(PARTITIONS)]
        begun = begin_migrate(topic, regular, now_ms=0, bucket_budget=1)
        assert begun.change is not None, "it has just begun"
        assert begun.change.after is not None, "it leads to a layout"
        layout = begun.change.after.layout()
    else:
        layout = SegmentLayout.create(_SEGMENTS[kind], now_ms=0)
    if kind in ("split", UNDO):
        layout = layout.split(0, now_ms=0)
    elif kind == "merge":
        layout = layout.merge(_MERGED, now_ms=0)
    new = [each for each in layout.segments.values() if each.legacy_topic_name is None]
    return [topic.segment(each.descriptor) for each in new]
