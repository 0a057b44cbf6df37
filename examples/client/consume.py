"""Consuming: as a queue, as a stream, from a checkpoint, and from a regular topic."""

import asyncio
import sys

from magnetar import EARLIEST, FROM_EARLIEST, Checkpoint, Client, InitialPosition

JOBS = "topic://public/default/jobs"
PLAIN = "persistent://public/default/plain"
FIRST = InitialPosition.EARLIEST


async def work(value: bytes) -> None:
    print("done:", value.decode())


async def main(service_url: str) -> None:
    async with Client(service_url) as client:
        for topic in (JOBS, PLAIN):
            async with await client.producer(topic) as producer:
                for number in range(5):
                    await producer.send(b"job %d" % number, key=str(number))

        async with await client.queue_consumer(JOBS, "workers", initial_position=FIRST) as queue:
            for message in await queue.receive_many(5, timeout=10):
                try:
                    await work(message.value)
                except ValueError:
                    queue.nack(message)
                else:
                    queue.ack(message)

        async with await client.stream_consumer(JOBS, "ledger", initial_position=FIRST) as stream:
            message = await stream.receive(timeout=10)
            await stream.ack_cumulative(message)

        async with await client.checkpoint_consumer(JOBS, start=FROM_EARLIEST) as reader:
            await reader.receive(timeout=10)
            stored = reader.checkpoint().to_bytes()
        start = Checkpoint.from_bytes(stored)
        async with await client.checkpoint_consumer(JOBS, start=start) as reader:
            print("next:", (await reader.receive(timeout=10)).value.decode())

        async with await client.consumer(PLAIN, "billing", initial_position=FIRST) as consumer:
            message = await consumer.receive(timeout=10)
            await consumer.ack(message)

        async with await client.reader(PLAIN, start=EARLIEST) as plain:
            while await plain.has_message_available():
                print((await plain.receive(timeout=10)).value.decode())


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "pulsar://localhost:6650"))
