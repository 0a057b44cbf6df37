"""Clients that go on while their server is killed in a layout change and comes back.

Owns: `Traffic`: one producer and one queue consumer of a topic, from before the kill until after
the recovery. They find the server at the same address again, and are never told of the kill.

Invariants:
1. Sequences follow those of the history, which has every one that was receipted.
2. `finish` returns once everything that was sent has its receipt and has come to the consumer; the
   texts that it returns say why that cannot be.
"""

from __future__ import annotations

import asyncio
from itertools import cycle
from typing import Final

from harness.crash.scalable.check import HOST, PRODUCER, ChangeHistory
from harness.limits import PATIENCE_S, expire, within
from harness.simulation.scalable.clients import QueueConsumer
from harness.simulation.scalable.history import Event, Published, Receipted
from harness.simulation.scalable.links import Links
from harness.simulation.scalable.producer import ScalableProducer
from magnetar.errors import DeadlineExceeded, MagnetarError
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal

SUBSCRIPTION: Final = "live"

_WINDOW: Final = 4
_MORE: Final = 20
"""Messages that are sent after the recovery."""
_PAUSE_SECONDS: Final = 0.002


class Traffic(Service):
    """The clients of one topic, over two lives of its server."""

    def __init__(self, port: int, topic: str, history: ChangeHistory) -> None:
        super().__init__("traffic", stop_seconds=PATIENCE_S)
        self._history = history
        self._sent: dict[int, str] = {}
        self._got: set[int] = set()
        self._arrivals = Signal()
        self._to_send: int | None = None
        """How many more; None: until told otherwise."""
        self._sending: asyncio.Task[None] | None = None
        self._links = Links(f"pulsar://{HOST}:{port}", wait_s=PATIENCE_S)
        self._consumer = QueueConsumer(self._links, topic, SUBSCRIPTION, "c")
        self._producer = ScalableProducer(
            self._links,
            topic,
            PRODUCER,
            first_sequence=history.next_sequence,
            window=_WINDOW,
            stall_s=PATIENCE_S,
            record=self._note,
        )

    async def _start(self) -> None:
        for client in (self._links, self._consumer, self._producer):
            await client.start()
        self._sending = asyncio.create_task(self._send(), name="sends")
        self.spawn(self._receive(), "receives")
        async with within("the first message"):
            await self._arrivals.past(0)  # from now on it is in the middle of things

    async def _stop(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait({self._sending})
        for client in (self._producer, self._consumer, self._links):
            await client.stop()

    def in_doubt(self) -> set[int]:
        """What was sent and has no receipt: it may be stored or not."""
        return set(self._sent) - set(self._history.keys)

    async def finish(self) -> list[str]:
        """Send a little more, then wait until all is settled; what is not."""
        assert self._sending is not None, "it was started"
        self._to_send = _MORE
        try:
            await self._sending
            await self._producer.flush()
        except DeadlineExceeded as error:
            expire(str(error))
        except MagnetarError as error:
            return [f"the producer does not go on: {error}"]
        while missing := set(self._history.keys) - self._got:
            async with within(f"{sorted(missing)} come to the live consumer"):
                await self._arrivals.past(self._arrivals.version)
        return []

    async def _send(self) -> None:
        for key in cycle(self._history.key_names):
            if self._to_send is not None:
                self._to_send -= 1
                if self._to_send < 0:
                    return
            # The payload is the sequence: the only one who sends knows which is the next.
            sequence = self._history.next_sequence if not self._sent else max(self._sent) + 1
            await self._producer.send(key, str(sequence).encode())
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _receive(self) -> None:
        while True:
            try:
                delivery = await self._consumer.receive()
            except DeadlineExceeded:
                continue
            self._got.add(delivery.sequence)
            self._arrivals.advance()
            self._consumer.ack(delivery)

    def _note(self, event: Event) -> None:
        if isinstance(event, Published):
            self._sent[event.sequence] = event.key
        elif isinstance(event, Receipted):
            self._history.keys[event.sequence] = self._sent[event.sequence]
