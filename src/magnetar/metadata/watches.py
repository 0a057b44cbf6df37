"""Watches of one store object: who waits for news of which key, directory or sequence.

Owns: `Watchers`, the registry that a backend publishes its changes to, and `SessionFeeds`, the
same for the state of its session.

Invariants:
1. `publish` costs one dictionary lookup when nobody watches the directory of the change.
2. A watch holds at most `limit` events. One more drops them all and leaves one RESYNC, behind
   which later events queue again: memory is bounded and a loss is never silent.
3. A sequence watch holds one key, the latest.
4. A closed watch delivers nothing more, not even what was queued, and is forgotten at once.

Relies on: being called from one event loop only; `publish` being called in the order in which
changes of one key became durable, and after they became readable.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from magnetar.errors import InvalidArgument, StoreClosed
from magnetar.metadata.api import Event, EventKind, SessionEvent, Watch
from magnetar.metadata.judge import in_range, sequence_prefixes, split_key
from magnetar.runtime.metrics import METADATA_WATCH_RESYNCS

News = TypeVar("News")

QUEUE_LIMIT: Final = 1024
"""Events that a watch keeps for its reader, unless told otherwise."""

# States follow each other slowly: a reader so far behind is told the outcome, not the story.
SESSION_QUEUE_LIMIT: Final = 16

RESYNC: Final = Event(EventKind.RESYNC)


class _Feed(Watch[News], Generic[News]):
    """The reader's side: a queue, a wake-up, and leaving the registry when closed."""

    def __init__(self, forget: Callable[[_Feed[News]], None]) -> None:
        self._queue: deque[News] = deque()
        self._wake = asyncio.Event()
        self._closed = False
        self._forget = forget

    async def __anext__(self) -> News:
        while not self._queue:
            if self._closed:
                raise StopAsyncIteration
            # Cleared only while the queue is empty, without an await before the
            # wait: no event is missed.
            self._wake.clear()
            await self._wake.wait()
        return self._queue.popleft()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._queue.clear()
        self._wake.set()
        self._forget(self)

    def _add(self, news: News) -> None:
        self._queue.append(news)
        self._wake.set()

    def _replace(self, *news: News) -> None:
        self._queue.clear()
        self._queue.extend(news)
        self._wake.set()


class _EventFeed(_Feed[Event]):
    """Events of one key, or of one directory if `name` is None."""

    def __init__(
        self, forget: Callable[[_Feed[Event]], None], parent: str, name: str | None, limit: int
    ) -> None:
        super().__init__(forget)
        self.parent = parent
        self.name = name
        self._limit = limit

    def offer(self, event: Event) -> None:
        # What is queued goes too: a gap in the middle could not be told (invariant 2).
        if len(self._queue) >= self._limit:
            self.resync()
        else:
            self._add(event)

    def resync(self) -> None:
        METADATA_WATCH_RESYNCS.inc()
        self._replace(RESYNC)


class _SequenceFeed(_Feed[str]):
    """The latest key of one sequence."""

    def __init__(
        self, forget: Callable[[_Feed[str]], None], prefix: str, current: str | None
    ) -> None:
        super().__init__(forget)
        self.parent, self.name = split_key(prefix)
        self._highest = ""
        if current is not None:
            self.offer(current)

    def offer(self, key: str) -> None:
        """A record below the highest one that was offered is no news."""
        if key > self._highest:
            self._highest = key
            self._replace(key)

    def lowered(self) -> None:
        """A record was deleted: a lower number may now be the highest again."""
        self._highest = ""


class _Place:
    """The watches in one directory."""

    def __init__(self) -> None:
        self.all: list[_EventFeed] = []
        self.by_name: dict[str, list[_EventFeed]] = {}
        self.sequences: dict[str, list[_SequenceFeed]] = {}

    def empty(self) -> bool:
        return not (self.all or self.by_name or self.sequences)


class Watchers:
    """All watches of one store object."""

    def __init__(self, limit: int = QUEUE_LIMIT) -> None:
        if limit < 1:
            raise InvalidArgument(f"a watch needs room for at least one event, not {limit}")
        self._limit = limit
        self._places: dict[str, _Place] = {}
        self._open = 0
        self._closed = False

    def __len__(self) -> int:
        """How many watches are open."""
        return self._open

    def has(self, parent: str) -> bool:
        """Whether anybody watches in a directory."""
        return parent in self._places

    def watch(self, *, parent: str | None = None, key: str | None = None) -> Watch[Event]:
        """Events of one key or of the children of one directory, published from now on."""
        self._check_open()
        name: str | None = None
        if key is not None:
            parent, name = split_key(key)
        if parent is None:
            raise InvalidArgument("watch takes either a parent or a key")
        feed = _EventFeed(self._forget, parent, name, self._limit)
        place = self._places.setdefault(parent, _Place())
        # Those of one key stand by its name: a change costs nothing for the
        # watches of its siblings.
        if name is None:
            place.all.append(feed)
        else:
            place.by_name.setdefault(name, []).append(feed)
        self._open += 1
        return feed

    def watch_sequence(self, prefix: str, current: str | None) -> Watch[str]:
        """`current` is the highest key of the sequence now: read it and call this in one step."""
        self._check_open()
        feed = _SequenceFeed(self._forget, prefix, current)
        place = self._places.setdefault(feed.parent, _Place())
        place.sequences.setdefault(feed.name, []).append(feed)
        self._open += 1
        return feed

    def publish(self, event: Event) -> None:
        """Tell everyone concerned. A range is named by the keys `parent/start`, `parent/end`."""
        parent, name = split_key(event.key)
        place = self._places.get(parent)
        # Nobody watches here: that is most changes (invariant 1).
        if place is None:
            return
        for feed in place.all:
            feed.offer(event)
        # Watches of the directory got it as one event; those of single keys see a deletion each.
        if event.kind is EventKind.RANGE_DELETED:
            _publish_range(place, parent, name, event)
            return
        for feed in place.by_name.get(name, ()):
            feed.offer(event)
        # A new value of an existing key moves no sequence.
        if place.sequences and event.kind is not EventKind.MODIFIED:
            _publish_sequence(place, name, event)

    def resync_all(self, highest: Callable[[str], str | None] | None = None) -> None:
        """Events may have been missed. `highest` gives the highest key of a prefix, if any."""
        for place in self._places.values():
            for feed in place.all:
                feed.resync()
            for feeds in place.by_name.values():
                for feed in feeds:
                    feed.resync()
            for sequences in place.sequences.values():
                for sequence in sequences:
                    # No RESYNC here: such a watch shows the highest key, so it is simply told
                    # again. Lowered first, because the highest may have been deleted unheard.
                    current = highest(f"{sequence.parent}/{sequence.name}") if highest else None
                    sequence.lowered()
                    if current is not None:
                        sequence.offer(current)

    def close_all(self) -> None:
        """End every watch; none can be opened any more."""
        self._closed = True
        for place in list(self._places.values()):
            # Collected first: closing a watch takes it out of these very lists.
            feeds: list[_Feed[Event] | _Feed[str]] = [*place.all]
            for named in place.by_name.values():
                feeds.extend(named)
            for sequences in place.sequences.values():
                feeds.extend(sequences)
            for feed in feeds:
                feed.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("watch: the store object was closed")

    def _forget(self, feed: _Feed[Event] | _Feed[str]) -> None:
        assert isinstance(feed, (_EventFeed, _SequenceFeed))
        place = self._places[feed.parent]
        if isinstance(feed, _SequenceFeed):
            _remove(place.sequences, feed.name, feed)
        elif feed.name is None:
            place.all.remove(feed)
        else:
            _remove(place.by_name, feed.name, feed)
        # So that `publish` is back to one lookup for this directory.
        if place.empty():
            del self._places[feed.parent]
        self._open -= 1


_AnyFeed = TypeVar("_AnyFeed", _EventFeed, _SequenceFeed)


def _remove(feeds: dict[str, list[_AnyFeed]], name: str, feed: _AnyFeed) -> None:
    feeds[name].remove(feed)
    if not feeds[name]:
        del feeds[name]


def _publish_range(place: _Place, parent: str, start: str, event: Event) -> None:
    end = None if event.end is None else split_key(event.end)[1]
    for name, feeds in place.by_name.items():
        if in_range(name, start, end):
            for feed in feeds:
                feed.offer(Event(EventKind.DELETED, f"{parent}/{name}"))
    # Whether the range held their highest key is not looked up: a lower one may be news now.
    for sequences in place.sequences.values():
        for sequence in sequences:
            sequence.lowered()


def _publish_sequence(place: _Place, name: str, event: Event) -> None:
    for prefix in sequence_prefixes(name):
        for sequence in place.sequences.get(prefix, ()):
            if event.kind is EventKind.CREATED:
                sequence.offer(event.key)
            else:
                sequence.lowered()


class _SessionFeed(_Feed[SessionEvent]):
    def offer(self, event: SessionEvent) -> None:
        if len(self._queue) < SESSION_QUEUE_LIMIT:
            self._add(event)
        # A loss makes everything that was queued before it irrelevant.
        elif event is SessionEvent.LOST:
            self._replace(event)
        else:
            # What was missed may have held a loss, so it is told as one.
            self._replace(SessionEvent.LOST, event)


class SessionFeeds:
    """The state of one session, for any number of readers."""

    def __init__(self) -> None:
        self.state = SessionEvent.CONNECTED
        self._feeds: list[_SessionFeed] = []
        self._closed = False

    def open(self) -> Watch[SessionEvent]:
        """The present state, then each change; after `close_all`, nothing."""
        feed = _SessionFeed(self._forget)
        self._feeds.append(feed)
        # An iteration that ends at once, rather than an error: readers loop until it ends.
        if self._closed:
            feed.close()
        else:
            feed.offer(self.state)
        return feed

    def say(self, state: SessionEvent) -> None:
        """Enter a state. Saying the same state twice is one event."""
        if state is self.state:
            return
        self.state = state
        for feed in self._feeds:
            feed.offer(state)

    def close_all(self) -> None:
        self._closed = True
        for feed in list(self._feeds):
            feed.close()

    def _forget(self, feed: _Feed[SessionEvent]) -> None:
        assert isinstance(feed, _SessionFeed)
        self._feeds.remove(feed)
