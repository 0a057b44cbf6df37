"""Messages that expire while transactions are undecided, and while they hold them.

Owns: `Expiry`: an operator who lets one subscription of the outputs expire now and then (`run`),
and what may not happen then (`delivered`).

Invariants:
1. Nothing expires at or above the first message of an undecided transaction.
2. All below that expires, also what a transaction holds. Once that is durable it does not come
   again: not if that transaction is aborted, and not at another owner.
3. Everything random comes from its own `Random`.

Relies on: messages that are dated long ago, so that all that may expire does.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Final

from harness.simulation.scalable.world import Host
from harness.simulation.txn.clients import Taken
from harness.simulation.txn.session import OUTPUT
from harness.simulation.txn.truth import place_of
from harness.simulation.txn.world import TxnWorld
from magnetar.broker.topic.topic import Topic
from magnetar.errors import MagnetarError
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.server.app import Server
from magnetar.txn.spec import names

FLEETING: Final = "fleeting"
"""The subscription whose messages expire."""
STAY_GONE: Final = "expired messages stay gone"
"""The name of invariant 2 in violations."""

_CALL_SECONDS: Final = 30.0
_PLACE: Final = place_of(OUTPUT)


class Expiry:
    """Of one run."""

    def __init__(self, world: TxnWorld, random: Random) -> None:
        self.count = 0
        self._world = world
        self._random = random
        self._gone: list[tuple[Position, float]] = []

    async def run(self) -> None:
        """Until the world is ending."""
        while not self._world.ending:
            await asyncio.sleep(self._random.expovariate(2))
            for host in self._world.ready:
                await self._asked(host)

    async def _asked(self, host: Host) -> None:
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                await host.ask(self._expire)
        except TimeoutError:
            self._world.note("expiry: no answer")
        except MagnetarError as error:
            self._world.note(f"expiry: {error.name}")

    async def _expire(self, server: Server) -> None:
        topic = server.topics.loaded.get(TopicName.parse(OUTPUT))
        if not isinstance(topic, Topic) or FLEETING not in topic.subscriptions:
            return
        subscription, world = topic.subscriptions[FLEETING], self._world
        before, end = subscription.cursor.mark_delete, topic.max_read_position()
        await subscription.expire(1.0)
        through = subscription.cursor.mark_delete
        world.note(f"{FLEETING} has expired from {before} to {through}")
        pin = world.mirror.undecided_below(_PLACE, through, world.now())
        if through > before and pin is not None:
            world.broken(names.GATE, f"{FLEETING} has expired to {through}, above {pin}")
        if subscription.first_unacked() <= end and not topic.closing and topic.lost is None:
            world.broken(STAY_GONE, f"{subscription.first_unacked()} has not expired, to {end}")
        await subscription.ack_durable()
        self.count += through > before
        self._gone.append((through, world.now()))

    def delivered(self, taken: Taken, subscription: str) -> None:
        """Somebody was given a message."""
        if subscription != FLEETING or place_of(taken.topic) != _PLACE:
            return
        for through, since in self._gone:
            if taken.position <= through and taken.sent_at > since:
                text = f"{taken.position} comes at {taken.sent_at:.3f}, gone since {since:.3f}"
                self._world.broken(STAY_GONE, text)
