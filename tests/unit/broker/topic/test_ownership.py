"""Topics of several brokers: claimed once, released, lost with the session, found by all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest

from magnetar.broker.topic.ownership import LIVING, OWNERS, SharedOwnership, preferred
from magnetar.errors import ServiceNotReady
from magnetar.managed_ledger.names import encode_name
from magnetar.metadata.memory import MemoryMetadata, MemoryStore
from magnetar.model.names import TopicName
from magnetar.runtime.clock import LoopClock
from magnetar.testing.virtual import virtual_time

A, B, C = (f"pulsar://{name}:6650" for name in "abc")
NAME = TopicName.parse("segment://public/default/orders/0000-7fff-1")
OTHER = TopicName.parse("segment://public/default/orders/8000-ffff-2")
TIMEOUT_S = 9.0


class World:
    def __init__(self) -> None:
        self.clock = LoopClock(1_700_000_000_000)
        self.metadata = MemoryMetadata(self.clock, delay=lambda: asyncio.sleep(0.001))

    async def broker(self, url: str) -> tuple[SharedOwnership, MemoryStore]:
        store = self.metadata.connect(TIMEOUT_S)
        ownership = SharedOwnership(store, url, self.clock)
        await ownership.start()
        return ownership, store


def run(main: Coroutine[Any, Any, None]) -> None:
    virtual_time.run(main)


def test_a_topic_has_one_owner() -> None:
    async def main() -> None:
        world = World()
        a, _ = await world.broker(A)
        b, _ = await world.broker(B)
        await a.claim(NAME)
        await a.claim(NAME)
        with pytest.raises(ServiceNotReady, match=A):
            await b.claim(NAME)
        await b.claim(OTHER)
        assert [await each.owner_url(NAME) for each in (a, b)] == [A, A]
        assert await a.owner_url(OTHER) == B
        await a.release(NAME)
        await a.release(NAME)
        await b.claim(NAME)
        assert await a.owner_url(NAME) == B

    run(main())


def test_of_two_that_claim_at_once_one_gets_it() -> None:
    async def main() -> None:
        world = World()
        brokers = [(await world.broker(url))[0] for url in (A, B, C)]
        claims = [each.claim(NAME) for each in brokers]
        results = await asyncio.gather(*claims, return_exceptions=True)
        assert [result for result in results if result is None] == [None]
        assert all(isinstance(each, ServiceNotReady) for each in results if each is not None)

    run(main())


def test_without_an_owner_all_choose_the_same_living_broker() -> None:
    async def main() -> None:
        world = World()
        brokers = [(await world.broker(url))[0] for url in (A, B, C)]
        for number in range(20):
            name = TopicName.parse(f"persistent://public/default/{number}")
            assert len({await each.owner_url(name) for each in brokers}) == 1

    run(main())


def test_a_broker_that_goes_moves_only_its_own_topics() -> None:
    names = [TopicName.parse(f"persistent://public/default/{number}") for number in range(300)]
    before = {name: preferred(name, [A, B, C]) for name in names}
    after = {name: preferred(name, [C, A]) for name in names}
    assert all(after[name] == before[name] for name in names if before[name] != B)
    assert all(count > 60 for count in Counter(before.values()).values())


def test_with_the_session_everything_is_lost() -> None:
    async def main() -> None:
        world = World()
        a, store = await world.broker(A)
        b, _ = await world.broker(B)
        await a.claim(NAME)
        world.metadata.cut(store)
        with pytest.raises(ServiceNotReady):
            await b.claim(NAME)
        # It knows before another can take its place.
        await a.lost.past(0)
        with pytest.raises(ServiceNotReady):
            await b.claim(NAME)
        with pytest.raises(ServiceNotReady):
            await a.claim(NAME)
        await asyncio.sleep(TIMEOUT_S)
        await b.claim(NAME)
        world.metadata.heal(store)
        await asyncio.sleep(1.0)
        with pytest.raises(ServiceNotReady, match=B):
            await a.claim(NAME)
        await a.release(NAME)
        assert await a.owner_url(NAME) == B
        live_brokers = {record.value.decode() async for record in store.scan(LIVING)}
        assert live_brokers == {A, B}

    run(main())


def test_a_session_that_comes_back_early_claims_anew() -> None:
    async def main() -> None:
        world = World()
        a, store = await world.broker(A)
        await a.claim(NAME)
        world.metadata.cut(store)
        await a.lost.past(0)
        world.metadata.heal(store)
        await asyncio.sleep(1.0)
        assert await store.get(f"{OWNERS}/{encode_name(str(NAME))}") is None
        await a.claim(NAME)
        assert await a.owner_url(NAME) == A

    run(main())


def test_a_restarted_broker_has_its_topics_at_once() -> None:
    async def main() -> None:
        world = World()
        a, store = await world.broker(A)
        b, _ = await world.broker(B)
        await a.claim(NAME)
        await a.stop()
        world.metadata.drop(store)
        again, _ = await world.broker(A)
        with pytest.raises(ServiceNotReady):
            await b.claim(NAME)
        await again.claim(NAME)
        await asyncio.sleep(3 * TIMEOUT_S)  # the end of the former session takes nothing along
        with pytest.raises(ServiceNotReady, match=A):
            await b.claim(NAME)

    run(main())


def test_a_cut_while_claiming_or_releasing_is_no_harm() -> None:
    async def main() -> None:
        world = World()
        a, store = await world.broker(A)
        claim = asyncio.create_task(a.claim(NAME))
        await asyncio.sleep(0.0025)
        world.metadata.cut(store, in_flight_arrives=True)
        with pytest.raises(ServiceNotReady):
            await claim
        world.metadata.heal(store)
        await a.claim(NAME)
        world.metadata.cut(store)
        await a.release(NAME)
        world.metadata.heal(store)
        assert await a.owner_url(NAME) == A
        await a.claim(NAME)

    run(main())
