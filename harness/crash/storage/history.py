"""Pure: what a load asked of a store, what the store acknowledged, and what it may hold by that.

Owns: the events that a load reports, the bytes that it writes (all derived from a seed and a
token, so that they need not be kept), and `History`, which folds events into what must be there
and what may be there.

Invariants:
1. A token names one operation of a run of the harness; it never returns, over restarts too.
2. A submission is reported before it is made, an acknowledgement after it came. So what is found
   in a store is either acknowledged or submitted, or it is unexplained.
3. Operations on one key take effect in the order of their submission: an acknowledged one makes
   every earlier one certain or overwritten.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Final

import msgspec

from magnetar.metadata.api import Index

EPHEMERAL_FOLDER: Final = "/crash/ephemeral"
SEQUENCE_FOLDER: Final = "/crash/sequence"
READY: Final = "ready"
"""Told by a process that has opened the store."""
INDEX_NAMES: Final = ("by-owner", "by-state")

_TOKEN_BYTES: Final = 8
_POOL_BYTES: Final = 1 << 16
_LARGE_BYTES: Final = 20_000


class Kind(Enum):
    """What an operation does."""

    CREATE = "create"
    APPEND = "append"
    FENCE = "fence"
    CLOSE = "close"
    DROP = "drop"
    PUT = "put"
    REMOVE = "remove"
    SEQUENCE = "sequence"
    EPHEMERAL = "ephemeral"


class Submitted(msgspec.Struct, frozen=True, array_like=True, tag="submitted"):
    """An operation is about to be submitted."""

    token: int
    kind: Kind
    target: str = ""
    """Ledger id, key, or sequence prefix."""
    entry: int = -1


class Acknowledged(msgspec.Struct, frozen=True, array_like=True, tag="acknowledged"):
    """An operation was acknowledged."""

    token: int
    number: int = 0
    """The ledger's id, its last entry, or the record's version."""
    name: str = ""
    """The key that a sequence gave."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """An operation was refused for sure: it had no effect and never will."""

    token: int


class Told(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """Something about the load itself: `ready`, `closed`, or why it failed."""

    what: str
    detail: str = ""


Event = Submitted | Acknowledged | Refused | Told

encode_event = msgspec.json.Encoder().encode
decode_event = msgspec.json.Decoder(Event).decode


# --- what is written


def entry_payload(seed: int, token: int) -> bytes:
    """The payload of the append with this token."""
    size = (token * 7919) % 900
    if token % 97 == 0:
        size = _LARGE_BYTES
    return _derived(seed, token, size)


def record_value(seed: int, token: int) -> bytes:
    """The value of the put or sequence append with this token."""
    return _derived(seed, token, (token * 104_729) % 300)


def record_indexes(token: int) -> tuple[Index, ...]:
    """The index entries of the put or sequence append with this token."""
    entries = (
        Index(INDEX_NAMES[0], f"owner-{token % 11}"),
        Index(INDEX_NAMES[1], f"state-{token % 3}"),
        Index(INDEX_NAMES[1], f"seen-{token}"),
    )
    return entries[: token % 4]


def token_of(content: bytes) -> int | None:
    """The token that a payload or value claims to be of."""
    if len(content) < _TOKEN_BYTES:
        return None
    return int.from_bytes(content[:_TOKEN_BYTES], "little")


def _derived(seed: int, token: int, size: int) -> bytes:
    offset = (token * 31) % (_POOL_BYTES - _LARGE_BYTES)
    return token.to_bytes(_TOKEN_BYTES, "little") + _pool(seed)[offset : offset + size]


@lru_cache(maxsize=8)
def _pool(seed: int) -> bytes:
    return hashlib.shake_128(f"magnetar {seed}".encode()).digest(_POOL_BYTES)


# --- what is known


@dataclass(slots=True)
class LedgerHistory:
    """One ledger: `tokens` are those of its entries, in order."""

    tokens: list[int] = field(default_factory=list)
    acknowledged: int = 0
    """So many entries are there for sure."""
    last_entry: int | None = None
    """Final, if a fence or close was acknowledged."""
    closed: bool = False
    """A close was acknowledged."""
    ends_submitted: bool = False
    drop_submitted: bool = False


@dataclass(slots=True)
class KeyHistory:
    """One metadata key."""

    token: int | None = None
    """Of the state that is there unless a pending one came after it; None: absent."""
    version: int | None = None
    """None: not known, any will do."""
    pending: dict[int, Kind] = field(default_factory=dict)


@dataclass(slots=True)
class History:
    """Everything that was reported so far, folded."""

    seed: int
    ledgers: dict[int, LedgerHistory] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    keys: dict[str, KeyHistory] = field(default_factory=dict)
    creates: set[int] = field(default_factory=set)
    """Tokens of creates without an answer: each may have made an empty ledger."""
    sequences: dict[int, str] = field(default_factory=dict)
    """Prefixes of sequence appends without an answer, by token."""
    reused: list[str] = field(default_factory=list)
    """Numbers and keys that were given twice."""
    unexplained: list[str] = field(default_factory=list)
    """What a process found in the store and nobody had put there."""
    next_token: int = 1
    highest: int = 0
    """The highest version or ledger id that anybody saw."""
    _floor: int = 0
    _given: set[int] = field(default_factory=set)
    _open: dict[int, Submitted] = field(default_factory=dict)
    _last_keys: dict[str, str] = field(default_factory=dict)

    def _begin_process(self) -> None:
        """A new process has the store open: it may give only numbers above all that were seen."""
        self._floor = self.highest
        self._open.clear()

    def add(self, event: Event) -> None:
        if isinstance(event, Submitted):
            self.next_token = max(self.next_token, event.token + 1)
            self._open[event.token] = event
            self._submitted(event)
        elif isinstance(event, Acknowledged):
            self._acknowledged(self._open.pop(event.token), event)
        elif isinstance(event, Refused):
            self._refused(self._open.pop(event.token))
        elif event.what == READY:
            self._begin_process()

    def _submitted(self, event: Submitted) -> None:
        match event.kind:
            case Kind.CREATE:
                self.creates.add(event.token)
            case Kind.APPEND:
                ledger = self.ledgers[int(event.target)]
                assert event.entry == len(ledger.tokens), "the load numbers entries in order"
                ledger.tokens.append(event.token)
            case Kind.FENCE | Kind.CLOSE:
                self._listed(int(event.target)).ends_submitted = True
            case Kind.DROP:
                self._listed(int(event.target)).drop_submitted = True
            case Kind.PUT | Kind.REMOVE:
                key = self.keys.setdefault(event.target, KeyHistory())
                key.pending[event.token] = event.kind
            case Kind.SEQUENCE:
                self.sequences[event.token] = event.target
            case Kind.EPHEMERAL:
                pass  # it ends with its process, whatever became of it

    def _listed(self, ledger_id: int) -> LedgerHistory:
        """A ledger that the store lists; it may come from a create without an answer."""
        if ledger_id not in self.ledgers:
            if not self.creates:
                self.unexplained.append(f"ledger {ledger_id} is listed; nobody created it")
            else:
                self.creates.pop()
            self.ledgers[ledger_id] = LedgerHistory()
        return self.ledgers[ledger_id]

    def _acknowledged(self, asked: Submitted, event: Acknowledged) -> None:
        match asked.kind:
            case Kind.CREATE:
                self._give(event.number, "ledger id")
                self.creates.discard(event.token)
                self.ledgers[event.number] = LedgerHistory()
            case Kind.APPEND:
                ledger = self.ledgers[int(asked.target)]
                ledger.acknowledged = max(ledger.acknowledged, asked.entry + 1)
            case Kind.FENCE | Kind.CLOSE:
                ledger = self.ledgers[int(asked.target)]
                ledger.last_entry = event.number
                ledger.closed |= asked.kind is Kind.CLOSE
            case Kind.DROP:
                self.drop(int(asked.target))
            case Kind.PUT:
                self._give(event.number, "version")
                self._settled(self.keys[asked.target], event.token, event.number)
            case Kind.REMOVE:
                self._settled(self.keys[asked.target], event.token, None)
            case Kind.SEQUENCE:
                self._give(event.number, "version")
                last = self._last_keys.get(asked.target, "")
                if event.name <= last:
                    self.reused.append(f"sequence key {event.name} was given after {last}")
                self.keep_sequence(event.token, event.name, event.number)
            case Kind.EPHEMERAL:
                self._give(event.number, "version")

    def _refused(self, asked: Submitted) -> None:
        if asked.kind is Kind.PUT:
            self.keys[asked.target].pending.pop(asked.token, None)

    def _settled(self, key: KeyHistory, token: int, version: int | None) -> None:
        if token not in key.pending:
            return  # a later operation was acknowledged first
        kind = key.pending[token]
        key.token = token if kind is Kind.PUT else None
        key.version = version
        for each in [each for each in key.pending if each <= token]:
            del key.pending[each]

    def keep_sequence(self, token: int, name: str, version: int) -> None:
        """A sequence append came to be: with an answer, or found without one."""
        prefix = self.sequences.pop(token)
        self._last_keys[prefix] = max(name, self._last_keys.get(prefix, ""))
        self.keys[name] = KeyHistory(token, version)

    def drop(self, ledger_id: int) -> None:
        del self.ledgers[ledger_id]
        self.dropped.add(ledger_id)

    def saw(self, number: int) -> None:
        """A version or ledger id was found in the store."""
        self.highest = max(self.highest, number)

    def was_given(self, number: int) -> bool:
        """Whether a number was acknowledged to somebody."""
        return number in self._given

    def _give(self, number: int, what: str) -> None:
        if number in self._given or number <= self._floor:
            self.reused.append(f"{what} {number} was given before")
        self._given.add(number)
        self.saw(number)
