"""Reading and changing the records of scalable topics.

Owns: `ScalableStore`: compare-and-set on the record of a topic, and on what stands beside it.

Invariants:
1. A transition is stored only upon the very change that its caller has seen (`expected`): who was
   overtaken by another controller stores nothing, and reads again.
2. An outcome that is unknown is settled by reading: transitions are repeated only if they were
   certainly not stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Final, TypeVar

import msgspec

from magnetar.errors import BadVersion, Conflict, DeadlineExceeded, OutcomeUnknown, Unavailable
from magnetar.metadata.api import ABSENT, MetadataStore, Record
from magnetar.model.names import TopicName
from magnetar.scalable.records import (
    Change,
    ScalableRecord,
    decode,
    encode,
    state_directory,
    topic_key,
)

Body = TypeVar("Body", bound=msgspec.Struct)

STORE_SECONDS: Final = 10.0
"""For one change of one record, however often it has to be tried."""

_PAUSE_SECONDS: Final = 0.05


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
        expected: Change,
        transition: Callable[[ScalableRecord], ScalableRecord | None],
    ) -> ScalableRecord | None:
        """Move a change on from exactly where the caller saw it; None: the topic is gone."""

        def moved(record: ScalableRecord) -> ScalableRecord | None:
            if record.change != expected:
                raise Superseded(record.name)
            return transition(record)

        return await self.change_topic(topic, moved)

    async def forget(self, topic: TopicName) -> None:
        """Remove everything beside the topic's record."""
        await self.metadata.delete_range(state_directory(topic))

    # --- any record

    async def get(self, key: str, kind: type[Body]) -> Body | None:
        found = await self._read(key)
        return None if found is None else decode(found, kind)

    async def all(self, topic: TopicName, prefix: str, kind: type[Body]) -> list[Body]:
        """Everything of one kind that stands beside a topic."""
        directory = state_directory(topic)
        start, end = f"{prefix}-", f"{prefix}."  # the character behind "-"
        async with aclosing(self.metadata.scan(directory, start, end)) as records:
            return [decode(record, kind) async for record in records]

    async def change(
        self, key: str, kind: type[Body], change: Callable[[Body | None], Body | None]
    ) -> Body | None:
        """Put what `change` makes of the record, or delete it (None); what is there then."""
        try:
            async with asyncio.timeout(STORE_SECONDS):
                while True:
                    found = await self._read(key)
                    before = None if found is None else decode(found, kind)
                    after = change(before)
                    if after == before:
                        return before
                    if await self._stored(key, found, after):
                        return after
        except TimeoutError as error:
            raise DeadlineExceeded(f"{key}: not stored within {STORE_SECONDS:g} s") from error

    async def _stored(self, key: str, found: Record | None, after: msgspec.Struct | None) -> bool:
        """Whether it was stored; False: certainly not, or somebody else's is there now."""
        version = ABSENT if found is None else found.version
        try:
            if after is None:
                await self.metadata.delete(key, expected=version)
            else:
                await self.metadata.put(key, encode(after), expected=version)
        except BadVersion:
            return False
        except Unavailable:
            await asyncio.sleep(_PAUSE_SECONDS)
            return False
        except OutcomeUnknown:
            await asyncio.sleep(_PAUSE_SECONDS)
            present = await self._read(key)
            return (None if present is None else present.value) == (
                None if after is None else encode(after)
            )
        return True

    async def _read(self, key: str) -> Record | None:
        while True:  # within the deadline of the caller, or of the store itself
            try:
                return await self.metadata.get(key)
            except Unavailable:
                await asyncio.sleep(_PAUSE_SECONDS)
