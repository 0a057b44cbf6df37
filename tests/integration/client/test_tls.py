"""The client over TLS: a relay that speaks it stands before a server that does not."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest
import trustme

from harness.limits import PATIENCE_S
from magnetar.client.client import Client
from magnetar.client.connection.settings import TlsSettings
from magnetar.errors import InvalidSetting, NotConnected, UntrustedBroker
from tests.unit.server.serving import serving

TOPIC: Final = "topic://public/default/secret"
CHUNK_BYTES: Final = 65536


class Certificates:
    """An authority, a server's certificate and a client's."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self.authority.cert_pem.write_to_path(self.ca)
        issued = self.authority.issue_cert("client@localhost")
        self.certificate, self.key = folder / "client.pem", folder / "client.key"
        issued.cert_chain_pems[0].write_to_path(self.certificate)
        issued.private_key_pem.write_to_path(self.key)

    def server(self, host: str, *, asks_client: bool = False) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert(host).configure_cert(made)
        if asks_client:
            made.verify_mode = ssl.CERT_REQUIRED
            self.authority.configure_trust(made)
        return made


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@asynccontextmanager
async def relay(plain_url: str, context: ssl.SSLContext) -> AsyncIterator[str]:
    """The URL of a port that speaks TLS and passes everything on."""
    target = urlsplit(plain_url)
    pipes: set[asyncio.Task[None]] = set()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK_BYTES):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # one side is gone: the other is closed
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(target.hostname, target.port)
        for ends in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(pipe(*ends))
            pipes.add(task)

    listening = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    port = listening.sockets[0].getsockname()[1]
    try:
        yield f"pulsar+ssl://localhost:{port}"
    finally:
        listening.close()
        await asyncio.gather(*pipes)


async def exchange(url: str, tls: TlsSettings) -> None:
    """A message there and back."""
    async with Client(url, tls=tls, operation_timeout=PATIENCE_S) as client:
        consumer = await client.queue_consumer(TOPIC, "sub")
        producer = await client.producer(TOPIC)
        await producer.send(b"hello")
        message = await consumer.receive(timeout=PATIENCE_S)
        assert message.value == b"hello"
        await consumer.ack(message)


def with_relay(
    folder: Path, context: ssl.SSLContext, tls: TlsSettings, error: type[Exception] | None = None
) -> str:
    """Exchange a message, or see the error; its text."""
    text = ""

    async def story() -> None:
        nonlocal text
        async with serving(folder) as server, relay(server.service_url, context) as url:
            if error is None:
                await exchange(url, tls)
                return
            # What is not trusted is told at once; who is not let in is tried again.
            seconds = PATIENCE_S if error is UntrustedBroker else 2.0
            with pytest.raises(error) as raised:
                async with Client(url, tls=tls, operation_timeout=seconds) as client:
                    await client.producer(TOPIC)
            text = str(raised.value)

    asyncio.run(story())
    return text


def test_a_trusted_broker(tmp_path: Path, certificates: Certificates) -> None:
    tls = TlsSettings(trust_certs=certificates.ca)
    with_relay(tmp_path, certificates.server("localhost"), tls)


def test_a_broker_of_an_unknown_authority(tmp_path: Path, certificates: Certificates) -> None:
    context = certificates.server("localhost")
    said = with_relay(tmp_path / "refused", context, TlsSettings(), UntrustedBroker)
    assert "issuer" in said
    with_relay(tmp_path / "taken", context, TlsSettings(allow_untrusted=True))


def test_a_broker_with_the_name_of_another(tmp_path: Path, certificates: Certificates) -> None:
    context = certificates.server("other.example")
    tls = TlsSettings(trust_certs=certificates.ca)
    said = with_relay(tmp_path / "refused", context, tls, UntrustedBroker)
    assert "localhost" in said
    tls = TlsSettings(trust_certs=certificates.ca, validate_hostname=False)
    with_relay(tmp_path / "taken", context, tls)


def test_a_broker_that_asks_who_the_client_is(tmp_path: Path, certificates: Certificates) -> None:
    context = certificates.server("localhost", asks_client=True)
    nobody = TlsSettings(trust_certs=certificates.ca)
    with_relay(tmp_path / "refused", context, nobody, NotConnected)
    somebody = TlsSettings(
        trust_certs=certificates.ca, certificate=certificates.certificate, key=certificates.key
    )
    with_relay(tmp_path / "taken", context, somebody)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    for tls in (TlsSettings(trust_certs=missing), TlsSettings(certificate=missing)):
        with pytest.raises(InvalidSetting, match="cannot be read"):
            tls.context()
