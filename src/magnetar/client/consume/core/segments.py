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
    """The decisions of a kind of consumer: which segments, made how."""

    def wanted(self) -> Mapping[SegmentKey, SegmentSpec]:
        """The segments that should be consumed now."""
        ...

    def make(self, key: SegmentKey, spec: SegmentSpec) -> SegmentConsumer:
        """Make the consumer of one segment."""
        ...

    def left(self, key: SegmentKey, segment: SegmentConsumer) -> None:
        """A consumer is over."""
        ...

    def failed(self, segment: SegmentConsumer, error: MagnetarError) -> None:
        """A segment cannot be consumed: it is not wanted any more."""
        ...

    def tolerates(self, segment: SegmentConsumer, error: MagnetarError) -> bool:
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
        # So that the first look comes without waiting for a change.
        self.stirred.advance()
        self.spawn(self._keep_in_step(), "reconcile")
        try:
            async with asyncio.timeout(self._open_timeout):
                # Invariant 3: what the first look wanted, and only that; segments that come later
                # open by themselves.
                await self._reconciled.past(0)
                for segment in list(self.present.values()):
                    await self._until_subscribed(segment)
        except TimeoutError as error:
            troubles = [str(each.trouble) for each in self.present.values() if each.trouble]
            cause = f": {troubles[0]}" if troubles else ""
            text = f"{self.name} was not open within {self._open_timeout} s{cause}"
            raise DeadlineExceeded(text) from error

    async def _until_subscribed(self, segment: SegmentConsumer) -> None:
        try:
            await segment.until_subscribed()
        except MagnetarError as error:
            # Released: it is not wanted any more, or not in this way.
            if not segment.is_releasing and not self._plan.tolerates(segment, error):
                raise

    async def _stop(self) -> None:
        present = list(self.present.values())
        # All at once, then each is waited for: their last acknowledgements go side by side.
        for segment in present:
            segment.release(wait=False)
        for segment in present:
            while not segment.has_ended:
                await segment.ends.past(segment.ends.version)

    def follow(self, changes: Signal, what: str) -> asyncio.Task[None]:
        """Look again whenever this signal advances, until it is closed with `AlreadyClosed`."""
        return self.spawn(self._forward(changes), what)

    async def _forward(self, changes: Signal) -> None:
        version = changes.version
        while True:
            try:
                version = await changes.past(version)
            # A topic that is consumed no more: nothing of it will change.
            except AlreadyClosed:
                return
            self.stirred.advance()

    async def _keep_in_step(self) -> None:
        version = -1
        while True:
            version = await self.stirred.past(version)
            # While it stops nothing may be opened; whoever waits for the first look goes on all the
            # same.
            if not self.stopping:
                self._reconcile()
            self._reconciled.advance()

    def _reconcile(self) -> None:
        wanted = self._plan.wanted()
        # Not wanted, or with another spec (other entry buckets, another topic under the number): it
        # goes, and comes back only after it is over (invariant 1).
        for key, segment in self.present.items():
            if wanted.get(key) != segment.spec:
                segment.release()
        for key, spec in wanted.items():
            if key not in self.present:
                # In `present` before its task runs: the next look must find it.
                segment = self.present[key] = self._plan.make(key, spec)
                self.spawn(self._run(key, segment), f"segment {key[1]} of {key[0]}")
                self.spawn(self._notice(segment), f"end of segment {key[1]} of {key[0]}")

    async def _run(self, key: SegmentKey, segment: SegmentConsumer) -> None:
        try:
            await segment.run()
            # Before it leaves `present`: who is told looks there for what failed.
            if segment.failure is not None:
                self._plan.failed(segment, segment.failure)
        except Exception as error:
            # A bug of ours: the application must hear, or its receive would wait forever.
            broken = f"the consumer of {segment.wire_topic} crashed: {error!r}"
            self._plan.failed(segment, InvariantBroken(broken))
            raise
        finally:
            if self.present.get(key) is segment:
                del self.present[key]
            self._plan.left(key, segment)
            self.stirred.advance()

    async def _notice(self, segment: SegmentConsumer) -> None:
        """Look again once its topic has reached its end."""
        while not segment.reached_end and not segment.has_ended:
            await segment.ends.past(segment.ends.version)
        self.stirred.advance()
        if segment.reached_end:
            # A topic that is migrated is terminated first; its successor stands in the next layout.
            await asyncio.sleep(SUCCESSOR_S)
            segment.end_is_final = True
            segment.receive_queue.arrivals.advance()
