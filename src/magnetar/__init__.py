"""Magnetar: event streaming with scalable topics and metadata-driven transactions.

What applications use of the client is here by its plain name, and loaded when it is asked for: the
server, which imports this package too, does not pay for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

# `X as X` is how type checkers know that a name is meant to be used from here.
if TYPE_CHECKING:
    from magnetar.client.client import Client as Client
    from magnetar.client.connection.settings import TlsSettings as TlsSettings
    from magnetar.client.connection.settings import TokenAuth as TokenAuth
    from magnetar.client.consume.checkpoint import FROM_EARLIEST as FROM_EARLIEST
    from magnetar.client.consume.checkpoint import FROM_LATEST as FROM_LATEST
    from magnetar.client.consume.checkpoint import CheckpointConsumer as CheckpointConsumer
    from magnetar.client.consume.consumer import Consumer as Consumer
    from magnetar.client.consume.queue import QueueConsumer as QueueConsumer
    from magnetar.client.consume.reader import Reader as Reader
    from magnetar.client.consume.segment.nacks import RedeliveryDelay as RedeliveryDelay
    from magnetar.client.consume.segment.settings import DeadLetterPolicy as DeadLetterPolicy
    from magnetar.client.consume.stream import StreamConsumer as StreamConsumer
    from magnetar.client.encryption.decryptor import DecryptionFailure as DecryptionFailure
    from magnetar.client.encryption.encryptor import EncryptionFailure as EncryptionFailure
    from magnetar.client.encryption.keys import EncryptionKey as EncryptionKey
    from magnetar.client.encryption.keys import KeyReader as KeyReader
    from magnetar.client.encryption.keys import PemKeyReader as PemKeyReader
    from magnetar.client.message.encryption_context import EncryptionContext as EncryptionContext
    from magnetar.client.message.interceptors import Draft as Draft
    from magnetar.client.message.interceptors import Interceptor as Interceptor
    from magnetar.client.message.message import Message as Message
    from magnetar.client.produce.producer import Producer as Producer
    from magnetar.client.produce.settings import AccessMode as AccessMode
    from magnetar.client.ranges.page import RangePage as RangePage
    from magnetar.client.ranges.ranges import Ranges as Ranges
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
    from magnetar.client.transaction.group import TransactionGroup as TransactionGroup
    from magnetar.client.transaction.state import TransactionState as TransactionState
    from magnetar.client.transaction.transaction import Transaction as Transaction
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
    from magnetar.wire.compression import Compression as Compression

_SCHEMAS = (
    *("BOOL", "BYTES", "FLOAT32", "FLOAT64", "INT8", "INT16", "INT32", "INT64", "STRING"),
    *("AutoSchema", "AvroSchema", "JsonSchema", "ProtobufSchema", "Schema"),
)
_RANGES = ("RangeCount", "RangeLayout", "RangePosition", "RangeSegment", "RangeState")
# The module of each public name, relative to `magnetar`; imported when the name is first used.
_HOMES = {
    "client.consume.checkpoint": ("FROM_EARLIEST", "FROM_LATEST", "CheckpointConsumer"),
    "client.client": ("Client",),
    "wire.compression": ("Compression",),
    "client.consume.consumer": ("Consumer",),
    "client.consume.segment.settings": ("DeadLetterPolicy",),
    "client.transaction.group": ("TransactionGroup",),
    "client.encryption.decryptor": ("DecryptionFailure",),
    "client.encryption.encryptor": ("EncryptionFailure",),
    "client.encryption.keys": ("EncryptionKey", "KeyReader", "PemKeyReader"),
    "client.message.encryption_context": ("EncryptionContext",),
    "client.message.interceptors": ("Draft", "Interceptor"),
    "client.message.message": ("Message",),
    "client.consume.segment.nacks": ("RedeliveryDelay",),
    "client.produce.producer": ("Producer",),
    "client.produce.settings": ("AccessMode",),
    "client.consume.queue": ("QueueConsumer",),
    "client.ranges.page": ("RangePage",),
    "client.ranges.ranges": ("Ranges",),
    "client.consume.reader": ("Reader",),
    "client.schema": _SCHEMAS,
    "client.connection.settings": ("TlsSettings", "TokenAuth"),
    "client.consume.stream": ("StreamConsumer",),
    "client.transaction.transaction": ("Transaction",),
    "client.transaction.state": ("TransactionState",),
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
        # From now on the name is found without this function.
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    # Completion in a shell shows the names that nobody has asked for yet.
    return sorted([*globals(), *_HOME_OF])
