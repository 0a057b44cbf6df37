"""Pure: messages larger than an entry, cut into chunks and put together again.

Owns: `chunk_entries`, `ChunkAssembler` for one segment (or partition), and `assembled` for chunks
that somebody else has sorted.

A message is compressed as a whole, then cut; each chunk is encrypted on its own. Its chunks have
one uuid and one sequence id, and are entries that follow each other within their producer; chunks
of other producers may stand between them.

Invariants:
1. What is put together is what was cut: chunks 0, 1, 2, ... of one uuid, each once, of the size
   that all of them announce. A repeated chunk is ignored; one that comes out of turn ends its
   message, because what is missing will not come on this connection.
2. At most `messages_max` incomplete messages of at most `bytes_max` together are kept; the oldest
   is given up for a new one. Nothing waits longer than `expire_s` for its next chunk.
3. Every chunk that went in comes out exactly once: in a message, as a repetition, or given up.
4. A chunk that its producer sends again behind the whole message is a repetition, for the last
   `COMPLETED_MAX` messages; one that the broker delivers again is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from magnetar.client.message.batch import (
    OpenedEntry,
    Outgoing,
    OutgoingEntry,
    Stamp,
    metadata_for,
    packed,
    sealed_entry,
    unpacked,
)
from magnetar.errors import InvalidValue, UnreadableMessage
from magnetar.model.ids import MessageId
from magnetar.wire.pb import pulsar_pb2 as pb

# As in the Java client (maxPendingChunkedMessage, expireTimeOfIncompleteChunkedMessage); the limit
# of bytes is ours, since ten messages may be of any size.
PENDING_MESSAGES_MAX: Final = 10
PENDING_BYTES_MAX: Final = 64 * 1024 * 1024
EXPIRE_S: Final = 60.0
COMPLETED_MAX: Final = 100


def chunk_entries(
    message: Outgoing, stamp: Stamp, *, uuid: str, chunk_bytes: int
) -> Iterator[OutgoingEntry]:
    """The entries of a large message, in order; one, which is no chunk, if it fits once it is
    compressed. `uuid` is one that no other message has.
    """
    if chunk_bytes < 1:
        raise InvalidValue(f"chunks of {chunk_bytes} bytes")
    metadata = metadata_for(message, stamp)
    payload = packed(message.payload, metadata, stamp.compression)
    # Compression may have made it small enough after all.
    if len(payload) <= chunk_bytes:
        yield OutgoingEntry(
            message.sequence_id, None, 1, message.txn, sealed_entry(metadata, payload, stamp.cipher)
        )
        return
    # All chunks have the same metadata but for `chunk_id`: every one says how many there are.
    metadata.uuid = uuid
    metadata.num_chunks_from_msg = -(-len(payload) // chunk_bytes)
    metadata.total_chunk_msg_size = len(payload)
    for chunk_id in range(metadata.num_chunks_from_msg):
        metadata.chunk_id = chunk_id
        chunk = payload[chunk_id * chunk_bytes : (chunk_id + 1) * chunk_bytes]
        yield OutgoingEntry(
            message.sequence_id, None, 1, message.txn, sealed_entry(metadata, chunk, stamp.cipher)
        )


def assembled(chunks: list[OpenedEntry], chunk: OpenedEntry) -> bytes | None:
    """The payload of a message, once this is its last chunk; they come in a row."""
    metadata = chunk.metadata
    chunks.append(chunk)
    if metadata.chunk_id < metadata.num_chunks_from_msg - 1:
        return None
    # The chunks of a message that lost its end are among them: the uuid tells them apart.
    parts = [each for each in chunks if each.metadata.uuid == metadata.uuid]
    chunks.clear()
    payload = b"".join(each.payload for each in parts)
    if len(parts) != metadata.num_chunks_from_msg or len(payload) != metadata.total_chunk_msg_size:
        raise UnreadableMessage(f"{len(parts)} of {metadata.num_chunks_from_msg} chunks are there")
    return unpacked(payload, metadata) if metadata.compression else payload


class Taken(NamedTuple):
    """The fate of a chunk, and of others because of it."""

    payload: bytes | None = None
    """Of the whole message, if it was the last chunk; still compressed."""
    ids: tuple[MessageId, ...] = ()
    """Of all chunks of that message."""
    repeated: tuple[MessageId, ...] = ()
    """Chunks whose message has them already: to be acknowledged with nothing else."""
    given_up: tuple[MessageId, ...] = ()
    """Chunks whose message cannot be completed: to be delivered again."""


class _Incomplete:
    __slots__ = ("chunks", "expires_at", "ids", "room", "total")

    def __init__(self, metadata: pb.MessageMetadata) -> None:
        self.total = metadata.num_chunks_from_msg
        self.room = metadata.total_chunk_msg_size
        self.chunks: list[bytes] = []
        self.ids: list[MessageId] = []
        self.expires_at = 0.0


class ChunkAssembler:
    """The incomplete messages of one consumer of one segment."""

    def __init__(
        self,
        *,
        messages_max: int = PENDING_MESSAGES_MAX,
        bytes_max: int = PENDING_BYTES_MAX,
        expire_s: float = EXPIRE_S,
    ) -> None:
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._expire_s = expire_s
        self._incomplete: dict[str, _Incomplete] = {}
        """Oldest first."""
        self._completed: dict[str, tuple[MessageId, ...]] = {}
        """The chunks of the messages that were put together last, oldest first."""
        self._bytes = 0

    def add(
        self, metadata: pb.MessageMetadata, payload: bytes, message_id: MessageId, now: float
    ) -> Taken:
        """Take one chunk."""
        # Three kinds of repetition (invariants 1 and 4): the broker delivered a chunk again that is
        # here; the producer sent one again that its message has; or it did so behind the whole
        # message.
        known = self._incomplete.get(metadata.uuid)
        if known is not None and message_id in known.ids:
            return Taken()  # delivered again: it is here
        if known is not None and metadata.chunk_id < len(known.chunks):
            return Taken(repeated=(message_id,))  # sent again by its producer
        if known is None and message_id not in self._completed.get(metadata.uuid, (message_id,)):
            return Taken(repeated=(message_id,))
        given_up: list[MessageId] = []
        # A message begins: a chunk 0 whose uuid is here already was answered above.
        if metadata.chunk_id == 0:
            known = _Incomplete(metadata)
            if self._is_absurd(metadata):
                return Taken(given_up=(message_id,))
            given_up += self._make_room(metadata.total_chunk_msg_size)
            self._incomplete[metadata.uuid] = known
        # A gap: what is missing was delivered to somebody else, or given up here.
        elif known is None or metadata.chunk_id != len(known.chunks):
            return Taken(given_up=(*self._give_up(metadata.uuid), message_id))
        # More than was announced: memory is bounded by what is announced, so it ends here.
        if len(payload) > known.room:
            return Taken(given_up=(*given_up, *self._give_up(metadata.uuid), message_id))
        known.room -= len(payload)
        known.chunks.append(payload)
        known.ids.append(message_id)
        known.expires_at = now + self._expire_s
        self._bytes += len(payload)
        if len(known.chunks) < known.total:
            return Taken(given_up=tuple(given_up))
        # The last chunk: out of the incomplete ones, whether it fits or not.
        ids = self._give_up(metadata.uuid)
        if known.room:
            return Taken(given_up=(*given_up, *ids))
        self._completed[metadata.uuid] = ids
        if len(self._completed) > COMPLETED_MAX:
            del self._completed[next(iter(self._completed))]
        return Taken(b"".join(known.chunks), ids, given_up=tuple(given_up))

    @property
    def next_expiry(self) -> float | None:
        """When `expired` has something to give; None: nothing waits."""
        return min((each.expires_at for each in self._incomplete.values()), default=None)

    def expired(self, now: float) -> tuple[MessageId, ...]:
        """Give up what waited too long for its next chunk."""
        late = [uuid for uuid, each in self._incomplete.items() if each.expires_at <= now]
        return tuple(each for uuid in late for each in self._give_up(uuid))

    def clear(self) -> None:
        """Forget everything: the connection is new, and delivers it again."""
        self._incomplete.clear()
        self._bytes = 0

    def _is_absurd(self, metadata: pb.MessageMetadata) -> bool:
        # Sizes and counts come from the wire: one chunk is no chunked message, an empty chunk none.
        total = metadata.total_chunk_msg_size
        return not 1 < metadata.num_chunks_from_msg <= total <= self._bytes_max

    def _make_room(self, size: int) -> list[MessageId]:
        """Give up the oldest messages until one of this size fits."""
        ids: list[MessageId] = []
        while self._incomplete and (
            len(self._incomplete) >= self._messages_max or self._bytes + size > self._bytes_max
        ):
            ids += self._give_up(next(iter(self._incomplete)))
        return ids

    def _give_up(self, uuid: str) -> tuple[MessageId, ...]:
        gone = self._incomplete.pop(uuid, None)
        if gone is None:
            return ()
        self._bytes -= sum(map(len, gone.chunks))
        return tuple(gone.ids)
