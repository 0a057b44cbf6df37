"""A server that answers without storing: what the protocol alone costs on this machine.

It parses every frame with the same `wire` code as the server and answers at once, from memory of
nothing: lookups say "here", producers are accepted, each SEND gets a receipt. It is the ceiling
for any server in Python on the same loop, and the anchor of the broker's bench.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any, cast

import uvloop

from magnetar.wire.commands import Side
from magnetar.wire.connection import Connection
from magnetar.wire.frames import command, encode_receipt, frame_bytes_max
from magnetar.wire.messages import Received, Send
from magnetar.wire.pb import pulsar_pb2 as pb

TYPE = pb.BaseCommand


class Stub(asyncio.Protocol):
    def __init__(self, url: str) -> None:
        self._url = url
        self._wire = Connection(frame_bytes_max(), side=Side.SERVER)
        self._entry = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        out: list[bytes] = []
        for each in self._wire.receive(data):
            if isinstance(each, Send):
                self._entry += 1
                out.append(encode_receipt(each.producer_id, each.sequence_id, 1, self._entry))
            elif isinstance(each, Received):
                out += self._answer(each.type, each.body)
        if out:
            self._transport.write(b"".join(out))

    def _answer(self, kind: int, body: Any) -> list[bytes]:
        if kind == TYPE.CONNECT:
            self._wire.open()
            return [
                command(
                    "CONNECTED",
                    server_version="stub",
                    protocol_version=body.protocol_version,
                    max_message_size=5 * 1024 * 1024,
                )
            ]
        if kind == TYPE.PING:
            return [command("PONG")]
        if kind == TYPE.PARTITIONED_METADATA:
            return [
                command(
                    "PARTITIONED_METADATA_RESPONSE",
                    request_id=body.request_id,
                    partitions=0,
                    response=0,
                )
            ]
        if kind == TYPE.LOOKUP:
            return [
                command(
                    "LOOKUP_RESPONSE",
                    request_id=body.request_id,
                    brokerServiceUrl=self._url,
                    response=1,
                    authoritative=True,
                    proxy_through_service_url=True,
                )
            ]
        if kind == TYPE.PRODUCER:
            name = body.producer_name or "stub"
            return [
                command(
                    "PRODUCER_SUCCESS",
                    request_id=body.request_id,
                    producer_name=name,
                    last_sequence_id=-1,
                    schema_version=b"",
                )
            ]
        if kind == TYPE.CLOSE_PRODUCER:
            return [command("SUCCESS", request_id=body.request_id)]
        return []


async def serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stub(f"pulsar://127.0.0.1:{port}"), "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))
