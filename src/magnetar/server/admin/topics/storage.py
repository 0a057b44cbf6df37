"""A topic as it is stored: its ledgers and cursors, properties, partitions and policies.

Invariants:
1. Nothing that a subscription needs is dropped, but by `truncate`, which is asked to.
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

import msgspec
from aiohttp import web

from magnetar.broker.policy.policies import Policies
from magnetar.broker.topic.topic import Topic
from magnetar.errors import InvalidArgument, TopicNotFound
from magnetar.managed_ledger.cursor import Cursor
from magnetar.managed_ledger.ledger_list import KEEP_NOTHING
from magnetar.model.names import Domain
from magnetar.server.admin import endpoints
from magnetar.server.admin.endpoints import TOPIC
from magnetar.server.admin.exchange import (
    DOCUMENT_BYTES_MAX,
    Refusal,
    done,
    needed_body_of,
    shown,
    topic_of,
    topics_of,
)
from magnetar.server.admin.policies.verbs import change_topic
from magnetar.server.admin.topics.topics import existing, persistent, stored_topic

RANGES_MAX: Final = 1000
"""Runs of acknowledged entries that are shown of one cursor, the first ones."""


async def internal_info(request: web.Request) -> web.Response:
    """The ledgers and cursors of a topic, as they are recorded."""
    # Members without a meaning here keep the value that says "nothing": tools expect them.
    topic = await stored_topic(request)
    created = await topics_of(request).created_ms(topic.name) or 0
    spans = topic.ledger.ledger_spans
    changed = max((span.closed_ms or span.created_ms for span in spans), default=created)
    ledgers = [
        {
            "ledgerId": span.ledger_id,
            "entries": span.entries,
            "size": span.size_bytes,
            "timestamp": span.closed_ms or 0,
            "isOffloaded": False,
        }
        for span in spans
    ]
    cursors = {name: _cursor(each.cursor) for name, each in topic.subscriptions.items()}
    return shown(
        {
            "version": topic.ledger.epoch,
            "creationDate": _moment(created),
            "modificationDate": _moment(changed),
            "ledgers": ledgers,
            "cursors": cursors,
        }
    )


def _cursor(cursor: Cursor) -> dict[str, Any]:
    # Its state is a record of metadata, in no ledger of its own.
    where, runs = cursor.mark_delete, cursor.acked_ranges()
    return {
        "version": cursor.incarnation,
        "cursorsLedgerId": -1,
        "markDelete": {"ledgerId": where.ledger_id, "entryId": where.entry_id},
        "individualDeletedMessages": [_range(*run) for run in islice(runs, RANGES_MAX)],
    }


def _range(ledger_id: int, first: int, last: int) -> dict[str, Any]:
    # As Pulsar writes it: `from` is in front of the run, `to` is its last entry.
    return {
        "from": {"ledgerId": ledger_id, "entryId": first - 1},
        "to": {"ledgerId": ledger_id, "entryId": last},
    }


def _moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")


async def trim(request: web.Request) -> web.Response:
    """Drop now what retention lets go, which would be dropped within a minute."""
    for topic in await _topics(request):
        await topic.trim()
    return done()


async def truncate(request: web.Request) -> web.Response:
    """Skip everything for all subscriptions, then drop every ledger that is closed."""
    for topic in await _topics(request):
        for subscription in list(topic.subscriptions.values()):
            subscription.skip_all()
            await subscription.ack_durable()
        await topic.trim(KEEP_NOTHING)
    return done()


async def _topics(request: web.Request) -> list[Topic]:
    # All are found before the first is changed.
    return [await persistent(request, name) for name in await existing(request, topic_of(request))]


async def create_missed(request: web.Request) -> web.Response:
    """Make the partitions that a crash, or a creation that failed, has left out."""
    name = topic_of(request)
    record = await topics_of(request).partitioned.get(name)
    if record is None:
        raise TopicNotFound(f"{name} is not a partitioned topic")
    await topics_of(request).grow(name, record.partitions)
    return done()


# --- properties


async def show_properties(request: web.Request) -> web.Response:
    _check_stored(request)
    return shown(await topics_of(request).properties(topic_of(request)))


async def add_properties(request: web.Request) -> web.Response:
    _check_stored(request)
    given = await needed_body_of(request, dict[str, str])

    def added(held: dict[str, str]) -> dict[str, str]:
        after = held | given
        size = len(msgspec.json.encode(after))
        if size > DOCUMENT_BYTES_MAX:
            raise InvalidArgument(
                f"the properties would have {size} bytes, at most {DOCUMENT_BYTES_MAX}"
            )
        return after

    await topics_of(request).change_properties(topic_of(request), added)
    return done()


async def remove_property(request: web.Request) -> web.Response:
    _check_stored(request)
    key = request.query.get("key")
    if key is None:
        raise InvalidArgument("the request needs a query value key")
    await topics_of(request).change_properties(
        topic_of(request), lambda held: {name: held[name] for name in held if name != key}
    )
    return done()


def _check_stored(request: web.Request) -> None:
    name = topic_of(request)
    if name.domain is Domain.NON_PERSISTENT:
        raise Refusal(405, f"{name} is not persistent: nothing of it is stored")


# --- policies


async def remove_policies(request: web.Request) -> web.Response:
    return await change_topic(request, lambda _: Policies(), is_removal=True)


ROUTES: Final = (
    endpoints.get(f"{TOPIC}/internal-info", internal_info),
    endpoints.post(f"{TOPIC}/trim", trim),
    endpoints.delete(f"{TOPIC}/truncate", truncate),
    endpoints.post(f"{TOPIC}/createMissedPartitions", create_missed),
    endpoints.get(f"{TOPIC}/properties", show_properties),
    endpoints.put(f"{TOPIC}/properties", add_properties),
    endpoints.delete(f"{TOPIC}/properties", remove_property),
    endpoints.delete(f"{TOPIC}/policies", remove_policies),
)
