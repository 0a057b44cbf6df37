"""A real server on a free port for one test, and what tests say to it through drivers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.patient_clients import PatientDriver
from magnetar.errors import MagnetarError
from magnetar.runtime.limits import Limits
from magnetar.server.app import Server
from magnetar.server.config import ServerConfig
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.commands import NAMES
from magnetar.wire.messages import Delivered, Received

LIMITS = Limits(journal_file_bytes=1024 * 1024, close_seconds=60)


@asynccontextmanager
async def serving(
    folder: Path, *, limits: Limits = LIMITS, **settings: Any
) -> AsyncIterator[Server]:
    config = ServerConfig(data=str(folder), port=0, limits=limits, **settings)
    async with Server(config) as server:
        yield server


async def connected(server: Server, **fields: Any) -> Driver:
    url = urlsplit(server.service_url)
    assert url.hostname is not None
    assert url.port is not None
    return await PatientDriver.connect(url.hostname, url.port, **fields)


async def subscribed(driver: Driver, consumer_id: int = 0, **fields: Any) -> None:
    """A consumer on `topic`, from the first message on, with permits."""
    given: dict[str, Any] = {
        "topic": "topic",
        "subscription": "sub",
        "subType": 0,
        "initialPosition": 1,
        "consumer_id": consumer_id,
    }
    await driver.request("SUBSCRIBE", **(given | fields))
    driver.send("FLOW", consumer_id=consumer_id, messagePermits=1000)


async def published(driver: Driver, count: int, *, topic: str = "topic") -> list[Any]:
    """Messages `0`, `1`, ... on a topic, through a producer of their own; their ids."""
    opened = await driver.request("PRODUCER", topic=topic, producer_id=99)
    receipts = [
        await driver.publish(99, number, build_message(b"%d" % number, sequence_id=number))
        for number in range(count)
    ]
    assert opened.producer_name
    await driver.request("CLOSE_PRODUCER", producer_id=99)
    return [receipt.message_id for receipt in receipts]


async def message(driver: Driver) -> Delivered:
    """The next push, which must be a message."""
    pushed = await driver.pushes.get()
    assert isinstance(pushed, Delivered), pushed
    return pushed


async def pushed(driver: Driver, name: str) -> Any:
    """The body of the next push of that name; messages before it are skipped."""
    while True:
        push = await driver.pushes.get()
        if isinstance(push, Received):
            assert NAMES[push.type] == name
            return push.body


async def refused(request: Any) -> int:
    """The code with which a request is refused."""
    try:
        await request
    except MagnetarError as error:
        return int(error.wire_code)
    raise AssertionError("it was not refused")


def run(scene: Any) -> None:
    asyncio.run(scene)
