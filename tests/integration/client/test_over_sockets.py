"""The client over real sockets: with a server in this process, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import ssl
from pathlib import Path

import pytest

from harness.limits import PATIENCE_S
from magnetar.client.client import Client
from magnetar.client.connection.settings import TlsSettings
from magnetar.errors import InvalidServiceUrl, NotConnected, TopicNotFound
from tests.unit.server.serving import connected, message, serving, subscribed

TOPICS = ["persistent://public/default/regular", "topic://public/default/scalable"]


@pytest.mark.parametrize("topic", TOPICS)
def test_messages_arrive(tmp_path: Path, topic: str) -> None:
    async def story() -> None:
        async with (
            serving(tmp_path) as server,
            Client(server.service_url, operation_timeout=PATIENCE_S) as client,
            await client.producer(topic) as producer,
        ):
            ids = await asyncio.gather(*(producer.send(b"%d" % n, key="k") for n in range(500)))
            assert len(set(ids)) == 500
            assert client._connections.count == 1

    asyncio.run(story())


def test_another_client_reads_what_this_one_sent(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver, topic=TOPICS[0])
            async with Client(server.service_url, operation_timeout=PATIENCE_S) as client:
                producer = await client.producer(TOPICS[0], batching=False)
                await producer.send(b"hello", key="k")
            assert (await message(driver)).headers_and_payload.endswith(b"hello")
            await driver.close()

    asyncio.run(story())


@pytest.mark.parametrize("turns", [30])
def test_opening_and_closing_leaves_nothing_behind(tmp_path: Path, turns: int) -> None:
    async def story() -> None:
        async with serving(tmp_path) as server:
            for turn in range(turns):
                async with Client(server.service_url, operation_timeout=PATIENCE_S) as client:
                    for _ in range(3):
                        producer = await client.producer(TOPICS[turn % 2])
                        await producer.send(b"x")
                        if turn % 3:
                            await producer.close()
                assert not client._open
                assert client._connections.count == 0
            tasks = {task.get_name() for task in asyncio.all_tasks()}
            assert not [name for name in tasks if "magnetar-" in name or "layout of" in name]
            gc.collect()
            alive = [each for each in gc.get_objects() if type(each).__name__ == "Producer"
                     and type(each).__module__ == "magnetar.client.produce.producer"]  # fmt: skip
            assert len(alive) <= 1, "the last one, which this test still names"

    asyncio.run(story())


def test_wrong_addresses_are_told_apart(tmp_path: Path) -> None:
    async def story() -> None:
        with pytest.raises(InvalidServiceUrl):
            Client("localhost")
        async with serving(tmp_path) as server:
            secure = server.service_url.replace("pulsar://", "pulsar+ssl://")
            async with Client(secure, operation_timeout=1) as client:
                with pytest.raises(NotConnected):
                    await client.producer(TOPICS[0])
            async with Client("pulsar://127.0.0.1:1", operation_timeout=1) as client:
                with pytest.raises(NotConnected):
                    await client.producer(TOPICS[0])
            async with Client(server.service_url, operation_timeout=PATIENCE_S) as client:
                with pytest.raises(TopicNotFound):
                    await client.producer("persistent://nobody/nowhere/topic")

    asyncio.run(story())


def test_tls_settings_make_a_context_that_checks() -> None:
    context = TlsSettings().context()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
