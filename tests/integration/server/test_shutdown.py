"""A server that is told to stop while it is used: what was promised is kept, and said.

Real processes and SIGTERM; then a second server on the same folder tells what is stored.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from magnetar.errors import MagnetarError
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.commands import NAMES
from magnetar.wire.messages import Delivered, Received
from tests.integration.server.process import Running, served
from tests.unit.server.serving import message, published, pushed, subscribed

PUBLISHERS = 3
SOME_RECEIPTS = 2000


class Publisher:
    """Publishes without a pause until its connection ends, and notes what it was promised."""

    def __init__(self, number: int) -> None:
        self.topic = f"topic-{number}"
        self.sent = 0
        self.receipts: list[int] = []
        self.under_way = asyncio.Event()

    async def run(self, driver: Driver) -> None:
        await driver.request("PRODUCER", topic=self.topic, producer_id=1)
        reading = asyncio.create_task(self._read(driver))
        try:
            while True:
                for _ in range(100):
                    entry = build_message(b"%d" % self.sent, sequence_id=self.sent)
                    driver.send("SEND", entry, producer_id=1, sequence_id=self.sent)
                    self.sent += 1
                await driver.drain()
                await asyncio.sleep(0)
        except MagnetarError:
            await reading  # what came before the end is still to be read

    async def _read(self, driver: Driver) -> None:
        try:
            while True:
                push = await driver.pushes.get()
                assert isinstance(push, Received)
                if NAMES[push.type] == "SEND_RECEIPT":
                    body: Any = push.body
                    self.receipts.append(body.sequence_id)
                    if len(self.receipts) == SOME_RECEIPTS:
                        self.under_way.set()
                else:
                    assert NAMES[push.type] == "CLOSE_PRODUCER"
        except MagnetarError:
            return


@pytest.mark.slow
def test_a_stop_while_publishing_receipts_exactly_what_is_stored(tmp_path: Path) -> None:
    publishers = [Publisher(number) for number in range(PUBLISHERS)]

    async def publish(server: Running) -> None:
        drivers = [await server.connect(pushes_max=10**6) for _ in publishers]
        runs = [
            asyncio.create_task(publisher.run(driver))
            for publisher, driver in zip(publishers, drivers, strict=True)
        ]
        await asyncio.gather(*(publisher.under_way.wait() for publisher in publishers))
        server.terminate()
        await asyncio.gather(*runs)
        for driver in drivers:
            await driver.lost()

    with served(tmp_path) as server:
        asyncio.run(publish(server))
        assert server.exit_code() == 0

    async def check(server: Running) -> None:
        for publisher in publishers:
            stored = await stored_numbers(server, publisher.topic)
            assert publisher.receipts == stored == list(range(len(stored)))

    with served(tmp_path) as server:
        asyncio.run(check(server))


async def stored_numbers(server: Running, topic: str) -> list[int]:
    """The numbers that stand in the messages of a topic, in their order."""
    driver = await server.connect()
    await subscribed(driver, topic=topic, subscription="check", durable=False)
    found = await driver.request("GET_LAST_MESSAGE_ID", consumer_id=0)
    last = (found.last_message_id.ledgerId, found.last_message_id.entryId)
    numbers = []
    while True:
        delivered = await message(driver)
        numbers.append(int(_number_in(delivered)))
        driver.send("FLOW", consumer_id=0, messagePermits=1)
        here = delivered.body.message_id
        if (here.ledgerId, here.entryId) == last:
            await driver.close()
            return numbers


def _number_in(delivered: Delivered) -> bytes:
    whole = delivered.headers_and_payload
    metadata_size = int.from_bytes(whole[6:10], "big")  # after magic and checksum
    return whole[10 + metadata_size :]


@pytest.mark.slow
def test_a_client_that_reads_late_still_gets_what_it_is_owed(tmp_path: Path) -> None:
    """Its own bytes stand unread at the server: a careless close would cost it the receipts."""
    count = 60_000

    async def scene(server: Running) -> None:
        driver = await server.connect(pushes_max=10**6)
        await driver.request("PRODUCER", topic="topic", producer_id=1)
        transport = driver.detach()
        transport.pause_reading()
        entry = build_message(b"x" * 100)
        for number in range(count):
            driver.send("SEND", entry, producer_id=1, sequence_id=number)
            if number % 1000 == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(0.5)  # the server stores it all, and its receipts fill the buffers
        server.terminate()
        await asyncio.sleep(0.2)
        for number in range(count, count + 1000):
            driver.send("SEND", entry, producer_id=1, sequence_id=number)
        await asyncio.sleep(0.2)
        transport.resume_reading()
        got = 0
        try:
            while True:
                push = await driver.pushes.get()
                assert isinstance(push, Received)
                got += NAMES[push.type] == "SEND_RECEIPT"
        except MagnetarError:
            receipts.append(got)
        await driver.lost()

    receipts: list[int] = []
    with served(tmp_path) as server:
        asyncio.run(scene(server))
        assert server.exit_code() == 0

    async def check(server: Running) -> None:
        driver = await server.connect()
        await subscribed(driver, subscription="check", durable=False)
        found = await driver.request("GET_LAST_MESSAGE_ID", consumer_id=0)
        assert found.last_message_id.entryId + 1 == receipts[0]
        await driver.close()

    with served(tmp_path) as server:
        asyncio.run(check(server))


def test_a_stop_writes_acknowledgements_that_nobody_waits_for(tmp_path: Path) -> None:
    async def acknowledge(server: Running) -> None:
        driver = await server.connect()
        await subscribed(driver, subType=1)
        await published(driver, 5)
        ids = [(await message(driver)).body.message_id for _ in range(5)]
        for number in (0, 1, 3):
            here = {"ledgerId": ids[number].ledgerId, "entryId": ids[number].entryId}
            driver.send("ACK", consumer_id=0, ack_type=0, message_id=[here])
        driver.send("PING")
        await pushed(driver, "PONG")  # they have arrived, and are not written yet
        server.terminate()
        await driver.lost()

    with served(tmp_path, cursor_flush_seconds=3600) as server:
        asyncio.run(acknowledge(server))
        assert server.exit_code() == 0

    async def check(server: Running) -> None:
        driver = await server.connect()
        await subscribed(driver, subType=1)
        again = [_number_in(await message(driver)) for _ in range(2)]
        assert again == [b"2", b"4"]
        driver.send("PING")
        await pushed(driver, "PONG")
        await driver.close()

    with served(tmp_path) as server:
        asyncio.run(check(server))


def test_a_stop_answers_acknowledgements_that_somebody_waits_for(tmp_path: Path) -> None:
    async def scene(server: Running) -> None:
        driver = await server.connect()
        await subscribed(driver, subType=1)
        await published(driver, 200)
        for number in range(200):
            here = (await message(driver)).body.message_id
            fields = {"ledgerId": here.ledgerId, "entryId": here.entryId}
            driver.send(
                "ACK", consumer_id=0, ack_type=0, message_id=[fields], request_id=1000 + number
            )
        answered = [await pushed(driver, "ACK_RESPONSE")]
        server.terminate()
        try:
            while True:
                push = await driver.pushes.get()
                assert isinstance(push, Received)
                if NAMES[push.type] == "ACK_RESPONSE":
                    answered.append(push.body)
        except MagnetarError:
            pass
        assert [each.request_id for each in answered] == list(range(1000, 1200))
        assert not any(each.HasField("error") for each in answered)
        await driver.lost()

    with served(tmp_path) as server:
        asyncio.run(scene(server))


@pytest.mark.slow
def test_a_stop_ends_in_time_whatever_its_peers_do(tmp_path: Path) -> None:
    async def scene(server: Running) -> None:
        lazy = await server.connect()
        await subscribed(lazy)
        lazy.detach().pause_reading()
        halfway = await server.connect(handshake=False)
        halfway.send_bytes(b"\x00\x00")
        writer = await server.connect()
        await writer.request("PRODUCER", topic="topic", producer_id=1)
        big = build_message(b"x" * 500_000)
        for number in range(20):
            await writer.publish(1, number, big)
        server.terminate()
        assert await asyncio.to_thread(server.exit_code) == 0  # some of them would never let it
        for driver in (lazy, halfway, writer):
            driver.abort()
            await driver.lost()

    with served(tmp_path, close_seconds=10) as server:
        asyncio.run(scene(server))
