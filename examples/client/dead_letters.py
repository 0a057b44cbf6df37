"""A message that fails again and again goes to a topic of its own."""

import asyncio
import sys

from magnetar import Client, DeadLetterPolicy, InitialPosition, RedeliveryDelay

TOPIC = "topic://public/default/risky"
FIRST = InitialPosition.EARLIEST


async def main(service_url: str) -> None:
    async with Client(service_url) as client:
        async with await client.producer(TOPIC) as producer:
            await producer.send(b"poison")

        async with await client.queue_consumer(
            TOPIC,
            "workers",
            initial_position=FIRST,
            nack_delay=RedeliveryDelay(first=0.1),
            dead_letter=DeadLetterPolicy(max_redeliveries=1, topic=f"{TOPIC}-failed"),
        ) as consumer:
            for _ in range(2):
                message = await consumer.receive(timeout=10)
                consumer.nack(message)

            async with await client.queue_consumer(
                f"{TOPIC}-failed", "inspection", initial_position=FIRST
            ) as failed:
                letter = await failed.receive(timeout=10)
                print(letter.value.decode(), letter.properties)
                failed.ack(letter)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "pulsar://localhost:6650"))
