"""A real server on free ports, with a client of its admin interface and one of its protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from yarl import URL

from magnetar.cli.link import ServerConnection
from magnetar.runtime.limits import Limits
from magnetar.server.admin import create_admin
from magnetar.server.app import Server
from magnetar.server.config import ServerConfig
from magnetar.wire.commands import TYPES
from magnetar.wire.frames import command
from magnetar.wire.messages import Delivered, Received, encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb

TOPIC = "persistent/public/default/t"
FULL = "persistent://public/default/t"
PUBLISHED_MS = 1_700_000_000_000

_MIB = 1024 * 1024
_LIMITS = Limits(journal_file_bytes=_MIB, journal_files_max=3)


class Answer(NamedTuple):
    status: int
    body: Any
    headers: dict[str, str]
    data: bytes


class World:
    """One server."""

    def __init__(self, server: Server, http: aiohttp.ClientSession) -> None:
        self.server = server
        self._http = http

    async def ask(self, method: str, path: str, body: object = None, **query: str) -> Answer:
        """A request below /admin/v2, or anywhere if the path begins with a slash."""
        assert self.server.admin_url is not None
        url = self.server.admin_url + (path if path.startswith("/") else f"/admin/v2/{path}")
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self._http.request(
            method,
            URL(url, encoded=True).update_query(query),
            data=None if body is None else content,
            headers={"Content-Type": "application/json"},
        ) as answer:
            data = await answer.read()
            found = (
                json.loads(data)
                if answer.content_type == "application/json"
                else data.decode(errors="replace")
            )
            return Answer(answer.status, found, dict(answer.headers), data)

    async def get(self, path: str, **query: str) -> Any:
        answer = await self.ask("GET", path, **query)
        assert answer.status == 200, answer
        return answer.body

    async def change(self, method: str, path: str, body: object = None, **query: str) -> None:
        """A change that succeeds without a word."""
        answer = await self.ask(method, path, body, **query)
        assert (answer.status, answer.data) == (204, b""), answer

    async def refuse(
        self, status: int, method: str, path: str, body: object = None, **query: str
    ) -> str:
        """A request that is refused; the reason."""
        answer = await self.ask(method, path, body, **query)
        assert answer.status == status, answer
        reason: str = answer.body["reason"]
        assert reason
        return reason

    @asynccontextmanager
    async def link(self) -> AsyncIterator[ServerConnection]:
        async with ServerConnection(self.server.service_url) as link:
            yield link

    async def produce(self, topic: str, count: int, *, key: str | None = None) -> list[str]:
        """Send `m0`, `m1`, ..., each published a second after the one before; their ids."""
        ids = []
        async with self.link() as link:
            opened = await link.request("PRODUCER", topic=topic, producer_id=1)
            for number in range(count):
                metadata = pb.MessageMetadata(
                    producer_name=opened.producer_name,
                    sequence_id=number,
                    publish_time=PUBLISHED_MS + number * 1000,
                )
                if key is not None:
                    metadata.partition_key = key
                    metadata.properties.add(key="colour", value="red")
                link.send(1, number, encode_entry(metadata, f"m{number}".encode()))
                received = await link.next()
                assert isinstance(received, Received)
                assert received.type == TYPES["SEND_RECEIPT"], received
                where = getattr(received.body, "message_id")  # noqa: B009  typed as any message
                ids.append(f"{where.ledgerId}:{where.entryId}")
            await link.request("CLOSE_PRODUCER", producer_id=1)
        return ids

    async def subscribe(
        self, link: ServerConnection, topic: str, subscription: str, consumer_id: int
    ) -> None:
        await link.request(
            "SUBSCRIBE",
            topic=topic,
            subscription=subscription,
            subType=pb.CommandSubscribe.Exclusive,
            consumer_id=consumer_id,
        )

    async def deliver(self, link: ServerConnection, consumer_id: int, count: int) -> list[bytes]:
        """The next payloads, with all headers."""
        link.write(command("FLOW", consumer_id=consumer_id, messagePermits=count))
        found: list[bytes] = []
        while len(found) < count:
            received = await link.next()
            if isinstance(received, Delivered):
                found.append(received.headers_and_payload)
        return found


def run(
    folder: Path, scenario: Callable[[World], Awaitable[None]], limits: Limits = _LIMITS
) -> None:
    """Run a scenario against a server of its own."""

    async def go() -> None:
        config = ServerConfig(
            data=str(folder / "data"), port=0, admin_port=0, cluster="here", limits=limits
        )
        async with (
            Server(config, create_admin=create_admin) as server,
            aiohttp.ClientSession() as http,
        ):
            await scenario(World(server, http))

    asyncio.run(go())
