"""The topics of a query, as brokers have them now.

Owns: `Watched`: which topics there are, their `Ranges`, and `look`, which gives a view of each;
`NamespacePattern`, the topics of a namespace that match: `persistent://public/default/o.*`,
`topic://public/default/o.*`, or short for the former `o.*`; `subscription_of`, the name of the
subscription that keeps what is unread in them.

Invariants:
1. A view is not older than the place that it is to be used with, and has a state for every segment
   that planning wants.
2. A topic that is missing raises `TopicNotFound` with what to do, unless a pattern found it.
3. Nothing here creates a topic.
4. The regular expression of a pattern is for the whole local name, and takes linear time (RE2). A
   partitioned topic is one topic.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import re2

from magnetar.client.client import Client, connections_of
from magnetar.client.connection.connection import WATCH
from magnetar.client.connection.pool import Connections
from magnetar.client.connection.server_errors import refusal
from magnetar.client.ranges.ranges import Isolation, Ranges
from magnetar.errors import (
    DeadlineExceeded,
    InvalidSetting,
    MagnetarError,
    ServiceNotReady,
    TopicNotFound,
)
from magnetar.model.names import Domain, NamespaceName, TopicName
from magnetar.model.ranges import RangeLayout
from magnetar.spark.options import Options
from magnetar.spark.source import plan
from magnetar.spark.source.offsets import TopicOffset
from magnetar.spark.source.plan import TopicView
from magnetar.wire.messages import Command, Received

_HINT: Final = "use topic://tenant/namespace/expression or persistent://tenant/namespace/expression"
_QUIET: Final = re2.Options()
# RE2 would write a user's typing error to stderr; it is raised as `InvalidSetting` instead.
_QUIET.log_errors = False


class NamespacePattern:
    """Topics of one kind, in one namespace."""

    def __init__(self, domain: Domain, namespace: NamespaceName, expression: str) -> None:
        self.domain = domain
        self.namespace = namespace
        try:
            self._expression = re2.compile(expression, _QUIET)
        except re2.error as error:
            text = f"{expression!r} is no regular expression: {error}"
            raise InvalidSetting(text, hint=_HINT) from None

    @classmethod
    def parse(cls, text: str) -> NamespacePattern:
        # Three spellings: in full, `tenant/namespace/expression`, and an expression in
        # public/default. An expression may hold slashes itself, so only the first two separate.
        scheme, separator, rest = text.partition("://")
        if not separator:
            scheme, rest = Domain.PERSISTENT.value, text
        parts = rest.split("/", 2)
        if len(parts) == 1:
            parts = ["public", "default", *parts]
        if len(parts) != 3 or scheme not in (Domain.PERSISTENT.value, Domain.TOPIC.value):
            raise InvalidSetting(f"{text!r} is no pattern of topics", hint=_HINT)
        return cls(Domain(scheme), NamespaceName(parts[0], parts[1]), parts[2])

    async def topics(self, connections: Connections) -> tuple[str, ...]:
        """List the topics that match, by their full names, sorted."""
        # Scalable topics are not in the list of a namespace's topics: they have a watch of their
        # own.
        if self.domain is Domain.TOPIC:
            names = await _Listing(connections, self.namespace).names()
        else:
            names = list((await connections.topics(str(self.namespace))).topics)
        # Invariant 4: brokers list the partitions of a topic one by one.
        found = {TopicName.parse(each).without_partition() for each in names}
        return tuple(
            sorted(
                str(each)
                for each in found
                if each.domain is self.domain and self._expression.fullmatch(each.local_name)
            )
        )


class _Listing:
    """A watch of the scalable topics of a namespace that ends with its first list."""

    def __init__(self, connections: Connections, namespace: NamespaceName) -> None:
        self._connections = connections
        self._namespace = namespace
        self._first: asyncio.Future[list[str]]

    async def names(self) -> list[str]:
        connection = await self._connections.service()
        # Before `register`: the list may be pushed as soon as the watch has a number.
        self._first = asyncio.get_running_loop().create_future()
        number = connection.register(WATCH, self)
        try:
            connection.tell(
                "WATCH_SCALABLE_TOPICS", watch_id=number, namespace=str(self._namespace)
            )
            async with asyncio.timeout(self._connections.settings.operation_timeout):
                return await self._first
        except TimeoutError as error:
            raise DeadlineExceeded(f"the topics of {self._namespace} did not come") from error
        # The watch is only for its first list: without the close the broker would push for ever.
        finally:
            connection.unregister(WATCH, number)
            if connection.is_open:
                connection.tell("WATCH_SCALABLE_TOPICS_CLOSE", watch_id=number)

    # --- the connection's side

    def take(self, command: Command) -> None:
        assert isinstance(command, Received)
        body: Any = command.body
        # An update behind the first list, before the broker has heard of the close.
        if self._first.done():
            return
        if body.HasField("error"):
            self.lost(refusal("the list of topics", body.error, body.message))
        elif body.HasField("snapshot"):
            self._first.set_result(list(body.snapshot.topics))

    def lost(self, error: MagnetarError) -> None:
        if not self._first.done():
            self._first.set_exception(error)


PATTERN_S: Final = 30.0
"""How often a pattern is looked for again."""
_LOOKS_MAX: Final = 20
_PAUSE_S: Final = 0.1

_WAYS: Final = ("topic", "topics", "topicsPattern")


def names_of(options: Options) -> tuple[str, ...] | None:
    """The topics that are named, in full; None: there is a pattern."""
    # Exactly one way of saying what is read: two would leave open which one wins.
    given = [way for way in _WAYS if options[way] is not None]
    if len(given) != 1:
        found = "and ".join(f"{way} " for way in given) or "nothing "
        raise InvalidSetting(
            f"a query reads one of topic, topics or topicsPattern, but {found}was given",
            hint='add .option("topic", "topic://public/default/orders")'
            if not given
            else "leave one of them out",
        )
    if given[0] == "topicsPattern":
        return None
    written = (options["topic"],) if given[0] == "topic" else options["topics"]
    names = [TopicName.parse(each) for each in written]
    # A segment has no layout to plan by, and is deleted when it is drained.
    for each in names:
        if each.domain is Domain.SEGMENT:
            raise InvalidSetting(f"{each} is a segment", hint=f"read {each.scalable_topic()}")
    # A topic that is named twice is read once, in the order of the option.
    return tuple(dict.fromkeys(str(each) for each in names))


NO_SUBSCRIPTION: Final = "none"
_DIGITS: Final = 12


def subscription_of(options: Options) -> str | None:
    """The subscription that follows the query; None: the user wants none.

    A source is told neither its query nor its checkpoint, so the default can only be made of what
    it reads. That also bounds what is left behind: a query that is tried out again and again, with
    a new checkpoint each time, uses the one subscription again.
    """
    chosen: str | None = options["subscription"]
    if chosen is not None:
        return None if chosen.lower() == NO_SUBSCRIPTION else chosen
    names = names_of(options)
    if names is not None and len(names) == 1:
        return "spark"
    # Each topic has the subscription, and may be read alone too, or together with others.
    what = options["topicsPattern"] if names is None else ",".join(sorted(names))
    return f"spark-{hashlib.sha256(what.encode()).hexdigest()[:_DIGITS]}"


class Watched:
    """The topics that a query reads."""

    def __init__(self, client: Client, options: Options) -> None:
        self._client = client
        self._named = names_of(options)
        self._pattern = None if self._named else NamespacePattern.parse(options["topicsPattern"])
        # Topics that are named never change; those of a pattern are looked for again.
        self._found: tuple[str, ...] = self._named or ()
        self._found_at = float("-inf")
        self._ranges: dict[str, Ranges] = {}
        self.isolation: Isolation = options["readIsolation"]

    @property
    def is_pattern(self) -> bool:
        return self._pattern is not None

    async def names(self) -> tuple[str, ...]:
        """The topics there are now; a pattern is looked for again every `PATTERN_S`."""
        if self._pattern is None:
            return self._found
        now = asyncio.get_running_loop().time()
        if now >= self._found_at + PATTERN_S:
            self._found = await self._pattern.topics(connections_of(self._client))
            self._found_at = now
            # A topic that comes back under the same name has another creation id: forget what was
            # known.
            for name in self._ranges.keys() - set(self._found):
                del self._ranges[name]
        return self._found

    async def ranges(self, topic: str) -> Ranges:
        known = self._ranges.get(topic)
        if known is None:
            try:
                known = self._ranges[topic] = await self._client.ranges(topic)
            except TopicNotFound as error:
                raise _missing(topic) from error
        return known

    async def look(
        self, topics: Iterable[str], places: Mapping[str, TopicOffset]
    ) -> dict[str, TopicView]:
        """A view of each; one that a pattern found and that is gone by now is left out."""
        wanted = list(topics)
        found = await asyncio.gather(*(self._look(topic, places.get(topic)) for topic in wanted))
        return {topic: view for topic, view in zip(wanted, found, strict=True) if view is not None}

    async def _look(self, topic: str, place: TopicOffset | None) -> TopicView | None:
        try:
            ranges = await self.ranges(topic)
            # Invariant 1: any broker may answer, and one may lag behind the one that was asked
            # before. An older layout would bring dropped segments back; so wait for it to catch up.
            for _ in range(_LOOKS_MAX):
                layout = await ranges.layout()
                if place is None or not plan.is_stale(place, layout):
                    view = await self._view(ranges, layout, place)
                    if view is not None:
                        return view
                await asyncio.sleep(_PAUSE_S)
        # Named topics must exist (invariant 2); a pattern goes on without the one that went away.
        except TopicNotFound as error:
            self._ranges.pop(topic, None)
            if self._pattern is None:
                raise _missing(topic) from error
            return None
        raise ServiceNotReady(f"the brokers' layout of {topic} is older than the query's")

    async def _view(
        self, ranges: Ranges, layout: RangeLayout, place: TopicOffset | None
    ) -> TopicView | None:
        """None: a segment went away meanwhile, so the layout is out of date."""
        # Layout and states are two questions: a segment that was deleted between them has no state.
        wanted = plan.wanted(place, layout)
        states = await ranges.states(wanted, isolation=self.isolation) if wanted else {}
        return TopicView(layout, states) if wanted <= states.keys() else None


def _missing(topic: str) -> TopicNotFound:
    name = TopicName.parse(topic)
    # The usual mistake is the right name of the other kind, scalable or regular.
    other = Domain.PERSISTENT if name.domain is Domain.TOPIC else Domain.TOPIC
    also = f"{other.value}://{name.namespace}/{name.local_name}"
    return TopicNotFound(
        f"{topic} does not exist",
        hint=f"create it (magnetar topics create), or correct the option topic; is {also} meant?",
    )
