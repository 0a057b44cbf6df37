"""The clients of the layouts bench: admin calls, lookups and watches, and how long each took.

Owns: `Admin`, the admin interface; `Watch` and `TopicsWatch`, sessions of commands 70 and 76;
`Client`, which does with random topics what is measured.

Invariants:
1. When something arrived is noted as it arrives, not when a task gets to look at it.
2. What is done besides (closing a watch, choosing a segment) is not part of any figure.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp

from bench.split import Served
from harness.simulation.scalable.links import Line
from magnetar.client.message.layouts import layout_from
from magnetar.errors import DeadlineExceeded, RequestError
from magnetar.model.names import TopicName
from magnetar.model.segments import SegmentLayout
from magnetar.runtime.signal import Signal
from magnetar.wire.messages import Command, Received
from magnetar.wire.pb import pulsar_pb2 as pb

HOST = "127.0.0.1"
NAMESPACE = "public/default"
AT_ONCE = 32
WAIT_SECONDS = 30.0
CREATION_FIGURES = 30

LOOKUP = "lookup of a layout, one at a time"
LOOKUPS = f"lookup of a layout, {AT_ONCE} at a time"
SEGMENT = "LOOKUP and PRODUCER of a segment"
REST = "layout by REST"
SPLIT = "split, start to answer"
SPLIT_TOLD = "split, start to update (71)"
SPLIT_KNOWN = "split, answer to update (71)"
CREATION = "topic of one segment, start to answer"
CREATION_TOLD = "new topic, start to update (77)"
CREATION_KNOWN = "new topic, answer to update (77)"

Times = dict[str, list[float]]
"""What was measured -> seconds, each time."""


# --- connections


class Admin:
    """The admin interface, many requests at a time."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def __call__(self, method: str, path: str, body: object = None) -> str:
        async with self._session.request(method, self._url + path, json=body) as answer:
            text = await answer.text()
            if answer.status >= 300:
                raise RequestError(f"{method} {path}: {answer.status} {text}")
            return text

    async def create(self, topic: str, segments: int) -> None:
        await self("PUT", f"/admin/v2/scalable/{topic}?numInitialSegments={segments}")


@asynccontextmanager
async def administering(served: Served) -> AsyncIterator[Admin]:
    timeout = aiohttp.ClientTimeout(total=WAIT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield Admin(session, served.admin_url)


@asynccontextmanager
async def lines_to(served: Served, count: int) -> AsyncIterator[list[Line]]:
    lines: list[Line] = []
    try:
        for _ in range(count):
            line = await Line.connect(HOST, served.running.port)
            assert isinstance(line, Line)
            lines.append(line)
        yield lines
    finally:
        for line in lines:
            await line.close()


class Watch:
    """What a session of command 70 was told last, and when."""

    def __init__(self, line: Line, topic: str) -> None:
        self._line = line
        self._news = Signal()
        self._told: pb.CommandScalableTopicUpdate | None = None
        self.at = 0.0
        self._number = line.register("session_id", self)
        line.send(
            "SCALABLE_TOPIC_LOOKUP",
            session_id=self._number,
            topic=f"topic://{topic}",
            create_if_missing=False,
        )

    def take(self, command: Command) -> None:
        self.at = time.perf_counter()
        assert isinstance(command, Received)
        self._told = command.body  # type: ignore[assignment]  # by the type of the command
        self._news.advance()

    def lost(self, error: Exception) -> None:
        self._news.close(error)

    async def past(self, epoch: int) -> None:
        """Wait until it was told a newer layout."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while self._told is None or self._told.dag.epoch <= epoch:
                    await self._news.past(self._news.version)
                    if self._told is not None and self._told.HasField("error"):
                        raise RequestError(self._told.message)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no layout past epoch {epoch} came") from error

    @property
    def layout(self) -> SegmentLayout:
        assert self._told is not None, "who asks has waited for it"
        return layout_from(self._told.dag)

    def close(self) -> None:
        self._line.unregister("session_id", self._number)
        self._line.send("SCALABLE_TOPIC_CLOSE", session_id=self._number)


class TopicsWatch:
    """When a watch of the namespace was told of which topic."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._news = Signal()
        self.arrived: dict[str, float] = {}
        line.send("WATCH_SCALABLE_TOPICS", watch_id=1, namespace=NAMESPACE)
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while True:
            command = await self._line.pushes.get(timeout_s=10 * WAIT_SECONDS)
            now = time.perf_counter()
            if isinstance(command, Received):
                body: Any = command.body
                for name in (*body.snapshot.topics, *body.diff.added):
                    self.arrived[name] = now
                self._news.advance()

    async def told(self, topic: str) -> float:
        """When it was told of a topic."""
        name = f"topic://{topic}"
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while name not in self.arrived:
                    await self._news.past(self._news.version)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no update with {topic} came") from error
        return self.arrived[name]

    async def close(self) -> None:
        self._line.send("WATCH_SCALABLE_TOPICS_CLOSE", watch_id=1)
        self._task.cancel()
        await asyncio.wait([self._task])


# --- what is measured


async def timed(count: int, at_once: int, work: Callable[[], Awaitable[float]]) -> list[float]:
    """What `work` returns, so many times."""
    times: list[float] = []
    left = iter(range(count))

    async def repeat() -> None:
        times.extend([await work() for _ in left])

    await asyncio.gather(*(repeat() for _ in range(at_once)))
    return times


class Client(NamedTuple):
    """Who measures what a server does with these topics."""

    admin: Admin
    lines: Sequence[Line]
    topics: Sequence[str]
    chance: random.Random

    async def look_up(self) -> float:
        begun = time.perf_counter()
        watch = Watch(self.chance.choice(self.lines), self.chance.choice(self.topics))
        await watch.past(-1)
        watch.close()
        return watch.at - begun

    async def produce(self) -> float:
        topic, line = self.chance.choice(self.topics), self.chance.choice(self.lines)
        watch = Watch(line, topic)
        await watch.past(-1)
        watch.close()
        segment = self.chance.choice(watch.layout.active)
        name = str(TopicName.parse(f"topic://{topic}").segment(segment.descriptor))
        begun = time.perf_counter()
        await line.request("LOOKUP", topic=name)
        await line.request("PRODUCER", topic=name, producer_id=1)
        seconds = time.perf_counter() - begun
        await line.request("CLOSE_PRODUCER", producer_id=1)
        return seconds

    async def read(self) -> float:
        begun = time.perf_counter()
        await self.admin("GET", f"/admin/v2/scalable/{self.chance.choice(self.topics)}")
        return time.perf_counter() - begun

    async def lookups(self, count: int) -> Times:
        return {
            LOOKUP: await timed(count, 1, self.look_up),
            LOOKUPS: await timed(count * 2, AT_ONCE, self.look_up),
            SEGMENT: await timed(count // 4, 1, self.produce),
            REST: await timed(count // 4, 1, self.read),
        }

    async def splits(self, watches: Sequence[Watch], count: int) -> Times:
        times: Times = {SPLIT: [], SPLIT_TOLD: [], SPLIT_KNOWN: []}
        for number in self.chance.choices(range(len(self.topics)), k=count):
            layout = watches[number].layout
            widest = max(layout.active, key=lambda each: each.hash_range.size)
            begun = time.perf_counter()
            path = f"/admin/v2/scalable/{self.topics[number]}/split/{widest.segment_id}"
            await self.admin("POST", path)
            answered = time.perf_counter()
            await watches[number].past(layout.epoch)
            times[SPLIT].append(answered - begun)
            times[SPLIT_TOLD].append(watches[number].at - begun)
            times[SPLIT_KNOWN].append(watches[number].at - answered)
        return times

    async def creations(self, watch: TopicsWatch, prefix: str) -> Times:
        times: Times = {CREATION: [], CREATION_TOLD: [], CREATION_KNOWN: []}
        for number in range(CREATION_FIGURES):
            topic = f"{NAMESPACE}/{prefix}-{number}"
            begun = time.perf_counter()
            await self.admin.create(topic, 1)
            answered = time.perf_counter()
            told = await watch.told(topic)
            times[CREATION].append(answered - begun)
            times[CREATION_TOLD].append(told - begun)
            times[CREATION_KNOWN].append(told - answered)
        return times
