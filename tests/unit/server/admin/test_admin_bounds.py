"""Requests to the admin interface that are late, too many, or mean harm."""

from __future__ import annotations

import asyncio
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from magnetar.runtime.limits import Limits
from magnetar.server.admin.topics import peek
from magnetar.wire.messages import encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.server.admin.world import FULL, TOPIC, World, run

SUB = f"{TOPIC}/subscription/s"
HASTY = Limits(journal_file_bytes=1024 * 1024, admin_request_seconds=0.2, admin_connections_max=4)


async def connection(world: World) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    assert world.server.admin_url is not None
    url = urlsplit(world.server.admin_url)
    return await asyncio.open_connection(url.hostname, url.port)


@pytest.mark.parametrize("part", [b"", b"GET /adm", b"GET /live HTTP/1.1\r\nHost: x\r\n"])
def test_a_request_that_does_not_arrive_is_not_waited_for(tmp_path: Path, part: bytes) -> None:
    async def scenario(world: World) -> None:
        reader, writer = await connection(world)
        writer.write(part)
        assert await reader.read() == b""
        writer.close()

    run(tmp_path, scenario, HASTY)


def test_a_body_that_does_not_arrive_is_not_waited_for(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        reader, writer = await connection(world)
        head = b"PUT /admin/v2/clusters/c HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        writer.write(head)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"did not arrive within 0.2 s" in answer
        writer.close()

    run(tmp_path, scenario, HASTY)


def test_connections_beyond_the_limit_are_closed_at_once(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        patient = [await connection(world) for _ in range(4)]
        # Each answered once, so that the server has it.
        for reader, writer in patient:
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        reader, writer = await connection(world)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        for _, each in [*patient, (reader, writer)]:
            each.close()

    limits = Limits(journal_file_bytes=1024 * 1024, admin_connections_max=4)
    run(tmp_path, scenario, limits)


@pytest.mark.parametrize("bracket", [b"[", b'{"a":'])
def test_deep_json_is_refused_with_a_reason(
    tmp_path: Path, bracket: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(world: World) -> None:
        reason = await world.refuse(412, "PUT", "clusters/there", bracket * 100_000)
        assert "nested too deeply" in reason

    run(tmp_path, scenario)
    assert "Traceback" not in caplog.text


def test_a_peek_unfolds_no_more_than_a_message_and_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    at_once: list[int] = []
    busy = threading.Lock()
    opened = peek._opened

    def watched(payload: bytes, size: int) -> bytes | None:
        threads.append(threading.current_thread())
        at_once.append(busy.acquire(blocking=False))
        try:
            return opened(payload, size)
        finally:
            busy.release()

    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC)
        await world.change("PUT", SUB)
        largest = world.server.config.max_message_bytes
        async with world.link() as link:
            await link.request("PRODUCER", topic=FULL, producer_id=1, producer_name="p")
            for number, size in enumerate((largest, largest + 1)):
                metadata = pb.MessageMetadata(
                    producer_name="p", sequence_id=number, publish_time=1, compression=pb.ZLIB
                )
                metadata.uncompressed_size = size
                link.send(1, number, encode_entry(metadata, zlib.compress(bytes(size))))
                await link.next()
        answers = await asyncio.gather(*(world.ask("GET", f"{SUB}/position/1") for _ in range(4)))
        assert [len(each.data) for each in answers] == [largest] * 4
        bomb = await world.ask("GET", f"{SUB}/position/2")
        assert bomb.headers["X-Pulsar-compression"] == "ZLIB"
        assert len(bomb.data) < largest // 100

    monkeypatch.setattr(peek, "_opened", watched)
    run(tmp_path, scenario)
    assert len(threads) == 4
    assert threading.main_thread() not in threads
    assert all(at_once)
