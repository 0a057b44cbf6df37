"""The routing of one producer's messages while the segments of its topic change.

Owns: `SegmentProducers`: one `SegmentProducer` for each active segment, and the move of messages
from segments that are gone to their successors.

Invariants:
1. A key is in one segment's producer at a time. When a segment is gone from the layout, its
   producer ends first; then, in one step, what it has no receipt for moves to those of the new
   layout, in order and before anything newer.
2. A message without a key moves only within the part of the ring that its first segment had, so
   that its sequence id is above those of what its new segment has.
3. What a transaction sent to a segment that is gone, and what got neither receipt nor refusal
   because the connection was lost, fails: before its end a transaction's messages are not known to
   other segments, which would store them once more.
4. A layout without active segments is waited out. The producer of a terminated segment keeps what
   it has, for the next layout. A regular topic that was terminated and gets no successor within
   `TERMINATED_S` fails its producer.
"""

from __future__ import annotations

import asyncio
from typing import Final

from magnetar.client.connection.pool import Connections
from magnetar.client.layout.watch import LayoutWatch
from magnetar.client.message.batch import BATCH_MESSAGES_MAX
from magnetar.client.message.routing import RoundRobin, Router
from magnetar.client.produce.outbox import Pending, large_number
from magnetar.client.produce.pending_messages import PendingMessages
from magnetar.client.produce.segment_producer import ProducerSpec, SegmentProducer
from magnetar.errors import (
    AlreadyClosed,
    ConnectionLost,
    DeadlineExceeded,
    MagnetarError,
    TopicTerminated,
)
from magnetar.model.segments import Segment, SegmentLayout
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.wire.messages import TxnId

# A migration terminates the regular topic and makes the scalable one: seconds, not minutes.
TERMINATED_S: Final = 5.0

_LOG: Final = logger(__name__)


class SegmentProducers(Service):
    """All segments of one topic, for one producer."""

    def __init__(
        self,
        connections: Connections,
        spec: ProducerSpec,
        pending: PendingMessages,
        watch: LayoutWatch,
    ) -> None:
        self._timeout_s = connections.settings.operation_timeout
        super().__init__(f"producer {spec.name} of {watch.topic}", stop_seconds=self._timeout_s)
        self._connections = connections
        self._spec = spec
        self._pending = pending
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._producers: dict[int, SegmentProducer] = {}
        self._layout: SegmentLayout
        self._router: Router
        self._adopted = Signal()
        self._terminated = Signal()
        """Advanced by the producers of segments that take no more messages."""
        settings = spec.settings
        # Messages without a key: a whole batch goes to one segment before the next gets its turn.
        self._turns = RoundRobin(
            start=large_number(connections.chance),
            window_s=settings.batch_delay if settings.batching else 0.0,
            messages_max=min(settings.batch_messages, BATCH_MESSAGES_MAX)
            if settings.batching
            else 1,
        )

    async def _start(self) -> None:
        await self._watch.start()
        self._set_layout(await self._watch.first())
        self.spawn(self._follow(), "follow")
        self.spawn(self._watch_terminated(), "watch terminated")
        await self._until_ready()

    async def _stop(self) -> None:
        """What has no receipt is given up."""
        present = list(self._producers.values())
        # All are told before one is waited for: they end side by side.
        for each in present:
            each.end()
        try:
            for each in present:
                await each.is_over.wait()
        finally:
            await self._watch.stop()

    async def _until_ready(self) -> None:
        """Until there is a producer on every active segment; raises why there cannot be."""
        # One that waits for exclusive access waits as long as another producer has it.
        deadline = None if self._spec.settings.access_mode.may_wait else self._timeout_s
        try:
            async with asyncio.timeout(deadline):
                version = self._adopted.version
                while not await self._are_ready():
                    version = await self._adopted.past(version)
        except TimeoutError as error:
            # What a segment said last explains more than that time is over.
            failures = [each.failure for each in self._producers.values() if each.failure]
            if failures:
                raise failures[0] from None
            text = f"{self._spec.name} was not opened within {self._timeout_s} s"
            raise DeadlineExceeded(text) from error

    async def _are_ready(self) -> bool:
        """False: a segment is gone already, wait for the next layout."""
        for each in list(self._producers.values()):
            try:
                await asyncio.shield(each.ready)
            # A segment that was sealed while it was opened has successors; a regular topic has
            # none, as far as anybody knows.
            except TopicTerminated:
                if each.is_regular:
                    raise
                return False
        return True

    # --- messages

    def segment_of(self, key: str | bytes | None) -> Segment:
        """The segment of a new message."""
        if key is not None:
            return self._router.for_key(key)
        return self._router.for_turn(self._turns.next(self._loop.time()))

    def segment_of_rows(self, count: int) -> Segment:
        """The segment of new messages without a key, which are one batch."""
        return self._router.for_turn(self._turns.next(self._loop.time(), count))

    @property
    def router(self) -> Router:
        """The present one: another layout has another one."""
        return self._router

    def topic_of(self, segment: Segment) -> str:
        return self._watch.topic_of(segment)

    def offer(self, segment: Segment, message: Pending) -> None:
        """Give a message to the producer of a segment."""
        found = self._producers.get(segment.segment_id)
        if found is None:
            # The layout changed since the segment was chosen.
            for each in message.messages():
                self._producers[self._again(each).segment_id].offer(each)
        else:
            found.offer(message)

    def close_batches(self) -> None:
        for each in self._producers.values():
            each.close_batches()

    def unsent(self, txn_id: TxnId) -> list[Pending]:
        """The messages of a transaction that were not written to a connection."""
        return [each for made in self._producers.values() for each in made.unsent(txn_id)]

    def gave_up(self) -> None:
        """Messages were given up."""
        for each in self._producers.values():
            each.gave_up()

    def trouble(self) -> MagnetarError | None:
        """Why messages wait, as far as that is known."""
        failures = (each.failure for each in self._producers.values())
        return next((each for each in failures if each is not None), None)

    def throttled_since(self, moment: float | None = None) -> str | None:
        """The rate of publishing that has held sends back since a moment, or does so now."""
        found = [each.throttling for each in self._producers.values()]
        rates = (each.rate if moment is None else each.rate_since(moment) for each in found)
        return next((each for each in rates if each is not None), None)

    def _again(self, message: Pending) -> Segment:
        """The segment of a message that had one before."""
        # Keys, and partitions, are routed as at first. A message without a key stays in the part of
        # the ring that its first segment had (invariant 2).
        if message.key is not None or self._router.is_legacy:
            key = message.key
            return (
                self._router.for_turn(message.place) if key is None else self._router.for_key(key)
            )
        return self._layout.route(message.place << 16)

    # --- layouts

    async def _follow(self) -> None:
        version = 0
        while not self.stopping:
            try:
                version = await self._watch.changes.past(version)
            except AlreadyClosed:
                return
            await self._adopt()

    async def _adopt(self) -> None:
        """Go over to the newest layout, once the producers of segments that are gone have ended."""
        while True:
            # Read again after every wait: only the newest layout is gone over to.
            layout = self._watch.layout
            assert layout is not None, "it has changed"
            if not layout.active:
                # Messages have nowhere to go; the present producers keep them for the next layout.
                _LOG.warning("layout-without-active-segments", producer=self._spec.name)
                return
            active = {segment.segment_id for segment in layout.active}
            gone = [each for number, each in self._producers.items() if number not in active]
            for each in gone:
                each.end()
            ending = [each for each in gone if not each.is_over.is_set()]
            if not ending:
                break
            for each in ending:  # meanwhile layouts change, and messages come for the old one
                await each.is_over.wait()
        # From here to the end there is no await: no message can be handed in between the old layout
        # and the new one (invariant 1).
        for each in gone:
            del self._producers[each.segment.segment_id]
        left = [message for each in gone for message in each.left()]
        self._set_layout(layout)
        lost: list[Pending] = []
        # Those that may be stored first, by their ids; then the others, as they came.
        for message in sorted(left, key=_place_in_order):
            # Invariant 3: nobody could tell a repetition of it from the message.
            if message.is_in_doubt and message.txn is not None:
                lost.append(message)
            else:
                self.offer(self._again(message), message)
        if lost:
            text = "the connection was lost, and then the segment was replaced by others"
            self._pending.failed(lost, ConnectionLost(text, hint="abort the transaction"))
        if gone:
            _LOG.info("segments-left", producer=self._spec.name, moved=len(left), now=len(active))

    def _set_layout(self, layout: SegmentLayout) -> None:
        self._layout = layout
        self._router = Router(layout, self._spec.settings.routing)
        for segment in layout.active:
            # Segments that stay keep their producers, with what these have in flight.
            if segment.segment_id not in self._producers and not self.stopping:
                made = SegmentProducer(
                    self._connections,
                    self._spec,
                    self._pending,
                    segment,
                    self._watch.topic_of(segment),
                    terminated=self._terminated,
                )
                self._producers[segment.segment_id] = made
                self.spawn(made.run(), f"segment {segment.segment_id}")
        self._adopted.advance()

    async def _watch_terminated(self) -> None:
        """A regular topic may have been terminated to be migrated; if not, that is the end."""
        version = 0
        while True:
            version = await self._terminated.past(version)
            ended = [each for each in self._producers.values() if _is_at_its_end(each)]
            if ended:
                await asyncio.sleep(TERMINATED_S)
            for each in ended:
                # Looked at again after the wait: a new layout may have replaced it meanwhile.
                if self._producers.get(each.segment.segment_id) is each and each.failure:
                    self._pending.fail(each.failure)


def _is_at_its_end(producer: SegmentProducer) -> bool:
    return producer.is_terminated and producer.is_regular


def _place_in_order(message: Pending) -> tuple[bool, int]:
    if message.may_be_stored:
        return False, message.sequence_id
    return True, message.ordinal
