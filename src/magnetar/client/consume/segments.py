"""The segments of one consumer, kept in step with what it should have.

Owns: `ConsumedSegments`: it opens a consumer on each segment that is wanted, and releases those
that are not.

Invariants:
1. There is at most one consumer of a segment at a time: one that is wanted again, or in another
   way, is opened only after the former one is over.
2. A consumer that is released stays until what it handed out is settled (or its time is over).
3. `start` returns once everything that was wanted at first is subscribed, or raises why it cannot
   be.

Relies on: `SegmentPlan`, which says what is wanted, and advances `stirred` when that may have
changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, Protocol, TypeAlias

from magnetar.client.consume.segment.segment_consumer import SegmentConsumer, SegmentSpec
from magnetar.errors import AlreadyClosed, DeadlineExceeded, InvariantBroken, MagnetarError
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal

SegmentKey: TypeAlias = tuple[str, int]
"""A topic, as the application knows it, and a segment of it."""


SUCCESSOR_S: Final = 5.0
"""A topic that was terminated has this long to get successors: it may become a scalable one."""


class SegmentPlan(Protocol):
    """What a kind of consumer wants."""

    def wanted(self) -> Mapping[SegmentKey, SegmentSpec]:
        """The segments that should be consumed now."""
        ...

    def make(self, key: SegmentKey, spec: SegmentSpec) -> SegmentConsumer: ...

    def left(self, key: SegmentKey, feed: SegmentConsumer) -> None:
        """A consumer is over."""
        ...

    def failed(self, feed: SegmentConsumer, error: MagnetarError) -> None:
        """A segment cannot be consumed: it is not wanted any more."""
        ...

    def tolerates(self, feed: SegmentConsumer, error: MagnetarError) -> bool:
        """Whether the others can be consumed without this one."""
        ...


class ConsumedSegments(Service):
    """All segments of one consumer."""

    def __init__(
        self, plan: SegmentPlan, name: str, *, open_timeout: float, stop_seconds: float
    ) -> None:
        super().__init__(name, stop_seconds=stop_seconds)
        self.present: dict[SegmentKey, SegmentConsumer] = {}
        self.stirred = Signal()
        """Advance it when what is wanted may have changed."""
        self._plan = plan
        self._open_timeout = open_timeout
        self._reconciled = Signal()

    async def _start(self) -> None:
        self.stirred.advance()
        self.spawn(self._keep_in_step(), "reconcile")
        try:
            async with asyncio.timeout(self._open_timeout):
                await self._reconciled.past(0)
                for feed in list(self.present.values()):
                    await self._until_subscribed(feed)
        except TimeoutError as error:
            troubles = [str(feed.trouble) for feed in self.present.values() if feed.trouble]
            cause = f": {troubles[0]}" if troubles else ""
            text = f"{self.name} was not open within {self._open_timeout} s{cause}"
            raise DeadlineExceeded(text) from error

    async def _until_subscribed(self, feed: SegmentConsumer) -> None:
        try:
            await feed.until_subscribed()
        except MagnetarError as error:
            # Released: it is not wanted any more, or not in this way.
            if not feed.is_releasing and not self._plan.tolerates(feed, error):
                raise

    async def _stop(self) -> None:
        feeds = list(self.present.values())
        for feed in feeds:
            feed.release(wait=False)
        for feed in feeds:
            while not feed.has_ended:
                await feed.ends.past(feed.ends.version)

    def follow(self, changes: Signal, what: str) -> asyncio.Task[None]:
        """Look again whenever this signal advances, until it is closed with `AlreadyClosed`."""
        return self.spawn(self._forward(changes), what)

    async def _forward(self, changes: Signal) -> None:
        version = changes.version
        while True:
            try:
                version = await changes.past(version)
            except AlreadyClosed:
                return
            self.stirred.advance()

    async def _keep_in_step(self) -> None:
        version = -1
        while True:
            version = await self.stirred.past(version)
            if not self.stopping:
                self._reconcile()
            self._reconciled.advance()

    def _reconcile(self) -> None:
        wanted = self._plan.wanted()
        for key, feed in self.present.items():
            if wanted.get(key) != feed.spec:
                feed.release()
        for key, spec in wanted.items():
            if key not in self.present:
                feed = self.present[key] = self._plan.make(key, spec)
                self.spawn(self._run(key, feed), f"segment {key[1]} of {key[0]}")
                self.spawn(self._notice(feed), f"end of segment {key[1]} of {key[0]}")

    async def _run(self, key: SegmentKey, feed: SegmentConsumer) -> None:
        try:
            await feed.run()
        except Exception as error:
            broken = f"the consumer of {feed.wire_topic} crashed: {error!r}"
            self._plan.failed(feed, InvariantBroken(broken))
            raise
        finally:
            if self.present.get(key) is feed:
                del self.present[key]
            self._plan.left(key, feed)
            self.stirred.advance()

    async def _notice(self, feed: SegmentConsumer) -> None:
        """Look again once its topic has reached its end."""
        while not feed.reached_end and not feed.has_ended:
            await feed.ends.past(feed.ends.version)
        self.stirred.advance()
        if feed.reached_end:
            await asyncio.sleep(SUCCESSOR_S)
            feed.end_is_final = True
            feed.home.receive_queue.arrivals.advance()
