"""No segment runs ahead of those that wait: what a watermark would drop.

Spark has one watermark for a query: the latest time that it has seen, less a delay. A row that is
older is dropped as late, though a computation over all rows keeps it.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from magnetar.spark.source import admission, planner
from tests.integration.spark.stage import Query, Stage

DELAY = timedelta(milliseconds=4)
"""Of the watermark; between two phases of a story more than that passes."""


def let_time_pass() -> None:
    """More than the delay, and than what a clock of milliseconds hides."""
    end = time.monotonic() + 3 * DELAY.total_seconds()
    while time.monotonic() < end:
        continue


def late_rows(query: Query) -> int:
    """Rows that a watermark would have dropped, batch by batch."""
    late, latest = 0, datetime.fromtimestamp(0, UTC)
    for times in query.times:
        late += sum(each < latest - DELAY for each in times)
        latest = max([latest, *times])
    return late


def uneven_splits(on: Stage) -> None:
    """One half of the ring splits again and again, the other never does and is nearly idle."""
    on.send(16)
    on.split(0)
    hot = 1
    for number in range(4):
        let_time_pass()
        on.send(40, keys=8)
        let_time_pass()
        on.split(hot)
        hot = 3 + 2 * number
    let_time_pass()
    on.send(16)


@pytest.mark.parametrize("limit", [None, "25"])
def test_no_row_is_late_over_splits_with_uneven_backlog(on: Stage, limit: str | None) -> None:
    uneven_splits(on)
    options = {} if limit is None else {"maxMessagesPerTrigger": limit}
    query = on.from_earliest(**options)
    query.drain()
    query.check()
    assert late_rows(query) == 0


def test_without_the_hold_rows_are_late(on: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "hold", lambda *_: None)
    uneven_splits(on)
    query = on.from_earliest()
    query.drain()
    query.check()
    assert late_rows(query) > 0


def uneven_rates(on: Stage) -> None:
    """First one half of the ring has nearly everything, later the other."""
    on.send(8)
    on.split(0)
    for number in range(8):
        let_time_pass()
        on.send_to(3 if number < 4 else 60, half=0)
        on.send_to(60 if number < 4 else 3, half=1)


def test_no_row_is_late_under_a_limit(on: Stage) -> None:
    uneven_rates(on)
    query = on.from_earliest(maxMessagesPerTrigger="30")
    query.drain()
    query.check()
    assert late_rows(query) == 0


def test_without_levelling_rows_are_late(on: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody: Any = lambda times: None  # noqa: E731
    monkeypatch.setattr(admission, "level", nobody)
    uneven_rates(on)
    query = on.from_earliest(maxMessagesPerTrigger="30")
    query.drain()
    query.check()
    assert late_rows(query) > 0
