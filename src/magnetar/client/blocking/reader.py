"""Blocking: `Reader`, for threads.

Written by `make blocking` from `magnetar.client.consume.reader`; edit that.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Generic, TypeVar

from magnetar.client.blocking.handle import Handle
from magnetar.client.consume.reader import Reader as AsyncReader
from magnetar.client.message.message import Message
from magnetar.model.ids import MessageId

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")


class Reader(Handle[AsyncReader[T]], Generic[T]):
    """Reads a regular topic.

    with client.reader("orders", start=EARLIEST) as reader:
        while reader.has_message_available():
            message = reader.receive()
    """

    @property
    def subscription(self) -> str:
        """The name that the broker shows for it; nothing is kept there when it is closed."""
        return self._call(lambda: self._wrapped.subscription)

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that are read now."""
        return self._call(lambda: self._wrapped.topics)

    def has_message_available(self) -> bool:
        """Whether there is a message that was not received yet."""
        return self._wait(lambda: self._wrapped.has_message_available())

    def seek(self, target: MessageId | datetime | int, *, inclusive: bool = False) -> None:
        """Go on behind another message (`inclusive`: with it), or with what was published since.

            reader.seek(EARLIEST)
            reader.seek(datetime.now(UTC) - timedelta(hours=1))

        Times are datetimes or milliseconds since 1970.
        """
        self._wait(lambda: self._wrapped.seek(target, inclusive=inclusive))

    @property
    def name(self) -> str:
        """The name under which the broker knows it; on a segment, `-seg-<id>` is added."""
        return self._call(lambda: self._wrapped.name)

    def receive(self, timeout: float | None = None) -> Message[T]:
        """The next message; the application has it from now on.

            message = consumer.receive(timeout=5.0)

        Raises `DeadlineExceeded` if none came within `timeout` seconds: it has nothing else to
        return. `receive_many` and `receive_arrow` return what came, which may be nothing.
        """
        return self._wait(lambda: self._wrapped.receive(timeout))

    def receive_many(
        self, max_messages: int = 100, timeout: float | None = None
    ) -> list[Message[T]]:
        """The messages that are there, up to a limit; waits only until there is one.

            for message in consumer.receive_many(500, timeout=1.0):
                ...

        Empty if none came within `timeout` seconds, where `receive` raises `DeadlineExceeded`.
        """
        return self._wait(lambda: self._wrapped.receive_many(max_messages, timeout))

    def receive_arrow(self, max_rows: int = 10000, timeout: float | None = None) -> pa.RecordBatch:
        """The messages that are there as an Arrow record batch; waits only until there is one.

            batch = consumer.receive_arrow(50_000, timeout=1.0)
            frame = batch.to_pandas()

        Without rows if none came within `timeout` seconds, where `receive` raises
        `DeadlineExceeded`. Values are the payloads as they were
        sent; `magnetar.client.arrow.arrow` describes the columns. Needs `magnetar[arrow]`.
        """
        return self._wait(lambda: self._wrapped.receive_arrow(max_rows, timeout))

    def __iter__(self) -> Iterator[Message[T]]:
        """The messages, until it is closed."""
        return self._iterate(lambda: self._wrapped.__aiter__())
