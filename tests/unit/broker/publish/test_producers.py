"""Names and access modes of a topic's producers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from magnetar.broker.api import AccessMode, ProducerRequest
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.publish.producer import Producer
from magnetar.broker.topic.topic import Topic
from magnetar.broker.topic.topics import Topics
from magnetar.errors import MetadataError, ProducerBusy, ProducerFenced, TopicNotFound, Unavailable
from magnetar.testing.virtual.virtual_time import run
from tests.unit.broker.world import NAME, World, message, options, receipts

WAIT = AccessMode.WAIT_FOR_EXCLUSIVE
EXCLUSIVE = AccessMode.EXCLUSIVE
FENCING = AccessMode.EXCLUSIVE_WITH_FENCING


def test_who_waits_for_the_topic_must_encrypt_as_well() -> None:
    async def scenario(_: World, __: Topics, topic: Topic) -> None:
        first = ProducerRequest(1, None, "first", access_mode=WAIT, encrypted=True)
        await topic.add_producer(first)
        waiting = await topic.add_producer(ProducerRequest(2, None, "second", access_mode=WAIT))
        await topic.apply(TopicPolicies(encryption_required=True))
        assert isinstance(waiting.failure, MetadataError)

    with_topic(scenario)


def with_topic(scenario: Callable[[World, Topics, Topic], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        topics = await world.topics()
        topic = await topics.get(NAME)
        assert isinstance(topic, Topic)
        await scenario(world, topics, topic)
        topic.producers.check_invariants()
        await topics.stop()

    run(main())


def test_a_name_is_taken_until_its_producer_leaves() -> None:
    async def scenario(world: World, topics: Topics, topic: Topic) -> None:
        first = await topic.add_producer(options(1, "p", connection="one"))
        with pytest.raises(ProducerBusy):
            await topic.add_producer(options(1, "p", connection="two", epoch=5))
        assert topic.producers.named("p") is first
        with pytest.raises(ProducerBusy):
            await topic.add_producer(options(2, "p", connection="one", epoch=5))
        with pytest.raises(ProducerBusy):
            await topic.add_producer(options(1, "p", connection="one", epoch=0))
        await topic.remove_producer(first)
        await topic.add_producer(options(1, "p", connection="two"))

    with_topic(scenario)


def test_the_same_producer_comes_again_with_a_higher_epoch() -> None:
    async def scenario(world: World, topics: Topics, topic: Topic) -> None:
        first = await topic.add_producer(options(1, "p", connection="one"))
        first.send(message(1))
        second = await topic.add_producer(options(1, "p", connection="one", epoch=1))
        assert first.stopped
        assert first.pending == 0
        assert topic.producers.named("p") is second
        await topic.remove_producer(first)
        assert topic.producers.named("p") is second, "a late leave removes nobody else"

    with_topic(scenario)


def test_an_exclusive_producer_keeps_others_out() -> None:
    async def scenario(world: World, topics: Topics, topic: Topic) -> None:
        alone = await topic.add_producer(options(1, "a", mode=EXCLUSIVE))
        assert (alone.ready, alone.topic_epoch) == (True, 0)
        with pytest.raises(ProducerBusy):
            await topic.add_producer(options(2, "b"))
        with pytest.raises(ProducerFenced):
            await topic.add_producer(options(3, "c", mode=EXCLUSIVE))
        await topic.remove_producer(alone)
        await topic.add_producer(options(2, "b"))
        with pytest.raises(ProducerFenced):
            await topic.add_producer(options(3, "c", mode=EXCLUSIVE))

    with_topic(scenario)


def test_the_topic_epoch_is_durable_and_fences_who_was_overtaken() -> None:
    async def scenario(world: World, topics: Topics, topic: Topic) -> None:
        old = await topic.add_producer(options(1, "a", mode=EXCLUSIVE))
        await topic.remove_producer(old)
        back = await topic.add_producer(options(1, "a", mode=EXCLUSIVE, topic_epoch=0))
        assert back.topic_epoch == 0, "nobody had the topic in between"
        await topic.remove_producer(back)
        new = await topic.add_producer(options(2, "b", mode=EXCLUSIVE))
        assert new.topic_epoch == 1
        await topics.unload(NAME)

        topic = await _loaded(topics)
        assert topic.producers.epoch == 1
        with pytest.raises(ProducerFenced):
            await topic.add_producer(options(1, "a", mode=EXCLUSIVE, topic_epoch=0))
        with pytest.raises(ProducerFenced):
            await topic.add_producer(options(1, "a", mode=FENCING, topic_epoch=0))

    with_topic(scenario)


def test_who_waits_gets_the_topic_in_turn() -> None:
    async def scenario(world: World, topics: Topics, topic: Topic) -> None:
        first = await topic.add_producer(options(1, "a"))
        waiting = [await topic.add_producer(options(n, f"w{n}", mode=WAIT)) for n in (2, 3)]
        assert [each.ready for each in waiting] == [False, False]
        with pytest.raises(ProducerBusy):
            await topic.add_producer(options(9, "b"))
        with pytest.raises(ProducerBusy):
            await topic.add_producer(options(9, "w2", mode=WAIT))
        told = asyncio.create_task(waiting[0].until_ready())
        await topic.remove_producer(first)
        assert await told
        assert waiting[0].topic_epoch == 0
        assert not waiting[1].ready
        waiting[0].send(message(1))
        assert len(await receipts(waiting[0], 1)) == 1
        await topic.remove_producer(waiting[0])
        assert waiting[1].topic_epoch == 1

    with_topic(scenario)


def test_a_waiting_producer_that_leaves_is_passed_over() -> None:
    async def scenario(world: World, topics: Topics, topic: Topic) -> None:
        first = await topic.add_producer(options(1, "a", mode=EXCLUSIVE))
        second = await topic.add_producer(options(2, "b", mode=WAIT))
        third = await topic.add_producer(options(3, "c", mode=WAIT))
        await topic.remove_producer(second)
        assert not await second.until_ready()
        await topic.remove_producer(first)
        assert third.ready

    with_topic(scenario)


def test_fencing_takes_the_topic_from_everybody() -> None:
    async def scenario(world: World, topics: Topics, topic: Topic) -> None:
        shared = [await topic.add_producer(options(n, f"s{n}")) for n in range(3)]
        waiting = await topic.add_producer(options(4, "w", mode=WAIT))
        shared[0].send(message(1))
        winner = await topic.add_producer(options(5, "x", mode=FENCING))
        assert winner.ready
        for loser in (*shared, waiting):
            assert isinstance(loser.failure, ProducerFenced)
        assert len(await receipts(shared[0], 1)) == 1, "what was stored is receipted"
        assert list(topic.producers.connected) == ["x"]
        again = await topic.add_producer(options(6, "y", mode=FENCING))
        assert again.topic_epoch == 1
        assert isinstance(winner.failure, ProducerFenced)

    with_topic(scenario)


def test_without_a_durable_epoch_nobody_gets_the_topic() -> None:
    async def scenario(world: World, topics: Topics, topic: Topic) -> None:
        async def fails(epoch: int) -> None:
            raise Unavailable("no")

        topic.producers._set_epoch = fails
        with pytest.raises(Unavailable):
            await topic.add_producer(options(1, "a", mode=EXCLUSIVE))
        assert not topic.in_use
        shared = await topic.add_producer(options(2, "b"))
        waiting = await topic.add_producer(options(3, "c", mode=WAIT))
        await topic.remove_producer(shared)
        assert isinstance(waiting.failure, Unavailable)

    with_topic(scenario)


def test_a_deleted_topic_gives_no_epoch() -> None:
    async def scenario(world: World, topics: Topics, topic: Topic) -> None:
        await topics.delete(NAME)
        producer = Producer(
            "p",
            options(mode=EXCLUSIVE),
            topic.ledger.append,
            clock=world.clock,
            trouble=topic._trouble,
        )
        with pytest.raises(TopicNotFound):
            await topic.producers.add(producer)

    with_topic(scenario)


async def _loaded(topics: Topics) -> Topic:
    topic = await topics.get(NAME)
    assert isinstance(topic, Topic)
    return topic
