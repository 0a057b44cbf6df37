"""The values that pass between the broker's parts, and between the broker and the server.

Owns: what clients ask for (options), and what they get (receipts, deliveries). A loaded topic is
`topics.LoadedTopic`: `Topic` and `NonPersistentTopic` have the same surface, and so have their
subscriptions, `Subscription` and `NonPersistentSubscription`.

Invariants:
1. A `connection` is an identity and nothing else here: it is compared with `is`, never called.
2. Who is closed by the broker learns it by waiting (a producer: the end of `receipts`; a consumer:
   `stopped`), never by a call upwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

from magnetar.errors import MagnetarError
from magnetar.model.ids import MessageId, Position
from magnetar.model.subscriptions import InitialPosition, KeySharedPolicy, SubscriptionType

# Pulsar answers a duplicate with ledger and entry -1: clients complete the send and know no id.
DROPPED: Final = Position(-1, -1)
"""The position in a receipt whose message was not stored: a duplicate, or nobody to take it."""

NO_SEQUENCE: Final = -1
"""As the last sequence id: none is known."""


# --- schemas ---


@dataclass(frozen=True, slots=True)
class SchemaData:
    """A schema as a client gives it; `type` is the number of the protocol's Schema.Type."""

    type: int
    data: bytes
    name: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)


# --- producers ---


class AccessMode(IntEnum):
    """The claim of a producer on its topic: who else may produce. Numbers of the protocol."""

    # PIP-68. Only the first may share the topic; the others differ in what they do when it is
    # taken.
    SHARED = 0
    EXCLUSIVE = 1
    WAIT_FOR_EXCLUSIVE = 2
    EXCLUSIVE_WITH_FENCING = 3


@dataclass(frozen=True, slots=True)
class ProducerRequest:
    """A PRODUCER command, without what only the session needs."""

    producer_id: int
    connection: object
    name: str | None = None
    """None: the broker makes up a unique one."""
    # With `epoch` it tells a producer that reconnects from another one that took the same name.
    user_provided_name: bool = True
    epoch: int = 0
    access_mode: AccessMode = AccessMode.SHARED
    # PIP-68: the exclusive producer that the client was before it reconnected; an older one is
    # fenced.
    topic_epoch: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    schema: SchemaData | None = None
    encrypted: bool = False
    initial_subscription: str | None = None
    address: str = ""
    client_version: str = ""


class Receipt(NamedTuple):
    """One send that is durable, was dropped (`position` is DROPPED), or failed (`error`)."""

    sequence_id: int
    highest_sequence_id: int | None
    """As the send carried it."""
    position: Position
    error: MagnetarError | None = None


class ReceiptRun(NamedTuple):
    """Sends that came together and are durable, in entries that follow one another."""

    sequence_ids: list[int]
    first: Position


class LastMessage(NamedTuple):
    """The last message that a consumer could get; DROPPED and -1 if there is none."""

    position: Position
    batch_index: int


# --- consumers ---


@dataclass(frozen=True, slots=True)
class SubscribeRequest:
    """A SUBSCRIBE command, without what only the session needs."""

    subscription: str
    type: SubscriptionType
    consumer_id: int
    connection: object
    name: str = ""
    priority_level: int = 0
    durable: bool = True
    initial_position: InitialPosition = InitialPosition.LATEST
    start: MessageId | None = None
    """Where a non-durable subscription begins; see the protocol for its batch index."""
    rollback_seconds: int = 0
    key_shared: KeySharedPolicy | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    subscription_properties: Mapping[str, str] = field(default_factory=dict)
    read_compacted: bool = False
    schema: SchemaData | None = None
    consumer_epoch: int | None = None
    address: str = ""
    client_version: str = ""


class Delivery(NamedTuple):
    """One entry on its way to one consumer."""

    position: Position
    payload: bytes
    num_messages: int
    """Permits that it uses: the messages of the batch that are not acknowledged yet."""
    redelivery_count: int = 0
    ack_set: tuple[int, ...] = ()
    """`batch_indexes.words_of` the messages still to be taken; (): all."""
    consumer_epoch: int | None = None
