"""Hello, transaction: an order is read and its invoice written, both or neither."""

import sys

from magnetar import InitialPosition
from magnetar.blocking import Client

ORDERS, INVOICES = "topic://public/default/books", "topic://public/default/bills"

with Client(sys.argv[1] if len(sys.argv) > 1 else "pulsar://localhost:6650") as client:
    orders, invoices = client.producer(ORDERS), client.producer(INVOICES)
    earliest = InitialPosition.EARLIEST
    consumer = client.queue_consumer(ORDERS, "billing", initial_position=earliest)
    orders.send(b"two books")

    message = consumer.receive(timeout=10)
    with client.transaction(timeout=60) as txn:
        invoices.send(b"invoice: " + message.value, txn=txn)
        consumer.ack(message, txn=txn)
    print(txn.state)
