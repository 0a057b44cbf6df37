"""Ids of transactions (pure).

Owns: how an id is made, and how the two kinds are told apart.

An id has 128 bits: its coordinator, then a number. Ids of metadata-driven transactions have a fixed
bit set in the half of the number, so that no legacy id is ever taken for one of them, nor the other
way round. Bit 62, not the topmost: many clients keep the half in a signed number.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from magnetar.errors import RequestError
from magnetar.wire.messages import TxnId

# Stored in keys and known to clients: it can never move.
METADATA_BIT: Final = 1 << 62

# Operators paste ids from our logs (`1_2`) and from Java's (`(1,2)`): both forms, and a blank or a
# colon between the halves, are read.
_TEXT: Final = re.compile(r"\(?([0-9]{1,20})[,_ :]\s*([0-9]{1,20})\)?")
_HALF_MAX: Final = 2**64 - 1
_REMEMBERED: Final = 8192
"""Names of transactions that are under way are made and read again and again."""


def metadata_id(coordinator: int, number: int) -> TxnId:
    """The id of a metadata-driven transaction."""
    if not 0 <= number < METADATA_BIT:
        raise RequestError(f"transaction number {number} is out of range", hint="use 0 to 2^62 - 1")
    return TxnId(coordinator, METADATA_BIT | number)


def is_metadata(txn: TxnId) -> bool:
    """Whether the state of a transaction is in the metadata store."""
    return bool(txn.least & METADATA_BIT)


@lru_cache(maxsize=_REMEMBERED)
def to_text(txn: TxnId) -> str:
    """Name a transaction as keys and logs do, `1_2`."""
    return f"{txn.most}_{txn.least}"


@lru_cache(maxsize=_REMEMBERED)
def from_text(text: str) -> TxnId:
    """Read an id from `1_2`, or as Java prints it, `(1,2)`."""
    match = _TEXT.fullmatch(text.strip())
    if match is None or int(match[1]) > _HALF_MAX or int(match[2]) > _HALF_MAX:
        raise RequestError(
            f"{text!r} is not the id of a transaction", hint="use <most bits>_<least bits>"
        )
    return TxnId(int(match[1]), int(match[2]))
