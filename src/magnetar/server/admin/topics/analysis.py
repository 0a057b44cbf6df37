"""Analysis of a backlog, by reading a bounded part of it, with turns for others.

Invariants:
1. At most `ENTRIES_MAX` entries are read; `aborted` says that there are more.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aiohttp import web

from magnetar.broker.entries import EntryView
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.topic.topic import Topic
from magnetar.model.ids import Position
from magnetar.server.admin import endpoints
from magnetar.server.admin.exchange import body_of, shown
from magnetar.server.admin.topics.subscriptions import SUBSCRIPTION, ExpiryBody, subscription_of
from magnetar.server.admin.topics.topics import message_id, stored_topic

# Pulsar's subscriptionBacklogScanMaxEntries.
ENTRIES_MAX: Final = 10_000
_ENTRIES_PER_TURN: Final = 50


async def analyze(request: web.Request) -> web.Response:
    """Count what a backlog holds, from its first message or from a given one."""
    topic = await stored_topic(request)
    subscription = subscription_of(request, topic)
    start = await body_of(request, ExpiryBody)
    first = subscription.cursor.mark_delete.next
    if start is not None:
        first = max(first, Position(start.ledger_id, start.entry_id))
    return shown(await _count(topic, subscription, first))


async def _count(topic: Topic, subscription: Subscription, first: Position) -> dict[str, Any]:
    entries = messages = markers = seen = 0
    ends: list[Position] = []
    position = topic.ledger.next_valid(first)
    # Asked in every step: others have their turn, and the topic may be trimmed or grow.
    while position is not None and position <= topic.max_read_position() and seen < ENTRIES_MAX:
        found = await topic.ledger.read(position, min(_ENTRIES_PER_TURN, ENTRIES_MAX - seen))
        for entry in found:
            seen += 1
            if entry.position > topic.max_read_position():
                break
            if subscription.cursor.is_acked(entry.position):
                continue
            view = EntryView.of(entry)
            if view.is_marker:
                markers += 1
            # What is of an aborted transaction is in no backlog that a consumer could get.
            elif topic.is_visible(entry):
                entries += 1
                left = subscription.cursor.unacked_indexes(entry.position)
                messages += view.num_messages if left is None else left.bit_count()
                ends = [ends[0] if ends else entry.position, entry.position]
        position = topic.ledger.next_valid(found[-1].position.next) if found else None
        await asyncio.sleep(0)
    is_cut = position is not None and position <= topic.max_read_position()
    return _FILTERS | {
        "entries": entries,
        "messages": messages,
        "markerMessages": markers,
        "aborted": is_cut,
        "firstMessageId": message_id(ends[0], topic.name) if ends else None,
        "lastMessageId": message_id(ends[-1], topic.name) if ends else None,
    }


# There are no filters; tools expect their counts.
_FILTERS: Final = {
    f"filter{verdict}{what}": 0
    for verdict in ("Rejected", "Accepted", "Rescheduled")
    for what in ("Entries", "Messages")
}

ROUTES: Final = (endpoints.post(f"{SUBSCRIPTION}/analyzeBacklog", analyze),)
