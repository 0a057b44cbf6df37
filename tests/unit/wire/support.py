"""Connections and frames that several tests of the wire need."""

from __future__ import annotations

from magnetar.wire.commands import Side
from magnetar.wire.connection import Connection
from magnetar.wire.frames import base_command, command, encode_with_payload
from magnetar.wire.messages import encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb

CONNECT = command("CONNECT", client_version="test")
CONNECTED = command("CONNECTED", server_version="test")


def open_server(max_frame_bytes: int = 100_000) -> Connection:
    connection = Connection(max_frame_bytes)
    connection.receive(CONNECT)
    connection.open()
    return connection


def open_client(max_frame_bytes: int = 100_000) -> Connection:
    connection = Connection(max_frame_bytes, side=Side.CLIENT)
    connection.receive(CONNECTED)
    return connection


def entry(payload: bytes = b"payload", *, checksum: bool = True) -> bytes:
    metadata = pb.MessageMetadata(producer_name="test", sequence_id=1, publish_time=2)
    return encode_entry(metadata, payload, checksum=checksum)


def send_frame(headers_and_payload: bytes, **fields: object) -> bytes:
    return b"".join(encode_with_payload(base_command("SEND", **fields), headers_and_payload))
