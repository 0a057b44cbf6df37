"""The server behind the metadata store in memory: its records and its sessions.

Owns: `MemoryServer`. Every method is one step of the event loop: judged, stored, readable and
told to every listener before it returns, or refused without a trace.

Invariants:
1. A name, an index entry or an ephemeral key is there exactly when its record is.
2. A version is given once: one counter for all keys.
3. A session ends a whole timeout after its last heartbeat arrived, and takes its records along.

Relies on: one event loop; a clock that agrees with that loop's timers.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

from magnetar.errors import SessionLost
from magnetar.metadata.api import Event, EventKind, Index
from magnetar.metadata.judge import (
    NO_SESSION,
    StoredRecord,
    judge_delete,
    judge_put,
    next_sequence,
    parse_sequence,
    sequence_bounds,
    sequence_key,
    split_key,
)
from magnetar.runtime.clock import Clock

# --- the records ---


class _Directory:
    """The direct children of one path: by name, and the names in order."""

    def __init__(self) -> None:
        self.records: dict[str, StoredRecord] = {}
        self.names: list[str] = []

    def names_in(self, start: str, end: str | None) -> list[str]:
        low = bisect_left(self.names, start)
        high = len(self.names) if end is None else bisect_left(self.names, end)
        return self.names[low:high]


class RecordTree:
    """Records, the entries they have in indexes, and the ephemeral ones of each session."""

    def __init__(self) -> None:
        self._directories: dict[str, _Directory] = {}
        self._indexes: dict[str, list[tuple[str, str]]] = {}
        self._ephemerals: dict[int, dict[str, None]] = {}

    def get(self, key: str) -> StoredRecord | None:
        parent, name = split_key(key)
        directory = self._directories.get(parent)
        return None if directory is None else directory.records.get(name)

    def store(self, key: str, record: StoredRecord) -> None:
        parent, name = split_key(key)
        directory = self._directories.setdefault(parent, _Directory())
        current = directory.records.get(name)
        if current is None:
            insort(directory.names, name)
        else:
            self._drop_entries(key, current)
        directory.records[name] = record
        # As a set: the same entry given twice stands in the index once.
        for index in set(record.indexes):
            insort(self._indexes.setdefault(index.name, []), (index.key, key))
        if record.session != NO_SESSION:
            self._ephemerals.setdefault(record.session, {})[key] = None

    def remove(self, key: str) -> None:
        parent, name = split_key(key)
        directory = self._directories[parent]
        self._drop_entries(key, directory.records.pop(name))
        del directory.names[bisect_left(directory.names, name)]
        if not directory.names:
            del self._directories[parent]

    def names_in(self, parent: str, start: str, end: str | None) -> list[str]:
        directory = self._directories.get(parent)
        return [] if directory is None else directory.names_in(start, end)

    def indexed(self, index: str, low: str | None, high: str | None) -> list[str]:
        """The keys with an entry in [low, high], in the order of entries, each once."""
        entries = self._indexes.get(index, [])
        # No index key holds NUL, so (high + NUL,) stands right behind the entries of `high`.
        first = 0 if low is None else bisect_left(entries, (low, ""))
        last = len(entries) if high is None else bisect_left(entries, (high + "\x00", ""))
        return list(dict.fromkeys(key for _, key in entries[first:last]))

    def ephemerals_of(self, session: int) -> list[str]:
        return list(self._ephemerals.get(session, ()))

    def highest(self, prefix: str, dimensions: int | None) -> tuple[str, tuple[int, ...]] | None:
        """The highest record of a sequence: its key and its numbers."""
        parent, prefix_name = split_key(prefix)
        # The bounds let other names in (other dimensions, no numbers): the
        # first that parses counts.
        for name in reversed(self.names_in(parent, *sequence_bounds(prefix_name))):
            numbers = parse_sequence(prefix_name, name, dimensions)
            if numbers is not None:
                return f"{parent}/{name}", numbers
        return None

    def _drop_entries(self, key: str, record: StoredRecord) -> None:
        for index in set(record.indexes):
            entries = self._indexes[index.name]
            del entries[bisect_left(entries, (index.key, key))]
            # Empty ones go too, or every index and session there ever was would stay.
            if not entries:
                del self._indexes[index.name]
        if record.session != NO_SESSION:
            del self._ephemerals[record.session][key]
            if not self._ephemerals[record.session]:
                del self._ephemerals[record.session]


# --- the server ---


@dataclass(slots=True)
class _Session:
    session_id: int
    timeout_s: float
    expires_at: float
    timer: asyncio.TimerHandle | None = None


class MemoryServer:
    """The metadata server in memory: records and sessions that outlive every store object."""

    def __init__(self, clock: Clock) -> None:
        self.tree = RecordTree()
        self.listeners: list[Callable[[Event], None]] = []
        self._clock = clock
        self._version = 0
        self._last_session = NO_SESSION
        self._sessions: dict[int, _Session] = {}

    # writes: each is one step, all or nothing

    def put(
        self,
        key: str,
        value: bytes,
        expected: int | None,
        indexes: tuple[Index, ...],
        session: int,
    ) -> StoredRecord:
        # It may have ended while the request was on its way, and nothing would remove the record.
        if session != NO_SESSION and session not in self._sessions:
            raise SessionLost(f"{key}: the session of this ephemeral record has ended")
        current = self.tree.get(key)
        record = judge_put(
            key,
            current,
            value=value,
            expected=expected,
            indexes=indexes,
            session=session,
            version=self._version + 1,
            now_ms=self._clock.now_ms(),
        )
        # After the verdict: a refused put uses no version up. Readable before it is told.
        self._version = record.version
        self.tree.store(key, record)
        kind = EventKind.CREATED if current is None else EventKind.MODIFIED
        self._publish(Event(kind, key, record.version))
        return record

    def append(
        self, prefix: str, value: bytes, deltas: tuple[int, ...], indexes: tuple[Index, ...]
    ) -> tuple[str, StoredRecord]:
        highest = self.tree.highest(prefix, len(deltas))
        numbers = next_sequence(None if highest is None else highest[1], deltas)
        key = sequence_key(prefix, numbers)
        # The key is new by construction: there is no version to compare.
        return key, self.put(key, value, None, indexes, NO_SESSION)

    def delete(self, key: str, expected: int | None) -> bool:
        if not judge_delete(key, self.tree.get(key), expected):
            return False
        self.tree.remove(key)
        self._publish(Event(EventKind.DELETED, key))
        return True

    def delete_range(self, parent: str, start: str, end: str | None) -> None:
        names = self.tree.names_in(parent, start, end)
        for name in names:
            self.tree.remove(f"{parent}/{name}")
        # One event for all of them, which each watch takes apart for itself.
        if names:
            last = None if end is None else f"{parent}/{end}"
            self._publish(Event(EventKind.RANGE_DELETED, f"{parent}/{start}", end=last))

    def _publish(self, event: Event) -> None:
        for hear in self.listeners:
            hear(event)

    # sessions

    def open_session(self, timeout_s: float) -> int:
        self._last_session += 1
        session = _Session(self._last_session, timeout_s, self._clock.monotonic() + timeout_s)
        self._sessions[session.session_id] = session
        self._arm(session)
        return session.session_id

    def renew_session(self, session_id: int) -> bool:
        session = self._sessions.get(session_id)
        if session is None:
            return False
        session.expires_at = self._clock.monotonic() + session.timeout_s
        return True

    def end_session(self, session_id: int) -> None:
        # Gone before its records go: a put of this session that comes later is refused.
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        if session.timer is not None:
            session.timer.cancel()
        for key in self.tree.ephemerals_of(session_id):
            self.delete(key, None)

    def _arm(self, session: _Session) -> None:
        left = session.expires_at - self._clock.monotonic()
        loop = asyncio.get_running_loop()
        session.timer = loop.call_later(max(left, 0), self._check_expiry, session)

    def _check_expiry(self, session: _Session) -> None:
        # Heartbeats move the moment, not the timer: one timer per timeout, not per heartbeat.
        if self._clock.monotonic() >= session.expires_at:
            self.end_session(session.session_id)
        else:
            self._arm(session)
