"""The entries that a coordinator writes into its log (pure).

Owns: the entries; `entry_codec` has their form.

Invariants:
1. Entries name a transaction by its number alone: the log belongs to one coordinator.
2. `Ended` says everything that is remembered of a finished transaction: once it is durable, the
   entries before it can go.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from magnetar.txn.legacy.entry_codec import EntryCodec

# Two steps, as Pulsar has them: participants must be told one by one, and until all are done the
# decision is known but not yet the end.
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
    client: str = ""
    """As in a header."""


class PartitionsAdded(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A transaction may publish to these topics from now on (ADD_PARTITION)."""

    number: int
    topics: tuple[str, ...]
    copied: bool = False
    """Whether some of them keep it in records: it has a copy of a header then."""


class SubscriptionsAdded(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A transaction may acknowledge on these subscriptions from now on (ADD_SUBSCRIPTION)."""

    number: int
    subscriptions: tuple[Acknowledging, ...]
    copied: bool = False


class Decided(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The decision on a transaction. Its topics and subscriptions are told next."""

    number: int
    state: Decision
    at_ms: int
    by: str = ""
    """Who decided, as in a header."""


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """All its topics and subscriptions have carried the decision out."""

    # All that a repeated END_TXN, the admin interface and the metrics ask of a finished one.
    number: int
    state: Outcome
    start_ms: int
    timeout_ms: int
    owner: str
    decided_ms: int
    at_ms: int
    client: str = ""
    by: str = ""


Entry: TypeAlias = Began | PartitionsAdded | SubscriptionsAdded | Decided | Ended

CODEC: Final = EntryCodec[Entry](msgspec.msgpack.Decoder(Entry), "a coordinator's log")
