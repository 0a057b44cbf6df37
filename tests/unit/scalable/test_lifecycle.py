"""How long lost consumers and sealed segments are kept: whose value holds, and who follows it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from magnetar.broker.policy.policies import Policies
from magnetar.errors import NotAllowed, TopicNotFound
from magnetar.runtime.limits import Limits
from magnetar.scalable.lifecycle import (
    SECONDS_MAX,
    Lifecycle,
    broker_lifecycle,
    read_lifecycle,
    resolve_lifecycle,
)
from magnetar.scalable.records import LifecycleOverride
from magnetar.testing.virtual.virtual_time import run
from tests.unit.scalable.world import TOPIC, Broker, ScalableWorld

BROKER = Lifecycle(60.0, 3600.0)
INTERVAL = Limits().scalable_auto_scale_interval_seconds


@pytest.mark.parametrize(
    ("namespace", "topic", "expected"),
    [
        (None, None, BROKER),
        (LifecycleOverride(5), None, Lifecycle(5, 3600.0)),
        (LifecycleOverride(5, 6), LifecycleOverride(7), Lifecycle(7, 6)),
        (None, LifecycleOverride(0, 0), Lifecycle(0, 0)),
        (LifecycleOverride(sealed_seconds=6), LifecycleOverride(7), Lifecycle(7, 6)),
    ],
)
def test_the_narrower_value_holds_field_by_field(
    namespace: LifecycleOverride | None, topic: LifecycleOverride | None, expected: Lifecycle
) -> None:
    assert broker_lifecycle(Limits()) == BROKER
    assert resolve_lifecycle(BROKER, namespace, topic) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"gracePeriod": 1},
        {"gracePeriodSeconds": "soon"},
        {"gracePeriodSeconds": -1},
        {"sealedSeconds": SECONDS_MAX + 1},
        {"sealedSeconds": float("nan")},
        {"sealedSeconds": True},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(NotAllowed):
        read_lifecycle(wrong)


def test_what_can_be_is_read() -> None:
    assert read_lifecycle({}) == LifecycleOverride()
    given = {"gracePeriodSeconds": 0, "sealedSeconds": SECONDS_MAX}
    assert read_lifecycle(given) == LifecycleOverride(0, SECONDS_MAX)
    assert read_lifecycle({"gracePeriodSeconds": None}) == LifecycleOverride()


# --- controllers


def on_a_broker(scenario: Callable[[Broker], Awaitable[None]]) -> None:
    async def main() -> None:
        world = ScalableWorld()
        broker = await world.broker()
        await broker.scalable.create(TOPIC)
        await scenario(broker)
        await world.stop(broker)

    run(main())


async def set_for_namespace(broker: Broker, given: dict[str, object] | None) -> None:
    def changed(held: Policies) -> Policies:
        return msgspec.structs.replace(held, scalable_topic_lifecycle_policy=given)

    await broker.topics.change_namespace(TOPIC.namespace, changed)


async def lost_member(broker: Broker) -> None:
    session = await broker.scalable.sessions.attach(TOPIC, "s", "a", "STREAM", "1", False)
    await session.detach()


async def members(broker: Broker) -> int:
    await asyncio.sleep(0.5)
    controller = broker.scalable.controllers.controller(TOPIC)
    assert controller is not None
    return sum(len(each.members) for each in controller.state.groups())


def test_another_grace_period_holds_at_once_for_who_is_lost_already() -> None:
    async def scenario(broker: Broker) -> None:
        await lost_member(broker)
        await asyncio.sleep(20)
        assert await members(broker) == 1
        await set_for_namespace(broker, {"gracePeriodSeconds": 10.0})
        assert await members(broker) == 0

        # The topic's own goes before it, and is followed as quickly.
        await broker.scalable.set_lifecycle(TOPIC, LifecycleOverride(1000))
        await lost_member(broker)
        await asyncio.sleep(300)
        assert await members(broker) == 1
        await broker.scalable.set_lifecycle(TOPIC, None)
        assert await members(broker) == 0

        await set_for_namespace(broker, None)
        await lost_member(broker)
        await asyncio.sleep(55)
        assert await members(broker) == 1
        await asyncio.sleep(10)
        assert await members(broker) == 0

    on_a_broker(scenario)


def test_without_a_grace_period_segments_go_to_others_at_once() -> None:
    async def scenario(broker: Broker) -> None:
        await broker.scalable.set_lifecycle(TOPIC, LifecycleOverride(0))
        await lost_member(broker)
        assert await members(broker) == 0

    on_a_broker(scenario)


def test_sealed_segments_are_kept_as_long_as_their_topic_says() -> None:
    async def scenario(broker: Broker) -> None:
        async def segments() -> list[int]:
            return sorted((await broker.scalable.lookup(TOPIC, create=False)).layout.segments)

        await broker.publish(0)
        await broker.scalable.split(TOPIC, 0)
        await asyncio.sleep(3 * INTERVAL)
        assert await segments() == [0, 1, 2]
        await set_for_namespace(broker, {"sealedSeconds": 60.0})
        await broker.scalable.set_lifecycle(TOPIC, LifecycleOverride(sealed_seconds=600))
        await asyncio.sleep(2 * INTERVAL)
        assert await segments() == [0, 1, 2]
        await broker.scalable.set_lifecycle(TOPIC, LifecycleOverride(7))
        await asyncio.sleep(1.5 * INTERVAL)
        assert await segments() == [1, 2]

    on_a_broker(scenario)


def test_what_was_set_holds_for_the_next_controller() -> None:
    async def main() -> None:
        world = ScalableWorld()
        broker = await world.broker()
        await broker.scalable.create(TOPIC)
        await set_for_namespace(broker, {"sealedSeconds": 7.0})
        await broker.scalable.set_lifecycle(TOPIC, LifecycleOverride(5))
        await world.stop(broker)
        broker = await world.broker()
        await asyncio.sleep(30)
        controller = broker.scalable.controllers.controller(TOPIC)
        assert controller is not None
        assert controller.lifecycle == Lifecycle(5, 7)
        await world.stop(broker)

    run(main())


def test_of_a_topic_that_there_is_not() -> None:
    async def scenario(broker: Broker) -> None:
        await broker.scalable.delete(TOPIC)
        with pytest.raises(TopicNotFound):
            await broker.scalable.set_lifecycle(TOPIC, None)

    on_a_broker(scenario)
