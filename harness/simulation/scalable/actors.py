"""Random clients of a scalable topic in a simulation: producers and consumers of every kind.

Owns: `Recorder`, which takes what clients tell (`scalable_history`) and knows what is still to
come; `ClientPlace`, the process of one client, which can be killed; and the actors: `produce`,
`stream`, `queue`, `checkpoint` and `expire`, coroutines that live through all that happens to
brokers.

Invariants:
1. Everything random comes from the actor's own `Random`, made from the seed and its name.
2. While the world is ending nobody leaves: every consumer acknowledges what it gets, until `over`.
3. A consumer acknowledges only what it was given.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass, field
from random import Random
from typing import Final

from harness.simulation.scalable.clients import (
    FROM_EARLIEST,
    FROM_LATEST,
    CheckpointConsumer,
    QueueConsumer,
    StreamConsumer,
)
from harness.simulation.scalable.feeds import Delivery
from harness.simulation.scalable.history import (
    AckDurable,
    Delivered,
    Event,
    Expiring,
    ExpiryOver,
    Kind,
    Published,
    Receipted,
    Subscribed,
)
from harness.simulation.scalable.links import CLIENT_ERRORS, Links
from harness.simulation.scalable.producer import ScalableProducer, Timing
from harness.simulation.scalable.world import ANY_HOST, PORT, ScalableWorld
from harness.simulation.seeds import EPOCH_MS
from magnetar.errors import DeadlineExceeded, InvariantBroken, MagnetarError
from magnetar.model.names import TopicName
from magnetar.testing.virtual.network import End, ProtocolT

STALL_SECONDS: Final = 400.0
"""What a receipt may take, whatever is done to the brokers."""

_RECEIVE_SECONDS: Final = 0.3
_ANSWER_SECONDS: Final = 10.0
_KEYS: Final = 12
_DELAYS: Final = (None, None, 0.5, 1.5, 3.0, 8.0, 30.0)
_TICK_SECONDS: Final = 1.0
"""Of brokers without settings."""
_HELD_MAX: Final = 20

_Message = tuple[str, int]


class Recorder:
    """Everything that clients tell, in order."""

    def __init__(self, world: ScalableWorld) -> None:
        self._events: list[tuple[float, Event]] = []
        self._first: dict[str, tuple[float, Kind]] = {}
        self._world = world
        self._published: dict[_Message, int] = {}
        self._receipted: dict[_Message, None] = {}
        self._began: dict[str, int] = {}
        self._given: defaultdict[str, set[_Message]] = defaultdict(set)

    def record(self, event: Event) -> None:
        index = len(self._events)
        self._events.append((self._world.now(), event))
        self._world.note(str(event))
        self._world.findings.operations += 1
        match event:
            case Published(producer, sequence):
                self._published[producer, sequence] = index
            case Receipted(producer, sequence):
                self._receipted[producer, sequence] = None
            case Subscribed(subscription, kind, earliest):
                self._first.setdefault(subscription, (self._world.now(), kind))
                self._began.setdefault(subscription, -1 if earliest else index)
            case ExpiryOver(subscription):
                self._began[subscription] = index
            case Delivered(subscription, _, producer, sequence):
                self._given[subscription].add((producer, sequence))
            case _:
                pass

    def events(self) -> list[Event]:
        """In the order of the brokers: a delivery may be long on its way, and overtaken.

        What a checkpoint consumer has counts from when it is handed out, whenever it was sent.
        """
        return [event for _, event in sorted(self._events, key=self._moment)]

    def _moment(self, entry: tuple[float, Event]) -> float:
        recorded_at, event = entry
        if not isinstance(event, Delivered | AckDurable) or event.sent_at is None:
            return recorded_at
        subscribed_at, kind = self._first[event.subscription]
        return recorded_at if kind is Kind.CHECKPOINT else max(subscribed_at, event.sent_at)

    @property
    def subscriptions(self) -> Set[str]:
        """Those that have begun."""
        return self._began.keys()

    def missing(self) -> dict[str, int]:
        """How many messages each subscription still has to be given."""
        found = {}
        for subscription, began in self._began.items():
            given = self._given[subscription]
            owed = [each for each in self._receipted if self._published[each] > began]
            count = sum(message not in given for message in owed)
            if count:
                found[subscription] = count
        return found


@dataclass(slots=True)
class Stage:
    """What the clients of a run share."""

    world: ScalableWorld
    recorder: Recorder
    topic: str
    over: bool = False
    """Everything has come to rest: clients leave."""
    members: set[str] = field(default_factory=set)
    """The stream consumers that are there now."""
    delays: Random | None = None
    """Draws times of delivery; None: all messages are for now."""

    def timing(self) -> Timing | None:
        """The time of delivery of a new message, if it has one."""
        delay = None if self.delays is None else self.delays.choice(_DELAYS)
        if delay is None:
            return None
        deliver_at = self.world.now() + delay
        # Not strict: up to a tick before it. Times are rounded to milliseconds, as clocks are.
        return Timing(EPOCH_MS + round(deliver_at * 1000), deliver_at - _TICK_SECONDS - 0.002)


class ClientPlace:
    """One client process: its connections, which end at once if it is killed."""

    def __init__(self, world: ScalableWorld) -> None:
        self._world = world
        self._ends: list[End] = []
        self._killed = False
        url = f"pulsar://{ANY_HOST}:{PORT}"
        self.links = Links(url, connect=self._connect, wait_s=_ANSWER_SECONDS)

    async def _connect(
        self, factory: Callable[[], ProtocolT], host: str, port: int, /
    ) -> tuple[End, ProtocolT]:
        if self._killed:
            raise ConnectionRefusedError("this client is dead")
        end, protocol = await self._world.connect(factory, host, port)
        self._ends.append(end)
        return end, protocol

    def kill(self) -> None:
        """Its connections end without a word."""
        self._killed = True
        for end in self._ends:
            end.abort()


# --- producers


async def produce(stage: Stage, random: Random, name: str) -> None:
    """Sends until the world is ending, then waits for every receipt."""
    place = ClientPlace(stage.world)
    async with place.links:
        producer = await _new_producer(stage, random, place.links, name)
        pace = random.choice((5, 20, 60))
        while not stage.world.ending:
            await asyncio.sleep(random.expovariate(pace))
            key, payload = f"k{random.randrange(_KEYS)}", random.randbytes(20)
            await producer.send(key, payload, timing=stage.timing())
        await producer.flush()
        await producer.stop()


async def _new_producer(stage: Stage, random: Random, links: Links, name: str) -> ScalableProducer:
    window = random.choice((1, 5, 50))
    while True:
        producer = ScalableProducer(
            links,
            stage.topic,
            name,
            window=window,
            stall_s=STALL_SECONDS,
            record=stage.recorder.record,
        )
        if await _started(stage, producer.start, name):
            return producer
        await asyncio.sleep(random.expovariate(2))


async def _started(stage: Stage, start: Callable[[], Awaitable[None]], name: str) -> bool:
    """Start a client; False: it met an error that may pass."""
    try:
        await start()
    except InvariantBroken:
        raise
    except CLIENT_ERRORS as error:
        stage.world.note(f"{name} does not start: {type(error).__name__}")
        return False
    return True


# --- consumers


async def stream(stage: Stage, random: Random, name: str, subscription: str) -> None:
    """A member of a stream subscription, over its processes."""
    for life in range(1000):
        if stage.over:
            return
        place = ClientPlace(stage.world)
        member = name if random.random() < 0.7 else f"{name}-{life}"
        async with place.links:
            consumer = StreamConsumer(
                place.links,
                stage.topic,
                subscription,
                member,
                record=stage.recorder.record,
            )
            if await _started(stage, consumer.start, member):
                stage.members.add(member)
                await _Consuming(stage, random, consumer, consumer.ack).go()
                stage.members.discard(member)
            await _left(stage, random, place, consumer.stop)


async def queue(
    stage: Stage, random: Random, name: str, subscription: str, *, earliest: bool
) -> None:
    """A consumer of a queue subscription, over its processes."""
    for life in range(1000):
        if stage.over:
            return
        place = ClientPlace(stage.world)
        async with place.links:
            consumer = QueueConsumer(
                place.links,
                stage.topic,
                subscription,
                f"{name}-{life}",
                earliest=earliest,
                record=stage.recorder.record,
            )
            if await _started(stage, consumer.start, name):
                await _Consuming(stage, random, consumer, consumer.ack).go()
            await _left(stage, random, place, consumer.stop)


async def expire(stage: Stage, random: Random, subscription: str) -> None:
    """An operator lets all that a subscription has expire, now and then; messages are old."""
    world, record = stage.world, stage.recorder.record
    topic = TopicName.parse(stage.topic)
    while not world.ending:
        await asyncio.sleep(random.expovariate(0.5))
        if not world.ready or subscription not in stage.recorder.subscriptions:
            continue
        host = random.choice(world.ready)
        record(Expiring(subscription))
        done = False
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await host.ask(
                    lambda server: server.context.scalable.expire(topic, subscription, 1)
                )
            done = True
        except TimeoutError:
            world.note("expiry: no answer")
        except MagnetarError as error:
            world.note(f"expiry: {error.name}: {error}")
        record(ExpiryOver(subscription, done))


async def checkpoint(
    stage: Stage, random: Random, name: str, *, earliest: bool, group: str | None = None
) -> None:
    """Reads from checkpoint to checkpoint."""
    start = FROM_EARLIEST if earliest else FROM_LATEST
    while not stage.over:
        place = ClientPlace(stage.world)
        async with place.links:
            consumer = CheckpointConsumer(
                place.links,
                stage.topic,
                name,
                start=start,
                group=group,
                record=stage.recorder.record,
            )
            if await _started(stage, consumer.start, name):
                start = await _read(stage, random, consumer, stays=group is not None)
            await _left(stage, random, place, consumer.stop)


async def _read(
    stage: Stage, random: Random, consumer: CheckpointConsumer, *, stays: bool
) -> bytes:
    """Until it leaves; where the next one goes on."""
    taken = consumer.checkpoint()
    while not stage.over:
        try:
            await consumer.receive(_RECEIVE_SECONDS)
        except DeadlineExceeded:
            continue
        if random.random() < 0.05:
            taken = consumer.checkpoint()
        if not stays and not stage.world.ending and random.random() < 0.01:
            break
    return taken


async def _left(
    stage: Stage, random: Random, place: ClientPlace, stop: Callable[[], Awaitable[None]]
) -> None:
    """End a client, in order or not."""
    if random.random() < 0.5:
        place.kill()
    try:
        await stop()
    except InvariantBroken:
        raise
    except CLIENT_ERRORS as error:
        stage.world.note(f"a client's end: {type(error).__name__}")
    place.kill()
    if not stage.over:
        await asyncio.sleep(random.expovariate(2))


class _Consuming:
    """Takes messages, and acknowledges them at times of its own."""

    def __init__(
        self,
        stage: Stage,
        random: Random,
        consumer: StreamConsumer | QueueConsumer,
        ack: Callable[[Delivery], None],
    ) -> None:
        self._stage = stage
        self._random = random
        self._consumer = consumer
        self._ack = ack
        self._held: list[Delivery] = []
        self._eager = random.choice((0.1, 0.5, 1.0))

    async def go(self) -> None:
        stage, random = self._stage, self._random
        while not stage.over:
            try:
                self._held.append(await self._consumer.receive(_RECEIVE_SECONDS))
            except DeadlineExceeded:
                self._ack_all()
                continue
            if random.random() < self._eager or len(self._held) > _HELD_MAX:
                self._ack_some()
            if not stage.world.ending and random.random() < 0.01:
                return

    def _ack_all(self) -> None:
        for delivery in self._held:
            self._ack(delivery)
        self._held.clear()

    def _ack_some(self) -> None:
        if isinstance(self._consumer, StreamConsumer):
            self._ack_all()
        else:
            self._ack(self._held.pop(self._random.randrange(len(self._held))))
