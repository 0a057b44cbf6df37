"""The messages on their way to one segment (or partition): what waits, and what is in flight.

Owns: `Pending`, a message without a receipt, and `PendingBatch`, several; `PendingSend`, an entry
without one; `Outbox`: the batches being filled, the entries made of them, and their order;
`SequenceIds`, which all segments of a producer share. It knows no connection.

Invariants:
1. Entries leave in the order of their sequence ids. A message gets its sequence id when its entry
   is made, unless the application gave it one: batches of several entry buckets fill at the same
   time, and a broker takes a smaller id that comes later for a repetition.
2. What was sent and has no receipt is sent again (`requeue`) before anything newer, with the same
   bytes: the broker drops what it has already.
3. What leaves for another segment (`left`) is in order. A message that may be stored here keeps its
   sequence id, and is an entry of its own from then on: brokers look its id up by its key.
4. A message that was given up is not sent again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

from magnetar.client.arrow.outgoing_rows import OutgoingRows
from magnetar.client.message.batch import (
    OpenBatches,
    Outgoing,
    OutgoingEntry,
    PayloadCipher,
    Stamp,
    batch_entry,
    filled_entry,
    metadata_for,
    packed,
    sealed_entry,
    shared_metadata,
    single_entry,
)
from magnetar.client.message.chunks import chunk_entries
from magnetar.client.message.interceptors import Draft
from magnetar.client.message.message import AnyMessageId
from magnetar.client.produce.settings import ProducerSettings
from magnetar.errors import MessageTooLarge, RemoteProtocolError
from magnetar.model.segments import Segment
from magnetar.runtime.clock import Clock
from magnetar.wire.messages import TxnId

UNNUMBERED: Final = -1

# A uuid, a chunk id, a number of chunks and the total size, with room to spare.
_CHUNK_HEADROOM_BYTES: Final = 256
"""For the fields of a chunk's metadata that the message itself has not."""


@dataclass(slots=True, kw_only=True, eq=False)
class Pending(Outgoing):
    """A message that has neither a receipt nor an error yet."""

    receipt: asyncio.Future[AnyMessageId]
    due_at: float
    """When it is given up (loop time)."""
    own_size: int
    """`size`, which is asked for again and again."""
    count: int = 1
    """How many messages it is: more than one in a `PendingBatch`."""
    cost: int = 0
    """What it takes of its client's memory."""
    place: int = 0
    """Where it stands on the ring of segments, in its first segment's part if it has no key."""
    ordinal: int = 0
    """Counts the messages of its producer."""
    is_numbered_by_application: bool = False
    may_be_stored: bool = False
    """It was written to a segment that takes no more messages, and has no receipt."""
    is_in_doubt: bool = False
    """The connection was lost as well: nobody but the broker can know if it is there."""
    is_settled: bool = False
    draft: Draft | None = None
    """As interceptors know it, if there are any."""

    @property
    def size(self) -> int:
        return self.own_size

    def messages(self) -> list[Pending]:
        """Each message on its own."""
        return [self]


@dataclass(slots=True, kw_only=True, eq=False)
class PendingBatch(Pending):
    """Messages that were handed in together: one entry, and one receipt for all of them.

    `messages` is for what must go elsewhere, and is called once: from then on each has a receipt
    of its own, and this one is done when all of them are.
    """

    rows: OutgoingRows
    divide: Callable[[PendingBatch], list[Pending]]
    """Given by who made it: receipts and what is reserved are to be shared out."""
    first_sequence: int = UNNUMBERED

    def messages(self) -> list[Pending]:
        return self.divide(self)

    def entry(self, stamp: Stamp, *, hashes: bool) -> OutgoingEntry:
        """Encode it as an entry, once it is numbered; `hashes`: with those that it holds."""
        return filled_entry(
            shared_metadata(self, stamp),
            self.rows.payload(self.first_sequence),
            stamp.compression,
            num_messages=self.count,
            sequence_ids=(self.first_sequence, self.sequence_id),
            places=self.rows.hash_span if hashes else None,
            txn=self.txn,
            cipher=stamp.cipher,
        )


@dataclass(slots=True, eq=False)
class PendingSend:
    """An entry on its way."""

    entry: OutgoingEntry
    messages: list[Pending]
    may_be_stored: bool
    """It was written, here or elsewhere."""
    is_in_doubt: bool = False
    """It was written, and its connection was lost before an answer came."""
    is_refused: bool = False
    """The broker said that it takes no more, and that this one came too late."""
    is_chunk: bool = False
    is_whole: bool = True
    """With its receipt its messages are stored: not so of a chunk, but for the last one."""

    @property
    def is_dead(self) -> bool:
        """Whether all its messages were given up."""
        return all(each.is_settled for each in self.messages)


class SequenceIds:
    """The sequence ids of one producer: each is given out once, and they grow."""

    __slots__ = ("_next",)

    def __init__(self, first: int) -> None:
        self._next = first

    def take(self, count: int) -> int:
        """The first of so many ids that nobody else gets."""
        self._next += count
        return self._next - count

    def go_behind(self, sequence_id: int) -> None:
        """Give out no id up to this one: the application or a broker has used it."""
        self._next = max(self._next, sequence_id + 1)


class Outbox:
    """The messages for one segment, from `add` until their entries are answered."""

    def __init__(
        self,
        segment: Segment,
        settings: ProducerSettings,
        *,
        producer_name: str,
        sequences: SequenceIds,
        clock: Clock,
        chance: Random,
        cipher: PayloadCipher | None = None,
    ) -> None:
        self.entry_bytes_max = 0
        """What the broker takes; 0: not known yet."""
        self._segment = segment
        self._settings = settings
        self._is_regular = segment.legacy_topic_name is not None
        self._producer_name = producer_name
        self._next_sequence = sequences.take
        self._clock = clock
        self._chance = chance
        self._cipher = cipher
        # A segment may be read by entry buckets, so an entry must not mix them; the partitions of a
        # regular topic mix keys, unless the application wants one key per batch.
        self._batches = OpenBatches(
            bucket_splits=None if self._is_regular else segment.entry_bucket_splits,
            by_key=self._is_regular and settings.batch_by_key,
            messages_max=settings.batch_messages,
            bytes_max=settings.batch_bytes,
        )
        self._last_added: Pending | None = None
        # In the order of their sequences: receipts come in this order, and a lost connection puts
        # what is in flight back in front of what waits.
        self._waiting: deque[PendingSend] = deque()
        self._in_flight: deque[PendingSend] = deque()

    # --- in

    @property
    def has_open_batches(self) -> bool:
        return bool(self._batches.messages)

    @property
    def has_waiting(self) -> bool:
        """Entries are ready to be sent."""
        return bool(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way."""
        return not self._waiting and not self._in_flight

    @property
    def awaits_answers(self) -> bool:
        """Whether something is in flight that the broker has said nothing about."""
        return any(not each.is_refused for each in self._in_flight)

    @property
    def has_dead_in_flight(self) -> bool:
        return any(each.is_dead for each in self._in_flight)

    def add(self, message: Pending) -> None:
        """Take a message; raises `MessageTooLarge`, and has then not taken it."""
        if isinstance(message, PendingBatch):
            self._add_batch(message)
            return
        # Three reasons to be an entry of its own: no batching, too large for a batch, or it may be
        # stored already (invariant 3: the broker looks its id up by its key).
        is_large = 0 < self.entry_bytes_max <= message.own_size + self._overhead
        if not self._settings.batching or is_large or message.may_be_stored:
            self.close_batches()
            self._add_single(message)
            return
        batches = self._batches
        # Full, of another transaction or schema version, or out of order by its number: what is
        # open leaves first. What then still does not fit (a time of delivery) goes alone.
        if not batches.takes(message) or not self._continues(message):
            self.close_batches()
            if not batches.takes(message):
                self._add_single(message)
                return
        batches.add(message)
        self._last_added = message
        if batches.is_full:
            self.close_batches()

    def close_batches(self) -> None:
        """Make entries of the batches that are being filled."""
        self._last_added = None
        if not self._batches.messages:
            return
        # Segments are told the hashes of a batch, so that it can be shared by entry buckets; the
        # consumers of regular topics know nothing of that.
        stamp, hashes = self._stamp(), not self._is_regular
        for messages in self._take_batches():
            for each in messages:
                self._number(each)
            if len(messages) == 1:
                entry = single_entry(messages[0], stamp)
            else:
                entry = batch_entry(messages, stamp, hashes=hashes)
            self._waiting.append(PendingSend(entry, messages, may_be_stored=False))

    def _add_batch(self, batch: PendingBatch) -> None:
        self.close_batches()
        batch.first_sequence = self._next_sequence(batch.count)
        batch.sequence_id = batch.first_sequence + batch.count - 1
        entry = batch.entry(self._stamp(), hashes=not self._is_regular)
        size, limit = len(entry.headers_and_payload), self.entry_bytes_max
        if 0 < limit < size:
            # The numbers are lost, which is no harm: brokers want them to grow, not to be without
            # gaps.
            batch.first_sequence = batch.sequence_id = UNNUMBERED
            raise MessageTooLarge(f"a batch of {size} bytes; the broker takes {limit}")
        self._waiting.append(PendingSend(entry, [batch], may_be_stored=False))

    def _continues(self, message: Pending) -> bool:
        """Whether a message may join the open batches, as its number goes (see invariant 1)."""
        # Numbers that are given here grow by themselves; the application's may be anything.
        last = self._last_added
        if last is None or not (
            last.is_numbered_by_application or message.is_numbered_by_application
        ):
            return True
        return (
            last.is_numbered_by_application
            and message.is_numbered_by_application
            and last.sequence_id < message.sequence_id
            and self._batches.bucket_of(last) == self._batches.bucket_of(message)
        )

    def _take_batches(self) -> list[list[Pending]]:
        """The open batches without what was given up meanwhile."""
        taken = [
            [each for each in messages if isinstance(each, Pending) and not each.is_settled]
            for messages in self._batches.take()
        ]
        return [messages for messages in taken if messages]

    def _number(self, message: Pending) -> None:
        if message.sequence_id == UNNUMBERED:
            message.sequence_id = self._next_sequence(1)

    def _add_single(self, message: Pending) -> None:
        # One that moved here from another segment has its number, and keeps it (invariant 3).
        is_new = message.sequence_id == UNNUMBERED
        self._number(message)
        entry = _entry_of(message, self._stamp())
        size, limit = len(entry.headers_and_payload), self.entry_bytes_max
        # Before the first connection the limit is not known: then the broker decides.
        if not limit or size <= limit:
            self._waiting.append(PendingSend(entry, [message], message.may_be_stored))
        elif self._settings.chunking:
            self._add_chunks(message, limit)
        else:
            if is_new:
                message.sequence_id = UNNUMBERED
            raise MessageTooLarge(f"a message of {size} bytes; the broker takes {limit}")

    def _add_chunks(self, message: Pending, limit: int) -> None:
        stamp = self._stamp()
        room = limit - metadata_for(message, stamp).ByteSize() - _CHUNK_HEADROOM_BYTES
        room -= self._overhead
        if room < 1:
            raise MessageTooLarge("the properties of a message leave no room for its payload")
        # Other clients put chunks together by it: it must differ from any that was used before.
        uuid = f"{self._producer_name}-{message.sequence_id}-{large_number(self._chance):x}"
        entries = list(chunk_entries(message, stamp, uuid=uuid, chunk_bytes=room))
        self._waiting.extend(
            PendingSend(
                entry,
                [message],
                message.may_be_stored,
                is_chunk=len(entries) > 1,
                is_whole=entry is entries[-1],
            )
            for entry in entries
        )

    def _stamp(self) -> Stamp:
        compression = self._settings.compression
        return Stamp(self._producer_name, self._clock.now_ms(), compression, self._cipher)

    @property
    def _overhead(self) -> int:
        return 0 if self._cipher is None else self._cipher.overhead

    # --- out

    def send_some(self, bytes_max: int) -> list[PendingSend]:
        """The next entries, which are in flight from now on: a little more than so many bytes."""
        sent: list[PendingSend] = []
        size = 0
        while self._waiting and size < bytes_max:
            outbound = self._waiting.popleft()
            # Invariant 4: given up while it waited. Those that leave may be stored from now on,
            # whatever becomes of the connection.
            if not outbound.is_dead:
                outbound.may_be_stored = True
                self._in_flight.append(outbound)
                sent.append(outbound)
                size += len(outbound.entry.headers_and_payload)
        return sent

    def answered(self, sequence_id: int) -> PendingSend | None:
        """What an answer is for, in flight no more; None: for something older.

        Raises `RemoteProtocolError` if earlier ones have no answer yet.
        """
        in_flight = self._in_flight
        # Brokers answer in order. One for something older is that of an entry which was given up or
        # sent again; one for something later would mean that an answer was lost.
        if in_flight and in_flight[0].entry.sequence_id == sequence_id:
            return in_flight.popleft()
        if any(each.entry.sequence_id == sequence_id for each in in_flight):
            raise RemoteProtocolError(f"message {sequence_id} was answered before earlier ones")
        return None

    def refused(self, sequence_id: int) -> None:
        """The broker takes no more, this one included; it stays in flight until `requeue`."""
        for each in self._in_flight:
            each.is_refused |= each.entry.sequence_id == sequence_id

    def requeue(self, *, in_doubt: bool) -> None:
        """What is in flight is to be sent again, before everything else.

        `in_doubt`: the broker may have stored it without a word reaching us.
        """
        if in_doubt:
            for each in self._in_flight:
                each.is_in_doubt = True
        # Before what waits, in the old order (invariant 2).
        for each in self._in_flight:
            each.is_refused = False
        self._in_flight.extend(self._waiting)
        self._waiting = deque(each for each in self._in_flight if not each.is_dead)
        self._in_flight = deque()

    def unsent(self, txn_id: TxnId) -> list[Pending]:
        """The messages of a transaction that were never written, chunked ones left out."""
        self.close_batches()
        return [
            message
            for outbound in self._waiting
            if outbound.entry.txn == txn_id and not outbound.may_be_stored and not outbound.is_chunk
            for message in outbound.messages
        ]

    def left(self) -> list[Pending]:
        """Take out all messages, in order, to go elsewhere."""
        found: list[Pending] = []
        for outbound in (*self._in_flight, *self._waiting):
            # A chunked message is taken once, with its last chunk; it is cut anew where it goes.
            for message in _open_ones(outbound) if outbound.is_whole else ():
                message.may_be_stored = outbound.may_be_stored
                message.is_in_doubt |= outbound.is_in_doubt
                # Never written: elsewhere it gets a number in the order of that segment (invariant
                # 1).
                if not outbound.may_be_stored and not message.is_numbered_by_application:
                    message.sequence_id = UNNUMBERED
                found.append(message)
        for messages in self._take_batches():
            found += messages
        self._in_flight.clear()
        self._waiting.clear()
        return [each for each in found if not each.is_settled]


def _open_ones(outbound: PendingSend) -> list[Pending]:
    """The messages of an entry that are not settled, each on its own."""
    return [each for one in outbound.messages if not one.is_settled for each in one.messages()]


def _entry_of(message: Pending, stamp: Stamp) -> OutgoingEntry:
    """An entry of one message; with its place if it may be stored, and its key does not tell."""
    if not message.may_be_stored or isinstance(message.key, str):
        return single_entry(message, stamp)
    metadata = metadata_for(message, stamp)
    metadata.ring_position = message.place
    payload = packed(message.payload, metadata, stamp.compression)
    data = sealed_entry(metadata, payload, stamp.cipher)
    return OutgoingEntry(message.sequence_id, None, 1, message.txn, data)


def large_number(chance: Random) -> int:
    """A number that two producers hardly ever both get."""
    return int(chance.random() * 2**53)


def size_of(payload: bytes, key: str | bytes | None, properties: Mapping[str, str]) -> int:
    """About what a message takes in a batch and in memory."""
    size = len(payload) + (0 if key is None else len(key))
    for name, text in properties.items():
        size += len(name) + len(text)
    return size
