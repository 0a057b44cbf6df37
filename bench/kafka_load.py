"""The load of `bench.load` and `bench.txn_load`, spoken to Kafka: the publishers are the same code.

    python -m bench.kafka_load create   --port P --topic T --topics 8
    python -m bench.kafka_load publish  --port P --topic T --topics 8 --connections 8 --window 1000
    python -m bench.kafka_load consume  --port P --topic T --entries N
    python -m bench.kafka_load transact --port P --topic T --topics 16 --input I --connections 64

`--topics` is the number of the topic's partitions: connections take the next in turn. Each request
has one record of its own, or a batch of `--messages`; a broker answers the requests of a connection
one after the other, however many are in flight. A transaction writes a record and commits the
offset of an input in one round trip, and ends in another; inputs are not fetched.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from typing import Final

import uvloop

from bench import kafka_wire as wire
from bench.load import measured, published
from bench.txn_load import Ending, Quota, quantiles

HOST: Final = "127.0.0.1"
READY_SECONDS: Final = 30.0
PAUSE_SECONDS: Final = 0.05
AGAIN_SECONDS: Final = (0.001, 0.002, 0.004, 0.008, 0.01)
"""Before a step of a transaction is tried again: the one before it is still ending."""

UNSYNCED: Final = (("flush.messages", str((1 << 63) - 1)),)
GROUPS: Final = 0
TRANSACTIONS: Final = 1


class Frames:
    """Requests that write to one partition, by their numbers."""

    def __init__(self, options: argparse.Namespace, number: int) -> None:
        now_ms = int(time.time() * 1000)
        records = wire.batch(bytes(options.bytes // options.messages), options.messages, now_ms)
        frame = wire.produce(options.topic, number % options.topics, records)
        self._head = frame[: wire.CORRELATION.start]
        self._tail = frame[wire.CORRELATION.stop :]
        self._error_at = wire.produce_error_at(options.topic)

    def run(self, first: int, count: int) -> bytes:
        head, tail = self._head, self._tail
        return b"".join(
            [
                piece
                for n in range(first, first + count)
                for piece in (head, n.to_bytes(4, "big"), tail)
            ]
        )

    def look_at(self, answer: bytes) -> None:
        """Raise if an answer is a refusal."""
        error = int.from_bytes(answer[self._error_at : self._error_at + 2], "big")
        if error:
            raise ConnectionError(f"refused: error {error}")


class Link(Ending):
    """A connection whose answers come in the order of its requests, each to whoever waits."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[bytes] = []
        self._held = 0
        self._wanted = 4
        self._waiting: list[Callable[[bytes], None]] = []
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def connect(cls, port: int) -> Link:
        loop = asyncio.get_running_loop()
        transport, link = await loop.create_connection(cls, HOST, port)
        link._transport = transport
        return link

    def ask(self, frame: bytes, then: Callable[[bytes], None]) -> None:
        assert self._transport is not None
        self._waiting.append(then)
        self._transport.write(frame)

    async def call(self, frame: bytes) -> bytes:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.ask(frame, answer.set_result)
        return await asyncio.wait_for(answer, READY_SECONDS)

    def detach(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        self._held += len(data)
        if self._held < self._wanted:
            return
        data, at = b"".join(self._pieces), 0
        while len(data) - at >= self._wanted:
            if self._wanted == 4:
                self._wanted += int.from_bytes(data[at : at + 4], "big")
                continue
            answer, at = data[at + 4 : at + self._wanted], at + self._wanted
            self._wanted = 4
            self._answer(answer)
        self._pieces, self._held = [data[at:]], len(data) - at

    def _answer(self, answer: bytes) -> None:
        if self.done.done():
            return
        try:
            self._waiting.pop(0)(answer)
        except Exception as error:  # noqa: BLE001 - it ends the load, with its reason
            self.done.set_exception(error)


async def accepted(link: Link, api: int, frame: bytes) -> bytes:
    """The answer, once what is asked for is there."""
    deadline = time.monotonic() + READY_SECONDS
    while (error := wire.error_of(api, answer := await link.call(frame))) != wire.NONE:
        if error not in wire.NOT_YET or time.monotonic() > deadline:
            raise ConnectionError(f"refused: error {error} of request {api}")
        await asyncio.sleep(PAUSE_SECONDS)
    return answer


async def create(options: argparse.Namespace) -> dict[str, float]:
    """A topic, and wait until each of its partitions has a leader."""
    link = await Link.connect(options.port)
    settings = UNSYNCED if options.unsynced else ()
    frame = wire.create_topic(options.topic, options.topics, settings)
    await accepted(link, wire.CREATE_TOPICS, frame)
    for number in range(options.topics):
        frame = wire.list_offset(options.topic, number)
        await accepted(link, wire.LIST_OFFSETS, frame)
    return {}


async def publish(options: argparse.Namespace) -> dict[str, float]:
    links = [await Link.connect(options.port) for _ in range(options.connections)]
    return await published(
        [(Frames(options, number), link.detach()) for number, link in enumerate(links)], options
    )


async def consume(options: argparse.Namespace) -> dict[str, float]:
    """Read one partition from its beginning, one request at a time."""
    link = await Link.connect(options.port)
    start = time.perf_counter()
    received = offset = 0
    while received < options.entries:
        answer = await link.call(wire.fetch(options.topic, 0, offset))
        found = wire.fetched(answer, options.topic, offset)
        received, offset = received + found.records, found.next_offset
    return measured(received, time.perf_counter() - start, [])


class Transactor:
    """One producer with one transaction after the other."""

    def __init__(self, link: Link, options: argparse.Namespace, number: int, quota: Quota) -> None:
        self._link = link
        self._quota = quota
        self._name = f"{options.name}-{number}"
        self._topic, self._input = options.topic, options.input
        self._partition = number % options.topics
        self._payload = bytes(options.bytes)
        self._producer = wire.ANYBODY
        self._offset = 0
        self._waits = 0
        self._began_at = self._asked_at = 0.0
        self.times: list[float] = []
        self.commit_times: list[float] = []
        self.tried_again = 0

    async def open(self) -> None:
        for name, kind in ((wire.GROUP, GROUPS), (self._name, TRANSACTIONS)):
            await accepted(self._link, wire.FIND_COORDINATOR, wire.find_coordinator(name, kind))
        answer = await accepted(self._link, wire.INIT_PRODUCER_ID, wire.init_producer(self._name))
        self._producer = wire.producer_of(wire.INIT_PRODUCER_ID, answer)

    def begin(self) -> None:
        now = time.perf_counter()
        if not self._quota.take(now):
            self._link.finish()
            return
        self._began_at = now
        self._waits = 2
        self._offset += 1
        records = wire.batch(self._payload, 1, int(time.time() * 1000), self._producer)
        self._step(
            wire.PRODUCE,
            wire.produce_in_transaction(self._name, self._topic, self._partition, records),
        )
        self._step(
            wire.TXN_OFFSET_COMMIT,
            wire.commit_offset(
                self._name, self._producer, self._input, self._partition, self._offset
            ),
        )

    def _step(self, api: int, frame: bytes, tries: int = 0) -> None:
        self._link.ask(frame, lambda answer: self._answered(api, frame, tries, answer))

    def _answered(self, api: int, frame: bytes, tries: int, answer: bytes) -> None:
        error = wire.error_of(api, answer)
        if error in wire.NOT_YET:
            self.tried_again += 1
            pause = AGAIN_SECONDS[min(tries, len(AGAIN_SECONDS) - 1)]
            asyncio.get_running_loop().call_later(pause, self._step, api, frame, tries + 1)
        elif error:
            raise ConnectionError(f"refused: error {error} of request {api}")
        elif api == wire.END_TXN:
            now = time.perf_counter()
            self.times.append(now - self._began_at)
            self.commit_times.append(now - self._asked_at)
            # The next transaction is of the next epoch, so that its sequence begins at 0 again.
            self._producer = wire.producer_of(wire.END_TXN, answer)
            self.begin()
        else:
            self._waits -= 1
            if not self._waits:
                self._asked_at = time.perf_counter()
                self._step(wire.END_TXN, wire.end_transaction(self._name, self._producer))


async def transact(options: argparse.Namespace) -> dict[str, float]:
    links = [await Link.connect(options.port) for _ in range(options.connections)]
    quota = Quota(1 << 62, 0.0)
    transactors = [Transactor(link, options, number, quota) for number, link in enumerate(links)]
    for each in transactors:
        await each.open()
    started, used = time.perf_counter(), time.process_time()
    quota.until = started + options.seconds
    for each in transactors:
        each.begin()
    await asyncio.wait_for(asyncio.gather(*(link.done for link in links)), options.seconds * 10)
    seconds = time.perf_counter() - started
    times = sorted(took for each in transactors for took in each.times)
    commits = sorted(took for each in transactors for took in each.commit_times)
    return {
        "count": len(times),
        "rate": len(times) / seconds,
        "own_cpu": (time.process_time() - used) / seconds,
        "tried_again": sum(each.tried_again for each in transactors),
        **quantiles("", times),
        **quantiles("commit_", commits),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("create", "publish", "consume", "transact"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--topics", type=int, default=1, help="partitions of the topic")
    parser.add_argument("--unsynced", action="store_true", help="to be filled before it is read")
    parser.add_argument("--input", default="")
    parser.add_argument("--name", default="load")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--window", type=int, default=1)
    parser.add_argument("--bytes", type=int, default=1024)
    parser.add_argument("--messages", type=int, default=1)
    parser.add_argument("--entries", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    work = {"create": create, "publish": publish, "consume": consume, "transact": transact}
    print(json.dumps(uvloop.run(work[options.kind](options))))


if __name__ == "__main__":
    main()
