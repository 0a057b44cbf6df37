"""Pure: what clients asked of a broker and what it answered, and whether the two fit together.

Owns: `TopicStory` (what was sent and where it stands in the log), `ProducerStory` (the order of its
receipts), `SubscriptionStory` (what is acknowledged, and how surely) and `ConsumerStory` (permits
and order of one consumer). Each is told what clients see, checks the broker's promises, and adds
what it finds broken to `Findings`. All of them live as long as the data, over every restart.

Moments are those at which the broker wrote (`at`), never those at which a client read: so what two
clients heard can be put in order. Each life of the broker has later moments than the one before.

How surely a message is acknowledged on a subscription:

    open      no acknowledgement of it was ever sent: it must be delivered
    maybe     one was sent: it may be delivered or not
    durable   the broker answered one at a moment: written later, a delivery breaks the promise

A mask has a bit for each message of an entry; ALL covers an entry of any size. A seek whose outcome
is not known weakens both ends: what it would open is not durable, what it would skip not open.
What may have expired is not open either (`lapses`); what the broker has let go durably counts as
durably acknowledged, until a seek.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

from harness.simulation.broker.lapses import Lapses
from harness.simulation.storage.history import Findings
from magnetar.model.ids import Position
from magnetar.model.subscriptions import SubscriptionType

ALL: Final = -1
_SHARING: Final = (SubscriptionType.SHARED, SubscriptionType.KEY_SHARED)
_CLOCK_STEP: Final = 0.002
"""The broker's clock and the times of messages are in milliseconds, each rounded."""
_UNDER_WAY: Final = 5.0
"""How long a request may be on its way, unless its connection is silent for good."""
NOWHERE: Final = Position(-1, -1)


# --- topics and producers


class Part(NamedTuple):
    """One message, as compaction sees it."""

    key: str | None
    is_null: bool
    data: bytes
    """Its bytes in its batch; empty if it has an entry of its own."""


@dataclass(slots=True, eq=False)
class Sent:
    """One SEND; sent again, it is the same."""

    producer: ProducerStory
    sequence_id: int
    messages: int
    key: str
    payload: bytes
    """All that follows the command, unlike that of any other send."""
    deliver_at: float | None = None
    """Not to be delivered before, where consumers share messages."""
    published_at: float = 0.0
    parts: tuple[Part, ...] = ()
    """Empty: compaction cannot tell what is in it, and keeps it."""
    tries: int = 0
    receipted: bool = False
    positions: list[Position] = field(default_factory=list)

    @property
    def highest(self) -> int:
        return self.sequence_id + self.messages - 1

    @property
    def mask(self) -> int:
        return (1 << self.messages) - 1


class TopicStory:
    """One topic. `dedup`: it promises exactly once; `trims`: it drops what all acknowledged."""

    def __init__(self, findings: Findings, name: str, *, dedup: bool, trims: bool) -> None:
        self.name = name
        self.dedup = dedup
        self.trims = trims
        self.producers: list[ProducerStory] = []
        self.subscriptions: list[SubscriptionStory] = []
        self.at: dict[Position, Sent] = {}
        """Every entry that a receipt, a reader or a consumer showed."""
        self.lost_appends = False
        """An append failed since the log was last compared: its producer's order may suffer."""
        self.has_delays = False
        self.early = 0.0
        """How much before its time a message may be delivered."""
        self.lapses: Lapses | None = None
        """None: nothing expires here."""
        self.is_compacted = False
        self.horizon_min = NOWHERE
        """A run that reported its success stands for the log up to there, at least."""
        self._findings = findings
        self._sends: dict[bytes, Sent] = {}

    def add(self, sent: Sent) -> None:
        self._sends[sent.payload] = sent

    def stored(self, position: Position, sent: Sent) -> None:
        """An entry stands at a position, for good."""
        known = self.at.setdefault(position, sent)
        if known is not sent:
            self._broken(f"{position} holds two entries")
        if position in sent.positions:
            return
        sent.positions.append(position)
        text = f"{sent.producer.name} {sent.sequence_id} is at {sent.positions}"
        if len(sent.positions) > (1 if self.dedup else sent.tries):
            self._broken(f"{text}, sent {sent.tries} times")

    def seen(self, position: Position, payload: bytes) -> Sent | None:
        """A reader or consumer got an entry."""
        sent = self._sends.get(payload)
        if sent is None:
            self._broken(f"{position} holds bytes that nobody sent")
        else:
            self.stored(position, sent)
        return sent

    def may_lapse(self, position: Position) -> bool:
        """Whether it may be gone from every subscription."""
        return self.lapses is not None and self.lapses.may_lapse(position)

    def follow(self, now: float) -> None:
        """Time has gone on."""
        if self.lapses is not None:
            self.lapses.follow(self.at, now)

    def log_read(self, log: Sequence[tuple[Position, bytes]]) -> list[Position]:
        """The whole log, read while nobody writes; its positions."""
        positions = [position for position, _ in log]
        if sorted(set(positions)) != positions:
            self._broken(f"the log is out of order: {positions}")
        for position, payload in log:
            self.seen(position, payload)
        self._check_kept(positions)
        if self.dedup and not self.lost_appends:
            for producer in self.producers:
                producer.check_order()
        return positions

    def _check_kept(self, positions: Sequence[Position]) -> None:
        found = set(positions)
        for position, sent in self.at.items():
            if position in found:
                continue
            if not self.trims:
                self._broken(f"{position} ({sent.producer.name} {sent.sequence_id}) is lost")
                continue
            for subscription in self.subscriptions:
                if sent.mask & ~subscription.ever_acked(position):
                    self._broken(f"{position} was dropped, {subscription.name} needs it")
        for sent in self._sends.values():
            if sent.receipted and not sent.positions and not self.trims:
                self._broken(f"{sent.producer.name} {sent.sequence_id} has a receipt, and is lost")

    def _broken(self, text: str) -> None:
        self._findings.broken(f"{self.name}: {text}")


class ProducerStory:
    """One producer, by its name, over all its connections."""

    def __init__(self, findings: Findings, topic: TopicStory, name: str) -> None:
        self.topic = topic
        self.name = name
        self.next_sequence = 0
        self.unanswered: list[Sent] = []
        """Sends without a receipt, in order: to be sent again on the next connection."""
        self.in_flight: deque[Sent] = deque()
        """Those sent on the present connection."""
        self.sends: list[Sent] = []
        self._last = NOWHERE
        self._last_receipted = -1
        self._findings = findings
        topic.producers.append(self)

    def prepare(
        self,
        messages: int,
        key: str,
        payload: bytes,
        deliver_at: float | None = None,
        published_at: float = 0.0,
        parts: tuple[Part, ...] = (),
    ) -> Sent:
        """A new send; the next sequence ids are its own."""
        number = self.next_sequence
        sent = Sent(self, number, messages, key, payload, deliver_at, published_at, parts)
        self.next_sequence += messages
        self.topic.add(sent)
        self.sends.append(sent)
        self.unanswered.append(sent)
        return sent

    def connected(self, last_sequence_id: int) -> None:
        """The broker admitted it and said up to where nothing need be sent again."""
        self.in_flight.clear()
        highest = self.next_sequence - 1
        expected = last_sequence_id == -1
        if self.topic.dedup:
            expected = self._last_receipted <= last_sequence_id <= highest
        if not expected:
            self._broken(f"last sequence {last_sequence_id}, {self._last_receipted} is receipted")

    def sending(self, sent: Sent) -> None:
        sent.tries += 1
        self._findings.operations += 1
        self.in_flight.append(sent)

    def receipt(self, sequence_id: int, position: Position) -> None:
        sent = self._answered(sequence_id, "receipt")
        if sent is None:
            return
        sent.receipted = True
        self._last_receipted = max(self._last_receipted, sent.highest)
        if sent in self.unanswered:
            self.unanswered.remove(sent)
        if position == NOWHERE:
            if not self.topic.dedup:
                self._broken(f"{sequence_id} was taken for a duplicate")
            return
        if position <= self._last:
            self._broken(f"{sequence_id} is at {position}, an earlier one at {self._last}")
        self._last = position
        self.topic.stored(position, sent)

    def refused(self, sequence_id: int) -> None:
        """SEND_ERROR: whether it is stored or not, it must be sent again."""
        self._answered(sequence_id, "error")

    def _answered(self, sequence_id: int, what: str) -> Sent | None:
        if not self.in_flight or self.in_flight[0].sequence_id != sequence_id:
            waiting = [sent.sequence_id for sent in self.in_flight]
            self._broken(f"{what} of {sequence_id}, those in flight are {waiting[:5]}")
            return None
        return self.in_flight.popleft()

    def check_order(self) -> None:
        """Its entries stand in the log in the order in which it sent them."""
        stored = [sent for sent in self.sends if sent.positions]
        for one, other in pairwise(stored):
            if other.positions[0] < one.positions[0]:
                places = f"{one.positions[0]}, then {other.positions[0]}"
                self._broken(f"{one.sequence_id} and {other.sequence_id} are at {places}")

    def _broken(self, text: str) -> None:
        self._findings.broken(f"{self.topic.name}: producer {self.name}: {text}")


# --- subscriptions and consumers


class Writing(Protocol):
    """What is needed of the broker's side of a connection."""

    @property
    def ended_at(self) -> float | None: ...

    @property
    def lost_words(self) -> bool:
        """Whether something that was written may never have arrived."""
        ...

    def was_paused(self, moment: float) -> bool: ...


@dataclass(slots=True, eq=False)
class Ack:
    """One entry, or with `cumulative` all up to it; of the entry, the messages in `mask`."""

    position: Position
    mask: int
    cumulative: bool
    consumer: ConsumerStory
    durable_at: float | None = None

    def covers(self, position: Position) -> int:
        if position == self.position:
            return self.mask
        return ALL if self.cumulative and position < self.position else 0


class Gone(NamedTuple):
    """All up to a position was let go: begun at one moment, durable by another."""

    through: Position
    begun_at: float
    durable_at: float


class SubscriptionStory:
    """One durable subscription that began at the first entry of its topic."""

    def __init__(
        self, findings: Findings, topic: TopicStory, name: str, kind: SubscriptionType
    ) -> None:
        self.topic = topic
        self.name = name
        self.kind = kind
        self.exists = False
        """The broker has said so."""
        self.live: list[ConsumerStory] = []
        self._possible_seeks: list[Position] = []
        self._sought = NOWHERE
        self._sought_at = 0.0
        self._acks: dict[Position, list[Ack]] = {}
        self._cumulative: list[Ack] = []
        self._ever: dict[Position, int] = {}
        self._ever_through = NOWHERE
        self._asked_again: dict[Position, int] = {}
        self._all_asked_again = 0
        self._first: dict[str, dict[Position, float]] = {}
        self._overtakings: list[tuple[ConsumerStory, float, str]] = []
        self.last_seek_at = -1.0
        """When a client asked for a seek last."""
        self._lapsing = NOWHERE
        self._gone: list[Gone] = []
        self._findings = findings
        topic.subscriptions.append(self)

    # --- acknowledging

    def acked(self, ack: Ack) -> None:
        """Its client is about to send it."""
        self._findings.operations += 1
        if ack.cumulative:
            self._cumulative.append(ack)
            before = ack.position.previous
            self._ever_through = max(self._ever_through, before)
        else:
            self._acks.setdefault(ack.position, []).append(ack)
        self._ever[ack.position] = self._ever.get(ack.position, 0) | ack.mask

    def ever_acked(self, position: Position) -> int:
        """Whether anybody ever acknowledged it, whatever a seek has undone since."""
        if position <= self._ever_through or self.may_lapse(position):
            return ALL
        return self._ever.get(position, 0)

    def open_messages(self, position: Position) -> int:
        """The mask of those that must be delivered."""
        if self.may_lapse(position):
            return 0
        if position < max(self._possible_seeks, default=NOWHERE):
            return 0
        acked = ALL if position < self._sought else 0
        for ack in (*self._acks.get(position, ()), *self._cumulative):
            acked |= ack.covers(position)
        return self.topic.at[position].mask & ~acked

    def _durable(self, position: Position, at: float, consumer: ConsumerStory) -> int:
        """The mask of those whose acknowledgement was durable before a delivery was written."""
        if any(position >= each for each in self._possible_seeks):
            return 0
        durable = ALL if position < self._sought and self._sought_at < at else 0
        for gone in self._gone:
            if position <= gone.through and gone.durable_at < at:
                # As with acknowledgements: it may have been on its way.
                durable = durable if consumer.writing.was_paused(gone.durable_at) else ALL
        for ack in (*self._acks.get(position, ()), *self._cumulative):
            if ack.durable_at is None or ack.durable_at >= at:
                continue
            # What was on its way to a connection that took nothing is no new delivery.
            if not consumer.writing.was_paused(ack.durable_at):
                durable |= ack.covers(position)
        return durable

    # --- expiring

    def may_lapse(self, position: Position) -> bool:
        """Whether it may be gone without anybody's acknowledgement."""
        return position <= self._lapsing or self.topic.may_lapse(position)

    def lapsing(self, through: Position) -> None:
        """The broker is about to let go what is there up to an entry, or less."""
        self._findings.operations += 1
        self._lapsing = max(self._lapsing, through)

    def lapsed(self, gone: Gone) -> None:
        """The broker has let all of it go, durably."""
        self._gone.append(gone)

    def began_anew(self) -> None:
        """It was deleted, with all that was known of it, and is there again, from the beginning."""
        self._ever_through = max(self.topic.at, default=NOWHERE)
        self._possible_seeks.clear()
        self._sought, self._sought_at = NOWHERE, 0.0
        self._acks.clear()
        self._cumulative.clear()
        self._first.clear()
        self._gone.clear()
        self._lapsing = NOWHERE

    # --- seeking

    def seeking(self, position: Position, now: float) -> None:
        """A client is about to ask for a seek: from now on it may have happened."""
        self.last_seek_at = now
        self._findings.operations += 1
        self._possible_seeks.append(position)
        before = position.previous
        self._ever_through = max(self._ever_through, before)

    @property
    def is_seeking(self) -> bool:
        """A seek may be carried out at any time: it was asked for, and never answered."""
        return bool(self._possible_seeks)

    def sought(self, position: Position, at: float) -> None:
        """The broker has answered the seek: who joined before it is out, with its acks."""
        self._possible_seeks.remove(position)
        if at < self._sought_at:
            return  # its client heard it late: one that came after it is answered already
        self._sought, self._sought_at = position, at
        self._cumulative = [ack for ack in self._cumulative if ack.consumer.joined_at >= at]
        for entry, acks in list(self._acks.items()):
            self._acks[entry] = [ack for ack in acks if ack.consumer.joined_at >= at]
        self._gone = [gone for gone in self._gone if gone.begun_at >= at]
        self._first.clear()

    # --- redelivery

    def asked_again(self, positions: Iterable[Position] | None) -> None:
        """A client is about to ask for entries again; None: for all that it has."""
        self._findings.operations += 1
        if positions is None:
            self._all_asked_again += 1
        else:
            for position in positions:
                self._asked_again[position] = self._asked_again.get(position, 0) + 1

    # --- deliveries

    def delivered(
        self,
        consumer: ConsumerStory,
        sent: Sent,
        position: Position,
        mask: int,
        at: float,
        count: int,
    ) -> None:
        """A delivery, with its open messages and redelivery count, written at a moment."""
        again = mask & self._durable(position, at, consumer)
        if again:
            self.broken(f"{position} came again at {at:.6f}, {again:b} of it was acknowledged")
        if consumer.kind in _SHARING:
            self._check_time(consumer, sent, position, at)
            self._note_double(consumer, sent.key, position, at, count)
        if consumer.joined_at < self._sought_at or self._possible_seeks:
            return
        # Order is promised among messages of equal delay.
        if sent.deliver_at is None:
            self._note_first(consumer, sent.key, position, at)
        if consumer.kind is SubscriptionType.KEY_SHARED:
            self._note_overtaking(consumer, sent.key, position, at)

    def _check_time(
        self, consumer: ConsumerStory, sent: Sent, position: Position, at: float
    ) -> None:
        """Where messages are shared, none comes before its time."""
        if sent.deliver_at is not None and at < sent.deliver_at - self.topic.early - _CLOCK_STEP:
            self.broken(f"{consumer.name} got {position} {sent.deliver_at - at:.3f} s early")

    def _note_double(
        self, consumer: ConsumerStory, key: str, position: Position, at: float, count: int
    ) -> None:
        """Where messages are shared, one that somebody has goes to nobody.

        A consumer may have asked for it again before it arrived; then the count is another one.
        """
        for other in self.live:
            moment = other.held.get(key, {}).get(position)
            if moment is None or other.kind not in _SHARING or other.counts[position] < count:
                continue
            if other is consumer:
                self.broken(f"{consumer.name} got {position} again, and has it")
            elif moment < at:
                text = f"{consumer.name} got {position}, which {other.name} has"
                self._overtakings.append((other, at, text))

    def _note_first(self, consumer: ConsumerStory, key: str, position: Position, at: float) -> None:
        """Key_Shared: for the first time, the entries of a key come in the order of the log."""
        first = self._first.setdefault(key, {})
        if self.may_lapse(position):
            return  # it was passed over, and is back: nobody had waited until that was durable
        if position in first:
            first[position] = min(first[position], at)
            return
        first[position] = at
        if consumer.kind is SubscriptionType.KEY_SHARED:
            later = [each for each, moment in first.items() if each > position and moment < at]
            if later:
                self.broken(f"key {key}: {position} came after {later[:3]}")

    def _note_overtaking(
        self, consumer: ConsumerStory, key: str, position: Position, at: float
    ) -> None:
        """Key_Shared: nobody gets an entry of a key while another one has one unacknowledged."""
        for other in self.live:
            if other is consumer or other.kind is not SubscriptionType.KEY_SHARED:
                continue
            held = other.held.get(key, {})
            kept = [
                since
                for each, since in held.items()
                if each != position and not self.may_lapse(each) and not other.may_return(since)
            ]
            if any(moment < at for moment in kept):
                text = f"key {key}: {consumer.name} got {position}, {other.name} has {list(held)}"
                self._overtakings.append((other, at, text))

    def redeliveries(self, position: Position) -> int:
        """How often it was asked for again, at most."""
        return self._all_asked_again + self._asked_again.get(position, 0)

    def life_over(self, *, crashed: bool) -> None:
        """Nobody is connected any more; unless it crashed, every client has heard of its end."""
        for other, at, text in self._overtakings:
            if crashed or other.writing.lost_words:
                continue  # the broker may have ended that one before, and could not say so
            ended = other.ended_at
            if ended is None or ended > at:
                self.broken(text)
        self._overtakings.clear()
        self.live.clear()

    # --- the whole

    def waits(self, position: Position, until: float) -> bool:
        """Whether a message is still to wait at a moment, where consumers share messages."""
        deliver_at = self.topic.at[position].deliver_at
        return deliver_at is not None and deliver_at > until

    def verified(
        self,
        log: Sequence[Position],
        found: Mapping[Position, int],
        owed: Callable[[Position], bool] = lambda _: True,
    ) -> None:
        """Everything that a first and only consumer got, with nobody else connected."""
        for position in log:
            missing = self.open_messages(position) & ~found.get(position, 0)
            if not owed(position):
                continue
            if missing:
                self.broken(f"{position} was not delivered, though {missing:b} of it is open")
        known = set(log)
        strangers = [position for position in found if position not in known]
        if strangers:
            self.broken(f"{strangers[:3]} were delivered and are not in the log")

    def broken(self, text: str) -> None:
        self._findings.broken(f"{self.topic.name}/{self.name}: {text}")


class ConsumerStory:
    """One consumer, from its SUBSCRIBE to the end of it."""

    def __init__(
        self, subscription: SubscriptionStory, name: str, kind: SubscriptionType, writing: Writing
    ) -> None:
        self.subscription = subscription
        self.name = name
        self.kind = kind
        self.writing = writing
        self.joined_at = float("inf")
        """When the broker answered SUBSCRIBE."""
        self.stopped_at: float | None = None
        """When the broker said that it closed it."""
        self.held: dict[str, dict[Position, float]] = {}
        """Neither acknowledged nor given back, by key: when each was written."""
        self.counts: dict[Position, int] = {}
        """With which redelivery count each came last."""
        self._permits = 0
        self._last = NOWHERE
        self._rewinds = 0
        self._asked_for_all: list[float] = []

    @property
    def ended_at(self) -> float | None:
        """When the broker ended it, if the broker did."""
        ends = [each for each in (self.stopped_at, self.writing.ended_at) if each is not None]
        return min(ends, default=None)

    def joined(self, at: float) -> None:
        self.joined_at = at
        self.subscription.exists = True
        self.subscription.live.append(self)

    def left(self) -> None:
        """Its client gives it up now."""
        if self in self.subscription.live:
            self.subscription.live.remove(self)

    def flow(self, permits: int) -> None:
        self._permits += permits

    def may_rewind(self) -> None:
        """It asked for a redelivery, or became the active one."""
        self._rewinds += 1

    def asked_for_all(self, now: float) -> None:
        """Its client is about to ask for everything again."""
        self._asked_for_all.append(now)

    def may_return(self, since: float) -> bool:
        """Whether what was written then may have met its client's request for all."""
        return any(asked <= since <= asked + _UNDER_WAY for asked in self._asked_for_all)

    def let_go(self, key: str, position: Position) -> None:
        """Its client is about to acknowledge it or give it back."""
        self.held.get(key, {}).pop(position, None)

    def delivered(
        self, position: Position, payload: bytes, mask: int | None, count: int, at: float
    ) -> Sent | None:
        """A MESSAGE; `mask` are its open messages (None: all), `count` its redelivery count."""
        subscription = self.subscription
        sent = subscription.topic.seen(position, payload)
        if sent is None:
            return None
        opened = sent.mask if mask is None else mask
        if self._permits <= 0:
            subscription.broken(f"{self.name} got {position} without a permit ({self._permits})")
        self._permits -= opened.bit_count()
        subscription.topic.follow(at)
        self._check_order(position)
        if count > (0 if self.kind.takes_cumulative_acks else subscription.redeliveries(position)):
            subscription.broken(f"{position} came with the redelivery count {count}")
        subscription.delivered(self, sent, position, opened, at, count)
        self.counts[position] = count
        self.held.setdefault(sent.key, {})[position] = at
        return sent

    def _check_order(self, position: Position) -> None:
        if self.kind.takes_cumulative_acks and position <= self._last:
            self._rewinds -= 1
            if self._rewinds < 0:
                self.subscription.broken(f"{self.name} got {position} after {self._last}")
        self._last = position
