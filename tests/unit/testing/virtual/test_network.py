"""The fake network: order, pieces, back-pressure, cuts and silence."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any, cast

import pytest

from magnetar.testing.virtual import virtual_time
from magnetar.testing.virtual.network import End, Network


class _Side(asyncio.Protocol):
    def __init__(self) -> None:
        self.end: End
        self.data = b""
        self.pieces = 0
        self.lost: list[Exception | None] = []
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.end = cast("End", transport)

    def data_received(self, data: bytes) -> None:
        assert not self.lost
        self.data += data
        self.pieces += 1

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)


async def _pair(seed: int = 1) -> tuple[Network, _Side, _Side]:
    network = Network(Random(seed), asyncio.get_running_loop().time)
    servers: list[_Side] = []

    def accept() -> _Side:
        servers.append(_Side())
        return servers[-1]

    listener = await network.listen(accept, "here", 1)
    with pytest.raises(ConnectionRefusedError):
        await network.connect(_Side, "here", 1)
    await listener.start()
    _, client = await network.connect(_Side, "here", 1)
    return network, client, servers[0]


def _run(scene: Coroutine[Any, Any, None]) -> None:
    virtual_time.run(scene, until=1000)


@pytest.mark.parametrize("seed", range(5))
def test_everything_arrives_in_order(seed: int) -> None:
    async def scene() -> None:
        _, client, server = await _pair(seed)
        text = Random(seed).randbytes(20_000)
        for start in range(0, len(text), 1000):
            client.end.write(text[start : start + 1000])
            server.end.writelines([text[start : start + 500], text[start + 500 : start + 1000]])
        server.end.write_eof()
        await asyncio.sleep(100)
        assert client.data == server.data == text
        assert client.lost == server.lost == [None]

    _run(scene())


def test_a_client_knows_when_the_bytes_were_written() -> None:
    async def scene() -> None:
        _, client, server = await _pair()
        client.end.pause_reading()
        moments = []
        for text in (b"one", b"two"):
            moments.append(asyncio.get_running_loop().time())
            server.end.write(text)
            await asyncio.sleep(5)
        client.end.resume_reading()
        seen = []
        while len(client.data) < 6:
            await asyncio.sleep(0.0001)
            if client.pieces:
                seen.append(client.end.sent_at)
        assert sorted(set(seen)) == moments

    _run(scene())


def test_who_does_not_read_makes_the_other_pause() -> None:
    async def scene() -> None:
        _, client, server = await _pair()
        server.end.set_write_buffer_limits(high=100)
        client.end.pause_reading()
        server.end.write(bytes(101))
        paused_at = asyncio.get_running_loop().time()
        await asyncio.sleep(10)
        assert server.paused
        assert not client.data
        client.end.resume_reading()
        await asyncio.sleep(10)
        assert not server.paused
        assert len(client.data) == 101
        assert server.end.was_paused(paused_at)
        assert not server.end.was_paused(asyncio.get_running_loop().time())

    _run(scene())


def test_a_cut_is_heard_of_on_both_sides_once() -> None:
    async def scene() -> None:
        network, client, server = await _pair()
        client.end.write(b"lost")
        network.links[0].cut()
        await asyncio.sleep(10)
        assert [type(error) for error in client.lost + server.lost] == [ConnectionResetError] * 2
        assert not server.data
        client.end.abort()
        await asyncio.sleep(10)
        assert len(client.lost) == 1

    _run(scene())


def test_nothing_is_heard_on_a_silent_link_until_it_recovers() -> None:
    async def scene() -> None:
        network, client, server = await _pair()
        link = network.links[0]
        link.fall_silent(client=True, server=False)
        client.end.write(b"late")
        server.end.write(b"there")
        await asyncio.sleep(100)
        assert (client.data, server.data) == (b"there", b"")
        link.recover()
        await asyncio.sleep(10)
        assert server.data == b"late"
        link.fall_silent()
        client.end.abort()
        await asyncio.sleep(100)
        assert client.lost
        assert not server.lost
        link.recover()
        await asyncio.sleep(10)
        assert server.lost

    _run(scene())
