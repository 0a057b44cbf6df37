"""What the clients of a scalable topic did and saw, and which of its promises that breaks (pure).

Owns: the events that clients record, in the order in which they happened, and `violations`.

The promises:
1. Tiling: in every layout the active ranges cover 0..65535 exactly once.
2. Epochs: they never go back within one session, and a changed layout has a greater one; a segment
   keeps its range and its parents, and never takes messages again once it is sealed.
3. Parents first: a child serves nothing before its parents are sealed, and no stream or checkpoint
   consumer is given anything of a segment before everything of the segments it came from.
4. Order: each stream and checkpoint consumer is given the messages of one key as they were
   published, over splits and merges. A redelivery starts at the first that is not acknowledged.
5. No loss: at the end every subscription was given everything that has a receipt.
6. No second delivery: what was acknowledged durably is not delivered to that subscription again;
   a checkpoint consumer is given exactly what follows the checkpoint it was restored from.
7. Time: a queue is given nothing before its time of delivery; stream and checkpoint consumers get
   it at once, for order comes first.
8. Expiry: what had its receipt before all was let expire is not delivered once that is durable;
   what is sent afterwards is.
9. Storage: a message has one place, in a segment of its key, and is one that was published.

Relies on: one list of events, and in it each event at the moment at which its client learned of it
(`Published` and `AckSent` before the first byte is sent). One publisher name is one producer with
ascending sequence ids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from magnetar.model.hashing import HASH_MAX, key_hash, segment_hash
from magnetar.model.ids import Checkpoint, CheckpointKind, Position
from magnetar.model.segments import Segment


class Kind(Enum):
    """How a subscription consumes."""

    QUEUE = "queue"
    STREAM = "stream"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class Published:
    """A producer is about to send it for the first time."""

    producer: str
    sequence: int
    key: str
    not_before: float | None = None
    """The moment before which no queue may be given it."""


@dataclass(frozen=True, slots=True)
class Receipted:
    producer: str
    sequence: int


@dataclass(frozen=True, slots=True)
class LayoutSeen:
    """A layout as it arrived; one session on one connection is one observer."""

    observer: str
    epoch: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Subscribed:
    """It exists. Not `earliest`: what was published before may be missing."""

    subscription: str
    kind: Kind
    earliest: bool = True


@dataclass(frozen=True, slots=True)
class Delivered:
    """Handed to the application."""

    subscription: str
    consumer: str
    producer: str
    sequence: int
    key: str
    segment: int
    position: Position
    sent_at: float | None = None
    """When the broker wrote it, where that is known: it may have been long on its way."""


@dataclass(frozen=True, slots=True)
class AckSent:
    """A consumer is about to acknowledge it."""

    subscription: str
    producer: str
    sequence: int


@dataclass(frozen=True, slots=True)
class AckDurable:
    """The broker has answered that it is acknowledged."""

    subscription: str
    producer: str
    sequence: int
    sent_at: float | None = None
    """When the broker wrote its answer, where that is known."""


@dataclass(frozen=True, slots=True)
class Checkpointed:
    subscription: str
    consumer: str
    checkpoint: bytes


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint consumer begins (again) at a checkpoint that was taken before, or at an end."""

    subscription: str
    consumer: str
    checkpoint: bytes


@dataclass(frozen=True, slots=True)
class Expiring:
    """All that is there for a subscription is about to expire."""

    subscription: str


@dataclass(frozen=True, slots=True)
class ExpiryOver:
    """It has expired, durably; or, not `done`, some of it may have."""

    subscription: str
    done: bool


Event: TypeAlias = (
    Published
    | Receipted
    | LayoutSeen
    | Subscribed
    | Delivered
    | AckSent
    | AckDurable
    | Checkpointed
    | Restored
    | Expiring
    | ExpiryOver
)


def violations(events: Sequence[Event], *, drained: bool = True) -> list[str]:
    """Every promise that this history breaks; none if it is a good one.

    Not `drained`: the consumers did not wait for the rest, so a missing message says nothing.
    """
    facts = _Facts()
    for index, event in enumerate(events):
        facts.learn(index, event)
    facts.conclude()
    subscriptions: dict[str, _Subscription] = {}
    for index, event in enumerate(events):
        if isinstance(event, Subscribed):
            made = _ordered_or_queue(event.kind)
            subscriptions.setdefault(event.subscription, made(facts, event, index))
        elif isinstance(event, Expiring | ExpiryOver):
            subscriptions[event.subscription].expire(event, index)
        elif isinstance(event, Delivered | AckSent | AckDurable | Checkpointed | Restored):
            found = subscriptions.get(event.subscription)
            if found is None:
                facts.broken.append(f"{event.subscription}: {event} before it was subscribed")
            else:
                found.take(event)
    if drained:
        for subscription in subscriptions.values():
            subscription.check_nothing_lost()
    return facts.broken


# --- what holds whoever consumes


class _Message(NamedTuple):
    producer: str
    sequence: int

    def __str__(self) -> str:
        return f"{self.producer}/{self.sequence}"


_Chain: TypeAlias = tuple[str, str]
"""A producer and a key: what must stay in order."""

_Place: TypeAlias = tuple[int, Position]


@dataclass(slots=True)
class _Facts:
    broken: list[str] = field(default_factory=list)
    published: dict[_Message, tuple[int, str]] = field(default_factory=dict)
    """When (as an index of an event), and the key."""
    not_before: dict[_Message, float] = field(default_factory=dict)
    receipted: dict[_Message, int] = field(default_factory=dict)
    places: dict[_Message, _Place] = field(default_factory=dict)
    first_seen: dict[_Message, int] = field(default_factory=dict)
    chains: dict[_Chain, list[_Message]] = field(default_factory=dict)
    """The messages of each chain that are known to be stored, in order."""
    ranks: dict[_Message, tuple[_Chain, int]] = field(default_factory=dict)
    segments: dict[int, Segment] = field(default_factory=dict)
    _layouts: dict[int, tuple[Segment, ...]] = field(default_factory=dict)
    _last_epoch: dict[str, int] = field(default_factory=dict)

    def learn(self, index: int, event: Event) -> None:
        match event:
            case Published(producer, sequence, key, not_before):
                self.published.setdefault(_Message(producer, sequence), (index, key))
                if not_before is not None:
                    self.not_before[_Message(producer, sequence)] = not_before
            case Receipted(producer, sequence):
                message = _Message(producer, sequence)
                self.receipted.setdefault(message, index)
                self.first_seen.setdefault(message, index)
            case Delivered():
                self._learn_place(index, event)
            case LayoutSeen():
                self._learn_layout(event)
            case _:
                pass

    def conclude(self) -> None:
        for message in sorted({*self.receipted, *self.places}):
            if message not in self.published:
                self.broken.append(f"{message} was never published")
                continue
            chain = (message.producer, self.published[message][1])
            members = self.chains.setdefault(chain, [])
            self.ranks[message] = (chain, len(members))
            members.append(message)
        self._check_epochs()
        self._check_segments_of_keys()
        self._check_parents_sealed()

    def ancestors(self, segment_id: int) -> set[int]:
        found: set[int] = set()
        waiting = [segment_id]
        while waiting:
            segment = self.segments.get(waiting.pop())
            parents = set(segment.parent_ids) - found if segment is not None else set()
            found |= parents
            waiting.extend(parents)
        return found

    # --- places

    def _learn_place(self, index: int, event: Delivered) -> None:
        message = _Message(event.producer, event.sequence)
        place = (event.segment, event.position)
        known = self.places.setdefault(message, place)
        if known != place:
            self.broken.append(
                f"{message} is stored twice: in segment {known[0]} at {known[1]}"
                f" and in segment {place[0]} at {place[1]}"
            )
        self.first_seen.setdefault(message, index)
        published = self.published.get(message)
        if published is not None and published[1] != event.key:
            self.broken.append(f"{message} has the key {event.key!r}, not {published[1]!r}")

    def _check_segments_of_keys(self) -> None:
        for message, (segment_id, _) in self.places.items():
            segment = self.segments.get(segment_id)
            if segment is None or segment.legacy_topic_name is not None:
                continue
            if message in self.published:
                key = self.published[message][1]
                if segment_hash(key_hash(key)) not in segment.hash_range:
                    text = f"{message} of key {key!r} is in segment {segment.descriptor}"
                    self.broken.append(text)

    def _check_parents_sealed(self) -> None:
        """Nothing that was published after a child had served may be in one of its parents."""
        serving: dict[int, int] = {}
        last_published: dict[int, tuple[int, _Message]] = {}
        for message, (segment_id, _) in self.places.items():
            seen = self.first_seen[message]
            serving[segment_id] = min(seen, serving.get(segment_id, seen))
            if message in self.published:
                moment = (self.published[message][0], message)
                last_published[segment_id] = max(moment, last_published.get(segment_id, moment))
        for segment_id, since in serving.items():
            for ancestor in self.ancestors(segment_id):
                last = last_published.get(ancestor)
                if last is not None and last[0] > since:
                    self.broken.append(
                        f"segment {ancestor} took {last[1]} when its child {segment_id} served"
                    )

    # --- layouts

    def _learn_layout(self, event: LayoutSeen) -> None:
        last = self._last_epoch.get(event.observer, -1)
        if event.epoch < last:
            self.broken.append(f"{event.observer}: epoch {event.epoch} after epoch {last}")
        self._last_epoch[event.observer] = max(last, event.epoch)
        segments = tuple(sorted(event.segments, key=lambda each: each.segment_id))
        known = self._layouts.setdefault(event.epoch, segments)
        if known is segments:
            self._check_tiling(event.epoch, segments)
        elif known != segments:
            self.broken.append(f"epoch {event.epoch} has two different layouts")

    def _check_tiling(self, epoch: int, segments: Iterable[Segment]) -> None:
        ranges = sorted(each.hash_range for each in segments if each.is_active)
        tiles = (
            bool(ranges)
            and ranges[0].start == 0
            and ranges[-1].end == HASH_MAX
            and all(one.is_before(other) for one, other in pairwise(ranges))
        )
        if not tiles:
            text = ", ".join(map(str, ranges)) or "nothing"
            self.broken.append(f"epoch {epoch}: {text} does not tile the ring")

    def _check_epochs(self) -> None:
        """From one epoch to the next, segments stay what they are."""
        for epoch, segments in sorted(self._layouts.items()):
            for segment in segments:
                before = self.segments.get(segment.segment_id)
                name = f"epoch {epoch}: segment {segment.segment_id}"
                if before is None:
                    self.segments[segment.segment_id] = segment
                    continue
                if segment.hash_range != before.hash_range:
                    self.broken.append(f"{name} had the range {before.hash_range}")
                if not set(segment.parent_ids) <= set(before.parent_ids):
                    self.broken.append(f"{name} had the parents {before.parent_ids}")
                if segment.is_active and not before.is_active:
                    self.broken.append(f"{name} is active and was sealed")
                # Parents that were pruned stay known: they came first all the same.
                if not segment.is_active and before.is_active:
                    self.segments[segment.segment_id] = replace(
                        segment, parent_ids=before.parent_ids
                    )


# --- what one subscription was given


class _Subscription:
    """What holds for all kinds."""

    def __init__(self, facts: _Facts, subscribed: Subscribed, index: int) -> None:
        self.name = subscribed.subscription
        self._facts = facts
        self._began = -1 if subscribed.earliest else index
        self._given: set[_Message] = set()
        self._ack_sent: set[_Message] = set()
        self._acked: set[_Message] = set()
        self._expiring: set[_Message] = set()

    def take(self, event: Delivered | AckSent | AckDurable | Checkpointed | Restored) -> None:
        match event:
            case Delivered():
                message = _Message(event.producer, event.sequence)
                if message in self._facts.ranks:
                    self._delivered(event, message)
                    self._given.add(message)
            case AckSent(_, producer, sequence):
                self._ack_sent.add(_Message(producer, sequence))
            case AckDurable(_, producer, sequence):
                self._durable(_Message(producer, sequence))
            case Checkpointed() | Restored():
                self._broken("a checkpoint of a subscription that keeps acknowledgements")

    def expire(self, event: Expiring | ExpiryOver, index: int) -> None:
        """What had its receipt before does not come again; what was sent meanwhile may be gone."""
        if isinstance(event, Expiring):
            self._expiring = {
                message for message, since in self._facts.receipted.items() if since < index
            }
            return
        self._began = index
        if event.done:
            self._acked |= self._expiring

    def check_nothing_lost(self) -> None:
        lost = [
            message
            for message in self._facts.receipted
            if message in self._facts.ranks
            and not self._may_miss(message)
            and not self._has(message)
        ]
        if lost:
            first = ", ".join(map(str, lost[:3]))
            self._broken(f"{len(lost)} messages have a receipt and were not delivered: {first}")

    def _delivered(self, event: Delivered, message: _Message) -> None:
        if message in self._acked:
            self._broken(f"{event.consumer} was given {message} after its durable acknowledgement")

    def _durable(self, message: _Message) -> None:
        self._acked.add(message)

    def _has(self, message: _Message) -> bool:
        return message in self._given

    def _may_miss(self, message: _Message) -> bool:
        """It was published before the subscription began at the latest message."""
        return self._facts.published[message][0] < self._began

    def _broken(self, text: str) -> None:
        self._facts.broken.append(f"{self.name}: {text}")


class _Queue(_Subscription):
    """Each message on its own, and not before its time."""

    def _delivered(self, event: Delivered, message: _Message) -> None:
        super()._delivered(event, message)
        not_before = self._facts.not_before.get(message)
        if not_before is None or event.sent_at is None or event.sent_at >= not_before:
            return
        early = not_before - event.sent_at
        self._broken(f"{event.consumer} was given {message} {early:.3f} s before its time")


class _Ordered(_Subscription):
    """Parents before children."""

    def __init__(self, facts: _Facts, subscribed: Subscribed, index: int) -> None:
        super().__init__(facts, subscribed, index)
        self._opened: dict[int, int] = {}
        """Segments of which a descendant was opened: that descendant."""
        self._ancestors: dict[int, set[int]] = {}

    def _check_parents(self, event: Delivered, message: _Message) -> None:
        if not self._has(message) and event.segment in self._opened:
            child = self._opened[event.segment]
            self._broken(
                f"{event.consumer} was given {message} of segment {event.segment}"
                f" after messages of its child {child}"
            )
        if event.segment not in self._ancestors:
            self._ancestors[event.segment] = self._facts.ancestors(event.segment)
        for ancestor in self._ancestors[event.segment]:
            self._opened.setdefault(ancestor, event.segment)


class _Stream(_Ordered):
    def __init__(self, facts: _Facts, subscribed: Subscribed, index: int) -> None:
        super().__init__(facts, subscribed, index)
        self._last: dict[_Chain, int] = defaultdict(lambda: -1)
        self._settled: dict[_Chain, int] = defaultdict(int)
        """How many from the start of a chain an acknowledgement was sent for."""
        self._acked_through: dict[_Chain, int] = defaultdict(lambda: -1)

    def _delivered(self, event: Delivered, message: _Message) -> None:
        self._check_parents(event, message)
        chain, rank = self._facts.ranks[message]
        last = self._last[chain]
        self._last[chain] = rank
        if rank <= self._acked_through[chain]:
            through = self._facts.chains[chain][self._acked_through[chain]]
            self._broken(
                f"key {chain[1]}: {event.consumer} was given {message} after the durable"
                f" acknowledgement of {through}"
            )
        elif rank > last + 1:
            self._check_skipped(event, message, chain, range(last + 1, rank))
        elif rank <= last:
            self._check_skipped(event, message, chain, range(self._first_open(chain), rank))

    def _check_skipped(
        self, event: Delivered, message: _Message, chain: _Chain, ranks: range
    ) -> None:
        for rank in ranks:
            skipped = self._facts.chains[chain][rank]
            if skipped not in self._ack_sent and not self._may_miss(skipped):
                self._broken(f"key {chain[1]}: {event.consumer} was given {message}, not {skipped}")
                return

    def _first_open(self, chain: _Chain) -> int:
        messages = self._facts.chains[chain]
        while self._settled[chain] < len(messages):
            message = messages[self._settled[chain]]
            if message not in self._ack_sent and not self._may_miss(message):
                break
            self._settled[chain] += 1
        return self._settled[chain]

    def _durable(self, message: _Message) -> None:
        super()._durable(message)
        if message in self._facts.ranks:
            chain, rank = self._facts.ranks[message]
            self._acked_through[chain] = max(rank, self._acked_through[chain])


class _Checkpoints(_Ordered):
    """One consumer, or a group; each has read what it was given since it was last restored."""

    def __init__(self, facts: _Facts, subscribed: Subscribed, index: int) -> None:
        super().__init__(facts, subscribed, index)
        self._views: dict[str, set[_Message]] = defaultdict(set)
        self._taken: dict[bytes, frozenset[_Message]] = {}

    def take(self, event: Delivered | AckSent | AckDurable | Checkpointed | Restored) -> None:
        if isinstance(event, Checkpointed):
            self._taken[event.checkpoint] = frozenset(self._views[event.consumer])
        elif isinstance(event, Restored):
            self._restored(event)
        else:
            super().take(event)

    def _restored(self, event: Restored) -> None:
        self._opened.clear()
        if Checkpoint.from_bytes(event.checkpoint).kind is not CheckpointKind.REGULAR:
            self._views[event.consumer] = set()
        elif event.checkpoint in self._taken:
            self._views[event.consumer] = set(self._taken[event.checkpoint])
        else:
            self._broken(f"{event.consumer} was restored from a checkpoint that nobody took")

    def _delivered(self, event: Delivered, message: _Message) -> None:
        self._check_parents(event, message)
        view = self._views[event.consumer]
        if message in view:
            self._broken(f"{event.consumer} was given {message} again")
        view.add(message)
        chain, rank = self._facts.ranks[message]
        if rank:
            before = self._facts.chains[chain][rank - 1]
            if not self._has(before) and not self._may_miss(before):
                self._broken(f"key {chain[1]}: {event.consumer} was given {message}, not {before}")

    def _has(self, message: _Message) -> bool:
        return any(message in view for view in self._views.values())


def _ordered_or_queue(kind: Kind) -> type[_Subscription]:
    if kind is Kind.QUEUE:
        return _Queue
    return _Stream if kind is Kind.STREAM else _Checkpoints
