"""The client for threads: `Client` and its handles, with the names of the asyncio ones.

Written by `make blocking`, but for `loop_thread` and `handle`. Applications import
`magnetar.blocking`.
"""

from magnetar.client.blocking.checkpoint_consumer import CheckpointConsumer
from magnetar.client.blocking.client import Client
from magnetar.client.blocking.consumer import Consumer
from magnetar.client.blocking.groups import TransactionGroup
from magnetar.client.blocking.handle import Acknowledged
from magnetar.client.blocking.producer import Producer
from magnetar.client.blocking.queue_consumer import QueueConsumer
from magnetar.client.blocking.ranges import Ranges
from magnetar.client.blocking.reader import Reader
from magnetar.client.blocking.stream_consumer import StreamConsumer
from magnetar.client.blocking.transactions import Transaction

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
