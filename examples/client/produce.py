"""Producing: one by one, in numbers, with keys and times, and under a name of one's own."""

import asyncio
import sys
from datetime import UTC, datetime, timedelta

from magnetar import Client, Compression
from magnetar.errors import SendTimedOut

TOPIC = "topic://public/default/measurements"


async def main(service_url: str) -> None:
    async with Client(service_url) as client:
        async with await client.producer(TOPIC) as producer:
            message_id = await producer.send(b"21.5", key="sensor-1")
            print("stored as", message_id)

        async with await client.producer(TOPIC, compression=Compression.ZSTD) as producer:
            for number in range(10_000):
                await producer.submit(b"%d" % number, key=f"sensor-{number % 50}")
            await producer.flush()

        async with await client.producer(TOPIC) as producer:
            await producer.send(
                b"21.7",
                key="sensor-1",
                properties={"unit": "celsius"},
                event_time=datetime.now(UTC),
            )
            await producer.send(b"remind me", deliver_after=timedelta(hours=1))

        async with await client.producer(TOPIC, name="importer") as producer:
            print("continues after", producer.last_sequence_id)
            await producer.send(b"22.0", sequence_id=producer.last_sequence_id + 1)

        async with await client.producer(TOPIC, send_timeout=5.0, max_pending=1000) as producer:
            try:
                await producer.send(b"22.1")
            except SendTimedOut as error:
                print("nobody knows if it is stored:", error)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "pulsar://localhost:6650"))
