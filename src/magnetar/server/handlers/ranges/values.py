"""Values of ranges as commands carry them, and the topics that they name.

Owns: positions and isolations to and from the wire, and `named_topic`, by which every command of
ranges gets at a topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from magnetar.broker.ranges.view import RangeView
from magnetar.broker.topic.topic import Topic
from magnetar.errors import MagnetarError, NotAllowed, TooManyRequests
from magnetar.ledger.api import Entry
from magnetar.model.isolation import ReadIsolation
from magnetar.model.names import TopicName
from magnetar.model.ranges import RangePosition
from magnetar.server.authority import Action
from magnetar.server.handlers.names import admit
from magnetar.server.session import Session
from magnetar.wire.pb import pulsar_pb2 as pb

Named = TypeVar("Named")
Fields = dict[str, Any]

_AT_ONCE: Final = 64
"""Topics of one command that are loaded at the same time."""


def position_from(wire: pb.RangePosition) -> RangePosition:
    return RangePosition(wire.ledger_id, wire.entry_id, wire.batch_index)


def position_fields(position: RangePosition) -> Fields:
    fields = {"ledger_id": position.ledger, "entry_id": position.entry}
    return fields | ({"batch_index": position.batch_index} if position.batch_index else {})


def isolation_from(wire: int) -> ReadIsolation:
    return ReadIsolation.UNCOMMITTED if wire == pb.Uncommitted else ReadIsolation.COMMITTED


def runs_of(entries: Sequence[Entry]) -> list[Fields]:
    """The positions of entries; those that follow each other are one run."""
    runs: list[Fields] = []
    following: tuple[int, int] | None = None
    for (ledger_id, entry_id), _ in entries:
        if following == (ledger_id, entry_id):
            runs[-1]["count"] += 1
        else:
            runs.append({"ledger_id": ledger_id, "first_entry_id": entry_id, "count": 1})
        following = ledger_id, entry_id + 1
    return runs


async def named_topic(session: Session, text: str) -> Topic:
    """A topic that exists and keeps messages, loaded here; it counts as used."""
    name = TopicName.parse(text)
    session.authorise(Action.CONSUME, name)
    context = session.context
    # Refuses a scalable topic by its own name, and segments that are gone.
    await admit(context, name)
    topic = await context.topics.get(name, create=False)
    if not isinstance(topic, Topic):
        raise NotAllowed(f"{name} keeps no messages", hint="ranges are of persistent topics")
    # Nobody is connected to it, but it is read: maintenance must not take it for unused.
    topic.used_at = context.clock.monotonic()
    return topic


async def named_view(session: Session, text: str, isolation: int) -> RangeView:
    return RangeView(await named_topic(session, text), isolation_from(isolation))


async def for_each(
    session: Session, named: Sequence[Named], work: Callable[[Named], Awaitable[Fields]]
) -> list[Fields]:
    """What is answered for each; one that is refused says so, and spoils none of the others."""
    limit = session.limits.range_topics_max
    # Each may have to be loaded: the limit bounds what one command can set in motion.
    if len(named) > limit:
        raise TooManyRequests(f"{len(named)} topics in one command", hint=f"name at most {limit}")

    async def one(each: Named) -> Fields:
        try:
            return await work(each)
        except MagnetarError as error:
            return {"error": int(error.wire_code), "message": str(error)}

    found: list[Fields] = []
    # In groups: loads of thousands of topics at once would starve everybody else's.
    for at in range(0, len(named), _AT_ONCE):
        found += await asyncio.gather(*map(one, named[at : at + _AT_ONCE]))
    return found
