"""Backlog quotas on a topic: who is closed, who gets in, what goes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.values import BacklogQuota
from magnetar.broker.topic import quota_rules
from magnetar.broker.topic.quotas import enforce_quotas
from magnetar.broker.topic.topic import Topic
from magnetar.errors import BacklogFull, BacklogHeld
from magnetar.managed_ledger.managed_ledger import EARLIEST
from magnetar.testing.virtual.virtual_time import run
from magnetar.wire.messages import Send
from tests.unit.broker.world import World, consumer, entry, options, receipts

SENT = 100


def with_topic(scenario: Callable[[Topic], Awaitable[None]]) -> None:
    """A topic with a durable subscription, behind which 100 messages stand, one a second."""

    async def main() -> None:
        world = World()
        topic = await world.topic()
        await topic.create_subscription("slow", EARLIEST)
        producer = await topic.add_producer(options())
        for number in range(SENT):
            data = entry(number, publish_time=world.clock.now_ms())
            producer.send(Send(1, number, 1, data))
            await receipts(producer, 1)
            await asyncio.sleep(1)
        await topic.remove_producer(producer)
        await scenario(topic)
        await topic.close()

    run(main())


def by_size(limit: int, policy: Any = "producer_request_hold") -> TopicPolicies:
    return TopicPolicies(size_quota=BacklogQuota(limit_size=limit, policy=policy))


def by_age(seconds: int, policy: Any = "producer_request_hold") -> TopicPolicies:
    return TopicPolicies(age_quota=BacklogQuota(limit_time=seconds, policy=policy))


@pytest.mark.parametrize(
    ("policy", "refusal"),
    [("producer_request_hold", BacklogHeld), ("producer_exception", BacklogFull)],
)
@pytest.mark.parametrize("by", [by_size, by_age])
def test_producers_are_closed_and_refused_until_the_backlog_is_smaller(
    policy: str, refusal: type[Exception], by: Callable[..., TopicPolicies]
) -> None:
    async def scenario(topic: Topic) -> None:
        producer = await topic.add_producer(options())
        size = topic.ledger.size_bytes
        half = size // 2 if by is by_size else SENT // 2
        await topic.apply(by(size + 1 if by is by_size else SENT + 10, policy))
        await enforce_quotas([topic])
        assert not producer.stopped
        await topic.apply(by(half, policy))
        with pytest.raises(refusal) as raised:
            await topic.add_producer(options(2, "b"))
        # Clients for Go look for names of codes in it.
        assert "Exceeded" not in str(raised.value)
        # Nothing is refused at SEND before the next look.
        producer.send(Send(1, SENT, 1, entry(SENT)))
        assert (await receipts(producer, 1))[0].error is None
        await enforce_quotas([topic])
        assert isinstance(producer.failure, refusal)
        assert await receipts(producer, 1) == []
        await topic.subscriptions["slow"].skip(SENT + 1)
        await topic.add_producer(options(2, "b"))

    with_topic(scenario)


def test_the_oldest_go_down_to_nine_tenths_for_every_durable_subscription() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.create_subscription("quick", topic.ledger.last_position())
        await topic.create_subscription("middle", EARLIEST)
        await topic.subscriptions["middle"].skip(95)
        size, evict = topic.ledger.size_bytes, "consumer_backlog_eviction"
        await topic.apply(by_size(size // 2, evict))
        producer = await topic.add_producer(options())
        await enforce_quotas([topic])
        assert not producer.stopped
        left = topic.subscriptions["slow"].backlog()
        assert left == 45
        assert topic.subscriptions["middle"].backlog() == 5
        assert topic.subscriptions["quick"].backlog() == 0
        # Again: there is nothing to do.
        await enforce_quotas([topic])
        assert topic.subscriptions["slow"].backlog() == left
        await topic.apply(by_age(20, evict))
        await enforce_quotas([topic])
        assert topic.subscriptions["slow"].backlog() == 18
        assert topic.subscriptions["middle"].backlog() == 5

    with_topic(scenario)


def test_nothing_goes_above_the_max_read_position() -> None:
    async def scenario(topic: Topic) -> None:
        first = topic.ledger.first_position()
        # As with a transaction that is open there.
        topic.max_read_position = lambda: first
        subscription = topic.subscriptions["slow"]
        subscription._topic = topic
        await topic.apply(by_size(100, "consumer_backlog_eviction"))
        await enforce_quotas([topic])
        assert subscription.backlog() == SENT - 1

    with_topic(scenario)


def test_readers_have_no_backlog_and_nothing_is_read_without_a_quota(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(topic: Topic) -> None:
        asked = consumer("reader", durable=False)
        (await topic.subscription(asked)).add_consumer(asked)
        await topic.delete_subscription("slow")
        await topic.apply(by_size(1))
        await topic.add_producer(options())
        await topic.apply(TopicPolicies())
        monkeypatch.setattr(quota_rules, "exceeded", None)
        await enforce_quotas([topic])
        await topic.add_producer(options(2, "b"))

    with_topic(scenario)


def test_statistics_tell_quotas_and_the_oldest_message() -> None:
    async def scenario(topic: Topic) -> None:
        assert topic.stats().oldest_backlog_message_age_seconds == -1
        await topic.apply(by_age(1000))
        await enforce_quotas([topic])
        shown = topic.stats()
        assert (shown.backlog_quota_limit_size, shown.backlog_quota_limit_time) == (-1, 1000)
        assert shown.oldest_backlog_message_age_seconds == SENT
        assert shown.oldest_backlog_message_subscription_name == "slow"
        await asyncio.sleep(5)
        assert topic.stats().oldest_backlog_message_age_seconds == SENT + 5
        await topic.subscriptions["slow"].skip(10)
        # Acknowledged since: the next look finds the next one.
        assert topic.stats().oldest_backlog_message_subscription_name is None
        await enforce_quotas([topic])
        assert topic.stats().oldest_backlog_message_age_seconds == SENT + 5 - 10

    with_topic(scenario)
