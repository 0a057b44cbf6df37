"""Pure: what a message says of its encryption.

Owns: `EncryptionContext` and `context_of`: all that is needed to decrypt a payload that was handed
out as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from magnetar.wire.pb import pulsar_pb2 as pb


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """The data key of a message, as only the owner of one private key can read it."""

    name: str
    value: bytes
    metadata: Mapping[str, str]
    """What the reader of the public key added."""


@dataclass(frozen=True, slots=True)
class EncryptionContext:
    """The encryption of one entry: a message, a batch, or a chunk."""

    keys: tuple[WrappedKey, ...]
    """The data key, wrapped for each of its readers."""
    param: bytes
    """The nonce."""
    algorithm: str
    """As its producer named it; clients leave it empty."""
    compression: int
    """How the payload was compressed before it was encrypted, by the number in the protocol."""
    uncompressed_size: int
    """The bytes of the payload before it was compressed."""
    batch_size: int | None
    """Messages of a batch; None: it is none."""
    uuid: str
    """Of a message in chunks; empty: it is whole."""
    chunk_id: int
    """Which of them it is, from 0."""
    num_chunks: int
    """How many there are."""
    is_encrypted: bool
    """Whether `data` still is; if so it is compressed as well, if the message was."""


def context_of(metadata: pb.MessageMetadata, *, is_encrypted: bool) -> EncryptionContext:
    """The encryption of an entry with this metadata."""
    is_batch = metadata.HasField("num_messages_in_batch")
    return EncryptionContext(
        keys=tuple(
            WrappedKey(each.key, each.value, {pair.key: pair.value for pair in each.metadata})
            for each in metadata.encryption_keys
        ),
        param=metadata.encryption_param,
        algorithm=metadata.encryption_algo,
        compression=metadata.compression,
        uncompressed_size=metadata.uncompressed_size,
        batch_size=metadata.num_messages_in_batch if is_batch else None,
        uuid=metadata.uuid,
        chunk_id=metadata.chunk_id,
        num_chunks=metadata.num_chunks_from_msg,
        is_encrypted=is_encrypted,
    )
