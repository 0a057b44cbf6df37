"""`/admin/v2/scalable/.../compaction`: have every segment compacted, sealed ones too.

A split or merge that comes meanwhile changes nothing: its children have nothing yet.
"""

from __future__ import annotations

from typing import Final

from aiohttp import web

from magnetar.broker.topic.topic import Topic
from magnetar.scalable.layout.changes import layout_of
from magnetar.scalable.records import segment_topic
from magnetar.server.admin import endpoints
from magnetar.server.admin.exchange import done, shown, topic_of, topics_of
from magnetar.server.admin.scalable.scalable_topics import SCALABLE
from magnetar.server.admin.scalable.state import read_record
from magnetar.server.admin.topics.compaction import begin, status_json


async def compact(request: web.Request) -> web.Response:
    begin(await _segments(request))
    return done()


async def status(request: web.Request) -> web.Response:
    return shown(status_json(await _segments(request)))


async def _segments(request: web.Request) -> list[Topic]:
    topic = topic_of(request)
    found = []
    for segment in layout_of(await read_record(request, topic)).segments.values():
        loaded = await topics_of(request).get(segment_topic(topic, segment), create=False)
        if isinstance(loaded, Topic):
            found.append(loaded)
    return found


_COMPACTION: Final = f"{SCALABLE}/compaction"

ROUTES: Final = (endpoints.put(_COMPACTION, compact), endpoints.get(_COMPACTION, status))
