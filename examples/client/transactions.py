"""Transactions: read, compute and write as one step, exactly once."""

import asyncio
import sys

from magnetar import Client, InitialPosition
from magnetar.errors import TransactionAborted, TransactionConflict

ORDERS = "topic://public/default/txn-orders"
INVOICES = "topic://public/default/txn-invoices"


async def main(service_url: str) -> None:
    async with Client(service_url) as client:
        orders = await client.producer(ORDERS)
        invoices = await client.producer(INVOICES)
        consumer = await client.queue_consumer(
            ORDERS, "billing", initial_position=InitialPosition.EARLIEST
        )
        await orders.send(b"two books")

        message = await consumer.receive(timeout=10)
        async with client.transaction(timeout=60) as txn:
            await invoices.send(b"invoice: " + message.value, txn=txn)
            consumer.ack(message, txn=txn)
        print(txn.state)

        try:
            async with client.transaction() as txn:
                await invoices.send(b"nobody will see this", txn=txn)
                raise ValueError("the order is wrong")
        except ValueError as error:
            print(error, "and the transaction is", txn.state)

        txn = await client.transaction(timeout=30)
        await invoices.send(b"invoice: postage", txn=txn)
        try:
            await txn.commit()
        except (TransactionConflict, TransactionAborted) as error:
            print("nothing of it is there; begin again:", error)

        group = await client.open_group("nightly", generation="2026-01-01", run="first")
        sequence = group.committed_sequence + 1
        async with group.transaction(sequence) as member:
            await invoices.send(b"invoice: from a task of many", txn=member)
        await group.commit(sequence, [member])
        print("committed up to", group.committed_sequence)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "pulsar://localhost:6650"))
