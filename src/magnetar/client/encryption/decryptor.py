"""The decryption of what one consumer receives.

Owns: `Decryptor`, which knows the data keys of lately received messages, and `DecryptionFailure`.

Invariants:
1. What it gives was sealed with a data key that one of the consumer's private keys has opened;
   anything else raises `UnreadableMessage`.
2. Of one message at most `UNWRAPS_MAX` wrapped keys are computed with and `NAMES_MAX` asked for,
   whatever it claims; at most `DATA_KEYS_MAX` data keys are kept.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

from magnetar.client.encryption.cipher import Ciphers
from magnetar.client.encryption.keys import NAMES_MAX, KeyReader
from magnetar.errors import UnreadableMessage
from magnetar.wire.pb import pulsar_pb2 as pb

DATA_KEYS_MAX: Final = 256
UNWRAPS_MAX: Final = 8
_REASONS_MAX: Final = 4
"""Why keys do not fit, in the text of an error."""


class DecryptionFailure(Enum):
    """The fate of a message that cannot be decrypted."""

    FAIL = "fail"
    """It is handed out; its `value` raises `UnreadableMessage`, and it can be given back."""
    DISCARD = "discard"
    """It is acknowledged, and handed out to nobody."""
    CONSUME = "consume"
    """It is handed out as it is; `encryption` says what is needed to decrypt it."""


class Decryptor:
    """Decrypts with the private keys of an application."""

    def __init__(self, reader: KeyReader | None) -> None:
        """No reader: nothing encrypted can be read."""
        self._reader = reader
        self._ciphers = None if reader is None else Ciphers()
        self._known: dict[tuple[str, bytes], Any] = {}
        """Data keys by what they were wrapped as; the least lately used ones first."""

    def decrypt(self, metadata: pb.MessageMetadata, sealed: bytes) -> bytes:
        """The payload as it was before it was encrypted."""
        reader, ciphers = self._reader, self._ciphers
        if reader is None or ciphers is None:
            raise UnreadableMessage("a message is encrypted", hint="give its consumer a key_reader")
        # Clients in C++ name each key again with every chunk.
        named = {(each.key, each.value): each for each in metadata.encryption_keys}
        nonce = metadata.encryption_param
        for known in [each for each in named if each in self._known]:
            data_cipher = self._known[known] = self._known.pop(known)
            payload = ciphers.open(data_cipher, nonce, sealed)
            if payload is not None:
                return payload
            del named[known]
        reasons: list[str] = []
        unwraps = 0
        for wrapped in list(named)[:NAMES_MAX]:
            name = wrapped[0]
            try:
                said = {each.key: each.value for each in named[wrapped].metadata}
                key = reader.private_key(name, said)
            # The application's reader raises whatever it likes.
            except Exception as error:  # noqa: BLE001  told to whoever asks for the value
                reasons.append(f"{name!r} cannot be read: {error!r}")
                continue
            # Costs a computation each, which whoever sent it may have asked for in vain.
            unwraps += 1
            if unwraps > UNWRAPS_MAX:
                break
            try:
                data_cipher = ciphers.data_cipher(ciphers.unwrap(wrapped[1], key.pem))
            except UnreadableMessage as error:
                reasons.append(f"{name!r}: {error.args[0]}")
                continue
            payload = ciphers.open(data_cipher, nonce, sealed)
            if payload is not None:
                self._keep(wrapped, data_cipher)
                return payload
            reasons.append(f"{name!r}: the payload was not sealed with its data key")
        why = "; ".join(reasons[:_REASONS_MAX]) or "it was not sealed with the data key it names"
        raise UnreadableMessage(f"a message cannot be decrypted: {why}")

    def _keep(self, wrapped: tuple[str, bytes], data_cipher: Any) -> None:
        if len(self._known) >= DATA_KEYS_MAX:
            del self._known[next(iter(self._known))]
        self._known[wrapped] = data_cipher
