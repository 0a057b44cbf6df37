"""RANGE_NEWS: a request that waits until there is something to read.

Owns: the long poll. It names places (a segment, and where its reader stands) and the epoch of the
layout that its reader knows, and is answered when an entry that may be read stands at or behind one
of the places, when the layout is newer, or after its wait.

Invariants:
1. It waits for the signals of the topics and of the layout, all at once, and looks again only when
   one of them has advanced: a poll that waits costs its memory and nothing else.
2. It is answered once; a poll of the same number on the same connection ends it before, with "no
   news". With its connection it ends unanswered.
3. A connection has at most `connection_range_polls_max` of them, and none waits longer than
   `range_poll_seconds`.
4. A place whose topic is gone is news: the layout says what became of it. One that another broker
   has by now is refused, and its client looks it up.

That partitions were added is seen when a poll begins, not while it waits.
"""

from __future__ import annotations

import asyncio
from typing import Final

from magnetar.broker.ranges.view import RangeView
from magnetar.errors import TooManyRequests, TopicNotFound
from magnetar.model.names import Domain, TopicName
from magnetar.runtime.signal import Signal
from magnetar.server.authority import Action
from magnetar.server.handlers.ranges.values import isolation_from, named_topic, position_from
from magnetar.server.scalable_handles import OpenPoll
from magnetar.server.session import Session
from magnetar.wire.commands import TYPES
from magnetar.wire.frames import command
from magnetar.wire.pb import pulsar_pb2 as pb

_TYPE: Final = TYPES["RANGE_NEWS"]
_MS_PER_SECOND: Final = 1000


async def news(session: Session, body: pb.CommandRangeNews) -> None:
    session.authorise(Action.CONSUME, TopicName.parse(body.topic))
    polls, limits = session.scalable.polls, session.limits
    # Invariant 2: the client asks with newer places, and the former request must not stay open.
    before = polls.pop(body.poll_id, None)
    if before is not None:
        before.close()
        session.write(_answer(before.request_id, is_news=False))
    if len(polls) >= limits.connection_range_polls_max:
        raise TooManyRequests(f"the connection has {len(polls)} polls for news of ranges")
    if len(body.places) > limits.range_topics_max:
        raise TooManyRequests(f"{len(body.places)} places in one poll")
    # Registered before its loop begins, so that the next poll of this number finds it.
    poll = polls[body.poll_id] = OpenPoll(body.request_id)
    poll.follow(session, _wait(session, body, poll))


async def _wait(session: Session, body: pb.CommandRangeNews, poll: OpenPoll) -> None:
    try:
        is_news = await _has_news(session, body)
        session.write(_answer(body.request_id, is_news=is_news))
    except Exception as error:  # noqa: BLE001  answered, and logged if it is a bug
        session.refuse(_TYPE, body, error)
    finally:
        # A newer poll may have this number by now, and has closed this one.
        if session.scalable.polls.get(body.poll_id) is poll:
            del session.scalable.polls[body.poll_id]
            poll.answered()


def _answer(request_id: int, *, is_news: bool) -> bytes:
    return command("RANGE_NEWS_RESPONSE", request_id=request_id, is_news=is_news)


async def _has_news(session: Session, body: pb.CommandRangeNews) -> bool:
    """Return as soon as there is some, or when its time is over; it is looked for once at least."""
    loop = asyncio.get_running_loop()
    seconds = min(body.wait_ms / _MS_PER_SECOND, session.limits.range_poll_seconds)
    deadline = loop.time() + seconds
    # Partitions have no signal: looked at once, when the poll begins.
    if await _has_grown(session, TopicName.parse(body.topic), body.epoch):
        return True
    while True:
        # Versions are noted while looking: an advance after that ends the wait at once (invariant
        # 1).
        seen: dict[Signal, int] = {}
        if await _is_behind(session, body, seen):
            return True
        # Asked to wait for nothing: a plain question.
        if loop.time() >= deadline:
            return False
        try:
            async with asyncio.timeout_at(deadline):
                await Signal.past_any(seen)
        except TimeoutError:
            return False


async def _is_behind(session: Session, body: pb.CommandRangeNews, seen: dict[Signal, int]) -> bool:
    """Whether there is news now; if not, `seen` is what to wait for."""
    isolation = isolation_from(body.isolation)
    if _layout_is_newer(session, TopicName.parse(body.topic), body.epoch, seen):
        return True
    for place in body.places:
        try:
            topic = await named_topic(session, place.topic)
        # Invariant 4: the layout tells what became of it.
        except TopicNotFound:
            return True
        seen[topic.readable] = topic.readable.version
        if RangeView(topic, isolation).has_more(position_from(place.position)):
            return True
    return False


def _layout_is_newer(
    session: Session, name: TopicName, epoch: int, seen: dict[Signal, int]
) -> bool:
    context = session.context
    # Neither has a layout: a single partition is read as it is.
    if not context.has_scalable or name.partition is not None:
        return False
    layouts, topic = context.scalable.layouts, name.scalable_topic()
    changed = layouts.changed(topic)
    seen[changed] = changed.version
    record = layouts.cached(topic)
    return record is not None and record.layout is not None and record.layout.epoch > epoch


async def _has_grown(session: Session, name: TopicName, epoch: int) -> bool:
    context = session.context
    if name.domain is not Domain.PERSISTENT:
        return False
    if context.has_scalable and context.scalable.layouts.cached(name.scalable_topic()) is not None:
        return False  # it is, or becomes, a scalable one: its epoch counts
    found = await context.topics.partitioned.get(name)
    return found is not None and found.partitions > epoch
