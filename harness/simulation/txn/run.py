"""Runs transactions on one to three simulated brokers, with everything that can happen to them.

    python -m harness.simulation --only txn --seeds 200
    python -m harness.simulation --only txn --seed 17 --verbose

Owns: a run (`TxnRun`): brokers on shared storage or one alone on a disk; clients that write in
transactions, consume, transform and produce, decide in groups, read from the earliest message, and
publish beside; and trouble. Every durable change and every delivery is checked as it happens
(`txn_mirror`, `txn_history`). In the end all is calm: everything must come to rest (`txn_rest`).

Invariants:
1. One seed is one run, as in `simulate`.
2. A violation names one of the twelve invariants, or is a crash of the product.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final

from harness.simulation.broker_lives import follow
from harness.simulation.scalable.trouble import Operator, Trouble, calm
from harness.simulation.scalable.world import DiskHost
from harness.simulation.seeds import Report, alone
from harness.simulation.storage.history import Findings
from harness.simulation.txn.actors import publish, read, transform, write
from harness.simulation.txn.expiry import FLEETING, Expiry
from harness.simulation.txn.group_actors import lead
from harness.simulation.txn.history import TxnHistory
from harness.simulation.txn.rest import REST_SECONDS, Rest
from harness.simulation.txn.session import INPUT, ORDERS, OUTPUT, Session, TxnStage
from harness.simulation.txn.trouble import DOOMED_SUBSCRIPTION, TxnTrouble
from harness.simulation.txn.truth import place_of
from harness.simulation.txn.world import TxnDiskHost, TxnServers, TxnSharedHost, TxnWorld
from harness.simulation.watched_runs import (
    ServiceBugs,
    ended,
    is_alive,
    small_limits,
    unhandled,
    watched,
)
from magnetar.broker.topic.topic import Topic
from magnetar.errors import DeadlineExceeded, MagnetarError
from magnetar.managed_ledger.managed_ledger import EARLIEST
from magnetar.model.names import TopicName
from magnetar.runtime.limits import Limits
from magnetar.server.app import Server

TOPIC: Final = TopicName.parse(ORDERS)
WORK: Final = "work"
STREAM: Final = "stream"

_EXPIRING: Final = 0.3
_HOSTS: Final = "abc"
_END_SECONDS: Final = 100.0
_TRIES: Final = 20
_LOOK_SECONDS: Final = 0.2
"""Between two looks whether something is broken: then the rest is not worth the time."""


@dataclass(frozen=True, slots=True)
class Course:
    """What a run is like, where that is not drawn."""

    hosts: int | None = None
    """So many brokers on shared storage; 0: one alone with a disk."""
    limits: Mapping[str, float] = field(default_factory=dict)
    troubles: tuple[str, ...] = ()
    """The only kinds of trouble that transactions have; empty: all."""
    rest_seconds: float = REST_SECONDS
    """What it may take, in calm, until nothing is left to do."""
    expires: bool | None = None
    """Whether messages expire."""


class TxnRun:
    """One seed."""

    def __init__(
        self, seed: int, *, lines: list[str] | None = None, course: Course | None = None
    ) -> None:
        self.report = Report(seed)
        self.findings = Findings()
        self.findings.lines = lines
        self.counts: Counter[str] = Counter()
        self._random = Random(f"txn {seed}")
        self._session_seconds = self._random.choice((2.0, 5.0))
        self._course = course or Course()
        limits = _limits(self._random).override(self._course.limits)
        self._world = TxnWorld(seed, self.findings, limits)
        self._stage = TxnStage(self._world, TxnHistory(self._world))
        # Drawn apart: seeds in which nothing expires are what they were before anything did.
        chance = Random(f"expiry {seed}")
        drawn = chance.random() < _EXPIRING
        self._expiry: Expiry | None = None
        if drawn if self._course.expires is None else self._course.expires:
            self._expiry = Expiry(self._world, chance)
            self._stage.history.also_delivered = self._expiry.delivered

    def go(self) -> Report:
        watched(self._main(), self.findings, ServiceBugs(self.findings, is_alive))
        for host in self._world.hosts.values():
            if isinstance(host, DiskHost):
                host.close()
        return self._reported()

    def _reported(self) -> Report:
        report, counts = self.report, self.counts
        report.lives = sum(host.starts for host in self._world.hosts.values())
        report.crashes = counts["crashes"]
        report.faults = counts["sessions cut"] + self._world.weather.failures
        report.splits, report.merges = counts["splits"], counts["merges"]
        report.failovers = counts["usurped"]
        report.transactions = len(self._stage.history.attempts)
        report.operations = self.findings.operations
        report.digest = self.findings.digest
        report.violations = tuple(self.findings.violations)
        return report

    # --- the course of a run

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        follow(loop)
        loop.set_exception_handler(unhandled(self.findings))
        world, history = self._world, self._stage.history
        self._furnish()
        await asyncio.gather(*(host.start() for host in world.hosts.values()))
        await self._create()
        clients = self._clients()
        await self._disturbed_for(self._random.uniform(4.0, 12.0))
        world.clear_up()
        if self.findings.violations:
            await self._given_up(clients)
            return
        await calm(world)
        world.calm = True
        world.note("calm")
        rest = Rest(self._stage, self._random, self._course.rest_seconds)
        await rest.come()
        self._stage.over = True
        await self._ended(clients)
        for step in (rest.read_all, rest.waits_quietly, history.check_end, rest.forgotten):
            if not self.findings.violations:
                await step()
        for host in world.hosts.values():
            await host.stop()

    async def _given_up(self, clients: list[asyncio.Task[None]]) -> None:
        """Something is broken: the rest is not worth the time."""
        self._stage.over = True
        for host in self._world.hosts.values():
            await host.kill()
        await self._ended(clients)

    def _furnish(self) -> None:
        """Brokers on shared storage, or one alone with a disk."""
        random, world = self._random, self._world
        hosts = 0 if random.random() < 0.25 else random.choice((1, 2, 2, 3))
        if self._course.hosts is not None:
            hosts = self._course.hosts
        if not hosts:
            world.hosts["a"] = TxnDiskHost(world, "a", Random(f"{world.seed} disk"))
            return
        servers = TxnServers(
            world, Random(f"{world.seed} storage"), session_seconds=self._session_seconds
        )
        for name in _HOSTS[:hosts]:
            world.hosts[name] = TxnSharedHost(world, name, servers)

    async def _create(self) -> None:
        """The topics, with the subscriptions that must get everything."""
        segments = self._random.choice((1, 1, 2))
        for what in (
            lambda server: server.context.scalable.create(TOPIC, segments),
            lambda server: server.context.scalable.create_subscription(TOPIC, WORK, "QUEUE"),
            _create_inputs,
        ):
            await self._done(what)
        orders = place_of(ORDERS.replace("topic:", "persistent:")).replace(
            "/persistent/", "/segment/"
        )
        inputs = place_of(INPUT)
        history = self._stage.history
        history.consumes[WORK] = lambda place: place == inputs or place.startswith(orders)
        history.consumes[STREAM] = lambda place: place == inputs

    async def _done(self, work: Callable[[Server], Coroutine[Any, Any, Any]]) -> None:
        """Nothing disturbs yet: a broker does it, soon."""
        for _ in range(_TRIES):
            for host in self._world.ready:
                try:
                    await host.ask(work)
                except MagnetarError as error:
                    self._world.note(f"create: {error.name}: {error}")
                else:
                    return
            await asyncio.sleep(0.5)
        raise DeadlineExceeded("the topics are not created, though nothing disturbs")

    def _clients(self) -> list[asyncio.Task[None]]:
        random, stage = self._random, self._stage
        actors: dict[str, Callable[[Random], Coroutine[Any, Any, None]]] = {}

        def over() -> bool:
            return stage.over

        def ending() -> bool:
            return stage.world.ending

        def sources(session: Session) -> list[str]:
            return [INPUT, *session.segments]

        def inputs(_: Session) -> list[str]:
            return [INPUT]

        def outputs(_: Session) -> list[str]:
            return [OUTPUT]

        actors["plain"] = lambda chance: publish(stage, chance, "plain")
        for number in range(random.choice((1, 2))):
            name = f"w{number}"
            actors[name] = partial(_writing, stage, name)
        for number in range(random.choice((1, 2))):
            name = f"t{number}"
            actors[name] = partial(
                _transforming, stage, name, WORK, sources, cumulative=False, until=over
            )
        actors["s"] = partial(
            _transforming, stage, "s", STREAM, inputs, cumulative=True, until=over
        )
        if random.random() < 0.4:
            actors["d"] = partial(
                _transforming,
                stage,
                "d",
                DOOMED_SUBSCRIPTION,
                inputs,
                cumulative=False,
                until=ending,
            )
        if self._expiry is not None:
            actors["f"] = partial(
                _transforming, stage, "f", FLEETING, outputs, cumulative=False, until=ending
            )
        if random.random() < 0.5:
            actors["g"] = lambda chance: lead(stage, chance, "g", "app")
        for number in range(random.choice((1, 2))):
            name = f"r{number}"
            actors[name] = partial(_reading, stage, name)
        return [
            asyncio.create_task(actor(Random(f"{self.report.seed} {name}")), name=name)
            for name, actor in actors.items()
        ]

    async def _disturbed_for(self, seconds: float) -> None:
        """Let the operator work, and things happen."""
        seed, world = self.report.seed, self._world
        trouble = Trouble(world, Random(f"{seed} trouble"), self._session_seconds, self.counts)
        operator = Operator(
            world, Random(f"{seed} operator"), TOPIC, self.counts, ambush=trouble.ambush
        )
        own = TxnTrouble(world, Random(f"{seed} txn trouble"), self.counts, self._course.troubles)
        tasks = [
            asyncio.create_task(trouble.run(), name="trouble"),
            asyncio.create_task(own.run(), name="trouble of transactions"),
            asyncio.create_task(operator.run(), name="operator"),
        ]
        if self._expiry is not None:
            tasks.append(asyncio.create_task(self._expiry.run(), name="expiry"))
        for _ in range(round(seconds / _LOOK_SECONDS)):
            await asyncio.sleep(_LOOK_SECONDS)
            if self.findings.violations:
                break
        world.ending = True
        await self._ended(tasks)

    async def _ended(self, tasks: list[asyncio.Task[None]]) -> None:
        found = self.findings
        seconds = 0.0 if found.violations else _END_SECONDS
        await ended(tasks, found, seconds, may_be_late=lambda: bool(found.violations))


def _writing(stage: TxnStage, name: str, chance: Random) -> Coroutine[Any, Any, None]:
    return write(stage, chance, name)


def _reading(stage: TxnStage, name: str, chance: Random) -> Coroutine[Any, Any, None]:
    return read(stage, chance, name)


def _transforming(
    stage: TxnStage,
    name: str,
    subscription: str,
    topics: Callable[[Session], list[str]],
    chance: Random,
    *,
    cumulative: bool,
    until: Callable[[], bool],
) -> Coroutine[Any, Any, None]:
    return transform(stage, chance, name, subscription, topics, cumulative=cumulative, until=until)


async def _create_inputs(server: Server) -> None:
    topic = await server.topics.get(TopicName.parse(INPUT))
    assert isinstance(topic, Topic)
    for name in (WORK, STREAM):
        await topic.create_subscription(name, EARLIEST)


def _limits(random: Random) -> Limits:
    return Limits().override(
        {
            **small_limits(random, flush_seconds=(0.1, 1.0, 5.0), ledger_entries=(4, 10, 50)),
            "failover_switch_seconds": random.choice((0.2, 1.0)),
            "scalable_auto_scale_interval_seconds": 20.0,
            "txn_retention_seconds": random.choice((1.0, 5.0, 20.0)),
            "txn_collect_seconds": random.choice((0.5, 2.0)),
        }
    )


def simulate_txn(
    seed: int, *, lines: list[str] | None = None, course: Course | None = None
) -> Report:
    """Run one seed. `lines` gets every step."""
    with alone():
        return TxnRun(seed, lines=lines, course=course).go()
