"""Errors: what is raised when, and what to do then."""

import asyncio
import sys

from magnetar import Client
from magnetar.errors import (
    AlreadyClosed,
    DeadlineExceeded,
    InvalidServiceUrl,
    MagnetarError,
    NotConnected,
    TopicNotFound,
)

TOPIC = "topic://public/default/errors"


async def main(service_url: str) -> None:
    try:
        Client("localhost")
    except InvalidServiceUrl as error:
        print(error.name, "-", error.hint)

    async with Client("pulsar://127.0.0.1:1", operation_timeout=0.5) as nobody:
        try:
            await nobody.producer(TOPIC)
        except NotConnected as error:
            print("is the server running?", error)

    async with Client(service_url) as client:
        try:
            await client.producer("persistent://no-tenant/no-namespace/topic")
        except TopicNotFound as error:
            print(error)

        consumer = await client.queue_consumer(TOPIC, "sub")
        try:
            await consumer.receive(timeout=0.1)
        except DeadlineExceeded:
            print("nothing came")

        producer = await client.producer(TOPIC)
        await producer.close()
        try:
            await producer.send(b"too late")
        except AlreadyClosed as error:
            print(error)

        try:
            await client.producer(TOPIC, batch_messages=0)
        except MagnetarError as error:
            print(error.name, error.retryable, error)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "pulsar://localhost:6650"))
