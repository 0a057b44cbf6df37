"""Clients that do not behave: memory stays bounded, and the others are not disturbed.

Measured on a server in a process of its own. The bounds are sums of documented limits with room for
the interpreter's own; docs/reference/limits.md has figures of a run.
"""

from __future__ import annotations

import asyncio
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from harness.limits import PATIENCE_S
from magnetar.errors import DeadlineExceeded, MagnetarError
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.commands import NAMES
from magnetar.wire.frames import command
from magnetar.wire.messages import Delivered, Received
from tests.integration.server.process import MIB, Running, measured, served
from tests.unit.server.serving import subscribed

pytestmark = [pytest.mark.slow, measured]

ENTRY_BYTES = 100_000
QUIET_SECONDS = 3.0


# --- a consumer that never reads


def test_a_consumer_that_never_reads_costs_little_and_disturbs_nobody(tmp_path: Path) -> None:
    async def scene(server: Running) -> None:
        reader = await server.connect()
        await subscribed(reader, subscription="reads")
        writer = await server.connect()
        await writer.request("PRODUCER", topic="topic", producer_id=1)
        alone = await _throughput(writer, reader, first=0, count=1000)
        lazy = await server.connect()
        await subscribed(lazy, subscription="never reads", initialPosition=1)
        lazy.send("FLOW", consumer_id=0, messagePermits=1_000_000)
        lazy.detach().pause_reading()
        server.forget_peak()
        before = server.rss()
        beside = await _throughput(writer, reader, first=1000, count=2000)
        grown = server.peak_rss() - before
        figures = f"alone {alone:.0f} MB/s, beside {beside:.0f} MB/s, {grown / MIB:.0f} MiB more"
        assert grown < 120 * MIB, figures
        assert beside > alone / 3, figures
        await _closed(reader, writer)
        await _cut(lazy)

    with served(tmp_path) as server:
        asyncio.run(scene(server))


async def _throughput(writer: Driver, reader: Driver, *, first: int, count: int) -> float:
    """MB per second from a publisher with few in flight to a consumer."""
    entry = build_message(b"x" * ENTRY_BYTES)
    started = time.monotonic()

    async def publish() -> None:
        for number in range(first, first + count, 10):
            sends = (writer.publish(1, number + step, entry) for step in range(10))
            await asyncio.gather(*sends)

    publishing = asyncio.create_task(publish())
    for _ in range(count):
        delivered = await reader.pushes.get()
        assert isinstance(delivered, Delivered)
        reader.send("FLOW", consumer_id=0, messagePermits=1)
    await publishing
    return count * ENTRY_BYTES / 1e6 / (time.monotonic() - started)


# --- producers that never wait


def test_a_producer_that_never_reads_receipts_is_stopped(tmp_path: Path) -> None:
    async def scene(server: Running) -> None:
        other = await server.connect()
        await other.request("PRODUCER", topic="other", producer_id=1)
        alone = await _seconds_of_a_publish(other, first=0)
        deaf = await server.connect()
        await deaf.request("PRODUCER", topic="topic", producer_id=1)
        deaf.detach().pause_reading()
        server.forget_peak()
        before = server.rss()
        sent = await _send_until_stuck(deaf, build_message(b"x" * 100))
        grown = server.peak_rss() - before
        each = await _seconds_of_a_publish(other, first=100)
        figures = f"stuck after {sent} sends, {grown / MIB:.0f} MiB more, others {each:.4f} s"
        assert grown < 150 * MIB, figures
        assert each < 0.1 + 10 * alone, f"{figures}, alone {alone:.4f} s"
        await _closed(other)
        await _cut(deaf)

    with served(tmp_path) as server:
        asyncio.run(scene(server))


async def _seconds_of_a_publish(driver: Driver, *, first: int) -> float:
    started = time.monotonic()
    for number in range(first, first + 100):
        await driver.publish(1, number, build_message(b"x"))
    return (time.monotonic() - started) / 100


async def _send_until_stuck(driver: Driver, entry: bytes) -> int:
    frame = command("SEND", producer_id=1, sequence_id=0)
    total, size = struct.unpack_from(">II", frame)
    framed = struct.pack(">II", total + len(entry), size) + frame[8:] + entry
    for number in range(1000):
        driver.send_bytes(framed * 2000)
        try:
            await driver.drain(1.0)
        except DeadlineExceeded:
            return number * 2000
    raise AssertionError("the server reads on although nobody takes its receipts")


def test_large_messages_sent_without_waiting_are_slowed_and_not_refused(tmp_path: Path) -> None:
    count, size = 200, 1_000_000

    async def scene(server: Running) -> None:
        drivers = [await server.connect() for _ in range(3)]
        server.forget_peak()
        before = server.rss()
        await asyncio.gather(*(_publish_all(each, count // 2, size) for each in drivers))
        grown = server.peak_rss() - before
        assert grown < 350 * MIB, f"{grown / MIB:.0f} MiB: journal queue, cache, frames being read"
        await _closed(*drivers)

    with served(tmp_path) as server:
        asyncio.run(scene(server))


async def _publish_all(driver: Driver, count: int, size: int) -> None:
    await driver.request("PRODUCER", topic="topic", producer_id=1)
    entry = build_message(b"x" * size)
    for number in range(count):
        driver.send("SEND", entry, producer_id=1, sequence_id=number)
        await driver.drain()
    for number in range(count):
        receipt = await driver.pushes.get()
        assert isinstance(receipt, Received)
        assert NAMES[receipt.type] == "SEND_RECEIPT"
        body: Any = receipt.body
        assert body.sequence_id == number


# --- many


def test_a_thousand_connections(tmp_path: Path) -> None:
    count = 1000

    async def scene(server: Running) -> None:
        before = server.rss()
        drivers: list[Driver] = []
        for _ in range(count // 100):
            drivers += await asyncio.gather(*(server.connect() for _ in range(100)))
        each = (server.rss() - before) / count
        busy = await _idle_share(server)
        figures = f"{each:.0f} bytes per connection, {busy:.2%} of a processor"
        assert each < 50_000, figures
        assert busy < 0.02, figures
        answers = [driver.request("LOOKUP", topic="topic") for driver in drivers]
        await asyncio.gather(*answers)
        await _closed(*drivers)

    with served(tmp_path) as server:
        asyncio.run(scene(server))


def test_many_topics_and_a_client_that_asks_for_their_list_and_does_not_read(
    tmp_path: Path,
) -> None:
    count = 2000

    async def make(driver: Driver, numbers: range) -> None:
        for number in numbers:
            name = f"a-topic-with-a-name-that-is-not-very-short-{number}"
            await driver.request("PRODUCER", topic=name, producer_id=number)
            await driver.request("CLOSE_PRODUCER", producer_id=number)

    async def scene(server: Running) -> None:
        driver = await server.connect()
        before = server.rss()
        await asyncio.gather(*(make(driver, range(first, count, 16)) for first in range(16)))
        each = (server.rss() - before) / count
        lazy = await server.connect()
        lazy.detach().pause_reading()
        server.forget_peak()
        before = server.rss()
        alone = await _slowest_lookup(driver, lookups=50)
        for number in range(3000):  # 600 MB, would they all be answered
            lazy.send("GET_TOPICS_OF_NAMESPACE", namespace="public/default", request_id=number)
        slowest = await _slowest_lookup(driver, lookups=150)
        grown = server.peak_rss() - before
        figures = f"{each:.0f} bytes per topic; lists: {grown / MIB:.0f} MiB, {slowest:.3f} s"
        assert each < 50_000, figures
        assert grown < 60 * MIB, figures
        assert slowest < 2 + 10 * alone, f"{figures}, alone {alone:.3f} s"
        await _cut(lazy)
        await _closed(driver)

    with served(tmp_path) as server:
        asyncio.run(scene(server))


EXTERNAL = 22
"""The type of schema whose definition may be anything."""


def test_a_client_that_asks_for_a_large_schema_and_does_not_read(tmp_path: Path) -> None:
    async def scene(server: Running) -> None:
        driver, lazy = await server.connect(), await server.connect()
        schema = {"name": "s", "schema_data": b"x" * 400_000, "type": EXTERNAL}
        await driver.request("PRODUCER", topic="topic", producer_id=1, schema=schema)
        lazy.detach().pause_reading()
        server.forget_peak()
        before = server.rss()
        alone = await _slowest_lookup(driver, lookups=50)
        for number in range(2000):  # 800 MB, would they all be answered
            lazy.send("GET_SCHEMA", topic="topic", request_id=number)
        slowest = await _slowest_lookup(driver, lookups=150)
        grown = server.peak_rss() - before
        figures = f"{grown / MIB:.0f} MiB more, {slowest:.3f} s"
        assert grown < 60 * MIB, figures
        assert slowest < 2 + 10 * alone, f"{figures}, alone {alone:.3f} s"
        await _cut(lazy)
        await _closed(driver)

    with served(tmp_path) as server:
        asyncio.run(scene(server))


async def _slowest_lookup(driver: Driver, lookups: int) -> float:
    """Seconds; how much slower they are beside somebody is told by those of a server alone."""
    slowest = 0.0
    for _ in range(lookups):
        asked = time.monotonic()
        await driver.request("LOOKUP", topic="topic")
        slowest = max(slowest, time.monotonic() - asked)
        await asyncio.sleep(0.01)
    return slowest


def test_idle_consumers_cost_no_processor_time(tmp_path: Path) -> None:
    async def scene(server: Running) -> None:
        drivers = await asyncio.gather(*(server.connect() for _ in range(100)))
        for number, driver in enumerate(drivers):
            await subscribed(driver, topic=f"topic-{number % 10}", subscription=f"s-{number}")
        busy = await _idle_share(server)
        assert busy < 0.01, f"{busy:.2%} of a processor"
        await _closed(*drivers)

    with served(tmp_path) as server:
        asyncio.run(scene(server))


async def _idle_share(server: Running) -> float:
    """The part of one processor that it uses while nobody asks for anything."""
    await asyncio.sleep(2)  # what was created is moved to its place
    before = server.cpu_seconds()
    await asyncio.sleep(QUIET_SECONDS)
    return (server.cpu_seconds() - before) / QUIET_SECONDS


# --- before the handshake


def test_a_length_of_two_gigabytes_before_the_handshake_costs_nothing(tmp_path: Path) -> None:
    async def scene(server: Running) -> None:
        server.forget_peak()
        before = server.rss()
        for _ in range(50):
            driver = await server.connect(handshake=False)
            driver.send_bytes(struct.pack(">I", 2**31 - 1) + b"x" * MIB)
            await driver.lost()  # at once: the deadline of a handshake is later than a test's limit
        grown = server.peak_rss() - before
        assert grown < 10 * MIB, f"{grown / MIB:.1f} MiB more"

    with served(tmp_path, connection_handshake_seconds=2 * PATIENCE_S) as server:
        asyncio.run(scene(server))


def test_a_handshake_that_drips_is_cut_at_its_deadline(tmp_path: Path) -> None:
    async def scene(server: Running) -> None:
        hello = command("CONNECT", client_version="slow" * 100, protocol_version=21)
        driver = await server.connect(handshake=False)
        started = time.monotonic()
        with pytest.raises(MagnetarError):  # long before it has said all of it
            await _drip(driver, hello)
        assert time.monotonic() - started > 0.3
        await driver.lost()

    with served(tmp_path, connection_handshake_seconds=0.5) as server:
        asyncio.run(scene(server))


async def _drip(driver: Driver, data: bytes) -> None:
    for byte in data:
        driver.send_bytes(bytes([byte]))
        await asyncio.sleep(0.02)


def test_a_peer_that_answers_no_ping_is_cut_and_one_that_does_is_not(tmp_path: Path) -> None:
    async def scene(server: Running) -> None:
        silent, lively = await server.connect(), await server.connect()
        silent.answer_pings = False
        await subscribed(silent)
        await silent.lost()
        assert lively.failure is None
        await subscribed(lively)  # the place of the other one
        await _closed(lively)

    with served(
        # The lively one must find the time to answer, also on a busy machine.
        tmp_path,
        connection_handshake_seconds=3,
        connection_keepalive_seconds=3,
    ) as server:
        asyncio.run(scene(server))


# --- parts


async def _closed(*drivers: Driver) -> None:
    for driver in drivers:
        await driver.close()


async def _cut(driver: Driver) -> None:
    driver.abort()
    await driver.lost()
