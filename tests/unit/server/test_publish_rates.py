"""Rates of publishing at the connections of a server: who waits, for how long, and who does not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from random import Random
from typing import Any

import msgspec
import pytest

from magnetar.broker.policy.namespaces import DEFAULT
from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.values import PublishRate
from magnetar.broker.topic.nonpersistent import LoadedTopic
from magnetar.broker.topic.topics import Topics
from magnetar.errors import ServiceNotReady
from magnetar.model.names import TopicName
from magnetar.runtime.limits import Limits
from magnetar.runtime.metrics import PUBLISH_THROTTLED
from magnetar.server.authority import Authority
from magnetar.server.config import ServerConfig
from magnetar.server.context import Context
from magnetar.server.publish_throttle import ITEMS_PER_LOOP_TURN
from magnetar.testing.virtual.driver import build_message
from magnetar.testing.virtual.virtual_time import run
from magnetar.wire.frames import encode_send
from tests.unit.broker.world import World, options
from tests.unit.server.link import Link, NoQueue

TOPIC = TopicName.parse("persistent://public/default/t")
OTHER = TopicName.parse("persistent://public/default/other")


class Publisher:
    """A client with producers on one connection; it keeps when each receipt came."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.receipts: list[tuple[int, int]] = []
        """The producer and the sequence of each, in the order in which they came."""
        self.other: list[tuple[str, Any]] = []
        self._next = count()

    async def open(self, producer_id: int = 1, topic: TopicName = TOPIC) -> None:
        self.link.send("PRODUCER", topic=str(topic), producer_id=producer_id, request_id=1)
        while not self.other:
            await self.look()
        assert [name for name, _ in self.other] == ["PRODUCER_SUCCESS"]
        self.other.clear()

    def send(self, messages: int, producer_id: int = 1, *, batch: int = 1, size: int = 0) -> None:
        """As one read brings them."""
        frames = []
        for _ in range(messages):
            sequence = next(self._next)
            fields: dict[str, Any] = {"num_messages_in_batch": batch} if batch > 1 else {}
            payload = build_message(b"x" * max(size, 5 * batch), sequence_id=sequence, **fields)
            frames += encode_send(producer_id, sequence, payload, num_messages=batch)
        self.link.session.data_received(b"".join(frames))

    async def look(self) -> int:
        """How many receipts there are by now."""
        for name, body in await self.link.received():
            if name == "SEND_RECEIPT":
                self.receipts.append((body.producer_id, body.sequence_id))
            else:
                self.other.append((name, body))
        return len(self.receipts)


class Scene:
    def __init__(self, topics: Topics, world: World, limits: Limits) -> None:
        self.topics = topics
        self.context = Context(
            ServerConfig(limits=limits),
            topics,
            world.parts().schemas,
            world.clock,
            Authority(),
            "",
            queue=NoQueue(),
        )
        self._links: list[Link] = []

    async def publisher(self, *, hears_throttles: bool = False) -> Publisher:
        link = Link(context=self.context)
        self._links.append(link)
        features = {"supports_publish_throttled": hears_throttles}
        link.send("CONNECT", client_version="c", protocol_version=21, feature_flags=features)
        await link.received()
        return Publisher(link)

    async def topic(self, name: TopicName = TOPIC) -> LoadedTopic:
        return await self.topics.get(name)

    async def limit(
        self, messages: int = -1, size: int = -1, *, of: TopicName | None = TOPIC
    ) -> None:
        """Of a topic, or of the namespace."""
        rate = PublishRate(messages, size)

        def change(old: Policies) -> Policies:
            return msgspec.structs.replace(old, publish_rate=rate)

        if of is None:
            await self.topics.change_namespace(DEFAULT, change)
        else:
            await self.topics.change_topic(of, change)

    async def close(self) -> None:
        for link in self._links:
            if not link.session.ended.is_set():
                await link.close()
        await self.topics.stop()


def play(scenario: Callable[[Scene], Awaitable[None]], **limits: Any) -> None:
    async def main() -> None:
        world = World(Limits(**limits))
        scene = Scene(await world.topics(), world, world.limits)
        await scene.topic()
        await scenario(scene)
        await scene.close()

    run(main())


pass_time = asyncio.sleep


def test_a_burst_takes_the_time_that_the_rate_says_and_nothing_is_lost() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.limit(10)
        publisher = await scene.publisher()
        await publisher.open()
        before = PUBLISH_THROTTLED._value.get()
        publisher.send(100)
        assert not publisher.link.wire.is_read
        assert await publisher.look() == 10
        for seconds in range(1, 9):
            await pass_time(1)
            assert await publisher.look() == pytest.approx(10 + 10 * seconds, abs=1)
            assert not publisher.link.wire.is_read
        await pass_time(1.01)
        assert await publisher.look() == 100
        assert publisher.link.wire.is_read
        assert [sequence for _, sequence in publisher.receipts] == list(range(100))
        assert publisher.other == []
        topic = await scene.topic()
        stats = topic.stats()
        assert stats.publish_rate_limited_times == PUBLISH_THROTTLED._value.get() - before > 0
        assert stats.msg_in_counter == 100

    play(scenario)


def test_bytes_are_limited_with_one_message_too_many() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.limit(size=10_000)
        publisher = await scene.publisher()
        await publisher.open()
        publisher.send(30, size=4000)
        # Three: the third one begins with tokens left.
        assert await publisher.look() == 3
        await pass_time(10.2)
        assert await publisher.look() in (27, 28)
        await pass_time(2)
        assert await publisher.look() == 30

    play(scenario)


def test_a_batch_counts_as_its_messages() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.limit(100)
        publisher = await scene.publisher()
        await publisher.open()
        publisher.send(5, batch=150)
        assert await publisher.look() == 1
        await pass_time(0.49)
        assert await publisher.look() == 1
        await pass_time(0.05)
        assert await publisher.look() == 2
        await pass_time(4.5)
        assert await publisher.look() == 5

    play(scenario)


def test_all_producers_of_the_connection_wait_and_no_other_connection() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.topic(OTHER)
        await scene.limit(1)
        held, free = await scene.publisher(), await scene.publisher()
        await held.open()
        await held.open(2, OTHER)
        await free.open(1, OTHER)
        held.send(3)
        held.link.send("PING")
        held.send(5, 2)
        free.send(5)
        assert await free.look() == 5
        assert await held.look() == 1
        assert held.other == []
        await pass_time(2.1)
        assert await held.look() == 8
        # In the order in which they were sent, the PING among them.
        assert [number for number, _ in held.receipts] == [1, 1, 1, 2, 2, 2, 2, 2]
        assert [name for name, _ in held.other] == ["PONG"]
        free.send(5)
        assert await free.look() == 10

    play(scenario)


def test_a_connection_that_is_held_for_long_is_neither_closed_nor_forgotten() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.limit(size=1)
        publisher = await scene.publisher()
        await publisher.open()
        publisher.send(2, size=1000)
        seconds = 0
        while await publisher.look() < 2:
            await pass_time(10)
            seconds += 10
            assert not publisher.link.session.is_closing
        assert 1000 < seconds < 1100
        pings = [name for name, _ in publisher.other]
        # Twice in an interval: clients have intervals of their own.
        assert len(pings) > 60
        assert set(pings) == {"PING"}

    play(scenario, connection_keepalive_seconds=30.0)


@pytest.mark.parametrize("change", ["off", "raise", "namespace"])
def test_a_change_of_the_policy_holds_at_once(change: str) -> None:
    async def scenario(scene: Scene) -> None:
        level = None if change == "namespace" else TOPIC
        await scene.limit(1, of=level)
        publisher = await scene.publisher()
        await publisher.open()
        publisher.send(50)
        await pass_time(5.1)
        assert await publisher.look() == 6
        if change == "raise":
            await scene.limit(1000, of=level)
            await pass_time(0.1)
        else:
            await scene.limit(0, of=level)
        assert await publisher.look() == 50
        assert publisher.link.wire.is_read
        topic = await scene.topic()
        assert topic.stats().publish_rate_limited_times > 0
        await scene.limit(2, of=level)
        publisher.send(1000)
        assert await publisher.look() < 60

    play(scenario)


def test_several_connections_share_the_rate_of_a_topic() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.limit(100)
        publishers = [await scene.publisher() for _ in range(4)]
        for each in publishers:
            await each.open()
        for each in publishers:
            each.send(500)
        await pass_time(8)
        counts = [await each.look() for each in publishers]
        assert sum(counts) == pytest.approx(900, abs=5)
        # The burst went to the first one.
        assert min(counts) > 180
        await pass_time(11.1)
        assert [await each.look() for each in publishers] == [500] * 4

    play(scenario)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_when_nothing_is_lost_nor_too_fast(seed: int) -> None:
    """Connections, batches, pauses and changes of the rate, as chance wants them."""

    async def scenario(scene: Scene) -> None:
        chance, loop = Random(seed), asyncio.get_running_loop()
        publishers = [await scene.publisher() for _ in range(chance.randint(1, 5))]
        for each in publishers:
            await each.open()
        sent, got, most = 0, 0, 0.0
        rate, since = 0, loop.time()
        for _ in range(40):
            publisher, batch = chance.choice(publishers), chance.choice([1, 1, 1, 7])
            if publisher.link.wire.is_read:
                count = chance.randint(1, 60)
                publisher.send(count, batch=batch)
                sent += count
            if chance.random() < 0.2:
                rate = chance.choice([0, 5, 50, 500])
                # A burst for each rate, and what the one before has let through so far.
                got = sum([await each.look() for each in publishers])
                most, since = got + rate, loop.time()
                await scene.limit(rate)
            await pass_time(chance.choice([0.0, 0.01, 0.5, 3.0]))
            present = sum([await each.look() for each in publishers])
            # Entries, of which each is a message at least; one batch may be too many.
            assert not rate or present <= most + rate * (loop.time() - since) + 1
        await scene.limit(0)
        assert sum([await each.look() for each in publishers]) == sent
        for each in publishers:
            sequences = [sequence for _, sequence in each.receipts]
            assert sequences == list(range(len(sequences)))
            assert each.link.wire.is_read

    play(scenario)


def test_what_waits_takes_no_part_of_a_turn_of_the_loop() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.topic(OTHER)
        await scene.limit(10)
        held, free = await scene.publisher(), await scene.publisher()
        await held.open()
        await free.open(1, OTHER)
        held.send(ITEMS_PER_LOOP_TURN - 1)
        turn = scene.context.read_turn
        assert turn.has_room
        assert turn._spent < 100
        free.send(ITEMS_PER_LOOP_TURN // 2)
        assert await free.look() == ITEMS_PER_LOOP_TURN // 2

    play(scenario)


def test_who_leaves_while_it_waits_leaves_nothing_behind() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.limit(1)
        publisher = await scene.publisher()
        await publisher.open()
        publisher.send(50)
        (producer,) = (await scene.topic()).producers.connected.values()
        limiter = producer.limiter
        assert limiter is not None
        assert limiter.waiting == 1
        await publisher.link.close()
        assert limiter.waiting == 0
        assert publisher.link.session.owed == 0

    play(scenario)


@pytest.mark.parametrize("end", ["close", "delete"])
def test_the_end_of_the_topic_frees_the_connection(end: str) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.topic(OTHER)
        await scene.limit(size=1)
        publisher = await scene.publisher()
        await publisher.open()
        await publisher.open(2, OTHER)
        publisher.send(3, size=100_000)
        publisher.send(3, 2)
        assert await publisher.look() == 1
        topic = await scene.topic()
        if end == "close":
            await topic.close(ServiceNotReady("moved"))
        else:
            await topic.delete(force=True)
        # What was sent to it is the client's to send again; the other topic's go on.
        await publisher.look()
        assert [name for name, _ in publisher.other] == ["CLOSE_PRODUCER"]
        assert [number for number, _ in publisher.receipts] == [1, 2, 2, 2]
        assert publisher.link.wire.is_read

    play(scenario)


def test_topics_without_storage_have_rates_too() -> None:
    name = TopicName.parse("non-persistent://public/default/t")

    async def scenario(scene: Scene) -> None:
        topic = await scene.topic(name)
        await scene.limit(5, of=None)
        publisher = await scene.publisher()
        await publisher.open(1, name)
        publisher.send(20)
        assert await publisher.look() == 5
        await pass_time(3.1)
        assert await publisher.look() == 20
        assert topic.stats().publish_rate_limited_times > 0

    play(scenario)


def test_segments_follow_their_namespace() -> None:
    name = TopicName.parse("segment://public/default/t/0000-ffff-0")

    async def scenario(scene: Scene) -> None:
        await scene.topics.create(name)
        topic = await scene.topic(name)
        producer = await topic.add_producer(options())
        await scene.limit(5, 7000, of=None)
        assert str(producer.limiter) == f"publishRate of 5 messages/s and 7000 bytes/s on {name}"
        await scene.limit(of=None)
        assert producer.limiter is None
        await topic.remove_producer(producer)

    play(scenario)


def test_a_client_that_asks_for_it_is_told_once_for_each_pause() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.topic(OTHER)
        await scene.limit(10)
        await scene.limit(2, of=OTHER)
        told, other = await scene.publisher(hears_throttles=True), await scene.publisher()
        for each in (told, other):
            await each.open()
            await each.open(2, OTHER)
            each.send(15)
            await each.look()
            each.send(5)
            each.send(5, 2)
        await pass_time(10)
        assert await told.look() == await other.look() == 25
        assert other.other == []
        assert {name for name, _ in told.other} == {"PUBLISH_THROTTLED"}
        rates = [body.rate if body.HasField("rate") else None for _, body in told.other]
        assert rates == [
            f"publishRate of 10 messages/s on {TOPIC}",
            f"publishRate of 2 messages/s on {OTHER}",
            None,
        ]

    play(scenario)


def test_without_a_rate_nothing_is_asked_and_nothing_runs() -> None:
    async def scenario(scene: Scene) -> None:
        publisher = await scene.publisher()
        await publisher.open()
        topic = await scene.topic()
        assert all(each.limiter is None for each in topic.producers.connected.values())
        await scene.limit(10)
        assert all(each.limiter is not None for each in topic.producers.connected.values())
        # Below its rate nobody waits, and nothing runs for that.
        publisher.send(5)
        (producer,) = topic.producers.connected.values()
        assert producer.limiter is not None
        assert producer.limiter.times == 0
        assert producer.limiter._timer is None

    play(scenario)
