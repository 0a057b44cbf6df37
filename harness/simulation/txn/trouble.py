"""What happens to transactions in a simulation beside what happens to brokers.

Owns: `TxnTrouble`: slow and failing stores, clocks that jump, topics that are taken from their
owners, trimmed, unloaded, deleted; subscriptions that are deleted. Crashes, cuts and owner changes
are those of `scalable_trouble`.

Invariants:
1. Everything random comes from its own `Random`.
2. Nothing of it lasts: each disturbance ends by itself, and all of them with the world's ending.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from random import Random
from typing import Any, Final

from harness.simulation.scalable.world import Host
from harness.simulation.txn.session import DOOMED, INPUT
from harness.simulation.txn.world import TxnSharedHost, TxnWorld, notice
from magnetar.broker.topic.topic import Topic
from magnetar.errors import MagnetarError
from magnetar.model.names import Domain, TopicName
from magnetar.server.app import Server

DOOMED_SUBSCRIPTION: Final = "doomed"

_CALL_SECONDS: Final = 30.0
_JUMP_MS_MAX: Final = 20_000


class TxnTrouble:
    """One disturbance after the other, until the world is ending."""

    def __init__(
        self, world: TxnWorld, random: Random, counts: Counter[str], only: Collection[str] = ()
    ) -> None:
        """`only` names the kinds of disturbances that happen; empty: all."""
        self._world = world
        self._random = random
        self._counts = counts
        self._pending: list[asyncio.Task[None]] = []
        kinds: dict[str, tuple[float, Callable[[], Awaitable[None]]]] = {
            "weather": (0.2, self._bad_weather),
            "clock": (0.1, self._jump),
            "trim": (0.2, self._trim),
            "unload": (0.15, self._unload),
            "usurp": (0.25, self._usurp),
            "delete topic": (0.05, self._delete_topic),
            "delete subscription": (0.1, self._delete_subscription),
        }
        self._kinds = [kind for name, kind in kinds.items() if not only or name in only]

    async def run(self) -> None:
        pace = self._random.choice((0.5, 1.0, 2.0))
        weights = [weight for weight, _ in self._kinds]
        kinds = [kind for _, kind in self._kinds]
        while not self._world.ending:
            await asyncio.sleep(self._random.expovariate(pace))
            if not self._world.ending:
                await self._random.choices(kinds, weights)[0]()
        await asyncio.gather(*self._pending)

    async def _bad_weather(self) -> None:
        weather = self._world.weather
        weather.fail_rate = self._random.choice((0.0, 0.1, 0.3))
        weather.slow_seconds = self._random.choice((0.0, 0.05, 0.5))
        self._counts["bad weather"] += 1
        self._world.note(f"failing {weather.fail_rate}, slow {weather.slow_seconds}")
        await asyncio.sleep(self._random.choice((0.2, 1.0)))
        weather.clear()
        self._world.note("the stores are well")

    async def _jump(self) -> None:
        name = self._random.choice(list(self._world.hosts))
        clock = self._world.clock_of(name)
        clock.offset_ms = self._random.choice(
            (0, self._random.randint(-_JUMP_MS_MAX, _JUMP_MS_MAX))
        )
        self._counts["jumps"] += 1
        self._world.note(f"the clock of {name} is off by {clock.offset_ms} ms")

    # --- topics

    def _loaded(self) -> list[tuple[Host, TopicName]]:
        return [
            (host, name)
            for host in self._world.ready
            for name in host.server.topics.loaded
            if name.domain in (Domain.PERSISTENT, Domain.SEGMENT)
        ]

    async def _trim(self) -> None:
        for host, name in self._loaded():
            await self._asked(host, partial(trim, name=name))
        self._counts["trims"] += 1

    async def _unload(self) -> None:
        loaded = self._loaded()
        if loaded:
            host, name = self._random.choice(loaded)
            self._world.note(f"unload {name} at {host.name}")
            await self._asked(host, lambda server: server.topics.unload(name))

    async def _usurp(self) -> None:
        loaded = self._loaded()
        if not loaded:
            return
        owner, name = self._random.choice(loaded)
        others = [each for each in self._world.ready if each is not owner]
        if not others:
            return
        host = self._random.choice(others)
        assert isinstance(host, TxnSharedHost)
        self._counts["usurped"] += 1
        self._world.note(f"{host.name} takes {name} from {owner.name}")
        life = owner.life
        await host.usurp(name)

        async def later() -> None:
            await asyncio.sleep(self._random.choice((0.1, 1.0, 4.0)) * self._random.random())
            await notice(owner, life, name)

        self._pending.append(asyncio.create_task(later(), name="notice"))

    async def _delete_topic(self) -> None:
        name = TopicName.parse(DOOMED)
        for host, each in self._loaded():
            if each == name:
                self._counts["topics deleted"] += 1
                self._world.note(f"delete {name}")
                await self._asked(host, lambda server: server.topics.delete(name, force=True))

    async def _delete_subscription(self) -> None:
        name = TopicName.parse(INPUT)

        async def deleted(server: Server) -> None:
            topic = await server.topics.get(name, create=False)
            assert isinstance(topic, Topic)
            await topic.delete_subscription(DOOMED_SUBSCRIPTION, force=True)

        for host, each in self._loaded():
            if each == name:
                self._counts["subscriptions deleted"] += 1
                self._world.note("delete a subscription")
                await self._asked(host, deleted)

    async def _asked(self, host: Host, work: Callable[[Server], Coroutine[Any, Any, Any]]) -> None:
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                await host.ask(work)
        except TimeoutError:
            self._world.note("no answer")
        except MagnetarError as error:
            self._world.note(f"refused: {error.name}")


async def trim(server: Server, name: TopicName) -> None:
    """Let retention have its way with a topic, if it is here."""
    topic = server.topics.loaded.get(name)
    if isinstance(topic, Topic) and not (name.domain is Domain.SEGMENT and topic.terminated):
        await topic.trim()
