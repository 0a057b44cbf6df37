"""Pure: the metadata keys of managed ledgers and cursors.

Owns: how a name becomes part of a key, and where each record stands.

Invariants:
1. Every key is shorter than the store's limit, whatever the names: a long one is cut and hashed.
   Records hold the full name, and who reads them compares it.
2. Different names give different keys (up to SHA-256).
3. Chunk records stand below the key of their cursor only, so one range delete removes them all.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from typing import Final
from urllib.parse import quote

MANAGED_LEDGERS: Final = "/managed-ledgers"
CURSORS: Final = "/cursors"
CURSOR_CHUNKS: Final = "/cursor-chunks"

# Two names, the directory and the suffix of a chunk stay below the store's 512 bytes; a name that
# is cut keeps enough to be recognised, and the hash brings it to 165.
NAME_BYTES_MAX: Final = 180
_KEPT_BYTES: Final = 100
_HASH_MARK: Final = "~"


@lru_cache(maxsize=8192)
def encode_name(name: str) -> str:
    """A name as one part of a key."""
    encoded = quote(name, safe="")
    # An unreserved character otherwise, the mark is escaped so that no name looks like a hash.
    encoded = encoded.replace(_HASH_MARK, "%7E")
    if len(encoded) <= NAME_BYTES_MAX:
        return encoded
    return encoded[:_KEPT_BYTES] + _HASH_MARK + sha256(name.encode()).hexdigest()


def managed_ledger_key(name: str) -> str:
    return f"{MANAGED_LEDGERS}/{encode_name(name)}"


def cursors_directory(name: str) -> str:
    return f"{CURSORS}/{encode_name(name)}"


def cursor_key(name: str, cursor: str) -> str:
    return f"{cursors_directory(name)}/{encode_name(cursor)}"


def chunks_directory(name: str, cursor: str) -> str:
    return f"{CURSOR_CHUNKS}/{encode_name(name)}/{encode_name(cursor)}"
