"""The calm end of a run of transactions: everything comes to rest, and is forgotten.

Owns: `Rest`: `come` (every input is transformed, every transaction decided and done with),
`waits_quietly` (invariant 11), `read_all` (a late reader sees exactly the committed set) and
`forgotten` (invariant 12, after trimming and the retention of outcomes).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import Any, Final

from harness.simulation.scalable.links import CLIENT_ERRORS
from harness.simulation.txn.clients import Inlet
from harness.simulation.txn.expiry import FLEETING
from harness.simulation.txn.session import DOOMED, INPUT, ORDERS, OUTPUT, Sending, Session, TxnStage
from harness.simulation.txn.trouble import DOOMED_SUBSCRIPTION
from harness.simulation.txn.truth import place_of
from magnetar.broker.dispatch.dispatcher import ReadWindow
from magnetar.broker.topic.topic import Topic
from magnetar.errors import DeadlineExceeded, MagnetarError
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.server.app import Server
from magnetar.txn.spec import names

REST_SECONDS: Final = 120.0
"""What it may take until nothing is left to do."""

_READ_SECONDS: Final = 30.0
_SETTLED_SECONDS: Final = 1.0
_QUIET_SECONDS: Final = 4.0
_LOOKS_MAX: Final = 1
"""How often a topic may be looked at while nothing happens to it."""
_AWAKE_SECONDS: Final = 3.0
_FORGET_SECONDS: Final = 200
_TRIES: Final = 5


class Rest:
    """Of one run."""

    def __init__(self, stage: TxnStage, random: Random, rest_seconds: float) -> None:
        self._stage = stage
        self._world = stage.world
        self._mirror = stage.world.mirror
        self._random = random
        self._rest_seconds = rest_seconds

    async def come(self) -> None:
        """Wait until nothing is left to do."""
        deadline = self._world.now() + self._rest_seconds
        while self._world.now() < deadline and not self._world.findings.violations:
            if not self._left():
                self._world.note("at rest")
                return
            await asyncio.sleep(0.5)
        if not self._world.findings.violations:
            self._world.broken(names.ALL_OR_NOTHING, f"no rest: {self._left()}")

    def _left(self) -> str:
        """What is still under way."""
        undecided, ops = self._mirror.undecided, self._mirror.ops
        inputs = self._stage.history.untransformed()
        found = []
        if undecided:
            found.append(f"{len(undecided)} open transactions: {undecided[:3]}")
        if ops:
            found.append(f"{len(ops)} ops: {ops[:3]}")
        if inputs:
            found.append(f"inputs: {inputs}")
        return "; ".join(found)

    # --- invariant 11

    async def waits_quietly(self) -> None:
        """A consumer behind an open transaction does nothing, and gets it when it is committed."""
        async with Session(self._stage, self._random, "quiet") as session:
            for _ in range(_TRIES):
                try:
                    await self._wait_behind(session)
                except CLIENT_ERRORS as error:
                    self._world.note(f"quiet: {type(error).__name__}: {error}")
                    await asyncio.sleep(1.0)
                else:
                    return
        self._world.broken(names.NO_POLL, "nothing disturbs, and no transaction can be made")

    async def _wait_behind(self, session: Session) -> None:
        history = self._stage.history
        inlet = await Inlet.open(session.links, history, OUTPUT, "quiet", durable=False)
        await self._read_up(inlet)
        attempt = await session.begin(timeout_ms=60_000)
        numbers = history.new_numbers(1)
        if await session.send(attempt, OUTPUT, numbers) is not Sending.STORED:
            await inlet.close()
            await session.end(attempt, commit=False)
            raise DeadlineExceeded("it could not be sent")
        await session.send(None, OUTPUT, history.new_numbers(1))
        await asyncio.sleep(_SETTLED_SECONDS)
        looks = await self._looks(OUTPUT)
        if looks > _LOOKS_MAX:
            text = (
                f"with nothing to read, {OUTPUT} is looked at {looks} times in {_QUIET_SECONDS} s"
            )
            self._world.broken(names.NO_POLL, text)
        await session.end(attempt, commit=True)
        taken = await inlet.next(_AWAKE_SECONDS)
        if taken is None or taken.numbers != numbers:
            text = f"{attempt.name} is {attempt.answer}; after {_AWAKE_SECONDS} s came {taken}"
            self._world.broken(names.NO_POLL, text)
        await inlet.close()

    async def _looks(self, name: str) -> int:
        """How often dispatch looks, for a while, how far it may read."""
        looks = 0
        topics = [
            host.server.topics.loaded.get(TopicName.parse(name)) for host in self._world.ready
        ]
        loaded = [each for each in topics if isinstance(each, Topic)]

        def counted(look: Callable[[], ReadWindow]) -> ReadWindow:
            nonlocal looks
            looks += 1
            return look()

        before = [each.read_window for each in loaded]
        for topic, look in zip(loaded, before, strict=True):
            topic.read_window = partial(counted, look)
        await asyncio.sleep(_QUIET_SECONDS)
        for topic, look in zip(loaded, before, strict=True):
            topic.read_window = look
        return looks

    async def _read_up(self, inlet: Inlet) -> None:
        """Until the last message that is there."""
        last = self._last(inlet.topic)
        taken = None
        while last is not None and (taken is None or taken.position < last):
            taken = await inlet.next(_READ_SECONDS)
            if taken is None:
                raise DeadlineExceeded(f"{last} of {inlet.topic} does not come")

    def _last(self, topic: str) -> Position | None:
        """The last message that consumers are to see."""
        kept = [
            position
            for position, _ in self._mirror.visible(place_of(topic))
            if not self._mirror.is_dropped(position)
        ]
        return max(kept, default=None)

    # --- what is there

    async def read_all(self) -> None:
        """Whoever reads from the earliest message now gets all that is committed and kept."""
        async with Session(self._stage, self._random, "late") as session:
            for topic in (INPUT, OUTPUT, *sorted(self._stage.segments)):
                if self._last(topic) is None:
                    continue
                if not await self._is_read(session, topic):
                    text = f"a late reader of {topic} does not get {self._last(topic)}"
                    self._world.broken(names.ALL_OR_NOTHING, text)

    async def _is_read(self, session: Session, topic: str) -> bool:
        for attempt in range(_TRIES):
            try:
                inlet = await Inlet.open(
                    session.links, self._stage.history, topic, f"late-{attempt}", durable=False
                )
                await self._read_up(inlet)
                await inlet.close()
            except CLIENT_ERRORS as error:
                self._world.note(f"late: {type(error).__name__}")
                await asyncio.sleep(1.0)
            else:
                return True
        return False

    # --- invariant 12

    async def forgotten(self) -> None:
        """Trim everything, delete the scalable topic, and wait until nothing is known."""
        for topic, name in ((INPUT, DOOMED_SUBSCRIPTION), (OUTPUT, FLEETING)):
            await self._done(partial(_without, name=topic, subscription=name))
        for topic in (INPUT, OUTPUT):
            await self._done(partial(_turned_over, name=topic))
        await self._done(_deleted)
        for _ in range(_FORGET_SECONDS):
            if not self._mirror.left():
                break
            await asyncio.sleep(1.0)
        self._mirror.check_empty()

    async def _done(self, work: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
        for _ in range(_TRIES):
            for host in self._world.ready:
                try:
                    await host.ask(work)
                except MagnetarError as error:
                    self._world.note(f"{host.name}: {error.name}: {error}")
                else:
                    return
            await asyncio.sleep(1.0)
        self._world.broken(names.NO_LEAK, "topics cannot be trimmed or deleted")


async def _without(server: Server, name: str, subscription: str) -> None:
    """Nobody else keeps what is there."""
    topic = await server.topics.get(TopicName.parse(name))
    assert isinstance(topic, Topic)
    if subscription in topic.subscriptions:
        await topic.delete_subscription(subscription, force=True)


async def _turned_over(server: Server, name: str) -> None:
    """Begin a new ledger, and drop those before it."""
    topic = TopicName.parse(name)
    await server.topics.get(topic)
    await server.topics.unload(topic)
    loaded = await server.topics.get(topic)
    assert isinstance(loaded, Topic)
    await loaded.trim()


async def _deleted(server: Server) -> None:
    name = TopicName.parse(DOOMED)
    await server.topics.get(name)
    await server.topics.delete(name, force=True)
    await server.context.scalable.delete(TopicName.parse(ORDERS), force=True)
