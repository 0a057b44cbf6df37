"""`T/compaction`: have a topic compacted, and see how it went.

Invariants:
1. PUT begins a run on each part of a topic (partitions, or segments that there are now) or, if one
   of them is being compacted, on none: 409. It does not wait for their ends.
2. GET tells of all parts at once: running as long as one is, failed if one did and none runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aiohttp import web

from magnetar.broker.compact.compaction import CompactionReport
from magnetar.broker.topic.topic import Topic
from magnetar.errors import Conflict
from magnetar.server.admin import endpoints
from magnetar.server.admin.endpoints import TOPIC
from magnetar.server.admin.exchange import done, shown, topic_of
from magnetar.server.admin.topics.topics import existing, persistent

# What is told first of several parts.
_ORDER: Final = ("RUNNING", "ERROR", "SUCCESS", "NOT_RUN")


async def compact(request: web.Request) -> web.Response:
    """Begin to compact a topic, or all its partitions."""
    begin(await _topics(request))
    return done()


async def status(request: web.Request) -> web.Response:
    """How the last compaction went, since the topic was loaded."""
    return shown(status_json(await _topics(request)))


def begin(topics: Sequence[Topic]) -> None:
    """Begin a run on all of them; Conflict, and none is begun, if there is one on any."""
    # Without an await between the look and the beginning: nobody comes between.
    for topic in topics:
        if topic.compaction.running:
            raise Conflict(f"{topic.name} is being compacted already", hint="see its status")
    for topic in topics:
        topic.compaction.begin()


def status_json(topics: Sequence[Topic]) -> dict[str, str]:
    """The state of all of them, as one."""
    # A topic without segments that could be asked was not compacted.
    reports = [(topic, topic.compaction.report) for topic in topics]
    states = {report.status for _, report in reports} or {CompactionReport().status}
    failed = [(topic, report) for topic, report in reports if report.status == "ERROR"]
    if len(reports) == 1:
        text = reports[0][1].last_error
    else:
        text = "; ".join(f"{topic.name}: {report.last_error}" for topic, report in failed)
    return {"status": min(states, key=_ORDER.index), "lastError": text}


async def _topics(request: web.Request) -> list[Topic]:
    # All are found before the first one is begun.
    return [await persistent(request, name) for name in await existing(request, topic_of(request))]


_COMPACTION: Final = f"{TOPIC}/compaction"

ROUTES: Final = (endpoints.put(_COMPACTION, compact), endpoints.get(_COMPACTION, status))
