"""Runs scalable topics on one to three simulated brokers, with everything that can happen to them.

    python -m harness.simulation --only scalable --seeds 200
    python -m harness.simulation --only scalable --seed 17 --verbose

Owns: a run (`ScalableRun`): brokers, on shared storage in memory or one alone on a simulated disk;
clients of every kind; an operator who splits and merges; and crashes, lost sessions and broken
connections, also in the middle of what the operator does. In the end all is calm: everything must
come to rest, and what the clients saw must break no promise (`scalable_history`).

Invariants:
1. One seed is one run, as in `simulate`.
2. Clients and brokers live on one loop and one time; the run ends by itself or is a finding.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import Any, Final

from harness.simulation.broker_lives import follow
from harness.simulation.scalable.actors import (
    Recorder,
    Stage,
    checkpoint,
    expire,
    produce,
    queue,
    stream,
)
from harness.simulation.scalable.history import violations
from harness.simulation.scalable.trouble import Operator, Trouble, calm, layout_at
from harness.simulation.scalable.world import DiskHost, ScalableWorld, SharedHost, SharedServers
from harness.simulation.seeds import Report, alone
from harness.simulation.storage.history import Findings
from harness.simulation.watched_runs import (
    ServiceBugs,
    ended,
    is_alive,
    small_limits,
    unhandled,
    watched,
)
from magnetar.errors import DeadlineExceeded, MagnetarError
from magnetar.model.names import TopicName
from magnetar.model.segments import NEVER
from magnetar.runtime.limits import Limits
from magnetar.scalable.records import GroupRecord

TOPIC: Final = TopicName.parse("topic://public/default/orders")

_DELAYING: Final = 0.3
_EXPIRING: Final = 0.3
_FLEETING: Final = "fleeting"
"""The subscription whose messages expire."""
_HOSTS: Final = "abc"
_REST_SECONDS: Final = 400.0
_END_SECONDS: Final = 200.0
_TRIES: Final = 20
_SAMPLE_SECONDS: Final = 0.2
_LONG_GRACE_SECONDS: Final = 60.0


class ScalableRun:
    """One seed."""

    def __init__(self, seed: int, *, lines: list[str] | None = None) -> None:
        self.report = Report(seed)
        self.findings = Findings()
        self.findings.lines = lines
        self.counts: Counter[str] = Counter()
        self._random = Random(f"scalable {seed}")
        self._session_seconds = self._random.choice((2.0, 5.0))
        self._world = ScalableWorld(seed, self.findings, _limits(self._random))
        self._stage = Stage(self._world, Recorder(self._world), str(TOPIC))
        # Drawn apart: seeds without delays are what they were before there were any.
        delays = Random(f"delays {seed}")
        if delays.random() < _DELAYING:
            self._stage.delays = delays
        self._expires = Random(f"lapses {seed}").random() < _EXPIRING

    def go(self) -> Report:
        watched(self._main(), self.findings, ServiceBugs(self.findings, is_alive))
        for host in self._world.hosts.values():
            if isinstance(host, DiskHost):
                host.close()
        for text in violations(self._stage.recorder.events(), drained=self._stage.over):
            self.findings.broken(text)
        return self._reported()

    def _reported(self) -> Report:
        report, counts = self.report, self.counts
        report.lives = sum(host.starts for host in self._world.hosts.values())
        report.crashes = counts["crashes"]
        report.faults = counts["sessions cut"]
        report.splits, report.merges = counts["splits"], counts["merges"]
        report.failovers = counts["failovers"]
        report.operations = self.findings.operations
        report.digest = self.findings.digest
        report.violations = tuple(self.findings.violations)
        return report

    # --- the course of a run

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        follow(loop)
        loop.set_exception_handler(unhandled(self.findings))
        random, world = self._random, self._world
        self._furnish()
        await asyncio.gather(*(host.start() for host in world.hosts.values()))
        await self._create(random.choice((1, 1, 2, 4)))
        clients = self._clients()
        operator = await self._disturbed_for(random.uniform(6.0, 25.0))
        await calm(world)
        await self._come_to_rest(clients)
        await self._have_their_places()
        await self._works(operator)
        self._stage.over = True
        await self._ended(clients)
        for host in world.hosts.values():
            await host.stop()

    async def _create(self, segments: int) -> None:
        host = self._random.choice(self._world.ready)
        for _ in range(_TRIES):
            try:
                await host.ask(lambda server: server.context.scalable.create(TOPIC, segments))
            except MagnetarError as error:
                self._world.note(f"create: {error.name}")
            if layout_at(host, TOPIC) is not None:
                return
            await asyncio.sleep(1.0)
        raise DeadlineExceeded(f"{TOPIC} is not created, though nothing disturbs")

    def _furnish(self) -> None:
        """Brokers on shared storage, or one alone with a disk."""
        random, world = self._random, self._world
        if random.random() < 0.3:
            world.hosts["a"] = DiskHost(world, "a", Random(f"{world.seed} disk"))
            return
        servers = SharedServers(
            Random(f"{world.seed} storage"), session_seconds=self._session_seconds
        )
        for name in _HOSTS[: random.choice((1, 2, 2, 3, 3))]:
            world.hosts[name] = SharedHost(world, name, servers)

    def _clients(self) -> list[asyncio.Task[None]]:
        random, stage = self._random, self._stage
        actors: list[tuple[str, Callable[[Random], Coroutine[Any, Any, None]]]] = []

        def add(name: str, actor: Callable[[Random], Coroutine[Any, Any, None]]) -> None:
            actors.append((name, actor))

        for number in range(random.choice((1, 2))):
            name = f"p{number}"
            add(name, lambda chance, name=name: produce(stage, chance, name))  # type: ignore[misc]
        for number in range(random.choice((1, 2, 3))):
            name = f"s{number}"
            add(name, partial(stream, stage, name=name, subscription="stream"))
        earliest = random.random() < 0.5
        for number in range(random.choice((1, 2))):
            name = f"q{number}"
            add(
                name,
                lambda chance, name=name: queue(  # type: ignore[misc]
                    stage, chance, name, "queue", earliest=earliest
                ),
            )
        # A member that is lost for longer than the grace period begins anew, and reads again.
        stays = stage.world.limits.scalable_grace_period_seconds >= _LONG_GRACE_SECONDS
        group = random.choice((None, "group")) if stays else None
        # Of a group, segments that are handed out later are begun at their latest message, too.
        from_start = group is not None or random.random() < 0.7
        add("r", lambda chance: checkpoint(stage, chance, "r", earliest=from_start, group=group))
        if self._expires:
            add("f", lambda chance: queue(stage, chance, "f", _FLEETING, earliest=True))
            add("expiry", lambda chance: expire(stage, chance, _FLEETING))
        return [
            asyncio.create_task(actor(Random(f"{self.report.seed} {name}")), name=name)
            for name, actor in actors
        ]

    async def _disturbed_for(self, seconds: float) -> Operator:
        """Let the operator work, and things happen."""
        seed, world = self.report.seed, self._world
        trouble = Trouble(world, Random(f"{seed} trouble"), self._session_seconds, self.counts)
        operator = Operator(
            world, Random(f"{seed} operator"), TOPIC, self.counts, ambush=trouble.ambush
        )
        tasks = [
            asyncio.create_task(trouble.run(), name="trouble"),
            asyncio.create_task(trouble.watch(TOPIC), name="watch of steps"),
            asyncio.create_task(operator.run(), name="operator"),
            asyncio.create_task(self._count_failovers(), name="leaders"),
        ]
        await asyncio.sleep(seconds)
        world.ending = True
        await self._ended(tasks)
        return operator

    async def _count_failovers(self) -> None:
        """How often the controller of the topic has moved."""
        last: str | None = None
        while not self._world.ending:
            await asyncio.sleep(_SAMPLE_SECONDS)
            leading = [
                host.life.name
                for host in self._world.ready
                if host.life is not None and host.server.context.scalable.controllers.leads(TOPIC)
            ]
            if leading and last not in leading:
                self.counts["failovers"] += last is not None
                last = leading[0]

    async def _come_to_rest(self, clients: list[asyncio.Task[None]]) -> None:
        """Every receipt is given, and every subscription has everything."""
        world, recorder = self._world, self._stage.recorder
        producers = [task for task in clients if task.get_name().startswith("p")]
        deadline = world.now() + _REST_SECONDS
        while world.now() < deadline:
            brief = [*producers, *(task for task in clients if task.get_name() == "expiry")]
            if any(task.done() and task not in brief for task in clients):
                break  # it is a finding when they are ended
            begun = recorder.subscriptions >= {"stream", "queue"}
            if begun and all(task.done() for task in producers) and not recorder.missing():
                world.note("at rest")
                return
            await asyncio.sleep(0.5)
        waiting = [task.get_name() for task in producers if not task.done()]
        self.findings.broken(
            f"no rest: producers {waiting} wait, {sorted(recorder.subscriptions)} are subscribed, "
            f"messages missing: {recorder.missing()}"
        )

    async def _have_their_places(self) -> None:
        """Whoever is connected is so by the record of its group, too."""
        lost = set(self._stage.members)
        for _ in range(_TRIES):
            try:
                lost = await self._lost_members()
            except MagnetarError as error:
                self._world.note(f"groups: {error.name}")
            if not lost or self.findings.violations:
                return
            await asyncio.sleep(1.0)
        self.findings.broken(f"{sorted(lost)} are connected, and their group takes them for lost")

    async def _lost_members(self) -> set[str]:
        found = await self._world.ready[0].ask(
            lambda server: server.context.scalable.store.all(TOPIC, "group", GroupRecord)
        )
        groups = [group for group in found if group.kind == "STREAM"]
        members = [member for group in groups for member in group.members]
        connected = {member.name for member in members if member.lost_ms == NEVER}
        return self._stage.members - connected

    async def _works(self, operator: Operator) -> None:
        """Without trouble the layout can be changed."""
        if self.findings.violations:
            return
        operator.calm()
        host = self._world.ready[0]
        for _ in range(_TRIES):
            layout = layout_at(host, TOPIC)
            if layout is not None:
                layout.check_invariants()
            if await operator.split(host) or await operator.merge(host):
                return
            await asyncio.sleep(1.0)
        self.findings.broken("nothing disturbs, but no split and no merge is carried out")

    async def _ended(self, tasks: list[asyncio.Task[None]]) -> None:
        found = self.findings
        await ended(tasks, found, _END_SECONDS, may_be_late=lambda: bool(found.violations))


def _limits(random: Random) -> Limits:
    return Limits().override(
        {
            **small_limits(random),
            "failover_switch_seconds": random.choice((0.2, 1.0)),
            "scalable_grace_period_seconds": random.choice((1.0, 4.0, _LONG_GRACE_SECONDS)),
            "scalable_auto_scale_interval_seconds": random.choice((2.0, 20.0)),
            "scalable_entry_bucket_budget": random.choice((1, 4)),
        }
    )


def simulate_scalable(seed: int, *, lines: list[str] | None = None) -> Report:
    """Run one seed. `lines` gets every step."""
    with alone():
        return ScalableRun(seed, lines=lines).go()
