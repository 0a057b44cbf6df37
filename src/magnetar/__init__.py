"""Magnetar: event streaming with scalable topics and metadata-driven transactions.

What applications use of the client is here by its plain name, and loaded when it is asked for: the
server, which imports this package too, does not pay for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from magnetar.client.checkpoint_consumer import FROM_EARLIEST as FROM_EARLIEST
    from magnetar.client.checkpoint_consumer import FROM_LATEST as FROM_LATEST
    from magnetar.client.checkpoint_consumer import CheckpointConsumer as CheckpointConsumer
    from magnetar.client.client import Client as Client
    from magnetar.client.codec import Compression as Compression
    from magnetar.client.consumer import Consumer as Consumer
    from magnetar.client.consumer_settings import DeadLetterPolicy as DeadLetterPolicy
    from magnetar.client.groups import TransactionGroup as TransactionGroup
    from magnetar.client.interceptors import Draft as Draft
    from magnetar.client.interceptors import Interceptor as Interceptor
    from magnetar.client.message import Message as Message
    from magnetar.client.nacks import RedeliveryDelay as RedeliveryDelay
    from magnetar.client.producer import Producer as Producer
    from magnetar.client.producer_settings import AccessMode as AccessMode
    from magnetar.client.queue_consumer import QueueConsumer as QueueConsumer
    from magnetar.client.range_page import RangePage as RangePage
    from magnetar.client.ranges import Ranges as Ranges
    from magnetar.client.reader import Reader as Reader
    from magnetar.client.schema import BOOL as BOOL
    from magnetar.client.schema import BYTES as BYTES
    from magnetar.client.schema import FLOAT32 as FLOAT32
    from magnetar.client.schema import FLOAT64 as FLOAT64
    from magnetar.client.schema import INT8 as INT8
    from magnetar.client.schema import INT16 as INT16
    from magnetar.client.schema import INT32 as INT32
    from magnetar.client.schema import INT64 as INT64
    from magnetar.client.schema import STRING as STRING
    from magnetar.client.schema import AutoSchema as AutoSchema
    from magnetar.client.schema import AvroSchema as AvroSchema
    from magnetar.client.schema import JsonSchema as JsonSchema
    from magnetar.client.schema import ProtobufSchema as ProtobufSchema
    from magnetar.client.schema import Schema as Schema
    from magnetar.client.settings import TlsSettings as TlsSettings
    from magnetar.client.settings import TokenAuth as TokenAuth
    from magnetar.client.stream_consumer import StreamConsumer as StreamConsumer
    from magnetar.client.transactions import Transaction as Transaction
    from magnetar.client.txn_state import TransactionState as TransactionState
    from magnetar.model.ids import EARLIEST as EARLIEST
    from magnetar.model.ids import LATEST as LATEST
    from magnetar.model.ids import Checkpoint as Checkpoint
    from magnetar.model.ids import MessageId as MessageId
    from magnetar.model.ids import ScalableMessageId as ScalableMessageId
    from magnetar.model.ranges import RangeCount as RangeCount
    from magnetar.model.ranges import RangeLayout as RangeLayout
    from magnetar.model.ranges import RangePosition as RangePosition
    from magnetar.model.ranges import RangeSegment as RangeSegment
    from magnetar.model.ranges import RangeState as RangeState
    from magnetar.model.subscriptions import InitialPosition as InitialPosition
    from magnetar.model.subscriptions import KeySharedPolicy as KeySharedPolicy
    from magnetar.model.subscriptions import SubscriptionType as SubscriptionType

_SCHEMAS = (
    *("BOOL", "BYTES", "FLOAT32", "FLOAT64", "INT8", "INT16", "INT32", "INT64", "STRING"),
    *("AutoSchema", "AvroSchema", "JsonSchema", "ProtobufSchema", "Schema"),
)
_RANGES = ("RangeCount", "RangeLayout", "RangePosition", "RangeSegment", "RangeState")
_HOMES = {
    "client.checkpoint_consumer": ("FROM_EARLIEST", "FROM_LATEST", "CheckpointConsumer"),
    "client.client": ("Client",),
    "client.codec": ("Compression",),
    "client.consumer": ("Consumer",),
    "client.consumer_settings": ("DeadLetterPolicy",),
    "client.groups": ("TransactionGroup",),
    "client.interceptors": ("Draft", "Interceptor"),
    "client.message": ("Message",),
    "client.nacks": ("RedeliveryDelay",),
    "client.producer": ("Producer",),
    "client.producer_settings": ("AccessMode",),
    "client.queue_consumer": ("QueueConsumer",),
    "client.range_page": ("RangePage",),
    "client.ranges": ("Ranges",),
    "client.reader": ("Reader",),
    "client.schema": _SCHEMAS,
    "client.settings": ("TlsSettings", "TokenAuth"),
    "client.stream_consumer": ("StreamConsumer",),
    "client.transactions": ("Transaction",),
    "client.txn_state": ("TransactionState",),
    "model.ids": ("EARLIEST", "LATEST", "Checkpoint", "MessageId", "ScalableMessageId"),
    "model.ranges": _RANGES,
    "model.subscriptions": ("InitialPosition", "KeySharedPolicy", "SubscriptionType"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


if not TYPE_CHECKING:
    # Types see the names above, and no others.
    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'magnetar' has no attribute {name!r}")
        found = getattr(import_module(f"magnetar.{_HOME_OF[name]}"), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
