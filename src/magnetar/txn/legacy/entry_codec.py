"""The form of the entries of a log (pure): one byte for the version, then MessagePack.

Owns: `EntryCodec`. A form that this version does not know is refused, never guessed.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import msgspec

from magnetar.errors import CorruptData, FormatTooNew

VERSION: Final = 1

Kinds = TypeVar("Kinds", bound=msgspec.Struct)

_ENCODER: Final = msgspec.msgpack.Encoder()


class EntryCodec(Generic[Kinds]):
    """The codec of one sort of log, whose name its errors tell."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Kinds], log: str) -> None:
        self._decoder = decoder
        self._log = log

    def encode(self, entry: Kinds) -> bytes:
        return bytes((VERSION,)) + _ENCODER.encode(entry)

    def decode(self, payload: bytes | memoryview) -> Kinds:
        """The entry that `encode` made these bytes of."""
        if not payload:
            raise CorruptData(f"an entry of {self._log} is empty")
        # A newer release wrote it, before a downgrade: guessing could lose a decision.
        if payload[0] != VERSION:
            raise FormatTooNew(f"an entry of {self._log} has version {payload[0]}")
        try:
            return self._decoder.decode(payload[1:])
        except msgspec.MsgspecError as error:
            raise CorruptData(f"an entry of {self._log}: {error}") from error
