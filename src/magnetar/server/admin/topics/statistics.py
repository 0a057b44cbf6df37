"""Statistics of topics: `stats`, `partitioned-stats` and `internalStats`."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
from aiohttp import web

from magnetar.broker.policy.stats import TopicStats, summed
from magnetar.broker.topic.nonpersistent import LoadedTopic
from magnetar.broker.topic.topic import Topic
from magnetar.errors import TopicNotFound
from magnetar.managed_ledger.cursor import Cursor
from magnetar.managed_ledger.ledger_list import LedgerSpan
from magnetar.managed_ledger.managed_ledger import ManagedLedger
from magnetar.server.admin import endpoints
from magnetar.server.admin.endpoints import TOPIC
from magnetar.server.admin.exchange import flag_of, shown, topic_of, topics_of
from magnetar.server.admin.topics.topics import existing, whole_topic

# What Java prints for a ledger that does not exist.
_NO_LEDGER: Final = {"ledgerId": -1, "entries": -1, "size": -1, "offloaded": False}


async def stats(request: web.Request) -> web.Response:
    topic = await topics_of(request).get(await whole_topic(request), create=False)
    return shown(as_json(await _asked(request, topic)))


async def partitioned_stats(request: web.Request) -> web.Response:
    name = topic_of(request)
    topics = topics_of(request)
    record = await topics.partitioned.get(name)
    if record is None:
        raise TopicNotFound(f"{name} is not a partitioned topic")
    parts = {}
    for partition in await existing(request, name):
        # Created if it is missing: a crash may have prevented its record, but the topic has it.
        parts[str(partition)] = await _asked(request, await topics.get(partition))
    found = as_json(summed(list(parts.values())))
    found["metadata"] = {"partitions": record.partitions, "deleted": False}
    # Java's default: tools that do not ask get all partitions.
    each = flag_of(request, "perPartition", default=True)
    found["partitions"] = {key: as_json(part) for key, part in parts.items()} if each else {}
    return shown(found)


async def _asked(request: web.Request, topic: LoadedTopic) -> TopicStats:
    """Statistics, without producers or consumers where the request says so: there may be many."""
    publishers = not flag_of(request, "excludePublishers")
    consumers = not flag_of(request, "excludeConsumers")
    await topic.last_publish_ms()
    return topic.stats(publishers=publishers, consumers=consumers)


async def internal_stats(request: web.Request) -> web.Response:
    topic = await topics_of(request).get(await whole_topic(request), create=False)
    return shown(await _internal(topic))


async def partitioned_internal_stats(request: web.Request) -> web.Response:
    name = topic_of(request)
    topics = topics_of(request)
    record = await topics.partitioned.get(name)
    if record is None:
        raise TopicNotFound(f"{name} is not a partitioned topic")
    parts = {}
    for partition in await existing(request, name):
        parts[str(partition)] = await _internal(await topics.get(partition))
        await asyncio.sleep(0)
    return shown({"metadata": {"partitions": record.partitions}, "partitions": parts})


def as_json(found: TopicStats) -> dict[str, Any]:
    """Statistics as tools read them: an epoch, say, that there is not is left out."""
    # Null would be read as a name.
    shown_stats: dict[str, Any] = msgspec.to_builtins(found)
    for subscription in shown_stats["subscriptions"].values():
        if subscription["activeConsumerName"] is None:
            del subscription["activeConsumerName"]
    for name in ("topicEpoch", "retention"):
        if shown_stats[name] is None:
            del shown_stats[name]
    return shown_stats


async def _internal(topic: LoadedTopic) -> dict[str, Any]:
    # What has no ledger has the form of an empty one: tools ask without looking at the domain.
    if not isinstance(topic, Topic):
        return _NO_STORAGE | {
            "entriesAddedCounter": topic.messages_in,
            "cursors": {name: {} for name in topic.subscriptions},
        }
    subscriptions = topic.subscriptions.items()
    # A topic's own counter and its subscriptions in place of those of the bare ledger.
    view = topic.compacted
    known = None if view is None else await view.info()
    compacted = _NO_LEDGER
    if known is not None:
        compacted = {
            "ledgerId": known.ledger_id,
            "entries": known.last_entry + 1,
            "size": known.size_bytes,
            "offloaded": False,
        }
    return ledger_json(topic.ledger) | {
        "compactedLedger": compacted,
        "entriesAddedCounter": topic.messages_in,
        "cursors": {
            name: _cursor(each.cursor, active=bool(each.consumers)) for name, each in subscriptions
        },
    }


def ledger_json(ledger: ManagedLedger) -> dict[str, Any]:
    """A managed ledger, as Java's tools read it."""
    spans = ledger.ledger_spans
    last = spans[-1] if spans else None
    return {
        "entriesAddedCounter": ledger.entries,
        "numberOfEntries": ledger.entries,
        "totalSize": ledger.size_bytes,
        "currentLedgerEntries": 0 if last is None else last.entries,
        "currentLedgerSize": 0 if last is None else last.size_bytes,
        "lastLedgerCreatedTimestamp": "" if last is None else str(last.created_ms),
        # Members without a meaning here keep the value that says "nothing": tools expect them.
        "waitingCursorsCount": 0,
        "pendingAddEntriesCount": ledger.pending,
        "lastConfirmedEntry": str(ledger.last_position()),
        "state": "Terminated" if ledger.sealed else "LedgerOpened",
        "ledgers": [_span(span) for span in spans],
        "cursors": {
            name: _cursor(ledger.cursor(name), active=False) for name in ledger.cursor_names()
        },
        "schemaLedgers": [],
        "compactedLedger": _NO_LEDGER,
    }


def _span(span: LedgerSpan) -> dict[str, Any]:
    return {
        "ledgerId": span.ledger_id,
        "entries": span.entries,
        "size": span.size_bytes,
        "offloaded": False,
    }


def _cursor(cursor: Cursor, *, active: bool) -> dict[str, Any]:
    return {
        "markDeletePosition": str(cursor.mark_delete),
        "readPosition": str(cursor.read_position),
        "waitingReadOp": False,
        "pendingReadOps": 0,
        "messagesConsumedCounter": 0,
        "numberOfEntriesSinceFirstNotAckedMessage": cursor.backlog(),
        "state": "Open" if cursor.failure is None else "Closed",
        "active": active,
        "properties": {},
        "cursorProperties": cursor.properties,
    }


_NO_STORAGE: Final = {
    "numberOfEntries": 0,
    "totalSize": 0,
    "currentLedgerEntries": 0,
    "currentLedgerSize": 0,
    "ledgers": [],
}

ROUTES: Final = (
    endpoints.get(f"{TOPIC}/stats", stats),
    endpoints.get(f"{TOPIC}/partitioned-stats", partitioned_stats),
    endpoints.get(f"{TOPIC}/internalStats", internal_stats),
    endpoints.get(f"{TOPIC}/partitioned-internalStats", partitioned_internal_stats),
)
