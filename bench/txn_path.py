"""What one transaction is made of: processor time, tasks, futures, records, calls.

    python -m bench.txn_path [--clients 64] [--seconds 2] [--messages 1]

A server in this process, on a real folder, without sockets: clients are plain objects that hand it
frames and take what it writes. A transaction is NEW_TXN, one message or more of 1 KiB, one
acknowledgement, END_TXN; the delivery of the message that it acknowledges belongs to it. Processor
time is that of the process without the clients' own. Counts come from a second, shorter run, for
counting makes everything slower: there the loop is asyncio's, because uvloop's cannot be counted.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, Final, cast

import uvloop

from bench.report import Row, publish
from bench.txn_load import COMMIT, EARLIEST, SHARED, SUBSCRIPTION, TTL_MS, txn_of
from magnetar.cli.verbs.serve import _calm_collector
from magnetar.metadata.layers import Layer
from magnetar.runtime import metrics
from magnetar.server.app import Server
from magnetar.server.config import ServerConfig
from magnetar.server.embedded import Storage
from magnetar.server.session import Session
from magnetar.testing.virtual.driver import build_message
from magnetar.wire.commands import MEMBERS, TYPES
from magnetar.wire.frames import SIZES, base_command, command, encode_command, encode_with_payload
from magnetar.wire.messages import TxnId, encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb

INPUT: Final = "persistent://public/default/txn-path-in"
OUTPUT: Final = "persistent://public/default/txn-path-out"
MESSAGE_BYTES: Final = 1024
PERMITS: Final = 16
COUNTED: Final = 2000
"""Transactions in the run that counts."""

RATE_MAX: Final = 12_000
"""Inputs are stored for so many transactions per second."""

SETTLE_SECONDS: Final = 1.0
SHOWN: Final = 110
"""Functions in a profile."""


_BEGUN: Final = TYPES["NEW_TXN_RESPONSE"]
_RECEIPT: Final = TYPES["SEND_RECEIPT"]
_MESSAGE: Final = TYPES["MESSAGE"]
_ACKED: Final = TYPES["ACK_RESPONSE"]
_ENDED: Final = TYPES["END_TXN_RESPONSE"]


class Wire:
    """A transport whose other end is a client of the same process."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._is_closed = False

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._client.session.connection_lost(None)

    def write(self, data: bytes) -> None:
        self._client.take(data)

    def writelines(self, pieces: list[bytes]) -> None:
        self._client.take(b"".join(pieces))

    def is_closing(self) -> bool:
        return self._is_closed

    def get_extra_info(self, name: str) -> Any:
        return ("client", 1) if name == "peername" else None

    def get_write_buffer_size(self) -> int:
        return 0

    def ignored(self, *_: Any, **__: Any) -> None: ...

    set_write_buffer_limits = pause_reading = resume_reading = ignored
    abort = close

    def can_write_eof(self) -> bool:
        return False


class Bench:
    """What all clients share: the time that is theirs, the quota, the end."""

    def __init__(self, server: Server, messages: int) -> None:
        storage = server.storage
        assert isinstance(storage, Storage)
        self.server = server
        self.journal = storage._journal
        self.rows = 0
        """Records that were handed to the database, or their deletions."""
        home = storage._metadata.home
        apply = home.apply

        def counted(layer: Layer, sequence: int) -> None:
            self.rows += len(layer)
            apply(layer, sequence)

        home.apply = counted  # type: ignore[method-assign, assignment]
        self.messages = messages
        self.own = 0.0
        self.done = 0
        self.until = 0.0
        self.most = 1 << 62
        self.running = 0
        self.over = asyncio.Event()


class Client:
    """A connection with one transaction after the other."""

    def __init__(self, bench: Bench, number: int) -> None:
        self._bench = bench
        self._loop = asyncio.get_running_loop()
        self.session: Session = bench.server._new_session()
        self.session.connection_made(cast("asyncio.BaseTransport", Wire(self)))
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._inputs: deque[Any] = deque()
        self._is_hungry = self._is_running = False
        self._waits = 0
        self._txn = TxnId(0, 0)
        self._number = number
        self._owed = 0
        self._out: list[bytes] = []
        self._sequence = 0
        self._begin = command(
            "NEW_TXN", request_id=1, txn_ttl_millis=TTL_MS, tc_id=number % 16, scalable=True
        )
        self._send = base_command("SEND", producer_id=1, sequence_id=0)
        self._ack = base_command("ACK", consumer_id=1, ack_type=0, message_id=[], request_id=1)
        self._end = base_command("END_TXN", request_id=1, txn_action=COMMIT, scalable=True)
        self._metadata = pb.MessageMetadata(producer_name=f"p{number}", publish_time=0)

    async def request(self, name: str, reply: str, **fields: Any) -> Any:
        answer = self._answers[TYPES[reply]] = self._loop.create_future()
        self.session.data_received(command(name, **fields))
        return await answer

    async def open(self) -> None:
        await self.request("CONNECT", "CONNECTED", client_version="bench", protocol_version=20)
        await self.request(
            "PRODUCER", "PRODUCER_SUCCESS", topic=OUTPUT, producer_id=1, request_id=1,
            producer_name=f"p{self._number}",
        )  # fmt: skip

    async def subscribe(self) -> None:
        await self.request(
            "SUBSCRIBE", "SUCCESS", topic=INPUT, subscription=SUBSCRIPTION, subType=SHARED,
            consumer_id=1, request_id=2, initialPosition=EARLIEST,
        )  # fmt: skip

    async def fill(self, count: int) -> None:
        """Store messages for transactions to acknowledge."""
        await self.request("PRODUCER", "PRODUCER_SUCCESS", topic=INPUT, producer_id=2, request_id=3)
        entry = build_message(bytes(64), sequence_id=0)
        for number in range(count):
            frame = encode_with_payload(
                base_command("SEND", producer_id=2, sequence_id=number), entry
            )
            self.session.data_received(b"".join(frame))
            if number % 500 == 0 or number == count - 1:
                answer = self._answers[_RECEIPT] = self._loop.create_future()
                await answer
        changed = self.session.changed
        while self.session.owed:
            await changed.past(changed.version)

    def start(self) -> None:
        self._is_running = True
        self._owed = 0
        if not self._number < 0:
            self.session.data_received(
                command("FLOW", consumer_id=1, messagePermits=PERMITS) + self._begin
            )

    # --- what the server writes

    def take(self, data: bytes) -> None:
        began = time.thread_time()
        at = 0
        while at < len(data):
            total, size = SIZES.unpack_from(data, at)
            kind = data[at + 9]
            self._take(kind, data[at + 8 : at + 8 + size])
            at += 4 + total
        out, self._out = self._out, []
        # In a turn of its own, as from a socket.
        if out:
            self._loop.call_soon(self.session.data_received, b"".join(out))
        self._bench.own += time.thread_time() - began

    def _take(self, kind: int, frame: bytes) -> None:
        answer = self._answers.pop(kind, None)
        if answer is not None:
            answer.set_result(_body(kind, frame))
        elif kind == _MESSAGE:
            self._inputs.append(_body(kind, frame).message_id)
            if self._is_hungry:
                self._is_hungry = False
                self._work()
        elif not self._is_running:
            return
        elif kind == _BEGUN:
            self._txn = txn_of(_body(kind, frame))
            self._work()
        elif kind in (_RECEIPT, _ACKED):
            if kind == _ACKED:
                _body(kind, frame)
            self._waits -= 1
            if not self._waits:
                end = self._end.end_txn
                end.txnid_most_bits, end.txnid_least_bits = self._txn
                self._out.append(encode_command(self._end))
        elif kind == _ENDED:
            _body(kind, frame)
            self._ended()

    def _work(self) -> None:
        if not self._inputs:
            self._is_hungry = True
            return
        self._waits = 1 + self._bench.messages
        for message in (self._send.send, self._metadata, self._ack.ack):
            message.txnid_most_bits, message.txnid_least_bits = self._txn
        for _ in range(self._bench.messages):
            self._sequence += 1
            self._send.send.sequence_id = self._metadata.sequence_id = self._sequence
            entry = encode_entry(self._metadata, bytes(MESSAGE_BYTES))
            self._out += encode_with_payload(self._send, entry)
        ack = self._ack.ack
        del ack.message_id[:]
        ack.message_id.append(self._inputs.popleft())
        self._out.append(encode_command(self._ack))
        self._owed += 1
        if self._owed >= PERMITS // 2:
            self._out.append(command("FLOW", consumer_id=1, messagePermits=self._owed))
            self._owed = 0

    def _ended(self) -> None:
        bench = self._bench
        bench.done += 1
        if time.perf_counter() < bench.until and bench.done <= bench.most:
            self._out.append(self._begin)
            return
        self._is_running = False
        bench.running -= 1
        if not bench.running:
            bench.over.set()


def _body(kind: int, frame: bytes) -> Any:
    body = getattr(pb.BaseCommand.FromString(frame), MEMBERS[kind])
    if "error" in body.DESCRIPTOR.fields_by_name and body.HasField("error"):
        raise ConnectionError(f"refused: {body}")
    return body


class CountingLoop(asyncio.SelectorEventLoop):
    """asyncio's loop, and how much of what it was asked for."""

    counts: Counter[str]

    def create_future(self) -> asyncio.Future[Any]:
        self.counts["futures"] += 1
        return super().create_future()

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        self.counts["tasks"] += 1
        return super().create_task(coro, **options)

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        self.counts["callbacks of the loop"] += 1
        return super().call_soon(callback, *args, context=context)

    def _run_once(self) -> None:
        self.counts["turns of the loop"] += 1
        super()._run_once()  # type: ignore[misc]


class Figures:
    """What grows with each transaction, at one moment."""

    def __init__(self, bench: Bench) -> None:
        journal = bench.journal
        self.values: dict[str, float] = {
            "journal records": journal.next_sequence,
            "journal bytes": journal.written_bytes,
            "metadata puts": metrics.METADATA_CHANGES.labels(kind="put")._value.get(),
            "database rows": bench.rows,
            "metadata deletes": metrics.METADATA_CHANGES.labels(kind="delete")._value.get(),
        }

    def since(self, before: Figures, done: int) -> dict[str, float]:
        values = before.values
        return {name: (each - values[name]) / done for name, each in self.values.items()}


async def _prepared(
    folder: Path, options: argparse.Namespace, count: int
) -> tuple[Server, Bench, list[Client]]:
    server = Server(ServerConfig(data=str(folder), port=0))
    await server.start()
    bench = Bench(server, options.messages)
    clients = [Client(bench, number) for number in range(options.clients)]
    for client in clients:
        await client.open()
    await clients[0].subscribe()
    await clients[0].fill(count)
    for client in clients[1:]:
        await client.subscribe()
    await asyncio.sleep(SETTLE_SECONDS)
    _calm_collector()
    return server, bench, clients


async def _run(bench: Bench, clients: list[Client], seconds: float, most: int) -> None:
    bench.own, bench.done, bench.running = 0.0, 0, len(clients)
    bench.until, bench.most = time.perf_counter() + seconds, most
    bench.over.clear()
    for client in clients:
        client.start()
    await bench.over.wait()


async def timed(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    server, bench, clients = await _prepared(
        folder, options, int(RATE_MAX * (options.seconds + 0.5)) + PERMITS * options.clients
    )
    await _run(bench, clients, 0.5, 1 << 62)  # to be warm
    await asyncio.sleep(SETTLE_SECONDS)
    figures = Figures(bench)
    profile = cProfile.Profile() if options.profile else None
    if profile is not None:
        profile.enable()
    thread, process, wall = time.thread_time(), time.process_time(), time.perf_counter()
    await _run(bench, clients, options.seconds, 1 << 62)
    done, own, seconds = bench.done, bench.own, time.perf_counter() - wall
    # What is left to be cleaned up belongs to it.
    await asyncio.sleep(SETTLE_SECONDS)
    if profile is not None:
        profile.disable()
        _show(profile, done)
    thread, process = time.thread_time() - thread - own, time.process_time() - process - own
    found = {
        "processor time, us": process / done * 1e6,
        "of it on the loop, us": thread / done * 1e6,
        "of it on threads, us": (process - thread) / done * 1e6,
        "transactions": done,
        "per second": done / seconds,
        **Figures(bench).since(figures, done),
    }
    await server.stop()
    return found


def _show(profile: cProfile.Profile, done: int) -> None:
    """The functions that take most of a transaction, without what they call."""
    found = []
    stats: Any = pstats.Stats(profile)
    for (file, line, name), each in stats.stats.items():
        _, calls, own, cumulative, _ = each
        place = f"{file.rpartition('magnetar/')[2]}:{line} {name}"
        found.append((own / done * 1e6, cumulative / done * 1e6, calls / done, place))
    for own, cumulative, calls, place in sorted(found, reverse=True)[:SHOWN]:
        print(f"{own:7.2f} {cumulative:7.2f} us {calls:6.2f} x {place}")


async def counted(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    server, bench, clients = await _prepared(folder, options, 2 * COUNTED + PERMITS * 64)
    await _run(bench, clients, 60.0, COUNTED // 4)
    await asyncio.sleep(SETTLE_SECONDS)
    loop = cast("CountingLoop", asyncio.get_running_loop())
    calls = Counter[str]()
    own = str(Path(__file__))

    def hook(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            if frame.f_code.co_filename != own:
                calls["Python calls"] += 1
        elif event == "c_call":
            calls["C calls"] += 1

    loop.counts.clear()
    sys.setprofile(hook)
    await _run(bench, clients, 60.0, COUNTED)
    done = bench.done
    await asyncio.sleep(SETTLE_SECONDS)
    sys.setprofile(None)
    found = {name: count / done for name, count in (loop.counts + calls).items()}
    await server.stop()
    return found


def _with_loop(loop: Any, work: Coroutine[Any, Any, dict[str, float]]) -> dict[str, float]:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--messages", type=int, default=1, help="of each transaction")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where its files go")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    parser.add_argument("--only-time", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as name:
        folder = Path(name)
        found = _with_loop(uvloop.new_event_loop(), timed(folder / "timed", options))
        if not options.only_time and not options.profile:
            CountingLoop.counts = Counter()
            found |= _with_loop(CountingLoop(), counted(folder / "counted", options))
    done = int(found.pop("transactions"))
    publish(
        "txn_path",
        [Row(measure=name, value=value, unit="", samples=done) for name, value in found.items()],
    )


if __name__ == "__main__":
    main()
