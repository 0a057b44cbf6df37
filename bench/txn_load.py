"""The clients of the transaction bench, each kind in a process of its own.

    python -m bench.txn_load publish  --port P --topic T --messages 100 --seconds 2
    python -m bench.txn_load transact --port P --topic T --input I --connections 64 --seconds 3
    python -m bench.txn_load wake     --port P --topic T --count 300

`publish` keeps a window of messages in flight, so many in each transaction (`--plain`: in none).
`transact` consumes, publishes and acknowledges one message in each transaction, and commits it.
`wake` commits transactions behind which a consumer waits. What they send is the same objects,
changed and serialized again, so that a process has time left while the server works; how much of a
core it used is a part of the JSON line that it prints.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import struct
import time
from collections import deque
from typing import Any, Final

import uvloop

from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.commands import MEMBERS, TYPES
from magnetar.wire.frames import base_command, command, encode_command, encode_with_payload, varint
from magnetar.wire.messages import TxnId, encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb

SHARED: Final = 1
EARLIEST: Final = 1
COMMIT: Final = 0
COORDINATORS: Final = 16
TTL_MS: Final = 600_000
SUBSCRIPTION: Final = "bench"
FIRST_SEQUENCE: Final = 1 << 21
"""From here up to 2^28 a sequence id is a varint of four bytes."""

BEGUN_AHEAD: Final = 20
INPUTS_AHEAD: Final = 16
"""For each transaction under way; many at many consumers would leave large gaps."""

WAIT_SECONDS: Final = 60.0
"""So much longer than it should take, and a run is given up."""

RATE_MIN: Final = 200
"""Transactions per second, for a run of so many."""


_PING: Final = TYPES["PING"]
_PONG: Final = command("PONG")
_RECEIPT: Final = TYPES["SEND_RECEIPT"]
_MESSAGE: Final = TYPES["MESSAGE"]
_BEGUN: Final = TYPES["NEW_TXN_RESPONSE"]
_ACKED: Final = TYPES["ACK_RESPONSE"]
_ENDED: Final = TYPES["END_TXN_RESPONSE"]
_ADDED: Final = frozenset(
    {TYPES["ADD_PARTITION_TO_TXN_RESPONSE"], TYPES["ADD_SUBSCRIPTION_TO_TXN_RESPONSE"]}
)
_SIZES: Final = struct.Struct(">II")


class Ending(asyncio.Protocol):
    """A connection that is over when its work is done, and not before."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection"))

    def finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class Link(Ending):
    """A connection taken over from its driver; every command that arrives goes to `take`."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self._rest = b""
        self._out: list[bytes] = []
        self._transport = driver.detach()
        self._transport.set_protocol(self)

    def take(self, kind: int, frame: bytes) -> None:
        raise NotImplementedError

    def put(self, *pieces: bytes) -> None:
        """To be written with all else that the commands that are here give rise to."""
        self._out += pieces

    def flush(self) -> None:
        if self._out:
            self._transport.write(b"".join(self._out))
            self._out.clear()

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        at, end = 0, len(data)
        while end - at >= _SIZES.size:
            total, size = _SIZES.unpack_from(data, at)
            if at + 4 + total > end:
                break
            # The type is the first field of every command, and these are all below 128.
            kind = data[at + 9]
            if kind == _PING:
                self.put(_PONG)
            else:
                self.take(kind, data[at + 8 : at + 8 + size])
            at += 4 + total
        self._rest = data[at:]
        self.flush()


def body_of(kind: int, frame: bytes) -> Any:
    """What an answer says, unless it is a refusal."""
    body = getattr(pb.BaseCommand.FromString(frame), MEMBERS[kind])
    if "error" in body.DESCRIPTOR.fields_by_name and body.HasField("error"):
        raise ConnectionError(f"refused: {body}")
    return body


def txn_of(answer: Any) -> TxnId:
    return TxnId(answer.txnid_most_bits, answer.txnid_least_bits)


def txn_fields(txn: TxnId | None) -> dict[str, Any]:
    if txn is None:
        return {}
    return {"txnid_most_bits": txn.most, "txnid_least_bits": txn.least}


def begin(request_id: int, *, legacy: bool = False) -> bytes:
    kind = {} if legacy else {"scalable": True}
    coordinator = request_id % COORDINATORS
    return command(
        "NEW_TXN", request_id=request_id, txn_ttl_millis=TTL_MS, tc_id=coordinator, **kind
    )


def commit(request_id: int, txn: TxnId) -> bytes:
    ids = txn_fields(txn)
    return command("END_TXN", request_id=request_id, txn_action=COMMIT, scalable=True, **ids)


# --- many messages, in transactions or not


class Sends:
    """SEND frames of one transaction, or of none, by sequence id."""

    def __init__(self, payload: bytes, txn: TxnId | None) -> None:
        ids = txn_fields(txn)
        entry = build_message(payload, producer_name="bench", sequence_id=FIRST_SEQUENCE, **ids)
        base = base_command("SEND", producer_id=1, sequence_id=FIRST_SEQUENCE, **ids)
        frame = b"".join(encode_with_payload(base, entry))
        marker = varint(FIRST_SEQUENCE)
        at = frame.index(b"\x10" + marker) + 1
        self._head, self._tail = frame[:at], frame[at + len(marker) :]

    def run(self, first: int, count: int) -> list[bytes]:
        head, tail = self._head, self._tail
        return [piece for n in range(first, first + count) for piece in (head, varint(n), tail)]


class _Part:
    """So many messages, of one transaction or of none: how many are unsent, and unconfirmed."""

    __slots__ = ("sends", "txn", "unconfirmed", "unsent")

    def __init__(self, payload: bytes, txn: TxnId | None, messages: int) -> None:
        self.sends = Sends(payload, txn)
        self.txn = txn
        self.unsent = self.unconfirmed = messages


class Publisher(Link):
    """Keeps a window of messages in flight; transactions begin ahead of it and end behind it.

    What it does is the same without transactions but for their beginnings and ends.
    """

    def __init__(self, driver: Driver, options: argparse.Namespace, until: float) -> None:
        super().__init__(driver)
        self._payload = bytes(options.bytes)
        self._messages: int = options.messages
        self._plain: bool = options.plain
        self._room: int = options.window
        self._until = until
        self._sequence = FIRST_SEQUENCE
        self._begun = 0
        self._over = 0
        self._ready: deque[_Part] = deque()
        self._sent: deque[_Part] = deque()
        self.confirmed = 0

    def start(self) -> None:
        for _ in range(BEGUN_AHEAD):
            self._begin()
        self.flush()

    def take(self, kind: int, frame: bytes) -> None:
        if kind == _RECEIPT:
            self._confirm()
        elif kind == _BEGUN:
            txn = txn_of(body_of(kind, frame))
            self._ready.append(_Part(self._payload, txn, self._messages))
        elif kind == _ENDED:
            body_of(kind, frame)
            self._over += 1
        else:
            raise ConnectionError(f"not expected: {pb.BaseCommand.FromString(frame)}")

    def flush(self) -> None:
        while self._room and self._ready:
            self._send(self._ready[0])
        super().flush()
        if self._over == self._begun:
            self.finish()

    def _begin(self) -> None:
        if time.perf_counter() < self._until:
            self._begun += 1
            if self._plain:
                self._ready.append(_Part(self._payload, None, self._messages))
            else:
                self.put(begin(self._begun))

    def _send(self, part: _Part) -> None:
        if part.unsent == self._messages:
            self._sent.append(part)
        count = min(self._room, part.unsent)
        self.put(*part.sends.run(self._sequence, count))
        self._sequence += count
        self._room -= count
        part.unsent -= count
        if not part.unsent:
            self._ready.popleft()
            self._begin()

    def _confirm(self) -> None:
        """Receipts come in the order of the messages."""
        self.confirmed += 1
        self._room += 1
        part = self._sent[0]
        part.unconfirmed -= 1
        if not part.unconfirmed:
            self._sent.popleft()
            if part.txn is None:
                self._over += 1
            else:
                self.put(commit(self._begun, part.txn))


async def publish(options: argparse.Namespace) -> dict[str, object]:
    driver = await Driver.connect("127.0.0.1", options.port)
    await driver.request("PRODUCER", topic=options.topic, producer_id=1, producer_name=options.name)
    started, used = time.perf_counter(), time.process_time()
    publisher = Publisher(driver, options, started + options.seconds)
    publisher.start()
    await asyncio.wait_for(publisher.done, options.seconds + WAIT_SECONDS)
    seconds = time.perf_counter() - started
    return {
        "count": publisher.confirmed,
        "rate": publisher.confirmed / seconds,
        "own_cpu": (time.process_time() - used) / seconds,
    }


# --- one message and one acknowledgement in each transaction


class _Slot:
    """One transaction after the other; `waits` counts what must come before its commit."""

    __slots__ = ("asked_at", "began_at", "number", "txn", "waits")

    def __init__(self, number: int) -> None:
        self.number = number
        self.txn = TxnId(0, 0)
        self.waits = 0
        self.began_at = self.asked_at = 0.0


class Quota:
    """How many transactions there may be, of all connections together, and until when."""

    def __init__(self, count: int, until: float) -> None:
        self._left = count
        self.until = until

    def take(self, now: float) -> bool:
        if not self._left or now >= self.until:
            return False
        self._left -= 1
        return True


class Transactor(Link):
    """Has `slots` transactions under way: each publishes a message and acknowledges another.

    Those of the older kind name their topic and subscription to the coordinator first.
    """

    def __init__(
        self, driver: Driver, slots: int, first: int, options: argparse.Namespace, quota: Quota
    ):
        super().__init__(driver)
        self._legacy = bool(options.legacy)
        self._names: tuple[str, str] = (options.topic, options.input)
        self._slots = [_Slot(first + number) for number in range(slots)]
        self._first = first
        self._idle = slots
        self._quota = quota
        self._payload = bytes(options.bytes)
        self._inputs: deque[Any] = deque()
        self._hungry: deque[_Slot] = deque()
        self._unconfirmed: deque[_Slot] = deque()
        self._send = base_command("SEND", producer_id=1, sequence_id=0)
        self._ack = base_command("ACK", consumer_id=1, ack_type=0, message_id=[], request_id=0)
        kind = {} if self._legacy else {"scalable": True}
        self._end = base_command("END_TXN", request_id=0, txn_action=COMMIT, **kind)
        self._metadata = pb.MessageMetadata(producer_name="bench", publish_time=0)
        self._permits = INPUTS_AHEAD * slots
        self._owed = 0
        self.times: list[float] = []
        self.commit_times: list[float] = []

    def start(self) -> None:
        self.put(command("FLOW", consumer_id=1, messagePermits=self._permits))
        for slot in self._slots:
            self._begin(slot, time.perf_counter())
        self.flush()

    def take(self, kind: int, frame: bytes) -> None:
        if kind == _RECEIPT:
            self._answered(self._unconfirmed.popleft())
            return
        body = body_of(kind, frame)
        if kind == _MESSAGE:
            self._inputs.append(body.message_id)
            if self._hungry:
                self._work(self._hungry.popleft())
            return
        slot = self._slots[body.request_id - self._first]
        if kind == _BEGUN:
            slot.txn = txn_of(body)
            if self._legacy:
                self._add(slot)
            else:
                self._work(slot)
        elif kind in _ADDED:
            slot.waits -= 1
            if not slot.waits:
                self._work(slot)
        elif kind == _ACKED:
            self._answered(slot)
        elif kind == _ENDED:
            now = time.perf_counter()
            self.times.append(now - slot.began_at)
            self.commit_times.append(now - slot.asked_at)
            self._idle += 1
            self._begin(slot, now)
        else:
            raise ConnectionError(f"not expected: {body}")

    def _begin(self, slot: _Slot, now: float) -> None:
        if self._quota.take(now):
            self._idle -= 1
            slot.began_at = now
            self.put(begin(slot.number, legacy=self._legacy))
        elif self._idle == len(self._slots):
            self.finish()

    def _add(self, slot: _Slot) -> None:
        """What the transaction will touch: commands that only those of the older kind need."""
        slot.waits = 2
        topic, read = self._names
        ids = {"request_id": slot.number, **txn_fields(slot.txn)}
        subscriptions = [pb.Subscription(topic=read, subscription=SUBSCRIPTION)]
        self.put(command("ADD_PARTITION_TO_TXN", partitions=[topic], **ids))
        self.put(command("ADD_SUBSCRIPTION_TO_TXN", subscription=subscriptions, **ids))

    def _work(self, slot: _Slot) -> None:
        if not self._inputs:
            self._hungry.append(slot)
            return
        slot.waits = 2
        self._unconfirmed.append(slot)
        for message in (self._send.send, self._metadata, self._ack.ack):
            message.txnid_most_bits, message.txnid_least_bits = slot.txn
        self._send.send.sequence_id += 1
        self._metadata.sequence_id = self._send.send.sequence_id
        self.put(*encode_with_payload(self._send, encode_entry(self._metadata, self._payload)))
        ack = self._ack.ack
        ack.request_id = slot.number
        del ack.message_id[:]
        ack.message_id.append(self._inputs.popleft())
        self.put(encode_command(self._ack))
        self._owed += 1
        if self._owed >= self._permits // 2:
            self.put(command("FLOW", consumer_id=1, messagePermits=self._owed))
            self._owed = 0

    def _answered(self, slot: _Slot) -> None:
        slot.waits -= 1
        if not slot.waits:
            slot.asked_at = time.perf_counter()
            end = self._end.end_txn
            end.request_id = slot.number
            end.txnid_most_bits, end.txnid_least_bits = slot.txn
            self.put(encode_command(self._end))


async def transact(options: argparse.Namespace) -> dict[str, object]:
    drivers = []
    for number in range(options.connections):
        driver = await Driver.connect("127.0.0.1", options.port)
        await driver.request(
            "PRODUCER", topic=options.topic, producer_id=1, producer_name=f"{options.name}-{number}"
        )
        await subscribe(driver, options.input)
        if options.legacy:
            for coordinator in range(COORDINATORS):
                await driver.request("TC_CLIENT_CONNECT_REQUEST", tc_id=coordinator)
        drivers.append(driver)
    started, used = time.perf_counter(), time.process_time()
    quota = Quota(options.count or 1 << 62, started + options.seconds)
    each = options.concurrent // options.connections
    links = [
        Transactor(driver, each, number * each, options, quota)
        for number, driver in enumerate(drivers)
    ]
    for link in links:
        link.start()
    limit = WAIT_SECONDS + min(options.seconds, (options.count or 1 << 62) / RATE_MIN)
    await asyncio.wait_for(asyncio.gather(*(link.done for link in links)), limit)
    seconds = time.perf_counter() - started
    times = sorted(each for link in links for each in link.times)
    commits = sorted(each for link in links for each in link.commit_times)
    return {
        "count": len(times),
        "rate": len(times) / seconds,
        "own_cpu": (time.process_time() - used) / seconds,
        **quantiles("", times),
        **quantiles("commit_", commits),
    }


async def subscribe(driver: Driver, topic: str) -> None:
    await driver.request(
        "SUBSCRIBE",
        topic=topic,
        subscription=SUBSCRIPTION,
        subType=SHARED,
        consumer_id=1,
        initialPosition=EARLIEST,
    )


# --- a consumer that waits


class Waiting(Link):
    """A consumer that notes when the next message came."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.came: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.put(command("FLOW", consumer_id=1, messagePermits=1 << 30))
        self.flush()

    def take(self, kind: int, frame: bytes) -> None:
        if kind != _MESSAGE or self.came.done():
            raise ConnectionError(f"not expected: {pb.BaseCommand.FromString(frame)}")
        self.came.set_result(time.perf_counter())


async def wake(options: argparse.Namespace) -> dict[str, object]:
    """Seconds from the answer to a commit until the consumer has what was committed."""
    producer = await Driver.connect("127.0.0.1", options.port)
    await producer.request("PRODUCER", topic=options.topic, producer_id=1)
    consumer = await Driver.connect("127.0.0.1", options.port)
    await subscribe(consumer, options.topic)
    waiting = Waiting(consumer)
    delays = []
    for number in range(options.count):
        answer = await producer.request("NEW_TXN", txn_ttl_millis=TTL_MS, scalable=True)
        ids = txn_fields(txn_of(answer))
        message = build_message(bytes(options.bytes), sequence_id=number, **ids)
        await producer.publish(1, number, message, **ids)
        if waiting.came.done():
            raise ConnectionError("a message came before its transaction was committed")
        await producer.request("END_TXN", txn_action=COMMIT, scalable=True, **ids)
        answered = time.perf_counter()
        came = await asyncio.wait_for(waiting.came, WAIT_SECONDS)
        waiting.came = asyncio.get_running_loop().create_future()
        delays.append(max(0.0, came - answered))
    return {"count": len(delays), **quantiles("", sorted(delays))}


def quantiles(name: str, times: list[float]) -> dict[str, float]:
    return {f"{name}p50": times[len(times) // 2], f"{name}p99": times[int(len(times) * 0.99)]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("publish", "transact", "wake"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--input")
    parser.add_argument("--name", default="load")
    parser.add_argument("--plain", action="store_true", help="without transactions")
    parser.add_argument("--legacy", action="store_true", help="transactions of the older kind")
    parser.add_argument("--messages", type=int, default=100, help="of a transaction")
    parser.add_argument("--window", type=int, default=1000, help="messages in flight")
    parser.add_argument("--concurrent", type=int, default=1, help="transactions under way")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--bytes", type=int, default=1024)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=86_400.0)
    options = parser.parse_args()
    work = {"publish": publish, "transact": transact, "wake": wake}[options.kind]
    print(json.dumps(uvloop.run(work(options))))


if __name__ == "__main__":
    main()
