"""Schemas: values of a class instead of bytes, and a reader that knows none."""

import asyncio
import sys
from dataclasses import dataclass

from magnetar import EARLIEST, STRING, AutoSchema, AvroSchema, Client, InitialPosition, JsonSchema
from magnetar.errors import UnreadableMessage

ORDERS = "persistent://public/default/typed-orders"
NOTES = "persistent://public/default/notes"
EVENTS = "persistent://public/default/events"


@dataclass
class Order:
    number: int
    items: list[str]
    note: str = ""


async def main(service_url: str) -> None:
    async with Client(service_url) as client:
        async with await client.producer(ORDERS, schema=JsonSchema(Order)) as producer:
            await producer.send(Order(1, ["book", "pen"]))

        async with await client.consumer(
            ORDERS, "billing", schema=JsonSchema(Order), initial_position=InitialPosition.EARLIEST
        ) as consumer:
            message = await consumer.receive(timeout=10)
            try:
                print(message.value.items)
            except UnreadableMessage:
                print("not an order:", message.data)
            await consumer.ack(message)

        async with await client.producer(NOTES, schema=STRING) as notes:
            await notes.send("grüße")

        async with await client.producer(EVENTS, schema=AvroSchema(Order)) as events:
            await events.send(Order(2, []))

        async with await client.reader(EVENTS, schema=AutoSchema(), start=EARLIEST) as reader:
            print((await reader.receive(timeout=10)).value)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "pulsar://localhost:6650"))
