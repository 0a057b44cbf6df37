"""Messages that only the owner of a private key can read; the server is not one."""

import asyncio
import sys
from pathlib import Path

from cryptography.hazmat.primitives import serialization as formats
from cryptography.hazmat.primitives.asymmetric import rsa

from magnetar import Client, DecryptionFailure, InitialPosition, PemKeyReader
from magnetar.errors import UnreadableMessage

TOPIC = "topic://public/default/secrets"
FIRST = InitialPosition.EARLIEST


def make_keys() -> None:
    """Do what `openssl genrsa` and `openssl rsa -pubout` do; once, for what is sent stays."""
    if Path("orders.pem").exists():
        return
    pem = formats.Encoding.PEM
    key = rsa.generate_private_key(public_exponent=65537, key_size=3072)
    private = key.private_bytes(pem, formats.PrivateFormat.PKCS8, formats.NoEncryption())
    public = key.public_key().public_bytes(pem, formats.PublicFormat.SubjectPublicKeyInfo)
    Path("orders.pem").write_bytes(private)
    Path("orders.pub.pem").write_bytes(public)


async def main(service_url: str) -> None:
    make_keys()
    async with Client(service_url) as client:
        keys = PemKeyReader(public={"orders": "orders.pub.pem"})
        async with await client.producer(
            TOPIC,
            encryption_keys=["orders"],
            key_reader=keys,
        ) as producer:
            await producer.send(b"4711")
        keys = PemKeyReader(private={"orders": "orders.pem"})
        async with await client.queue_consumer(
            TOPIC, "billing", initial_position=FIRST, key_reader=keys
        ) as consumer:
            message = await consumer.receive(timeout=10)
            print(message.value)
            await consumer.ack(message)
        async with await client.queue_consumer(TOPIC, "curious", initial_position=FIRST) as curious:
            message = await curious.receive(timeout=10)
            try:
                print(message.value)
            except UnreadableMessage as error:
                print(error)
        as_it_is = DecryptionFailure.CONSUME
        async with await client.queue_consumer(
            TOPIC, "archive", initial_position=FIRST, on_decryption_failure=as_it_is
        ) as archive:
            message = await archive.receive(timeout=10)
            print(len(message.data), message.encryption)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "pulsar://localhost:6650"))
