"""Compaction by itself: thresholds, pauses after failures, what is kept and what is spared."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from magnetar.broker.policy.namespaces import DEFAULT
from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.values import BacklogQuota, RetentionPolicies
from magnetar.broker.topic.compaction_checks import is_due
from magnetar.broker.topic.maintenance import CARE_SECONDS
from magnetar.broker.topic.topic import Topic
from magnetar.broker.topic.topics import Topics
from magnetar.errors import NotAllowed
from magnetar.managed_ledger.ledger_list import LedgerSpan
from magnetar.managed_ledger.managed_ledger import EARLIEST
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import COMPACTION
from magnetar.runtime.limits import Limits
from magnetar.testing.virtual.virtual_time import run
from tests.unit.broker.compact_world import Table, compact, compacted, folded, read
from tests.unit.broker.world import NAME, World, consumer

LIMITS = Limits(managed_ledger_ledger_entries=5)
CHECK_SECONDS = LIMITS.compaction_check_seconds
TICKS = TopicName.parse("non-persistent://public/default/ticks")
SEGMENT = TopicName.parse("segment://public/default/orders/0000-ffff-0")


def with_topics(
    scenario: Callable[[World, Topics], Awaitable[None]], limits: Limits = LIMITS
) -> None:
    async def main() -> None:
        world = World(limits)
        topics = await world.topics()
        await scenario(world, topics)
        await topics.stop()

    run(main())


async def loaded(topics: Topics, name: TopicName = NAME) -> Topic:
    topic = await topics.get(name)
    assert isinstance(topic, Topic)
    return topic


def setting(**values: object) -> Callable[[Policies], Policies]:
    return lambda old: msgspec.structs.replace(old, **values)


@pytest.mark.parametrize(
    ("horizon", "threshold", "due"),
    [
        (None, 0, False),
        (None, 199, True),
        (None, 200, False),
        (Position(1, 9), 99, True),
        (Position(1, 9), 100, False),
        (Position(2, 4), 49, True),
        (Position(2, 9), 1, False),
    ],
)
def test_what_stands_behind_the_horizon_counts(
    horizon: Position | None, threshold: int, due: bool
) -> None:
    spans = [LedgerSpan(number, 0, None, 10, 100) for number in (1, 2)]
    assert is_due(spans, horizon, threshold) is due


def test_a_topic_is_compacted_by_its_threshold() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        topic = await loaded(topics)
        assert COMPACTION not in topic.subscriptions
        await topics.change_namespace(DEFAULT, setting(compaction_threshold=100_000))
        assert COMPACTION in topic.subscriptions, "nothing may go before it was seen"
        table = await Table.of(topic)
        await table.put_all((f"k{number % 3}", b"%d" % number) for number in range(20))
        await asyncio.sleep(3 * CHECK_SECONDS)
        assert len(topic.ledger.ledger_spans) > 3
        assert topic.compacted is None, "there is less than that"
        await topics.change_topic(NAME, setting(compaction_threshold=500))
        await asyncio.sleep(2 * CHECK_SECONDS)
        assert topic.compaction.report.status == "SUCCESS"
        assert topic.compacted is not None
        assert topic.compacted.horizon == topic.ledger.last_position()
        # What was compacted goes, and is read all the same.
        await asyncio.sleep(2 * CARE_SECONDS)
        assert topic.ledger.entries < 20
        assert folded(await read(topic)) == table.values
        done_ms = topic.stats().compaction.last_compaction_succeed_timestamp
        await table.put(("k0", b"new"))
        await asyncio.sleep(2 * CHECK_SECONDS)
        assert topic.stats().compaction.last_compaction_succeed_timestamp == done_ms

    with_topics(scenario)


def test_a_topic_with_a_threshold_keeps_everything_from_its_loading_on() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        await topics.change_namespace(DEFAULT, setting(compaction_threshold=100_000))
        topic = await loaded(topics)
        assert topic.subscriptions[COMPACTION].cursor.mark_delete == EARLIEST
        await topics.change_namespace(DEFAULT, setting(max_subscriptions_per_topic=1))
        await topic.subscription(consumer("s"))
        with pytest.raises(NotAllowed, match="1 subscriptions, its limit"):
            await topic.subscription(consumer("t"))
        await topic.delete_subscription(COMPACTION)
        await asyncio.sleep(2 * CHECK_SECONDS)
        assert COMPACTION in topic.subscriptions, "as long as there is a threshold"

    with_topics(scenario)


def test_what_fails_is_tried_again_after_pauses_that_double() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        topic = await loaded(topics)
        table = await Table.of(topic)
        await table.put_all((f"k{number}", b"1") for number in range(20))
        await topics.change_topic(NAME, setting(compaction_threshold=1))
        report = topic.compaction.report
        await asyncio.sleep(10.5 * CHECK_SECONDS)
        assert report.status == "ERROR"
        # After 1, 2, 4 and 8: not once in each of the ten.
        assert 3 <= report.failures <= 5
        await asyncio.sleep(10 * 3600)
        assert 10 <= report.failures <= 20

    with_topics(scenario, Limits(compaction_keys=10))


def test_quotas_and_expiry_pass_it_by() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        evict = BacklogQuota(1, 1, -1, "consumer_backlog_eviction")
        await topics.change_namespace(
            DEFAULT,
            setting(
                backlog_quota_map={"destination_storage": evict},
                compaction_threshold=100_000,
                message_ttl_in_seconds=1,
            ),
        )
        topic = await loaded(topics)
        table = await Table.of(topic)
        await table.put_all((f"k{number}", b"1") for number in range(7))
        await asyncio.sleep(20 * CARE_SECONDS)
        assert topic.subscriptions[COMPACTION].backlog() == 7
        hold = BacklogQuota(1, 1, -1, "producer_request_hold")
        await topics.change_namespace(
            DEFAULT, setting(backlog_quota_map={"destination_storage": hold})
        )
        await topics.enforce_quotas()
        await Table.of(topic, "another")

    with_topics(scenario)


def test_a_reader_of_the_view_is_spared_by_the_time_to_live() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        keep = RetentionPolicies(-1, -1)
        await topics.change_namespace(
            DEFAULT, setting(message_ttl_in_seconds=1, retention_policies=keep)
        )
        topic = await loaded(topics)
        table = await Table.of(topic)
        await table.put_all((f"k{number}", b"1") for number in range(7))
        await compact(topic)
        request = compacted()
        subscription = await topic.subscription(request)
        reader = subscription.add_consumer(request)
        reader.flow(2)
        await asyncio.sleep(20 * CARE_SECONDS)
        reader.flow(100)
        await asyncio.sleep(1)
        assert len(reader.take()) == 7

    with_topics(scenario)


def test_only_what_is_stored_can_be_read_compacted() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        ticks = await topics.get(TICKS)
        with pytest.raises(NotAllowed, match="nothing to compact"):
            await ticks.subscription(compacted())

    with_topics(scenario)


def test_the_view_outlives_the_retention_of_the_log() -> None:
    async def scenario(world: World, topics: Topics) -> None:
        await topics.change_namespace(DEFAULT, setting(retention_policies=RetentionPolicies(1, -1)))
        topic = await loaded(topics)
        table = await Table.of(topic)
        await table.put_all((f"k{number}", b"1") for number in range(12))
        await compact(topic)
        await table.put_all((f"k{number}", b"2") for number in range(3))
        await compact(topic)
        await asyncio.sleep(5 * 3600)
        assert topic.ledger.entries == 0
        assert folded(await read(topic)) == table.values
        # After a load, too.
        await topics.unload(NAME)
        assert folded(await read(await loaded(topics))) == table.values

    with_topics(scenario)


def test_segments_keep_what_deletes_a_key() -> None:
    """What a child deletes may still stand in the view of its parent, which is read before it."""

    async def scenario(world: World, topics: Topics) -> None:
        await topics.create(SEGMENT)
        topic = await topics.get(SEGMENT)
        assert isinstance(topic, Topic)
        table = await Table.of(topic)
        await table.put(("a", b"1"), ("b", b"1"), ("a", b""))
        await table.put(("c", b""))
        await compact(topic)
        rows = await read(topic)
        assert [row[:2] for row in rows] == [("b", b"1"), ("a", b""), ("c", b"")]
        await table.put(("a", b"2"))
        await compact(topic)
        rows = await read(topic)
        assert [row[:2] for row in rows] == [("b", b"1"), ("c", b""), ("a", b"2")]
        assert folded(rows) == table.values

    with_topics(scenario)
