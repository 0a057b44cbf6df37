"""Pure: what clients of a server that gets killed know: sent, receipted, acknowledged.

Owns: the messages of the server's crash tests and their bytes, and what is known of each topic,
producer and subscription over all lives of a store.

Invariants:
1. Everything is noted as sent before its first byte leaves, and as answered only once the answer
   is here: what was sent and not answered may have happened or not.
2. An entry's bytes derive from its `Sent`: whoever finds one can tell whether it is intact.
3. A batch-index set has a bit for each message of an entry: here it is set if that message **is**
   acknowledged. An entry of one message has one bit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from magnetar.model.ids import Position
from magnetar.model.subscriptions import SubscriptionType

SENTINEL: Final = "sentinel"
"""The producer with which a check marks the end of a topic."""
AUDIT: Final = "audit"
"""The subscription that acknowledges nothing: what it gets is the whole log."""

NOTHING: Final = Position(-1, -1)

_FILLER: Final = bytes(range(32, 127)) * 16
_MESSAGE_BYTES_MIN: Final = 5
_FILLER_MAX: Final = 1200


class Sent(NamedTuple):
    """One SEND: an entry, if it is stored. A resend differs in its attempt alone."""

    producer: str
    sequence_id: int
    """Of a batch: the first one."""
    messages: int
    attempt: int
    """Counts the lives of the server."""

    @property
    def highest_sequence_id(self) -> int:
        return self.sequence_id + self.messages - 1


def payload_of(sent: Sent) -> bytes:
    head = " ".join(map(str, sent)).encode()
    # A server refuses a batch whose bytes could not hold so many messages.
    size = max(sum(head) * 7 % _FILLER_MAX, _MESSAGE_BYTES_MIN * sent.messages)
    return head + b"\n" + _FILLER[:size]


def sent_of(payload: bytes) -> Sent | None:
    """What was sent with this payload; None: it is not as anybody sent it."""
    try:
        producer, sequence_id, messages, attempt = payload.partition(b"\n")[0].decode().split()
        sent = Sent(producer, int(sequence_id), int(messages), int(attempt))
    except ValueError:
        return None
    return sent if payload == payload_of(sent) else None


def all_bits(messages: int) -> int:
    return (1 << messages) - 1


class Entry(NamedTuple):
    """An entry as a consumer gets it."""

    position: Position
    sent: Sent | None
    """None: it is damaged, or nobody's."""
    unacked: int
    """The messages of it that the server says are to be consumed."""


@dataclass(slots=True)
class ProducerHistory:
    """One producer name on one topic, over all its connections."""

    name: str
    batched: bool = False
    next_sequence_id: int = 0
    unreceipted: dict[int, Sent] = field(default_factory=dict)
    """By sequence id, ascending: what must be sent again."""
    sends: Counter[int] = field(default_factory=Counter)
    """How often each sequence id was sent."""
    receipted: set[int] = field(default_factory=set)

    def send(self, sent: Sent) -> None:
        self.unreceipted[sent.sequence_id] = sent
        self.sends[sent.sequence_id] += 1
        self.next_sequence_id = max(self.next_sequence_id, sent.highest_sequence_id + 1)

    @property
    def last_receipted(self) -> int:
        """The highest sequence id that a receipt covers; -1 for none."""
        first_owed = next(iter(self.unreceipted), self.next_sequence_id)
        return first_owed - 1


@dataclass(slots=True)
class SubscriptionHistory:
    """One subscription: which messages were acknowledged, surely or perhaps."""

    name: str
    type: SubscriptionType
    consumers: int = 1
    sure: dict[Position, int] = field(default_factory=dict)
    """Acknowledged, and the server said that it is durable."""
    sure_through: Position = NOTHING
    perhaps: dict[Position, int] = field(default_factory=dict)
    """Acknowledged, with or without an answer."""
    perhaps_through: Position = NOTHING

    def sent_ack(self, position: Position, bits: int) -> None:
        self.perhaps[position] = self.perhaps.get(position, 0) | bits

    def sent_cumulative_ack(self, position: Position) -> None:
        """Of everything below `position` (and of it itself by a `sent_ack` beside)."""
        self.perhaps_through = max(self.perhaps_through, position)

    def ack_is_durable(self, position: Position, bits: int) -> None:
        self.sure[position] = self.sure.get(position, 0) | bits

    def cumulative_ack_is_durable(self, position: Position) -> None:
        self.sure_through = max(self.sure_through, position)

    def surely_acked(self, position: Position, messages: int) -> int:
        if position < self.sure_through:
            return all_bits(messages)
        return self.sure.get(position, 0)

    def perhaps_acked(self, position: Position, messages: int) -> int:
        if position < self.perhaps_through:
            return all_bits(messages)
        return self.perhaps.get(position, 0)

    def settle(self, acked: dict[Position, int]) -> None:
        """A restarted server showed what it holds: that is certain, and nothing else counts."""
        self.sure, self.perhaps = dict(acked), dict(acked)
        self.sure_through = self.perhaps_through = NOTHING


@dataclass(slots=True)
class TopicHistory:
    """One topic: what must be in its log."""

    name: str
    deduplicates: bool
    producers: dict[str, ProducerHistory]
    subscriptions: list[SubscriptionHistory]
    keyed: bool = False
    certain: dict[Position, Sent] = field(default_factory=dict)
    """By position: what a receipt or a reader has seen there."""

    @classmethod
    def make(
        cls,
        name: str,
        producers: list[ProducerHistory],
        subscriptions: list[SubscriptionHistory],
        *,
        deduplicates: bool = False,
        keyed: bool = False,
    ) -> TopicHistory:
        known = [*producers, ProducerHistory(SENTINEL)]
        by_name = {each.name: each for each in known}
        return cls(name, deduplicates, by_name, subscriptions, keyed)

    def receipt(self, sent: Sent, position: Position | None) -> None:
        """None: the server had it already and does not say where."""
        producer = self.producers[sent.producer]
        producer.unreceipted.pop(sent.sequence_id, None)
        producer.receipted.add(sent.sequence_id)
        if position is not None:
            self.certain[position] = sent


DEDUP_NAMESPACE: Final = "public/once"


@dataclass(slots=True)
class ServerHistory:
    """Everything known of one data folder."""

    topics: list[TopicHistory]
    life: int = 0
    prepared: bool = False
    """Its namespaces and subscriptions exist: everything may be asked of them."""


def new_history() -> ServerHistory:
    """The topics of the load, of which nobody has heard yet."""
    exclusive, shared = SubscriptionType.EXCLUSIVE, SubscriptionType.SHARED
    failover, key_shared = SubscriptionType.FAILOVER, SubscriptionType.KEY_SHARED
    return ServerHistory(
        [
            TopicHistory.make(
                "persistent://public/default/plain",
                [ProducerHistory("plain-a"), ProducerHistory("plain-b")],
                [SubscriptionHistory("one", exclusive), SubscriptionHistory("many", shared, 2)],
            ),
            TopicHistory.make(
                "persistent://public/default/batches",
                [ProducerHistory("batches", batched=True)],
                [SubscriptionHistory("one", exclusive), SubscriptionHistory("many", shared, 2)],
            ),
            TopicHistory.make(
                "persistent://public/default/keys",
                [ProducerHistory("keys", batched=False)],
                [SubscriptionHistory("keyed", key_shared, 2)],
                keyed=True,
            ),
            TopicHistory.make(
                f"persistent://{DEDUP_NAMESPACE}/topic",
                [ProducerHistory("once-a"), ProducerHistory("once-b", batched=True)],
                [SubscriptionHistory("spare", failover, 2)],
                deduplicates=True,
            ),
        ]
    )
