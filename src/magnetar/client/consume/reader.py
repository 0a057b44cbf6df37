"""A reader of a regular topic: from a message on, without a subscription.

Owns: `Reader`, as an application uses it; `ReaderCore` does the work.

Invariants:
1. It reads every message behind its start once, in the order of each partition, over lost
   connections too.
2. Only the earliest and the latest message are a start for more than one partition.
"""

from __future__ import annotations

from datetime import datetime
from typing import TypeVar

from magnetar.client.consume.core.reader_core import ReaderCore
from magnetar.client.consume.receiving import Receiving
from magnetar.model.ids import MessageId

T = TypeVar("T")


class Reader(Receiving[T]):
    """Reads a regular topic.

    async with await client.reader("orders", start=EARLIEST) as reader:
        while await reader.has_message_available():
            message = await reader.receive()
    """

    _core: ReaderCore[T]

    def __init__(self, core: ReaderCore[T]) -> None:
        super().__init__(core)

    @property
    def subscription(self) -> str:
        """The name that the broker shows for it; nothing is kept there when it is closed."""
        return self._core.subscription

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that are read now."""
        return self._core.topics

    async def has_message_available(self) -> bool:
        """Whether there is a message that was not received yet."""
        return await self._core.has_message_available()

    async def seek(self, target: MessageId | datetime | int, *, inclusive: bool = False) -> None:
        """Go on behind another message (`inclusive`: with it), or with what was published since.

            await reader.seek(EARLIEST)
            await reader.seek(datetime.now(UTC) - timedelta(hours=1))

        Times are datetimes or milliseconds since 1970.
        """
        await self._core.seek(target, inclusive=inclusive)
