"""The pages of a task's range, and what to do if some of them are gone by now.

Owns: `pages_of`.

Invariants:
1. All that is kept of the range is read, in order; what is gone raises `DataLost`, or is warned of
   and skipped if the query wants to go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from magnetar.blocking import Client
from magnetar.client.ranges.ranges import RangePage
from magnetar.errors import DataLost, RangeLost
from magnetar.model.ranges import RangePosition
from magnetar.runtime.logs import logger
from magnetar.spark.options import Options
from magnetar.spark.source.tasks import ReadTask

_LOG: Final = logger(__name__)


def pages_of(client: Client, task: ReadTask, options: Options) -> Iterator[RangePage]:
    """In a worker: the range of one task."""
    at: RangePosition | None = task.start
    while at is not None:
        try:
            ranges = client.ranges(task.topic, creation_id=task.creation_id)
            pages = ranges.read(task.number, at, task.end, isolation=options["readIsolation"])
            for page in pages:
                at = page.next
                yield page
            return
        except RangeLost as error:
            if options["failOnDataLoss"]:
                raise DataLost(str(error.args[0])) from error
            _LOG.warning("data-lost", what=str(error.args[0]))
            at = _behind_the_gap(client, task, at)


def _behind_the_gap(client: Client, task: ReadTask, at: RangePosition) -> RangePosition | None:
    """Where the range goes on; None: nowhere."""
    try:
        ranges = client.ranges(task.topic, creation_id=task.creation_id)
    except RangeLost:
        return None
    state = ranges.states([task.number]).get(task.number)
    return None if state is None or not at < state.first < task.end else state.first
