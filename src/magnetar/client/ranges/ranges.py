"""Reading a topic by ranges: plan first, then read exactly what was planned. Magnetar's own.

Owns: `Ranges`, one topic. It holds no connection and no place in the topic: positions are the
application's, and any process can go on with them.

Invariants:
1. The layout never goes back: an answer of an older epoch is asked for again. Nor do ends: what
   was below one stays readable.
2. A range has the same messages whenever and wherever it is read, as long as it is read at all:
   what is gone raises `RangeLost`, naming the position and the first that is kept.
3. `read` is ahead of its application by `PAGES_AHEAD` pages at most, and stops with it.
4. Every call goes on at the new broker when a segment has moved, within the operation timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from itertools import count
from typing import Any, Final, Literal, TypeAlias

from magnetar.client.connection.connection import BrokerConnection
from magnetar.client.connection.pool import Connections
from magnetar.client.connection.server_errors import is_passing
from magnetar.client.ranges.brokers import RangeBrokers
from magnetar.client.ranges.page import (
    RangePage,
    RangeSource,
    page_of,
    position_from,
    wire_position,
)
from magnetar.errors import (
    InvalidSetting,
    MagnetarError,
    RangeLost,
    ServiceNotReady,
    TopicNotFound,
)
from magnetar.model.names import Domain, TopicName
from magnetar.model.ranges import (
    ORIGIN,
    RangeCount,
    RangeLayout,
    RangePosition,
    RangeSegment,
    RangeState,
)

__all__ = [
    "ORIGIN",
    "RangeCount",
    "RangeLayout",
    "RangePage",
    "RangePosition",
    "RangeSegment",
    "RangeState",
    "Ranges",
]

Isolation: TypeAlias = Literal["committed", "uncommitted"]
Initial: TypeAlias = Literal["earliest", "latest"]

# One is being decoded while the next travels; more would only take memory.
PAGES_AHEAD: Final = 2

_ISOLATIONS: Final = {"committed": 0, "uncommitted": 1}
_INITIALS: Final = {"latest": 0, "earliest": 1}
_MS_PER_SECOND: Final = 1000
# A number for each `Ranges` of this process: a broker gives up an older poll of the same number.
_POLLS: Final = count(1)


class Ranges:
    """The ranges of one topic, scalable, partitioned or plain. Made by `Client.ranges`.

    ranges = await client.ranges("topic://public/default/orders")
    states = await ranges.states(each.number for each in (await ranges.layout()).segments)
    for number, state in states.items():
        async for page in ranges.read(number, state.first, state.stable):
            columns = page.record_batch()
    """

    def __init__(
        self, connections: Connections, topic: TopicName, *, creation_id: str | None = None
    ) -> None:
        self._topic = topic
        self._settings = connections.settings
        self._backoff = connections.backoff
        self._brokers = RangeBrokers(connections)
        self._creation_id = creation_id
        # What was learnt last, which never goes back (invariant 1): the layout, and the ends of
        # segments.
        self._layout: RangeLayout | None = None
        self._ends: dict[tuple[int, Isolation], RangePosition] = {}
        self._poll_id = next(_POLLS)

    # --- what there is

    async def layout(self) -> RangeLayout:
        """The segments as they are now; `RangeLost` if the topic is not the one that was meant."""

        async def ask(broker: BrokerConnection) -> RangeLayout:
            answer = await broker.request("RANGE_LAYOUT", topic=str(self._topic))
            found = _layout(answer)
            known = self._layout
            # Another creation id is another topic, whose epochs count from their own beginning.
            is_same = known is not None and known.creation_id == found.creation_id
            if is_same and known is not None and found.epoch < known.epoch:
                raise ServiceNotReady(f"{broker.address} knows an older layout of {self._topic}")
            return found

        found = await self._brokers.any(f"the layout of {self._topic}", ask)
        # The caller planned for a topic that is no more: its positions would point into another
        # one.
        if self._creation_id not in (None, found.creation_id):
            raise RangeLost(
                f"{self._topic} was deleted, and another one has its name",
                hint="begin anew with the topic that there is now",
            )
        if self._layout is not None and self._layout.creation_id != found.creation_id:
            self._ends.clear()
        self._layout = found
        return found

    async def states(
        self, numbers: Iterable[int], *, isolation: Isolation = "committed"
    ) -> dict[int, RangeState]:
        """The bounds between which segments can be read now; one that is gone is left out."""
        wanted = _isolation(isolation)

        async def ask(broker: BrokerConnection, keys: list[int]) -> Any:
            topics = [names[key] for key in keys]
            answer = await broker.request("RANGE_STATES", topics=topics, isolation=wanted)
            return answer.states

        names = await self._names(numbers)
        found = await self._brokers.many(f"the states of {self._topic}", names, ask)
        states = {}
        for number, each in found.items():
            # A broker that does not know yet that it was replaced may answer an older end.
            known = self._ends.get((number, isolation), ORIGIN)
            stable = self._ends[number, isolation] = max(position_from(each.end), known)
            states[number] = RangeState(position_from(each.first), stable, each.is_final)
        return states

    async def counts(
        self,
        spans: Mapping[int, tuple[RangePosition, RangePosition]],
        *,
        isolation: Isolation = "committed",
    ) -> dict[int, RangeCount]:
        """How much is in these ranges. An estimate where they are long; 0 only if it is none."""
        wanted = _isolation(isolation)

        async def ask(broker: BrokerConnection, keys: list[int]) -> Any:
            asked = [_span(names[key], *spans[key]) for key in keys]
            return (await broker.request("RANGE_COUNTS", spans=asked, isolation=wanted)).counts

        names = await self._names(spans)
        found = await self._brokers.many(f"the counts of {self._topic}", names, ask)
        # Unlike a state, a count has no way to say "gone": what was planned on it would be wrong.
        for number in spans:
            if number not in found:
                raise self._gone(number)
        return {
            number: RangeCount(each.messages, each.bytes, each.is_exact)
            for number, each in found.items()
        }

    # --- where to cut

    async def cut(
        self,
        number: int,
        start: RangePosition,
        end: RangePosition,
        *,
        messages: int | None = None,
        bytes: int | None = None,
        isolation: Isolation = "committed",
    ) -> RangePosition:
        """The furthest end up to `end` with at most so many messages and bytes.

        Messages are counted exactly, if need be inside a batch; bytes at entries, of which one is
        always taken.
        """
        # A broker looks at a bounded part of the range for each question, and says if there is
        # more.
        at, taken, size = start, 0, 0
        while True:
            fields: dict[str, Any] = {"span": _span(await self._name(number), at, end)}
            if messages is not None:
                fields["messages_max"] = max(messages - taken, 0)
            if bytes is not None:
                fields["bytes_max"] = max(bytes - size, 0)
            answer = await self._ask(number, "RANGE_CUT", isolation=isolation, **fields)
            at = position_from(answer.position)
            taken, size = taken + answer.messages, size + answer.bytes
            # With all bytes used up another question would take one entry more, as it always takes
            # one.
            if not answer.is_partial or (bytes is not None and size >= bytes):
                return at

    async def pieces(
        self,
        number: int,
        start: RangePosition,
        end: RangePosition,
        count: int,
        *,
        isolation: Isolation = "committed",
    ) -> list[RangePosition]:
        """Entries inside a range that cut it into at most `count` pieces, about equal in bytes."""
        span = _span(await self._name(number), start, end)
        answer = await self._ask(
            number, "RANGE_PIECES", isolation=isolation, span=span, count=count
        )
        return [position_from(each) for each in answer.positions]

    async def at_time(
        self, number: int, publish_time_ms: int, *, isolation: Isolation = "committed"
    ) -> RangePosition:
        """The first message published at or after a moment; the stable end if there is none."""
        topic = await self._name(number)
        answer = await self._ask(
            number, "RANGE_AT_TIME", isolation=isolation, topic=topic, publish_time=publish_time_ms
        )
        return position_from(answer.position)

    # --- reading

    async def read(
        self,
        number: int,
        start: RangePosition,
        end: RangePosition,
        *,
        isolation: Isolation = "committed",
    ) -> AsyncGenerator[RangePage, None]:
        """Read all from `start` to `end`, page by page; it never waits for a message.

        Pages may be empty, where everything is aborted. `RangeLost` if something of the range is
        gone. Whoever stops before the end closes it.
        """
        source = self._source(await self._segment(number))
        # One page in the queue and one that waits to be put there (invariant 3).
        pages: asyncio.Queue[RangePage | BaseException] = asyncio.Queue(PAGES_AHEAD - 1)
        reading = asyncio.create_task(
            self._read_ahead(source, start, end, isolation, pages), name=f"ranges of {self._topic}"
        )
        try:
            while True:
                page = await pages.get()
                if isinstance(page, BaseException):
                    raise page
                yield page
                if page.next >= end:
                    return
        # Also when the application stops early: nobody would ever take what is read ahead.
        finally:
            reading.cancel()
            await asyncio.wait({reading})

    async def _read_ahead(
        self,
        source: RangeSource,
        start: RangePosition,
        end: RangePosition,
        isolation: Isolation,
        pages: asyncio.Queue[RangePage | BaseException],
    ) -> None:
        number = source.segment.number
        at = start
        try:
            while True:
                answer = await self._ask(
                    number,
                    "RANGE_READ",
                    isolation=isolation,
                    topic=source.segment.name,
                    start=wire_position(at),
                    end=wire_position(end),
                )
                page = page_of(source, at, end, answer)
                # Waits while the application is behind: this is the back-pressure.
                await pages.put(page)
                at = page.next
                if answer.body.is_exhausted:
                    return
        except Exception as error:  # noqa: BLE001  raised where the pages are taken
            await pages.put(error)

    # --- news

    async def news(
        self,
        positions: Mapping[int, RangePosition],
        epoch: int,
        wait_ms: int,
        *,
        isolation: Isolation = "committed",
    ) -> bool:
        """Wait, for so long at most, until there is something to read at one of these positions.

        True also if the layout is newer than `epoch`, or one of the segments is gone. While a
        broker cannot be asked it may take longer, up to the operation timeout.
        """
        loop = asyncio.get_running_loop()
        # Two ends: how long the caller wants to wait for news, and how long trouble is sat out.
        deadline = loop.time() + wait_ms / _MS_PER_SECOND
        give_up_at = max(deadline, loop.time() + self._settings.operation_timeout)
        backoff = self._backoff()
        names = await self._names(positions)
        while True:
            left_s = max(deadline - loop.time(), 0)
            try:
                return await self._poll(names, positions, epoch, left_s, isolation)
            except MagnetarError as error:
                if not is_passing(error):
                    raise
                # Which broker had the trouble is not known here: all are looked up again.
                for name in names.values():
                    self._brokers.forget(name)
                pause = backoff.next()
                if loop.time() + pause >= give_up_at:
                    raise
                await asyncio.sleep(pause)

    async def _poll(
        self,
        names: Mapping[int, str],
        positions: Mapping[int, RangePosition],
        epoch: int,
        left_s: float,
        isolation: Isolation,
    ) -> bool:
        groups = await self._brokers.groups(names)
        # No segment to look at, only the layout: any broker knows that.
        if not groups:
            groups = {await self._brokers.any("news", _itself): []}

        async def ask(broker: BrokerConnection, keys: list[int]) -> bool:
            places = [
                {"topic": names[key], "position": wire_position(positions[key])} for key in keys
            ]
            answer = await broker.request(
                "RANGE_NEWS",
                # The broker holds the question for `wait_ms`; only what comes on top is its
                # answering time.
                timeout_s=left_s + self._settings.operation_timeout,
                poll_id=self._poll_id,
                topic=str(self._topic),
                epoch=epoch,
                places=places,
                wait_ms=round(left_s * _MS_PER_SECOND),
                isolation=_isolation(isolation),
            )
            return bool(answer.is_news)

        polls = [asyncio.create_task(ask(*group)) for group in groups.items()]
        try:
            # The first broker with news ends the wait at all of them.
            for poll in asyncio.as_completed(polls):
                if await poll:
                    return True
            return False
        finally:
            for each in polls:
                each.cancel()
            await asyncio.gather(*polls, return_exceptions=True)

    # --- a cursor that follows

    async def move_cursor(
        self,
        subscription: str,
        positions: Mapping[int, RangePosition],
        *,
        initial: Initial,
        drained: Iterable[int] = (),
    ) -> None:
        """Move a durable subscription on to these positions, for backlogs and retention.

        It is made if there is none, beginning at `initial`; `drained` are sealed segments that were
        read to their end. A cursor never goes back. Sealed segments are kept until it has passed
        them.
        """
        if initial not in _INITIALS:
            raise InvalidSetting(f"a subscription begins at {' or '.join(_INITIALS)}")
        # No position: to the end of a sealed segment.
        ends = dict.fromkeys(drained)
        wanted: dict[int, RangePosition | None] = {**ends, **positions}

        async def ask(broker: BrokerConnection, keys: list[int]) -> Any:
            answer = await broker.request(
                "RANGE_MOVE",
                subscription=subscription,
                cursors=[_cursor(names[key], wanted[key]) for key in keys],
                initial_position=_INITIALS[initial],
            )
            return answer.moved

        # A segment that is gone needs no cursor any more.
        names = await self._names(wanted, gone_is_fine=True)
        await self._brokers.many(f"the cursors of {self._topic}", names, ask)

    # --- parts

    async def _ask(self, number: int, what: str, *, isolation: Isolation, **fields: Any) -> Any:
        wanted = _isolation(isolation)

        async def ask(broker: BrokerConnection) -> Any:
            return await broker.request(what, isolation=wanted, **fields)

        try:
            return await self._brokers.one(await self._name(number), what, ask)
        except TopicNotFound as error:
            raise self._gone(number) from error

    async def _names(self, numbers: Iterable[int], *, gone_is_fine: bool = False) -> dict[int, str]:
        wanted = list(numbers)
        layout = self._layout
        # A number that is not known may be of a newer layout: asked once before it counts as gone.
        if layout is None or not {each.number for each in layout.segments}.issuperset(wanted):
            layout = await self.layout()
        names = {each.number: each.name for each in layout.segments}
        for number in wanted:
            if number not in names and not gone_is_fine:
                raise self._gone(number)
        return {number: names[number] for number in wanted if number in names}

    async def _name(self, number: int) -> str:
        return (await self._names([number]))[number]

    async def _segment(self, number: int) -> RangeSegment:
        await self._names([number])
        assert self._layout is not None, "it was asked for"
        return next(each for each in self._layout.segments if each.number == number)

    def _source(self, segment: RangeSegment) -> RangeSource:
        assert self._layout is not None, "the segment is from there"
        name = TopicName.parse(segment.name)
        is_scalable = TopicName.parse(self._layout.topic).domain is Domain.TOPIC
        partition = -1 if name.partition is None else name.partition
        return RangeSource(
            self._layout.topic, segment, segment.number if is_scalable else None, partition
        )

    def _gone(self, number: int) -> RangeLost:
        return RangeLost(
            f"segment {number} of {self._topic} is gone",
            hint="its retention was over, or the topic",
        )


async def _itself(broker: BrokerConnection) -> BrokerConnection:
    return broker


def _isolation(name: Isolation) -> int:
    if name not in _ISOLATIONS:
        raise InvalidSetting(f"an isolation is {' or '.join(_ISOLATIONS)}, not {name!r}")
    return _ISOLATIONS[name]


def _span(topic: str, start: RangePosition, end: RangePosition) -> dict[str, Any]:
    return {"topic": topic, "start": wire_position(start), "end": wire_position(end)}


def _cursor(topic: str, position: RangePosition | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"topic": topic}
    return fields if position is None else fields | {"position": wire_position(position)}


def _layout(answer: Any) -> RangeLayout:
    segments = tuple(
        RangeSegment(
            each.number,
            each.topic,
            tuple(each.parents),
            tuple(each.children),
            each.is_sealed,
            each.created_at_ms,
        )
        for each in answer.segments
    )
    return RangeLayout(answer.topic, answer.creation_id, answer.epoch, segments)
