"""A streaming read over topics that split, merge and hold transactions; readers called as by Spark.

The fault points of the source (F1, F2, F8, F15, F17, F19 to F26) are tried here without a JVM, and
some of them once more with one, in `test_source_in_spark.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark.stage import Query, Stage, stage


@pytest.fixture
def on(tmp_path: Path) -> Iterator[Stage]:
    with stage(tmp_path) as made:
        yield made


def started(on: Stage, **options: str) -> Query:
    return on.query(startingOffsets="earliest", pollWaitMs="0", **options)


def test_everything_comes_once_and_then_nothing(on: Stage) -> None:
    on.send(100)
    query = started(on)
    query.drain()
    assert not query.step()
    on.send(10)
    query.drain()
    query.check()


def test_limits_are_exact(on: Stage) -> None:
    on.send(100)
    on.split(0)
    on.send(100)
    query = started(on, maxMessagesPerTrigger="7")
    query.drain()
    assert max(map(len, query.batches)) <= 7
    query.check()


# --- F17


@pytest.mark.parametrize("limit", ["3", "1000"])
def test_splits_and_merges_while_it_reads(on: Stage, limit: str) -> None:
    """Between planning and reading, between batches, twice, while parents are not drained."""
    on.send(40)
    query = started(on, maxMessagesPerTrigger=limit)
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


def test_a_split_between_the_log_and_the_read(on: Stage) -> None:
    on.send(40)
    query = started(on)
    end = query.plan()
    on.split(0)
    on.send(40)
    query.offsets.append(end)
    query._is_committed = False
    query.run_last()
    assert len(query.batches[0]) == 40
    query.drain()
    query.check()


def test_no_batch_has_a_segment_and_its_parent(on: Stage) -> None:
    on.send(40)
    on.split(0)
    on.send(40)
    query = started(on)
    query.drain()
    assert query.segments == [{0}, {1, 2}]
    query.check()
