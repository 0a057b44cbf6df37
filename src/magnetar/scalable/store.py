"""Reading and changing the records of scalable topics.

Owns: `ScalableStore`: compare-and-set on the record of a topic, and on what stands beside it.

Invariants:
1. A transition is stored only upon the very change that its caller has seen (`expected`): who was
   overtaken by another controller stores nothing, and reads again.
2. An outcome that is unknown is settled by reading: transitions are repeated only if they were
   certainly not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import TypeVar

import msgspec

from magnetar.errors import Conflict
from magnetar.metadata.api import MetadataStore, Record
from magnetar.metadata.recipes import Content, Fate, cas_settle, get_patiently
from magnetar.model.names import TopicName
from magnetar.scalable.records import (
    LayoutChange,
    ScalableRecord,
    decode,
    encode,
    state_directory,
    topic_key,
)

Body = TypeVar("Body", bound=msgspec.Struct)


class Superseded(Exception):
    """Another controller moved the record on: read it again."""


class ScalableStore:
    """The records of all scalable topics in one metadata store."""

    def __init__(self, metadata: MetadataStore) -> None:
        self.metadata = metadata

    # --- topics

    async def read(self, topic: TopicName) -> ScalableRecord | None:
        return await self.get(topic_key(topic), ScalableRecord)

    async def create(self, record: ScalableRecord) -> None:
        """Conflict if there is one already."""

        def created(present: ScalableRecord | None) -> ScalableRecord:
            # The very same record is this call's own, stored although the answer was lost.
            if present is not None and present != record:
                raise Conflict(f"{record.name} exists already")
            return record

        await self.change(topic_key(record.topic), ScalableRecord, created)

    async def change_topic(
        self, topic: TopicName, change: Callable[[ScalableRecord], ScalableRecord | None]
    ) -> ScalableRecord | None:
        """Replace the record (None: delete it); None if there is none any more."""

        def changed(present: ScalableRecord | None) -> ScalableRecord | None:
            return None if present is None else change(present)

        return await self.change(topic_key(topic), ScalableRecord, changed)

    async def step(
        self,
        topic: TopicName,
        expected: LayoutChange,
        transition: Callable[[ScalableRecord], ScalableRecord | None],
    ) -> ScalableRecord | None:
        """Move a change on from exactly where the caller saw it; None: the topic is gone."""

        def moved(record: ScalableRecord) -> ScalableRecord | None:
            # Invariant 1: another controller took this step already, or undid the change.
            if record.change != expected:
                raise Superseded(record.name)
            return transition(record)

        return await self.change_topic(topic, moved)

    async def forget(self, topic: TopicName) -> None:
        """Remove everything beside the topic's record."""
        # Whatever a crash leaves of it, the step `delete` is repeated from the
        # record, which goes last.
        await self.metadata.delete_range(state_directory(topic))

    # --- any record

    async def get(self, key: str, kind: type[Body]) -> Body | None:
        found = await get_patiently(self.metadata, key)
        return None if found is None else decode(found, kind)

    async def all(self, topic: TopicName, prefix: str, kind: type[Body]) -> list[Body]:
        """Read all records of one kind that stand beside a topic."""
        directory = state_directory(topic)
        start, end = f"{prefix}-", f"{prefix}."  # the character behind "-"
        async with aclosing(self.metadata.scan(directory, start, end)) as records:
            return [decode(record, kind) async for record in records]

    async def change(
        self, key: str, kind: type[Body], change: Callable[[Body | None], Body | None]
    ) -> Body | None:
        """Put what `change` makes of the record, or delete it (None); what is there then."""
        after: Body | None = None

        def fate(record: Record | None) -> Content | Fate:
            nonlocal after
            before = None if record is None else decode(record, kind)
            after = change(before)
            # No write, no event: watchers and other controllers are not woken for nothing.
            if after == before:
                return Fate.KEPT
            return Fate.GONE if after is None else Content(encode(after))

        await cas_settle(self.metadata, key, fate)
        return after
