"""What batches that hold one entry bucket each gain and cost, beside batches of any keys.

    python -m bench.buckets [--messages 200000] [--rounds 3]

Keyed messages go to a scalable topic of one segment. Where it has entry buckets (four), our
producer fills a batch for each of them, and four stream consumers share the segment: each fetches,
decrypts and unpacks only the entries of its own keys. Where it has one bucket, batches are of any
keys: to share the work by key, each of four readers has to fetch and unpack everything and keep a
quarter. Both compressed, then also encrypted. Figures are medians of the rounds, in turns; a
consumer's processor time is that of all four, for each message of the topic.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final

import uvloop
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from bench.broker import Running, server
from bench.report import Row, publish
from bench.storage import scratch
from magnetar.client.client import Client
from magnetar.client.consume.stream import StreamConsumer
from magnetar.client.encryption.keys import PemKeyReader
from magnetar.client.message.routing import entry_bucket_hash
from magnetar.model.subscriptions import InitialPosition
from magnetar.wire.compression import Compression

BUDGET: Final = "MAGNETAR_SCALABLE_ENTRY_BUCKET_BUDGET"
READERS: Final = 4
KEYS: Final = 1000
PAYLOAD_BYTES: Final = 200
PENDING: Final = 20_000
SOME: Final = 2000
TIMEOUT_S: Final = 20.0
PROCESS_SECONDS: Final = 300.0
RING: Final = 1 << 16

_topics = count()


def compressible(rng: Random) -> bytes:
    """Half of it is chance, as in a record with a few ids and much text."""
    return rng.randbytes(PAYLOAD_BYTES // 2) + b"a" * (PAYLOAD_BYTES // 2)


def keys_in(folder: Path) -> PemKeyReader:
    return PemKeyReader(
        public={"bench": str(folder / "public.pem")}, private={"bench": str(folder / "private.pem")}
    )


def make_keys(folder: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = serialization.Encoding.PEM
    (folder / "private.pem").write_bytes(
        key.private_bytes(
            pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
    info = serialization.PublicFormat.SubjectPublicKeyInfo
    (folder / "public.pem").write_bytes(key.public_key().public_bytes(pem, info))


# --- one client in a process of its own


async def produce(client: Client, options: argparse.Namespace) -> dict[str, float]:
    more: dict[str, Any] = {}
    if options.encrypt:
        more = {"encryption_keys": ["bench"], "key_reader": keys_in(options.keys)}
    producer = await client.producer(
        options.topic,
        max_pending=PENDING,
        batch_messages=1000,
        batch_delay=0.005,
        compression=Compression.ZSTD,
        **more,
    )
    await producer.send(b"first", key="first")
    rng = Random(1)
    bodies = [compressible(rng) for _ in range(KEYS)]
    names = [f"key-{number}" for number in range(KEYS)]
    start, cpu = time.perf_counter(), time.process_time()
    for number in range(options.messages):
        place = number * 7919 % KEYS
        await producer.submit(bodies[place], key=names[place])
    await producer.flush()
    seconds = time.perf_counter() - start
    return {
        "rate": options.messages / seconds,
        "cpu_us": (time.process_time() - cpu) * 1e6 / options.messages,
    }


async def consume(client: Client, options: argparse.Namespace) -> dict[str, float]:
    """All four readers: of one group, or each with a subscription of its own."""
    more: dict[str, Any] = {"key_reader": keys_in(options.keys)} if options.encrypt else {}
    consumers = [
        await client.stream_consumer(
            options.topic,
            "shared" if options.shared else f"alone-{number}",
            initial_position=InitialPosition.EARLIEST,
            name=f"r{number}",
            queue_size=PENDING,
            **more,
        )
        for number in range(READERS)
    ]
    start, cpu = time.perf_counter(), time.process_time()
    reading = [
        asyncio.create_task(read(each, number, options.shared))
        for number, each in enumerate(consumers)
    ]
    kept = [0] * READERS
    # What one of a group gets is not known beforehand, so the sum says when all have come.
    while sum(kept) < options.messages:
        await asyncio.sleep(0.01)
        if time.perf_counter() - start > PROCESS_SECONDS / 2:
            raise TimeoutError(f"{sum(kept)} of {options.messages} messages came")
        for number, task in enumerate(reading):
            kept[number] = COUNTS[number]
            if task.done():
                task.result()
    seconds = time.perf_counter() - start
    used = time.process_time() - cpu
    for task in reading:
        task.cancel()
    return {
        "rate": options.messages / seconds,
        "cpu_us": used * 1e6 / options.messages,
        "least": min(kept) / options.messages,
    }


COUNTS: Final = [0] * READERS


async def read(consumer: StreamConsumer[bytes], number: int, shared: bool) -> None:
    """Count what is this reader's: everything it gets, or its quarter of the keys."""
    mine: dict[str | None, bool] = {}
    while True:
        messages = await consumer.receive_many(SOME, timeout=TIMEOUT_S)
        for each in messages:
            key = each.key
            is_mine = mine.get(key)
            if is_mine is None:
                place = entry_bucket_hash(key) * READERS // RING
                is_mine = mine[key] = key != "first" and (shared or place == number)
            if is_mine:
                _ = each.value
                COUNTS[number] += 1
        if messages:
            consumer.ack_cumulative(messages[-1])


async def one(options: argparse.Namespace) -> dict[str, float]:
    async with Client(options.url, memory_limit=256 * 1024 * 1024) as client:
        return await (produce if options.role == "produce" else consume)(client, options)


# --- the turns


@contextmanager
def with_buckets(folder: Path, buckets: int) -> Iterator[Running]:
    folder.mkdir()
    os.environ[BUDGET] = str(buckets)
    try:
        with server(folder) as running:
            yield running
    finally:
        os.environ.pop(BUDGET, None)


def child(role: str, running: Running, topic: str, options: argparse.Namespace) -> dict[str, float]:
    flags = ["--role", role, "--url", f"pulsar://127.0.0.1:{running.port}", "--topic", topic]
    flags += ["--messages", str(options.messages), "--keys", str(options.keys)]
    flags += ["--encrypt"] if options.encrypt else []
    flags += ["--shared"] if options.shared else []
    done = subprocess.run(
        [sys.executable, "-m", "bench.buckets", *flags],
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"{role}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def turn(running: Running, options: argparse.Namespace) -> dict[str, float]:
    topic = f"topic://public/default/buckets-{next(_topics)}"
    found = {f"produce {k}": v for k, v in child("produce", running, topic, options).items()}
    return found | {f"consume {k}": v for k, v in child("consume", running, topic, options).items()}


def measure(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    with scratch() as folder:
        options.keys = folder
        make_keys(folder)
        with (
            with_buckets(folder / "one", 1) as one_bucket,
            with_buckets(folder / "four", READERS) as four,
        ):
            for encrypt in (False, True):
                options.encrypt = encrypt
                taken: dict[bool, list[dict[str, float]]] = {False: [], True: []}
                for _ in range(options.rounds):
                    for shared, running in ((False, one_bucket), (True, four)):
                        options.shared = shared
                        taken[shared].append(turn(running, options))
                rows += compared("encrypted" if encrypt else "compressed", taken)
    return rows


def compared(name: str, taken: dict[bool, list[dict[str, float]]]) -> list[Row]:
    units = {"produce rate": "1/s", "produce cpu_us": "us", "consume rate": "1/s"}
    units["consume cpu_us"] = "us"
    rows = []
    for what, unit in units.items():
        mixed, own = (statistics.median(each[what] for each in taken[s]) for s in (False, True))
        rows.append(
            Row(
                measure=f"{name}, {what.replace('cpu_us', 'processor time')}",
                value=own,
                unit=unit,
                anchor="batches of any keys",
                ratio=own / mixed,
                samples=len(taken[True]),
            )
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.buckets", description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    # What the bench tells a process of its own.
    parser.add_argument("--role", choices=("produce", "consume"), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--topic", help=argparse.SUPPRESS)
    parser.add_argument("--keys", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--encrypt", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shared", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        print(json.dumps(uvloop.run(one(options))))
        return 0
    publish("buckets", measure(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
