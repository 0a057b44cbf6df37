"""Pure: which segment of a topic, or which partition, a message goes to.

Owns: `Router`, the routing of one layout, and `RoundRobin`, the order of messages without a key.

Invariants:
1. A key goes to the segment that every other client of the same generation sends it to: the high
   half of its hash chooses (`Routing.RING`), or with the first preview of version 5 the low half
   (`Routing.PREVIEW`). The two must not write to one topic.
2. If every active segment is a regular topic, the choice is that of version 4: hash modulo count,
   over the segments in the order of their ids, which are the partitions' numbers.
3. Messages without a key take the segments in ring order, one segment for the time in which a
   batch fills, so that batches are full; each producer begins at a place of its own.
"""

from __future__ import annotations

from base64 import b64encode
from enum import Enum

from magnetar.client.message.layouts import is_regular
from magnetar.errors import NotAllowed
from magnetar.model.hashing import bucket_hash, key_hash, partition_of
from magnetar.model.segments import Segment, SegmentLayout


class Routing(Enum):
    """The half of a key's hash that chooses its segment."""

    RING = "ring"
    """The high half: Magnetar, and Apache Pulsar 5 after its first preview."""
    PREVIEW = "m1"
    """The low half: Apache Pulsar 5.0.0-M1."""


class Router:
    """Routes by one layout; a new layout gets a new router."""

    __slots__ = ("_by_id", "_layout", "_preview", "is_legacy")

    def __init__(self, layout: SegmentLayout, routing: Routing = Routing.RING) -> None:
        # Nothing takes messages any more, as in a topic that was terminated.
        if not layout.active:
            raise NotAllowed(f"the topic has no active segment at epoch {layout.epoch}")
        self.is_legacy = is_regular(layout)
        """It is a regular topic, whose partitions are called segments."""
        self._layout = layout
        self._preview = routing is Routing.PREVIEW
        # Ids of a regular topic's segments are its partitions' numbers; the ring has another order.
        self._by_id = sorted(layout.active, key=lambda segment: segment.segment_id)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The active ones, in ring order."""
        return self._layout.active

    def for_key(self, key: str | bytes) -> Segment:
        """The segment of every message with this key."""
        if self.is_legacy:
            # Version 4 knows bytes as a key only in their text form.
            text = key if isinstance(key, str) else b64encode(key)
            return self._by_id[partition_of(key_hash(text), len(self._by_id))]
        return self.for_hash(key_hash(key))

    def for_hash(self, hash32: int) -> Segment:
        """The segment of every key with this hash, if it is no regular topic."""
        return self._layout.route(bucket_hash(hash32) << 16 if self._preview else hash32)

    def for_turn(self, turn: int) -> Segment:
        """The segment of a message without a key."""
        active = self._layout.active
        return active[turn % len(active)]


class RoundRobin:
    """The turn of messages without a key: it moves on when a batch is full, or its time is over."""

    __slots__ = ("_messages", "_messages_max", "_next_at", "_turn", "_window_s")

    def __init__(self, *, start: int, window_s: float, messages_max: int) -> None:
        self._turn = start
        self._window_s = window_s
        self._messages_max = messages_max
        self._messages = 0
        # So that the first message begins a window.
        self._next_at = float("-inf")

    def next(self, now: float, count: int = 1) -> int:
        """The turn of the next messages; `now` is any clock that does not go back."""
        if self._messages >= self._messages_max or now >= self._next_at:
            self._turn += 1
            self._messages = 0
            self._next_at = now + self._window_s
        self._messages += count
        return self._turn


def entry_bucket_hash(key: str | bytes | None, ordering_key: bytes | None = None) -> int:
    """Where a message stands among the entry buckets of its segment: 0 without a key."""
    chosen = key if ordering_key is None else ordering_key
    return 0 if chosen is None else bucket_hash(key_hash(chosen))
