"""What a coordinator writes into its log (pure).

Owns: the entries, and their form: one byte for the version, then MessagePack.

Invariants:
1. Entries name a transaction by its number alone: the log belongs to one coordinator.
2. `Ended` says everything that is remembered of a finished transaction: once it is durable, the
   entries before it can go.
3. A form that this version does not know is refused, never guessed.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from magnetar.errors import CorruptData, FormatTooNew

VERSION: Final = 1

Decision: TypeAlias = Literal["COMMITTING", "ABORTING"]
Outcome: TypeAlias = Literal["COMMITTED", "ABORTED"]
LegacyState: TypeAlias = Literal["OPEN", "COMMITTING", "COMMITTED", "ABORTING", "ABORTED"]


class Acknowledging(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A subscription on which a transaction acknowledges."""

    topic: str
    subscription: str


class Began(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A transaction is open."""

    number: int
    start_ms: int
    timeout_ms: int
    owner: str = ""


class PartitionsAdded(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """It may publish to these topics from now on."""

    number: int
    topics: tuple[str, ...]
    copied: bool = False
    """Whether some of them keep it in records: it has a copy of a header then."""


class SubscriptionsAdded(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """It may acknowledge on these subscriptions from now on."""

    number: int
    subscriptions: tuple[Acknowledging, ...]
    copied: bool = False


class Decided(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """What becomes of it: the decision. Its topics and subscriptions are told next."""

    number: int
    state: Decision
    at_ms: int


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """All its topics and subscriptions have carried the decision out."""

    number: int
    state: Outcome
    start_ms: int
    timeout_ms: int
    owner: str
    decided_ms: int
    at_ms: int


Entry: TypeAlias = Began | PartitionsAdded | SubscriptionsAdded | Decided | Ended

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[Entry]] = msgspec.msgpack.Decoder(Entry)


def encode(entry: Entry) -> bytes:
    return bytes((VERSION,)) + _ENCODER.encode(entry)


def decode(payload: bytes | memoryview) -> Entry:
    """The entry that `encode` made these bytes of."""
    if not payload:
        raise CorruptData("an entry of a coordinator's log is empty")
    if payload[0] != VERSION:
        raise FormatTooNew(f"an entry of a coordinator's log has version {payload[0]}")
    try:
        return _DECODER.decode(payload[1:])
    except msgspec.MsgspecError as error:
        raise CorruptData(f"an entry of a coordinator's log: {error}") from error
