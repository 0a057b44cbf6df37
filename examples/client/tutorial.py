"""The tutorial: send a few orders to a scalable topic, read them, and remember how far."""

import asyncio
import sys

from magnetar import Client, InitialPosition

TOPIC = "topic://public/default/tutorial"


async def main(service_url: str) -> None:
    async with Client(service_url) as client:
        async with await client.producer(TOPIC) as producer:
            for number in range(10):
                await producer.send(b"order %d" % number, key=f"customer-{number % 3}")

        async with await client.stream_consumer(
            TOPIC, "billing", initial_position=InitialPosition.EARLIEST
        ) as consumer:
            for _ in range(10):
                message = await consumer.receive(timeout=10)
                print(message.key, message.value.decode())
                consumer.ack_cumulative(message)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "pulsar://localhost:6650"))
