"""The receiver queue: messages of all segments of a consumer wait here for the application.

Owns: `ReceiveQueue`.

Invariants:
1. Messages leave in the order of their arrival, each once. A wait that is cancelled or times out
   takes none with it.
2. A message is handed out, and its source told so, in the step in which it leaves.
3. It holds what its sources ask the broker for and no more: they limit themselves.
4. After `fail`, what is there can still be taken unless it was dropped; then the failure is raised.
5. Once rows were asked for, batches wait as they are; whoever asks for messages still gets them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from magnetar.client.consume.segment.schema_versions import SchemaVersions
from magnetar.client.consume.segment.settings import QUEUE_BYTES
from magnetar.client.message.entry_rows import EntryRows
from magnetar.client.message.message import Message, MessageSource
from magnetar.errors import DeadlineExceeded, MagnetarError
from magnetar.runtime.signal import Signal

T = TypeVar("T")


class ReceiveQueue(Generic[T]):
    """The messages of one consumer."""

    def __init__(self, schemas: SchemaVersions[T], *, bytes_max: int = QUEUE_BYTES) -> None:
        self.arrivals = Signal()
        self.bytes = 0
        """Of the payloads that wait, as they are unpacked."""
        self.bytes_max = bytes_max
        """From here on entries are better left packed until there is room."""
        self.schemas = schemas
        self.takes_rows = False
        """The application takes columns: even a small batch should come as `EntryRows`."""
        self._needs_writer = schemas.schema.needs_writer
        self._waiting: deque[Message[T] | EntryRows] = deque()
        self._turn = 0
        # Who has more to add once there is room, in the order of asking.
        self._held: dict[Callable[[], None], None] = {}
        self._failure: MagnetarError | None = None
        self.end: Callable[[], MagnetarError | None] = _no_end
        """Why nothing more can come, if that is so; asked whenever `arrivals` advances."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: Message[T] | EntryRows) -> None:
        self._waiting.append(message)
        self.bytes += len(message.data)
        # Asked for every message: mostly the application is busy, and nobody waits.
        if self.arrivals.waiters:
            self.arrivals.advance()

    def when_room(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` once, as soon as less than `bytes_max` wait."""
        self._held[go_on] = None

    def _make_room(self) -> None:
        for go_on in list(self._held):
            if self.bytes >= self.bytes_max:
                return
            del self._held[go_on]
            go_on()

    def drop(self, segment: MessageSource) -> list[Message[T]]:
        """Take out what a segment put in and nobody has: it is returned."""
        dropped = [each for each in self._waiting if _source_of(each) is segment]
        if dropped:
            kept = (each for each in self._waiting if _source_of(each) is not segment)
            self._waiting = deque(kept)
            self.bytes = sum(len(each.data) for each in self._waiting)
            self._make_room()
        return [message for each in dropped for message in self._messages_of(each)]

    def _messages_of(self, waiting: Message[T] | EntryRows) -> list[Message[T]]:
        if isinstance(waiting, EntryRows):
            return waiting.messages(self.schemas.decode)
        return [waiting]

    def fail(self, error: MagnetarError) -> None:
        """No more will come."""
        if self._failure is None:
            self._failure = error
        self.arrivals.advance()

    async def take(self, timeout_s: float | None = None) -> Message[T]:
        """The next message; raises `DeadlineExceeded` if none came in time."""
        message = self.take_now()
        if message is not None:
            return message
        try:
            async with asyncio.timeout(timeout_s):
                while message is None:
                    await self._wait()
                    message = self.take_now()
                return message
        except TimeoutError as error:
            raise DeadlineExceeded(f"no message came within {timeout_s} s") from error

    async def take_many(self, messages_max: int, timeout_s: float | None) -> list[Message[T]]:
        """Take as many as are there, up to a limit; waits for the first one only."""
        taken = [await self.take(timeout_s)]
        while len(taken) < messages_max:
            message = self.take_now()
            if message is None:
                break
            taken.append(message)
        return taken

    def take_now(self) -> Message[T] | None:
        """The next message, if there is one and its schema is known."""
        waiting = self._waiting
        if not waiting:
            return None
        first = waiting[0]
        # It keeps its place: `_wait` asks the registry, and others must not overtake it.
        if self._needs_writer and not self.schemas.is_known(first.schema_version):
            return None
        waiting.popleft()
        self.bytes -= len(first.data)
        if isinstance(first, EntryRows):
            # Invariant 5: the batch is taken apart, and its rest waits as messages in its place.
            first, *others = first.messages(self.schemas.decode)
            others.reverse()
            waiting.extendleft(others)
            self.bytes += sum(len(each.data) for each in others)
        if self._held:
            self._make_room()
        self._turn += 1
        first._turn = self._turn
        first._source.handing_out(first)
        return first

    async def take_rows(
        self, rows_max: int, timeout_s: float | None
    ) -> list[Message[T] | EntryRows]:
        """Take as many rows as are there, batches as they came; values are not decoded."""
        self.takes_rows = True
        try:
            async with asyncio.timeout(timeout_s):
                while not self._waiting:
                    await self._wait()
        except TimeoutError:
            return []
        taken: list[Message[T] | EntryRows] = []
        while self._waiting and rows_max > 0:
            first = self._waiting.popleft()
            self.bytes -= len(first.data)
            if isinstance(first, EntryRows):
                # Cut, and the rest stays in front: nobody gets more rows than were asked for.
                if first.num_rows > rows_max:
                    first, rest = first.take(rows_max)
                    self._waiting.appendleft(rest)
                    self.bytes += len(rest.data)
                self._turn += first.num_rows
                rows_max -= first.num_rows
                first.source.handing_out_rows(first, self._turn)
            else:
                self._turn += 1
                rows_max -= 1
                first._turn = self._turn
                first._source.handing_out(first)
            taken.append(first)
        if self._held:
            self._make_room()
        return taken

    async def _wait(self) -> None:
        # Something is there whose schema nobody knows yet; it is looked for in the step before it
        # is handed out, not when it arrives.
        if self._waiting:
            first = self._waiting[0]
            await self.schemas.learn(_source_of(first).wire_topic, first.schema_version)
            return
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if (ended := self.end()) is not None:
            raise ended
        await self.arrivals.past(self.arrivals.version)


def _source_of(waiting: Message[Any] | EntryRows) -> MessageSource:
    return waiting.source if isinstance(waiting, EntryRows) else waiting._source


def _no_end() -> MagnetarError | None:
    return None
