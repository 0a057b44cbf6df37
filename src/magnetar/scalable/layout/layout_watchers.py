"""The connections that watch the layout of a topic, and the layouts they were told.

Owns: `LayoutWatchers`. A connection is an identity and nothing else here.

Invariant: whatever the number of watches, each call costs the same.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

from magnetar.model.names import TopicName
from magnetar.runtime.signal import Signal

Key = TypeVar("Key")


class LayoutWatcher:
    """One watch of a layout."""

    __slots__ = ("connection", "epoch", "topic")

    def __init__(self, topic: TopicName, connection: object, epoch: int) -> None:
        self.topic = topic
        self.connection = connection
        self.epoch = epoch
        """Of the layout that was written to its client last."""


class LayoutWatchers:
    """The watches of layouts at one broker."""

    def __init__(self) -> None:
        self.moved = Signal()
        """Advances when the last watch of a topic was told a layout, and when a watch ended."""
        # Counted by connection, for who asks whether a client follows a layout at all, and by
        # epoch, for who waits until all of them know one.
        self._watches: Counter[tuple[TopicName, int]] = Counter()
        self._epochs: dict[TopicName, Counter[int]] = {}
        """How many watches of a topic know which layout: nearly always one."""

    def add(self, topic: TopicName, connection: object, epoch: int) -> LayoutWatcher:
        self._watches[topic, id(connection)] += 1
        self._epochs.setdefault(topic, Counter())[epoch] += 1
        return LayoutWatcher(topic, connection, epoch)

    def told(self, follower: LayoutWatcher, epoch: int) -> None:
        """A layout was written to its connection: whatever is written there later comes later."""
        epochs = self._epochs[follower.topic]
        epochs[epoch] += 1
        is_last = _dropped(epochs, follower.epoch)
        follower.epoch = epoch
        # Only the last one that knew the old layout: whoever waits, waits for all of them.
        if is_last:
            self.moved.advance()

    def remove(self, follower: LayoutWatcher) -> None:
        """Take a watch out that has ended; once, before its connection is gone."""
        _dropped(self._watches, (follower.topic, id(follower.connection)))
        _dropped(self._epochs[follower.topic], follower.epoch)
        if not self._epochs[follower.topic]:
            del self._epochs[follower.topic]
        # It may have been the one that had not been told.
        self.moved.advance()

    def follows(self, topic: TopicName, connection: object) -> bool:
        return (topic, id(connection)) in self._watches

    def were_told(self, topic: TopicName, epoch: int) -> bool:
        """Whether every watch of a topic knows that layout, or a later one."""
        # Nobody watches: there is nobody left to tell.
        return min(self._epochs.get(topic, ()), default=epoch) >= epoch


def _dropped(counts: Counter[Key], key: Key) -> bool:
    """Count one less; whether it was the last."""
    counts[key] -= 1
    if counts[key]:
        return False
    del counts[key]
    return True
