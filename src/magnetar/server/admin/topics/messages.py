"""Messages by REST: one entry by its id, its number or its time, and how much stands behind it.

Invariants:
1. An entry is shown only if its ledger is one of the topic's that was asked about.
2. A number is found by arithmetic over ledgers: only the entry that is shown is read.
"""

from __future__ import annotations

from typing import Final

import msgspec
from aiohttp import web

from magnetar.broker.entries import EntryView
from magnetar.broker.topic.quota_rules import bytes_from
from magnetar.broker.topic.topic import Topic
from magnetar.errors import InvalidArgument, NotAllowed
from magnetar.ledger.api import Entry
from magnetar.managed_ledger.ledger_list import LedgerSpan
from magnetar.model.ids import Position
from magnetar.server.admin import endpoints
from magnetar.server.admin.endpoints import TOPIC
from magnetar.server.admin.errors import NOT_FOUND
from magnetar.server.admin.exchange import (
    needed_body_of,
    part_of,
    refused,
    shown,
    whole_number,
)
from magnetar.server.admin.topics.peek import as_response
from magnetar.server.admin.topics.topics import message_id, stored_topic


class PlaceBody(msgspec.Struct, frozen=True, rename="camel"):
    """A message id whose every part has to be there."""

    ledger_id: int
    entry_id: int
    partition_index: int = -1


async def entry_by_id(request: web.Request) -> web.Response:
    """An entry of a topic, as a peek shows it, whether or not consumers may see it."""
    topic = await stored_topic(request)
    numbers = [whole_number(part_of(request, each), each) for each in ("ledger_id", "entry_id")]
    position = Position(*numbers)
    # A read begins at the next entry that there is: another one is no answer (invariant 1).
    entries = await topic.ledger.read(position, 1)
    if not entries or entries[0].position != position:
        return refused(NOT_FOUND, f"{topic.name} has no entry {position}")
    return await _shown_entry(request, topic, entries[0])


async def examine(request: web.Request) -> web.Response:
    """The entry with a number, counted from either end of the topic."""
    topic = await stored_topic(request)
    from_end = request.query.get("initialPosition", "latest")
    if from_end not in ("earliest", "latest"):
        raise InvalidArgument(f"initialPosition must be earliest or latest, not {from_end!r}")
    number = whole_number(request.query.get("messagePosition", "1"), "messagePosition", least=1)
    total = topic.ledger.entries
    # Numbers beyond the other end mean that end.
    number = min(number, total)
    index = number - 1 if from_end == "earliest" else total - number
    position = position_of(topic.ledger.ledger_spans, index)
    entries = [] if position is None else await topic.ledger.read(position, 1)
    if not entries:
        raise NotAllowed(f"{topic.name} has no messages")
    return await _shown_entry(request, topic, entries[0])


async def id_by_time(request: web.Request) -> web.Response:
    """The first entry published at or after a time; else where the next one will stand."""
    topic = await stored_topic(request)
    moment = whole_number(part_of(request, "timestamp"), "the time in milliseconds")
    found = await topic.find_by_time(moment)
    return shown(message_id(found or topic.ledger.last_position().next, topic.name))


async def id_by_index(request: web.Request) -> web.Response:
    topic = await stored_topic(request)
    whole_number(request.query.get("index", ""), "index")
    raise NotAllowed(f"entries of {topic.name} have no index of the broker")


async def bytes_behind(request: web.Request) -> web.Response:
    """How many bytes stand from a message on: each ledger's size shared out among its entries."""
    topic = await stored_topic(request)
    place = await needed_body_of(request, PlaceBody)
    position = Position(place.ledger_id, place.entry_id)
    return shown(bytes_from(topic.ledger.ledger_spans, position))


async def _shown_entry(request: web.Request, topic: Topic, entry: Entry) -> web.Response:
    headers = {}
    # Whoever names an entry sees it, and is told if it is for nobody, or not yet.
    if entry.position > topic.max_read_position():
        headers["X-Pulsar-txn-uncommitted"] = "true"
    elif not topic.is_visible(entry) and EntryView.of(entry).txn_id is not None:
        headers["X-Pulsar-txn-aborted"] = "true"
    return await as_response(request, entry, headers)


def position_of(spans: tuple[LedgerSpan, ...], index: int) -> Position | None:
    """The position of the entry with that index, from 0 on; None: there is none."""
    for span in spans:
        if 0 <= index < span.entries:
            return Position(span.ledger_id, index)
        index -= span.entries
    return None


ROUTES: Final = (
    endpoints.get(f"{TOPIC}/ledger/{{ledger_id}}/entry/{{entry_id}}", entry_by_id),
    endpoints.get(f"{TOPIC}/examinemessage", examine),
    endpoints.get(f"{TOPIC}/messageid/{{timestamp}}", id_by_time),
    endpoints.get(f"{TOPIC}/getMessageIdByIndex", id_by_index),
    endpoints.put(f"{TOPIC}/backlogSize", bytes_behind),
)
