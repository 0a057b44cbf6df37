"""A full disk: publishes are refused by name, all else goes on, and they go on once there is room.

On a small file system in memory, with a server in a process of its own. Mounting needs rights that
not every machine gives: there the tests are skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.limits import PATIENCE_S, within
from harness.patient_clients import PatientAdmin
from magnetar.client.client import Client
from magnetar.errors import ConnectionLost, MagnetarError, ServerDiskFull
from magnetar.model.ids import EARLIEST
from magnetar.model.subscriptions import InitialPosition
from tests.integration.server.process import Running, served

MIB = 1024 * 1024
SIZE_MIB = 48
# Five percent, which is the default.
FLOOR = SIZE_MIB * MIB * 5 // 100
SETTINGS = {"journal_file_bytes": MIB, "journal_files_max": 4}

BIG = "persistent://public/default/big"
SMALL = "persistent://public/default/small"
SCALABLE = "topic://public/default/scalable"
PAYLOAD_BYTES = 20_000


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose `data` is a file system of its own."""
    data = tmp_path / "data"
    data.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(data)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no `mount` here")
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(data)], check=True)


def free(folder: Path) -> int:
    found = os.statvfs(folder / "data")
    return found.f_bavail * found.f_frsize


def take_all(folder: Path) -> Path:
    """Somebody else fills the disk, to the last byte."""
    foreign = folder / "data" / "foreign"
    with foreign.open("ab", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                break
    assert free(folder) == 0
    return foreign


@asynccontextmanager
async def client_of(server: Running) -> AsyncIterator[Client]:
    url = f"pulsar://{server.host}:{server.port}"
    async with Client(url, operation_timeout=PATIENCE_S) as client:
        yield client


async def fill(producer: Any, stored: list[bytes]) -> MagnetarError:
    """Publish until it is refused; what has a receipt is added to `stored`."""
    while True:
        payloads = [
            f"{len(stored) + number:08}".encode() + os.urandom(PAYLOAD_BYTES)
            for number in range(20)
        ]
        futures = [await producer.submit(payload) for payload in payloads]
        results = await asyncio.gather(*futures, return_exceptions=True)
        refused = [each for each in results if isinstance(each, BaseException)]
        stored += [
            payload[:8]
            for payload, result in zip(payloads, results, strict=True)
            if not isinstance(result, BaseException)
        ]
        if refused:
            assert all(isinstance(each, ServerDiskFull) for each in refused), refused
            assert isinstance(refused[0], MagnetarError)
            return refused[0]


async def until_sent(producer: Any, payload: bytes) -> None:
    """Publish again and again until there is room."""
    async with within("room on the disk"):
        while True:
            try:
                await producer.send(payload)
            except ServerDiskFull:
                continue
            return


async def status(admin: PatientAdmin, path: str) -> int:
    return (await admin.exchange("GET", path)).status


async def read_all(client: Client, topic: str, count: int) -> list[bytes]:
    reader = await client.reader(topic, start=EARLIEST)
    async with reader, within("what is stored"):
        return [bytes((await reader.receive()).value)[:8] for _ in range(count)]


def test_publishes_are_refused_by_name_and_go_on_by_themselves(folder: Path) -> None:
    async def story(server: Running) -> None:
        async with client_of(server) as client, PatientAdmin(server.admin_url) as admin:
            stored: list[bytes] = []
            kept = await client.producer(SMALL)
            await kept.send(b"kept")
            scalable = await client.producer(SCALABLE)
            await scalable.send(b"kept")
            producer = await client.producer(BIG)
            error = await fill(producer, stored)
            assert "the disk of the server is full" in str(error)
            assert "delete topics" in str(error)
            # At once, on every topic, and for new ones; but only for what is to be kept.
            for each in (producer, kept, scalable):
                with pytest.raises(ServerDiskFull):
                    await each.send(b"refused")
            for topic in (BIG, "persistent://public/default/new", "topic://public/default/new"):
                with pytest.raises(ServerDiskFull):
                    await client.producer(topic)
            await (await client.producer("non-persistent://public/default/n")).send(b"not kept")
            # Who asks how it is gets the reason; who only wants to know whether it lives, does not.
            for path in ("/ready", "/health", "brokers/health", "brokers/ready"):
                answer = await admin.exchange("GET", path)
                assert answer.status == 503
                assert "the disk of the server is full" in json.loads(answer.data)["reason"]
            assert await status(admin, "/live") == 200
            lines = (await admin.exchange("GET", "/metrics")).data.decode().splitlines()
            gauges = dict(each.split() for each in lines if each.startswith("magnetar_disk_f"))
            assert float(gauges["magnetar_disk_floor_bytes"]) == FLOOR
            assert float(gauges["magnetar_disk_free_bytes"]) > 0
            assert "magnetar_publishes_refused 1.0" in lines
            assert (await admin.exchange("PUT", "persistent/public/default/other")).status == 503
            # What has a receipt is there, and deleting it makes room.
            assert await read_all(client, BIG, len(stored)) == stored
            await admin.delete("persistent/public/default/big", force="true")
            await until_sent(kept, b"goes on")
            assert await status(admin, "/ready") == 200
            assert await read_all(client, SMALL, 2) == [b"kept", b"goes on"[:8]]
        log = server.log()
        assert log.count("publishes-refused") == 1
        assert log.count("publishes-taken-again") == 1

    with served(folder, **SETTINGS) as server:
        asyncio.run(story(server))


def test_all_but_publishing_goes_on_without_a_free_byte(folder: Path) -> None:
    async def story(server: Running) -> None:
        async with client_of(server) as client, PatientAdmin(server.admin_url) as admin:
            stored: list[bytes] = []
            producer = await client.producer(SMALL)
            await asyncio.gather(*(producer.send(b"%d" % number) for number in range(100)))
            big = await client.producer(BIG)
            consumer = await client.consumer(
                SMALL, "work", initial_position=InitialPosition.EARLIEST
            )
            commits = await client.transaction(timeout=PATIENCE_S)
            await producer.send(b"committed", txn=commits)
            aborts = await client.transaction(timeout=PATIENCE_S)
            await producer.send(b"aborted", txn=aborts)
            await fill(big, stored)
            take_all(folder)
            # Acknowledgements, alone and in transactions, that wait until they are durable; far
            # more of them than a journal file holds without being recycled.
            taken = [await consumer.receive() for _ in range(100)]
            assert [int(each.value) for each in taken] == list(range(100))
            for message in taken[:98]:
                await consumer.ack(message)
            await consumer.ack(taken[98], txn=commits)
            await commits.commit()
            await aborts.abort()
            assert (await consumer.receive()).value == b"committed"
            acks_alone = await client.transaction(timeout=PATIENCE_S)
            await consumer.ack(taken[99], txn=acks_alone)
            await acks_alone.commit()
            with pytest.raises(ServerDiskFull):
                await producer.send(b"refused")
            refused = await client.transaction(timeout=PATIENCE_S)
            with pytest.raises(ServerDiskFull):
                await producer.send(b"refused", txn=refused)
            await refused.abort()
            for number in range(300):
                path = f"persistent/public/default/small/subscription/s{number}"
                assert (await admin.exchange("PUT", path)).status == 204
                assert (await admin.exchange("DELETE", path)).status == 204
            assert free(folder) < FLOOR
            await admin.delete("persistent/public/default/big", force="true")
            await until_sent(producer, b"goes on")

    with served(folder, **SETTINGS) as server:
        asyncio.run(story(server))


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_server_starts_on_a_full_disk(folder: Path, how: str) -> None:
    stored: list[bytes] = []

    async def first_life(server: Running) -> None:
        async with client_of(server) as client:
            small = await client.producer(SMALL)
            await asyncio.gather(*(small.send(b"%d" % number) for number in range(10)))
            consumer = await client.consumer(
                SMALL, "work", initial_position=InitialPosition.EARLIEST
            )
            await fill(await client.producer(BIG), stored)
            take_all(folder)
            await consumer.ack(await consumer.receive())
            if how == "killed":
                server.kill()
        take_all(folder)

    async def second_life(server: Running) -> None:
        async with client_of(server) as client, PatientAdmin(server.admin_url) as admin:
            assert await status(admin, "/ready") == 503
            consumer = await client.consumer(SMALL, "work")
            taken = [await consumer.receive() for _ in range(9)]
            assert [int(each.value) for each in taken] == list(range(1, 10))
            await consumer.ack(taken[0])
            with pytest.raises(ServerDiskFull):
                await client.producer(SMALL)
            assert await read_all(client, BIG, len(stored)) == stored
            if how == "killed":
                server.kill()

    async def third_life(server: Running) -> None:
        async with client_of(server) as client, PatientAdmin(server.admin_url) as admin:
            consumer = await client.consumer(SMALL, "work")
            assert (await consumer.receive()).value == b"2"
            await admin.delete("persistent/public/default/big")
            async with within("room on the disk"):
                while await status(admin, "/ready") != 200:
                    pass
            await (await client.producer(SMALL)).send(b"goes on")

    for life in (first_life, second_life, third_life):
        with served(folder, **SETTINGS) as server:
            asyncio.run(life(server))


def test_doctor_says_that_publishes_are_refused(folder: Path) -> None:
    async def story(server: Running) -> None:
        async with client_of(server) as client:
            await fill(await client.producer(BIG), [])
        # What a server counts beside the free bytes (the journal) is not seen from outside.
        take_all(folder)
        with _doctor(folder, server) as found:
            assert found["space"]["verdict"] == "failed"
            assert "publishes need 2.4 MiB, the reserve has" in found["space"]["found"]
            assert "publishes are refused" in found["space"]["found"]
            assert "delete topics" in found["space"]["advice"]
            assert found["server"]["verdict"] == "ok"
            assert found["admin"]["verdict"] == "failed"
            assert "the disk of the server is full" in found["admin"]["found"]

    with served(folder, **SETTINGS) as server:
        asyncio.run(story(server))


@contextmanager
def _doctor(folder: Path, server: Running) -> Iterator[dict[str, dict[str, str]]]:
    command = [str(Path(sys.executable).with_name("magnetar")), "doctor", "--json"]
    command += ["--data", str(folder / "data"), "--admin-url", server.admin_url]
    command += ["--url", f"pulsar://{server.host}:{server.port}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    yield {each["check"]: each for each in json.loads(done.stdout)}


def test_messages_in_doubt_are_not_called_refused(folder: Path) -> None:
    """Of what was on its way when the server died, nobody can say that it was not stored."""
    outcomes: list[type[BaseException] | None] = []

    async def story(server: Running) -> None:
        async with client_of(server) as client:
            producer = await client.producer(BIG)
            await producer.send(b"x")
            futures = [await producer.submit(bytes(PAYLOAD_BYTES)) for _ in range(200)]
            await asyncio.sleep(0)
            server.kill()
            take_all(folder)
            with served(folder, port=server.port, **SETTINGS):
                results = await asyncio.gather(*futures, return_exceptions=True)
        outcomes.extend(type(each) for each in results if isinstance(each, BaseException))

    with served(folder, **SETTINGS) as server:
        asyncio.run(story(server))
    assert set(outcomes) <= {ConnectionLost, ServerDiskFull}
