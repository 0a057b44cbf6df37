"""Pure: a message as the application gets it.

Owns: `Message`. The ids are those of the model: `MessageId` on regular topics,
`ScalableMessageId` on scalable ones, and `Checkpoint`; their bytes are those of other clients.

Invariants:
1. The value is decoded when it is asked for, once. What cannot be decoded raises then, and only
   then: such a message can still be acknowledged.
2. Nothing of a message changes; its id, metadata and properties are not made until they are asked
   for. Metadata that is given as bytes has been looked through: protobuf can read it.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Callable
from typing import Any, Final, Generic, NoReturn, Protocol, TypeAlias, TypeVar

from magnetar.client.message.encryption_context import EncryptionContext, context_of
from magnetar.errors import UnreadableMessage
from magnetar.model.ids import Checkpoint, MessageId, Position, ScalableMessageId
from magnetar.wire.messages import TxnId
from magnetar.wire.pb import pulsar_pb2 as pb

__all__ = [
    "AnyMessageId",
    "Checkpoint",
    "Message",
    "MessageId",
    "MessageSource",
    "ScalableMessageId",
    "Unreadable",
]

T_co = TypeVar("T_co", covariant=True)

AnyMessageId: TypeAlias = MessageId | ScalableMessageId

_UNDECODED: Final = object()
_SEGMENT_SUFFIX: Final = "-seg-"
_DELIVER_AT_TAG: Final = b"\x98\x01"
"""The bytes with which field 19 (deliver_at_time, a number) begins in MessageMetadata."""


class MessageSource(Protocol):
    """The source of messages: one segment, as one consumer has it."""

    @property
    def topic(self) -> str:
        """The topic as the application knows it: not that of a segment."""
        ...

    @property
    def wire_topic(self) -> str:
        """The topic as the broker knows it."""
        ...

    def id_of(self, message_id: MessageId, turn: int) -> AnyMessageId:
        """The id of a message for the application."""
        ...

    @property
    def segment_id(self) -> int | None:
        """None: a regular topic."""
        ...

    def handing_out(self, message: Message[Any]) -> None:
        """The application has it from now on."""
        ...

    def handing_out_rows(self, rows: Any, turn: int) -> None:
        """The application has these from now on; the last one with this turn."""
        ...


class Unreadable:
    """Decodes nothing: the payload of its message is broken."""

    def __init__(self, error: UnreadableMessage) -> None:
        # Its words alone: the error has a traceback, whose frames hold whatever was being unfolded.
        self._text = str(error.args[0])
        self._hint = error.hint

    @property
    def error(self) -> UnreadableMessage:
        """A new one each time, which nobody has raised yet."""
        return UnreadableMessage(self._text, hint=self._hint)

    def __call__(self, _data: bytes, _version: bytes) -> NoReturn:
        raise self.error


class Undecrypted(Unreadable):
    """Decodes nothing: its message could not be decrypted."""


class StillSealed:
    """Decodes the payload of a message that is handed out as it is: encrypted."""

    def __init__(self, decode: Callable[[bytes, bytes], Any]) -> None:
        self._decode = decode

    def __call__(self, data: bytes, version: bytes) -> Any:
        return self._decode(data, version)


_SEALED: Final = (Undecrypted, StillSealed)


def given_name(producer_name: str) -> str:
    """The name of a producer without the number of a segment, as it was given."""
    given, separator, segment = producer_name.rpartition(_SEGMENT_SUFFIX)
    return given if separator and segment.isdigit() else producer_name


class Message(Generic[T_co]):
    """A received message: `value`, and what its producer and the broker said about it.

    `data` is the payload, decompressed, before the schema has read it; `redelivery_count` says how
    often the message was delivered before, as far as the broker counts that.
    """

    # One object for each message that is received: no dictionary. Names with an underscore are for
    # the client: `consume`, `arrow` and `interceptors` are friends.
    __slots__ = (
        "_batch_index",
        "_batch_size",
        "_chunk_ids",
        "_decode",
        "_generation",
        "_metadata",
        "_partition",
        "_position",
        "_single",
        "_source",
        "_turn",
        "_value",
        "data",
        "redelivery_count",
    )

    def __init__(
        self,
        source: MessageSource,
        position: Position,
        data: bytes,
        metadata: pb.MessageMetadata | bytes,
        single: pb.SingleMessageMetadata | bytes | None,
        decode: Callable[[bytes, bytes], T_co],
        partition: int = -1,
        batch_index: int = -1,
        batch_size: int = 0,
        redelivery_count: int = 0,
        generation: int = 0,
        chunk_ids: tuple[MessageId, ...] = (),
    ) -> None:
        self.data = data
        """The payload, decompressed."""
        self.redelivery_count = redelivery_count
        """How often it was delivered before, as far as the broker counts that."""
        # Where it is: what an acknowledgement names.
        self._source = source
        self._position = position
        """The entry that it is in, of its segment or partition."""
        self._partition = partition
        self._batch_index = batch_index
        """-1: it is an entry of its own."""
        self._batch_size = batch_size
        self._chunk_ids = chunk_ids
        """Of a message that came in chunks: where each of them is."""
        # Which delivery of it this is, for its consumer.
        self._turn = 0
        """Its number among all that its consumer handed out; 0: not yet."""
        self._generation = generation
        """How often its consumer began anew (a seek, an abort) before it was delivered."""
        self._metadata = metadata
        self._single = single
        self._decode = decode
        self._value: Any = _UNDECODED

    @property
    def _raw_id(self) -> MessageId:
        """The id within its segment or partition."""
        ledger, entry = self._position
        return MessageId(ledger, entry, self._partition, self._batch_index, self._batch_size)

    @property
    def _entry_metadata(self) -> pb.MessageMetadata:
        """The metadata of its entry, which a batch's messages share."""
        found = self._metadata
        if isinstance(found, bytes):
            found = self._metadata = pb.MessageMetadata.FromString(found)
        return found

    @property
    def _said(self) -> pb.SingleMessageMetadata | pb.MessageMetadata:
        """The metadata of this message alone: that of the entry, if it is not one of a batch."""
        found = self._single
        if found is None:
            return self._entry_metadata
        if isinstance(found, bytes):
            found = self._single = pb.SingleMessageMetadata.FromString(found)
        return found

    @property
    def value(self) -> T_co:
        """The payload as the consumer's schema reads it.

        Raises `UnreadableMessage` if the payload does not fit the schema; `data` still has it.
        """
        if self._value is _UNDECODED:
            self._value = self._decode(self.data, self.schema_version)
        value: T_co = self._value
        return value

    @property
    def trouble(self) -> UnreadableMessage | None:
        """Why not even its payload could be read; None: it could."""
        return self._decode.error if isinstance(self._decode, Unreadable) else None

    @property
    def id(self) -> AnyMessageId:
        """Names this message for good: `to_bytes` and `from_bytes` store and restore it."""
        return self._source.id_of(self._raw_id, self._turn)

    @property
    def topic(self) -> str:
        """The topic that it was sent to (of a partitioned topic, the partition)."""
        return self._source.topic

    @property
    def key(self) -> str | None:
        """The routing key, if it has one and that is text."""
        said = self._said
        if not said.HasField("partition_key") or said.partition_key_b64_encoded:
            return None
        return said.partition_key

    @property
    def key_bytes(self) -> bytes | None:
        """The routing key as bytes, if it has one."""
        said = self._said
        if not said.HasField("partition_key"):
            return None
        if not said.partition_key_b64_encoded:
            return said.partition_key.encode()
        try:
            return b64decode(said.partition_key, validate=True)
        except binascii.Error as error:
            raise UnreadableMessage(f"the key of {self._raw_id} is not base64: {error}") from error

    @property
    def ordering_key(self) -> bytes | None:
        """The key by which Key_Shared consumers are chosen, if its producer gave it another one."""
        said = self._said
        return said.ordering_key if said.HasField("ordering_key") else None

    @property
    def properties(self) -> dict[str, str]:
        """What its producer attached, as pairs of text; each call makes a new dictionary."""
        said = self._said
        return {each.key: each.value for each in said.properties}

    @property
    def is_null(self) -> bool:
        """Whether it has no value: a tombstone of its key in compacted topics."""
        said = self._said
        return said.null_value

    @property
    def publish_time_ms(self) -> int:
        """When it was sent, by its producer's clock, in milliseconds since 1970."""
        return self._entry_metadata.publish_time

    @property
    def deliver_at_ms(self) -> int | None:
        """When it may be handed out at the earliest, where messages are shared; None: at once."""
        raw = self._metadata
        if isinstance(raw, bytes) and _DELIVER_AT_TAG not in raw:
            return None  # asked of every message: most are not taken apart for it
        said = self._entry_metadata
        return said.deliver_at_time if said.HasField("deliver_at_time") else None

    @property
    def event_time_ms(self) -> int | None:
        """When it happened, as the application that sent it said."""
        said = self._said
        return said.event_time or None

    @property
    def sequence_id(self) -> int:
        """The number among those of its producer: the broker knows repetitions by it."""
        said = self._said
        return (
            said.sequence_id if said.HasField("sequence_id") else self._entry_metadata.sequence_id
        )

    @property
    def producer_name(self) -> str:
        """The name of its producer, as the application or the broker gave it."""
        return given_name(self._entry_metadata.producer_name)

    @property
    def schema_version(self) -> bytes:
        """The version of the schema that it was written with; empty: it has none."""
        found = self._metadata
        return b"" if isinstance(found, bytes) else found.schema_version

    @property
    def replicated_from(self) -> str | None:
        """The cluster that it comes from, if that is another one."""
        return self._entry_metadata.replicated_from or None

    @property
    def transaction(self) -> TxnId | None:
        """The transaction that it was sent in; that has been committed."""
        metadata = self._entry_metadata
        if not metadata.HasField("txnid_most_bits"):
            return None
        return TxnId(metadata.txnid_most_bits, metadata.txnid_least_bits)

    @property
    def encryption(self) -> EncryptionContext | None:
        """How it was encrypted, and whether `data` still is; None: it never was."""
        raw = self._metadata
        # Metadata that is still bytes has been looked through, and has no keys.
        if isinstance(raw, bytes) or not raw.encryption_keys:
            return None
        return context_of(raw, is_encrypted=isinstance(self._decode, _SEALED))

    @property
    def size(self) -> int:
        """The bytes of its payload."""
        return len(self.data)

    def __repr__(self) -> str:
        key = "" if self.key is None else f", key={self.key!r}"
        return f"<Message {self._raw_id} of {self.topic}{key}, {self.size} bytes>"
