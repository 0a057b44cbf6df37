"""Runs the real server on a simulated disk, network and clock with random clients, and checks it.

    python -m harness.simulation --only broker --seeds 200
    python -m harness.simulation --only broker --seed 17 --verbose

Owns: a run, that is, several lives of one server on one disk (`BrokerRun`). Each life begins with
a start on whatever the one before left, compares every topic and every subscription with the
history, lets clients work, and ends with a kill, a power loss or a stop. The last lives have no
disk faults.

Invariants:
1. One seed is one run, as in `simulate`.
2. Comparing is done by clients, over the network, with what any client may ask.
3. A life whose disk had no fault never fails.
"""

from __future__ import annotations

import asyncio
import logging
from random import Random
from typing import Any, Final

from harness.simulation.broker.actors import Consuming, consume, produce, trouble, visit
from harness.simulation.broker.compaction import compact, compare_view, hold_all
from harness.simulation.broker.expiry import expire, leave_alone
from harness.simulation.broker.history import ProducerStory, SubscriptionStory, TopicStory
from harness.simulation.broker.lapses import Lapses
from harness.simulation.broker.log_reader import read_log
from harness.simulation.broker.world import BrokerWorld, Bugs
from harness.simulation.seeds import EPOCH_MS, LIFE_SECONDS_MAX, Report, alone, draw_plan, where
from harness.simulation.storage.actors import BUGS
from harness.simulation.storage.history import Findings
from harness.simulation.watched_runs import ended
from magnetar.broker.policy.defaults import PolicyDefaults
from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.values import RetentionPolicies
from magnetar.errors import MagnetarError
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import SubscriptionType
from magnetar.runtime.clock import LoopClock
from magnetar.runtime.limits import Limits
from magnetar.server.app import Server
from magnetar.server.config import ServerConfig
from magnetar.server.machine import Machine
from magnetar.testing.virtual import virtual_time
from magnetar.testing.virtual.disk import ROOT, SimulatedDisk
from magnetar.testing.virtual.faults import FaultPlan
from magnetar.testing.virtual.network import Network
from magnetar.testing.virtual.worker import VirtualWorker

_TOPICS: Final = (
    ("persistent://public/kept/plain", False, False),
    ("persistent://public/once/kept", True, False),
    ("persistent://public/trimmed/once", True, True),
)
"""Name, dedup, whether acknowledged ledgers are dropped."""

_KEEP: Final = RetentionPolicies(-1, -1)
_POLICIES: Final = {
    "kept": Policies(retention_policies=_KEEP),
    "once": Policies(retention_policies=_KEEP, deduplication_enabled=True),
    "trimmed": Policies(deduplication_enabled=True),
}
_EXPIRING: Final = 0.3
"""How many topics have something that expires, and how many lives of those a quiet while."""
_COMPACTED: Final = 0.35
_ACTORS_SECONDS: Final = 300.0
_SESSIONS_SECONDS: Final = 200.0
_DELIVERY_SECONDS: Final = 100.0
_SOON_SECONDS: Final = 30.0
_SURPLUS_SECONDS: Final = 0.5
_ENOUGH_PERMITS: Final = 1_000_000
_MANY: Final = 1000
_MANY_UNACKED: Final = {
    "consumer_unacked_messages": 50_000,
    "subscription_unacked_messages": 200_000,
}


class BrokerRun:
    """One seed."""

    def __init__(self, seed: int, *, lines: list[str] | None = None) -> None:
        self.report = Report(seed)
        self.findings = Findings()
        self.findings.lines = lines
        self._random = Random(f"broker {seed}")
        self._limits = _small_limits(self._random)
        # Drawn apart: seeds without delays are what they were before there were any.
        self._delays = Random(f"delays {seed}")
        self._tick_ms = self._delays.choice((50, 300, 1000))
        self._is_strict = self._delays.random() < 0.5
        # So are seeds in which nothing expires.
        self._lapses = Random(f"expiry {seed}")
        # And seeds in which nothing is compacted.
        self._compactions = Random(f"compaction {seed}")
        self._disk = SimulatedDisk(seed=seed)
        self._topics = self._draw_topics()
        if any(topic.has_delays for topic in self._topics) and self._delays.random() < 0.7:
            # So that whoever compares may take all of what waits, and not in order.
            self._limits = self._limits.override(_MANY_UNACKED)
        self._is_set_up = False

    def _draw_topics(self) -> list[TopicStory]:
        random = self._random
        topics = []
        for name, dedup, trims in random.sample(_TOPICS, 2):
            topic = TopicStory(self.findings, name, dedup=dedup, trims=trims)
            for number in range(random.choice((1, 2))):
                ProducerStory(self.findings, topic, f"p{number}")
            for kind in random.sample(list(SubscriptionType), 2):
                SubscriptionStory(self.findings, topic, kind.name.lower(), kind)
            topic.has_delays = self._delays.random() < 0.5
            topic.early = 0.0 if self._is_strict else self._tick_ms / 1000
            topic.lapses = Lapses() if self._lapses.random() < _EXPIRING else None
            topic.is_compacted = self._compactions.random() < _COMPACTED
            topics.append(topic)
        return topics

    def go(self) -> Report:
        report = self.report
        bugs = Bugs(self.findings, lambda: not self._disk.is_stopped)
        log = logging.getLogger("magnetar")
        log.addHandler(bugs)
        try:
            for _ in range(self._random.randrange(3, 6)):
                self._live(draw_plan(self._random), calm=False)
                if self.findings.violations:
                    break
            else:
                self._live(FaultPlan(), calm=True)
                self._live(FaultPlan(), calm=True)
        finally:
            log.removeHandler(bugs)
            self._disk.close()
        report.operations = self.findings.operations
        report.digest = self.findings.digest
        report.violations = tuple(self.findings.violations)
        return report

    # --- one life

    def _live(self, plan: FaultPlan, *, calm: bool) -> None:
        report = self.report
        report.lives += 1
        random = Random(self._random.randrange(1 << 32))
        self._disk.plan = plan
        self.findings.note(f"life {report.lives}")
        try:
            virtual_time.run(self._until_stopped(random, calm), until=LIFE_SECONDS_MAX)
        except Exception as error:  # noqa: BLE001  whatever it is, it is a finding
            # What still waits when the machine stops can wait for ever.
            if not self._disk.is_stopped:
                self.findings.broken(f"{where(error)}: {type(error).__name__}: {error}")
        report.faults += plan.faults
        crashed = self._disk.is_stopped
        report.crashes += crashed
        for topic in self._topics:
            for subscription in topic.subscriptions:
                subscription.life_over(crashed=crashed)
        power_loss = random.random() < 0.6
        self.findings.note(f"end: crashed {crashed}, power loss {power_loss}")
        self._disk = self._disk.crash(random, power_loss=power_loss)

    async def _until_stopped(self, random: Random, calm: bool) -> None:
        asyncio.get_running_loop().set_exception_handler(self._unhandled)
        life = asyncio.create_task(self._life(random, calm), name="life")
        stop = asyncio.create_task(self._disk.stopped.past(0), name="stop")
        await asyncio.wait({life, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not self._disk.is_stopped:
            await life

    async def _life(self, random: Random, calm: bool) -> None:
        plan = self._disk.plan
        plan.is_paused = random.random() < 0.7
        world = self._new_world(random)
        try:
            await world.server.start()
        except MagnetarError as error:
            if self._disk.is_stopped:
                return
            self.findings.note(f"start: {error.name}")
            if not plan.faults or isinstance(error, BUGS):
                self.findings.broken(f"start: {type(error).__name__}: {error}")
            return
        plan.is_paused = True
        await self._set_up(world, random)
        await self._compare(world, random)
        for topic in self._topics:
            alone = topic.lapses is not None and self._lapses.random() < _EXPIRING
            if alone and not self._disk.is_stopped and not self.findings.violations:
                await leave_alone(world, self._lapses, topic)
        if not self.findings.violations:
            plan.is_paused = False
            await self._act(world, random, stop=random.random() < 0.2)
        if world.server.stopping:
            return
        if world.has_failed:
            world.note("the storage failed")
            if not plan.io_errors:
                self.findings.broken(f"stopped without a fault: {world.server.storage.failure}")
            return
        plan.end_faults()
        if self.findings.violations:
            return
        if calm or random.random() < 0.4:  # the next life begins with the same
            await self._compare(world, random)
        if calm or random.random() < 0.5:
            await self._stop(world)

    async def _stop(self, world: BrokerWorld) -> None:
        failed = world.has_failed
        try:
            await world.server.stop()
        except MagnetarError as error:
            world.failed("stop", error)
            if not failed and not self._disk.plan.faults and not self._disk.is_stopped:
                self.findings.broken(f"stop: {type(error).__name__}: {error}")
        world.note("stopped")
        if self._disk.open_files and not self._disk.is_stopped:
            self.findings.broken(f"{self._disk.open_files} files are open after the stop")

    def _new_world(self, random: Random) -> BrokerWorld:
        seed = random.randrange(1 << 32)
        started_at = self.report.lives * LIFE_SECONDS_MAX
        loop = asyncio.get_running_loop()
        network = Network(Random(f"{seed} network"), lambda: started_at + loop.time())
        machine = Machine(
            clock=LoopClock(EPOCH_MS + round(started_at * 1000)),
            disk=self._disk,
            new_worker=lambda name: VirtualWorker(Random(f"{seed} {name}"), self._disk.stopped),
            listen=network.listen,
        )
        config = ServerConfig(
            data=str(ROOT),
            host="simulated",
            limits=self._limits,
            policies=PolicyDefaults(delayed_delivery_tick_time_millis=self._tick_ms),
            is_delayed_delivery_deliver_at_time_strict=self._is_strict,
        )
        return BrokerWorld(
            name=f"life {self.report.lives}",
            disk=self._disk,
            network=network,
            server=Server(config, machine=machine),
            findings=self.findings,
            topics=self._topics,
            started_at=started_at,
            delays=Random(f"{self.report.seed} delays {self.report.lives}"),
            contents=Random(f"{self.report.seed} contents {self.report.lives}"),
        )

    async def _set_up(self, world: BrokerWorld, random: Random) -> None:
        """The namespaces, and every subscription before the first message."""
        if self._is_set_up:
            return
        for topic in self._topics:
            namespace = TopicName.parse(topic.name).namespace
            await world.server.namespaces.create(namespace, _POLICIES[namespace.name])
            for subscription in topic.subscriptions:
                await visit(world, random, subscription)
            if topic.is_compacted:
                await hold_all(world, topic)
        self._is_set_up = True

    async def _act(self, world: BrokerWorld, random: Random, *, stop: bool) -> None:
        """Let the clients work for a while, then wait until all of them have gone.

        With `stop` the server is stopped under them.
        """
        actors: list[tuple[Any, str, tuple[Any, ...]]] = [(trouble, "trouble", ())]
        for topic in self._topics:
            actors += [(produce, each.name, (each,)) for each in topic.producers]
            for each in topic.subscriptions:
                count = 1 if each.kind is SubscriptionType.EXCLUSIVE else random.choice((1, 2, 3))
                actors += [(consume, each.name, (each,))] * count
        actors += [(expire, "expiry", (each,)) for each in self._topics if each.lapses is not None]
        actors += [(compact, "compaction", (each,)) for each in self._topics if each.is_compacted]
        tasks = [
            asyncio.create_task(
                actor(world, Random(f"{self.report.seed} {world.name} {number}"), *stories),
                name=f"{name}-{number}",
            )
            for number, (actor, name, stories) in enumerate(actors)
        ]
        await asyncio.sleep(random.uniform(0.5, 4.0))
        if stop:
            await self._stop(world)
        world.ending = True
        self._disk.plan.is_full = False
        await ended(tasks, self.findings, _ACTORS_SECONDS, may_be_late=lambda: world.has_failed)

    # --- comparing

    async def _compare(self, world: BrokerWorld, random: Random) -> None:
        """Every topic and subscription with what is known of it; nobody else is connected."""
        self._disk.plan.is_paused = True
        await self._quiet(world)
        for topic in self._topics:
            client = await world.connect()
            log = await read_log(world, client, topic.name)
            if self._disk.is_stopped:
                return
            world.note(f"{topic.name} has {len(log)} entries")
            positions = topic.log_read(log)
            if topic.is_compacted:
                await compare_view(world, self._compactions, topic, positions)
                if self._disk.is_stopped:
                    return
            for subscription in topic.subscriptions:
                await self._verify(world, random, subscription, positions)

    async def _quiet(self, world: BrokerWorld) -> None:
        """Every session has left its topics: nothing of it is in flight any more."""
        deadline = world.now() + _SESSIONS_SECONDS
        while world.server.context.sessions:
            if world.now() > deadline:
                self.findings.broken(f"{len(world.server.context.sessions)} sessions do not end")
                return
            await asyncio.sleep(0.2)

    async def _verify(
        self,
        world: BrokerWorld,
        random: Random,
        story: SubscriptionStory,
        log: list[Position],
    ) -> None:
        """What a first consumer gets is everything open, and nothing that is acknowledged."""
        kind = random.choice((SubscriptionType.EXCLUSIVE, story.kind))
        if story.topic.has_delays and not story.kind.takes_cumulative_acks:
            kind = story.kind
        limits = self._limits
        if min(limits.consumer_unacked_messages, limits.subscription_unacked_messages) < _MANY:
            kind = SubscriptionType.EXCLUSIVE  # which does not count what is unacknowledged
        # What is due soon is waited for; where there is an order, all comes at once.
        soon = world.now() + _SOON_SECONDS

        def owed(position: Position) -> bool:
            return kind.takes_cumulative_acks or not story.waits(position, soon)

        story.topic.follow(world.now())
        wanted = {each for each in log if story.open_messages(each) and owed(each)}
        client = await world.connect()
        consumer = Consuming(world, random, story, client, kind)
        await consumer.subscribe()
        consumer.flow(_ENOUGH_PERMITS)
        await _arrived(consumer, wanted)
        await asyncio.sleep(_SURPLUS_SECONDS)
        if self._disk.is_stopped:
            return
        world.note(f"{story.name} has {len(wanted)} open entries, {len(consumer.got)} came")
        story.topic.follow(world.now())
        story.verified(log, consumer.got, owed)
        await consumer.leave()
        await self._quiet(world)

    def _unhandled(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not self._disk.is_stopped and isinstance(error, Exception):
            text = f"{context['message']}: {type(error).__name__}: {error}"
            if not isinstance(error, MagnetarError):
                self.findings.broken(text)


async def _arrived(consumer: Consuming, wanted: set[Position]) -> None:
    """Until all of them have come, or so long that they never will."""
    try:
        async with asyncio.timeout(_DELIVERY_SECONDS):
            while not wanted <= consumer.got.keys():
                consumer.arrived.clear()
                await consumer.arrived.wait()
    except TimeoutError:
        return  # what is missing is found missing


def _small_limits(random: Random) -> Limits:
    """Limits so small that everything that turns over, pauses or blocks does so often."""
    return Limits().override(
        {
            "journal_file_bytes": random.choice((64, 256)) * 1024,
            "journal_files_max": random.choice((3, 4)),
            "journal_batch_records": random.choice((10, 100)),
            "ledger_cache_bytes": random.choice((1000, 50_000)),
            "ledger_open_files": random.choice((4, 16)),
            "storage_settle_seconds": random.choice((0.1, 1.0)),
            "cursor_flush_seconds": random.choice((0.1, 1.0)),
            "managed_ledger_ledger_entries": random.choice((10, 50, 5000)),
            "connection_handshake_seconds": random.choice((3.0, 30.0)),
            "connection_keepalive_seconds": random.choice((2.0, 30.0)),
            "connection_liveness_seconds": random.choice((0.5, 5.0)),
            "connection_pending_publishes": random.choice((4, 30, 1000)),
            "connection_write_bytes": random.choice((500, 5000, 1 << 20)),
            "consumer_outbox_entries": random.choice((2, 20, 5000)),
            "consumer_unacked_messages": random.choice((5, 50, 50_000)),
            "subscription_unacked_messages": random.choice((10, 200_000)),
            "subscription_read_entries": random.choice((1, 7, 500)),
            "subscription_read_bytes": random.choice((1000, 1 << 20)),
            "subscription_look_ahead_entries": random.choice((3, 50, 2000)),
            "failover_switch_seconds": random.choice((0.2, 1.0)),
        }
    )


def simulate_broker(seed: int, *, lines: list[str] | None = None) -> Report:
    """Run one seed. `lines` gets every step."""
    with alone():
        return BrokerRun(seed, lines=lines).go()
