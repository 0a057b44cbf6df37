"""The layouts of all scalable topics, kept in memory by every broker.

Owns: `Layouts`: the records under `TOPICS`, followed by one watch, and who is to be told.

Invariants:
1. `changed(topic)` advances after the cached record of the topic changed, never before: who waits
   for it and then looks sees the change, or a later one.
2. The cache never goes back: an event's record is read when the event is handled, one at a time.
3. What cannot be decoded is left out and logged; the other topics are served.

A cached record may be older than the stored one by as long as a watch takes. Who decides something
reads (`read`); who shows something may look at the cache.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Set
from typing import Final

from magnetar.errors import CorruptMetadata, StoreClosed, Unavailable
from magnetar.metadata.api import Event, EventKind, Record
from magnetar.model.names import Domain, NamespaceName, TopicName
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.scalable.records import TOPICS, ScalableRecord, decode, topic_key
from magnetar.scalable.store import ScalableStore

# What controllers and drains may be behind without looking at every topic again.
RECENT_MAX: Final = 10_000
"""Changes that are remembered one by one."""

_LOG: Final = logger(__name__)
_PAUSE_SECONDS: Final = 0.1


class Layouts(Service):
    """All scalable topics of one metadata store."""

    def __init__(self, store: ScalableStore, *, stop_seconds: float) -> None:
        super().__init__("layouts", stop_seconds=stop_seconds)
        self.news = Signal()
        """Advances after any change of any record; its first version is the first whole load."""
        self._store = store
        # The cache; then who waits for one topic, which controller follows
        # it, who lists a namespace.
        self._records: dict[str, ScalableRecord] = {}
        self._changed: dict[str, Signal] = {}
        self._told: dict[str, Signal] = {}
        self._namespaces: dict[NamespaceName, Signal] = {}
        self._recent: deque[tuple[int, str]] = deque(maxlen=RECENT_MAX)
        """The versions of `news`, and which record it was about, oldest first."""

    async def _start(self) -> None:
        self.spawn(self._follow(), "follow")
        await self.news.past(0)

    # --- looking

    async def read(self, topic: TopicName) -> ScalableRecord | None:
        """Read the record of a topic as it is stored now."""
        return await self._store.read(topic)

    def cached(self, topic: TopicName) -> ScalableRecord | None:
        return self._records.get(topic_key(topic))

    @property
    def records(self) -> Mapping[str, ScalableRecord]:
        """The cached records by key; a live view."""
        return self._records

    def changed(self, topic: TopicName) -> Signal:
        """Advances when the cached record of a topic comes, changes or goes."""
        return self._changed.setdefault(topic_key(topic), Signal())

    def changed_since(self, version: int) -> Set[str]:
        """The keys of records that changed after a version of `news`; all, if that is long ago."""
        recent = self._recent
        # Whoever asks was away for so long that changes have dropped out:
        # everything may have changed.
        if len(recent) == RECENT_MAX and recent[0][0] > version:
            return self._records.keys()
        found = set()
        for at, key in reversed(recent):
            if at <= version:
                break
            found.add(key)
        return found

    def tell(self, topic: TopicName, signal: Signal) -> None:
        """Advance this one too when the cached record of a topic comes, changes or goes."""
        self._told[topic_key(topic)] = signal

    def tell_no_more(self, topic: TopicName) -> None:
        self._told.pop(topic_key(topic), None)

    def names(
        self, namespace: NamespaceName, filters: Mapping[str, str] | None = None
    ) -> list[str]:
        """The topics of a namespace that have all these properties, sorted."""
        wanted = (filters or {}).items()
        prefix = f"{Domain.TOPIC.value}://{namespace}/"
        return sorted(
            record.name
            for record in self._records.values()
            if record.name.startswith(prefix)
            and record.layout is not None
            and wanted <= record.properties.items()
        )

    def namespace_changed(self, namespace: NamespaceName) -> Signal:
        """Advances when a topic of a namespace comes or goes, or its properties change."""
        return self._namespaces.setdefault(namespace, Signal())

    # --- following

    async def _follow(self) -> None:
        metadata = self._store.metadata
        try:
            # Watch first, then load: a change between the two comes as an event.
            async with metadata.watch(parent=TOPICS) as watch:
                await self._load()
                async for event in watch:
                    await self._handle(event)
        except StoreClosed:
            return

    async def _handle(self, event: Event) -> None:
        # Events were lost, or a whole range went: only a scan tells what there is.
        if event.kind in (EventKind.RESYNC, EventKind.RANGE_DELETED):
            await self._load()
            return
        try:
            # Read now, not taken from the event: the cache never goes back (invariant 2).
            record = await self._store.metadata.get(event.key)
        except Unavailable:
            await self._load()
            return
        self._set(event.key, record)
        self.news.advance()

    async def _load(self) -> None:
        while True:
            try:
                stored = {each.key: each async for each in self._store.metadata.scan(TOPICS)}
                break
            except Unavailable:
                await asyncio.sleep(_PAUSE_SECONDS)
        # Known ones, too: those that the scan does not have are gone.
        for key in [*self._records, *stored]:
            self._set(key, stored.get(key))
        self.news.advance()

    def _set(self, key: str, stored: Record | None) -> None:
        before = self._records.get(key)
        after = None
        if stored is not None:
            try:
                after = decode(stored, ScalableRecord)
            except CorruptMetadata as error:
                _LOG.error("layout-unreadable", error, key=key)
        # A resync finds most of them unchanged: nobody is woken for those.
        if after == before:
            return
        if after is None:
            del self._records[key]
        else:
            self._records[key] = after
        # After the cache (invariant 1), so that whoever wakes sees at least this change.
        for signals in (self._changed, self._told):
            signal = signals.get(key)
            if signal is not None:
                signal.advance()
        # The version that `news` will have: the caller advances it once, after all of them.
        self._recent.append((self.news.version + 1, key))
        # Splits and merges do not concern those who list topics.
        if _listing(before) != _listing(after):
            present = after or before
            assert present is not None, "the two differ"
            namespace = self._namespaces.get(present.topic.namespace)
            if namespace is not None:
                namespace.advance()


def _listing(record: ScalableRecord | None) -> dict[str, str] | None:
    """What lists of topics depend on."""
    return None if record is None or record.layout is None else record.properties
