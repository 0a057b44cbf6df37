"""Blocking: `CheckpointConsumer`, for threads.

Written by `make blocking` from `magnetar.client.consume.checkpoint`; edit that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from magnetar.client.blocking.handle import Handle
from magnetar.client.consume.checkpoint import CheckpointConsumer as AsyncCheckpointConsumer
from magnetar.client.message.message import Checkpoint, Message

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")


class CheckpointConsumer(Handle[AsyncCheckpointConsumer[T]], Generic[T]):
    """Reads from a checkpoint, and tells where it is.

    with client.checkpoint_consumer(topic, start=stored or FROM_EARLIEST) as consumer:
        while batch := consumer.receive_many(1000, timeout=1.0):
            save(batch, consumer.checkpoint().to_bytes())
    """

    @property
    def topic(self) -> str:
        """The topic that it reads, by its full name."""
        return self._call(lambda: self._wrapped.topic)

    def checkpoint(self) -> Checkpoint:
        """Where the application is: a consumer that starts there gets exactly the rest."""
        return self._call(lambda: self._wrapped.checkpoint())

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
