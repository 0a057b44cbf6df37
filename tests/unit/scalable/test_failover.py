"""A broker dies at every step of a layout change: the next one finishes it, or undoes it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from magnetar.broker.topic.topic import Topic
from magnetar.errors import MagnetarError
from magnetar.model.names import TopicName
from magnetar.scalable.records import segment_topic
from magnetar.testing.virtual.virtual_time import run
from tests.unit.broker.world import message, receipts
from tests.unit.scalable.world import TOPIC, Broker, ScalableWorld

REGULAR = TopicName.parse("persistent://public/default/orders")
STEPS_MAX = 400
"""More turns of the loop than any change takes."""

Change = Callable[[Broker], Awaitable[None]]


async def split(broker: Broker) -> None:
    await broker.scalable.split(TOPIC, 0)


async def merge(broker: Broker) -> None:
    await broker.scalable.merge(TOPIC, [0, 1])


async def delete(broker: Broker) -> None:
    await broker.scalable.delete(TOPIC, force=True)


async def migrate(broker: Broker) -> None:
    await broker.scalable.migrate(REGULAR, force=True)


async def killed_after(turns: int, change: Change, segments: int) -> bool:
    """Kill a broker so many turns after a change began; whether the change was over by then."""
    world = ScalableWorld()
    first = await world.broker()
    if segments:
        await first.scalable.create(TOPIC, segments)
        await first.scalable.create_subscription(TOPIC, "s", "QUEUE")
        await first.publish(0, 3)
    else:
        regular = await first.topics.get(REGULAR)
        assert isinstance(regular, Topic)
        await regular.create_subscription("s", regular.ledger.last_position())
    work = asyncio.ensure_future(change(first))
    for _ in range(turns):
        await asyncio.sleep(0)
        if work.done():
            break
    over = work.done()
    world.kill(first.parts)
    work.cancel()
    await asyncio.wait([work])
    second = await world.broker()
    await in_order(second)
    await world.stop(second)
    return over


async def in_order(broker: Broker) -> None:
    """Wait until no change is under way; then everything must fit and work."""
    scalable = broker.scalable
    async with asyncio.timeout(120):
        while True:
            record = await scalable.layouts.read(TOPIC)
            if record is None or (record.change is None and not record.garbage):
                break
            await asyncio.sleep(0.1)
    names = await broker.topics.segment_names(TOPIC)
    if record is None:
        assert names == []
        return
    assert record.layout is not None
    layout = record.layout.layout()
    layout.check_invariants()
    wanted = {segment_topic(TOPIC, each) for each in layout.segments.values()}
    assert {name for name in wanted if name.descriptor} == set(names)
    for segment in layout.active:
        topic = await broker.segment(segment.segment_id)
        assert not topic.terminated
        assert "s" in topic.subscriptions
        producer = await broker.producer(segment.segment_id, f"p-seg-{segment.segment_id}")
        before = topic.ledger.entries
        producer.send(message(producer.last_sequence_id + 1))
        await receipts(producer, 1)
        assert topic.ledger.entries == before + 1
    for segment in layout.segments.values():
        if not segment.is_active:
            assert (await broker.segment(segment.segment_id)).terminated


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "segments"), [(split, 1), (merge, 2), (delete, 2), (migrate, 0)]
)
def test_a_change_is_finished_or_undone_wherever_its_broker_dies(
    change: Change, segments: int
) -> None:
    turns, over = 0, False
    while not over:
        over = run(killed_after(turns, change, segments))
        turns += 1
        assert turns < STEPS_MAX
    assert turns > 10, "the change has that many steps"


def test_a_second_broker_takes_the_topics_of_a_dead_one_over() -> None:
    async def main() -> None:
        world = ScalableWorld()
        first, second = await world.broker(), await world.broker()
        topics = [TopicName.parse(f"topic://public/default/t{number}") for number in range(8)]
        for topic in topics:
            await first.scalable.create(topic)
        world.kill(first.parts)
        async with asyncio.timeout(120):
            for topic in topics:
                while not second.scalable.controllers.leads(topic):
                    await world.clock.sleep(1)
        for topic in topics:
            assert len((await second.scalable.split(topic, 0)).active) == 2
        with pytest.raises(MagnetarError):
            await first.scalable.split(topics[0], 1)
        await world.stop(second)

    run(main())
