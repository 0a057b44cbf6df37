"""Which connections watch the layout of which topic.

Owns: `Followers`. A connection is an identity and nothing else here.
"""

from __future__ import annotations

from collections import Counter

from magnetar.model.names import TopicName


class Followers:
    """The watches of layouts at one broker."""

    def __init__(self) -> None:
        self._watches: Counter[tuple[TopicName, int]] = Counter()

    def add(self, topic: TopicName, connection: object) -> None:
        self._watches[topic, id(connection)] += 1

    def remove(self, topic: TopicName, connection: object) -> None:
        """Once for every `add`, before the connection is gone."""
        key = topic, id(connection)
        self._watches[key] -= 1
        if self._watches[key] <= 0:
            del self._watches[key]

    def follows(self, topic: TopicName, connection: object) -> bool:
        return (topic, id(connection)) in self._watches
