"""The encryption of what one producer sends.

Owns: `Encryptor`, which holds the data key of a producer and renews it, and `EncryptionFailure`.

Invariants:
1. A payload leaves in plain only with `EncryptionFailure.SEND`, and while keys cannot be read.
2. A data key is used for `RENEW_S` and `SEALED_MAX` payloads at most, but for those that were
   handed in by then; each payload has a random nonce of its own.
3. Every name has the data key, or nobody has: a key that cannot be read is a failure of all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final

from magnetar.client.encryption.cipher import DATA_KEY_BYTES, NONCE_BYTES, TAG_BYTES, Ciphers
from magnetar.client.encryption.keys import KeyReader
from magnetar.errors import EncryptionFailed
from magnetar.runtime.logs import logger
from magnetar.wire.pb import pulsar_pb2 as pb

RENEW_S: Final = 4 * 3600.0
"""As Pulsar's clients do."""
SEALED_MAX: Final = 1 << 30
"""Payloads of one data key: with random nonces, AES-GCM bears four times as many."""
RETRY_S: Final = 1.0
"""Between two tries to read keys, while messages leave in plain."""
# Tags and lengths of the fields around a nonce and a wrapped key.
_FIELDS_BYTES: Final = 16

_LOG: Final = logger(__name__)


class EncryptionFailure(Enum):
    """The fate of messages while the keys of a producer cannot be read."""

    FAIL = "fail"
    """Opening the producer and sending raise `EncryptionFailed`."""
    SEND = "send"
    """They are sent as they are, in plain, and a warning is logged."""


class Encryptor:
    """Encrypts for the owners of the private keys of some names."""

    def __init__(
        self,
        names: Sequence[str],
        reader: KeyReader,
        on_failure: EncryptionFailure,
        now: Callable[[], float],
    ) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._reader = reader
        self._on_failure = on_failure
        self._now = now
        self._ciphers = Ciphers()
        self._data_cipher: Any = None
        """None: there was no key yet, or messages leave in plain."""
        self._wrapped: list[pb.EncryptionKeys] = []
        self._renew_at = 0.0
        self._sealed = 0

    @property
    def overhead(self) -> int:
        """The bytes that an entry grows by, at most."""
        keys = sum(each.ByteSize() + _FIELDS_BYTES for each in self._wrapped)
        return keys + NONCE_BYTES + TAG_BYTES + _FIELDS_BYTES

    def prepare(self) -> None:
        """Have a data key for what is handed in now; raises `EncryptionFailed`."""
        now = self._now()
        if now < self._renew_at and self._sealed < SEALED_MAX:
            return
        try:
            self._renew(now)
        except EncryptionFailed as error:
            if self._on_failure is EncryptionFailure.FAIL:
                raise
            # In plain from here on, as it was asked for; the keys are tried again soon.
            _LOG.warning("encryption-failed", reason=str(error), sent="in plain")
            self._data_cipher, self._renew_at, self._sealed = None, now + RETRY_S, 0

    def encrypt(self, metadata: pb.MessageMetadata, payload: bytes) -> bytes:
        """The payload as it is sent; its metadata says how it was encrypted."""
        # The chunks of a message share their metadata.
        del metadata.encryption_keys[:]
        if self._data_cipher is None:
            if self._on_failure is EncryptionFailure.FAIL:
                raise EncryptionFailed("a message was to be sent before there was a key")
            return payload
        nonce = os.urandom(NONCE_BYTES)
        metadata.encryption_keys.extend(self._wrapped)
        metadata.encryption_param = nonce
        self._sealed += 1
        return self._ciphers.seal(self._data_cipher, nonce, payload)

    def _renew(self, now: float) -> None:
        data_key = os.urandom(DATA_KEY_BYTES)
        wrapped = [self._wrap(name, data_key) for name in self._names]
        # Nothing before all of them (invariant 3).
        self._wrapped = wrapped
        self._data_cipher = self._ciphers.data_cipher(data_key)
        self._renew_at, self._sealed = now + RENEW_S, 0

    def _wrap(self, name: str, data_key: bytes) -> pb.EncryptionKeys:
        try:
            key = self._reader.public_key(name)
            made = pb.EncryptionKeys(key=name, value=self._ciphers.wrap(data_key, key.pem))
            for each, text in key.metadata.items():
                made.metadata.add(key=each, value=text)
        except EncryptionFailed as error:
            raise EncryptionFailed(f"key {name!r}: {error.args[0]}") from error
        except Exception as error:  # the application's reader raises whatever it likes
            raise EncryptionFailed(f"key {name!r} cannot be read: {error!r}") from error
        return made
