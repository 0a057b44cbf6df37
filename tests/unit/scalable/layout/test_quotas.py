"""Backlog quotas of a scalable topic: the sum over its segments, and the oldest among them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.values import BacklogQuota, QuotaPolicy
from magnetar.errors import BacklogFull, BacklogHeld, ServiceNotReady
from magnetar.model.names import TopicName
from magnetar.model.segments import SegmentLayout
from magnetar.runtime.limits import Limits
from magnetar.scalable.layout.quotas import LOOK_SECONDS, UNKNOWN, rooms
from magnetar.scalable.layout.segments import LocalSegments
from magnetar.testing.virtual.virtual_time import run
from magnetar.wire.messages import Send
from tests.unit.broker.world import entry, receipts
from tests.unit.scalable.world import TOPIC, Broker, ScalableWorld

INTERVAL = Limits().scalable_auto_scale_interval_seconds
PER_SEGMENT = 40


def names() -> list[TopicName]:
    parts = ("0000-ffff-0", "0000-7fff-1", "8000-ffff-2")
    return [TopicName.parse(f"segment://public/default/orders/{each}") for each in parts]


async def publish(world: ScalableWorld, broker: Broker, number: int, count: int) -> None:
    """So many messages of the same size, with the time of their publishing."""
    producer = await broker.producer(number, f"p{number}")
    segment = await broker.segment(number)
    for sequence in range(count):
        data = entry(sequence, "x" * 100, publish_time=world.clock.now_ms())
        producer.send(Send(1, sequence, 1, data))
    await receipts(producer, count)
    await segment.remove_producer(producer)


async def set_quota(broker: Broker, kind: Any, quota: BacklogQuota | None) -> None:
    def changed(held: Policies) -> Policies:
        quotas = {} if quota is None else {kind: quota}
        return msgspec.structs.replace(held, backlog_quota_map=quotas)

    await broker.topics.change_namespace(TOPIC.namespace, changed)


async def backlogs(broker: Broker) -> list[int]:
    return [(await broker.segment(number)).subscriptions["s"].backlog() for number in range(3)]


def split_topic(scenario: Callable[[ScalableWorld, Broker, int], Awaitable[None]]) -> None:
    """A subscription with 40 messages on a sealed segment and on each of its two children.

    Those on the sealed one are 100 s older; the number is the size of them all.
    """

    async def main() -> None:
        world = ScalableWorld()
        broker = await world.broker()
        await broker.scalable.create(TOPIC)
        await broker.scalable.create_subscription(TOPIC, "s", "QUEUE")
        await publish(world, broker, 0, PER_SEGMENT)
        await asyncio.sleep(100)
        await broker.scalable.split(TOPIC, 0)
        await publish(world, broker, 1, PER_SEGMENT)
        await publish(world, broker, 2, PER_SEGMENT)
        size = sum([(await broker.segment(number)).ledger.size_bytes for number in range(3)])
        await scenario(world, broker, size)
        await world.stop(broker)

    run(main())


@pytest.mark.parametrize(
    ("policy", "refusal"),
    [("producer_request_hold", BacklogHeld), ("producer_exception", BacklogFull)],
)
def test_producers_are_closed_and_refused_by_the_sum_over_all_segments(
    policy: QuotaPolicy, refusal: type[Exception]
) -> None:
    async def scenario(world: ScalableWorld, broker: Broker, size: int) -> None:
        sealed, *active = names()
        producers = [await broker.producer(number, "here") for number in (1, 2)]
        await set_quota(
            broker, "destination_storage", BacklogQuota(limit_size=size + 1, policy=policy)
        )
        await asyncio.sleep(INTERVAL)
        for name in active:
            await broker.scalable.admit_producer(name)
        assert not any(each.stopped for each in producers)
        # Each of the three alone is far below it.
        await set_quota(broker, "destination_storage", BacklogQuota(limit_size=size, policy=policy))
        await asyncio.sleep(LOOK_SECONDS)
        for name in active:
            with pytest.raises(refusal):
                await broker.scalable.admit_producer(name)
        # Who comes to the sealed one is to hear that it is sealed.
        await broker.scalable.admit_producer(sealed)
        await asyncio.sleep(INTERVAL)
        assert [type(each.failure) for each in producers] == [refusal, refusal]
        # What was drained of the sealed segment counts no more.
        (await broker.segment(0)).subscriptions["s"].skip_all()
        await asyncio.sleep(LOOK_SECONDS)
        for name in active:
            await broker.scalable.admit_producer(name)

    split_topic(scenario)


def test_of_a_size_the_oldest_segment_goes_first_and_active_ones_are_cut_to_one_size() -> None:
    async def scenario(world: ScalableWorld, broker: Broker, size: int) -> None:
        async def keep(part: float) -> list[int]:
            policy: QuotaPolicy = "consumer_backlog_eviction"
            quota = BacklogQuota(limit_size=int(size * part / 0.9) + 1, policy=policy)
            await set_quota(broker, "destination_storage", quota)
            await broker.scalable.admit_producer(names()[1])
            await broker.scalable.enforce_quotas()
            return await backlogs(broker)

        assert await keep(1) == [PER_SEGMENT] * 3
        assert await keep(3 / 4) == [PER_SEGMENT // 4, PER_SEGMENT, PER_SEGMENT]
        assert await keep(2 / 3) == [0, PER_SEGMENT, PER_SEGMENT]
        assert await keep(1 / 3) == [0, PER_SEGMENT // 2, PER_SEGMENT // 2]

    split_topic(scenario)


def test_an_age_is_that_of_the_oldest_message_of_all_segments() -> None:
    async def scenario(world: ScalableWorld, broker: Broker, size: int) -> None:
        async def aged(seconds: int, policy: QuotaPolicy) -> None:
            quota = BacklogQuota(limit_time=seconds, policy=policy)
            await set_quota(broker, "message_age", quota)
            await asyncio.sleep(LOOK_SECONDS)

        await aged(100, "producer_exception")
        with pytest.raises(BacklogFull):
            await broker.scalable.admit_producer(names()[2])
        await aged(110, "producer_exception")
        await broker.scalable.admit_producer(names()[2])
        shown = broker.scalable.backlog(TOPIC, await _policies(broker))
        assert (shown.size_bytes, shown.oldest_of) == (size, "s")
        assert shown.oldest_seconds == 100 + 2 * LOOK_SECONDS
        await aged(80, "consumer_backlog_eviction")
        await broker.scalable.enforce_quotas()
        assert await backlogs(broker) == [0, PER_SEGMENT, PER_SEGMENT]

    split_topic(scenario)


def test_without_a_quota_nothing_is_asked_and_without_a_user_nothing_is_loaded() -> None:
    async def scenario(world: ScalableWorld, broker: Broker, size: int) -> None:
        async def nothing(*_: object, **__: object) -> Any:
            raise AssertionError("no segment is looked at")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalSegments, "slowest_backlog", nothing)
            await asyncio.sleep(2 * INTERVAL)
            await broker.scalable.admit_producer(names()[1])
            for name in names():
                await broker.topics.unload(name)
            await set_quota(broker, "destination_storage", BacklogQuota(limit_size=1))
            await asyncio.sleep(2 * INTERVAL)
        assert broker.scalable.backlog(TOPIC, await _policies(broker)) == UNKNOWN
        # Who comes has all of it looked at.
        with pytest.raises(BacklogHeld):
            await broker.scalable.admit_producer(names()[1])
        # A topic without a durable subscription has no backlog.
        await broker.scalable.delete_subscription(TOPIC, "s")
        await asyncio.sleep(LOOK_SECONDS)
        await broker.scalable.admit_producer(names()[1])

    split_topic(scenario)


def test_segments_that_are_known_to_be_drained_are_not_loaded_to_be_looked_at() -> None:
    async def scenario(world: ScalableWorld, broker: Broker, size: int) -> None:
        await broker.scalable.create_subscription(TOPIC, "other", "QUEUE")
        await set_quota(broker, "destination_storage", BacklogQuota(limit_size=1))

        async def is_loaded_by_a_look() -> bool:
            await broker.topics.unload(names()[0])
            await asyncio.sleep(LOOK_SECONDS)
            with pytest.raises(BacklogHeld):
                await broker.scalable.admit_producer(names()[1])
            return names()[0] in broker.topics.loaded

        (await broker.segment(0)).subscriptions["s"].skip_all()
        await asyncio.sleep(1)
        assert await is_loaded_by_a_look()
        (await broker.segment(0)).subscriptions["other"].skip_all()
        await asyncio.sleep(1)
        assert not await is_loaded_by_a_look()
        for subscription in ("s", "other"):
            await broker.scalable.delete_subscription(TOPIC, subscription)
        for name in names():
            await broker.topics.unload(name)
        await asyncio.sleep(LOOK_SECONDS)
        await broker.scalable.admit_producer(names()[1])
        assert not broker.topics.loaded

    split_topic(scenario)


def test_a_segment_that_cannot_be_asked_holds_nobody_up() -> None:
    async def scenario(world: ScalableWorld, broker: Broker, size: int) -> None:
        asked = LocalSegments.slowest_backlog

        async def moody(self: LocalSegments, name: TopicName, *, with_age: bool) -> Any:
            if name == names()[0]:
                raise ServiceNotReady("its broker is elsewhere")
            return await asked(self, name, with_age=with_age)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalSegments, "slowest_backlog", moody)
            await set_quota(broker, "destination_storage", BacklogQuota(limit_size=size))
            await broker.scalable.admit_producer(names()[1])
            await broker.scalable.enforce_quotas()
        await asyncio.sleep(LOOK_SECONDS)
        with pytest.raises(BacklogHeld):
            await broker.scalable.admit_producer(names()[1])

    split_topic(scenario)


def test_a_broker_that_does_not_lead_the_topic_judges_producers_too() -> None:
    async def scenario(world: ScalableWorld, broker: Broker, size: int) -> None:
        await set_quota(broker, "destination_storage", BacklogQuota(limit_size=size))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(broker.scalable.controllers, "controller", lambda _: None)
            with pytest.raises(BacklogHeld):
                await broker.scalable.admit_producer(names()[1])
            assert broker.scalable.backlog(TOPIC, await _policies(broker)) == UNKNOWN

    split_topic(scenario)


def test_a_segment_has_no_quota_of_its_own() -> None:
    async def scenario(world: ScalableWorld, broker: Broker, size: int) -> None:
        await set_quota(broker, "destination_storage", BacklogQuota(limit_size=1))
        segment = await broker.segment(1)
        assert segment.policies.size_quota.limit == 1
        await segment.quotas.check()
        await broker.topics.enforce_quotas()
        assert (await backlogs(broker))[1] == PER_SEGMENT

    split_topic(scenario)


async def _policies(broker: Broker) -> Any:
    namespace = await broker.topics.namespaces.policies(TOPIC.namespace)
    return broker.scalable.policies(namespace)


@st.composite
def histories(draw: st.DrawFn) -> SegmentLayout:
    layout = SegmentLayout.create(draw(st.integers(1, 4)), now_ms=0)
    for _ in range(draw(st.integers(0, 5))):
        wanted = draw(st.sampled_from([each.segment_id for each in layout.active]))
        layout = layout.split(wanted, now_ms=0)
    return layout


@given(histories(), st.data())
def test_what_is_left_fits_and_the_oldest_goes_first(layout: SegmentLayout, data: Any) -> None:
    sizes = {number: data.draw(st.integers(0, 100)) for number in layout.segments}
    sizes = {number: size for number, size in sizes.items() if size}
    room = data.draw(st.integers(0, 1000))
    found = rooms(layout, sizes, room)
    left = {number: found.get(number, size) for number, size in sizes.items()}
    assert sum(left.values()) <= max(room, 0) or sum(sizes.values()) <= room
    assert all(found[number] < sizes[number] for number in found)
    active = {each.segment_id for each in layout.active}
    sealed = [number for number in sizes if number not in active]
    # One that is touched has none before it that still holds something; nothing goes needlessly.
    for number in found:
        older = sealed if number in active else [each for each in sealed if each < number]
        assert not any(left[each] for each in older)
    if found and not active.intersection(found):
        assert sum(left.values()) == room
    # Active ones that were cut have one size, and no other is larger.
    cut = {left[each] for each in active.intersection(found)}
    assert len(cut) <= 1
    assert all(left[each] <= size for size in cut for each in active if each in left)
