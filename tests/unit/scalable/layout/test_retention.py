"""The shares of the disk that topics have, and which segments retention lets go."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.policy.effective import TopicPolicies, effective
from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.values import RetentionPolicies
from magnetar.managed_ledger.ledger_list import KEEP_NOTHING, Retention
from magnetar.model.names import TopicName
from magnetar.model.segments import SegmentLayout
from magnetar.runtime.limits import Limits
from magnetar.scalable.layout.retention import RetentionShares, TopicRetention, fair_share
from magnetar.scalable.layout.segments import Kept

TOPIC = TopicName.parse("topic://t/n/orders")
OTHER = TopicName.parse("topic://t/n/others")
HOUR_MS = 3600 * 1000
DAY_S = 24 * 3600.0


class Clock:
    """A clock that stands where it is put."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now_ms(self) -> int:
        return round(self.seconds * 1000)

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class Host:
    """The segments of one topic, by their size."""

    def __init__(self, sizes: dict[int, int], *, loaded: bool = True, final: bool = True) -> None:
        self.sizes = sizes
        self.loaded = loaded
        self.final = final
        self.asked: list[int] = []
        self.trimmed: dict[int, Retention] = {}

    async def kept(self, name: TopicName) -> Kept:
        number = _number(name)
        self.asked.append(number)
        return Kept(self.sizes[number], 0, self.loaded, self.final)

    async def trim(self, name: TopicName, retention: Retention) -> None:
        self.trimmed[_number(name)] = retention


def _number(name: TopicName) -> int:
    assert name.descriptor is not None
    return name.descriptor.segment_id


def policies(**given: int) -> TopicPolicies:
    own = RetentionPolicies(given["minutes"], given["megabytes"])
    return effective(Policies(retention_policies=own), is_segment=True)


def by_default(default: Retention) -> TopicPolicies:
    return effective(Policies(), is_segment=True, segment_retention=default)


def chain(sealed_ms: int = 0) -> SegmentLayout:
    """Segment 0 was split into 1 and 2, which were merged into 3."""
    layout = SegmentLayout.create(1, now_ms=0)
    layout = layout.split(0, now_ms=sealed_ms)
    return layout.merge((1, 2), now_ms=sealed_ms)


def judged(
    layout: SegmentLayout, host: Host, found: TopicPolicies, shares: RetentionShares, clock: Clock
) -> tuple[TopicRetention, list[int]]:
    """What may go, oldest first."""
    host_as: Any = host
    retention = TopicRetention(TOPIC, host_as, shares, clock, Limits())

    async def look() -> list[int]:
        await retention.measure(layout, found)
        gone = []
        for segment in layout.segments.values():
            if not segment.is_active and retention.lets_go(segment, layout):
                gone.append(segment.segment_id)
                retention.gone(segment.segment_id)
        await retention.trim(layout)
        return gone

    return retention, asyncio.run(look())


@given(st.lists(st.integers(0, 1000), max_size=8), st.integers(0, 3000))
def test_a_fair_share_is_the_largest_that_fits(sizes: list[int], budget: int) -> None:
    share = fair_share(sizes, budget)
    assert sum(min(size, share) for size in sizes) <= budget
    if share < max(sizes, default=0):
        assert sum(min(size, share + 1) for size in sizes) > budget


def test_small_topics_are_never_cut_and_large_ones_to_one_size() -> None:
    clock = Clock()
    shares = RetentionShares(Retention(DAY_S, 1000), clock)
    assert shares.of(TOPIC, 900).size_bytes == 1000
    assert shares.of(OTHER, 300).size_bytes == 700
    assert shares.in_force == Retention(DAY_S, 700)
    clock.seconds += 60
    assert shares.of(TOPIC, 600).size_bytes == 1000  # all fit again
    shares.forget(TOPIC)
    shares.forget(TOPIC)
    assert shares.of(OTHER, 1000).size_bytes == 1000


def test_the_share_of_ten_thousand_topics_is_made_now_and_then() -> None:
    clock = Clock()
    shares = RetentionShares(Retention(DAY_S, 1), clock)
    shares.of(TOPIC, 8)
    first = shares.in_force
    assert shares.of(OTHER, 8) == first
    clock.seconds += 11
    assert shares.of(OTHER, 8).size_bytes == 0


def test_without_retention_the_sealed_seconds_alone_count() -> None:
    clock, host = Clock(), Host({0: 5, 1: 5, 2: 5, 3: 5})
    shares = RetentionShares(KEEP_NOTHING, clock)
    clock.seconds = 3599.0
    assert judged(chain(), host, by_default(KEEP_NOTHING), shares, clock)[1] == []
    clock.seconds = 3600.0
    assert judged(chain(), host, by_default(KEEP_NOTHING), shares, clock)[1] == [0, 1, 2]
    assert host.trimmed == {}  # whoever has it loaded does that
    explicit = policies(minutes=0, megabytes=0)
    assert judged(chain(), host, explicit, shares, clock)[1] == [0, 1, 2]


def test_time_keeps_what_has_something_in_it() -> None:
    clock, host = Clock(), Host({0: 5, 1: 0, 2: 5, 3: 5})
    default = Retention(DAY_S, 1000)
    shares = RetentionShares(default, clock)
    clock.seconds = DAY_S - 1
    assert judged(chain(), host, by_default(default), shares, clock)[1] == [1]
    clock.seconds = DAY_S
    assert judged(chain(), host, by_default(default), shares, clock)[1] == [0, 1, 2]


def test_a_size_takes_the_oldest_first_and_active_ones_last() -> None:
    clock, host = Clock(), Host({0: 400, 1: 400, 2: 400, 3: 700})
    default = Retention(DAY_S, 1000)
    shares = RetentionShares(default, clock)
    # At once, though they were sealed a moment ago; 700 and 400 are left.
    _, gone = judged(chain(1000 * 1000), host, by_default(default), shares, clock)
    assert gone == [0, 1]
    assert host.trimmed == {}  # what is newer than a sealed segment stays
    host.sizes = {0: 0, 1: 0, 2: 0, 3: 1700}
    clock.seconds += 3600
    _, gone = judged(chain(1000 * 1000), host, by_default(default), shares, clock)
    assert gone == [0, 1, 2]
    assert host.trimmed == {3: default}


def test_active_segments_are_trimmed_to_the_same_size() -> None:
    layout = SegmentLayout.create(3, now_ms=0)
    clock, host = Clock(), Host({0: 100, 1: 900, 2: 900})
    default = Retention(DAY_S, 1000)
    shares = RetentionShares(default, clock)
    judged(layout, host, by_default(default), shares, clock)
    assert host.trimmed == {1: Retention(DAY_S, 450), 2: Retention(DAY_S, 450)}


def test_what_nobody_has_loaded_is_trimmed_when_its_time_is_over() -> None:
    layout = SegmentLayout.create(1, now_ms=0)
    clock, host = Clock(), Host({0: 100}, loaded=False)
    default = Retention(DAY_S, 1000)
    shares = RetentionShares(default, clock)
    judged(layout, host, by_default(default), shares, clock)
    assert host.trimmed == {}
    clock.seconds = DAY_S + 1
    judged(layout, host, by_default(default), shares, clock)
    assert host.trimmed == {0: default}


def test_many_sealed_segments_go_early_by_default_only() -> None:
    clock, host = Clock(), Host({0: 5, 1: 5, 2: 5, 3: 5})
    clock.seconds = 3600.0
    default = Retention(DAY_S, 1000)
    few = Limits().override({"scalable_total_segments_max": 4})
    host_as: Any = host
    for found, expected in (
        (by_default(default), True),
        (policies(minutes=-1, megabytes=-1), False),
    ):
        shares = RetentionShares(default, clock)
        retention = TopicRetention(TOPIC, host_as, shares, clock, few)
        asyncio.run(retention.measure(chain(), found))
        assert retention.lets_go(chain().segments[0], chain()) is expected


def test_a_sealed_segment_is_measured_once() -> None:
    clock, host = Clock(), Host({0: 5, 1: 5, 2: 5, 3: 5})
    host_as: Any = host
    shares = RetentionShares(KEEP_NOTHING, clock)
    retention = TopicRetention(TOPIC, host_as, shares, clock, Limits())
    for _ in range(2):
        asyncio.run(retention.measure(chain(), by_default(KEEP_NOTHING)))
    assert host.asked == [0, 1, 2, 3, 3]
