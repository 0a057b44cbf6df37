"""Pure: the algorithms of end-to-end encryption, as every Pulsar client has them.

Owns: `Ciphers`: a data key wrapped by RSA-OAEP with SHA-1 and without a label, a payload sealed by
AES-GCM with a nonce of 12 bytes and its tag of 16 at the end. Nothing else is authenticated: not
the metadata, not the place of a message.

Invariants:
1. `unwrap(wrap(k, public), private) == k`; `open(seal(p))` is `p`, and anything else than what was
   sealed raises `UnreadableMessage`.
2. Of RSA keys only those of applications are computed with: what a message brings is bytes of a
   size that must fit, else it is refused before any computation.

The package `cryptography` is loaded when the first `Ciphers` is made: it is an extra.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from magnetar.errors import EncryptionFailed, InvalidSetting, UnreadableMessage

DATA_KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16

# Shorter ones come from Java without its strong cryptography.
_DATA_KEY_SIZES: Final = frozenset({16, 24, DATA_KEY_BYTES})
_PRIVATE_KEYS_MAX: Final = 16
"""Parsed ones that are kept."""


class Ciphers:
    """The algorithms, and the private keys that were parsed for them."""

    def __init__(self) -> None:
        primitives = "cryptography.hazmat.primitives"
        try:
            # Imported here: only who encrypts needs the extra.
            self._formats: Any = import_module(f"{primitives}.serialization")
            self._rsa: Any = import_module(f"{primitives}.asymmetric.rsa")
            padding: Any = import_module(f"{primitives}.asymmetric.padding")
            sha1: Any = import_module(f"{primitives}.hashes").SHA1()
            self._aes: Any = import_module(f"{primitives}.ciphers.aead").AESGCM
            self._errors: Any = import_module("cryptography.exceptions")
        except ImportError as error:
            raise InvalidSetting(
                "encryption needs cryptography, which is not installed",
                hint="install magnetar[encryption]",
            ) from error
        self._oaep = padding.OAEP(mgf=padding.MGF1(sha1), algorithm=sha1, label=None)
        self._private: dict[bytes, Any] = {}

    def wrap(self, data_key: bytes, public_pem: bytes) -> bytes:
        """A data key that only the owner of the private key can read; `EncryptionFailed`."""
        try:
            key = self._formats.load_pem_public_key(public_pem)
        except (ValueError, TypeError, self._errors.UnsupportedAlgorithm) as error:
            raise EncryptionFailed(f"a public key cannot be read: {error}") from error
        if not isinstance(key, self._rsa.RSAPublicKey):
            raise EncryptionFailed("a public key is of another kind than RSA")
        try:
            wrapped: bytes = key.encrypt(data_key, self._oaep)
        except ValueError as error:
            raise EncryptionFailed(f"a public key is too small: {error}") from error
        return wrapped

    def unwrap(self, wrapped: bytes, private_pem: bytes) -> bytes:
        """The data key; raises `UnreadableMessage` if it was not wrapped for this private key."""
        try:
            key = self._private.get(private_pem) or self._parsed(private_pem)
            data_key: bytes = key.decrypt(wrapped, self._oaep)
        except (ValueError, TypeError, self._errors.UnsupportedAlgorithm) as error:
            raise UnreadableMessage(f"a private key does not fit: {error}") from error
        if len(data_key) not in _DATA_KEY_SIZES:
            raise UnreadableMessage(f"a data key has {len(data_key)} bytes")
        return data_key

    def _parsed(self, private_pem: bytes) -> Any:
        # Without the check of its numbers, which would hold the loop for 30 ms: the key is the
        # application's own, and one that is wrong opens nothing.
        key = self._formats.load_pem_private_key(
            private_pem, password=None, unsafe_skip_rsa_key_validation=True
        )
        if not isinstance(key, self._rsa.RSAPrivateKey):
            raise UnreadableMessage("a private key is of another kind than RSA")
        if len(self._private) >= _PRIVATE_KEYS_MAX:
            del self._private[next(iter(self._private))]
        self._private[private_pem] = key
        return key

    def data_cipher(self, data_key: bytes) -> Any:
        """A data key made ready for `seal` and `open`."""
        return self._aes(data_key)

    def seal(self, data_cipher: Any, nonce: bytes, payload: bytes) -> bytes:
        """The payload encrypted, with its tag; a nonce is for one payload only."""
        sealed: bytes = data_cipher.encrypt(nonce, payload, None)
        return sealed

    def open(self, data_cipher: Any, nonce: bytes, sealed: bytes) -> bytes | None:
        """The payload; None: it was not sealed so."""
        if len(nonce) != NONCE_BYTES or len(sealed) < TAG_BYTES:
            return None
        try:
            payload: bytes = data_cipher.decrypt(nonce, sealed, None)
        except self._errors.InvalidTag:
            return None
        return payload
