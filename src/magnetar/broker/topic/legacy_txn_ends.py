"""The door through which coordinators of legacy transactions reach this broker's topics.

Owns: `LegacyTxnEnds`, which does what `txn.legacy.ends` asks of participants.

Invariants:
1. A topic that this broker serves or may serve is loaded if need be. If another one serves it, that
   is ServiceNotReady, and the coordinator asks again.
2. What never was, or is gone, has nothing to end.
"""

from __future__ import annotations

from magnetar.broker.topic.topic import Topic
from magnetar.broker.topic.topics import Topics
from magnetar.errors import InvalidTopicName, TopicNotFound
from magnetar.model.names import Domain, TopicName
from magnetar.wire.messages import TxnId


class LegacyTxnEnds:
    """The topics of one broker as participants of legacy transactions."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    async def end_on_topic(
        self, topic: str, txn: TxnId, *, commit: bool, low_watermark: int
    ) -> None:
        found = await self._topic(topic)
        # Nothing to end is an end: the coordinator must not ask for ever (invariant 2).
        if found is not None and found.legacy_transactions is not None:
            legacy = found.legacy_transactions
            await legacy.end(txn, commit=commit, low_watermark=low_watermark)

    async def end_on_subscription(
        self, topic: str, subscription: str, txn: TxnId, *, commit: bool, low_watermark: int
    ) -> None:
        found = await self._topic(topic)
        present = None if found is None else found.subscriptions.get(subscription)
        if present is not None:
            await present.end_legacy(txn, commit=commit, low_watermark=low_watermark)

    async def _topic(self, text: str) -> Topic | None:
        """None: it has no legacy transactions, now or ever."""
        try:
            name = TopicName.parse(text)
        except InvalidTopicName:
            return None
        # Asked before loading: a topic that is gone must not be made again for a transaction's
        # sake.
        if name.domain is not Domain.PERSISTENT or not await self._topics.exists(name):
            return None
        if await self._topics.partitioned.get(name) is not None:
            return None  # its partitions are topics, it is none itself
        try:
            topic = await self._topics.get(name, create=False)
        except TopicNotFound:
            return None  # deleted meanwhile
        return topic if isinstance(topic, Topic) else None
