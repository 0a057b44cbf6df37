"""A load generator that is not the bottleneck: frames made beforehand, answers only counted.

    python -m bench.load publish --port P --connections 1 --window 1000 --seconds 5
    python -m bench.load consume --port P --topic T --entries N
    python -m bench.load echo    --port P --connections 1 --seconds 5

A SEND frame is a fixed head, the sequence id as a varint of constant length, and a fixed tail
(the checksum covers the message, not the command), so that making one costs a join; receipts are
counted by their lengths and not parsed. One JSON line on standard output tells what was measured.
It runs in a process of its own, so that its work does not take the server's event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import uvloop

from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.commands import TYPES
from magnetar.wire.frames import base_command, command, encode_with_payload, varint

FIRST_SEQUENCE = 1 << 21
"""From here up to 2^28 a sequence id is a varint of four bytes."""

WAIT_SECONDS = 60.0
"""So much longer than it should take, and a run is given up."""

_LENGTH = struct.Struct(">I")
_EXPECTED = frozenset({TYPES["SEND_RECEIPT"], TYPES["PING"]})


class Frames:
    """SEND frames of one producer, by sequence id."""

    def __init__(self, producer_id: int, payload: bytes, messages: int) -> None:
        batch: dict[str, Any] = {"num_messages_in_batch": messages} if messages > 1 else {}
        entry = build_message(payload, producer_name="bench", sequence_id=FIRST_SEQUENCE, **batch)
        fields: dict[str, object] = {"producer_id": producer_id, "sequence_id": FIRST_SEQUENCE}
        if messages > 1:
            fields["num_messages"] = messages
        frame = b"".join(encode_with_payload(base_command("SEND", **fields), entry))
        marker = varint(FIRST_SEQUENCE)
        at = frame.index(b"\x10" + marker) + 1
        self._head, self._tail = frame[:at], frame[at + len(marker) :]

    def run(self, first: int, count: int) -> bytes:
        head, tail = self._head, self._tail
        return b"".join(
            [piece for n in range(first, first + count) for piece in (head, varint(n), tail)]
        )

    def look_at(self, answer: bytes) -> None:
        """Raise if an answer is no receipt: what counts frames takes refusals for receipts."""
        # The type is the first field of every command, and these are all below 128.
        if answer[9] not in _EXPECTED:
            raise ConnectionError(f"refused: {answer[8:400]!r}")


class Sends(Protocol):
    """What a publisher sends, and its answers: frames that begin with their lengths."""

    def run(self, first: int, count: int) -> bytes: ...

    def look_at(self, answer: bytes) -> None: ...


def count_frames(data: bytes) -> tuple[int, bytes]:
    """How many whole frames there are, and what is left over."""
    count = at = 0
    end = len(data)
    while end - at >= _LENGTH.size:
        (size,) = _LENGTH.unpack_from(data, at)
        if at + 4 + size > end:
            break
        at += 4 + size
        count += 1
    return count, data[at:]


class FrameCounter(asyncio.Protocol):
    """A connection that is taken over from a driver, and goes on as answers are counted."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None, "`begin` comes first"
        return self._transport

    def begin(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.set_protocol(self)
        self.counted(0)

    def counted(self, frames: int) -> None:
        """So many more have come; 0: it begins."""
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        count, self._rest = count_frames(self._rest + data)
        self.counted(count)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection"))


class Publisher(asyncio.Protocol):
    """Keeps `window` sends in flight on a connection that has its producer already."""

    def __init__(self, frames: Sends, window: int, until: float) -> None:
        self._frames = frames
        self._window = window
        self._until = until
        self._next = FIRST_SEQUENCE
        self._rest = b""
        self._sent_at: deque[float] = deque()
        self.times: list[float] = []
        self.acknowledged = 0
        self.done = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def begin(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.set_protocol(self)
        self._send(self._window)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        count, self._rest = count_frames(data)
        if count and not self.done.done():
            # One of each read: refusals come for as long as their reason is there.
            try:
                self._frames.look_at(data)
            except ConnectionError as error:
                self.done.set_exception(error)
        now = time.perf_counter()
        self.acknowledged += count
        for _ in range(count):
            self.times.append(now - self._sent_at.popleft())
        if now < self._until:
            self._send(count)
        elif not self._sent_at and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection"))

    def _send(self, count: int) -> None:
        if not count:
            return
        assert self._transport is not None
        frames = self._frames.run(self._next, count)
        self._next += count
        self._sent_at.extend([time.perf_counter()] * count)
        self._transport.write(frames)


async def publish(options: argparse.Namespace) -> dict[str, float]:
    frames = Frames(1, bytes(options.bytes), options.messages)
    drivers = [await Driver.connect("127.0.0.1", options.port) for _ in range(options.connections)]
    for number, driver in enumerate(drivers):
        await driver.request(
            "PRODUCER",
            topic=topic_of(options, number),
            producer_id=1,
            producer_name=f"bench-{options.name}-{number}",
        )
    return await published([(frames, driver.detach()) for driver in drivers], options)


def topic_of(options: argparse.Namespace, number: int) -> str:
    """The topic of a connection: all have the same, or each has the next of so many."""
    topic: str = options.topic
    return topic if options.topics == 1 else f"{topic}-{number % options.topics}"


async def published(
    sends: Sequence[tuple[Sends, asyncio.Transport]], options: argparse.Namespace
) -> dict[str, float]:
    """Publish on every connection for so many seconds; what was acknowledged, and when."""
    start = time.perf_counter()
    publishers = [Publisher(frames, options.window, start + options.seconds) for frames, _ in sends]
    for publisher, (_, transport) in zip(publishers, sends, strict=True):
        publisher.begin(transport)
    ended = asyncio.gather(*[publisher.done for publisher in publishers])
    await asyncio.wait_for(ended, options.seconds + WAIT_SECONDS)
    seconds = time.perf_counter() - start
    times = sorted(each for publisher in publishers for each in publisher.times)
    return measured(len(times), seconds, times)


class Reader(asyncio.Protocol):
    """Counts MESSAGE frames and gives the permits back."""

    def __init__(self, wanted: int, permits: int) -> None:
        self._wanted = wanted
        self._permits = permits
        self._rest = b""
        self._owed = 0
        self.received = 0
        self.done = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def begin(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.set_protocol(self)
        self._flow(self._permits)

    def data_received(self, data: bytes) -> None:
        count, self._rest = count_frames(self._rest + data if self._rest else data)
        self.received += count
        self._owed += count
        if self._owed >= self._permits // 2:
            self._flow(self._owed)
            self._owed = 0
        if self.received >= self._wanted and not self.done.done():
            self.done.set_result(None)

    def _flow(self, permits: int) -> None:
        assert self._transport is not None
        self._transport.write(command("FLOW", consumer_id=1, messagePermits=permits))


async def consume(options: argparse.Namespace) -> dict[str, float]:
    driver = await Driver.connect("127.0.0.1", options.port)
    await driver.request(
        "SUBSCRIBE",
        topic=options.topic,
        subscription=options.name,
        subType=0,
        consumer_id=1,
        initialPosition=1,
    )
    reader = Reader(options.entries, options.window)
    start = time.perf_counter()
    reader.begin(driver.detach())
    await asyncio.wait_for(reader.done, options.seconds * 20)
    return measured(reader.received, time.perf_counter() - start, [])


async def echo(options: argparse.Namespace) -> dict[str, float]:
    """Publish one message at a time per client and wait until a consumer has it."""
    payload = bytes(options.bytes)
    producer_of = [
        await Driver.connect("127.0.0.1", options.port) for _ in range(options.connections)
    ]
    times: list[float] = []
    start = time.perf_counter()
    end = start + options.seconds

    async def client(number: int, driver: Driver) -> None:
        topic = f"{options.topic}-{number}"
        await driver.request(
            "SUBSCRIBE", topic=topic, subscription="echo", subType=0, consumer_id=1
        )
        await driver.request("PRODUCER", topic=topic, producer_id=1)
        driver.send("FLOW", consumer_id=1, messagePermits=1 << 30)
        sequence = 0
        while (begun := time.perf_counter()) < end:
            message = build_message(payload, producer_name="echo", sequence_id=sequence)
            driver.send("SEND", message, producer_id=1, sequence_id=sequence)
            sequence += 1
            while type(await driver.pushes.get()).__name__ != "Delivered":
                pass
            times.append(time.perf_counter() - begun)

    await asyncio.gather(*[client(n, driver) for n, driver in enumerate(producer_of)])
    return measured(len(times), time.perf_counter() - start, sorted(times))


def measured(count: int, seconds: float, times: list[float]) -> dict[str, float]:
    found = {"count": float(count), "rate": count / seconds}
    if times:
        found["p50"] = times[len(times) // 2]
        found["p99"] = times[int(len(times) * 0.99)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("publish", "consume", "echo"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--topic", default="persistent://public/default/bench")
    parser.add_argument("--topics", type=int, default=1, help="so many, numbered from 0")
    parser.add_argument("--name", default="load")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--window", type=int, default=1)
    parser.add_argument("--bytes", type=int, default=1024)
    parser.add_argument("--messages", type=int, default=1)
    parser.add_argument("--entries", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    work = {"publish": publish, "consume": consume, "echo": echo}[options.kind]
    print(json.dumps(uvloop.run(work(options))))


if __name__ == "__main__":
    main()
