"""A sink whose topic splits and merges while a batch is under way (F18), without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from magnetar.spark.sink import producers
from tests.integration.spark.reading import check_numbers
from tests.integration.spark.stage import Stage, stage
from tests.integration.spark.writing import TOPIC, Writing, rows, tasks, write_id
from tests.unit.server.serving import LIMITS

ROWS = 40


@pytest.fixture
def on(tmp_path: Path) -> Iterator[Stage]:
    """Splits and merges hardly wait for transactions, which do not end before them here."""
    limits = replace(LIMITS, scalable_change_txn_wait_seconds=0.1)
    with stage(tmp_path / "data", limits) as made:
        yield made


@pytest.fixture
def writing(on: Stage) -> Iterator[Writing]:
    made = Writing(on.url)
    try:
        yield made
    finally:
        producers.close_all()
        made.client.close()


def numbers(batch: int) -> Sequence[int]:
    return range(batch * ROWS, (batch + 1) * ROWS)


def test_segments_change_between_the_rows_of_a_task_and_before_the_commit(
    on: Stage, writing: Writing
) -> None:
    sink = writing.sink()
    sink.commit(0, tasks(sink, write_id(0), numbers(0)))
    changes: list[Callable[[], None]] = [
        lambda: on.split(0, TOPIC),
        lambda: on.merge(1, 2, topic=TOPIC),
        lambda: on.split(3, TOPIC),
        lambda: on.merge(4, 5, topic=TOPIC),
    ]

    def disturbed(batch: int, change: Callable[[], None]) -> Iterator[pa.RecordBatch]:
        half = ROWS // 2
        yield rows(numbers(batch)[:half])
        change()
        yield rows(numbers(batch)[half:])

    for batch in (1, 3):
        sink.commit(batch, [sink.write(disturbed(batch, changes.pop(0)), write_id(batch))])
        done = tasks(sink, write_id(batch + 1), numbers(batch + 1))
        changes.pop(0)()
        check_numbers(writing.found((batch + 1) * ROWS), range((batch + 1) * ROWS))
        sink.commit(batch + 1, done)
    check_numbers(writing.found(5 * ROWS), range(5 * ROWS))


def test_what_a_lost_attempt_wrote_before_a_split_is_not_seen_after_it(
    on: Stage, writing: Writing
) -> None:
    sink = writing.sink()
    tasks(sink, write_id(0), numbers(0))  # and its driver dies
    on.split(0, TOPIC)
    again = writing.sink()
    done = tasks(again, write_id(0, "run-2"), numbers(0))
    on.merge(1, 2, topic=TOPIC)
    again.commit(0, done)
    check_numbers(writing.found(ROWS), range(ROWS))
