"""The names that applications may use, class by class: `test_public_surface.py` compares.

A name that is added here is promised: it needs documentation, and stays.
"""

from __future__ import annotations

from typing import Final

_SCHEMA: Final = "decode encode info needs_writer"

_SURFACE: Final = {
    # The client and what it makes.
    "Client": (
        "checkpoint_consumer close consumer group group_status join_transaction metrics "
        "open_group producer queue_consumer ranges reader stream_consumer topic_schema "
        "transaction"
    ),
    "Producer": (
        "close flush last_sequence_id name pending send send_arrow submit submit_arrow throttled "
        "topic"
    ),
    "Consumer": (
        "ack ack_arrow ack_cumulative ack_many close last_message_ids nack name receive "
        "receive_arrow receive_many reconsume_later seek subscription subscription_type "
        "topics unsubscribe"
    ),
    "QueueConsumer": (
        "ack ack_arrow ack_many close nack name receive receive_arrow receive_many "
        "reconsume_later seek subscription topics"
    ),
    "StreamConsumer": (
        "ack_arrow ack_cumulative close name receive receive_arrow receive_many seek "
        "segments subscription topic"
    ),
    "CheckpointConsumer": "checkpoint close name receive receive_arrow receive_many topic",
    "Reader": (
        "close has_message_available name receive receive_arrow receive_many seek "
        "subscription topics"
    ),
    "Transaction": "abort close commit prepare state txn_id",
    "TransactionGroup": "abort commit committed_sequence status ticket transaction",
    "TransactionState": (
        "ABORTED ABORTING COMMITTED COMMITTING ERROR OPEN TIMED_OUT is_aborted is_final"
    ),
    # Messages, their ids, and interceptors.
    "Message": (
        "data deliver_at_ms encryption event_time_ms id is_null key key_bytes ordering_key "
        "producer_name properties publish_time_ms redelivery_count replicated_from "
        "schema_version sequence_id size topic transaction trouble value"
    ),
    "MessageId": "batch_index batch_size entry_id from_bytes ledger_id partition position to_bytes",
    "ScalableMessageId": "from_bytes message_id parent_topic positions segment_id to_bytes topics",
    "Checkpoint": "from_bytes kind positions to_bytes",
    "Draft": "data key properties topic",
    "Interceptor": "acknowledged nacked not_sent received sending sent",
    # Ranges.
    "Ranges": "at_time counts cut layout move_cursor news pieces read states",
    "RangePage": "data end entries next positions record_batch segment sizes start",
    "RangePosition": "at batch_index before behind entry ledger stop",
    "RangeCount": "bytes is_exact messages",
    "RangeLayout": "creation_id epoch segments topic",
    "RangeSegment": "children created_ms is_sealed name number parents",
    "RangeState": "first is_sealed stable",
    # Settings.
    "AccessMode": "EXCLUSIVE EXCLUSIVE_WITH_FENCING SHARED WAIT_FOR_EXCLUSIVE may_wait",
    "Compression": "LZ4 NONE SNAPPY ZLIB ZSTD",
    "DeadLetterPolicy": "encryption_keys max_redeliveries retry_topic topic",
    "InitialPosition": "EARLIEST LATEST",
    "KeySharedPolicy": "bucketed entry_buckets mode out_of_order ranges sticky",
    "RedeliveryDelay": "after factor first most",
    "SubscriptionType": "EXCLUSIVE FAILOVER KEY_SHARED SHARED takes_cumulative_acks",
    "TlsSettings": "allow_untrusted certificate context key trust_certs validate_hostname",
    "TokenAuth": "data method token",
    # Encryption.
    "KeyReader": "private_key public_key",
    "PemKeyReader": "private_key public_key",
    "EncryptionKey": "metadata pem",
    "EncryptionContext": (
        "algorithm batch_size chunk_id compression is_encrypted keys num_chunks param "
        "uncompressed_size uuid"
    ),
    "EncryptionFailure": "FAIL SEND",
    "DecryptionFailure": "CONSUME DISCARD FAIL",
    # Schemas, and those behind `BYTES`, `STRING` and so on.
    "Schema": _SCHEMA,
    "AutoSchema": _SCHEMA,
    "AvroSchema": _SCHEMA,
    "JsonSchema": _SCHEMA,
    "ProtobufSchema": _SCHEMA,
    "BoolSchema": _SCHEMA,
    "BytesSchema": _SCHEMA,
    "FloatSchema": _SCHEMA,
    "IntSchema": _SCHEMA,
    "StringSchema": _SCHEMA,
}

SURFACE: Final = {name: tuple(names.split()) for name, names in _SURFACE.items()}

BLOCKING: Final = {
    "Acknowledged": ("done", "wait"),
    "Client": ("run",),
}
"""What only the blocking classes have; all else is that of the asyncio ones."""
