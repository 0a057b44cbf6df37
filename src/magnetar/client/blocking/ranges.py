"""Blocking: `Ranges`, for threads.

Written by `make blocking` from `magnetar.client.ranges.ranges`; edit that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from magnetar.client.blocking.handle import Threaded, wrapped_of
from magnetar.client.ranges.page import RangePage
from magnetar.client.ranges.ranges import Initial, Isolation
from magnetar.client.ranges.ranges import Ranges as AsyncRanges
from magnetar.model.ranges import RangeCount, RangeLayout, RangePosition, RangeState


class Ranges(Threaded[AsyncRanges]):
    """The ranges of one topic, scalable, partitioned or plain. Made by `Client.ranges`.

    ranges = client.ranges("topic://public/default/orders")
    states = ranges.states(each.number for each in (ranges.layout()).segments)
    for number, state in states.items():
        for page in ranges.read(number, state.first, state.stable):
            columns = page.record_batch()
    """

    def layout(self) -> RangeLayout:
        """The segments as they are now; `RangeLost` if the topic is not the one that was meant."""
        return self._wait(lambda: self._wrapped.layout())

    def states(
        self, numbers: Iterable[int], *, isolation: Isolation = "committed"
    ) -> dict[int, RangeState]:
        """The bounds between which segments can be read now; one that is gone is left out."""
        given = [wrapped_of(each) for each in numbers]
        return self._wait(lambda: self._wrapped.states(given, isolation=isolation))

    def counts(
        self,
        spans: Mapping[int, tuple[RangePosition, RangePosition]],
        *,
        isolation: Isolation = "committed",
    ) -> dict[int, RangeCount]:
        """How much is in these ranges. An estimate where they are long; 0 only if it is none."""
        return self._wait(lambda: self._wrapped.counts(spans, isolation=isolation))

    def cut(
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
        return self._wait(
            lambda: self._wrapped.cut(
                number, start, end, messages=messages, bytes=bytes, isolation=isolation
            )
        )

    def pieces(
        self,
        number: int,
        start: RangePosition,
        end: RangePosition,
        count: int,
        *,
        isolation: Isolation = "committed",
    ) -> list[RangePosition]:
        """Entries inside a range that cut it into at most `count` pieces, about equal in bytes."""
        return self._wait(
            lambda: self._wrapped.pieces(number, start, end, count, isolation=isolation)
        )

    def at_time(
        self, number: int, publish_time_ms: int, *, isolation: Isolation = "committed"
    ) -> RangePosition:
        """The first message published at or after a moment; the stable end if there is none."""
        return self._wait(
            lambda: self._wrapped.at_time(number, publish_time_ms, isolation=isolation)
        )

    def read(
        self,
        number: int,
        start: RangePosition,
        end: RangePosition,
        *,
        isolation: Isolation = "committed",
    ) -> Iterator[RangePage]:
        """Read all from `start` to `end`, page by page; it never waits for a message.

        Pages may be empty, where everything is aborted. `RangeLost` if something of the range is
        gone. Whoever stops before the end closes it.
        """
        return self._pull(lambda: self._wrapped.read(number, start, end, isolation=isolation))

    def news(
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
        return self._wait(
            lambda: self._wrapped.news(positions, epoch, wait_ms, isolation=isolation)
        )

    def move_cursor(
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
        given = [wrapped_of(each) for each in drained]
        self._wait(
            lambda: self._wrapped.move_cursor(
                subscription, positions, initial=initial, drained=given
            )
        )
