"""Coordinators of legacy transactions reach topics and subscriptions by their names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from magnetar.broker.topic.legacy_txn_ends import LegacyTxnEnds
from magnetar.broker.topic.topic import Topic
from magnetar.broker.topic.topics import Topics
from magnetar.errors import ServiceNotReady
from magnetar.model.names import TopicName
from magnetar.wire.messages import TxnId
from tests.unit.broker.txn_world import TxnWorld, in_txn_world, joined, publish, quiet, read_all
from tests.unit.broker.world import NAME

L1 = TxnId(0, 1)

Scenario = Callable[[Topics, LegacyTxnEnds], Awaitable[None]]


def play(scenario: Scenario) -> None:
    async def main(world: TxnWorld) -> None:
        topics = await world.topics(world.broker().parts)
        await scenario(topics, LegacyTxnEnds(topics))
        await topics.stop()

    in_txn_world(main)


async def loaded(topics: Topics, name: TopicName = NAME) -> Topic:
    topic = await topics.get(name)
    assert isinstance(topic, Topic)
    return topic


def test_a_topic_that_is_not_loaded_is_loaded() -> None:
    async def scenario(topics: Topics, ends: LegacyTxnEnds) -> None:
        await publish(await joined(await loaded(topics)), L1, "a")
        await topics.unload(NAME)
        await ends.end_on_topic(str(NAME), L1, commit=True, low_watermark=0)
        await quiet()
        assert await read_all(await loaded(topics), "new") == ["a"]

    play(scenario)


@pytest.mark.parametrize(
    "name",
    [
        "persistent://public/default/none",
        "persistent://nobody/nowhere/none",
        "non-persistent://public/default/none",
        "segment://public/default/t/0000-ffff-0",
        "topic://public/default/t",
        "no name at all://",
    ],
)
def test_what_never_was_has_nothing_to_end(name: str) -> None:
    async def scenario(topics: Topics, ends: LegacyTxnEnds) -> None:
        await ends.end_on_topic(name, L1, commit=True, low_watermark=0)
        await ends.end_on_subscription(name, "s", L1, commit=True, low_watermark=0)
        assert not topics.loaded

    play(scenario)


def test_a_partitioned_topic_is_none_itself() -> None:
    async def scenario(topics: Topics, ends: LegacyTxnEnds) -> None:
        await topics.create_partitioned(NAME, 2)
        await ends.end_on_topic(str(NAME), L1, commit=True, low_watermark=0)
        await publish(await joined(await loaded(topics, NAME.with_partition(1))), L1, "a")
        await ends.end_on_topic(str(NAME.with_partition(1)), L1, commit=True, low_watermark=0)
        await quiet()
        assert await read_all(await loaded(topics, NAME.with_partition(1)), "new") == ["a"]

    play(scenario)


def test_a_subscription_that_is_gone_has_nothing_to_end() -> None:
    async def scenario(topics: Topics, ends: LegacyTxnEnds) -> None:
        await loaded(topics)
        await ends.end_on_subscription(str(NAME), "s", L1, commit=True, low_watermark=0)

    play(scenario)


def test_a_topic_that_cannot_be_had_is_asked_again() -> None:
    async def scenario(topics: Topics, ends: LegacyTxnEnds) -> None:
        await loaded(topics)
        await topics.unload(NAME)
        await topics.stop()
        with pytest.raises(ServiceNotReady):
            await ends.end_on_topic(str(NAME), L1, commit=True, low_watermark=0)

    play(scenario)
