"""The retention of messages that no subscription needs, over all segments of a scalable topic.

Owns: `RetentionShares`, the part of the disk that the topics of one broker may fill by default;
`TopicRetention`, which measures the segments of one topic; and the pure `fair_share`.

Invariants:
1. A size is that of the whole topic. Sealed segments go first, the oldest before all others, each
   once as much as is to be kept is there without it; active ones are trimmed only when no sealed
   one is left, each to the same size.
2. All topics that keep by the broker's default may together fill so much of the disk and no more:
   who keeps little is never cut, and the larger ones are cut to one size.
3. Nothing goes here that somebody needs: whether a segment is spent says the controller, and what
   cursors and transactions hold is not trimmed.

Relies on: the controller, which looks at intervals; the broker that has a segment trims it by age.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from magnetar.broker.policy.effective import TopicPolicies
from magnetar.managed_ledger.ledger_list import MS_PER_SECOND, Retention
from magnetar.model.names import TopicName
from magnetar.model.segments import Segment, SegmentLayout
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.scalable.layout.segments import Kept, SegmentHost
from magnetar.scalable.records import segment_topic

# The share is a sum over all topics: ten thousand of them must not each make it anew.
_SHARE_SECONDS: Final = 10.0

_CROWDED: Final = 2
"""By default sealed segments go early when a topic has this part of those it may have."""


def fair_share(sizes: Iterable[int], budget: int) -> int:
    """The largest size to which all can be cut so that their sum is within the budget."""
    ordered = sorted(sizes)
    left = budget
    for number, size in enumerate(ordered):
        share = left // (len(ordered) - number)
        # This one and all that follow are larger than what is left for each.
        if size > share:
            return share
        left -= size
    return budget


class RetentionShares:
    """The broker's default retention, and how much of its size each topic may have."""

    def __init__(self, default: Retention, clock: Clock) -> None:
        self.default = default
        """Of one topic that is alone; its size is that of all topics together."""
        self._clock = clock
        self._sizes: dict[TopicName, int] = {}
        self._total = 0
        self._share: int | None = default.size_bytes
        self._made_at = -_SHARE_SECONDS

    @property
    def in_force(self) -> Retention:
        """What holds for each topic at present."""
        return self.default._replace(size_bytes=self._share)

    def of(self, topic: TopicName, size: int) -> Retention:
        """What holds for a topic that keeps so much."""
        self._total += size - self._sizes.get(topic, 0)
        self._sizes[topic] = size
        budget = self.default.size_bytes
        now = self._clock.monotonic()
        # All fit, as a rule. If they do not, the sum is made now and then (invariant 2).
        if budget is None or self._total <= budget:
            self._share = budget
        elif now - self._made_at >= _SHARE_SECONDS:
            self._share = fair_share(self._sizes.values(), budget)
            self._made_at = now
        return self.in_force

    def forget(self, topic: TopicName) -> None:
        """The topic keeps nothing by default any more, or is gone from this broker."""
        self._total -= self._sizes.pop(topic, 0)


class TopicRetention:
    """The segments of one topic, as they were last measured."""

    def __init__(
        self,
        topic: TopicName,
        host: SegmentHost,
        shares: RetentionShares,
        clock: Clock,
        limits: Limits,
    ) -> None:
        self._topic = topic
        self._host = host
        self._shares = shares
        self._clock = clock
        self._limits = limits
        self.sealed_seconds = limits.scalable_sealed_seconds
        """How long a sealed segment is kept at least."""
        self._retention = Retention(None, None)
        self._is_default = False
        self._kept: dict[int, Kept] = {}
        """By segment; a sealed one is measured once, for it changes no more."""
        self._now_ms = 0

    async def measure(self, layout: SegmentLayout, policies: TopicPolicies) -> None:
        """Look how much each segment holds, and what is in force."""
        kept = {}
        for segment in layout.segments.values():
            number = segment.segment_id
            known = None if segment.is_active else self._kept.get(number)
            if known is None or not known.is_final:
                known = await self._host.kept(segment_topic(self._topic, segment))
            kept[number] = known
        self._kept = kept
        self._now_ms = self._clock.now_ms()
        self._is_default = policies.retention_from == "broker"
        if self._is_default:
            self._retention = self._shares.of(self._topic, self._total())
        else:
            self._shares.forget(self._topic)
            self._retention = policies.retention

    def forget(self) -> None:
        """Count the topic no more: nobody looks after it here."""
        self._shares.forget(self._topic)

    def lets_go(self, segment: Segment, layout: SegmentLayout) -> bool:
        """Whether a sealed segment may go, if nobody needs it."""
        age_ms = self._now_ms - segment.sealed_at_ms
        seconds, size_bytes = self._retention
        mine = self._kept[segment.segment_id].size_bytes
        is_old = age_ms >= self.sealed_seconds * MS_PER_SECOND
        # Case 1: more is kept without it than has to be. At once, for the disk may be full in the
        # hour in which sealed segments stay; unless nothing is kept at all: then that hour decides.
        if size_bytes is not None and self._total() - mine >= size_bytes:
            return is_old or size_bytes > 0
        if not is_old:
            return False
        # Case 2: there is nothing to keep, or by default, too many segments have gathered: the
        # topic could not be split any more.
        crowd = self._limits.scalable_total_segments_max // _CROWDED
        if not mine or (self._is_default and len(layout.segments) > crowd):
            return True
        # Case 3: its time is over.
        return seconds is not None and age_ms >= seconds * MS_PER_SECOND

    def gone(self, segment_id: int) -> None:
        """A segment will be removed: others are judged without it."""
        del self._kept[segment_id]

    async def trim(self, layout: SegmentLayout) -> None:
        """Let active segments that hold too much, or hold it for too long, drop what nobody needs.

        Those that are loaded drop what is too old by themselves.
        """
        # Kept for nobody: whoever has a segment loaded looks often enough.
        if self._retention.size_bytes == 0:
            return
        active = [each for each in layout.active if each.segment_id in self._kept]
        seconds, size_bytes = self._retention
        # Invariant 1: what is newer than a sealed segment stays as long as that.
        if size_bytes is not None and len(active) == len(self._kept):
            sizes = [self._kept[each.segment_id].size_bytes for each in active]
            size_bytes = fair_share(sizes, size_bytes)
        before_ms = 0 if seconds is None else self._now_ms - round(seconds * MS_PER_SECOND)
        for segment in active:
            kept = self._kept[segment.segment_id]
            is_large = size_bytes is not None and kept.size_bytes > size_bytes
            # Not loaded: nobody else looks whether it is time.
            is_old = not kept.loaded and kept.size_bytes > 0 and kept.oldest_ms < before_ms
            if is_large or is_old:
                name = segment_topic(self._topic, segment)
                await self._host.trim(name, Retention(seconds, size_bytes))

    def _total(self) -> int:
        return sum(each.size_bytes for each in self._kept.values())
