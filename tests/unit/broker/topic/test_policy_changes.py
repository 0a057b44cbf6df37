"""Changed policies and the topics that follow: order, loads that meet a change, turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from magnetar.broker.policy.defaults import PolicyDefaults
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.namespaces import DEFAULT
from magnetar.broker.policy.policies import Policies
from magnetar.broker.topic import policy_changes
from magnetar.broker.topic.policy_changes import PolicyChanges
from magnetar.broker.topic.topic import Topic
from magnetar.broker.topic.topics import Topics
from magnetar.errors import ServiceNotReady, TopicNotFound
from magnetar.model.names import TopicName
from magnetar.runtime.keyed_lock import KeyedLock
from magnetar.runtime.slices import SLICE_ITEMS
from magnetar.testing.virtual.virtual_time import run
from tests.unit.broker.world import NAME, World


def with_topics(scenario: Callable[[Topics], Awaitable[None]]) -> None:
    async def main() -> None:
        topics = await World().topics()
        await scenario(topics)
        await topics.stop()

    run(main())


def ttl(seconds: int | None) -> Callable[[Policies], Policies]:
    return lambda old: msgspec.structs.replace(old, message_ttl_in_seconds=seconds)


def named(number: int) -> TopicName:
    return TopicName.parse(f"persistent://public/default/t{number}")


def test_of_two_changes_at_once_the_one_stored_last_holds_everywhere() -> None:
    async def scenario(topics: Topics) -> None:
        loaded = [await topics.get(named(number)) for number in range(5)]
        told = PolicyChanges._tell
        slow = asyncio.Event()

        async def held_up(
            self: PolicyChanges, name: TopicName, policies: Policies, *more: Any
        ) -> None:
            # The first change stops at its third topic until the second one has been asked for.
            if policies.message_ttl_in_seconds == 1 and name == named(2):
                await slow.wait()
            await told(self, name, policies, *more)

        with patch.object(PolicyChanges, "_tell", held_up):
            first = asyncio.create_task(topics.change_namespace(DEFAULT, ttl(1)))
            await asyncio.sleep(0.1)
            second = asyncio.create_task(topics.change_namespace(DEFAULT, ttl(2)))
            await asyncio.sleep(0.1)
            slow.set()
            await asyncio.gather(first, second)
        assert [each.policies.message_ttl_seconds for each in loaded] == [2] * 5

    with_topics(scenario)


def test_without_its_turn_the_older_change_would_come_last() -> None:
    """The rule that is patched out is the one that the test above relies on."""

    async def scenario(topics: Topics) -> None:
        topic = await topics.get(NAME)
        told = PolicyChanges._tell
        slow = asyncio.Event()

        async def held_up(
            self: PolicyChanges, name: TopicName, policies: Policies, *more: Any
        ) -> None:
            if policies.message_ttl_in_seconds == 1:
                await slow.wait()
            await told(self, name, policies, *more)

        @asynccontextmanager
        async def nobody_waits(self: object, key: object) -> AsyncIterator[None]:
            yield

        with (
            patch.object(PolicyChanges, "_tell", held_up),
            patch.object(KeyedLock, "of", nobody_waits),
        ):
            first = asyncio.create_task(topics.change_namespace(DEFAULT, ttl(1)))
            await asyncio.sleep(0.1)
            await topics.change_namespace(DEFAULT, ttl(2))
            slow.set()
            await first
        assert topic.policies.message_ttl_seconds == 1

    with_topics(scenario)


def test_partitions_are_changed_together_and_one_that_is_missing_is_told() -> None:
    async def scenario(topics: Topics) -> None:
        loaded = [await topics.get(named(number)) for number in range(100)]
        await topics.change_topics([named(number) for number in range(100)], ttl(3))
        assert {each.policies.message_ttl_seconds for each in loaded} == {3}
        with pytest.raises(TopicNotFound):
            await topics.change_topics([named(1), named(1000)], ttl(4))
        assert loaded[1].policies.message_ttl_seconds == 4

    with_topics(scenario)


def test_a_topic_that_is_being_loaded_meets_no_old_policy() -> None:
    async def scenario(topics: Topics) -> None:
        opened = Topic.open
        change_done = asyncio.Event()

        async def slow_open(*given: object) -> Topic:
            topic = await opened(*given)  # type: ignore[arg-type]  # passed through
            await change_done.wait()
            return topic

        with patch.object(Topic, "open", slow_open):
            load = asyncio.create_task(topics.get(NAME))
            await asyncio.sleep(0.1)
            await topics.change_namespace(DEFAULT, ttl(7))
            change_done.set()
            assert (await load).policies.message_ttl_seconds == 7

    with_topics(scenario)


def test_a_topic_that_cannot_catch_up_is_given_back() -> None:
    async def scenario(topics: Topics) -> None:
        opened = Topic.open

        async def open_and_change(*given: object) -> Topic:
            topic = await opened(*given)  # type: ignore[arg-type]  # passed through
            await topics.change_namespace(DEFAULT, ttl(7))
            return topic

        async def fail(self: Topic, policies: TopicPolicies) -> None:
            raise ServiceNotReady("not now")

        with (
            patch.object(Topic, "open", open_and_change),
            patch.object(Topic, "apply", fail),
            pytest.raises(ServiceNotReady),
        ):
            await topics.get(NAME)
        assert not topics.loaded
        assert (await topics.get(NAME)).policies.message_ttl_seconds == 7

    with_topics(scenario)


def test_a_topic_that_fails_holds_no_other_up() -> None:
    async def scenario(topics: Topics) -> None:
        loaded = [await topics.get(named(number)) for number in range(3)]
        applied = Topic.apply

        async def fail(self: Topic, policies: TopicPolicies) -> None:
            if self.name == named(0):
                raise ServiceNotReady("not now")
            await applied(self, policies)

        with patch.object(Topic, "apply", fail), pytest.raises(ServiceNotReady):
            await topics.change_namespace(DEFAULT, ttl(7))
        assert [each.policies.message_ttl_seconds for each in loaded] == [0, 7, 7]

    with_topics(scenario)


def test_topics_that_are_about_to_end_are_left_alone() -> None:
    async def scenario(topics: Topics) -> None:
        topic = await topics.get(NAME)
        assert isinstance(topic, Topic)
        topic.lost = ServiceNotReady("lost")
        await topics.change_namespace(DEFAULT, ttl(7))
        assert topic.policies.message_ttl_seconds == 0
        topic.lost = None

    with_topics(scenario)


def test_others_have_their_turn_while_many_topics_follow() -> None:
    async def scenario(topics: Topics) -> None:
        count = 10
        for number in range(count):
            await topics.get(named(number))
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count_turns())
        with patch.object(policy_changes, "FOLLOW_ITEMS", SLICE_ITEMS // 2):
            await topics.change_namespace(DEFAULT, ttl(7))
        counting.cancel()
        assert turns >= count // 2

    with_topics(scenario)


def test_the_brokers_policies_reach_topics_that_set_none() -> None:
    async def scenario(topics: Topics) -> None:
        one, other = await topics.get(named(1)), await topics.get(named(2))
        await topics.change_topic(named(2), ttl(5))
        policies = PolicyDefaults(ttl_duration_default_in_seconds=9).as_policies(World().limits)
        await topics.change_broker(policies)
        assert (one.policies.message_ttl_seconds, other.policies.message_ttl_seconds) == (9, 5)
        assert (await topics.get(named(3))).policies.message_ttl_seconds == 9

    with_topics(scenario)
