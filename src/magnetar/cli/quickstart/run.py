"""The run of `magnetar quickstart`: traffic, a pipeline, splits, merges, a kill, and the proof.

Owns: the schedule of a run, and everything that was seen on the way.

Invariants:
1. Broker and driver are processes of their own, as in real life; none of them stays behind.
2. The output is read back by the client, without Spark, after the pipeline has ended, and compared
   with a computation over the events that were sent.
3. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from magnetar import Client, Producer
from magnetar.cli.admin_client import AdminClient
from magnetar.cli.demo.server import served
from magnetar.cli.quickstart.driver import PipelineDriver
from magnetar.cli.quickstart.plots import SegmentSpan
from magnetar.cli.quickstart.report import spans_of
from magnetar.cli.quickstart.shop import Comparison, Settled, Traffic, judged, settled
from magnetar.cli.verbs.scalable import scalable_path
from magnetar.client.consume.checkpoint import FROM_EARLIEST
from magnetar.errors import DeadlineExceeded

_INPUTS: Final = ("orders", "payments")
_TOPICS: Final = {name: f"topic://public/default/{name}" for name in (*_INPUTS, "settled")}
# The first waits for the backlog of a killed driver; the second is how long the
# output must be quiet before its reader believes that there is no more.
_DRAIN_SECONDS: Final = 180.0
_QUIET_SECONDS: Final = 2.0
_TICK_SECONDS: Final = 0.02
_LOOK_SECONDS: Final = 0.2
_RECEIVED_AT_ONCE: Final = 1000
_START_SHARE: Final = 0.15
_TRAFFIC_SHARE: Final = 0.65
"""Of the whole time; the rest is the end of the backlog and the proof."""

Tell = Callable[[str, float], None]
"""Hears what is going on, and how much of the whole is done, from 0 to 1."""


class TimelineMark(NamedTuple):
    """An action of the run, so many seconds after the start of the traffic."""

    at: float
    what: str
    is_kill: bool = False


class ReceivedResult(NamedTuple):
    """A result, as it came."""

    at: float
    row: Settled | None


@dataclass(slots=True)
class Seen:
    """The observations of a run, of which report and plots are made."""

    sent: list[float] = field(default_factory=list)
    """When each event was handed to the client."""
    received: list[ReceivedResult] = field(default_factory=list)
    marks: list[TimelineMark] = field(default_factory=list)
    killed_batches: list[int] = field(default_factory=list)
    segments: dict[str, list[int]] = field(default_factory=dict)
    """How many take messages, by topic: at first, and after each change as the broker says."""
    layouts: dict[str, dict[int, SegmentSpan]] = field(default_factory=dict)
    """Every segment that there was, by topic and number."""
    batches: int = 0
    verdict: Comparison = field(default_factory=lambda: Comparison(0, 0, 0, 0, 0))

    @property
    def seconds(self) -> float:
        """The time from the start of the traffic until the last event or result."""
        last = self.received[-1].at if self.received else 0.0
        return max(last, self.sent[-1] if self.sent else 0.0)


async def run(folder: Path, traffic: Traffic, kills: Sequence[float], tell: Tell) -> Seen:
    """The whole run; `kills` are moments, as shares of the time of the traffic."""
    tell("starting a broker on embedded storage", 0.0)
    with served(folder / "broker") as server:
        tell(f"a broker serves at {server.url}, its admin interface at {server.admin_url}", 0.01)
        async with Client(server.url) as client, AdminClient(server.admin_url) as admin:
            # One segment each: what splits do is seen from the beginning.
            for topic in _TOPICS.values():
                await admin.put(scalable_path(topic), numInitialSegments="1")
            driver = PipelineDriver(folder, server.url)
            return await _Stage(client, admin, driver, traffic, kills, tell).run()


async def _both(*works: Coroutine[Any, Any, None]) -> None:
    """Do them at once; the first failure ends all, and is raised as it is."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    # A failure of one must not leave the others working on a stage that is being cleared.
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class _Stage:
    def __init__(
        self,
        client: Client,
        admin: AdminClient,
        driver: PipelineDriver,
        traffic: Traffic,
        kills: Sequence[float],
        tell: Tell,
    ) -> None:
        self._client = client
        self._admin = admin
        self._driver = driver
        self._traffic = traffic
        self._kills = kills
        self._tell = tell
        # Filled by all the coroutines of a run; they share one loop, so nothing is locked.
        self._seen = Seen()
        self._started, self._zero_ms = time.monotonic(), time.time() * 1000

    async def run(self) -> Seen:
        with self._driver.alive():
            self._tell("starting Spark", 0.02)
            await self._driver.until_working()
            producers = [await self._client.producer(_TOPICS[name]) for name in _INPUTS]
            self._started, self._zero_ms = time.monotonic(), time.time() * 1000
            for name in _TOPICS:
                await self._note_segments(name)
            # The tail is for the plots only: the verdict comes from a second reading (invariant 2).
            async with self._tail():
                await _both(self._send(*producers), self._reshape(), self._strike())
                await self._drain()
            self._tell("stopping the pipeline", 0.95)
            # In order, and before reading back: what is read then is final.
            await self._driver.stop()
        self._seen.batches = self._driver.batches
        self._tell("reading the output back, without Spark", 0.97)
        self._seen.verdict = judged(self._traffic.expected, await self._read_back())
        return self._seen

    def _now(self) -> float:
        return time.monotonic() - self._started

    # --- traffic

    async def _send(self, *opened: Producer[bytes]) -> None:
        """Every event at its time, which is the event's own time, too."""
        producers = dict(zip(_INPUTS, opened, strict=True))
        # Event times are real ones: the watermark of the pipeline goes by them.
        zero_ms = time.time_ns() // 1_000_000
        end = max(1, self._traffic.events[-1].at_ms)
        for event in self._traffic.events:
            # Paced by the shop's own clock: a slow moment is caught
            # up, so the load stays what was asked.
            while (early := event.at_ms / 1000 - self._now()) > 0:
                await asyncio.sleep(max(early, _TICK_SECONDS))
                done = event.at_ms / end
                self._tell(self._doing, _START_SHARE + _TRAFFIC_SHARE * done)
            # Not awaited for its receipt: `close` below waits for all of them.
            await producers[event.topic].submit(
                event.value, key=event.key, event_time=zero_ms + event.at_ms
            )
            self._seen.sent.append(self._now())
        for producer in producers.values():
            await producer.close()

    @property
    def _doing(self) -> str:
        last = f"; {self._seen.marks[-1].what}" if self._seen.marks else ""
        return (
            f"{len(self._seen.sent):,} orders and payments sent, "
            f"{len(self._seen.received):,} settled{last}"
        )

    @asynccontextmanager
    async def _tail(self) -> AsyncIterator[None]:
        """Follow the output while the block runs, for the plots."""
        # Without a subscription: following must not change what the broker keeps or trims.
        consumer = await self._client.checkpoint_consumer(_TOPICS["settled"], start=FROM_EARLIEST)

        async def follow() -> None:
            while True:
                for message in await consumer.receive_many(_RECEIVED_AT_ONCE, timeout=1.0):
                    self._seen.received.append(ReceivedResult(self._now(), settled(message.data)))

        task = asyncio.create_task(follow())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            await consumer.close()
        # It ended by itself, so it failed.
        if not task.cancelled():
            task.result()

    async def _drain(self) -> None:
        """Until everything that is expected has come, or nothing more does."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while len(self._seen.received) < len(self._traffic.expected):
            # A driver that died by itself would let us wait for the whole deadline.
            self._driver.check()
            if time.monotonic() > deadline:
                return  # the comparison says what is missing
            done = len(self._seen.received) / len(self._traffic.expected)
            self._tell(self._doing, _START_SHARE + _TRAFFIC_SHARE + 0.15 * done)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _read_back(self) -> list[Settled | None]:
        """The whole output, by a reader that has seen nothing before."""
        found: list[Settled | None] = []
        async with await self._client.checkpoint_consumer(
            _TOPICS["settled"], start=FROM_EARLIEST
        ) as consumer:
            # Quiet for this long is the end: nothing writes any more.
            while batch := await consumer.receive_many(_RECEIVED_AT_ONCE, timeout=_QUIET_SECONDS):
                found += [settled(message.data) for message in batch]
        return found

    # --- trouble

    async def _reshape(self) -> None:
        """Splits and merges, spread over the time of the traffic; kills do not hold them up."""
        # Splits come early and merges late, so that a kill between them is seen on its own.
        await self._at(0.08, "orders: 1 to 2 segments")
        await self._split("orders")
        await self._at(0.15, "settled: 1 to 4, payments: 1 to 2")
        await self._split("settled")
        await self._split("settled")
        await self._split("payments")
        await self._at(0.22, "orders: 2 to 4 segments")
        await self._split("orders")
        await self._at(0.75, "orders: 4 to 1 segments")
        await self._merge("orders")
        await self._at(0.85, "settled: 4 to 1 segments")
        await self._merge("settled")

    async def _strike(self) -> None:
        for share in self._kills:
            await self._at(share)
            await self._kill()

    async def _kill(self) -> None:
        """The driver, in mid-batch, and start it again."""
        batch = await self._driver.kill_in_batch()
        self._seen.killed_batches.append(batch)
        # Both ends are marked: between them is the time in which nobody works.
        self._mark(f"kill -9 in batch {batch}", is_kill=True)
        self._driver.start()
        await self._driver.until_working()
        self._mark("driver works again", is_kill=True)

    async def _at(self, share: float, what: str | None = None) -> None:
        """Wait for that share of the traffic's time, and note what is done then."""
        due = share * self._traffic.events[-1].at_ms / 1000
        # In small steps, for a driver that failed should end the run now.
        while self._now() < due:
            self._driver.check()
            await asyncio.sleep(min(_LOOK_SECONDS, max(0.0, due - self._now())))
        if what is not None:
            self._mark(what)

    def _mark(self, what: str, *, is_kill: bool = False) -> None:
        self._seen.marks.append(TimelineMark(self._now(), what, is_kill))

    async def _split(self, name: str) -> None:
        """Every segment that takes messages, in two."""
        for number in await self._active(name):
            await self._admin.post(f"{scalable_path(_TOPICS[name])}/split/{number}")
        await self._note_segments(name)

    async def _merge(self, name: str) -> None:
        """All segments that take messages, into one."""
        # In ring order: only neighbours can be merged.
        numbers = "/".join(map(str, await self._active(name)))
        await self._admin.post(f"{scalable_path(_TOPICS[name])}/merge/{numbers}")
        await self._note_segments(name)

    async def _note_segments(self, name: str) -> None:
        """Which there are and which take messages now, for the report."""
        record = await self._record(name)
        # Those that have been removed since stay as they were seen last.
        self._seen.layouts.setdefault(name, {}).update(spans_of(record, self._zero_ms))
        self._seen.segments.setdefault(name, []).append(len(await self._active(name)))

    async def _record(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = await self._admin.get(scalable_path(_TOPICS[name]))
        return found

    async def _active(self, name: str) -> list[int]:
        """Segments that take messages, in the order of their keys."""
        record = await self._record(name)
        active = [each for each in record["segments"].values() if each["state"] == "ACTIVE"]
        if not active:
            raise DeadlineExceeded(f"{_TOPICS[name]} has no active segment")
        ordered = sorted(active, key=lambda each: int(each["hashRange"]["start"]))
        return [int(each["segmentId"]) for each in ordered]
