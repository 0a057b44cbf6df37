"""The intake of one segment: what a broker delivers becomes messages in the receive queue.

Owns: `EntryIntake`: batches, chunks, what is acknowledged already, and what cannot be read.

Invariants:
1. Of an entry, exactly the messages that its segment admits get into the receive queue, in their
   order.
2. Permits for what does not get there are given back at once.
3. What cannot be read gets there all the same, as one message whose value raises: nothing is lost
   without the application knowing. So does the last chunk of a message whose others did not come
   and will not; without its last chunk a message was never sent.
4. While the queue has its fill of bytes, entries that may unfold stay packed, and all behind them
   wait in their order: what is fetched ahead takes no more memory than that, and one entry.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from magnetar.client.consume.segment.ack_state import WHOLE, all_of, bit_of
from magnetar.client.consume.segment.receive_queue import ReceiveQueue
from magnetar.client.encryption.decryptor import DecryptionFailure, Decryptor
from magnetar.client.message.batch import (
    OpenedEntry,
    messages_in,
    plain_layout,
    read_entry,
    unfolded,
    unpacked,
)
from magnetar.client.message.batch_columns import columns_in
from magnetar.client.message.chunks import ChunkAssembler
from magnetar.client.message.entry_rows import EntryRows
from magnetar.client.message.message import (
    Message,
    MessageId,
    MessageSource,
    StillSealed,
    Undecrypted,
    Unreadable,
)
from magnetar.errors import UnreadableMessage
from magnetar.model.batch_indexes import unacked_of
from magnetar.model.ids import Position
from magnetar.runtime.logs import logger
from magnetar.wire.messages import Delivered
from magnetar.wire.pb import pulsar_pb2 as pb

_LOG: Final = logger(__name__)
# Of 64 messages each: what a broker says of more than that is not believed.
_ACK_SET_WORDS: Final = 1024
_ROWS_FROM: Final = 8
"""Smaller batches are taken apart faster message by message."""


class Admission(MessageSource, Protocol):
    """The segment's consumer, which decides what is let in."""

    @property
    def generation(self) -> int: ...

    def admit(self, position: Position, size: int, unacked: int) -> int:
        """The set of messages of an entry that are to be handed out."""
        ...

    def discard(self, position: Position, index: int, size: int) -> None:
        """Acknowledge something that is not for the application."""
        ...

    def give_up_chunks(self, ids: Sequence[MessageId]) -> bool:
        """Give up chunks that cannot become a message here; whether they will come again."""
        ...

    @property
    def takes_rows(self) -> bool:
        """Whether batches may be delivered as they are."""
        ...

    def deliver(self, message: Message[Any] | EntryRows) -> None:
        """What was let in."""
        ...

    def give_permits(self, count: int) -> None: ...


class EntryIntake:
    """Takes the entries of one segment apart."""

    def __init__(
        self,
        segment: Admission,
        receive_queue: ReceiveQueue[Any],
        decryptor: Decryptor,
        *,
        on_decryption_failure: DecryptionFailure,
        chunked_messages_max: int,
        chunk_timeout: float,
    ) -> None:
        self._segment = segment
        self._receive_queue = receive_queue
        self._decryptor = decryptor
        self._on_decryption_failure = on_decryption_failure
        self._decode: Callable[[bytes, bytes], Any] = receive_queue.schemas.decode
        self._loop = asyncio.get_running_loop()
        self._held: deque[Delivered | Callable[[], None]] = deque()
        """What came while the queue had no room, in order (invariant 4)."""
        self._chunks = ChunkAssembler(
            messages_max=chunked_messages_max, expire_s=chunk_timeout or float("inf")
        )

    @property
    def next_expiry(self) -> float | None:
        """When `expire` has something to do."""
        due = self._chunks.next_expiry
        return None if due is None or due == float("inf") else due

    def expire(self, now: float) -> None:
        """Give up messages whose next chunk does not come."""
        given_up = self._chunks.expired(now)
        if given_up:
            self._segment.give_up_chunks(given_up)

    def reconnected(self) -> None:
        self._chunks.clear()
        self.drop_held()

    def drop_held(self) -> None:
        """Forget what waits packed: the broker delivers it again."""
        self._held.clear()

    def take(self, delivered: Delivered) -> None:
        """Take an entry in, or keep it packed while the queue has no room for what is in it."""
        queue = self._receive_queue
        # A plain entry takes the same memory either way. Behind one that waits, all wait.
        if self._held or (
            queue.bytes >= queue.bytes_max and plain_layout(delivered.headers_and_payload) is None
        ):
            self._held.append(delivered)
            queue.when_room(self._go_on)
        else:
            self._open(delivered)

    def in_order(self, work: Callable[[], None]) -> None:
        """Do something once everything that was taken before is in the queue."""
        if self._held:
            self._held.append(work)
        else:
            work()

    def _go_on(self) -> None:
        queue = self._receive_queue
        while self._held and queue.bytes < queue.bytes_max:
            first = self._held.popleft()
            if isinstance(first, Delivered):
                self._open(first)
            else:
                first()
        if self._held:
            queue.when_room(self._go_on)

    def _open(self, delivered: Delivered) -> None:
        data = delivered.headers_and_payload
        try:
            if not delivered.checksum_ok:
                raise UnreadableMessage(f"the checksum of {delivered.position} does not hold")
            # Most entries are one message without anything rare: their metadata stays bytes until
            # somebody asks for it.
            plain = plain_layout(data)
            if plain is not None:
                start, stop = plain
                self._take_single(delivered, data[start:stop], data[stop:], self._decode)
                return
            metadata, payload = read_entry(data)
            if metadata.encryption_keys:
                try:
                    payload = self._decryptor.decrypt(metadata, payload)
                except UnreadableMessage as error:
                    self._take_sealed(delivered, metadata, payload, error)
                    return
            opened = unfolded(metadata, payload)
            # One chunk of a large message, a batch, or a single message that had to be looked at.
            if opened.metadata.num_chunks_from_msg > 1:
                self._take_chunk(delivered, opened)
            elif opened.is_batch:
                self._take_batch(delivered, opened)
            else:
                self._take_single(delivered, opened.metadata, opened.payload, self._decode)
        except UnreadableMessage as error:
            self._warn(delivered, error)
            # Invariant 3: a stand-in with the raw bytes, whose value raises.
            metadata = pb.MessageMetadata(producer_name="", sequence_id=0, publish_time=0)
            self._take_single(delivered, metadata, data, Unreadable(error))

    def _warn(self, delivered: Delivered, error: UnreadableMessage) -> None:
        _LOG.warning(
            "message-unreadable",
            topic=self._segment.wire_topic,
            position=str(delivered.position),
            reason=str(error),
        )

    def _take_sealed(
        self,
        delivered: Delivered,
        metadata: pb.MessageMetadata,
        sealed: bytes,
        error: UnreadableMessage,
    ) -> None:
        """Take an entry that cannot be decrypted, as one message however many are in it."""
        self._warn(delivered, error)
        # The broker counted what the metadata claims, which nobody can check here.
        counted = min(max(1, metadata.num_messages_in_batch), 64 * _ACK_SET_WORDS)
        if delivered.ack_set:
            counted = min(counted, unacked_of(delivered.ack_set, _ACK_SET_WORDS).bit_count() or 1)
        if self._on_decryption_failure is DecryptionFailure.DISCARD:
            self._segment.discard(delivered.position, WHOLE, 0)
            self._segment.give_permits(counted)
            return
        decode: Callable[[bytes, bytes], Any] = StillSealed(self._decode)
        if self._on_decryption_failure is DecryptionFailure.FAIL:
            decode = Undecrypted(error)
        self._take_single(delivered, metadata, sealed, decode)
        self._segment.give_permits(counted - 1)

    def _take_single(
        self,
        delivered: Delivered,
        metadata: pb.MessageMetadata | bytes,
        data: bytes,
        decode: Callable[[bytes, bytes], Any],
        chunk_ids: tuple[MessageId, ...] = (),
    ) -> None:
        segment, position = self._segment, delivered.position
        # The application has it, or has acknowledged it: this is a repetition.
        if not segment.admit(position, 1, 0):
            segment.give_permits(1)
            return
        message: Message[Any] = Message(
            segment,
            position,
            data,
            metadata,
            None,
            decode,
            delivered.partition,
            WHOLE,
            0,
            delivered.redelivery_count,
            segment.generation,
            chunk_ids,
        )
        segment.deliver(message)

    def _take_batch(self, delivered: Delivered, opened: OpenedEntry) -> None:
        segment = self._segment
        # As rows there is no object for each message before it is asked for. Whoever looks at each
        # message (dead letters, shared streams) does not take them.
        is_large = opened.num_messages >= _ROWS_FROM or self._receive_queue.takes_rows
        if is_large and segment.takes_rows and self._take_rows(delivered, opened):
            return
        singles = messages_in(opened)
        size = len(singles)
        position = delivered.position
        unacked = unacked_of(delivered.ack_set, _ACK_SET_WORDS) if delivered.ack_set else 0
        mask = segment.admit(position, size, unacked)
        added = 0
        for index, (single, payload) in enumerate(singles):
            if not mask & bit_of(index):
                continue
            # Compaction left its place in the batch and took the message: nobody is to see it.
            if single.compacted_out:
                segment.discard(position, index, size)
                continue
            added += 1
            message: Message[Any] = Message(
                segment,
                position,
                payload,
                opened.metadata,
                single,
                self._decode,
                delivered.partition,
                index,
                size,
                delivered.redelivery_count,
                segment.generation,
            )
            segment.deliver(message)
        self._return_permits(size, unacked, added)

    def _take_rows(self, delivered: Delivered, opened: OpenedEntry) -> bool:
        """Take a batch as it is; False: some of it is not for the application."""
        segment, columns = self._segment, columns_in(opened)
        if columns.compacted_out:
            return False
        size = len(columns)
        position = delivered.position
        unacked = unacked_of(delivered.ack_set, _ACK_SET_WORDS) if delivered.ack_set else 0
        mask = segment.admit(position, size, unacked)
        indexes: Sequence[int] = range(size)
        if mask != all_of(size):
            # Only some are let in: the others were acknowledged, or the application has them.
            indexes = [index for index in indexes if mask >> index & 1]
        if indexes:
            rows = EntryRows(
                segment,
                position,
                delivered.partition,
                opened,
                columns,
                indexes,
                delivered.redelivery_count,
                segment.generation,
            )
            segment.deliver(rows)
        self._return_permits(size, unacked, len(indexes))
        return True

    def _return_permits(self, size: int, unacked: int, added: int) -> None:
        """Give back the permits of messages that the broker counted and nobody gets."""
        counted = (all_of(size) & (unacked or ~0)).bit_count()
        if added < counted:
            self._segment.give_permits(counted - added)

    def _take_chunk(self, delivered: Delivered, opened: OpenedEntry) -> None:
        segment, metadata = self._segment, opened.metadata
        message_id = MessageId(*delivered.position, delivered.partition)
        taken = self._chunks.add(metadata, opened.payload, message_id, self._loop.time())
        # Chunks of a message that was sent twice: the broker must not deliver them again.
        for each in taken.repeated:
            segment.discard(each.position, WHOLE, 0)
        comes_again = not taken.given_up or segment.give_up_chunks(taken.given_up)
        decode = self._decode
        payload = taken.payload
        if payload is None:
            total = metadata.num_chunks_from_msg
            # Only the last chunk proves that the message was sent at all (invariant 3); the others
            # are passed over, or come again where the segment can ask for them.
            is_last = message_id in taken.given_up and metadata.chunk_id == total - 1
            if comes_again or not is_last:
                segment.give_permits(1)
                return
            lost = UnreadableMessage(f"not all of the {total} chunks of {metadata.uuid} came")
            self._take_single(delivered, metadata, opened.payload, Unreadable(lost))
            return
        try:
            if metadata.compression:
                payload = unpacked(payload, metadata)
        except UnreadableMessage as error:
            decode = Unreadable(error)
        self._take_single(delivered, metadata, payload, decode, taken.ids)
