"""The protocol driver against a scripted server, on transports without sockets and with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from magnetar.errors import DeadlineExceeded, RemoteProtocolError, RequestError, WireCode
from magnetar.model.ids import Position
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.testing.virtual.virtual_time import run
from magnetar.wire.commands import NAMES
from magnetar.wire.connection import Connection
from magnetar.wire.frames import command, encode_message, encode_receipt
from magnetar.wire.messages import Command, Delivered, Received, Send, metadata_of
from tests.unit.wire.support import CONNECTED, entry


class ScriptedServer(asyncio.Transport):
    """The driver's transport, and the server behind it: it answers CONNECT and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.wire = Connection()
        self.received: list[Command] = []
        self.greeting = CONNECTED
        self.reading = True
        self._driver: Driver | None = None
        self._closing = False

    async def connect(
        self, factory: Callable[[], Driver], host: str, port: int, /
    ) -> tuple[asyncio.BaseTransport, Driver]:
        self._driver = factory()
        self._driver.connection_made(self)
        return self, self._driver

    def push(self, data: bytes) -> None:
        assert self._driver is not None
        asyncio.get_running_loop().call_soon(self._driver.data_received, data)

    @property
    def names(self) -> list[str]:
        return [NAMES[each.type] for each in self.received if isinstance(each, Received)]

    def write(self, data: bytes | bytearray | memoryview) -> None:
        for each in self.wire.receive(bytes(data)):
            self.received.append(each)
            if len(self.received) == 1:
                self.wire.open()
                self.push(self.greeting)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        assert self._driver is not None
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._driver.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def scripted(test: Callable[[ScriptedServer, Driver], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        server = ScriptedServer()
        driver = await Driver.connect("nowhere", 1, connect=server.connect, pushes_max=4)
        await test(server, driver)
        await driver.close()

    run(main())


def test_requests_get_their_replies_in_any_order() -> None:
    async def test(server: ScriptedServer, driver: Driver) -> None:
        lookup = asyncio.ensure_future(driver.request("LOOKUP", topic="t", request_id=5))
        flagged = asyncio.ensure_future(
            driver.request("PRODUCER", topic="t", producer_id=1, request_id=5)
        )
        await asyncio.sleep(0)
        server.push(command("PRODUCER_SUCCESS", request_id=5, producer_name="p"))
        server.push(command("LOOKUP_RESPONSE", request_id=5, response="Connect"))
        assert (await flagged).producer_name == "p"
        assert (await lookup).response == 1
        assert server.names == ["CONNECT", "LOOKUP", "PRODUCER"]

    scripted(test)


@pytest.mark.parametrize(
    ("name", "fields", "reply"),
    [
        ("SEEK", {"consumer_id": 1}, ("ERROR", {"error": "TopicNotFound", "message": "no"})),
        ("LOOKUP", {"topic": "t"}, ("LOOKUP_RESPONSE", {"error": "TopicNotFound"})),
        ("GET_SCHEMA", {"topic": "t"}, ("GET_SCHEMA_RESPONSE", {"error_code": "TopicNotFound"})),
    ],
)
def test_a_refusal_carries_the_code(
    name: str, fields: dict[str, Any], reply: tuple[str, dict[str, object]]
) -> None:
    async def test(server: ScriptedServer, driver: Driver) -> None:
        asked = asyncio.ensure_future(driver.request(name, request_id=9, **fields))
        await asyncio.sleep(0)
        server.push(command(reply[0], request_id=9, **reply[1]))
        with pytest.raises(RequestError, match="TopicNotFound") as refused:
            await asked
        assert refused.value.wire_code is WireCode.TOPIC_NOT_FOUND

    scripted(test)


def test_a_publish_gets_its_receipt_or_error() -> None:
    async def test(server: ScriptedServer, driver: Driver) -> None:
        message = build_message(b"x", sequence_id=3, properties={"a": "b"}, key="k")
        first = asyncio.ensure_future(driver.publish(1, 3, message))
        second = asyncio.ensure_future(driver.publish(1, 4, message, num_messages=2))
        await asyncio.sleep(0)
        server.push(encode_receipt(1, 3, 10, 20))
        error = {"producer_id": 1, "sequence_id": 4, "error": "ChecksumError", "message": "bad"}
        server.push(command("SEND_ERROR", **error))
        assert (await first).message_id.entryId == 20
        with pytest.raises(RequestError) as refused:
            await second
        assert refused.value.wire_code is WireCode.CHECKSUM
        sent = server.received[-1]
        assert isinstance(sent, Send)
        assert sent.num_messages == 2
        metadata = metadata_of(sent.headers_and_payload)
        assert (metadata.partition_key, metadata.properties[0].value) == ("k", "b")

    scripted(test)


def test_pings_are_answered_and_pushes_queued_within_bounds() -> None:
    async def test(server: ScriptedServer, driver: Driver) -> None:
        message = b"".join(encode_message(1, Position(1, 1), -1, 0, None, entry()))
        server.push(
            command("PING") + message + command("CLOSE_CONSUMER", consumer_id=1, request_id=2)
        )
        delivered = await driver.pushes.get()
        assert isinstance(delivered, Delivered)
        closed = await driver.pushes.get()
        assert isinstance(closed, Received)
        assert server.names == ["CONNECT", "PONG"]
        server.push(message * 4)
        await asyncio.sleep(0)
        assert not server.reading
        await driver.pushes.get()
        assert not server.reading
        await driver.pushes.get()
        assert server.reading
        assert len(driver.pushes) == 2

    scripted(test)


def test_everyone_is_told_of_the_end() -> None:
    async def test(server: ScriptedServer, driver: Driver) -> None:
        waiting: list[Coroutine[Any, Any, object]] = [
            driver.request("LOOKUP", topic="t"),
            driver.publish(1, 1, entry()),
            driver.pushes.get(),
        ]
        tasks = [asyncio.ensure_future(each) for each in waiting]
        await asyncio.sleep(0)
        server.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, RemoteProtocolError) for each in results)
        with pytest.raises(RemoteProtocolError):
            driver.send("PING")
        with pytest.raises(RemoteProtocolError):
            await driver.drain()

    scripted(test)


def test_a_server_that_breaks_the_protocol_is_cut_off() -> None:
    async def test(server: ScriptedServer, driver: Driver) -> None:
        message = b"".join(encode_message(1, Position(1, 1), -1, 0, None, entry()))
        server.push(message + b"\xff" * 8)
        await driver.lost()
        assert isinstance(driver.failure, RemoteProtocolError)
        assert isinstance(await driver.pushes.get(), Delivered)
        with pytest.raises(RemoteProtocolError):
            await driver.pushes.get()

    scripted(test)


def test_silence_reaches_its_deadline() -> None:
    async def test(server: ScriptedServer, driver: Driver) -> None:
        with pytest.raises(DeadlineExceeded, match="LOOKUP"):
            await driver.request("LOOKUP", topic="t")
        with pytest.raises(DeadlineExceeded):
            await driver.pushes.get()
        with pytest.raises(DeadlineExceeded):
            await driver.publish(1, 1, entry())

    scripted(test)


def test_a_refused_handshake() -> None:
    async def main() -> None:
        server = ScriptedServer()
        server.greeting = command(
            "ERROR", request_id=2**64 - 1, error="AuthenticationError", message="who?"
        )
        with pytest.raises(RequestError) as refused:
            await Driver.connect("nowhere", 1, connect=server.connect)
        assert refused.value.wire_code is WireCode.AUTHENTICATION
        assert server.is_closing()

    run(main())


def test_a_command_without_reply_cannot_be_requested() -> None:
    async def test(server: ScriptedServer, driver: Driver) -> None:
        with pytest.raises(RequestError):
            await driver.request("FLOW", consumer_id=1, messagePermits=1)

    scripted(test)


def test_over_a_real_socket() -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            wire = Connection()
            while data := await reader.read(1000):
                for each in wire.receive(data):
                    assert isinstance(each, Received)
                    if NAMES[each.type] == "CONNECT":
                        wire.open()
                        writer.write(CONNECTED)
                    else:
                        writer.write(command("LOOKUP_RESPONSE", request_id=1, response="Connect"))
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        driver = await Driver.connect("127.0.0.1", server.sockets[0].getsockname()[1])
        assert (await driver.request("LOOKUP", topic="t")).request_id == 1
        await driver.close()
        server.close()
        await server.wait_closed()

    asyncio.run(main())
