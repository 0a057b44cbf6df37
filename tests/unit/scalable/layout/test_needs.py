"""Who needs a sealed segment, and what of it an operator may delete."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from magnetar.errors import Conflict, InvalidLayout, TopicNotFound
from magnetar.model.segments import SegmentLayout
from magnetar.scalable.layout.segments import LocalSegments
from magnetar.testing.virtual.virtual_time import run
from tests.unit.scalable.world import TOPIC, Broker, ScalableWorld


def with_topic(scenario: Callable[[Broker], Awaitable[None]]) -> None:
    """A topic whose segment 0 has two messages, and was split into 1 and 2."""

    async def main() -> None:
        world = ScalableWorld()
        broker = await world.broker()
        await broker.scalable.create(TOPIC)
        await broker.scalable.create_subscription(TOPIC, "s", "QUEUE")
        await broker.publish(0, 2)
        await broker.scalable.split(TOPIC, 0)
        await scenario(broker)
        await world.stop(broker)

    run(main())


async def layout(broker: Broker) -> SegmentLayout:
    found = (await broker.scalable.lookup(TOPIC, create=False)).layout
    found.check_invariants()
    return found


async def is_left(broker: Broker, number: int) -> bool:
    names = await broker.topics.segment_names(TOPIC)
    numbers = [name.descriptor.segment_id for name in names if name.descriptor is not None]
    assert set((await layout(broker)).segments) == set(numbers)
    return number in numbers


def test_a_drained_segment_is_deleted_before_its_time() -> None:
    async def scenario(broker: Broker) -> None:
        with pytest.raises(Conflict, match="subscription 's' has a backlog of 2 in it") as raised:
            await broker.scalable.delete_segment(TOPIC, 0)
        assert "force" in raised.value.hint
        assert await is_left(broker, 0)
        await broker.scalable.skip_all(TOPIC, "s")
        await broker.scalable.delete_segment(TOPIC, 0)
        assert not await is_left(broker, 0)
        found = await layout(broker)
        assert (found.epoch, sorted(found.segments)) == (2, [1, 2])
        assert all(not each.parent_ids for each in found.segments.values())
        # Its marks are gone, and so is nothing else.
        keys = await broker.parts.metadata.scan_keys("/scalable/state")
        assert not [key for key in keys if "drained-0" in key]
        await broker.publish(1)

    with_topic(scenario)


@pytest.mark.parametrize("force", [False, True])
def test_active_segments_and_those_with_parents_are_never_deleted(force: bool) -> None:
    async def scenario(broker: Broker) -> None:
        await broker.scalable.split(TOPIC, 1)
        await broker.scalable.skip_all(TOPIC, "s")
        before = await layout(broker)
        with pytest.raises(InvalidLayout, match="active"):
            await broker.scalable.delete_segment(TOPIC, 2, force=force)
        with pytest.raises(InvalidLayout, match="before its parent 0"):
            await broker.scalable.delete_segment(TOPIC, 1, force=force)
        with pytest.raises(InvalidLayout):
            await broker.scalable.delete_segment(TOPIC, 17, force=force)
        assert await layout(broker) == before
        # From the oldest on.
        await broker.scalable.delete_segment(TOPIC, 0, force=force)
        await broker.scalable.delete_segment(TOPIC, 1, force=force)
        assert sorted((await layout(broker)).segments) == [2, 3, 4]

    with_topic(scenario)


def test_by_force_what_is_left_is_lost_and_its_children_are_given_out() -> None:
    async def scenario(broker: Broker) -> None:
        session = await broker.scalable.sessions.attach(TOPIC, "s", "a", "STREAM", "1", False)
        owned = [each.segment.segment_id for each in session.assignment.segments]
        assert owned == [0]
        await broker.scalable.delete_segment(TOPIC, 0, force=True)
        await asyncio.sleep(1)
        owned = [each.segment.segment_id for each in session.assignment.segments]
        assert owned == [1, 2]
        assert not await is_left(broker, 0)

    with_topic(scenario)


def test_readers_checkpoint_groups_and_transactions_need_a_segment_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(broker: Broker) -> None:
        await broker.scalable.skip_all(TOPIC, "s")
        reader, consumer = await broker.subscribe(0, "reader", durable=False)
        with pytest.raises(Conflict, match="a reader is connected"):
            await broker.scalable.delete_segment(TOPIC, 0)
        await (await broker.segment(0)).release(reader)
        reader.remove_consumer(consumer)

        session = await broker.scalable.sessions.attach(TOPIC, "g", "a", "CHECKPOINT", "1", False)
        with pytest.raises(Conflict, match="checkpoint group 'g' has not read it"):
            await broker.scalable.delete_segment(TOPIC, 0)
        await session.leave()
        await asyncio.sleep(1)

        async def undecided(*_: object) -> bool:
            return True

        with monkeypatch.context() as patch:
            patch.setattr(LocalSegments, "undecided", undecided)
            with pytest.raises(Conflict, match="transaction in it is not decided"):
                await broker.scalable.delete_segment(TOPIC, 0)
        await broker.scalable.delete_segment(TOPIC, 0)
        assert not await is_left(broker, 0)

    with_topic(scenario)


def test_a_change_that_comes_between_the_look_and_the_deletion_is_judged_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(broker: Broker) -> None:
        await broker.scalable.skip_all(TOPIC, "s")
        asked = LocalSegments.undecided
        looks = 0

        async def slow(self: LocalSegments, name: object) -> bool:
            nonlocal looks
            looks += 1
            if looks == 1:
                await broker.scalable.merge(TOPIC, [1, 2])
            return await asked(self, name)  # type: ignore[arg-type]

        monkeypatch.setattr(LocalSegments, "undecided", slow)
        await broker.scalable.delete_segment(TOPIC, 0)
        assert looks == 2
        found = await layout(broker)
        assert sorted(found.segments) == [1, 2, 3]
        assert found.segment(3).parent_ids == (1, 2)

    with_topic(scenario)


def test_of_a_topic_that_there_is_not() -> None:
    async def scenario(broker: Broker) -> None:
        await broker.scalable.delete(TOPIC, force=True)
        with pytest.raises(TopicNotFound):
            await broker.scalable.delete_segment(TOPIC, 0)

    with_topic(scenario)
