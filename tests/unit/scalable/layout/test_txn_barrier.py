"""Lulls: who is held, what is waited for, and for how long."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from magnetar.model.names import TopicName
from magnetar.scalable.layout import txn_barrier as lulls_module
from magnetar.scalable.layout.layout_watchers import LayoutWatchers
from magnetar.scalable.layout.txn_barrier import HANDOVER_SECONDS, TransactionBarrier
from magnetar.testing.virtual.virtual_time import run
from magnetar.txn import transitions
from magnetar.txn.ids import metadata_id
from magnetar.txn.records import Header
from magnetar.wire.messages import TxnId
from tests.unit.broker.world import options
from tests.unit.scalable.world import TOPIC, Broker, ScalableWorld

WAIT_S = 3.0
SOON_S = 0.1
EPOCH = 1


class Connection:
    """An identity."""


class Scene:
    """One broker with a topic of one segment, and the lulls of its connections."""

    def __init__(self, broker: Broker, parent: TopicName) -> None:
        self.broker = broker
        self.parent = parent
        self.layout_watchers = LayoutWatchers()
        self.txn_barrier = TransactionBarrier(
            broker.topics,
            broker.outcomes,
            self.layout_watchers,
            broker.parts.clock,
            wait_seconds=WAIT_S,
        )
        self._numbers = itertools.count(1)

    @property
    def now(self) -> float:
        return self.broker.parts.clock.monotonic()

    def new_header(self) -> Header:
        txn = metadata_id(0, next(self._numbers))
        return transitions.begun(txn, now_ms=0, timeout_ms=60_000)

    async def begin(self, connection: object, gate: asyncio.Event | None = None) -> TxnId:
        """As the handler of NEW_TXN does it; behind `gate` the header is stored."""
        beginning = await self.txn_barrier.admitted(connection)
        try:
            if gate is not None:
                await gate.wait()
            header = self.new_header()
            self.broker.outcomes.opened(header.id)
            beginning.began(header.id)
        finally:
            self.txn_barrier.over(connection, beginning)
        return header.id

    def end(self, txn: TxnId) -> None:
        self.broker.outcomes.learn(txn, "COMMITTED")

    async def granted(self, seconds: float = SOON_S) -> bool:
        return await self.txn_barrier.granted(TOPIC, EPOCH, [self.parent], seconds)


def on_a_scene(story: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        world = ScalableWorld()
        broker = await world.broker()
        await broker.scalable.create(TOPIC)
        parent = (await broker.segment(0)).name
        await story(Scene(broker, parent))
        await world.stop(broker)

    run(main())


async def is_over(task: asyncio.Task[Any]) -> bool:
    """After whatever can happen without time passing."""
    await asyncio.sleep(0)
    done, _ = await asyncio.wait({task}, timeout=0.001)
    return bool(done)


def test_without_transactions_nothing_waits() -> None:
    async def story(scene: Scene) -> None:
        begun = scene.now
        assert await scene.granted()
        await scene.begin(Connection())
        assert scene.now == begun

    on_a_scene(story)


def test_a_change_waits_for_the_open_ones_and_new_ones_for_the_change() -> None:
    async def story(scene: Scene) -> None:
        connection = Connection()
        follower = scene.layout_watchers.add(TOPIC, connection, EPOCH - 1)
        txns = [await scene.begin(connection) for _ in range(3)]
        assert not await scene.granted()
        held = asyncio.create_task(scene.begin(connection))
        waiting = asyncio.create_task(scene.granted(WAIT_S))
        for txn in txns:
            assert not await is_over(waiting)
            scene.end(txn)
        assert await is_over(waiting)
        assert waiting.result()
        assert not await is_over(held)
        scene.layout_watchers.told(follower, EPOCH)
        assert await is_over(held)
        assert await is_over(asyncio.create_task(scene.begin(connection)))

    on_a_scene(story)


def test_transactions_that_last_are_neither_held_nor_waited_for() -> None:
    async def story(scene: Scene) -> None:
        connection = Connection()
        scene.layout_watchers.add(TOPIC, connection, EPOCH - 1)
        header = scene.new_header()
        scene.broker.outcomes.opened(header.id)
        scene.txn_barrier.lasts(header.id)
        begun = scene.now
        assert await scene.granted()
        assert scene.now == begun

    on_a_scene(story)


def test_a_wait_is_shown_with_one_it_waits_for_and_its_end() -> None:
    async def story(scene: Scene) -> None:
        connection = Connection()
        scene.layout_watchers.add(TOPIC, connection, EPOCH - 1)
        assert scene.txn_barrier.waiting(TOPIC) is None
        txn = await scene.begin(connection)
        assert not await scene.granted()
        shown = scene.txn_barrier.waiting(TOPIC)
        assert shown is not None
        assert shown.txn == txn
        assert 0 < shown.seconds_left < WAIT_S
        scene.end(txn)
        assert await scene.granted()
        assert scene.txn_barrier.waiting(TOPIC) is None

    on_a_scene(story)


def test_others_are_neither_held_nor_waited_for() -> None:
    async def story(scene: Scene) -> None:
        stranger, connection = Connection(), Connection()
        await scene.begin(stranger)
        scene.layout_watchers.add(TOPIC, connection, EPOCH - 1)
        await scene.begin(connection)
        assert not await scene.granted()
        assert await is_over(asyncio.create_task(scene.begin(stranger)))
        scene.layout_watchers.add(TopicName.parse("topic://public/default/other"), stranger, 0)
        assert await is_over(asyncio.create_task(scene.begin(stranger)))

    on_a_scene(story)


def test_a_client_may_produce_and_watch_the_layout_on_two_connections() -> None:
    async def story(scene: Scene) -> None:
        watching, producing = Connection(), Connection()
        follower = scene.layout_watchers.add(TOPIC, watching, EPOCH - 1)
        segment = await scene.broker.segment(0)
        producer = await segment.add_producer(options(connection=producing))
        txn = await scene.begin(producing)
        assert not await scene.granted()
        held = asyncio.create_task(scene.begin(producing))
        scene.end(txn)
        assert await scene.granted()
        await segment.remove_producer(producer)  # its client has heard of the new layout
        assert not await is_over(held)
        scene.layout_watchers.told(follower, EPOCH)
        assert await is_over(held)

    on_a_scene(story)


def test_one_that_is_being_begun_counts() -> None:
    async def story(scene: Scene) -> None:
        connection = Connection()
        scene.layout_watchers.add(TOPIC, connection, EPOCH - 1)
        ready = asyncio.Event()
        beginning = asyncio.create_task(scene.begin(connection, ready))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(scene.granted(WAIT_S))
        assert not await is_over(waiting)
        ready.set()
        txn = await beginning
        assert not await is_over(waiting)
        scene.end(txn)
        assert await is_over(waiting)

    on_a_scene(story)


def test_a_connection_that_ends_holds_nothing_up() -> None:
    async def story(scene: Scene) -> None:
        connection = Connection()
        follower = scene.layout_watchers.add(TOPIC, connection, EPOCH - 1)
        await scene.begin(connection)
        waiting = asyncio.create_task(scene.granted(WAIT_S))
        assert not await is_over(waiting)
        scene.layout_watchers.remove(follower)
        assert await is_over(waiting)

    on_a_scene(story)


def test_both_waits_have_an_end() -> None:
    async def story(scene: Scene) -> None:
        connection = Connection()
        scene.layout_watchers.add(TOPIC, connection, EPOCH - 1)
        await scene.begin(connection)
        begun = scene.now
        assert not await scene.granted()
        held = asyncio.create_task(scene.begin(connection))
        while not await scene.granted():
            pass
        assert scene.now - begun == pytest.approx(WAIT_S)
        assert await scene.granted(0.0)  # the same change again, by a controller that goes on
        assert not await is_over(held)  # it is told the layout first, if that comes in time
        await held
        assert scene.now - begun == pytest.approx(WAIT_S + HANDOVER_SECONDS)

    on_a_scene(story)


def test_the_next_change_waits_anew() -> None:
    async def story(scene: Scene) -> None:
        connection = Connection()
        follower = scene.layout_watchers.add(TOPIC, connection, EPOCH - 1)
        assert await scene.granted()
        scene.layout_watchers.told(follower, EPOCH)
        await scene.begin(connection)
        assert not await scene.txn_barrier.granted(TOPIC, EPOCH + 1, [scene.parent], SOON_S)

    on_a_scene(story)


def test_what_has_ended_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lulls_module, "_PRUNE_AT", 8)

    async def story(scene: Scene) -> None:
        connection = Connection()
        kept = await scene.begin(connection)
        for _ in range(1000):
            scene.end(await scene.begin(connection))
        known = scene.txn_barrier._begun[connection].txns
        assert kept in known
        assert len(known) <= 8
        del connection, known
        assert not scene.txn_barrier._begun

    on_a_scene(story)


def test_a_producer_is_held_though_nobody_watches_the_layout_here() -> None:
    async def story(scene: Scene) -> None:
        connection = Connection()
        topic = await scene.broker.segment(0)
        await topic.add_producer(options(connection=connection))
        txn = await scene.begin(connection)
        assert not await scene.granted()
        late = asyncio.create_task(scene.begin(connection))
        assert not await is_over(late)
        scene.end(txn)
        assert await scene.granted()
        await late

    on_a_scene(story)


def test_a_change_that_was_given_up_is_forgotten() -> None:
    async def story(scene: Scene) -> None:
        connection = Connection()
        scene.layout_watchers.add(TOPIC, connection, EPOCH - 1)
        await scene.begin(connection)
        assert not await scene.granted()
        began = scene.now
        await scene.begin(connection)
        assert scene.now - began <= WAIT_S + HANDOVER_SECONDS
        assert scene.txn_barrier._barriers == {}

    on_a_scene(story)
