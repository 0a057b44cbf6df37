"""The server's own back-pressure: closed when half the queue is full, open again at a quarter."""

from __future__ import annotations

import asyncio

from magnetar.runtime.limits import Limits
from magnetar.runtime.signal import Signal
from magnetar.server.publish_throttle import PublishThrottle
from magnetar.testing.virtual.virtual_time import run
from tests.unit.server.link import Link

LIMITS = Limits(journal_queue_bytes=1000)


class Queue:
    def __init__(self) -> None:
        self.progress = Signal()
        self.queued_bytes = 0

    def drain_to(self, size: int) -> None:
        self.queued_bytes = size
        self.progress.advance()


def test_it_closes_at_half_and_opens_at_a_quarter() -> None:
    async def scene() -> None:
        queue, changes = Queue(), list[bool]()
        publish_throttle = PublishThrottle(
            queue, LIMITS, lambda: changes.append(publish_throttle.is_open)
        )
        reopening = asyncio.create_task(publish_throttle.reopen_when_drained())
        for _ in range(2):
            queue.queued_bytes = 499
            assert publish_throttle.has_room()
            queue.queued_bytes = 500
            assert not publish_throttle.has_room()
            queue.drain_to(251)
            await asyncio.sleep(1)
            assert not publish_throttle.has_room()
            queue.drain_to(250)
            await asyncio.sleep(1)
            assert publish_throttle.has_room()
        assert changes == [False, True, False, True]
        reopening.cancel()

    run(scene())


def test_only_connections_with_producers_are_held() -> None:
    async def scene() -> None:
        publisher, other = Link(), Link()
        other.session.context = publisher.context
        publisher.context.admit(other.session)
        await publisher.connect()
        await other.connect()
        publisher.session.producers[1] = object()  # type: ignore[assignment]
        publish_throttle = publisher.context.publish_throttle
        publish_throttle.is_open = False
        publisher.send("PING")
        other.send("PING")
        assert not publisher.wire.is_read
        assert other.wire.is_read
        publish_throttle.is_open = True
        publisher.session.judge_reading()
        assert publisher.wire.is_read
        del publisher.session.producers[1]
        await publisher.close()
        await other.close()

    run(scene())
