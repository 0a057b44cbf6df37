"""This client and the official one decrypt what the other encrypted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pulsar  # type: ignore[import-untyped]
import pytest

from harness.limits import PATIENCE_S
from magnetar.client.client import Client
from magnetar.client.encryption.keys import PemKeyReader
from magnetar.errors import UnreadableMessage
from magnetar.model.subscriptions import InitialPosition
from magnetar.wire.compression import Compression
from tests.interop.serving import ServerProcess
from tests.unit.client.encryption.test_encryption import pair

pytestmark = pytest.mark.slow  # a server of its own, and the native client

FIRST = InitialPosition.EARLIEST
THEIR_FIRST = pulsar.InitialPosition.Earliest
LARGE = bytes(range(256)) * 50_000
WAIT_MS = round(1000 * PATIENCE_S)
OFFICIAL = {
    Compression.NONE: pulsar.CompressionType.NONE,
    Compression.LZ4: pulsar.CompressionType.LZ4,
    Compression.ZSTD: pulsar.CompressionType.ZSTD,
}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """The official client keeps its native loops: see tests/interop/conftest.py."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(Path(tmp_path_factory.mktemp("encryption")))
    process.start()
    yield process
    process.stop()


@pytest.fixture
def official(server: ServerProcess) -> Iterator[Any]:
    logger = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    client = pulsar.Client(server.service_url, logger=logger)
    yield client
    client.close()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """The keys of two owners."""
    found = {}
    for name in ("orders", "other"):
        for kind, pem in zip(("public", "private"), pair(name), strict=True):
            found[f"{kind} {name}"] = tmp_path / f"{kind}-{name}.pem"
            found[f"{kind} {name}"].write_bytes(pem)
    return found


def theirs(files: dict[str, Path], name: str = "orders") -> Any:
    return pulsar.CryptoKeyReader(str(files[f"public {name}"]), str(files[f"private {name}"]))


def ours(files: dict[str, Path], name: str = "orders") -> PemKeyReader:
    return PemKeyReader(
        public={"orders": files[f"public {name}"]}, private={"orders": files[f"private {name}"]}
    )


@pytest.mark.parametrize("compression", list(OFFICIAL))
@pytest.mark.parametrize("batching", [False, True])
def test_secrets_go_both_ways(
    server: ServerProcess,
    official: Any,
    files: dict[str, Path],
    compression: Compression,
    batching: bool,
) -> None:
    topic = f"persistent://public/default/secret-{compression.name}-{batching}"
    payloads = [b"%d " % number * 200 for number in range(50)]
    # Incompressible or not, it takes several entries where nothing is compressed.
    large = [] if batching else [LARGE]

    def send_official() -> None:
        producer = official.create_producer(
            topic,
            compression_type=OFFICIAL[compression],
            batching_enabled=batching,
            chunking_enabled=not batching,
            encryption_key="orders",
            crypto_key_reader=theirs(files),
        )
        for payload in [*payloads, *large]:
            producer.send_async(payload, None, partition_key="k", properties={"a": "b"})
        producer.flush()
        producer.close()

    async def both() -> list[Any]:
        async with (
            Client(server.service_url, operation_timeout=PATIENCE_S) as client,
            client.consumer(
                topic, "ours", initial_position=FIRST, key_reader=ours(files)
            ) as consumer,
            client.producer(
                topic,
                compression=compression,
                batching=batching,
                chunking=not batching,
                encryption_keys=["orders"],
                key_reader=ours(files),
            ) as producer,
        ):
            for payload in [*payloads, *large]:
                await producer.submit(payload, key="k", properties={"a": "b"})
            await producer.flush()
            await asyncio.to_thread(send_official)
            count = 2 * (len(payloads) + len(large))
            return [await consumer.receive(timeout=PATIENCE_S) for _ in range(count)]

    found = asyncio.run(both())
    assert [each.value for each in found] == [*payloads, *large] * 2
    assert {each.key for each in found} == {"k"}
    assert all(each.encryption is not None for each in found)
    reading = official.subscribe(
        topic, "theirs", initial_position=THEIR_FIRST, crypto_key_reader=theirs(files)
    )
    for message in found:
        got = reading.receive(WAIT_MS)
        assert got.data() == message.value
        assert got.properties() == {"a": "b"}


def test_neither_reads_with_the_wrong_key(
    server: ServerProcess, official: Any, files: dict[str, Path]
) -> None:
    topic = "persistent://public/default/wrong-key"
    producer = official.create_producer(
        topic, encryption_key="orders", crypto_key_reader=theirs(files)
    )
    producer.send(b"theirs")

    async def both() -> None:
        async with Client(server.service_url, operation_timeout=PATIENCE_S) as client:
            async with client.producer(
                topic, encryption_keys=["orders"], key_reader=ours(files)
            ) as sending:
                await sending.send(b"ours")
            for reader in (None, ours(files, "other")):
                async with client.consumer(
                    topic, f"ours-{reader}", initial_position=FIRST, key_reader=reader
                ) as consumer:
                    message = await consumer.receive(timeout=PATIENCE_S)
                    with pytest.raises(UnreadableMessage):
                        _ = message.value

    asyncio.run(both())
    # The official client hands out what it could not decrypt, as it was told to.
    reading = official.subscribe(
        topic,
        "theirs",
        initial_position=THEIR_FIRST,
        crypto_key_reader=theirs(files, "other"),
        crypto_failure_action=pulsar.ConsumerCryptoFailureAction.CONSUME,
    )
    sealed = [reading.receive(WAIT_MS).data() for _ in range(2)]
    assert b"ours" not in sealed
    assert b"theirs" not in sealed
