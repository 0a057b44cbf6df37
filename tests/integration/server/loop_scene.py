"""A topic with very many entries, a consumer that was given all of them, and what it asks for.

Owns: `Scene`. What a command does to the loop of its server is measured by `Scene.measure`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from harness.limits import PATIENCE_S
from harness.patient_clients import PatientDriver
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.topic.topic import Topic
from magnetar.cli.admin_client import AdminClient, check
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.server.app import Server
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.messages import Delivered, TxnId
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.server.loop_probe import Probed, Turns

IDS_PER_ACK: Final = 50_000
SENDS_AT_ONCE: Final = 1_000
BEGUN_AT_ONCE: Final = 100
TRANSACTIONS: Final = "/admin/v3/transactions"


class Scene:
    """A topic with entries, and one consumer that was given all of them."""

    def __init__(self, probe: Probed, items: int) -> None:
        self.probe = probe
        self.items = items
        self.name = TopicName.parse("persistent://public/default/t")
        self.driver: Driver
        self.drivers: list[Driver] = []
        self.places: list[Position] = []
        self.rows: dict[str, Turns] = {}
        self._number = 0

    async def fill(self, name: str, *, messages: int = 1) -> None:
        """A topic of its own for the next command, of single messages or batches of so many."""
        is_whole = "://" in name
        self.name = TopicName.parse(name if is_whole else f"persistent://public/default/{name}")
        batch: dict[str, Any] = {} if messages == 1 else {"num_messages_in_batch": messages}
        entry = build_message(bytes(8 * messages), **batch)

        async def append(server: Server) -> list[Position]:
            topic = await server.topics.get(self.name, create=not is_whole)
            assert isinstance(topic, Topic)
            places: list[Position] = []
            while len(places) < self.items:
                places += await asyncio.gather(*(topic.ledger.append(entry) for _ in range(1000)))
            return places

        self.places = await self.probe.on_loop(append)

    async def subscribe(self, kind: int, **fields: Any) -> None:
        """A consumer on a connection of its own, which has taken everything."""
        port = int(self.probe.server.service_url.rpartition(":")[2])
        self.driver = await PatientDriver.connect("127.0.0.1", port, pushes_max=1_000_000)
        self.drivers.append(self.driver)
        given: dict[str, Any] = {
            "subscription": "sub",
            "subType": kind,
            "consumer_id": 0,
            "initialPosition": 1,
        }
        await self.driver.request("SUBSCRIBE", topic=str(self.name), **(given | fields))

    async def receive(self, messages: int = 1) -> None:
        self.driver.send("FLOW", consumer_id=0, messagePermits=self.items * messages)
        for _ in range(self.items):
            assert isinstance(await self.driver.pushes.get(), Delivered)

    async def measure(self, label: str, work: Awaitable[object]) -> None:
        self.probe.turns()
        await work
        # What was begun in the background belongs to it.
        for _ in range(20):
            await self.probe.on_loop(lambda _: asyncio.sleep(0.01))
        self.rows[label] = self.probe.turns()

    # --- commands

    def ids(self, places: list[Position], **more: Any) -> list[dict[str, Any]]:
        return [{"ledgerId": each.ledger_id, "entryId": each.entry_id} | more for each in places]

    async def ack(
        self, places: list[Position], *, left: list[int] | None = None, **fields: Any
    ) -> None:
        """Acknowledge entries; of batches all messages but those that are `left`."""
        more = {} if left is None else {"ack_set": left}
        for start in range(0, len(places), IDS_PER_ACK):
            some = self.ids(places[start : start + IDS_PER_ACK], **more)
            await self.driver.request("ACK", consumer_id=0, ack_type=0, message_id=some, **fields)

    async def ack_cumulative(self, place: Position, **fields: Any) -> None:
        ids = self.ids([place])
        await self.driver.request("ACK", consumer_id=0, ack_type=1, message_id=ids, **fields)

    async def ack_one_by_one(self) -> None:
        for place in self.places[1:]:
            self.driver.send("ACK", consumer_id=0, ack_type=0, message_id=self.ids([place]))
        await self.ack(self.places[:1])

    async def redeliver(self, places: list[Position]) -> None:
        for start in range(0, len(places) or 1, IDS_PER_ACK):
            some = self.ids(places[start : start + IDS_PER_ACK])
            self.driver.send("REDELIVER_UNACKNOWLEDGED_MESSAGES", consumer_id=0, message_ids=some)
        await self.receive()

    async def begin(self, *, v4: bool, ttl_ms: int = 600_000) -> TxnId:
        flag = {} if v4 else {"scalable": True}
        answer = await self.driver.request("NEW_TXN", tc_id=0, txn_ttl_millis=ttl_ms, **flag)
        txn = TxnId(answer.txnid_most_bits, answer.txnid_least_bits)
        if v4:
            where = {"topic": str(self.name), "subscription": "sub"}
            await self.driver.request(
                "ADD_SUBSCRIPTION_TO_TXN", subscription=[where], **fields_of(txn)
            )
        return txn

    async def begin_many(self, count: int, ttl_ms: int = 600_000) -> list[TxnId]:
        """So many at once as a client has under way."""
        txns: list[TxnId] = []
        while len(txns) < count:
            txns += await asyncio.gather(
                *(self.begin(v4=False, ttl_ms=ttl_ms) for _ in range(BEGUN_AT_ONCE))
            )
        return txns

    async def end_many(self, txns: list[TxnId]) -> None:
        for start in range(0, len(txns), BEGUN_AT_ONCE):
            some = txns[start : start + BEGUN_AT_ONCE]
            await asyncio.gather(*(self.end(each, commit=True, v4=False) for each in some))

    async def end(self, txn: TxnId, *, commit: bool, v4: bool) -> None:
        flag = {} if v4 else {"scalable": True}
        action = pb.COMMIT if commit else pb.ABORT
        await self.driver.request("END_TXN", txn_action=action, **fields_of(txn), **flag)

    async def abort_and_deliver_next(self, txn: TxnId, *, v4: bool) -> None:
        """Abort, and wait for a message behind all that is passed over for it."""
        await self.end(txn, commit=False, v4=v4)
        self.driver.send("FLOW", consumer_id=0, messagePermits=1)
        await self.send_one()

    async def on_subscription(self, work: Callable[[Subscription], Awaitable[object]]) -> None:
        async def go(server: Server) -> None:
            topic = await server.topics.get(self.name, create=False)
            assert isinstance(topic, Topic)
            await work(topic.subscriptions["sub"])

        await self.probe.on_loop(go)

    # --- messages

    async def send(self, txn: TxnId, *, is_carried: bool = True) -> None:
        """As many messages as there are items, not waited for one by one.

        Unless it `is_carried` by the metadata of each, only the command names the transaction.
        """
        name = (
            await self.driver.request("PRODUCER", topic=str(self.name), producer_id=0)
        ).producer_name
        fields = fields_of(txn)
        carried: dict[str, Any] = fields if is_carried else {}
        for start in range(0, self.items, SENDS_AT_ONCE):
            numbers = range(start, start + SENDS_AT_ONCE)
            entries = [
                build_message(b"x", producer_name=name, sequence_id=each, **carried)
                for each in numbers
            ]
            sent = zip(numbers, entries, strict=True)
            await asyncio.gather(
                *(self.driver.publish(0, each, entry, **fields) for each, entry in sent)
            )
        await self.driver.request("CLOSE_PRODUCER", producer_id=0)

    async def send_one(self) -> None:
        await self.driver.request("PRODUCER", topic=str(self.name), producer_id=1)
        await self.driver.publish(1, 0, build_message(b"last"))
        assert isinstance(await self.driver.pushes.get(), Delivered)

    # --- the admin interface

    async def aborted_by_operator(self) -> None:
        """What `magnetar txn abort --on` asks for."""
        await self.asked("POST", f"{TRANSACTIONS}/abortOn/persistent/public/default/{{}}")

    async def asked(self, method: str, path: str, body: object = None) -> None:
        async with AdminClient(self.probe.server.admin_url or "", seconds=PATIENCE_S) as admin:
            check(await admin.exchange(method, path.format(self.name.local_name), body))


def fields_of(txn: TxnId) -> dict[str, Any]:
    return {"txnid_most_bits": txn.most, "txnid_least_bits": txn.least}
