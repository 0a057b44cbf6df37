"""Encryption by the official client through our server, which never holds a key."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pulsar  # type: ignore[import-untyped]
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.interop.flows import (
    EARLIEST,
    RECEIVE_MS,
    numbered,
    payloads_of,
    publish,
    receive,
    until,
)
from tests.interop.serving import ServerProcess


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A public and a private key, in files."""
    folder = tmp_path_factory.mktemp("keys")
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public_pem = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    private_pem = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    (folder / "public.pem").write_bytes(public_pem)
    (folder / "private.pem").write_bytes(private_pem)
    return folder / "public.pem", folder / "private.pem"


@pytest.fixture
def reader(keys: tuple[Path, Path]) -> Any:
    return pulsar.CryptoKeyReader(*map(str, keys))


@pytest.mark.parametrize("batching", [False, True])
def test_what_is_encrypted_passes_untouched(
    client: Any, topic: str, reader: Any, *, batching: bool
) -> None:
    consumer = client.subscribe(topic, "sub", crypto_key_reader=reader)
    publish(
        client,
        topic,
        numbered(20),
        encryption_key="orders",
        crypto_key_reader=reader,
        batching_enabled=batching,
        compression_type=pulsar.CompressionType.ZSTD,
    )
    assert payloads_of(receive(consumer, 20, ack=True)) == numbered(20)
    # Who has no key gets what is stored: it is not what was sent.
    sealed = client.subscribe(
        topic,
        "sealed",
        initial_position=EARLIEST,
        crypto_failure_action=pulsar.ConsumerCryptoFailureAction.CONSUME,
    )
    assert sealed.receive(RECEIVE_MS).data() not in numbered(20)


def test_a_topic_that_requires_encryption(client: Any, server: ServerProcess, reader: Any) -> None:
    server.admin("PUT", "namespaces/public/secret", {})
    topic = "persistent://public/secret/orders"
    publish(client, topic, numbered(1))
    plain = client.create_producer(topic)
    policy = "namespaces/public/secret/encryptionRequired"
    server.admin("POST", policy, body=True)
    until(lambda: not server.admin("GET", "persistent/public/secret/orders/stats")["publishers"])
    # The official client takes the refusal as passing, for as long as an operation may take.
    hasty = pulsar.Client(server.service_url, operation_timeout_seconds=1)
    with closing(hasty), pytest.raises(pulsar.PulsarException):
        hasty.create_producer(topic)
    publish(client, topic, numbered(2), encryption_key="orders", crypto_key_reader=reader)
    server.admin("POST", policy, body=False)
    assert plain.send(b"in plain again")
    consumer = client.subscribe(topic, "sub", initial_position=EARLIEST, crypto_key_reader=reader)
    sent = [*numbered(1), *numbered(2), b"in plain again"]
    assert payloads_of(receive(consumer, 4)) == sent
