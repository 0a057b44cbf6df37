"""Rates over windows, and sums over partitions."""

from __future__ import annotations

import asyncio

from magnetar.broker.policy.stats import (
    WINDOW_S,
    PublisherStats,
    Rate,
    SubscriptionStats,
    TopicStats,
    summed,
    time_text,
)
from magnetar.runtime.clock import LoopClock
from magnetar.testing.virtual.virtual_time import run
from tests.unit.broker.world import EPOCH_MS


def test_a_rate_is_that_of_the_last_window() -> None:
    async def main() -> None:
        rate = Rate(LoopClock(EPOCH_MS))
        assert rate.of(0) == 0
        await asyncio.sleep(10)
        assert rate.of(50) == 5
        await asyncio.sleep(WINDOW_S - 10)
        assert rate.of(120) == 2
        await asyncio.sleep(1)
        assert rate.of(10_000) == 2
        await asyncio.sleep(WINDOW_S)
        assert rate.of(120) == 0

    run(main())


def test_partitions_add_up() -> None:
    def part(name: str, backlog: int) -> TopicStats:
        publisher = PublisherStats(producer_id=1, producer_name=name, access_mode="Shared")
        return TopicStats(
            msg_in_counter=10,
            bytes_in_counter=100,
            publishers=[publisher],
            subscriptions={"s": SubscriptionStats(type="Shared", msg_backlog=backlog)},
        )

    total = summed([part("a", 1), part("b", 2), TopicStats()])
    assert (total.msg_in_counter, total.bytes_in_counter) == (20, 200)
    assert [each.producer_name for each in total.publishers] == ["a", "b"]
    assert total.subscriptions["s"].msg_backlog == 3
    assert total.subscriptions["s"].type == "Shared"


def test_times_are_written_in_utc() -> None:
    assert time_text(1_700_000_000_123) == "2023-11-14T22:13:20.123Z"
