"""The keys of an application, by name: who has the public one encrypts, who has the private one
reads.

Owns: `KeyReader`, which an application may write itself, and `PemKeyReader`, which reads files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from magnetar.errors import InvalidSetting

NAMES_MAX: Final = 64
"""Keys of one message."""


@dataclass(frozen=True, slots=True)
class EncryptionKey:
    """An RSA key as its reader gives it."""

    pem: bytes
    """As `-----BEGIN PUBLIC KEY-----` or a private one, without a password."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Of a public key: stands in every message, and is given back for the private one (a version,
    say); anybody can read it."""


@runtime_checkable
class KeyReader(Protocol):
    """The source of keys. It is called on the client's loop, and should answer from memory or disk.

    A name that it does not know is any exception.
    """

    def public_key(self, name: str) -> EncryptionKey:
        """The key to encrypt with; asked for when a producer opens, and every four hours."""
        ...

    def private_key(self, name: str, metadata: Mapping[str, str]) -> EncryptionKey:
        """The key to decrypt with, given what its public one was published with."""
        ...


class PemKeyReader:
    """A reader of keys in PEM files, which it looks at again whenever a key is asked for.

    PemKeyReader(public={"orders": "orders.pub.pem"}, private={"orders": "orders.pem"})
    """

    def __init__(
        self,
        *,
        public: Mapping[str, str | Path] | None = None,
        private: Mapping[str, str | Path] | None = None,
    ) -> None:
        """The files by the name of their key; a producer needs public ones, a consumer private."""
        self._public = _paths(public or {})
        self._private = _paths(private or {})

    def public_key(self, name: str) -> EncryptionKey:
        """The key to encrypt with."""
        return EncryptionKey(self._public[name].read_bytes())

    def private_key(self, name: str, _metadata: Mapping[str, str]) -> EncryptionKey:
        """The key to decrypt with."""
        return EncryptionKey(self._private[name].read_bytes())


def check_reader(given: object) -> None:
    """Refuse what has no keys to give: a path, or a class."""
    if given is not None and (isinstance(given, type) or not isinstance(given, KeyReader)):
        hint = "give PemKeyReader(public={...}, private={...}), or an object with its two methods"
        raise InvalidSetting(f"key_reader is {given!r}", hint=hint)


def check_key_names(given: object) -> None:
    """Refuse what names no keys: one text, or an empty name."""
    if (
        not isinstance(given, Sequence)
        or isinstance(given, str | bytes)
        or not all(isinstance(each, str) and each for each in given)
    ):
        raise InvalidSetting(f"encryption_keys is a list of names, not {given!r}")
    if len(given) > NAMES_MAX:
        raise InvalidSetting(f"{len(given)} encryption_keys; the most are {NAMES_MAX}")


def _paths(files: Mapping[str, str | Path]) -> dict[str, Path]:
    return {name: Path(path) for name, path in files.items()}
