"""The topics of a query, as brokers have them now.

Owns: `Watched`: which topics there are, their `Ranges`, and `look`, which gives a view of each.

Invariants:
1. A view is not older than the place that it is to be used with, and has a state for every segment
   that planning wants.
2. A topic that is missing raises `TopicNotFound` with what to do, unless a pattern found it.
3. Nothing here creates a topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final

from magnetar.client.client import Client
from magnetar.client.ranges.ranges import Isolation, Ranges
from magnetar.errors import InvalidSetting, ServiceNotReady, TopicNotFound
from magnetar.model.names import Domain, TopicName
from magnetar.model.ranges import RangeLayout
from magnetar.spark.options import Options
from magnetar.spark.source import plan
from magnetar.spark.source.offsets import TopicOffset
from magnetar.spark.source.plan import TopicView
from magnetar.spark.source.topic_lists import NamespacePattern

PATTERN_S: Final = 30.0
"""How often a pattern is looked for again."""
_LOOKS_MAX: Final = 20
_PAUSE_S: Final = 0.1

_WAYS: Final = ("topic", "topics", "topicsPattern")


def names_of(options: Options) -> tuple[str, ...] | None:
    """The topics that are named, in full; None: there is a pattern."""
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
    for each in names:
        if each.domain is Domain.SEGMENT:
            raise InvalidSetting(f"{each} is a segment", hint=f"read {each.scalable_topic()}")
    return tuple(dict.fromkeys(str(each) for each in names))


class Watched:
    """What a query reads."""

    def __init__(self, client: Client, options: Options) -> None:
        self._client = client
        self._named = names_of(options)
        self._pattern = None if self._named else NamespacePattern.parse(options["topicsPattern"])
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
            self._found = await self._pattern.topics(self._client.connections)
            self._found_at = now
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
            for _ in range(_LOOKS_MAX):
                layout = await ranges.layout()
                if place is None or not plan.is_stale(place, layout):
                    view = await self._view(ranges, layout, place)
                    if view is not None:
                        return view
                await asyncio.sleep(_PAUSE_S)
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
        wanted = plan.wanted(place, layout)
        states = await ranges.states(wanted, isolation=self.isolation) if wanted else {}
        return TopicView(layout, states) if wanted <= states.keys() else None


def _missing(topic: str) -> TopicNotFound:
    name = TopicName.parse(topic)
    other = Domain.PERSISTENT if name.domain is Domain.TOPIC else Domain.TOPIC
    also = f"{other.value}://{name.namespace}/{name.local_name}"
    return TopicNotFound(
        f"{topic} does not exist",
        hint=f"create it (magnetar topics create), or correct the option topic; is {also} meant?",
    )
