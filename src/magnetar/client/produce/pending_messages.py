"""The messages of one producer that have neither a receipt nor an error, over all its segments.

Owns: `PendingMessages`: room for them and what they take of the client's memory, their order and
their sequence ids, what becomes of them, and why the producer takes no more, if that is so.
(Pulsar's `pendingMessages` with its memory limit; Kafka's accumulator counts the same.)

Invariants:
1. At most `max_pending` messages of the producer, and `memory_limit` bytes of its client, are
   reserved; what was reserved for a message is given back once, when it is settled.
2. A message is settled once: `stored` or `failed`, whichever comes first, counts.
3. A sequence id is given out once, and none at or below one that a broker has seen.
4. A failure is kept until a flush has raised it; of very many, the first and the latest ones.
5. After `fail` there is no way back: `check_usable` raises it from then on.

Relies on: nothing above it. Senders put messages in; segment producers say what became of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from magnetar.client.connection.pool import Connections
from magnetar.client.message.message import AnyMessageId
from magnetar.client.produce.outbox import UNNUMBERED, Pending, PendingBatch, SequenceIds
from magnetar.client.produce.semaphore import WeightedSemaphore
from magnetar.client.produce.settings import ProducerSettings
from magnetar.errors import MagnetarError
from magnetar.runtime.logs import logger
from magnetar.runtime.signal import Signal

_LOG: Final = logger(__name__)

# A producer whose topic refuses everything must not keep an error for each message forever.
_FAILURES_MAX: Final = 1000


class PendingMessages:
    """The messages of one producer that are on their way."""

    def __init__(
        self,
        connections: Connections,
        topic: str,
        name: str,
        settings: ProducerSettings,
        memory: WeightedSemaphore,
    ) -> None:
        self.topic = topic
        self.name = name
        self.interceptors = connections.interceptors
        self.sequences = SequenceIds(settings.initial_sequence_id or 0)
        self.room = WeightedSemaphore(settings.max_pending)
        self.memory = memory
        """Shared by all producers of the client."""
        # The broker says these two when a segment is opened; every new message carries the version.
        self.schema_version = b""
        self.was_opened = False
        """A broker has opened a segment for this producer."""
        self.last_stored = UNNUMBERED
        """The highest sequence id that has a receipt, or that the broker had before."""
        self.deadline: asyncio.TimerHandle | None = None
        """Set by whoever gives up late messages; cancelled here when nothing is left to be late."""
        self.failure: MagnetarError | None = None
        self._send_timeout = settings.send_timeout
        self._traffic = connections.metrics.sent_to(topic)
        self._loop = asyncio.get_running_loop()
        self._ordinal = 0
        self._order: deque[Pending] = deque()
        """What has no receipt, oldest first; settled ones may still stand between them."""
        # What flushes wait for, and what they have to raise.
        self._settled = Signal()
        self._failures: deque[tuple[int, MagnetarError]] = deque()
        """What failed and no flush has raised, with its ordinal."""
        self._flushing = 0
        self._flushed = 0
        """Up to here flushes have told of failures."""

    # --- in

    def check_usable(self) -> None:
        """Raise why the producer takes no more, if that is so."""
        if self.failure is not None:
            # One error object is raised to many: none of them should see another's frames in it.
            raise self.failure.with_traceback(None)

    def try_reserve(self, message: Pending) -> bool:
        """Reserve what a message takes, if that can be done without waiting."""
        if not self.room.try_take(message.count):
            return False
        if not self.memory.try_take(message.cost):
            self.room.give(message.count)
            return False
        return True

    def give_back(self, message: Pending) -> None:
        """Give back what was reserved for a message."""
        self.room.give(message.count)
        self.memory.give(message.cost)

    def add(self, message: Pending) -> None:
        """Put a message behind what was handed in before."""
        self._ordinal += 1
        message.ordinal = self._ordinal
        self._order.append(message)

    def replace(self, batch: PendingBatch, messages: Sequence[Pending]) -> None:
        """Count each of these on its own from now on, in the place of the batch."""
        batch.is_settled = True
        order: deque[Pending] = deque()
        for each in self._order:
            order.extend(messages if each is batch else (each,))
        self._order = order

    def opened_with(self, last_sequence_id: int, schema_version: bytes) -> None:
        """Take over how far the broker knows this producer, and as what it knows its schema."""
        self.was_opened = True
        self.last_stored = max(self.last_stored, last_sequence_id)
        self.sequences.go_behind(last_sequence_id)
        self.schema_version = schema_version

    # --- receipts and failures

    def stored(self, messages: Sequence[Pending], ids: Sequence[AnyMessageId]) -> None:
        """Settle messages that the broker has stored; their ids."""
        traffic = self._traffic
        handed_in = messages[0].due_at - self._send_timeout
        seconds = self._loop.time() - handed_in
        for message, sent_id in zip(messages, ids, strict=True):
            # Given up meanwhile: whoever waited was told that it failed (invariant 2).
            if message.is_settled:
                continue
            message.is_settled = True
            traffic.messages += message.count
            traffic.bytes += message.own_size
            traffic.seconds += seconds * message.count
            # The application may have cancelled the future that `submit` gave it.
            if not message.receipt.done():
                message.receipt.set_result(sent_id)
            if message.draft is not None:
                self.interceptors.sent(message.draft, sent_id)
            self.give_back(message)
        self.last_stored = max(self.last_stored, messages[-1].sequence_id)
        self._forget_settled()

    def failed(self, messages: Sequence[Pending], error: MagnetarError) -> None:
        """Settle messages that will not be stored, or of which that will never be known."""
        open_ones = [each for each in messages if not each.is_settled]
        for message in open_ones:
            message.is_settled = True
            if not message.receipt.done():
                message.receipt.set_exception(error)
                message.receipt.exception()  # it is logged: nobody needs to await it
            if message.draft is not None:
                self.interceptors.not_sent(message.draft, error)
            self.give_back(message)
            # Invariant 4: a flush raises the first failure, so that one is never dropped.
            if len(self._failures) >= _FAILURES_MAX:
                del self._failures[1]
            self._failures.append((message.ordinal, error))
        count = sum(each.count for each in open_ones)
        self._traffic.failures += count
        if open_ones:
            _LOG.warning(
                "send-failed",
                producer=self.name,
                topic=self.topic,
                messages=count,
                reason=str(error),
            )
        self._forget_settled()

    def fail(self, error: MagnetarError) -> None:
        """End everything: what is pending fails, and nothing more is taken."""
        if self.failure is None:
            self.failure = error
        self.failed(list(self._order), error)

    def late(self, now: float) -> tuple[list[Pending], float | None]:
        """The messages whose time is over; and when that of the next one will be."""
        late: list[Pending] = []
        # The order of handing in is that of deadlines: all messages have the same send timeout.
        for message in self._order:
            if message.due_at > now:
                return [each for each in late if not each.is_settled], message.due_at
            late.append(message)
        return [each for each in late if not each.is_settled], None

    async def flush(self) -> None:
        """Wait until everything handed in so far is settled; raise the first failure of it."""
        last = self._ordinal
        self._flushing += 1
        try:
            while self._order and self._order[0].ordinal <= last:
                await self._settled.past(self._settled.version)
            found = [each for each in self._failures if each[0] <= last]
            self._flushed = max(self._flushed, last)
        finally:
            self._flushing -= 1
            if not self._flushing:  # another flush may wait for the same messages
                self._failures = deque(each for each in self._failures if each[0] > self._flushed)
        if found:
            raise min(found, key=_ordinal)[1]

    def _forget_settled(self) -> None:
        order = self._order
        while order and order[0].is_settled:
            order.popleft()
        if not order and self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        # Asked on every receipt: without a flush there is nobody to wake.
        if self._settled.waiters:
            self._settled.advance()


def _ordinal(failure: tuple[int, MagnetarError]) -> int:
    return failure[0]
