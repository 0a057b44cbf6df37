"""The clients of the stalls bench, each kind in a process of its own.

    python -m bench.stalls_load publish  --port P --topic T --rate 50000 --seconds 600
    python -m bench.stalls_load consume  --port P --topic T --seconds 600
    python -m bench.stalls_load transact --port P --topic T --rate 50 --seconds 600

`publish` sends what is due by the clock, whether or not the server is behind (a rate of 0: a window
of messages, as fast as they are taken), and counts each receipt's time from the moment at which its
message was due. `consume` acknowledges everything, one by one, in the commands that clients make of
it. `transact` commits a message and an abort in turn. One JSON line tells what was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import struct
import time
from collections import deque

import uvloop

from bench.load import FIRST_SEQUENCE, Frames
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.commands import TYPES
from magnetar.wire.frames import command, varint

CONNECTIONS = 8
WINDOW = 250
"""Messages in flight on each connection, where no rate is given."""
TICK_SECONDS = 0.002
BEHIND_MAX = 200_000
"""Messages that were due and have no receipt: beyond it the server cannot keep the rate."""
BUCKETS_PER_E = 50
"""Times are counted in buckets of two per cent."""
PERMITS = 4_000

_SIZES = struct.Struct(">II")
_PING = TYPES["PING"]
_MESSAGE = TYPES["MESSAGE"]
_RECEIPT = TYPES["SEND_RECEIPT"]
_PONG = command("PONG")
_ACK = bytes((0x08, TYPES["ACK"], TYPES["ACK"] << 3 | 2))
# Of MESSAGE and SEND_RECEIPT alike: sizes, type, and the tag and length of the body.
_BODY_AT = 8 + 4


class Times:
    """Very many times, in few buckets."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        self.longest = 0.0

    def add(self, seconds: float, count: int) -> None:
        bucket = math.ceil(math.log(max(seconds, 1e-6)) * BUCKETS_PER_E)
        self._counts[bucket] = self._counts.get(bucket, 0) + count
        self.count += count
        self.longest = max(self.longest, seconds)

    def quantile(self, share: float) -> float:
        left = self.count * share
        for bucket, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                return min(math.exp(bucket / BUCKETS_PER_E), self.longest)
        return self.longest


class Link(asyncio.Protocol):
    """A connection taken over from its driver: every frame goes to `take`."""

    def __init__(self, driver: Driver) -> None:
        self._rest = b""
        self.error: Exception | None = None
        self.transport = driver.detach()
        self.transport.set_protocol(self)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        at, end = 0, len(data)
        while end - at >= _SIZES.size:
            total, _ = _SIZES.unpack_from(data, at)
            if at + 4 + total > end:
                break
            kind = data[at + 9]
            if kind == _PING:
                self.transport.write(_PONG)
            else:
                self.take(kind, data, at)
            at += 4 + total
        self._rest = data[at:]
        self.taken()

    def take(self, kind: int, data: bytes, at: int) -> None:
        raise NotImplementedError

    def taken(self) -> None:
        """All frames of a read were taken."""

    def connection_lost(self, error: Exception | None) -> None:
        self.error = error or ConnectionError("the server closed the connection")


class Publisher(Link):
    """One producer; what it sent together has one moment at which it was due."""

    def __init__(self, driver: Driver, frames: Frames, times: Times) -> None:
        super().__init__(driver)
        self._frames = frames
        self._times = times
        self._next = FIRST_SEQUENCE
        self._due: deque[list[float]] = deque()
        self._received = 0
        self.acknowledged = 0
        self.window = 0
        """Messages that are kept in flight; 0: others say when to send."""

    @property
    def behind(self) -> int:
        return self._next - FIRST_SEQUENCE - self.acknowledged

    def send(self, count: int, due: float) -> None:
        self.transport.write(self._frames.run(self._next, count))
        self._next += count
        self._due.append([due, count])

    def take(self, kind: int, data: bytes, at: int) -> None:
        if kind != _RECEIPT:
            self.error = ConnectionError(f"command {kind} in place of a receipt")
            self.transport.close()
        self._received += 1

    def taken(self) -> None:
        left, self._received = self._received, 0
        self.acknowledged += left
        got, now = left, time.perf_counter()
        while left:
            first = self._due[0]
            some = min(left, int(first[1]))
            self._times.add(now - first[0], some)
            left -= some
            first[1] -= some
            if not first[1]:
                self._due.popleft()
        if self.window and got:
            self.send(got, now)


async def publish(options: argparse.Namespace) -> dict[str, float]:
    frames, times = Frames(1, bytes(options.bytes), 1), Times()
    publishers: list[Publisher] = []
    for _ in range(CONNECTIONS):
        driver = await Driver.connect("127.0.0.1", options.port)
        await driver.request("PRODUCER", topic=options.topic, producer_id=1)
        publishers.append(Publisher(driver, frames, times))
    start = time.perf_counter()
    end = start + options.seconds
    if options.rate:
        await _by_the_clock(publishers, options.rate, start, end)
    else:
        for each in publishers:
            each.window = WINDOW
            each.send(WINDOW, start)
        await asyncio.sleep(options.seconds)
    for each in publishers:
        each.window = 0
    acknowledged = sum(each.acknowledged for each in publishers)
    seconds = time.perf_counter() - start
    while any(each.behind for each in publishers):
        _check(publishers)
        await asyncio.sleep(0.01)
    return {
        "rate": acknowledged / seconds,
        "count": float(times.count),
        "p50": times.quantile(0.5),
        "p99": times.quantile(0.99),
        "p999": times.quantile(0.999),
        "longest": times.longest,
    }


async def _by_the_clock(publishers: list[Publisher], rate: float, start: float, end: float) -> None:
    sent = turn = 0
    while (now := time.perf_counter()) < end:
        # By its own clock, so that its own stalls count as the server's: never too good.
        tick = start + (sent + 1) / rate
        if now < tick:
            await asyncio.sleep(max(TICK_SECONDS, tick - now))
            continue
        count = int((now - start) * rate) - sent
        each = publishers[turn % len(publishers)]
        each.send(count, tick)
        turn, sent = turn + 1, sent + count
        _check(publishers)
        if sum(one.behind for one in publishers) > BEHIND_MAX:
            raise RuntimeError(f"the server cannot keep {rate:.0f} messages a second")
        await asyncio.sleep(TICK_SECONDS)


def _check(publishers: list[Publisher]) -> None:
    for each in publishers:
        if each.error is not None:
            raise each.error


class Reader(Link):
    """Acknowledges what it gets, by the bytes of its ids."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self._ids: list[bytes] = []
        self._owed = 0
        self.received = 0
        self.transport.write(command("FLOW", consumer_id=1, messagePermits=PERMITS))

    def take(self, kind: int, data: bytes, at: int) -> None:
        if kind != _MESSAGE:
            return
        # 08 consumer 12 length: the message id, which stands in an ACK as it is.
        length = at + _BODY_AT + 3
        self._ids.append(b"\x1a" + data[length : length + 1 + data[length]])

    def taken(self) -> None:
        if not self._ids:
            return
        body = b"\x08\x01\x10\x00" + b"".join(self._ids)
        encoded = _ACK + varint(len(body)) + body
        self.transport.write(_SIZES.pack(4 + len(encoded), len(encoded)) + encoded)
        self.received += len(self._ids)
        self._owed += len(self._ids)
        self._ids = []
        if self._owed >= PERMITS // 2:
            flow = command("FLOW", consumer_id=1, messagePermits=self._owed)
            self.transport.write(flow)
            self._owed = 0


async def consume(options: argparse.Namespace) -> dict[str, float]:
    readers: list[Reader] = []
    for _ in range(2):
        driver = await Driver.connect("127.0.0.1", options.port)
        await driver.request(
            "SUBSCRIBE", topic=options.topic, subscription="stalls", subType=1, consumer_id=1
        )
        readers.append(Reader(driver))
    await asyncio.sleep(options.seconds)
    return {"count": float(sum(each.received for each in readers))}


async def transact(options: argparse.Namespace) -> dict[str, float]:
    """One after the other: a message is sent, and committed or aborted."""
    driver = await Driver.connect("127.0.0.1", options.port)
    topic = f"{options.topic}-in-transactions"
    await driver.request("PRODUCER", topic=topic, producer_id=1, producer_name="stalls")
    times, start, done = Times(), time.perf_counter(), 0
    while (now := time.perf_counter()) < start + options.seconds:
        if (wait := start + done / options.rate - now) > 0:
            await asyncio.sleep(wait)
        begun = time.perf_counter()
        answer = await driver.request("NEW_TXN", tc_id=0, txn_ttl_millis=60_000, scalable=True)
        txn = {
            "txnid_most_bits": answer.txnid_most_bits,
            "txnid_least_bits": answer.txnid_least_bits,
        }
        message = build_message(b"x", producer_name="stalls", sequence_id=done, **txn)
        await driver.publish(1, done, message, **txn)
        await driver.request("END_TXN", txn_action=done % 2, scalable=True, **txn)
        times.add(time.perf_counter() - begun, 1)
        done += 1
    return {
        "count": float(done),
        "p50": times.quantile(0.5),
        "p99": times.quantile(0.99),
        "longest": times.longest,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("publish", "consume", "transact"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--bytes", type=int, default=1024)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    work = {"publish": publish, "consume": consume, "transact": transact}[options.kind]
    print(json.dumps(uvloop.run(work(options))))


if __name__ == "__main__":
    main()
