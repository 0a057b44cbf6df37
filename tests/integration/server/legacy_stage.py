"""A v4 client on a real server: legacy transactions as its commands make them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from harness.limits import within
from magnetar.runtime.limits import Limits
from magnetar.server.app import Server
from magnetar.server.config import ServerConfig
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.txn.ids import is_metadata
from magnetar.txn.records import State
from magnetar.wire.messages import TxnId
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.server.serving import LIMITS, connected, message, run, subscribed

NAMESPACE = "persistent://public/default"
A, B = f"{NAMESPACE}/a", f"{NAMESPACE}/b"
ROUNDS = 5
"""Answers for which somebody waits to see that nothing else comes."""


def ids(txn: TxnId) -> dict[str, int]:
    return {"txnid_most_bits": txn.most, "txnid_least_bits": txn.least}


@asynccontextmanager
async def legacy_server(
    folder: Path, *, kind: str = "auto", limits: Limits = LIMITS
) -> AsyncIterator[Server]:
    config = ServerConfig(data=str(folder), port=0, limits=limits, transaction_kind=kind)
    async with Server(config) as server:
        yield server


class V4:
    """One connection: a producer per topic, and a consumer per topic and subscription."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._producers: dict[str, int] = {}
        self._consumers: dict[tuple[str, str], int] = {}
        self._sequence = 0

    @classmethod
    async def connect(cls, server: Server, **fields: Any) -> V4:
        return cls(await connected(server, **fields))

    async def close(self) -> None:
        await self.driver.close()

    # --- transactions

    async def begin(self, tc_id: int = 0, *, ttl: int = 60_000, **fields: Any) -> TxnId:
        answer = await self.driver.request("NEW_TXN", tc_id=tc_id, txn_ttl_millis=ttl, **fields)
        return TxnId(answer.txnid_most_bits, answer.txnid_least_bits)

    async def add(self, txn: TxnId, *topics: str, **fields: Any) -> None:
        await self.driver.request("ADD_PARTITION_TO_TXN", partitions=topics, **ids(txn), **fields)

    async def add_subscription(self, txn: TxnId, topic: str, name: str, **fields: Any) -> None:
        place = {"topic": topic, "subscription": name}
        await self.driver.request(
            "ADD_SUBSCRIPTION_TO_TXN", subscription=[place], **ids(txn), **fields
        )

    async def end(self, txn: TxnId, *, commit: bool = True, **fields: Any) -> None:
        action = pb.COMMIT if commit else pb.ABORT
        await self.driver.request("END_TXN", txn_action=action, **ids(txn), **fields)

    # --- messages

    async def publish(self, topic: str, payload: bytes, txn: TxnId | None = None) -> None:
        """As a client does: the topic is added before the first message."""
        if txn is not None and not is_metadata(txn):
            await self.add(txn, topic)
        await self.send(topic, payload, txn)

    async def send(self, topic: str, payload: bytes, txn: TxnId | None = None) -> None:
        """Only the message."""
        if topic not in self._producers:
            number = self._producers[topic] = len(self._producers)
            await self.driver.request("PRODUCER", topic=topic, producer_id=number)
        self._sequence += 1
        fields: dict[str, Any] = {} if txn is None else ids(txn)
        entry = build_message(payload, sequence_id=self._sequence, **fields)
        await self.driver.publish(self._producers[topic], self._sequence, entry, **fields)

    async def subscribe(self, topic: str, name: str = "sub", **fields: Any) -> None:
        number = self._consumers[topic, name] = len(self._consumers)
        await subscribed(self.driver, number, topic=topic, subscription=name, **fields)

    async def ack(
        self, topic: str, where: Any, txn: TxnId | None = None, name: str = "sub"
    ) -> None:
        """Acknowledge one message; the subscription is added before."""
        if txn is not None and not is_metadata(txn):
            await self.add_subscription(txn, topic, name)
        await self.ack_only(topic, where, txn, name)

    async def ack_only(
        self, topic: str, where: Any, txn: TxnId | None = None, name: str = "sub"
    ) -> None:
        fields: dict[str, Any] = {} if txn is None else ids(txn)
        entry = {"ledgerId": where.ledgerId, "entryId": where.entryId}
        await self.driver.request(
            "ACK",
            consumer_id=self._consumers[topic, name],
            ack_type=0,
            message_id=[entry],
            **fields,
        )

    async def receive(self) -> tuple[bytes, Any]:
        """The next message of any consumer, and its id."""
        found = await message(self.driver)
        return payload_of(found.headers_and_payload), found.body.message_id

    async def payloads(self, count: int) -> list[bytes]:
        return [(await self.receive())[0] for _ in range(count)]

    async def sees_nothing(self) -> None:
        """Whatever is on its way has come after this, and there was nothing."""
        for _ in range(ROUNDS):
            await self.driver.request("LOOKUP", topic="anything")
        assert len(self.driver.pushes) == 0


class Decided:
    """The decision on a transaction, as topics of the server would learn it."""

    def __init__(self, server: Server, txn: TxnId) -> None:
        self._state: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        known = server.outcomes.known(txn)
        if known in ("COMMITTED", "ABORTED"):
            self._state.set_result(known)
        else:
            server.outcomes.join(txn, self)

    def decided(self, txn: TxnId, state: State) -> None:
        self._state.set_result(state)

    async def wait(self) -> State:
        async with within("a decision"):
            return await self._state


def payload_of(headers_and_payload: bytes) -> bytes:
    """Of a single message: what stands behind its metadata."""
    return headers_and_payload.rpartition(b"#")[2]


Scene = Callable[[Server, V4], Awaitable[None]]


def play(folder: Path, *scenes: Scene, kinds: tuple[str, ...] = (), **given: Any) -> None:
    """Each scene on a server of its own, one after the other, over the same folder."""

    async def go() -> None:
        for number, scene in enumerate(scenes):
            kind = kinds[number] if kinds else "auto"
            async with legacy_server(folder, kind=kind, **given) as server:
                client = await V4.connect(server)
                await scene(server, client)
                await client.close()

    run(go())
