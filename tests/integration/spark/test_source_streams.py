"""A streaming read over topics that split, merge and hold transactions; readers called as by Spark.

The fault points of the source (F1, F2, F8, F15, F17, F19 to F26) are tried here without a JVM, and
some of them once more with one, in `test_source_in_spark.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from magnetar.blocking import Client
from magnetar.errors import WrongCheckpoint
from magnetar.spark.source import watched_topics
from tests.integration.spark.stage import ALL, Stage, stage
from tests.unit.server.serving import LIMITS


def test_everything_comes_once_and_then_nothing(on: Stage) -> None:
    on.send(100)
    query = on.from_earliest()
    query.drain()
    assert not query.step()
    on.send(10)
    query.drain()
    query.check()


def test_limits_are_exact(on: Stage) -> None:
    on.send(100)
    on.split(0)
    on.send(100)
    query = on.from_earliest(maxMessagesPerTrigger="7")
    query.drain()
    assert max(map(len, query.batches)) <= 7
    query.check()


# --- F17


@pytest.mark.parametrize("limit", ["3", "1000"])
def test_splits_and_merges_while_it_reads(on: Stage, limit: str) -> None:
    """Between planning and reading, between batches, twice, while parents are not drained."""
    on.send(40)
    query = on.from_earliest(maxMessagesPerTrigger=limit)
    query.step()
    on.split(0)
    on.send(40)
    query.step()
    on.split(1)
    on.send(40)
    on.merge(2, 4)  # of different depth
    on.send(40)
    query.step()
    on.merge(3, 5)
    on.send(40)
    query.drain()
    query.check()


def test_short_ranges_share_a_task(on: Stage) -> None:
    on.send(10)
    on.split(0)
    on.send(20)
    query = on.from_earliest()
    query.drain()
    on.send(20)
    query.step()
    assert (len(query.segments[-1]), query.num_tasks) == (2, 1)
    query.replay()
    # Who says how many there should be gets them.
    query.restart(minPartitions="2")
    on.send(20)
    query.step()
    assert (len(query.segments[-1]), query.num_tasks) == (2, 2)
    query.check()


def test_a_split_between_the_log_and_the_read(on: Stage) -> None:
    on.send(40)
    query = on.from_earliest()
    end = query.plan()
    on.split(0)
    on.send(40)
    query.offsets.append(end)
    query._is_committed = False
    query.run_last()
    assert len(query.batches[0]) == 40
    query.drain()
    query.check()


def test_a_split_and_a_merge_in_the_middle_of_a_read(tmp_path: Path) -> None:
    """A task has some rows, and many pages to go, when what it reads is sealed."""
    with stage(tmp_path / "data", replace(LIMITS, range_page_entries=2)) as on:
        on.send(40, one_by_one=True)
        query = on.from_earliest()
        for change in (lambda: on.split(0), lambda: on.merge(1, 2)):
            reader = _Disturbed(query._task_reader, change)
            query._task_reader = reader
            while not reader.batches_after:
                assert query.step()
            assert reader.batches_after > 10
            query._task_reader = reader.reader
            on.send(40, one_by_one=True)
        query.drain()
        query.check()


class _Disturbed:
    """A task's reader; something happens after its first rows."""

    def __init__(self, reader: Any, change: Callable[[], None]) -> None:
        self.reader = reader
        self.batches_after = 0
        self._change = [change]

    def read(self, partition: Any) -> Iterator[Any]:
        for batch in self.reader.read(partition):
            yield batch
            if self._change:
                self._change.pop()()
            else:
                self.batches_after += 1


def test_no_batch_has_a_segment_and_its_parent(on: Stage) -> None:
    on.send(40)
    on.split(0)
    on.send(40)
    query = on.from_earliest()
    query.drain()
    assert query.segments == [{0}, {1, 2}]
    query.check()


def test_a_split_after_a_crash_with_an_undrained_parent(on: Stage) -> None:
    on.send(40)
    query = on.from_earliest(maxMessagesPerTrigger="10")
    query.step(crash="after-wal")
    on.split(0)
    on.send(20)
    query.restart()
    on.split(2)
    on.send(20)
    query.drain()
    query.check()


# --- F1, F2, F8, F15: crashes, and restarts with other limits


@pytest.mark.parametrize("point", ["before-wal", "after-wal", "in-commit"])
@pytest.mark.parametrize("batch", [0, 2])
def test_a_crash_of_the_driver(on: Stage, point: str, batch: int) -> None:
    on.send(60)
    query = on.from_earliest(maxMessagesPerTrigger="15", subscription="spark")
    for _ in range(batch):
        query.step()
    query.step(crash=point)
    on.send(10)
    query.drain()
    query.check()


def test_a_replayed_batch_has_the_same_rows(on: Stage) -> None:
    on.send(60)
    query = on.from_earliest(maxMessagesPerTrigger="20")
    query.step()
    on.split(0)
    on.send(30)
    query.replay()
    query.restart(startingOffsets="latest")  # the start is in the log
    query.run_last()
    query.step()
    query.replay()
    query.drain()
    query.replay()
    query.check()


def test_a_restart_with_other_limits_and_other_tasks(on: Stage) -> None:
    for _ in range(10):
        on.send(30)
    query = on.from_earliest(maxMessagesPerTrigger="50")
    query.step(crash="after-wal")
    query.restart(maxMessagesPerTrigger="7", minPartitions="5")
    query.run_last()
    assert query.num_tasks >= 5
    query.step()
    query.restart(maxMessagesPerTrigger="90", maxRecordsPerPartition="20")
    query.drain()
    query.stage.check(sorted(query.rows, key=lambda row: int(row.value)))


# --- F25: the start


def test_latest_is_pinned_by_the_first_batch(on: Stage) -> None:
    on.send(30)
    on.sent.clear()
    query = on.query(pollWaitMs="0")
    query.step(crash="after-wal")
    on.send(30)
    query.restart()
    query.drain()
    query.check()


def test_latest_before_the_log_may_be_later(on: Stage) -> None:
    on.send(30)
    query = on.query(pollWaitMs="0")
    query.step(crash="before-wal")
    on.send(5)
    on.sent.clear()
    query.step()
    on.send(30)
    query.drain()
    query.check()


def test_latest_on_a_topic_that_was_split_and_splits(on: Stage) -> None:
    on.send(30)
    on.split(0)
    on.send(30)
    on.sent.clear()
    query = on.query(pollWaitMs="0")
    query.step()
    on.split(1)
    on.send(30)
    query.drain()
    query.check()


# --- F21: transactions


def test_aborted_messages_are_never_seen(on: Stage) -> None:
    on.send(10)
    on.send_in_transaction(5, commit=False)
    query = on.from_earliest()
    query.drain()
    on.send_in_transaction(5, commit=False)  # a whole range of them
    query.drain()
    on.send_in_transaction(5, commit=True)
    on.send(5)
    on.send_in_transaction(5, commit=False)  # at the end of a range
    query.drain()
    assert not query.step()
    query.check()


def test_an_open_transaction_holds_what_is_behind_it(on: Stage) -> None:
    on.send(10)
    query = on.from_earliest()
    with on.open_transaction(3, is_kept=True) as transaction:
        query.drain()
        assert len(query.rows) == 10
        transaction.commit()
    on.settle()
    query.drain()
    query.check()


def test_an_open_transaction_is_seen_by_those_who_want_it(on: Stage) -> None:
    on.send(10)
    query = on.from_earliest(readIsolation="uncommitted")
    with on.open_transaction(3, is_kept=True) as transaction:
        query.drain()
        query.check()
        transaction.abort()


# --- F22, F24: nothing to do


def test_an_empty_topic(on: Stage) -> None:
    on.client.producer("topic://public/default/orders").close()
    query = on.from_earliest()
    assert query.step()  # Spark always runs the first batch
    assert not query.step()
    assert query.num_tasks == 0
    on.split(0)
    query.drain()
    on.send(10)
    query.drain()
    query.check()


def test_a_pattern_that_matches_nothing_yet(on: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_topics, "PATTERN_S", 0.0)
    query = on.from_earliest(topicsPattern="topic://public/default/.*")
    assert query.step()
    assert not query.step()
    on.send(10)
    query.drain()
    query.check()


def test_nothing_new_is_the_same_text(on: Stage) -> None:
    on.send(10)
    on.split(0)
    on.send(10)
    query = on.from_earliest(pollWaitMs="5")
    query.drain()
    ends = {query.plan() for _ in range(5)}
    query.restart()
    ends |= {query.plan() for _ in range(5)}
    assert ends == {query.offsets[-1]}


def test_a_newer_epoch_is_no_batch(on: Stage) -> None:
    """A layout that changed and left nothing to do is not asked for again and again."""
    on.send(10)
    query = on.from_earliest()
    query.drain()
    on.split(0)
    query.drain()
    count = len(query.offsets)
    on.split(1)
    on.merge(3, 4)
    query.drain()
    assert len(query.offsets) <= count + 2
    assert not query.step()


# --- F23: what is there now


def test_a_run_on_what_is_there_ends(on: Stage) -> None:
    on.send(40)
    on.split(0)
    on.send(40)
    on.send_in_transaction(3, commit=False)
    query = on.query(startingOffsets="earliest", maxMessagesPerTrigger="30")
    query.restart(available_now=True)
    there = {key: list(values) for key, values in on.sent.items()}
    query.step()
    on.split(1)
    on.send(40)
    query.step(crash="after-wal")
    query.restart(available_now=True)
    now = sum(map(len, on.sent.values()))
    on.send(40)
    query.drain()
    assert sum(map(len, there.values())) <= len(query.rows) <= now
    query.restart(available_now=True)
    query.drain()
    query.check()


def test_a_run_on_what_is_there_does_not_wait_for_more(on: Stage) -> None:
    on.send(10)
    query = on.query(startingOffsets="earliest", minMessagesPerTrigger="1000")
    query.restart(available_now=True)
    query.drain()
    query.check()


# --- F26


def test_committed_messages_stay_when_their_transactions_are_forgotten(tmp_path: Path) -> None:
    limits = replace(LIMITS, txn_retention_seconds=0.01)
    with stage(tmp_path, limits) as on:
        for _ in range(5):
            on.send_in_transaction(3, commit=True)
            on.send_in_transaction(3, commit=False)
        query = on.from_earliest()
        query.drain()
        query.check()
        again = on.from_earliest()
        again.drain()
        again.check()


# --- admission


def test_bytes_are_a_soft_limit(on: Stage) -> None:
    for _ in range(20):
        on.send(5)
    query = on.from_earliest(maxBytesPerTrigger="500")
    query.drain()
    assert len(query.batches) > 5
    query.check()


def test_a_minimum_is_waited_for_but_not_for_ever(on: Stage) -> None:
    on.send(5)
    query = on.from_earliest(minMessagesPerTrigger="10", maxTriggerDelay="1h")
    query.step()
    assert not query.step()
    on.send(4)
    assert not query.step()
    on.send(1)
    assert query.step()
    query.check()
    query.restart(maxTriggerDelay="0s")
    on.send(1)
    assert query.step()
    query.check()


def test_all_that_is_there_is_obeyed_whatever_the_limit(on: Stage) -> None:
    on.send(50)
    query = on.from_earliest(maxMessagesPerTrigger="10")
    query.step(ALL)
    assert len(query.rows) == 50


def test_lag_is_told(on: Stage) -> None:
    on.send(50)
    query = on.from_earliest(maxMessagesPerTrigger="10")
    query.step()
    lag = query.reader.reportLatestOffset()
    assert lag is not None
    assert lag["lagMessages"] == 40
    assert lag["lagBytes"] > 0
    assert 0 <= lag["lagSeconds"] < 600
    query.drain()
    assert query.reader.reportLatestOffset() == {
        "lagBytes": 0,
        "lagMessages": 0,
        "lagSeconds": 0.0,
    }


# --- topics


def test_several_topics_and_partitions(on: Stage) -> None:
    on.partitioned("persistent://public/default/parts", 3)
    on.send(30, "persistent://public/default/parts")
    on.send(30, "topic://public/default/x")
    query = on.from_earliest(topics="parts, topic://public/default/x", maxMessagesPerTrigger="20")
    query.drain()
    on.grow("persistent://public/default/parts", 5)
    on.client.close()
    on.client = Client(on.url)
    on.send(30, "persistent://public/default/parts")
    query.drain()
    assert sorted(int(row.value) for row in query.rows) == list(range(90))


@pytest.mark.parametrize("domain", ["topic", "persistent"])
def test_a_pattern_takes_topics_that_come_later_from_their_beginning(
    on: Stage, domain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_topics, "PATTERN_S", 0.0)
    on.send(10, f"{domain}://public/default/a1")
    on.send(10, f"{domain}://public/default/b1")
    query = on.query(topicsPattern=f"{domain}://public/default/a.*", pollWaitMs="0")
    query.step()
    on.send(10, f"{domain}://public/default/a2")
    on.send(10, f"{domain}://public/default/a1")
    query.drain()
    assert sorted(int(row.value) for row in query.rows) == list(range(20, 40))


def test_the_checkpoint_of_another_topic_is_refused(on: Stage) -> None:
    on.send(10)
    on.send(10, "topic://public/default/another")
    query = on.from_earliest()
    query.drain()
    query.restart(topic="topic://public/default/another")
    with pytest.raises(WrongCheckpoint, match="query that read topic://public/default/orders, and"):
        query.step()
