"""One client process that uses transactions in a simulation.

Owns: `TxnStage`, what all clients of a run share; `Session`, one process with its connections and
producers: how it begins, sends, acknowledges and ends over all that happens to brokers.

Invariants:
1. Everything random comes from the actor's own `Random`, made from the seed and its name.
2. A send whose receipt did not come is sent again with the same sequence id, or its transaction is
   not committed. So it is with an end whose answer did not come: it is asked for again.
3. A process that is killed says nothing; the next one of that actor has another name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Any, Final, Self, TypeVar

from harness.simulation.scalable.actors import ClientPlace
from harness.simulation.scalable.links import CLIENT_ERRORS, DagWatch
from harness.simulation.txn.clients import Outlets, begin, end
from harness.simulation.txn.history import Attempt, TxnHistory
from harness.simulation.txn.world import TxnWorld
from magnetar.errors import DeadlineExceeded, RequestError, WireCode
from magnetar.txn.coordinator_partitions import PARTITIONS
from magnetar.txn.records import State

Result = TypeVar("Result")

INPUT: Final = "persistent://public/default/in"
OUTPUT: Final = "persistent://public/default/out"
DOOMED: Final = "persistent://public/default/doomed"
"""It is deleted now and then."""
ORDERS: Final = "topic://public/default/orders"

_SEND_TRIES: Final = 4
_END_TRIES: Final = 60
_TIMEOUTS_MS: Final = (300, 2000, 5000, 8000)
_AGAIN: Final = frozenset(
    {
        WireCode.SERVICE_NOT_READY,
        WireCode.METADATA,
        WireCode.PERSISTENCE,
        WireCode.TOO_MANY_REQUESTS,
        WireCode.TRANSACTION_COORDINATOR_NOT_FOUND,
        WireCode.UNKNOWN,
    }
)
"""After these the same is asked for again."""


@dataclass(slots=True)
class TxnStage:
    """What the clients of a run share."""

    world: TxnWorld
    history: TxnHistory
    over: bool = False
    """Everything has come to rest: clients leave."""
    segments: set[str] = field(default_factory=set)
    """All that were seen of the scalable topic."""


class Sending(Enum):
    """What became of a send."""

    STORED = "stored"
    REFUSED = "refused"
    """Nothing was stored."""
    UNKNOWN = "unknown"


class Session:
    """One process. Use it as a context manager."""

    def __init__(self, stage: TxnStage, random: Random, name: str) -> None:
        self.stage = stage
        self.history = stage.history
        self.random = random
        self.name = name
        self.place = ClientPlace(stage.world)
        self.links = self.place.links
        self._watch = DagWatch(self.links, ORDERS, name, create_if_missing=False)
        self._outlets = Outlets(self.links, name)
        self._sequence = 0
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._open.enter_async_context(self.links)
        await self._open.enter_async_context(self._watch)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.place.kill()
        await self._open.aclose()

    # --- where to

    @property
    def active(self) -> list[str]:
        """The segments that take messages, as far as this process knows."""
        layout = self._watch.layout
        return [] if layout is None else [self._watch.topic_of(each) for each in layout.active]

    @property
    def segments(self) -> list[str]:
        """All segments."""
        layout = self._watch.layout
        found = [] if layout is None else [*layout.segments.values()]
        topics = [self._watch.topic_of(each) for each in found]
        self.stage.segments.update(topics)
        return topics

    def targets(self) -> list[str]:
        """Some topics to write to, perhaps several segments of one."""
        choice = [OUTPUT, *self.active]
        if self.random.random() < 0.3:
            choice.append(DOOMED)
        return self.random.sample(choice, min(len(choice), self.random.choice((1, 1, 2, 3))))

    # --- transactions

    async def begin(
        self,
        group: dict[str, Any] | None = None,
        tc: int | None = None,
        timeout_ms: int | None = None,
    ) -> Attempt:
        """A new transaction; CLIENT_ERRORS: there is none, or nobody knows of it."""
        coordinator = self.random.randrange(PARTITIONS) if tc is None else tc
        timeout_ms = timeout_ms or self.random.choice(_TIMEOUTS_MS)
        return self.history.began(await begin(self.links, coordinator, timeout_ms, group))

    async def send(self, attempt: Attempt | None, topic: str, numbers: tuple[int, ...]) -> Sending:
        """Send until there is an answer, or it seems that none will come."""
        self._sequence += 1
        sequence = self._sequence
        txn = None if attempt is None else attempt.txn
        self.history.sent(attempt, numbers, receipt=False)
        outcome = Sending.REFUSED
        for _ in range(_SEND_TRIES):
            asked_at = self.stage.world.now()
            try:
                outlet = await self._outlets.get(topic)
                await outlet.send(sequence, numbers, txn)
            except RequestError as error:
                self.stage.world.note(f"{self.name} sends {numbers}: {error.wire_code!r}")
                if error.wire_code in (WireCode.NOT_ALLOWED, WireCode.TOPIC_TERMINATED):
                    return outcome
                if error.wire_code not in _AGAIN:
                    outcome = Sending.UNKNOWN  # such as: the producer's former connection is there
            except CLIENT_ERRORS as error:
                self.stage.world.note(f"{self.name} sends {numbers}: {type(error).__name__}")
                outcome = Sending.UNKNOWN
            else:
                self.history.sent(attempt, numbers, receipt=True)
                if attempt is not None:
                    self.history.taken_late(attempt, asked_at, f"{numbers} to {topic}")
                return Sending.STORED
            await asyncio.sleep(self.random.choice((0.0, 0.05, 0.3)))
        return Sending.UNKNOWN

    async def send_all(self, attempt: Attempt, topics: Sequence[str]) -> bool:
        """Some messages to each; whether all are stored."""
        whole = True
        for topic in topics:
            for _ in range(self.random.choice((1, 1, 2))):
                numbers = self.history.new_numbers(self.random.choice((1, 1, 3)))
                whole &= await self.send(attempt, topic, numbers) is Sending.STORED
                if not whole:
                    return False
        return whole

    async def end(self, attempt: Attempt, *, commit: bool) -> State | None:
        """Ask until there is an answer; how it ended, if that is known."""
        asked: State = "COMMITTED" if commit else "ABORTED"
        for _ in range(_END_TRIES):
            try:
                refusal = await end(self.links, attempt.txn, commit=commit)
            except CLIENT_ERRORS as error:
                self.stage.world.note(f"{attempt.name} {asked}: {type(error).__name__}")
            else:
                if refusal is None or refusal not in _AGAIN:
                    return self.history.ended(attempt, asked, refusal)
                self.stage.world.note(f"{attempt.name} {asked}: {refusal.name}")
            if self.stage.over:
                return None
            await asyncio.sleep(self.random.choice((0.01, 0.2, 0.5)))
        return None

    async def crossed(self, attempt: Attempt) -> None:
        """Commit and abort at once, over two connections: one of them wins."""
        async with Session(self.stage, self.random, f"{self.name}x") as other:
            await asyncio.gather(self.end(attempt, commit=True), other.end(attempt, commit=False))

    async def zombie(self, attempt: Attempt) -> None:
        """Go on as if the transaction were not over."""
        topic = self.random.choice([OUTPUT, *self.active])
        await self.send(attempt, topic, self.history.new_numbers(1))


async def over_processes(
    stage: TxnStage,
    random: Random,
    name: str,
    work: Callable[[Session], Awaitable[None]],
    *,
    until: Callable[[], bool],
) -> None:
    """Give `work` one process after the other until it may end."""
    life = 0
    while not until():
        life += 1
        async with Session(stage, random, f"{name}-{life}") as session:
            try:
                await work(session)
            except CLIENT_ERRORS as error:
                stage.world.note(f"{name}: {type(error).__name__}")
        if not until():
            await asyncio.sleep(random.choice((0.02, 0.2, 0.6)))


async def answered(stage: TxnStage, random: Random, ask: Callable[[], Awaitable[Result]]) -> Result:
    """Ask until there is an answer; RequestError: a refusal that does not pass."""
    for _ in range(_END_TRIES):
        try:
            return await ask()
        except RequestError as error:
            if error.wire_code not in _AGAIN:
                raise
        except CLIENT_ERRORS as error:
            stage.world.note(f"no answer: {type(error).__name__}")
        await asyncio.sleep(random.choice((0.01, 0.2, 0.5)))
    raise DeadlineExceeded("no answer comes")


def member(application: str, epoch: int, sequence: int) -> dict[str, Any]:
    return {"application": application, "epoch": epoch, "sequence": sequence}
