"""Pure verdicts on writes to one record: versions, sequence numbers and names, without I/O.

Owns: `StoredRecord`, the form in which backends of this package hold a record; the verdicts on
put and delete; the names of sequences.

Invariants:
1. A verdict depends on its arguments only, so every backend that asks here answers alike.
2. A refused write raises and changes nothing.
3. Names sort by their UTF-8 bytes. For `str`, Python compares code points, and UTF-8 keeps the
   order of code points: plain `<` on names is that order.
4. A sequence is a prefix with a number of dimensions; a name that differs by one digit, or has
   another number of dimensions, is not of it.

Relies on: keys, values, indexes and deltas already checked by `metadata.api`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from magnetar.errors import BadVersion, LimitExceeded
from magnetar.metadata.api import ABSENT, SEQUENCE_DIGITS, Index, Stat

NO_SESSION: Final = 0
"""As the session of a record: it is not ephemeral."""

SEQUENCE_NUMBER_MAX: Final = 10**SEQUENCE_DIGITS - 1
_STEP: Final = SEQUENCE_DIGITS + 1
# [0-9], not \d: other digits of Unicode are not ours.
_NUMBERS: Final = re.compile(rf"(?:-[0-9]{{{SEQUENCE_DIGITS}}})+")


# Of numbers, text and bytes alone: the collector need not look at the many that are held.
class StoredRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A record as a backend of this package holds it; its key is where it is held."""

    value: bytes
    version: int
    created_ms: int
    modified_ms: int
    mods: int
    session: int
    """The session that an ephemeral record belongs to, or NO_SESSION."""
    indexes: tuple[Index, ...]


def split_key(key: str) -> tuple[str, str]:
    """The directory of a key and the name in it; the directory of "/a" is ""."""
    parent, _, name = key.rpartition("/")
    return parent, name


def in_range(name: str, start: str, end: str | None) -> bool:
    """Whether a name is in [start, end); no `end` is no upper bound."""
    return start <= name and (end is None or name < end)


def stat_of(key: str, record: StoredRecord, session: int) -> Stat:
    """What the owner of `session` is told about a record."""
    ephemeral = record.session != NO_SESSION
    return Stat(
        key,
        record.version,
        record.created_ms,
        record.modified_ms,
        record.mods,
        ephemeral,
        ephemeral and record.session == session,
    )


def judge_put(
    key: str,
    current: StoredRecord | None,
    *,
    value: bytes,
    expected: int | None,
    indexes: tuple[Index, ...],
    session: int,
    version: int,
    now_ms: int,
) -> StoredRecord:
    """The record after the put, or BadVersion. `version` is one that was never given before."""
    if expected is not None and expected != (ABSENT if current is None else current.version):
        _check_expected(key, current, expected)
    # A record that was deleted before begins again: nothing of its former life is kept.
    if current is None:
        return StoredRecord(value, version, now_ms, now_ms, 0, session, indexes)
    # A wall clock may be set back; the times of one record never go back.
    modified_ms = max(now_ms, current.modified_ms)
    return StoredRecord(
        value, version, current.created_ms, modified_ms, current.mods + 1, session, indexes
    )


def judge_delete(key: str, current: StoredRecord | None, expected: int | None) -> bool:
    """Whether there is something to delete, or BadVersion."""
    _check_expected(key, current, expected)
    return current is not None


def _check_expected(key: str, current: StoredRecord | None, expected: int | None) -> None:
    # A blind write: whatever is there may go.
    if expected is None:
        return
    actual = None if current is None else current.version
    # Versions are positive, so any negative `expected` is ABSENT.
    if actual != (None if expected < 0 else expected):
        raise BadVersion(key, expected, actual)


# --- sequences ---


def sequence_key(prefix: str, numbers: Sequence[int]) -> str:
    """The key (or, given the name of a prefix, the name) of one record of a sequence."""
    return prefix + "".join(f"-{number:0{SEQUENCE_DIGITS}d}" for number in numbers)


def sequence_bounds(prefix_name: str) -> tuple[str, str]:
    """Names in [low, high) include every name of the sequence, and others: parse what you find."""
    return f"{prefix_name}-0", f"{prefix_name}-:"  # ':' follows '9'


def parse_sequence(
    prefix_name: str, name: str, dimensions: int | None = None
) -> tuple[int, ...] | None:
    """The numbers of a name of the sequence; None if it is not of it.

    Without `dimensions`, any number of them is taken.
    """
    length = len(name) - len(prefix_name)
    # Not this prefix, or not whole numbers behind it.
    if length <= 0 or length % _STEP or not name.startswith(prefix_name):
        return None
    # Another number of dimensions is another sequence (invariant 4).
    if dimensions is not None and length != dimensions * _STEP:
        return None
    numbers = name[len(prefix_name) :]
    if not _NUMBERS.fullmatch(numbers):
        return None
    return tuple(int(number) for number in numbers[1:].split("-"))


def sequence_prefixes(name: str) -> list[str]:
    """Every prefix whose sequence this name is of, longest first: one per dimension it may have."""
    prefixes = []
    # From the right: `a-1-2` is number 2 of `a-1`, and (1, 2) of `a` with two dimensions.
    while len(name) > _STEP and _NUMBERS.fullmatch(name, len(name) - _STEP):
        name = name[:-_STEP]
        prefixes.append(name)
    return prefixes


def next_sequence(last: tuple[int, ...] | None, deltas: Sequence[int]) -> tuple[int, ...]:
    """The numbers above `last`, the highest of the sequence (None: it is empty)."""
    base = last if last is not None else (0,) * len(deltas)
    numbers = tuple(number + delta for number, delta in zip(base, deltas, strict=True))
    # With one more digit it would not sort above the others: rather no key than a wrong place.
    if max(numbers) > SEQUENCE_NUMBER_MAX:
        raise LimitExceeded(f"sequence numbers {numbers} need more than {SEQUENCE_DIGITS} digits")
    return numbers
