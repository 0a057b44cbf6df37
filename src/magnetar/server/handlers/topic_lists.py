"""Lists of topics: GET_TOPICS_OF_NAMESPACE and the watch of a pattern.

Invariants:
1. A pattern is short, takes time linear in what it is matched against (RE2: a client's pattern
   must not hold the event loop), and is matched against whole names without domain, for a
   partition against the name of its partitioned topic.
2. The updates of a watch, put upon the list that its success gave, are always the present list.
3. A watch whose number is sent again is the same watch: it gets the whole list anew.
4. A namespace that does not exist has no topics: clients that consume by pattern may come before
   whoever makes it, and are told what comes.
"""

from __future__ import annotations

from typing import Final, Protocol

import re2

from magnetar.broker.topic.topics import ListMode, topics_hash
from magnetar.errors import InvalidTopicName, NotAllowed
from magnetar.model.names import NamespaceName, TopicName
from magnetar.runtime.signal import Signal
from magnetar.server.authority import Action
from magnetar.server.handles import TopicListWatch
from magnetar.server.session import Session
from magnetar.wire.frames import command
from magnetar.wire.pb import pulsar_pb2 as pb

# Pulsar's subscriptionPatternMaxLength.
_PATTERN_CHARACTERS_MAX: Final = 50
_QUIET: Final = re2.Options()
# RE2 writes to stderr by itself: a client's mistake is answered, not logged.
_QUIET.log_errors = False
_MODES: Final = {
    pb.CommandGetTopicsOfNamespace.PERSISTENT: ListMode.PERSISTENT,
    pb.CommandGetTopicsOfNamespace.NON_PERSISTENT: ListMode.NON_PERSISTENT,
    pb.CommandGetTopicsOfNamespace.ALL: ListMode.ALL,
}


class Pattern(Protocol):
    """A compiled pattern."""

    def fullmatch(self, text: str) -> object | None: ...


async def get_topics(session: Session, body: pb.CommandGetTopicsOfNamespace) -> None:
    namespace = NamespaceName.parse(body.namespace)
    session.authorise(Action.LIST, namespace)
    names = await session.context.topics.names(namespace, _MODES[body.mode])
    filtered = body.HasField("topics_pattern")
    if filtered:
        names = _matching(names, _compiled(body.topics_pattern))
    digest = topics_hash(names)
    # PIP-145: a client that has the same list is told so, and spared the list.
    changed = not body.HasField("topics_hash") or body.topics_hash != digest
    session.write(
        command(
            "GET_TOPICS_OF_NAMESPACE_RESPONSE",
            request_id=body.request_id,
            topics=names if changed else [],
            filtered=filtered,
            topics_hash=digest,
            changed=changed,
        )
    )


async def watch(session: Session, body: pb.CommandWatchTopicList) -> None:
    namespace = NamespaceName.parse(body.namespace)
    session.authorise(Action.LIST, namespace)
    pattern = _compiled(body.topics_pattern)
    held = session.watches.get(body.watcher_id)
    # A watch that is sent again takes no more room than it had.
    if held is None:
        session.check_room()
    topics = session.context.topics
    changes = topics.list_changed(namespace)
    # Before the list is read: what changes meanwhile is told as an update (invariant 2).
    seen = changes.version
    names = _matching(await topics.names(namespace, ListMode.PERSISTENT), pattern)
    # Only now: while this one waited, the former watch went on telling.
    held = session.watches.pop(body.watcher_id, None)
    if held is not None:
        held.close()
    digest = topics_hash(names)
    known = body.HasField("topics_hash") and body.topics_hash == digest
    session.write(
        command(
            "WATCH_TOPIC_LIST_SUCCESS",
            request_id=body.request_id,
            watcher_id=body.watcher_id,
            topic=[] if known else names,
            topics_hash=digest,
        )
    )
    telling = _tell_changes(session, body.watcher_id, namespace, pattern, names, changes, seen)
    loop = session.spawn(telling, "topic watch")
    session.watches[body.watcher_id] = TopicListWatch(loop)


async def close_watch(session: Session, body: pb.CommandWatchTopicListClose) -> None:
    held = session.watches.pop(body.watcher_id, None)
    if held is not None:
        held.close()
    session.succeed(body.request_id)


async def _tell_changes(
    session: Session,
    watcher_id: int,
    namespace: NamespaceName,
    pattern: Pattern,
    known: list[str],
    changes: Signal,
    seen: int,
) -> None:
    topics = session.context.topics
    while True:
        seen = await changes.past(seen)
        # While the peer takes nothing, changes gather; they are told as one.
        await session.outbound.writable()
        # The whole list again: a signal does not say what changed, and a difference is cheap.
        names = _matching(await topics.names(namespace, ListMode.PERSISTENT), pattern)
        before, now = set(known), set(names)
        known = names
        if before != now:
            session.write(
                command(
                    "WATCH_TOPIC_UPDATE",
                    watcher_id=watcher_id,
                    new_topics=sorted(now - before),
                    deleted_topics=sorted(before - now),
                    topics_hash=topics_hash(names),
                )
            )


def _compiled(pattern: str) -> Pattern:
    if len(pattern) > _PATTERN_CHARACTERS_MAX:
        raise NotAllowed(
            f"a pattern of {len(pattern)} characters; the limit is {_PATTERN_CHARACTERS_MAX}"
        )
    try:
        # Patterns of clients have a domain or not; names are compared without one (invariant 1).
        compiled: Pattern = re2.compile(_without_domain(pattern), _QUIET)
    except re2.error as error:
        raise InvalidTopicName(f"{pattern!r} is not a regular expression: {error}") from error
    return compiled


def _matching(names: list[str], pattern: Pattern) -> list[str]:
    return [name for name in names if pattern.fullmatch(_matched_form(name))]


def _matched_form(name: str) -> str:
    return _without_domain(str(TopicName.parse(name).without_partition()))


def _without_domain(text: str) -> str:
    return text.partition("://")[2] if "://" in text else text
