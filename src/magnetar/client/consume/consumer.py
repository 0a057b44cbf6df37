"""A consumer of regular topics, with the subscription types of Pulsar.

Owns: `Consumer`, for one topic (partitioned or not), for several, or for all whose name matches a
pattern, as an application uses it; `RegularTopicsCore` does the work.

Invariants:
1. Every partition of every topic is consumed; partitions and topics that come later too.
2. Once every topic was terminated and all of its messages are acknowledged, a receive raises
   `TopicTerminated`, and an iteration ends.
3. Cumulative acknowledgements are only for types that deliver in order, and cover one partition.
"""

from __future__ import annotations

from typing import Any, TypeVar

from magnetar.client.consume.core.regular_core import RegularTopicsCore
from magnetar.client.consume.queue import QueueConsumer
from magnetar.client.consume.segment.acknowledged import Acknowledged
from magnetar.client.message.message import AnyMessageId, Message
from magnetar.client.transaction.transaction import Transaction, core_of
from magnetar.model.ids import MessageId
from magnetar.model.subscriptions import SubscriptionType

T = TypeVar("T")


class Consumer(QueueConsumer[T]):
    """Consumes regular topics.

    async with await client.consumer("orders", "billing") as consumer:
        message = await consumer.receive()
        await consumer.ack(message)
    """

    _core: RegularTopicsCore[T]

    def __init__(self, core: RegularTopicsCore[T]) -> None:
        super().__init__(core)

    @property
    def subscription_type(self) -> SubscriptionType:
        """How the subscription shares messages among its consumers."""
        return self._core.subscription_type

    def ack_cumulative(
        self, message: Message[Any] | AnyMessageId, *, txn: Transaction | None = None
    ) -> Acknowledged:
        """Acknowledge everything that was received of a topic or partition, up to a message."""
        return self._core.ack_cumulative(message, core_of(txn))

    async def unsubscribe(self, *, force: bool = False) -> None:
        """Delete the subscription, with everything that it has not acknowledged, and close."""
        await self._core.unsubscribe(force=force)

    async def last_message_ids(self) -> dict[str, MessageId]:
        """The last message of each topic or partition, acknowledged or not."""
        return await self._core.last_message_ids()
