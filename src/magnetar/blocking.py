"""The blocking client: the names and parameters of the asyncio one, for threads.

from magnetar.blocking import Client

with Client("pulsar://localhost:6650") as client, client.producer("orders") as producer:
    producer.send(b"hello")

Every object may be used by several threads at once. What waits can be interrupted with Ctrl-C.
"""

from magnetar.client.blocking import (
    Acknowledged,
    CheckpointConsumer,
    Client,
    Consumer,
    Producer,
    QueueConsumer,
    Ranges,
    Reader,
    StreamConsumer,
    Transaction,
    TransactionGroup,
)

__all__ = [
    "Acknowledged",
    "CheckpointConsumer",
    "Client",
    "Consumer",
    "Producer",
    "QueueConsumer",
    "Ranges",
    "Reader",
    "StreamConsumer",
    "Transaction",
    "TransactionGroup",
]
