"""Clients, browsers and servers that meet where they should not: told in seconds, and in words."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from magnetar.client.client import Client
from magnetar.client.schema import AvroSchema, JsonSchema
from magnetar.errors import ConsumerBusy, IncompatibleSchema, NotAllowed, NotConnected
from magnetar.server.admin import create_admin
from magnetar.server.app import Server
from magnetar.server.config import ServerConfig
from magnetar.testing.virtual import virtual_time
from tests.integration.client.stage import URL, new_client, play
from tests.integration.server.scalable_stage import NAME, Stage
from tests.unit.client.schema_records import Order
from tests.unit.server.serving import LIMITS

ASKED: dict[str, Callable[[Client], Awaitable[Any]]] = {
    "producer": lambda client: client.producer(NAME),
    "consumer": lambda client: client.consumer("persistent://public/default/t", "s"),
    "queue": lambda client: client.queue_consumer(NAME, "s"),
    "stream": lambda client: client.stream_consumer(NAME, "s"),
    "transaction": lambda client: client.transaction(),
    "ranges": lambda client: client.ranges(NAME),
}


@pytest.mark.parametrize("what", ASKED)
def test_a_server_that_was_not_started_is_told_in_seconds(what: str) -> None:
    async def refuse(*_: Any) -> Any:
        await asyncio.sleep(0.001)
        raise ConnectionRefusedError("[Errno 111] Connect call failed")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with Client("pulsar://localhost:6650", connect=refuse) as client:
            began = loop.time()
            with pytest.raises(NotConnected, match=r"nobody listens at .*magnetar serve"):
                await ASKED[what](client)
            assert loop.time() - began < 10

    virtual_time.run(main(), until=1000)


def test_a_server_that_is_just_starting_is_waited_for() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        connect = stage.world.connect
        loop = asyncio.get_running_loop()
        ready_at = loop.time() + 2

        async def late(*given: Any) -> Any:
            if loop.time() < ready_at:
                raise ConnectionRefusedError("nobody listens")
            return await connect(*given)

        def late_client(**options: Any) -> Client:
            return Client(URL, connect=late, **options)

        async with late_client() as client, client.producer(NAME) as producer:
            await producer.send(b"1")
        ready_at = loop.time() + 20
        async with late_client(refused_timeout=60) as client:
            await (await client.producer(NAME)).send(b"2")

    play(story)


def test_both_ports_name_the_protocol_that_came_to_the_wrong_one(tmp_path: Path) -> None:
    """A browser at the binary port, and clients at the admin port, read where to go."""

    async def main() -> None:
        config = ServerConfig(data=str(tmp_path), port=0, admin_port=0, limits=LIMITS)
        async with Server(config, create_admin=create_admin) as server:
            url = urlsplit(server.service_url)
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(b"GET /admin/v2/clusters HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400")
            assert b"binary protocol" in answer
            assert b"admin_port" in answer
            writer.close()
            await writer.wait_closed()
            admin = urlsplit(server.admin_url or "")
            async with Client(f"pulsar://{admin.hostname}:{admin.port}") as client:
                with pytest.raises(NotAllowed, match="admin interface") as told:
                    await client.producer("t")
                assert server.service_url in str(told.value)

    asyncio.run(main())


@pytest.mark.parametrize(
    "spoken", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x01\x00\x02\x02\x16"]
)
def test_a_client_names_the_protocol_of_another_server(spoken: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(spoken)
        writer.close()
        await writer.wait_closed()

    async def main() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with Client(f"pulsar://127.0.0.1:{port}") as client:
                name = "HTTP" if spoken.startswith(b"HTTP") else "TLS"
                with pytest.raises(NotConnected, match=f"speaks {name}.*6650"):
                    await client.producer("t")

    asyncio.run(main())


def test_a_subscription_of_another_type_is_told_at_once_and_in_words() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            began = stage.world.now()
            async with client.queue_consumer(NAME, "s5"):
                with pytest.raises(ConsumerBusy, match="s5 is a queue subscription"):
                    async with client.stream_consumer(NAME, "s5") as consumer:
                        await consumer.receive(timeout=20)
            async with client.stream_consumer(NAME, "s6"):
                with pytest.raises(ConsumerBusy, match="s6 is a stream subscription"):
                    await client.queue_consumer(NAME, "s6")
            assert stage.world.now() - began < 10

    play(story)


def test_schemas_are_told_by_name() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            await client.producer(NAME, schema=JsonSchema(Order))
            with pytest.raises(IncompatibleSchema, match="JSON, not AVRO"):
                await client.producer(NAME, schema=AvroSchema(Order))

    play(story)
