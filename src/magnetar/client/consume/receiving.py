"""All kinds of consumers as an application uses them: receiving, and the end.

Owns: `Receiving`, the base of the consumers that applications have. Each stands on a core
(`consume.core`), which knows the segments.

Invariants:
1. A receive that is cancelled, or that times out, takes no message with it.
2. After `close` every call raises `AlreadyClosed`; acknowledgements that were handed in before are
   sent first. What was received and not acknowledged is delivered again, to whoever is next.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from magnetar.client.arrow import arrow
from magnetar.client.consume.core.consumer_core import ConsumerCore
from magnetar.client.message.message import Message
from magnetar.errors import AlreadyClosed, DeadlineExceeded, InvalidSetting, TopicTerminated

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")


class Receiving(Generic[T]):
    """A consumer of any kind."""

    _core: ConsumerCore[T]

    def __init__(self, core: ConsumerCore[T]) -> None:
        self._core = core
        # Taken from for every message: looked up once.
        self._receive_queue = core.receive_queue

    @property
    def name(self) -> str:
        """The name under which the broker knows it; on a segment, `-seg-<id>` is added."""
        return self._core.name

    async def receive(self, timeout: float | None = None) -> Message[T]:  # noqa: ASYNC109
        """The next message; the application has it from now on.

            message = await consumer.receive(timeout=5.0)

        Raises `DeadlineExceeded` if none came within `timeout` seconds: it has nothing else to
        return. `receive_many` and `receive_arrow` return what came, which may be nothing.
        """
        self._core.check_open()
        # Without a wait if one is there: most calls never give up the loop.
        message = self._receive_queue.take_now()
        return await self._receive_queue.take(timeout) if message is None else message

    async def receive_many(
        self,
        max_messages: int = 100,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> list[Message[T]]:
        """The messages that are there, up to a limit; waits only until there is one.

            for message in await consumer.receive_many(500, timeout=1.0):
                ...

        Empty if none came within `timeout` seconds, where `receive` raises `DeadlineExceeded`.
        """
        self._core.check_open()
        if max_messages < 1:
            raise InvalidSetting(f"max_messages must be 1 or more, not {max_messages}")
        try:
            return await self._receive_queue.take_many(max_messages, timeout)
        except DeadlineExceeded:
            return []

    async def receive_arrow(
        self,
        max_rows: int = 10_000,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> pa.RecordBatch:
        """The messages that are there as an Arrow record batch; waits only until there is one.

            batch = await consumer.receive_arrow(50_000, timeout=1.0)
            frame = batch.to_pandas()

        Without rows if none came within `timeout` seconds, where `receive` raises
        `DeadlineExceeded`. Values are the payloads as they were
        sent; `magnetar.client.arrow.arrow` describes the columns. Needs `magnetar[arrow]`.
        """
        self._core.check_open()
        if max_rows < 1:
            raise InvalidSetting(f"max_rows must be 1 or more, not {max_rows}")
        # Before anything is taken: without pyarrow the rows would be lost.
        arrow.pyarrow()
        return arrow.record_batch(await self._receive_queue.take_rows(max_rows, timeout))

    def __aiter__(self) -> AsyncIterator[Message[T]]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Message[T]]:
        """The messages, until it is closed, or its topic was terminated and nothing is left."""
        while not self._core.is_closing:
            try:
                message = await self._receive_queue.take()
            except (AlreadyClosed, TopicTerminated):
                return
            yield message

    async def close(self) -> None:
        """Send what was acknowledged, and give everything else back."""
        await self._core.close()

    async def __aenter__(self) -> Self:
        self._core.check_open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
