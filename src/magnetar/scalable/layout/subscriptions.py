"""The durable subscriptions of a scalable topic, whatever the consumers.

Owns: `Subscriptions`, by which a topic's controller gives every segment the cursors it is to have,
and `SubscriptionDesk`, where a broker asks for one on behalf of a consumer.

Invariants:
1. A subscription is recorded before any of its cursors exists, and is established once every
   segment of the layout has one. No consumer is let in before that.
2. Only the controller makes and drops cursors of the whole topic, in the same coroutine in which it
   changes the layout: a subscription and a layout change never miss each other.
3. A new subscription begins, on every segment there is, where its first consumer asked: at the
   earliest message, or behind the last one at that moment. Segments made later are read whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from msgspec.structs import replace

from magnetar.errors import DeadlineExceeded, ServiceNotReady
from magnetar.model.names import TopicName
from magnetar.model.segments import SegmentLayout
from magnetar.runtime.clock import Clock
from magnetar.scalable.layout.segments import CursorFound, CursorWanted, SegmentHost
from magnetar.scalable.records import (
    DrainedRecord,
    StartPosition,
    SubscriptionKind,
    SubscriptionRecord,
    drained_key,
    segment_topic,
    subscription_key,
)
from magnetar.scalable.store import ScalableStore

_LOOK_SECONDS: Final = 1.0
"""Between two looks at a record, should its watch be late."""


class Subscriptions:
    """The subscriptions of one topic, for its controller."""

    def __init__(self, topic: TopicName, store: ScalableStore, host: SegmentHost) -> None:
        self._topic = topic
        self._store = store
        self._host = host

    async def all(self) -> list[SubscriptionRecord]:
        """Read all subscriptions as they are stored now."""
        return await self._store.all(self._topic, "sub", SubscriptionRecord)

    async def keep(self, layout: SegmentLayout) -> None:
        """Establish what was asked for, and end what is to be deleted."""
        for record in await self.all():
            # A deletion goes first, also of one that was never established: its
            # name may be wanted anew.
            if record.deleting:
                await self._end(record, layout)
            elif not record.established:
                await self._establish(record, layout)

    async def end(self, name: str, layout: SegmentLayout) -> None:
        """Delete a subscription from every segment."""
        key = subscription_key(self._topic, name)
        # Marked first: after a crash in between the next look goes on with it.
        marked = await self._store.change(key, SubscriptionRecord, _marked)
        if marked is not None:
            await self._end(marked, layout)

    async def record_copied(self, cursor: CursorFound, now_ms: int) -> None:
        """A subscription that a migrated topic brings along; its cursors there stay."""
        wanted = SubscriptionRecord(
            name=cursor.name,
            kind=cursor.kind,
            position="earliest",
            created_ms=now_ms,
            established=True,
            properties=dict(cursor.properties),
        )
        key = subscription_key(self._topic, cursor.name)
        # A repeated migration step finds it there, and leaves it as it is.
        await self._store.change(key, SubscriptionRecord, lambda present: present or wanted)

    async def _establish(self, record: SubscriptionRecord, layout: SegmentLayout) -> None:
        wanted = [CursorWanted(record.name, record.position, record.properties)]
        # Every segment, also sealed ones: at "earliest" it reads all that is kept. The record comes
        # last, so a crash in between only repeats this.
        for segment in layout.segments.values():
            await self._host.add_cursors(segment_topic(self._topic, segment), wanted)

        def established(present: SubscriptionRecord | None) -> SubscriptionRecord | None:
            # Should it be deleted meanwhile: `deleting` stays in it, and the next look ends it.
            return None if present is None else replace(present, established=True)

        key = subscription_key(self._topic, record.name)
        await self._store.change(key, SubscriptionRecord, established)

    async def _end(self, record: SubscriptionRecord, layout: SegmentLayout) -> None:
        # Cursors, marks, then the record: whoever waits for its end sees nothing left of it.
        for segment in layout.segments.values():
            await self._host.drop_cursor(segment_topic(self._topic, segment), record.name)
        for mark in await self._store.all(self._topic, "drained", DrainedRecord):
            if mark.group == record.name:
                key = drained_key(self._topic, mark.segment_id, mark.group)
                await self._store.change(key, DrainedRecord, lambda _: None)
        key = subscription_key(self._topic, record.name)
        await self._store.change(key, SubscriptionRecord, lambda _: None)


class SubscriptionDesk:
    """The desk at which any broker asks for a subscription of any topic."""

    def __init__(self, store: ScalableStore, clock: Clock, *, wait_seconds: float) -> None:
        self._store = store
        self._clock = clock
        self._wait_seconds = wait_seconds

    async def get(self, topic: TopicName, name: str) -> SubscriptionRecord | None:
        return await self._store.get(subscription_key(topic, name), SubscriptionRecord)

    async def ensure(
        self,
        topic: TopicName,
        name: str,
        kind: SubscriptionKind,
        position: StartPosition,
        properties: Mapping[str, str] | None = None,
    ) -> bool:
        """Return once the subscription is established; whether it was not there before."""
        wanted = SubscriptionRecord(
            name=name,
            kind=kind,
            position=position,
            created_ms=self._clock.now_ms(),
            properties=dict(properties or {}),
        )
        key = subscription_key(topic, name)
        # For the answer alone: a race of two first consumers may tell both that it is new.
        before = await self._store.get(key, SubscriptionRecord)

        async def is_established() -> bool:
            # Again and again: one that was being deleted is made anew once it is gone.
            found = await self._store.change(
                key, SubscriptionRecord, lambda present: present or wanted
            )
            return found is not None and found.established and not found.deleting

        await self._until(topic, name, is_established)
        return before is None

    async def delete(self, topic: TopicName, name: str) -> bool:
        """Return once no segment has the subscription; False: there was none."""
        key = subscription_key(topic, name)
        if await self._store.get(key, SubscriptionRecord) is None:
            return False

        await self._store.change(key, SubscriptionRecord, _marked)

        async def is_gone() -> bool:
            found = await self._store.get(key, SubscriptionRecord)
            # Not deleting: gone, and somebody has asked for it anew in the meantime.
            return found is None or not found.deleting

        await self._until(topic, name, is_gone)
        return True

    async def _until(
        self, topic: TopicName, name: str, holds: Callable[[], Awaitable[bool]]
    ) -> None:
        key = subscription_key(topic, name)
        try:
            # Watch first, then look: a change between the two is an event.
            async with (
                asyncio.timeout(self._wait_seconds),
                self._store.metadata.watch(key=key) as watch,
            ):
                while not await holds():
                    try:
                        async with asyncio.timeout(_LOOK_SECONDS):
                            await anext(watch, None)
                    except TimeoutError:
                        continue
        except (TimeoutError, DeadlineExceeded) as error:
            raise ServiceNotReady(
                f"subscription {name!r} of {topic} was not ready within {self._wait_seconds:g} s"
            ) from error


def _marked(present: SubscriptionRecord | None) -> SubscriptionRecord | None:
    return None if present is None else replace(present, deleting=True)
