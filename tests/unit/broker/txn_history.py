"""Random lives of a topic with transactions, and what must hold of them.

Steps are begun one after another and overlap: nobody waits for a publish or an end, brokers die or
are superseded in between (a superseded one lives on), headers of finished transactions are
collected. What consumers get is judged at once, everything else at the end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from magnetar.broker.dispatch.consumer import Consumer
from magnetar.broker.publish.producer import Producer
from magnetar.broker.topic.topic import Topic
from magnetar.errors import DiskFailed, MagnetarError
from magnetar.txn.ids import metadata_id
from magnetar.txn.records import State, header_key
from magnetar.wire.messages import TxnId
from tests.unit.broker.txn_world import (
    Broker,
    TxnWorld,
    attach,
    cut,
    heal,
    joined,
    log_of,
    read_all,
    sent,
    text_of,
)
from tests.unit.broker.world import due, message

TXNS_AT_ONCE = 4
PLAIN = -1
LONG = 0.2
ACTIONS = (
    *("publish",) * 8,
    *("commit", "abort") * 2,
    "kill",
    "reload",
    "take-over",
    "collect",
    "cut",
    "fail",
)


class Step(NamedTuple):
    action: str
    number: int
    """Which transaction, where that matters."""
    pause: float


def random_steps(rng: random.Random, count: int) -> list[Step]:
    """Transactions come and go: at any time some numbers in a row are in use."""
    found = []
    for at in range(count):
        number = PLAIN if rng.random() < 0.2 else at // 6 + rng.randrange(TXNS_AT_ONCE)
        found.append(Step(rng.choice(ACTIONS), number, rng.choice((0.0, 0.0, 0.01, LONG))))
    return found


@dataclass
class Session:
    """A broker with the topic loaded, its producer and its consumer."""

    broker: Broker
    topic: Topic
    producer: Producer
    reading: Consumer
    texts: list[str] = field(default_factory=list)
    """What was sent, by sequence id."""


class History:
    """One life. `local`: the broker of the topic coordinates; else somebody else does."""

    def __init__(self, world: TxnWorld, seed: int, *, local: bool) -> None:
        self.world = world
        self.local = local
        self.dedup = seed % 3 == 0
        self.rng = random.Random(seed)
        world.slow = 0.0
        self.coordinator = world.broker()
        self.sessions: list[Session] = []
        self.begun: dict[TxnId, str] = {}
        self.asked: dict[TxnId, State] = {}
        """The end that was asked for first."""
        self.texts: dict[str, TxnId | None] = {}
        self.acknowledged: set[str] = set()
        self.refused: set[str] = set()
        self.tasks: list[asyncio.Task[None]] = []
        self.clients: list[asyncio.Task[None]] = []
        self.loads = 0
        self.wrongly_shown: list[str] = []

    # --- the life

    async def live(self, steps: list[Step]) -> None:
        await self._load()
        for step in steps:
            self.world.slow = self.rng.choice((0.0, 0.003, 0.05))
            await self._do(step)
            await asyncio.sleep(step.pause)
        self.world.slow = 0.0
        for txn in self.begun:
            await self._end(txn, self.rng.choice(("COMMITTED", "ABORTED")))
        await asyncio.gather(*self.tasks)
        await asyncio.sleep(20)  # watches, retries, repairs
        await self._check_end()

    async def _do(self, step: Step) -> None:
        txn = None if step.number == PLAIN else self._id(step.number)
        if step.action == "publish":
            if txn is not None and step.pause < LONG:  # else it may be one that never began
                await self._begin(txn)
            self._publish(self.rng.choice(self.sessions[-2:]), txn)
        elif step.action == "commit" and txn is not None:
            self._start(self._end(txn, "COMMITTED"))
        elif step.action == "abort" and txn is not None:
            self._start(self._end(txn, "ABORTED"))
        elif step.action == "kill":
            self._leave()[0].broker.kill()
            await self._load()
        elif step.action == "reload":
            for session in self._leave():
                await _closed(session)
            await self._load()
        elif step.action == "take-over":
            await self._load()
        elif step.action == "collect":
            await self._collect()
        elif step.action == "cut":
            self._start(self._cut(self.sessions[-1].broker))
        elif step.action == "fail":
            self.world.ledgers.fail_next(DiskFailed("broken"))

    def _id(self, number: int) -> TxnId:
        return metadata_id(0, number)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(work))

    async def _cut(self, broker: Broker) -> None:
        """Its store is out of reach for a while."""
        cut(broker)
        await asyncio.sleep(self.rng.choice((0.01, 0.5, 3.0)))
        heal(broker)

    async def _load(self) -> None:
        while True:
            try:
                await self._try_to_load()
                return
            except MagnetarError:
                await asyncio.sleep(0.1)  # an append that fails may be one of the loading

    async def _try_to_load(self) -> None:
        broker = self.world.broker(coordinates=self.local)
        topic = await broker.topic(dedup=self.dedup)
        self.loads += 1
        producer = await joined(topic, f"p{self.loads}")  # with numbers of its own
        reading = await attach(topic)
        session = Session(broker, topic, producer, reading)
        self.clients += [
            asyncio.create_task(self._receive(session)),
            asyncio.create_task(self._consume(session)),
        ]
        self.sessions.append(session)

    def _leave(self) -> list[Session]:
        gone, self.sessions = self.sessions, []
        for session in gone[:-1]:
            session.broker.kill()
        return gone[-1:]

    async def _begin(self, txn: TxnId) -> None:
        if txn in self.begun:
            return
        self.begun[txn] = "begun"
        broker = self.sessions[-1].broker if self.local else self.coordinator
        await self.coordinator.begin(txn)
        if self.local:
            header = await self.coordinator.store.header(txn)
            assert header is not None
            broker.outcomes.opened(header.id)

    def _publish(self, session: Session, txn: TxnId | None) -> None:
        if session.producer.stopped:
            return
        number, text = len(session.texts), f"{len(self.texts)}"
        self.texts[text] = txn
        session.texts.append(text)
        name = session.producer.name
        session.producer.send(
            message(number, text) if txn is None else sent(number, txn, text, producer=name)
        )

    async def _end(self, txn: TxnId, state: State) -> None:
        if txn not in self.begun or txn in self.asked:
            return
        self.asked[txn] = state
        await self.coordinator.end(txn, state)
        for session in self.sessions if self.local else ():
            session.broker.outcomes.learn(txn, state)

    async def _collect(self) -> None:
        """As GC does: only headers of which no op is left."""
        for txn in list(self.begun):
            state = await self.coordinator.store.state(txn)
            if state in ("COMMITTED", "ABORTED") and not await self.coordinator.store.ops(txn):
                await self.coordinator.store.metadata.delete(header_key(txn))

    # --- what clients see

    async def _receive(self, session: Session) -> None:
        while found := await due(session.producer):
            for receipt in found:
                text = session.texts[receipt.sequence_id]
                (self.acknowledged if receipt.error is None else self.refused).add(text)

    async def _consume(self, session: Session) -> None:
        reading, seen = session.reading, 0
        while not reading.is_stopped:
            seen = await reading.outbox_ready.past(seen)
            for each in reading.take():
                self._check_visible(text_of(each.payload))
                try:
                    session.topic.subscriptions["s"].cursor.ack(each.position)
                except MagnetarError:
                    return  # superseded

    def _check_visible(self, text: str) -> None:
        if not self._is_committed(text):
            self.wrongly_shown.append(f"{text} of {self.texts.get(text)}")

    # --- the end

    async def _check_end(self) -> None:
        assert not self.wrongly_shown
        for client in self.clients:
            if client.done():
                client.result()
        fresh = await self._fresh()
        expected = [text for text in await log_of(fresh.topic) if self._is_committed(text)]
        assert await read_all(fresh.topic, "end") == expected
        shown = set(expected)
        lost = {text for text in self.acknowledged if self._is_committed(text)} - shown
        assert not lost, f"acknowledged, committed, and not seen: {lost}"
        assert not shown & self.refused, "refused and seen"
        assert len(expected) == len(shown), "seen twice"
        await asyncio.sleep(20)
        ops = [key for key in await fresh.keys_of() if "/op/" in key]
        assert not ops, f"left behind: {ops}"

    def _is_committed(self, text: str) -> bool:
        if text not in self.texts:
            return False  # a marker
        txn = self.texts[text]
        return txn is None or self.asked.get(txn) == "COMMITTED"

    async def _fresh(self) -> _Fresh:
        for session in self._leave():
            await _closed(session)
        broker = self.world.broker()
        return _Fresh(broker, await broker.topic())


class _Fresh(NamedTuple):
    broker: Broker
    topic: Topic

    async def keys_of(self) -> list[str]:
        return await self.broker.keys()


async def _closed(session: Session) -> None:
    try:
        await session.topic.close()
    except MagnetarError:
        return  # superseded
