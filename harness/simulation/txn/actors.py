"""Random clients of transactions in a simulation: writers, workers, readers, writers of groups.

Owns: the actors: `write` (transactions over several topics and segments), `transform` (consume,
transform, produce; acknowledgements one by one, in parts of batches, or cumulative), `read` (from
the earliest message, now and then), `publish` (outside of transactions).

Invariants:
1. A transaction is committed only if all that it did was answered well.
2. Whoever holds inputs that no transaction will give back closes its consumer.
3. Workers go on until nothing is left to do (`stage.over`), all others until the world is ending.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Final

from harness.simulation.scalable.links import CLIENT_ERRORS
from harness.simulation.txn.clients import Ack, Inlet, Taken
from harness.simulation.txn.history import Attempt, Input
from harness.simulation.txn.session import INPUT, OUTPUT, Sending, Session, TxnStage, over_processes
from harness.simulation.txn.truth import place_of
from magnetar.errors import RequestError
from magnetar.wire.pb import pulsar_pb2 as pb

_TAKE_SECONDS: Final = 0.3
_TAKEN_MAX: Final = 4
_OPEN_SECONDS: Final = (0.0, 0.0, 0.1, 1.0)
"""How long a transaction stays open before its end."""


async def publish(stage: TxnStage, random: Random, name: str) -> None:
    """Plain messages: inputs, and beside transactions."""

    async def work(session: Session) -> None:
        while not stage.world.ending:
            await asyncio.sleep(random.expovariate(8))
            topic = random.choice([INPUT, INPUT, OUTPUT, *session.active])
            numbers = session.history.new_numbers(random.choice((1, 1, 2, 5)))
            await session.send(None, topic, numbers)
            if random.random() < 0.03:
                return

    await over_processes(stage, random, name, work, until=lambda: stage.world.ending)


# --- writers


async def write(stage: TxnStage, random: Random, name: str) -> None:
    """One transaction after the other."""

    async def work(session: Session) -> None:
        while not stage.world.ending:
            await asyncio.sleep(random.expovariate(4))
            attempt = await session.begin()
            targets = session.targets()
            whole = await session.send_all(attempt, targets)
            await asyncio.sleep(random.choice(_OPEN_SECONDS) * random.random())
            if whole and random.random() < 0.3:
                whole = await _write_on(session, attempt, targets)
            await finish(session, attempt, whole=whole)
            if random.random() < 0.05:
                return

    await over_processes(stage, random, name, work, until=lambda: stage.world.ending)


async def _write_on(session: Session, attempt: Attempt, targets: list[str]) -> bool:
    """Long after the first message, perhaps from another process, perhaps at another owner."""
    if session.random.random() < 0.5:
        return await session.send_all(attempt, session.targets())
    async with Session(session.stage, session.random, f"{session.name}y") as other:
        return await other.send_all(attempt, targets)


async def finish(session: Session, attempt: Attempt, *, whole: bool) -> bool:
    """Commit, abort or leave alone; whether it is certainly committed."""
    random = session.random
    if session.stage.world.ending and random.random() < 0.9:
        return await session.end(attempt, commit=whole) == "COMMITTED"
    kind = random.random()
    if kind < 0.12:
        session.history.events["left alone"] += 1
        return False
    if whole and kind < 0.2:
        await session.crossed(attempt)
        return attempt.answer == "COMMITTED"
    state = await session.end(attempt, commit=whole and kind < 0.75)
    if random.random() < 0.2:
        await session.zombie(attempt)
    if random.random() < 0.2:
        session.links.cut()
        await session.end(attempt, commit=random.random() < 0.5)
    return state == "COMMITTED"


# --- workers


async def transform(
    stage: TxnStage,
    random: Random,
    name: str,
    subscription: str,
    topics: Callable[[Session], list[str]],
    *,
    cumulative: bool,
    until: Callable[[], bool],
) -> None:
    """Consume, transform, produce."""

    async def work(session: Session) -> None:
        worker = _Worker(session, subscription, topics, cumulative=cumulative)
        try:
            await worker.go(until)
        finally:
            await worker.give_back()

    await over_processes(stage, random, name, work, until=until)


class _Worker:
    """A consumer in one process."""

    def __init__(
        self,
        session: Session,
        subscription: str,
        topics: Callable[[Session], list[str]],
        *,
        cumulative: bool,
    ) -> None:
        self._session = session
        self._random = session.random
        self._history = session.history
        self._subscription = subscription
        self._topics = topics
        self._cumulative = cumulative
        self._inlets: dict[str, Inlet] = {}
        self._rest: deque[tuple[Inlet, Taken]] = deque()
        """Batches of which some messages are left."""

    async def go(self, until: Callable[[], bool]) -> None:
        while not until():
            await self._open_inlets()
            taken = await self._take()
            if not taken:
                continue
            if not await self._transform(taken):
                await self.give_back()
            if self._random.random() < 0.02 and not self._session.stage.world.ending:
                return

    async def give_back(self) -> None:
        inlets, self._inlets = list(self._inlets.values()), {}
        self._rest.clear()
        for inlet in inlets:
            await inlet.close()

    async def _open_inlets(self) -> None:
        kind = pb.CommandSubscribe.Failover if self._cumulative else pb.CommandSubscribe.Shared
        for topic in self._topics(self._session):
            inlet = self._inlets.get(topic)
            if inlet is not None and inlet.failure is None:
                continue
            if inlet is not None:
                self._rest = deque(each for each in self._rest if each[0] is not inlet)
            try:
                self._inlets[topic] = await Inlet.open(
                    self._session.links, self._history, topic, self._subscription, kind
                )
            except CLIENT_ERRORS as error:
                self._session.stage.world.note(f"{self._subscription}: {type(error).__name__}")
                await asyncio.sleep(0.2)
                continue

    async def _take(self) -> list[tuple[Inlet, Taken]]:
        """What one transaction is to transform: entries of one consumer."""
        while self._rest:
            inlet, rest = self._rest.popleft()
            if all(each.position != rest.position for each in inlet.waiting):
                return [(inlet, rest)]
            # The whole entry came again: that is what counts now.
        ready = [each for each in self._inlets.values() if each.waiting]
        if not ready:
            if self._inlets:
                await self._wait()
            else:
                await asyncio.sleep(_TAKE_SECONDS)
            return []
        inlet = self._random.choice(ready)
        if self._cumulative and not self._is_next(inlet):
            # What comes before was given back, and is on its way.
            await self.give_back()
            return []
        found: list[tuple[Inlet, Taken]] = []
        while inlet.waiting and len(found) < self._random.randint(1, _TAKEN_MAX):
            taken = await inlet.next(_TAKE_SECONDS)
            assert taken is not None
            # What came again is the newer copy of the two.
            found = [each for each in found if each[1].position != taken.position]
            found.append((inlet, taken))
        return found

    def _is_next(self, inlet: Inlet) -> bool:
        """Whether everything before is transformed: a cumulative ack says that it is."""
        first = self._history.first_untransformed(self._subscription, place_of(inlet.topic))
        return first is None or inlet.waiting[0].position <= first

    async def _wait(self) -> None:
        """Until something comes to any of them."""
        waits = [asyncio.ensure_future(each.arrival()) for each in self._inlets.values()]
        await asyncio.wait(waits, timeout=_TAKE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def _transform(self, taken: list[tuple[Inlet, Taken]]) -> bool:
        """One transaction; False: the consumer must be closed, to give inputs back."""
        session, random = self._session, self._random
        inlet = taken[0][0]
        attempt = await session.begin()
        acks = [self._part(*each) for each in taken]
        steps = [lambda: self._acked(attempt, inlet, acks), lambda: self._sent(attempt, acks)]
        if random.random() < 0.5:
            steps.reverse()
        whole = await steps[0]()
        whole = whole and await steps[1]()
        if not session.stage.world.ending:
            await asyncio.sleep(random.choice(_OPEN_SECONDS) * random.random())
        committed = await finish(session, attempt, whole=whole)
        if not whole or self._cumulative:
            return committed and whole
        # What was acknowledged and not committed comes again by itself, sooner or later.
        return committed or random.random() < 0.5

    def _part(self, inlet: Inlet, taken: Taken) -> Ack:
        """All messages of an entry, or of a batch some: the others are left for the next."""
        bits, size = taken.open_bits, len(taken.numbers)
        if bits.bit_count() > 1 and self._random.random() < 0.4 and not self._cumulative:
            low = bits & -bits
            self._rest.append((inlet, taken._replace(open_bits=bits & ~low)))
            bits = low
        return Ack(taken.position, size, bits)

    async def _sent(self, attempt: Attempt, acks: list[Ack]) -> bool:
        for _ in acks:
            numbers = self._history.new_numbers(1)
            if await self._session.send(attempt, OUTPUT, numbers) is not Sending.STORED:
                return False
        return True

    async def _acked(self, attempt: Attempt, inlet: Inlet, acks: list[Ack]) -> bool:
        asked_at = self._session.stage.world.now()
        try:
            await inlet.ack(acks, attempt.txn, cumulative=self._cumulative)
        except RequestError as error:
            self._session.stage.world.note(f"{attempt.name} acknowledges: {error.wire_code!r}")
            return False
        except CLIENT_ERRORS as error:
            self._session.stage.world.note(f"{attempt.name} acknowledges: {type(error).__name__}")
            return False
        place = place_of(inlet.topic)
        inputs: list[Input] = [
            (self._subscription, place, ack.position, index)
            for ack in acks
            for index in range(ack.size)
            if ack.bits >> index & 1
        ]
        self._history.acked(attempt, inputs)
        self._history.taken_late(attempt, asked_at, f"an acknowledgement of {acks}")
        return True


# --- readers


async def read(stage: TxnStage, random: Random, name: str) -> None:
    """Read some topic from its beginning, for a while; then another."""
    readings = 0

    async def work(session: Session) -> None:
        nonlocal readings
        while not stage.over:
            readings += 1
            topic = random.choice([OUTPUT, INPUT, *session.segments])
            inlet = await Inlet.open(
                session.links, session.history, topic, f"{name}-{readings}", durable=False
            )
            until = stage.world.now() + random.choice((0.2, 1.0, 4.0))
            try:
                while stage.world.now() < until and not stage.over:
                    await inlet.next(_TAKE_SECONDS)
            finally:
                await inlet.close()

    await over_processes(stage, random, name, work, until=lambda: stage.over)
