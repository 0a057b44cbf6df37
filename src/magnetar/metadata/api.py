"""The metadata store's contract: records under paths, with CAS, sequences, indexes and watches.

Owns: the value types, the limits that are the same on every backend, and `MetadataStore`, the
abstract base that checks arguments and leaves the work to a backend.

Promises of every backend (the conformance kit checks them):
1. A returned write is durable. A put, append or delete is atomic with its index entries. CAS is
   linearizable per key. Nothing is atomic over several keys.
2. `put`, `append` and `delete` are submitted **when called**, not when awaited: program order per
   key is call order. A change is readable and watched once durable, never before; one store
   object reads its own finished writes. `delete_seen` is many deletes, each by itself.
3. A version is opaque, changes at every write and is good for equality only.
4. `append` gives a key above every existing key of its prefix. Gaps are allowed; numbers may come
   back after the highest record was deleted, so never keep one as a cursor.
5. `scan` yields one directory sorted by name bytes, from a snapshot taken at or after the call.
   `scan_index` yields every record that matched from before the call until its end; a record that
   changed meanwhile may show newer content or be left out, so callers re-check their predicate.
6. A watch is at least once, in order per key, and carries no values. `RESYNC` means that events
   may be missing: scan again. Watch first, then scan: no gap.
7. `OutcomeUnknown` on a CAS: re-read and compare. On an append: a retry may duplicate.
8. An ephemeral record goes when its session ends: at `close`, or when the session times out.
9. Cancelling the awaiting task does not undo a submitted operation.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import TracebackType
from typing import Final, Generic, NamedTuple, Self, TypeVar

import msgspec

from magnetar.errors import BadVersion, InvalidArgument, LimitExceeded

ABSENT: Final = -1
"""As `expected`: the record must not exist yet."""

# Checked here, not by a backend: what one store takes, every store takes.
KEY_BYTES_MAX: Final = 512
VALUE_BYTES_MAX: Final = 512 * 1024
INDEX_KEY_BYTES_MAX: Final = 256
INDEXES_PER_RECORD_MAX: Final = 8
# As many as the largest 64-bit number has, zeros in front: names sort as their numbers do.
SEQUENCE_DIGITS: Final = 20

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_INDEX_NAME = re.compile(r"[a-z0-9:-]{1,64}")

Item = TypeVar("Item")

PartitionOf = Callable[[str], str | None]
"""The partition key of a record key: records of one partition live together."""


class Index(NamedTuple):
    """One entry that a record has in a secondary index."""

    name: str
    key: str


class Stat(msgspec.Struct, frozen=True, gc=False):
    """All about a record but its value."""

    key: str
    version: int
    created_ms: int
    modified_ms: int
    mods: int
    """How often it was put since it was created, the creation not counted."""
    ephemeral: bool
    mine: bool
    """Ephemeral, and of this store object's session."""


class Record(msgspec.Struct, frozen=True):
    """A stored record."""

    stat: Stat
    value: bytes

    @property
    def key(self) -> str:
        return self.stat.key

    @property
    def version(self) -> int:
        return self.stat.version


class EventKind(Enum):
    CREATED = "created"
    MODIFIED = "modified"
    DELETED = "deleted"
    RANGE_DELETED = "range-deleted"
    RESYNC = "resync"


class Event(NamedTuple):
    """A change that a watch saw. For RANGE_DELETED, keys from `key` up to before `end` went."""

    kind: EventKind
    key: str = ""
    version: int | None = None
    end: str | None = None


class SessionEvent(Enum):
    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"
    REESTABLISHED = "reestablished"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The differences between backends, for the few callers that must know."""

    native_indexes: bool
    ordered_index_scan: bool
    versions_never_reused: bool
    linearizable_get: bool
    sessions_expire: bool
    partitions: int


class Watch(ABC, Generic[Item]):
    """News from the store, as an async iterator; also a context manager that closes itself.

    Its queue is bounded: a reader that is too slow gets RESYNC instead of what it missed.
    """

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> Item: ...

    @abstractmethod
    def close(self) -> None:
        """Stop delivery at once; the iteration ends. Closing again is no error."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class MetadataStore(ABC):
    """One object is one client identity and one session. See the module for the promises."""

    capabilities: Capabilities

    # --- public calls: arguments are checked here, the same on every backend

    async def get(self, key: str) -> Record | None:
        check_key(key)
        return await self._get(key)

    def put(
        self,
        key: str,
        value: bytes,
        *,
        expected: int | None = None,
        indexes: Iterable[Index] = (),
        ephemeral: bool = False,
    ) -> Awaitable[Stat]:
        """Create or replace. `expected` None: whatever is there; ABSENT: only create."""
        # The most frequent call of all: what nearly all keys and values are is seen here.
        if not _is_plain(key):
            check_key(key)
        entries = check_indexes(indexes)
        if len(value) > VALUE_BYTES_MAX:
            check_value(value)
        if ephemeral and entries:
            raise InvalidArgument(f"{key}: an ephemeral record cannot be indexed")
        return self._put(key, value, expected, entries, ephemeral)

    def append(
        self,
        prefix: str,
        value: bytes,
        *,
        deltas: Sequence[int] = (1,),
        indexes: Iterable[Index] = (),
    ) -> Awaitable[Stat]:
        """Create `<prefix>-<20 digits>[-<20 digits>...]` above every existing one."""
        check_key(prefix)
        check_deltas(deltas)
        # The key that will be made counts, and all its numbers have full length from the first on.
        if len(prefix.encode()) + len(deltas) * (SEQUENCE_DIGITS + 1) > KEY_BYTES_MAX:
            raise LimitExceeded(f"sequence prefix of {len(prefix)} characters is too long")
        check_value(value)
        return self._append(prefix, value, tuple(deltas), check_indexes(indexes))

    def delete(self, key: str, *, expected: int | None = None) -> Awaitable[bool]:
        """False: there was nothing to delete (an `expected` version then fails instead)."""
        check_key(key)
        return self._delete(key, expected)

    def delete_seen(self, seen: Iterable[tuple[str, int]]) -> Awaitable[list[str]]:
        """Delete records, each in the version given, and tell the keys of those that went.

        One that has another version stays; one that is gone by now is no error.
        """
        places = list(seen)
        for key, _ in places:
            check_key(key)
        return self._delete_seen(places)

    async def delete_range(
        self, parent: str, start: str = "", end: str | None = None, *, partition: str | None = None
    ) -> None:
        """Delete the direct children of `parent` with names in [start, end)."""
        check_directory(parent)
        await self._delete_range(parent, start, end, partition)

    def scan(
        self,
        parent: str,
        start: str = "",
        end: str | None = None,
        *,
        partition: str | None = None,
        limit: int | None = None,
    ) -> AsyncGenerator[Record, None]:
        """Direct children of `parent` with names in [start, end), sorted by name bytes."""
        check_directory(parent)
        return self._scan(parent, start, end, partition, limit)

    async def scan_keys(
        self,
        parent: str,
        start: str = "",
        end: str | None = None,
        *,
        partition: str | None = None,
        limit: int | None = None,
    ) -> list[str]:
        """List the keys that `scan` would yield: for directories known to be small."""
        records = self.scan(parent, start, end, partition=partition, limit=limit)
        return [record.key async for record in records]

    def scan_index(
        self,
        index: str,
        low: str | None = None,
        high: str | None = None,
        *,
        partition: str | None = None,
    ) -> AsyncGenerator[Record, None]:
        """Records with an entry of `index` in [low, high], both ends included."""
        check_index_name(index)
        for bound in (low, high):
            if bound is not None:
                check_index_key(bound)
        return self._scan_index(index, low, high, partition)

    def watch(self, *, parent: str | None = None, key: str | None = None) -> Watch[Event]:
        """Events of one key, or of the direct children of one directory."""
        if (parent is None) == (key is None):
            raise InvalidArgument("watch takes either a parent or a key")
        if parent is not None:
            check_directory(parent)
        if key is not None:
            check_key(key)
        return self._watch(parent, key)

    def watch_sequence(self, prefix: str) -> Watch[str]:
        """The highest key of a sequence: the present one first (if any), then the latest."""
        check_key(prefix)
        return self._watch_sequence(prefix)

    # --- for backends

    @abstractmethod
    async def _get(self, key: str) -> Record | None: ...

    @abstractmethod
    def _put(
        self,
        key: str,
        value: bytes,
        expected: int | None,
        indexes: tuple[Index, ...],
        ephemeral: bool,
    ) -> Awaitable[Stat]: ...

    @abstractmethod
    def _append(
        self, prefix: str, value: bytes, deltas: tuple[int, ...], indexes: tuple[Index, ...]
    ) -> Awaitable[Stat]: ...

    @abstractmethod
    def _delete(self, key: str, expected: int | None) -> Awaitable[bool]: ...

    def _delete_seen(self, seen: list[tuple[str, int]]) -> Awaitable[list[str]]:
        # Each submitted now, in this order: a backend that can do better does.
        return _deleted([(key, self._delete(key, version)) for key, version in seen])

    @abstractmethod
    async def _delete_range(
        self, parent: str, start: str, end: str | None, partition: str | None
    ) -> None: ...

    @abstractmethod
    def _scan(
        self, parent: str, start: str, end: str | None, partition: str | None, limit: int | None
    ) -> AsyncGenerator[Record, None]: ...

    @abstractmethod
    def _scan_index(
        self, index: str, low: str | None, high: str | None, partition: str | None
    ) -> AsyncGenerator[Record, None]: ...

    @abstractmethod
    def _watch(self, parent: str | None, key: str | None) -> Watch[Event]: ...

    @abstractmethod
    def _watch_sequence(self, prefix: str) -> Watch[str]: ...

    @abstractmethod
    async def sync(self, key: str = "") -> None:
        """Later reads see every write that had finished anywhere before this call."""

    @abstractmethod
    def session_events(self) -> AsyncIterator[SessionEvent]:
        """The state of the session: its present state first, then each change."""

    @abstractmethod
    async def close(self) -> None:
        """Finish queued writes, drop this object's ephemeral records, end its watches."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


async def _deleted(deletes: list[tuple[str, Awaitable[bool]]]) -> list[str]:
    results = await asyncio.gather(*(each for _, each in deletes), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, BadVersion):
            raise result
    return [key for (key, _), result in zip(deletes, results, strict=True) if result is True]


# --- argument checks, shared with tests and recipes ---


def _is_plain(key: str) -> bool:
    """Whether a key is certainly good: of printable ASCII, without empty parts, not too long."""
    return (
        len(key) <= KEY_BYTES_MAX
        and key.isascii()
        and key.isprintable()
        and key[:1] == "/"
        and key[-1] != "/"
        and "//" not in key
    )


@lru_cache(maxsize=8192)
def check_key(key: str) -> None:
    if _is_plain(key):
        return  # most keys; the rest finds out what is wrong, if anything
    # What is told first is what the caller most likely got wrong: shape, characters, then length.
    if not key.startswith("/") or key.endswith("/") or "//" in key:
        raise InvalidArgument(f"key {key!r} must be an absolute path without empty parts")
    if _CONTROL.search(key):
        raise InvalidArgument(f"key {key!r} holds a control character")
    if len(key) > KEY_BYTES_MAX or len(_utf8(key)) > KEY_BYTES_MAX:
        raise LimitExceeded(f"key of {len(key)} characters; the limit is {KEY_BYTES_MAX} bytes")


def check_directory(parent: str) -> None:
    """A directory is a key, or "" for the top."""
    if parent:
        check_key(parent)


def check_value(value: bytes) -> None:
    if len(value) > VALUE_BYTES_MAX:
        raise LimitExceeded(f"value of {len(value)} bytes; the limit is {VALUE_BYTES_MAX}")


@lru_cache(maxsize=256)
def check_index_name(name: str) -> None:
    if not _INDEX_NAME.fullmatch(name):
        raise InvalidArgument(f"index name {name!r} must match {_INDEX_NAME.pattern}")


@lru_cache(maxsize=8192)
def check_index_key(key: str) -> None:
    if "/" in key or "\x00" in key or "\x01" in key:
        raise InvalidArgument(f"index key {key!r} holds '/', NUL or 0x01")
    if len(key) > INDEX_KEY_BYTES_MAX or len(_utf8(key)) > INDEX_KEY_BYTES_MAX:
        raise LimitExceeded(
            f"index key of {len(key)} characters; the limit is {INDEX_KEY_BYTES_MAX} bytes"
        )


def check_indexes(indexes: Iterable[Index]) -> tuple[Index, ...]:
    entries = tuple(indexes)
    if not entries:
        return entries
    if len(entries) > INDEXES_PER_RECORD_MAX:
        raise LimitExceeded(f"{len(entries)} index entries; the limit is {INDEXES_PER_RECORD_MAX}")
    for name, key in entries:
        check_index_name(name)
        # Nearly all: the rest finds out what is wrong, if anything.
        is_plain = key.isascii() and key.isprintable() and "/" not in key
        if not is_plain or len(key) > INDEX_KEY_BYTES_MAX:
            check_index_key(key)
    return entries


def check_deltas(deltas: Sequence[int]) -> None:
    # The first number has to grow: only so is every new key above all the others (promise 4).
    if not deltas or deltas[0] <= 0 or any(delta < 0 for delta in deltas):
        raise InvalidArgument(f"deltas {tuple(deltas)} must start above 0 and not be negative")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{text!r} is not valid Unicode") from error
