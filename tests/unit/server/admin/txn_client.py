"""What a client does in transactions, through the protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from harness.patient_clients import PatientDriver
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.messages import Delivered, TxnId

TIMEOUT_MS = 600_000
COMMIT, ABORT = 0, 1


class TxnClient:
    """One connection, with one producer per topic."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._producers: dict[str, int] = {}
        self._sequence = 0

    async def begin(self, coordinator: int = 0, *, scalable: bool = True, **fields: Any) -> TxnId:
        answer = await self._driver.request(
            "NEW_TXN",
            tc_id=coordinator,
            scalable=scalable,
            **({"txn_ttl_millis": TIMEOUT_MS} | fields),
        )
        return TxnId(answer.txnid_most_bits, answer.txnid_least_bits)

    async def open_group(self, application: str) -> Any:
        """The coordinator and the epoch."""
        return await self._driver.request(
            "OPEN_GROUP", application=application, generation="g", run="r"
        )

    async def end(self, txn: TxnId, action: int) -> None:
        await self._driver.request("END_TXN", txn_action=action, **_ids(txn))

    async def add(self, txn: TxnId, topic: str, subscription: str) -> None:
        """Say where it will publish and acknowledge, as v4 clients do."""
        await self._driver.request("ADD_PARTITION_TO_TXN", partitions=[topic], **_ids(txn))
        place = {"topic": topic, "subscription": subscription}
        await self._driver.request("ADD_SUBSCRIPTION_TO_TXN", subscription=[place], **_ids(txn))

    async def publish(self, topic: str, txn: TxnId | None = None) -> str:
        """Send a message; its position."""
        if topic not in self._producers:
            number = self._producers[topic] = len(self._producers)
            await self._driver.request("PRODUCER", topic=topic, producer_id=number)
        self._sequence += 1
        fields: dict[str, Any] = {} if txn is None else _ids(txn)
        entry = build_message(b"x" * 100, sequence_id=self._sequence, **fields)
        receipt = await self._driver.publish(
            self._producers[topic], self._sequence, entry, **fields
        )
        return f"{receipt.message_id.ledgerId}:{receipt.message_id.entryId}"

    async def subscribe(self, topic: str, subscription: str) -> None:
        await self._driver.request(
            "SUBSCRIBE",
            topic=topic,
            subscription=subscription,
            subType=0,
            initialPosition=1,
            consumer_id=0,
        )
        self._driver.send("FLOW", consumer_id=0, messagePermits=100)

    async def ack_next(self, txn: TxnId, *, cumulative: bool = False) -> str:
        """Acknowledge the next message; its position."""
        delivered = await self._driver.pushes.get()
        assert isinstance(delivered, Delivered)
        where = delivered.body.message_id
        wanted = {"ledgerId": where.ledgerId, "entryId": where.entryId}
        await self._driver.request(
            "ACK", consumer_id=0, ack_type=int(cumulative), message_id=[wanted], **_ids(txn)
        )
        return f"{where.ledgerId}:{where.entryId}"


def _ids(txn: TxnId) -> dict[str, int]:
    return {"txnid_most_bits": txn.most, "txnid_least_bits": txn.least}


@asynccontextmanager
async def txn_client(service_url: str) -> AsyncIterator[TxnClient]:
    url = urlsplit(service_url)
    assert url.hostname is not None
    assert url.port is not None
    driver = await PatientDriver.connect(url.hostname, url.port)
    try:
        yield TxnClient(driver)
    finally:
        await driver.close()
