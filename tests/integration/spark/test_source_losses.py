"""A streaming read of topics that lose messages, segments, or themselves (F19, F20)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from magnetar.client.ranges.ranges import Ranges
from magnetar.errors import DataLost, RangeLost, TopicNotFound
from magnetar.model.names import TopicName
from magnetar.spark.data_source import MagnetarSource
from magnetar.spark.source import planner
from magnetar.spark.source.beginnings import begin
from tests.integration.spark.stage import REGULAR, TOPIC, Stage, rows_of, stage
from tests.unit.server.serving import LIMITS

SMALL = replace(
    LIMITS,
    managed_ledger_ledger_entries=5,
    scalable_sealed_seconds=0.05,
    scalable_auto_scale_interval_seconds=0.05,
)


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[Stage]:
    """A server with short ledgers, which prunes sealed segments at once."""
    with stage(tmp_path, SMALL) as made:
        yield made


def test_a_trimmed_start_fails_or_is_skipped(forgetful: Stage) -> None:
    on = forgetful
    on.send(10, REGULAR, one_by_one=True)
    query = on.from_earliest(topic=REGULAR, maxMessagesPerTrigger="2", subscription="none")
    query.step()
    count = on.send_until_trimmed(REGULAR)
    with pytest.raises(DataLost, match="failOnDataLoss") as raised:
        query.step()
    assert f"segment 0 of {REGULAR} was to be read from" in str(raised.value)
    query.restart(failOnDataLoss="false", maxMessagesPerTrigger="1000")
    query.drain()
    values = [int(row.value) for row in query.rows]
    assert values[:2] == [0, 1]
    assert values[2:] == list(range(count - len(values) + 2, count))
    assert len(values) < count


def test_a_trim_behind_an_idle_query_is_no_loss(forgetful: Stage) -> None:
    on = forgetful
    on.send(4, REGULAR)
    query = on.from_earliest(topic=REGULAR, subscription="none")
    for _ in range(5):
        on.send(4, REGULAR)
        query.drain()
    on.trim(REGULAR)
    query.restart()
    assert not query.step()
    on.send(4, REGULAR)
    query.drain()
    query.check()


def test_a_drained_parent_may_go(forgetful: Stage) -> None:
    on = forgetful
    on.send(20)
    on.pin()
    query = on.from_earliest()
    query.drain()
    on.split(0)
    on.send(20)
    query.drain()
    on.unpin()
    on.until_pruned(0)
    query.restart()
    assert not query.step()
    on.send(20)
    query.drain()
    query.check()


def test_a_parent_that_went_too_early_is_a_loss(forgetful: Stage) -> None:
    on = forgetful
    on.send(20)
    query = on.from_earliest(maxMessagesPerTrigger="5", subscription="none")
    query.step()
    on.split(0)
    on.send(20)
    on.until_pruned(0)
    query.restart()
    with pytest.raises(DataLost, match=r"segment 0 of .* was deleted before all of it was read"):
        query.step()
    query.restart(failOnDataLoss="false")
    query.drain()
    assert {int(row.value) for row in query.rows} >= set(range(20, 40))
    assert len(query.rows) == 25


def test_a_task_whose_start_is_trimmed_meanwhile(forgetful: Stage) -> None:
    on = forgetful
    on.send(38, REGULAR, one_by_one=True)
    query = on.from_earliest(topic=REGULAR, failOnDataLoss="false", subscription="none")
    end = json.loads(query.plan())
    (partition,) = query.reader.partitions(query.reader.initialOffset(), end)
    on.send_until_trimmed(REGULAR)
    schema = MagnetarSource(on.options({"topic": REGULAR})).schema()
    rows = rows_of(query.reader, partition, schema)
    assert len(rows) < 38
    assert [int(row.value) for row in rows] == list(range(38 - len(rows), 38))
    query.restart(failOnDataLoss="true")
    with pytest.raises(DataLost, match="failOnDataLoss"):
        rows_of(query.reader, partition, schema)


def test_a_segment_that_goes_while_a_batch_is_planned(
    on: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    on.send(40)
    query = on.from_earliest(maxMessagesPerTrigger="10")
    real, lost = Ranges.counts, [RangeLost("it was there a moment ago")]

    async def counts(*args: Any, **how: Any) -> Any:
        if lost:
            raise lost.pop()
        return await real(*args, **how)

    monkeypatch.setattr(Ranges, "counts", counts)
    query.drain()
    query.check()


def test_a_subscription_of_a_topic_that_is_gone_is_left_alone(on: Stage) -> None:
    on.send(10)
    query = on.from_earliest(subscription="spark", failOnDataLoss="false")
    query.drain()
    on.delete()
    query.reader.commit(json.loads(query.offsets[-1]))
    on.sent.clear()
    on.send(10)
    query.batches.clear()
    query.restart()
    query.drain()
    query.check()


def test_a_subscription_keeps_what_is_not_read(forgetful: Stage) -> None:
    on = forgetful
    on.send(20)
    query = on.from_earliest(maxMessagesPerTrigger="5", subscription="spark")
    query.step()
    query.step()
    assert on.backlog("spark") > 0  # it follows one batch behind
    on.split(0)
    on.send(20)
    on.split(1)
    for _ in range(5):
        on.send(10)
    query.drain()
    query.check()
    query.reader.commit(json.loads(query.offsets[-1]))
    assert on.backlog("spark") == 0


@pytest.mark.parametrize("topic", [REGULAR, TOPIC])
def test_a_query_keeps_what_it_has_not_read_without_being_told(
    forgetful: Stage, topic: str
) -> None:
    on = forgetful
    on.send(10, topic, one_by_one=True)
    query = on.from_earliest(topic=topic, maxMessagesPerTrigger="2")
    query.step()
    for _ in range(5):
        on.send(6, topic, one_by_one=True)
        assert not any(on.trim(each.name) for each in on.client.ranges(topic).layout().segments)
    query.drain()
    query.check()
    # A query that rests is not a batch behind, though Spark never tells it of the last one.
    assert on.backlog("spark", topic) == 0


def test_the_subscription_is_there_before_the_start_is_resolved(
    forgetful: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = forgetful
    on.send(10, REGULAR, one_by_one=True)

    async def late(*given: Any) -> Any:
        for _ in range(5):
            await asyncio.to_thread(on.send, 6, REGULAR, one_by_one=True)
            assert await asyncio.to_thread(on.trim, REGULAR) == []
        return await begin(*given)

    monkeypatch.setattr(planner, "begin", late)
    query = on.from_earliest(topic=REGULAR)
    query.drain()
    query.check()


def test_a_query_goes_on_after_its_subscription_was_deleted(forgetful: Stage) -> None:
    on = forgetful
    on.send(10)
    query = on.from_earliest(maxMessagesPerTrigger="4")
    query.step()
    query.step()
    name = TopicName.parse(TOPIC)
    on.do(lambda server: server.context.scalable.delete_subscription(name, "spark"))
    query.restart()
    query.step()
    assert 0 < on.backlog("spark") < 10
    query.drain()
    query.check()


def test_batch_reads_and_queries_that_want_none_hold_nothing(on: Stage) -> None:
    on.send(10)
    assert len(on.batch()) == 10
    on.from_earliest(subscription="none").drain()
    name = TopicName.parse(TOPIC)
    assert on.do(lambda server: server.context.scalable.delete_subscription(name, "spark")) is False


def test_a_topic_that_was_made_again(on: Stage) -> None:
    on.send(20)
    query = on.from_earliest()
    query.drain()
    on.delete()
    with pytest.raises(TopicNotFound, match="does not exist"):
        query.restart()
    on.sent.clear()
    on.send(20)
    query.restart()
    with pytest.raises(DataLost, match="deleted and made again"):
        query.step()
    query.restart(failOnDataLoss="false")
    query.batches.clear()
    query.drain()
    query.check()
