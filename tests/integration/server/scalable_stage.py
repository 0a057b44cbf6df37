"""Real brokers on virtual time, and the clients of scalable topics that tests send to them.

Owns: `Stage`, one or more brokers and what was recorded of their clients; `Process`, the
connections of one client process, which can be killed; `play`, which runs a story on a stage and
then checks that no promise was broken and no broker logged a bug.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from random import Random
from typing import Any, Final, TypeVar

from harness.simulation.broker.world import Bugs
from harness.simulation.broker_lives import follow, present_life
from harness.simulation.scalable.actors import Recorder
from harness.simulation.scalable.clients import CheckpointConsumer, QueueConsumer, StreamConsumer
from harness.simulation.scalable.feeds import Delivery
from harness.simulation.scalable.history import violations
from harness.simulation.scalable.links import Links
from harness.simulation.scalable.producer import ScalableProducer
from harness.simulation.scalable.world import (
    ANY_HOST,
    PORT,
    DiskHost,
    Host,
    ScalableWorld,
    SharedHost,
    SharedServers,
)
from harness.simulation.storage.history import Findings
from magnetar.errors import DeadlineExceeded
from magnetar.model.names import TopicName
from magnetar.model.segments import SegmentLayout
from magnetar.runtime.limits import Limits
from magnetar.scalable.records import AutoScaleOverride, GroupRecord, MemberRecord
from magnetar.scalable.service import ScalableTopics
from magnetar.testing.virtual import virtual_time
from magnetar.testing.virtual.driver import Driver
from magnetar.testing.virtual.network import End, ProtocolT
from magnetar.wire.commands import TYPES
from magnetar.wire.messages import Received
from magnetar.wire.pb import pulsar_pb2 as pb

NAME: Final = "topic://public/default/orders"
TOPIC: Final = TopicName.parse(NAME)
KEYS: Final = 24
GRACE_S: Final = 60.0

Result = TypeVar("Result")
Consumer = QueueConsumer | StreamConsumer | CheckpointConsumer
Story = Callable[["Stage"], Coroutine[Any, Any, None]]

_SEED: Final = 5
_SESSION_S: Final = 5.0
_LONG_S: Final = 30 * 24 * 3600.0
_LOOK_S: Final = 0.02


class Process(Links):
    """The connections of one client process."""

    def __init__(self, world: ScalableWorld, host: str) -> None:
        super().__init__(f"pulsar://{host}:{PORT}", connect=self._reach)
        self._world = world
        self._ends: list[End] = []
        self._killed = False

    async def _reach(
        self, factory: Callable[[], ProtocolT], host: str, port: int, /
    ) -> tuple[End, ProtocolT]:
        if self._killed:
            raise ConnectionRefusedError("this process is dead")
        end, protocol = await self._world.connect(factory, host, port)
        self._ends.append(end)
        return end, protocol

    def kill(self) -> None:
        """It ends without a word."""
        self._killed = True
        for end in self._ends:
            end.abort()


class Stage:
    """Brokers, a topic, and everything that its clients saw."""

    def __init__(self, world: ScalableWorld) -> None:
        self.world = world
        self.recorder = Recorder(world)
        self.record = self.recorder.record
        self.is_complete = True
        """Every subscription was read to its end."""

    @property
    def host(self) -> Host:
        """The first broker."""
        return next(iter(self.world.hosts.values()))

    async def ask(
        self,
        work: Callable[[ScalableTopics], Coroutine[Any, Any, Result]],
        host: Host | None = None,
    ) -> Result:
        """What an operator asks of a broker."""
        return await (host or self.host).ask(lambda server: work(server.context.scalable))

    async def create(self, segments: int = 1, *, auto_scale: bool = False) -> None:
        await self.ask(lambda scalable: scalable.create(TOPIC, segments))
        if not auto_scale:
            off = AutoScaleOverride(enabled=False)
            await self.ask(lambda scalable: scalable.set_auto_scale(TOPIC, off))

    async def split(self, segment_id: int, after: int | None = None) -> None:
        await self.ask(lambda scalable: scalable.split(TOPIC, segment_id, after=after))

    async def merge(self, *ids: int) -> None:
        await self.ask(lambda scalable: scalable.merge(TOPIC, ids))

    async def layout(self, topic: TopicName = TOPIC) -> SegmentLayout:
        return (await self.ask(lambda scalable: scalable.lookup(topic, create=False))).layout

    async def members(self) -> dict[str, MemberRecord]:
        """Those of every group of the topic, by name."""
        groups = await self.ask(lambda scalable: scalable.store.all(TOPIC, "group", GroupRecord))
        return {each.name: each for group in groups for each in group.members}

    # --- clients

    def process(self, host: str = ANY_HOST) -> Process:
        return Process(self.world, host)

    async def driver(self, host: str | None = None, **fields: object) -> Driver:
        name, connect = host or self.host.name, self.world.connect
        return await Driver.connect(name, PORT, connect=connect, **fields)  # type: ignore[arg-type]

    def producer(self, links: Links, name: str = "p", *, first: int = 0) -> ScalableProducer:
        return ScalableProducer(links, NAME, name, first_sequence=first, record=self.record)

    def queue(
        self, links: Links, name: str = "q1", subscription: str = "q", *, earliest: bool = True
    ) -> QueueConsumer:
        return QueueConsumer(links, NAME, subscription, name, earliest=earliest, record=self.record)

    def stream(
        self, links: Links, name: str = "s1", subscription: str = "s", *, earliest: bool = True
    ) -> StreamConsumer:
        return StreamConsumer(
            links, NAME, subscription, name, earliest=earliest, record=self.record
        )


async def send(producer: ScalableProducer, count: int, key: str | None = None) -> None:
    """So many messages, each with its receipt at the end."""
    for number in range(count):
        await producer.send(key or f"k{number % KEYS}", b"%d" % number)
    await producer.flush()


async def read(consumer: Consumer, count: int, seconds: float = 10.0) -> list[Delivery]:
    """The next messages, acknowledged where that is the application's part."""
    found = []
    for _ in range(count):
        delivery = await consumer.receive(seconds)
        found.append(delivery)
        if not isinstance(consumer, CheckpointConsumer):
            consumer.ack(delivery)
    return found


async def read_all(stage: Stage, *consumers: Consumer, seconds: float = 60.0) -> list[Delivery]:
    """Read with all of them until nothing is missing anywhere."""
    found: list[Delivery] = []

    async def one(consumer: Consumer) -> None:
        while stage.recorder.missing():
            try:
                found.extend(await read(consumer, 1, 0.2))
            except DeadlineExceeded:
                continue

    try:
        async with asyncio.timeout(seconds):
            await asyncio.gather(*map(one, consumers))
    except TimeoutError:
        raise AssertionError(f"missing: {stage.recorder.missing()}") from None
    return found


async def nothing_comes(consumer: Consumer, seconds: float = 2.0) -> None:
    try:
        delivery = await consumer.receive(seconds)
    except DeadlineExceeded:
        return
    raise AssertionError(f"{delivery.sequence} of segment {delivery.feed.segment_id} came")


async def until(
    holds: Callable[[], bool | Awaitable[bool]], seconds: float, what: str = "it"
) -> float:
    """Wait for something; how long it took."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while True:
        found = holds()
        if found if isinstance(found, bool) else await found:
            return loop.time() - begun
        assert loop.time() - begun < seconds, f"{what} does not hold after {seconds} s"
        await asyncio.sleep(_LOOK_S)


def owned(consumer: StreamConsumer) -> list[int]:
    """The segments that a consumer was told to have."""
    assignment = consumer.session.assignment
    return [] if assignment is None else sorted(each.segment_id for each in assignment.segments)


# --- commands of drivers


async def told(driver: Driver, name: str, timeout_s: float = 10.0) -> Any:
    """The next push of that name; others before it are skipped."""
    while True:
        push = await driver.pushes.get(timeout_s)
        if isinstance(push, Received) and push.type == TYPES[name]:
            return push.body


async def looked_up(driver: Driver, topic: str = NAME, *, session: int = 1, create: bool) -> Any:
    driver.send("SCALABLE_TOPIC_LOOKUP", session_id=session, topic=topic, create_if_missing=create)
    return await told(driver, "SCALABLE_TOPIC_UPDATE")


async def joined(driver: Driver, name: str, number: int = 1, **fields: Any) -> Any:
    """The assignment of a new member."""
    given: dict[str, Any] = {
        "topic": NAME,
        "subscription": "s",
        "consumer_name": name,
        "consumer_id": number,
        "consumer_type": pb.STREAM,
    }
    answer = await driver.request("SCALABLE_TOPIC_SUBSCRIBE", **(given | fields))
    return answer.assignment


# --- running


def play(
    story: Story,
    *,
    brokers: str = "a",
    disk: bool = False,
    checked: bool = True,
    until_s: float = _LONG_S,
    transaction_kind: str = "auto",
    retention_minutes: float = 0,
    seed: float = _SEED,
    **limits: float,
) -> None:
    """Run a story with so many brokers, with a disk or on memory that they share."""
    findings = Findings()
    given: dict[str, object] = {"journal_file_bytes": 256 * 1024, "journal_files_max": 4}
    world = ScalableWorld(int(seed), findings, Limits().override(given | limits))
    world.ending = True  # no call between brokers gets lost
    world.transaction_kind = transaction_kind
    world.retention_minutes = int(retention_minutes)
    stage = Stage(world)
    bugs, log = Bugs(findings, _is_alive), logging.getLogger("magnetar")
    log.addHandler(bugs)
    try:
        virtual_time.run(_play(stage, story, brokers, disk), until=until_s)
    finally:
        log.removeHandler(bugs)
        for host in world.hosts.values():
            if isinstance(host, DiskHost):
                host.close()
    broken = list(findings.violations)
    if checked:
        broken += violations(stage.recorder.events(), drained=stage.is_complete)
    assert broken == [], f"seed {_SEED}"


async def _play(stage: Stage, story: Story, brokers: str, disk: bool) -> None:
    world = stage.world
    follow(asyncio.get_running_loop())
    if disk:
        world.hosts["a"] = DiskHost(world, "a", Random(f"{_SEED} disk"))
    else:
        servers = SharedServers(Random(f"{_SEED} storage"), session_seconds=_SESSION_S)
        for name in brokers:
            world.hosts[name] = SharedHost(world, name, servers)
    for host in world.hosts.values():
        assert await host.start()
    await story(stage)
    for host in world.hosts.values():
        await host.stop()


def _is_alive() -> bool:
    life = present_life()
    return life is None or not life.is_over
