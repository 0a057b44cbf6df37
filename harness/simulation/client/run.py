"""Runs applications of the Python client against simulated brokers, with everything that happens.

    python -m harness.simulation --only client --seeds 200
    python -m harness.simulation --only client --seed 17 --verbose

Owns: a run (`ClientRun`): brokers, on shared storage in memory or one alone on a simulated disk;
applications that use `magnetar.Client` and nothing else (`client_actors`); and the trouble of
`scalable_trouble`: cut, slow and silent connections, crashes, lost sessions, splits and merges. In
the end all is calm: every send has an end, every reader everything, and every client closes.

Invariants:
1. One seed is one run, as in `simulate`.
2. After the last client is closed there is no connection to a broker, and once the brokers are
   stopped no task.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Final

from harness.simulation.broker_lives import follow, present_life
from harness.simulation.client.actors import TOPIC, Applications
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
from magnetar.runtime.limits import Limits

_NAME: Final = TopicName.parse(TOPIC)
_HOSTS: Final = "abc"
_REST_SECONDS: Final = 600.0
_END_SECONDS: Final = 200.0
_TRIES: Final = 20

Application = Callable[[str, Random], Coroutine[Any, Any, None]]


class ClientBugs(ServiceBugs):
    """Finds loops of clients that have ended with an error, too."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "service-task-crashed" and present_life() is None:
            fields: dict[str, object] = getattr(record, "magnetar_fields", {})
            self._findings.broken(f"{fields.get('task')} has crashed: {fields.get('error')}")
            return
        super().emit(record)


class ClientRun:
    """One seed."""

    def __init__(self, seed: int, *, lines: list[str] | None = None) -> None:
        self.report = Report(seed)
        self.findings = Findings()
        self.findings.lines = lines
        self.counts: Counter[str] = Counter()
        self._random = Random(f"client {seed}")
        self._session_seconds = self._random.choice((2.0, 5.0))
        self._world = ScalableWorld(seed, self.findings, _limits(self._random))
        self._applications = Applications(self._world)

    def go(self) -> Report:
        watched(self._main(), self.findings, ClientBugs(self.findings, is_alive))
        for host in self._world.hosts.values():
            if isinstance(host, DiskHost):
                host.close()
        return self._reported()

    def _reported(self) -> Report:
        report, counts = self.report, self.counts
        report.lives = sum(host.starts for host in self._world.hosts.values())
        report.crashes = counts["crashes"]
        report.faults = counts["sessions cut"]
        report.splits, report.merges = counts["splits"], counts["merges"]
        report.operations = sum(map(len, self._applications.told.handed.values()))
        report.digest = self.findings.digest
        report.violations = tuple(self.findings.violations)
        return report

    # --- the course of a run

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        follow(loop)
        loop.set_exception_handler(unhandled(self.findings))
        world = self._world
        self._furnish()
        await asyncio.gather(*(host.start() for host in world.hosts.values()))
        await self._create(self._random.choice((1, 1, 2, 4)))
        writers, readers = self._begin()
        await self._disturbed_for(self._random.uniform(4.0, 15.0))
        await calm(world)
        await self._come_to_rest(writers)
        self._applications.over = True
        await self._ended([*writers, *readers])
        self._check_connections()
        for host in world.hosts.values():
            await host.stop()
        await self._check_tasks()
        exact = {"stream", "checkpoint"} if self.counts["streams"] == 1 else {"checkpoint"}
        for text in self._applications.told.violations(exact):
            self.findings.broken(text)

    def _furnish(self) -> None:
        """Brokers on shared storage, or one alone with a disk."""
        random, world = self._random, self._world
        if random.random() < 0.3:
            world.hosts["a"] = DiskHost(world, "a", Random(f"{world.seed} disk"))
            return
        servers = SharedServers(
            Random(f"{world.seed} storage"), session_seconds=self._session_seconds
        )
        for name in _HOSTS[: random.choice((1, 2, 3))]:
            world.hosts[name] = SharedHost(world, name, servers)

    async def _create(self, segments: int) -> None:
        host = self._random.choice(self._world.ready)
        for _ in range(_TRIES):
            try:
                await host.ask(lambda server: server.context.scalable.create(_NAME, segments))
            except MagnetarError as error:
                self._world.note(f"create: {error.name}")
            if layout_at(host, _NAME) is not None:
                return
            await asyncio.sleep(1.0)
        raise DeadlineExceeded(f"{TOPIC} is not created, though nothing disturbs")

    def _begin(self) -> tuple[list[asyncio.Task[None]], list[asyncio.Task[None]]]:
        """Writers, and everybody else."""
        random, has = self._random, self._applications
        self.counts["streams"] = random.choice((1, 1, 2))
        writers = [self._task(has.write, f"w{n}") for n in range(random.choice((1, 2)))]
        readers = [
            *(self._task(has.read_stream, f"s{n}") for n in range(self.counts["streams"])),
            *(self._task(has.read_queue, f"q{n}") for n in range(random.choice((1, 2)))),
            self._task(has.read_checkpoints, "c"),
            self._task(has.read_results, "r"),
            *(self._task(has.transform, f"t{n}") for n in range(random.choice((1, 2)))),
        ]
        return writers, readers

    def _task(self, application: Application, name: str) -> asyncio.Task[None]:
        chance = Random(f"{self.report.seed} {name}")
        return asyncio.create_task(application(name, chance), name=name)

    async def _disturbed_for(self, seconds: float) -> None:
        """Let the operator work, and things happen."""
        seed, world = self.report.seed, self._world
        trouble = Trouble(world, Random(f"{seed} trouble"), self._session_seconds, self.counts)
        operator = Operator(
            world, Random(f"{seed} operator"), _NAME, self.counts, ambush=trouble.ambush
        )
        tasks = [
            asyncio.create_task(trouble.run(), name="trouble"),
            asyncio.create_task(operator.run(), name="operator"),
        ]
        await asyncio.sleep(seconds)
        world.ending = True
        await self._ended(tasks)

    async def _come_to_rest(self, writers: list[asyncio.Task[None]]) -> None:
        """Every writer is done, and every reader has everything."""
        world, told = self._world, self._applications.told
        deadline = world.now() + _REST_SECONDS
        while world.now() < deadline:
            if all(each.done() for each in writers) and len(told.got) == 3 and not told.missing():
                world.note("at rest")
                return
            await asyncio.sleep(0.5)
        waiting = [each.get_name() for each in writers if not each.done()]
        self.findings.broken(
            f"no rest: writers {waiting} wait, readers {sorted(told.got)}; {told.missing()}"
        )

    def _check_connections(self) -> None:
        for host in self._world.hosts.values():
            left = [link for link in host.network.links if not link.is_over]
            if left:
                self.findings.broken(f"{len(left)} connections to {host.name} outlive the clients")

    async def _check_tasks(self) -> None:
        for _ in range(_TRIES):
            left = asyncio.all_tasks() - {asyncio.current_task()}
            if not left:
                return
            await asyncio.sleep(1.0)
        self.findings.broken(f"tasks are left: {sorted(each.get_name() for each in left)}")

    async def _ended(self, tasks: list[asyncio.Task[None]]) -> None:
        found = self.findings
        await ended(tasks, found, _END_SECONDS, may_be_late=lambda: bool(found.violations))


def _limits(random: Random) -> Limits:
    return Limits().override(
        {
            **small_limits(random),
            "scalable_grace_period_seconds": random.choice((4.0, 60.0)),
            "scalable_auto_scale_interval_seconds": random.choice((2.0, 20.0)),
            "scalable_entry_bucket_budget": random.choice((1, 4)),
        }
    )


def simulate_client(seed: int, *, lines: list[str] | None = None) -> Report:
    """Run one seed. `lines` gets every step."""
    with alone():
        return ClientRun(seed, lines=lines).go()
