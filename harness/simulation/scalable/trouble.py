"""What happens to simulated brokers: they die, lose sessions and connections; and an operator.

Owns: `Operator`, who changes the layout and the subscriptions of a topic at random brokers, and
`Trouble`, which kills brokers, starts them again, and takes their connections away; both count what
they did. `calm` ends all trouble: every broker is there again, and undisturbed.

Invariants:
1. Everything random comes from the actor's own `Random`, made from the seed and its name.
2. An operator's call that failed may have been carried out all the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Final

from harness.simulation.scalable.world import DiskHost, Host, ScalableWorld, SharedHost
from magnetar.errors import InvariantBroken, MagnetarError
from magnetar.model.names import TopicName
from magnetar.model.segments import SegmentLayout
from magnetar.scalable.records import SubscriptionKind, kind_of_key, state_directory
from magnetar.server.app import Server
from magnetar.testing.virtual.faults import Operation

CALL_SECONDS: Final = 60.0
SEGMENTS_MAX: Final = 8

_LOOK_SECONDS: Final = 1.0
_STRIKE_RATES: Final = {"drained": 0.2, "done": 0.2, "sub": 0.2, "group": 0.05}
"""How often something happens right behind the writing of such a record."""
_DISK_SECONDS: Final = 5.0
"""After which a broker is killed that does nothing to its disk."""


class Operator:
    """Splits, merges, creates and deletes subscriptions."""

    def __init__(
        self,
        world: ScalableWorld,
        random: Random,
        topic: TopicName,
        counts: Counter[str],
        ambush: Callable[[], None] | None = None,
    ) -> None:
        """`ambush` is called when a change begins: it may have something happen meanwhile."""
        self._world = world
        self._random = random
        self._topic = topic
        self._counts = counts
        self._ambush = ambush
        self._subscriptions = 0

    def calm(self) -> None:
        """From now on nothing happens when a change begins."""
        self._ambush = None

    async def run(self) -> None:
        pace = self._random.choice((0.5, 1.0, 3.0))
        while not self._world.ending:
            await asyncio.sleep(self._random.expovariate(pace))
            if self._world.ready and not self._world.ending:
                await self._act(self._random.choice(self._world.ready))

    async def _act(self, host: Host) -> None:
        kind = self._random.random()
        if kind < 0.45:
            await self.split(host)
        elif kind < 0.85:
            await self.merge(host)
        else:
            await self._subscription(host)

    async def split(self, host: Host) -> bool:
        """Split some segment in the middle, or anywhere; whether it was done."""
        random, topic = self._random, self._topic
        layout = layout_at(host, topic)
        if layout is None or len(layout.active) >= SEGMENTS_MAX:
            return False
        segment = random.choice(layout.active)
        low, high = segment.hash_range.start, segment.hash_range.end
        if low == high:
            return False
        after = random.choice((None, random.randrange(low, high)))
        return await self._call(
            host,
            "splits",
            lambda server: server.context.scalable.split(topic, segment.segment_id, after=after),
        )

    async def merge(self, host: Host) -> bool:
        """Merge two or more neighbours; whether it was done."""
        random, topic = self._random, self._topic
        layout = layout_at(host, topic)
        if layout is None or len(layout.active) < 2:
            return False
        count = random.randrange(2, len(layout.active) + 1)
        first = random.randrange(len(layout.active) - count + 1)
        ids = [each.segment_id for each in layout.active[first : first + count]]
        random.shuffle(ids)
        return await self._call(
            host, "merges", lambda server: server.context.scalable.merge(topic, ids)
        )

    async def _subscription(self, host: Host) -> None:
        """One that nobody consumes: it comes and goes in the middle of changes."""
        name, topic = f"idle-{self._subscriptions % 2}", self._topic
        self._subscriptions += 1
        kind: SubscriptionKind = self._random.choice(("STREAM", "QUEUE"))
        if self._random.random() < 0.5:
            await self._call(
                host,
                "subscriptions",
                lambda server: server.context.scalable.create_subscription(topic, name, kind),
            )
        else:
            await self._call(
                host,
                "unsubscriptions",
                lambda server: server.context.scalable.delete_subscription(topic, name),
            )

    async def _call(
        self, host: Host, what: str, work: Callable[[Server], Coroutine[Any, Any, Any]]
    ) -> bool:
        """Whether it was done; otherwise nobody knows."""
        world = self._world
        world.note(f"operator {what} at {host.name}")
        if self._ambush is not None:
            self._ambush()
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await host.ask(work)
        except TimeoutError:
            world.note(f"operator {what}: no answer")
        except MagnetarError as error:
            world.note(f"operator {what}: {error.name}")
            if isinstance(error, InvariantBroken):
                world.findings.broken(f"{what}: {error}")
        else:
            world.note(f"operator {what}: done")
            self._counts[what] += 1
            return True
        return False


def layout_at(host: Host, topic: TopicName) -> SegmentLayout | None:
    """The layout of a topic as a broker sees it now."""
    record = host.server.context.scalable.layouts.cached(topic)
    return None if record is None or record.layout is None else record.layout.layout()


class Trouble:
    """One disturbance after the other, until the world is ending."""

    def __init__(
        self, world: ScalableWorld, random: Random, session_seconds: float, counts: Counter[str]
    ) -> None:
        self._world = world
        self._random = random
        self._session_seconds = session_seconds
        self._counts = counts
        self._pending: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        pace = self._random.choice((0.2, 0.5, 1.0))
        while not self._world.ending:
            await asyncio.sleep(self._random.expovariate(pace))
            if not self._world.ending:
                await self._act(self._random.random())
        if self._pending:
            await asyncio.wait(self._pending)

    def ambush(self) -> None:
        """Sometimes: let something happen within the next steps of whatever begins now."""
        if self._world.ending or self._random.random() < 0.4:
            return
        task = asyncio.create_task(self._strike(), name="ambush")
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def watch(self, topic: TopicName) -> None:
        """Strike when something about a topic has just been stored: there, steps end and begin."""
        directory = state_directory(topic)
        while not self._world.ending:
            ready = self._world.ready
            if ready:
                await self._watch_at(self._random.choice(ready), directory)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _watch_at(self, host: Host, directory: str) -> None:
        life = host.life
        try:
            async with host.server.metadata.watch(parent=directory) as watch:
                while host.life is life and not self._world.ending:
                    try:
                        async with asyncio.timeout(_LOOK_SECONDS):
                            event = await anext(watch)
                    except TimeoutError:
                        continue
                    if self._random.random() < _STRIKE_RATES.get(kind_of_key(event.key), 0.0):
                        await self._act(0.5 * self._random.random())
        except (StopAsyncIteration, MagnetarError):
            return  # the broker is gone, and its connection to the store with it

    async def _strike(self) -> None:
        await asyncio.sleep(self._random.choice((0.003, 0.02, 0.1)) * self._random.random())
        await self._act(0.6 * self._random.random())

    async def _act(self, kind: float) -> None:
        random = self._random
        host = random.choice(list(self._world.hosts.values()))
        if kind < 0.3:
            await self._break(host)
        elif kind < 0.5 and isinstance(host, SharedHost):
            await self._cut_from_metadata(host)
        elif kind < 0.85:
            self._disturb_links(host)
        elif host.is_ready:
            await self._unload(host)

    async def _break(self, host: Host) -> None:
        """Kill or stop a broker; start it again, soon or after its session has ended."""
        if host.life is None or not host.is_ready:
            return
        self._counts["crashes"] += 1
        kind = self._random.random()
        if isinstance(host, DiskHost) and kind < 0.7:
            await self._stop_disk(host)
        elif kind < 0.2:
            await host.stop()
        else:
            await host.kill()
        longest = self._random.choice((0.1, 1.0, 1.5 * self._session_seconds))
        await asyncio.sleep(self._random.uniform(0, longest))
        if host.life is None:
            await host.start()

    async def _stop_disk(self, host: DiskHost) -> None:
        """The machine stops in the middle of one of its next disk operations."""
        plan = host.disk.plan
        plan.crash_on, plan.crash_at = self._random.choice(
            (
                (Operation.SYNC, self._random.randrange(1, 10)),
                (Operation.WRITE, self._random.randrange(1, 20)),
                (None, self._random.randrange(1, 60)),
            )
        )
        try:
            async with asyncio.timeout(_DISK_SECONDS):
                await host.kill_when_stopped()
        except TimeoutError:
            await host.kill()

    async def _cut_from_metadata(self, host: SharedHost) -> None:
        """For a moment, or until its session is lost while it goes on serving."""
        self._counts["sessions cut"] += 1
        self._world.note(f"{host.name} is cut from the metadata")
        life = host.life
        host.lose_metadata(in_flight_arrives=self._random.random() < 0.5)
        longest = self._random.choice((0.5, 2 * self._session_seconds))
        await asyncio.sleep(self._random.uniform(0, longest))
        if host.life is life:
            host.find_metadata()
            self._world.note(f"{host.name} has the metadata again")

    def _disturb_links(self, host: Host) -> None:
        links = [link for link in host.network.links if not link.is_over]
        if not links:
            return
        link = self._random.choice(links)
        if self._random.random() < 0.6:
            link.cut()
            return
        ways = self._random.choice(((True, True), (True, False), (False, True)))
        link.fall_silent(client=ways[0], server=ways[1])
        loop = asyncio.get_running_loop()
        loop.call_later(self._random.uniform(0.1, 4.0), link.recover)

    async def _unload(self, host: Host) -> None:
        """Let a topic go; whoever is asked next for it may be another broker."""
        names = list(host.server.topics.loaded)
        if not names:
            return
        name = self._random.choice(names)
        self._world.note(f"unload {name} at {host.name}")
        try:
            await host.ask(lambda server: server.topics.unload(name))
        except MagnetarError as error:
            self._world.note(f"unload: {error.name}")


async def calm(world: ScalableWorld) -> None:
    """Every broker is there, and its way to everything else is free."""
    for host in world.hosts.values():
        if isinstance(host, SharedHost):
            host.find_metadata()
        if isinstance(host, DiskHost):
            host.disk.plan.end_faults()
            host.disk.plan.crash_at = None
        for link in host.network.links:
            link.recover()
        if host.life is None and not await host.start():
            world.findings.broken(f"{host.name} does not start, though nothing disturbs it")
