"""Applications of the Python client in a simulation, and what they were told.

Owns: `Told`, what writers handed in and what readers got, and the promises that follow from it;
`Applications`, which write, read, transform in transactions, and are careless now and then: tasks
are cancelled in sends, receives and commits, messages are given back, consumers are made anew.

Invariants:
1. Each key is written by one producer, so that the order of its messages is known.
2. An application goes on until it is told that all is over; then it closes what it has.
3. Everything random comes from the application's own `Random`.

Relies on: a world that is calm in the end, in which every call succeeds within its time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any, Final, TypeVar

from harness.simulation.scalable.world import ANY_HOST, PORT, ScalableWorld
from harness.simulation.seeds import EPOCH_MS
from magnetar.client.client import Client
from magnetar.client.consume.checkpoint import FROM_EARLIEST
from magnetar.client.consume.consumer import Consumer
from magnetar.client.consume.queue import QueueConsumer
from magnetar.client.consume.receiving import Receiving
from magnetar.client.consume.segment.acknowledged import Acknowledged
from magnetar.client.consume.segment.nacks import RedeliveryDelay
from magnetar.client.message.message import AnyMessageId, Checkpoint, Message
from magnetar.client.produce.producer import Producer
from magnetar.client.transaction.state import TransactionState
from magnetar.client.transaction.transaction import Transaction
from magnetar.errors import AlreadyClosed, InvariantBroken, MagnetarError
from magnetar.model.subscriptions import InitialPosition
from magnetar.runtime.clock import LoopClock
from magnetar.wire.compression import Compression

TOPIC: Final = "topic://public/default/orders"
RESULTS: Final = "persistent://public/default/results"

_URL: Final = f"pulsar://{ANY_HOST}:{PORT}"
_FIRST: Final = InitialPosition.EARLIEST
_TRIES: Final = 60
_PAUSE_S: Final = 1.0
_MESSAGES: Final = 120

Made = TypeVar("Made")


class Told:
    """What applications handed in, and what they got."""

    def __init__(self) -> None:
        self.handed: dict[str, list[bytes]] = defaultdict(list)
        self.taken_back: set[bytes] = set()
        """Messages of transactions that were aborted, and what was cancelled for want of room."""
        self.got: dict[str, dict[str, list[bytes]]] = defaultdict(lambda: defaultdict(list))
        """By reader and key, in the order in which they came."""
        self.results: Counter[bytes] = Counter()

    def stored(self) -> dict[str, list[bytes]]:
        """What everybody must get, by key."""
        return {
            key: [each for each in handed if each not in self.taken_back]
            for key, handed in self.handed.items()
        }

    def receive(self, reader: str, message: Message[bytes]) -> None:
        assert message.key is not None, "writers give keys"
        self.got[reader][message.key].append(message.value)

    def missing(self) -> list[str]:
        """What has not come yet."""
        found = []
        stored = self.stored()
        for reader, got in self.got.items():
            left = sum(len(set(each) - set(got[key])) for key, each in stored.items())
            if left:
                found.append(f"{reader} lacks {left}")
        left = sum(each not in self.results for sent in stored.values() for each in sent)
        if left:
            found.append(f"{left} results")
        return found

    def violations(self, exact: set[str]) -> list[str]:
        """What was promised and not kept; `exact` readers get everything once and in order."""
        stored = self.stored()
        everything = {each for sent in stored.values() for each in sent}
        found = []
        for reader, got in self.got.items():
            for key in sorted(stored.keys() | got.keys()):
                sent, came = stored.get(key, []), got.get(key, [])
                if set(came) - set(sent):
                    found.append(f"{reader} got of {key} what is not: {set(came) - set(sent)}")
                if reader in exact and came != sent:
                    found.append(f"{reader} got of {key} {came}, and {sent} was sent")
        for value, count in self.results.items():
            if count > 1 or value not in everything:
                found.append(f"{count} results of {value!r}")
        return found


class Applications:
    """All that use clients in one run."""

    def __init__(self, world: ScalableWorld) -> None:
        self.world = world
        self.told = Told()
        self.over = False
        """Nothing more is to come."""

    @asynccontextmanager
    async def _client(self, name: str) -> AsyncIterator[Client]:
        client = Client(
            _URL,
            connect=self.world.connect,
            chance=Random(f"{self.world.seed} client {name}"),
            clock=LoopClock(EPOCH_MS),
            operation_timeout=20.0,
            keepalive=5.0,
        )
        try:
            yield client
        finally:
            await client.close()

    async def _made(self, make: Callable[[], Awaitable[Made]]) -> Made:
        """What could not be made because of the trouble is tried again."""
        for _ in range(_TRIES):
            try:
                return await make()
            except MagnetarError as error:
                self.world.note(f"not made: {error.name}")
                if isinstance(error, InvariantBroken):
                    raise
            await asyncio.sleep(_PAUSE_S)
        raise InvariantBroken("something cannot be made, though nothing disturbs any more")

    # --- writing

    async def write(self, name: str, chance: Random) -> None:
        """Plain messages and transactions, of one producer."""
        async with self._client(name) as client:
            room = chance.choice((5, 10_000))
            options = _producing(chance)
            producer = await self._made(lambda: client.producer(TOPIC, max_pending=room, **options))
            receipts: list[asyncio.Future[AnyMessageId]] = []
            for number in range(_MESSAGES):
                if chance.random() < 0.15:
                    await self._write_together(client, producer, name, number, chance)
                elif chance.random() < 0.8:
                    key, value = self._next(name, b"%d" % number, chance)
                    receipts.append(await producer.submit(value, key=key))
                else:
                    await self._write_and_cancel(producer, name, number, chance, room)
                await asyncio.sleep(chance.choice((0.0, 0.0, 0.01, 0.1)) * chance.random())
            try:
                await producer.flush()
            except MagnetarError as error:  # of transactions that failed, it tells the first
                self.world.note(f"{name}: {error.name}")
            for receipt in receipts:
                receipt.result()
            self.world.note(f"{name} is done")

    async def _write_and_cancel(
        self, producer: Producer[bytes], name: str, number: int, chance: Random, room: int
    ) -> None:
        """What was handed in is stored all the same; what still waited for room is not."""
        key, value = self._next(name, b"%d" % number, chance)
        has_room = producer.pending < room
        sending: asyncio.Future[Any]
        if has_room:
            sending = asyncio.ensure_future(producer.send(value, key=key))
        else:
            sending = asyncio.ensure_future(producer.submit(value, key=key))
        await asyncio.sleep(0.05 * chance.random())
        if await _cancelled(sending) and not has_room:
            self.told.taken_back.add(value)

    async def _write_together(
        self, client: Client, producer: Producer[bytes], name: str, number: int, chance: Random
    ) -> None:
        txn = await self._made(lambda: _begun(client))
        sent = []
        try:
            for part in range(chance.randrange(1, 6)):
                key, value = self._next(name, b"%d.%d" % (number, part), chance)
                sent.append(value)
                await producer.submit(value, key=key, txn=txn)
            if chance.random() < 0.25:
                await txn.abort()
            elif chance.random() < 0.2:
                committing = asyncio.ensure_future(txn.commit())
                await asyncio.sleep(0.02 * chance.random())
                await _cancelled(committing)
            else:
                await txn.commit()
        except MagnetarError as error:
            self.world.note(f"{name} transaction: {error.name}")
        if not await self._was_committed(txn):
            self.told.taken_back.update(sent)

    def _next(self, name: str, number: bytes, chance: Random) -> tuple[str, bytes]:
        key = f"{name}-{chance.randrange(6)}"
        value = b"%s:%s" % (name.encode(), number)
        self.told.handed[key].append(value)
        return key, value

    async def _was_committed(self, txn: Transaction) -> bool:
        """Abort it, or learn that it was committed, until one of these is known."""
        for _ in range(_TRIES):
            if txn.state.is_final:
                return txn.state is TransactionState.COMMITTED
            try:
                await txn.abort()
            except MagnetarError as error:
                self.world.note(f"outcome: {error.name}")
                await asyncio.sleep(_PAUSE_S)
        raise InvariantBroken(f"no outcome is told of {txn}, though nothing disturbs any more")

    # --- reading

    async def read_stream(self, name: str, chance: Random) -> None:
        async with self._client(name) as client:
            stream = await self._made(
                lambda: client.stream_consumer(TOPIC, "stream", initial_position=_FIRST, name=name)
            )
            last: Message[bytes] | None = None
            async for messages in self._received(stream, chance):
                for message in messages:
                    self.told.receive("stream", message)
                    last = message
                if last is not None and chance.random() < 0.4:
                    acked = stream.ack_cumulative(last)
                    last = None
                    if chance.random() < 0.2:
                        await self._settled(acked)

    async def _settled(self, acked: Acknowledged) -> None:
        try:
            await acked
        except AlreadyClosed as error:  # the segment is another member's now
            self.world.note(f"not acknowledged: {error.name}")

    async def read_queue(self, name: str, chance: Random) -> None:
        async with self._client(name) as client:
            queue = await self._made(
                lambda: client.queue_consumer(
                    TOPIC, "queue", initial_position=_FIRST, nack_delay=RedeliveryDelay(0.3)
                )
            )
            async for messages in self._received(queue, chance):
                for message in messages:
                    if chance.random() < 0.05:
                        queue.nack(message)
                    else:
                        self.told.receive("queue", message)
                        queue.ack(message)

    async def read_checkpoints(self, name: str, chance: Random) -> None:
        """Made anew again and again, from its bytes."""
        place = FROM_EARLIEST
        async with self._client(name) as client:
            while not self.over:
                reader = await self._made(partial(client.checkpoint_consumer, TOPIC, start=place))
                left = chance.randrange(5, 60)
                async for messages in self._received(reader, chance):
                    for message in messages:
                        self.told.receive("checkpoint", message)
                    left -= 1
                    if left <= 0:
                        break
                place = Checkpoint.from_bytes(reader.checkpoint().to_bytes())
                await reader.close()

    async def read_results(self, name: str, chance: Random) -> None:
        async with self._client(name) as client:
            consumer: Consumer[bytes] = await self._made(
                lambda: client.consumer(RESULTS, "check", initial_position=_FIRST)
            )
            async for messages in self._received(consumer, chance):
                for message in messages:
                    self.told.results[message.value] += 1
                consumer.ack_many(messages)

    # --- both

    async def transform(self, name: str, chance: Random) -> None:
        """One result of each message, in the transaction that acknowledges it."""
        async with self._client(name) as client:
            queue: QueueConsumer[bytes] = await self._made(
                lambda: client.queue_consumer(TOPIC, "transform", initial_position=_FIRST)
            )
            results = await self._made(lambda: client.producer(RESULTS))
            async for messages in self._received(queue, chance):
                if not messages:
                    continue
                txn = await self._made(lambda: _begun(client))
                left = list(messages)
                try:
                    while left:
                        await results.submit(left[0].value, key=left[0].key, txn=txn)
                        queue.ack(left[0], txn=txn)
                        del left[0]
                    await txn.commit()
                except MagnetarError as error:
                    self.world.note(f"{name}: {error.name}")
                # Of those that it did not come to, the transaction knows nothing.
                for message in left:
                    queue.nack(message)
                await self._was_committed(txn)

    async def _received(
        self, consumer: Receiving[bytes], chance: Random
    ) -> AsyncIterator[list[Message[bytes]]]:
        """What comes, nothing too, until all is over; now and then a receive is cancelled."""
        while not self.over:
            most = chance.randrange(1, 30)
            if chance.random() < 0.1:
                receiving = asyncio.ensure_future(consumer.receive_many(most, timeout=1.0))
                await asyncio.sleep(0.1 * chance.random())
                if await _cancelled(receiving):
                    continue
                messages = receiving.result()
            else:
                messages = await consumer.receive_many(most, timeout=1.0)
            yield messages
            if chance.random() < 0.3:
                await asyncio.sleep(0.2 * chance.random())


async def _begun(client: Client) -> Transaction:
    return await client.transaction(timeout=300.0)


async def _cancelled(task: asyncio.Future[Any]) -> bool:
    """Cancel a task; False: it had ended, or failed."""
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    except MagnetarError:
        return False
    return False


def _producing(chance: Random) -> dict[str, Any]:
    return {
        "send_timeout": 0.0,
        "batching": chance.random() < 0.8,
        "batch_messages": chance.choice((3, 1000)),
        "compression": chance.choice((Compression.NONE, Compression.LZ4)),
    }
