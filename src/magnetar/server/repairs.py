"""Repairs of transactions that ended long ago, where somebody forgot to finish them.

Owns: `Repairs`: the collection of transactions asks it for the topic or subscription whose op
records are left, and it makes that one read them again.

Invariants:
1. "There is none" is said only of a topic or subscription that certainly does not exist.
"""

from __future__ import annotations

from magnetar.broker.topic.topic import Topic
from magnetar.broker.topic.topics import Topics
from magnetar.errors import TopicNotFound
from magnetar.model.names import TopicName
from magnetar.txn.coordinator.gc import Leftover


class Repairs:
    """The repairs of one broker; another's topic is refused by `Topics`, and tried again."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    async def __call__(self, left: Leftover) -> bool:
        # Loaded if need be: recovery reads the records that were left, and ends them.
        try:
            topic = await self._topics.get(TopicName.parse(left.segment), create=False)
        except TopicNotFound:
            return False
        if isinstance(topic, Topic):
            await topic.rescan()
        # False lets the collector delete records: only where nobody can need them (invariant 1).
        return left.subscription is None or left.subscription in topic.subscriptions
