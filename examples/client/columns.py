"""Arrow: messages in columns, for pandas, polars and Spark."""

import asyncio
import sys

import pyarrow as pa

from magnetar import Client, InitialPosition

TOPIC = "topic://public/default/columns"


async def main(service_url: str) -> None:
    async with Client(service_url) as client:
        async with await client.producer(TOPIC) as producer:
            batch = pa.RecordBatch.from_pydict(
                {
                    "key": [f"sensor-{number % 10}" for number in range(1000)],
                    "value": [b"%d" % number for number in range(1000)],
                }
            )
            print(await producer.send_arrow(batch), "rows are stored")

        async with await client.queue_consumer(
            TOPIC, "sub", initial_position=InitialPosition.EARLIEST
        ) as consumer:
            got = 0
            while got < 1000:
                rows = await consumer.receive_arrow(max_rows=500, timeout=10)
                got += rows.num_rows
                await consumer.ack_arrow(rows)
            print(rows.schema.names)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "pulsar://localhost:6650"))
