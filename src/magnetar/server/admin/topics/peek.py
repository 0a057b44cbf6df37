"""An entry shown over HTTP: its payload as the body, what its metadata says as headers.

Owns: the names of the headers, which tools read. A batch is shown as one body; a header says how
many messages it holds. Payloads are shown as their producer had them if the standard library can
undo the compression; otherwise as they are stored, and a header says so.

Invariants:
1. Headers hold only what HTTP allows: properties are one JSON object in a header as well, and alone
   where a name or value does not fit into a header of its own.
2. What a few kilobytes unfold to costs little: never more than the largest message, off the loop,
   and one at a time.
"""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final

from aiohttp import web

from magnetar.broker.entries import EntryView
from magnetar.ledger.api import Entry
from magnetar.server.admin.exchange import server_of
from magnetar.wire.messages import payload_offset
from magnetar.wire.pb import pulsar_pb2 as pb

# What RFC 9110 calls a token; aiohttp refuses a header that is none.
_NAME: Final = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_VALUE: Final = re.compile(r"[\x20-\x7e]*")

# Numbers, flags and bytes of the metadata, by the header that shows each where it is set.
_WHERE_SET: Final = {
    "X-Pulsar-null-value": "null_value",
    "X-Pulsar-uncompressed-size": "uncompressed_size",
    "X-Pulsar-highest-sequence-id": "highest_sequence_id",
    "X-Pulsar-marker-type": "marker_type",
    "X-Pulsar-txnid-most-bits": "txnid_most_bits",
    "X-Pulsar-txnid-least-bits": "txnid_least_bits",
    "X-Pulsar-partition-key-b64-encoded": "partition_key_b64_encoded",
    "X-Pulsar-PROPERTY-TOTAL-CHUNKS": "num_chunks_from_msg",
    "X-Pulsar-PROPERTY-CHUNK-ID": "chunk_id",
    "X-Pulsar-Base64-ordering-key": "ordering_key",
    "X-Pulsar-Base64-schema-version": "schema_version",
    "X-Pulsar-Base64-encryption-param": "encryption_param",
}

PEEKS: Final = web.AppKey("peeks", asyncio.Lock)
"""Held by the one peek that undoes a compression."""

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


async def as_response(
    request: web.Request, entry: Entry, more: Mapping[str, str] = NO_HEADERS
) -> web.Response:
    """The answer to a peek; one that says it is larger than a message may be stays compressed."""
    turn, bytes_max = request.app[PEEKS], server_of(request).config.max_message_bytes
    view = EntryView.of(entry)
    headers = {**_headers(view), **more}
    # Shown as it is: whoever peeks at a damaged entry wants to see it.
    if not view.readable:
        return _response(entry.payload, headers)
    payload = entry.payload[payload_offset(entry.payload) :]
    kind = view.metadata.compression
    opened = payload if kind == pb.NONE else None
    if opened is None and _can_open(view.metadata, bytes_max):
        async with turn:
            opened = await asyncio.to_thread(_opened, payload, view.metadata.uncompressed_size)
    if opened is None:
        headers["X-Pulsar-compression"] = pb.CompressionType.Name(kind)
    return _response(payload if opened is None else opened, headers)


def _response(payload: bytes, headers: dict[str, str]) -> web.Response:
    return web.Response(body=payload, headers=headers, content_type="application/octet-stream")


def _headers(view: EntryView) -> dict[str, str]:
    metadata = view.metadata
    headers = {"X-Pulsar-Message-ID": str(view.position)}
    texts = {
        "X-Pulsar-producer-name": metadata.producer_name,
        "X-Pulsar-publish-time": _moment(metadata.publish_time),
        "X-Pulsar-event-time": _moment(metadata.event_time),
        "X-Pulsar-deliver-at-time": _moment(metadata.deliver_at_time),
        "X-Pulsar-partition-key": metadata.partition_key,
        "X-Pulsar-encryption-algo": metadata.encryption_algo,
    }
    # Absent where it is not set, and where a header cannot hold it.
    headers |= {name: text for name, text in texts.items() if text and _VALUE.fullmatch(text)}
    headers["X-Pulsar-sequence-id"] = str(metadata.sequence_id)
    headers |= {
        name: _value_text(getattr(metadata, field))
        for name, field in _WHERE_SET.items()
        if metadata.HasField(field)
    }
    if view.is_batch:
        headers["X-Pulsar-num-batch-message"] = str(view.num_messages)
        headers["X-Pulsar-batch-size"] = str(len(view.payload) - payload_offset(view.payload))
    if metadata.encryption_keys:
        headers["X-Pulsar-Is-Encrypted"] = "true"
        keys = {each.key: b64encode(each.value).decode() for each in metadata.encryption_keys}
        headers["X-Pulsar-Base64-encryption-keys"] = b64encode(json.dumps(keys).encode()).decode()
    _add_properties(headers, {pair.key: pair.value for pair in metadata.properties})
    return headers


def _value_text(value: bool | int | str | bytes) -> str:
    # Bytes have no place in a header but by Base64, which the names of their headers say.
    if isinstance(value, bytes):
        return b64encode(value).decode()
    return str(value).lower() if isinstance(value, bool) else str(value)


def _add_properties(headers: dict[str, str], properties: dict[str, str]) -> None:
    if not properties:
        return
    # JSON holds them all; single headers are for tools that know no JSON.
    headers["X-Pulsar-PROPERTY"] = json.dumps(properties)  # ASCII alone
    for name, value in properties.items():
        if _NAME.fullmatch(name) and _VALUE.fullmatch(value):
            headers[f"X-Pulsar-PROPERTY-{name}"] = value


def _moment(ms: int) -> str:
    """A time that is set, as ISO 8601 with milliseconds."""
    if not 0 < ms < 2**43:  # beyond the year 2248 it is no time
        return ""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")


def _can_open(metadata: pb.MessageMetadata, bytes_max: int) -> bool:
    # Only zlib is in the standard library; a chunk alone, or what is encrypted, cannot be opened.
    is_whole = not metadata.encryption_keys and metadata.num_chunks_from_msg <= 1
    return metadata.compression == pb.ZLIB and is_whole and metadata.uncompressed_size <= bytes_max


def _opened(payload: bytes, size: int) -> bytes | None:
    """The payload as its producer had it; None: it is not what its metadata says."""
    try:
        # Bounded by what the metadata says, whatever the data would give.
        return zlib.decompressobj().decompress(payload, max(size, 1))
    except zlib.error:
        return None
