"""A flood of connections beyond the file descriptors of a server: it lives, and loses nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from harness.limits import PATIENCE_S
from magnetar.ledger.file_format import INDEX_SLOT_BYTES
from magnetar.testing.virtual.driver import Driver, build_message
from tests.integration.server.process import Running, measured, served
from tests.unit.server.serving import message, subscribed

pytestmark = [pytest.mark.slow, measured]

DESCRIPTORS = 400
FLOOD = 450
TOPICS = 20


@pytest.mark.parametrize("at_admin", [False, True], ids=["clients", "admin"])
def test_connections_beyond_the_descriptors_end_nothing(tmp_path: Path, at_admin: bool) -> None:
    async def flooded(server: Running) -> None:
        writer = await server.connect()
        for number in range(TOPICS):
            await writer.request("PRODUCER", topic=f"topic-{number}", producer_id=number)
        await _publish(writer, 0)
        url = urlsplit(server.admin_url)
        port, first = (url.port, b"GET /adm") if at_admin else (server.port, b"")
        flood = [await _silent(server.host, port, first) for _ in range(FLOOD)]
        # Each round is settled on its own: ledger files are opened and folders are synced.
        for sequence in range(1, 4):
            await _publish(writer, sequence)
            await _settled(server, tmp_path / "data" / "ledgers", entries=sequence + 1)
        for each in flood:
            each.close()
        assert server.process.poll() is None
        await writer.close()

    async def read(server: Running) -> None:
        reader = await server.connect()
        for number in range(TOPICS):
            await subscribed(reader, number, topic=f"topic-{number}", subscription=f"s{number}")
            for _ in range(4):
                await message(reader)
        await reader.close()

    with served(tmp_path, descriptors=DESCRIPTORS) as server:
        asyncio.run(flooded(server))
    with served(tmp_path) as server:
        asyncio.run(read(server))


async def _publish(writer: Driver, sequence: int) -> None:
    entry = build_message(b"x" * 100, sequence_id=sequence)
    await asyncio.gather(*(writer.publish(each, sequence, entry) for each in range(TOPICS)))


async def _silent(host: str, port: int | None, first: bytes) -> asyncio.StreamWriter:
    """A connection that says nothing more; the server may have closed it already."""
    async with asyncio.timeout(PATIENCE_S):
        _, writer = await asyncio.open_connection(host, port)
    with suppress(ConnectionError):
        writer.write(first)
    return writer


async def _settled(server: Running, folder: Path, entries: int) -> None:
    """Wait until so many entries of every topic have been moved to their ledger file."""
    async with asyncio.timeout(PATIENCE_S):
        while server.process.poll() is None:
            if _moved(folder, entries) >= TOPICS:
                return
            await asyncio.sleep(0.05)


def _moved(folder: Path, entries: int) -> int:
    """The ledgers that have so many entries in their file."""
    sizes = [each.stat().st_size for each in folder.glob("*/*.index")]
    return sum(size >= entries * INDEX_SLOT_BYTES for size in sizes)
