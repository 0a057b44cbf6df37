"""Transactional clients over the wire, and the stages on which tests of transactions run.

Owns: `TxnClient` with its `Sender`s and `Reader`s, which say what official clients say and hide no
failure; `TxnStage`, brokers on virtual time that can be killed, restarted and unloaded; `act`,
which runs a story on one; `KINDS`, how transactions of v4 clients may be kept.

Relies on: `Driver` for the protocol. Every reader has a connection of its own, so that what it is
given is never mixed up with what others are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, NamedTuple

import pytest

from harness.limits import PATIENCE_S
from harness.simulation.scalable.links import route
from harness.simulation.scalable.world import Host
from magnetar.errors import DeadlineExceeded, MagnetarError, WireCode
from magnetar.model.hashing import key_hash
from magnetar.model.names import TopicName
from magnetar.server.app import Server
from magnetar.server.authority import Authority, Principal
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.txn.records import ABORTED_RECORDS, GROUPS, OPS, State
from magnetar.txn.store import TxnStore
from magnetar.wire.messages import Delivered, TxnId, payload_offset
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.server.scalable_stage import TOPIC, Stage, play, told, until

EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = range(4)
COMMIT, ABORT = pb.COMMIT, pb.ABORT
T: Final = "persistent://public/default/t"
U: Final = "persistent://public/default/u"
LONG_MS: Final = 600_000

_REDIRECTS_MAX: Final = 10

KINDS: Final = ("metadata", "markers")
"""How transactions that v4 clients begin are kept on regular topics."""

of_every_kind: Final = pytest.mark.parametrize("kind", KINDS)

Connecting = Callable[[], Awaitable[Driver]]


def txn_fields(txn: TxnId) -> dict[str, Any]:
    return {"txnid_most_bits": txn.most, "txnid_least_bits": txn.least}


def txn_of(answer: Any) -> TxnId:
    return TxnId(answer.txnid_most_bits, answer.txnid_least_bits)


class Place(NamedTuple):
    """Where an entry stands."""

    ledger: int
    entry: int

    @classmethod
    def of(cls, found: Any) -> Place:
        return cls(found.ledgerId, found.entryId)

    def fields(self, ack_set: int = 0) -> dict[str, Any]:
        given: dict[str, Any] = {"ledgerId": self.ledger, "entryId": self.entry}
        return given | {"ack_set": [ack_set]} if ack_set else given


class Got(NamedTuple):
    """A message, as a consumer is given it."""

    text: str
    place: Place
    redeliveries: int
    ack_set: tuple[int, ...]

    @classmethod
    def of(cls, push: Delivered) -> Got:
        payload, body = push.headers_and_payload, push.body
        text = payload[payload_offset(payload) :].decode()
        return cls(text, Place.of(body.message_id), body.redelivery_count, tuple(body.ack_set))


class Sender:
    """A producer."""

    def __init__(self, driver: Driver, number: int, name: str) -> None:
        self.name = name
        self._driver = driver
        self._number = number
        self.next_sequence = 0

    async def send(
        self, text: str, txn: TxnId | None = None, *, sequence: int | None = None, **metadata: Any
    ) -> Place:
        """Send a message and wait for its receipt."""
        return await self.sending(text, txn, sequence=sequence, **metadata)

    def sending(
        self, text: str, txn: TxnId | None = None, *, sequence: int | None = None, **metadata: Any
    ) -> Coroutine[Any, Any, Place]:
        """As `send`; numbered at once, and sent when awaited."""
        if sequence is None:
            sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        fields = {} if txn is None else txn_fields(txn)
        given = {"producer_name": self.name, "sequence_id": sequence, **fields, **metadata}
        message = build_message(text.encode(), **given)
        return self._receipted(sequence, message, fields)

    async def _receipted(self, sequence: int, message: bytes, fields: dict[str, Any]) -> Place:
        receipt = await self._driver.publish(self._number, sequence, message, **fields)
        return Place.of(receipt.message_id)

    def post(self, text: str, txn: TxnId | None, sequence: int) -> None:
        """Send it and hear nothing of it."""
        fields = {} if txn is None else txn_fields(txn)
        message = build_message(
            text.encode(), producer_name=self.name, sequence_id=sequence, **fields
        )
        self._driver.send("SEND", message, producer_id=self._number, sequence_id=sequence, **fields)


class Reader:
    """A consumer, on a connection of its own."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    async def get(self, seconds: float = PATIENCE_S) -> Got:
        while True:
            push = await self.driver.pushes.get(seconds)
            if isinstance(push, Delivered):
                return Got.of(push)

    async def take(self, count: int) -> list[Got]:
        return [await self.get() for _ in range(count)]

    async def texts(self, count: int) -> list[str]:
        return [each.text for each in await self.take(count)]

    async def nothing(self, seconds: float = 3.0) -> None:
        """Nothing comes for a while (on virtual time)."""
        try:
            found = await self.get(seconds)
        except DeadlineExceeded:
            return
        raise AssertionError(f"{found} came")

    async def ack(
        self, *got: Got, txn: TxnId | None = None, cumulative: bool = False, ack_set: int = 0
    ) -> None:
        """Acknowledge, and wait for the answer."""
        await self.driver.request(
            "ACK",
            consumer_id=0,
            ack_type=int(cumulative),
            message_id=[each.place.fields(ack_set) for each in got],
            **({} if txn is None else txn_fields(txn)),
        )

    async def last_id(self) -> Place:
        answer = await self.driver.request("GET_LAST_MESSAGE_ID", consumer_id=0)
        return Place.of(answer.last_message_id)

    async def backlog(self) -> int:
        answer = await self.driver.request("CONSUMER_STATS", consumer_id=0)
        return int(answer.msgBacklog)

    async def again(self) -> None:
        """Ask for everything that is not acknowledged."""
        self.driver.send("REDELIVER_UNACKNOWLEDGED_MESSAGES", consumer_id=0)

    async def close(self) -> None:
        await self.driver.request("CLOSE_CONSUMER", consumer_id=0)
        await self.driver.close()


class TxnClient:
    """One client: `scalable` is what the commands of v5 ones carry, and those of v4 ones do not."""

    def __init__(self, connect: Connecting, driver: Driver, *, scalable: bool) -> None:
        self.driver = driver
        self._connect = connect
        self._flag = {"scalable": True} if scalable else {}
        self._senders = 0

    @classmethod
    async def begun(cls, connect: Connecting, *, scalable: bool) -> TxnClient:
        return cls(connect, await connect(), scalable=scalable)

    async def begin(self, *, ttl: int = LONG_MS, coordinator: int = 0) -> TxnId:
        answer = await self.driver.request(
            "NEW_TXN", txn_ttl_millis=ttl, tc_id=coordinator, **self._flag
        )
        return txn_of(answer)

    async def end(self, txn: TxnId, action: Any) -> None:
        answer = await self.driver.request(
            "END_TXN", txn_action=action, **txn_fields(txn), **self._flag
        )
        assert txn_of(answer) == txn

    async def commit(self, txn: TxnId) -> None:
        await self.end(txn, COMMIT)

    async def abort(self, txn: TxnId) -> None:
        await self.end(txn, ABORT)

    async def ended(self, txn: TxnId, action: Any) -> int | None:
        """The code with which an end is refused; None: it is not."""
        return await refusal(self.end(txn, action))

    async def writes_to(self, txn: TxnId, *topics: str) -> None:
        """What official clients say before the first message to a topic."""
        await self.driver.request(
            "ADD_PARTITION_TO_TXN", partitions=topics, **txn_fields(txn), **self._flag
        )

    async def acknowledges_on(self, txn: TxnId, topic: str, subscription: str) -> None:
        """What official clients say before the first acknowledgement on a subscription."""
        where = {"topic": topic, "subscription": subscription}
        await self.driver.request(
            "ADD_SUBSCRIPTION_TO_TXN", subscription=[where], **txn_fields(txn), **self._flag
        )

    async def sender(self, topic: str = T, name: str = "") -> Sender:
        self._senders += 1
        number = self._senders
        given: dict[str, Any] = {"producer_name": name} if name else {}
        answer = await self.driver.request(
            "PRODUCER", topic=topic, producer_id=number, txn_enabled=True, **given
        )
        return Sender(self.driver, number, answer.producer_name)

    async def reader(
        self,
        topic: str = T,
        subscription: str = "sub",
        *,
        kind: int = EXCLUSIVE,
        permits: int = 1000,
        **fields: Any,
    ) -> Reader:
        """A consumer of a subscription that begins, if it is new, at the earliest message."""
        driver = await self._connect()
        given: dict[str, Any] = {"subType": kind, "initialPosition": 1, "consumer_id": 0}
        await driver.request(
            "SUBSCRIBE", topic=topic, subscription=subscription, **(given | fields)
        )
        if permits:
            driver.send("FLOW", consumer_id=0, messagePermits=permits)
        return Reader(driver)


async def begun(client: TxnClient, *topics: str) -> TxnId:
    """A transaction, announced to its topics as official clients do."""
    txn = await client.begin()
    await client.writes_to(txn, *(topics or (T,)))
    return txn


async def pair(client: TxnClient, *, reading: int = EXCLUSIVE) -> tuple[Sender, Reader]:
    return await client.sender(), await client.reader(kind=reading)


async def refusal(work: Awaitable[object]) -> int | None:
    """The code with which a request is refused; None: it is not."""
    try:
        await work
    except MagnetarError as error:
        return WireCode(error.wire_code)
    return None


# --- stages


class Roles(Authority):
    """A principal is who the client says that it is."""

    def identify(self, connect: pb.CommandConnect) -> Principal:
        return Principal(connect.auth_data.decode() or None)


class TxnStage:
    """Brokers on virtual time."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    @property
    def host(self) -> Host:
        return self.stage.host

    @property
    def server(self) -> Server:
        return self.host.server

    async def client(
        self, *, v4: bool = False, host: str | None = None, **connect_fields: Any
    ) -> TxnClient:
        async def connect() -> Driver:
            return await self.stage.driver(host, **connect_fields)

        return await TxnClient.begun(connect, scalable=not v4)

    # --- what happens to brokers

    async def killed(self) -> None:
        """The first broker is killed without a word, and started again."""
        await self.host.kill()
        assert await self.host.start()

    async def restarted(self) -> None:
        """The first broker is stopped in order, and started again."""
        await self.host.stop()
        assert await self.host.start()

    async def unloaded(self, topic: str = T, host: Host | None = None) -> None:
        name = TopicName.parse(topic)
        await (host or self.host).ask(lambda server: server.topics.unload(name))

    # --- what is behind the wire

    async def state(self, txn: TxnId) -> State | None:
        return await self.host.ask(lambda server: TxnStore(server.metadata).state(txn))

    async def keys(self, *parents: str) -> list[str]:
        """The records below these folders."""

        async def scanned(server: Server) -> list[str]:
            return [key for each in parents for key in await server.metadata.scan_keys(each)]

        return await self.host.ask(scanned)

    async def settled(self) -> None:
        """Until no transaction has anything left to be done at topics and subscriptions."""
        await self.until_ops(0)

    async def until_ops(self, count: int) -> None:
        """Until so many records of work in transactions are left."""

        async def are_left() -> bool:
            return len(await self.keys(OPS)) == count

        await until(are_left, 30, f"{count} ops are left")

    async def kept(self) -> list[str]:
        """What is kept of transactions beside their headers."""
        return await self.keys(OPS, ABORTED_RECORDS, GROUPS)

    async def until_kept(self, expected: list[str]) -> None:
        """Until just that is kept, and nothing more."""

        async def are_kept() -> bool:
            return await self.kept() == expected

        await until(are_kept, 60, f"only {expected} are kept")

    # --- a scalable topic

    async def segment(self, key: str) -> str:
        """The active segment of a key."""
        layout = await self.stage.layout()
        return str(TOPIC.segment(route(layout, key_hash(key)).descriptor))

    async def segments(self) -> list[str]:
        """All segments, sealed ones too."""
        layout = await self.stage.layout()
        return [str(TOPIC.segment(each.descriptor)) for each in layout.segments.values()]

    # --- where things are, among several brokers

    async def owner(self, topic: str) -> str:
        """The host of the broker that has a topic."""
        name = self.stage.world.ready[0].name
        for _ in range(_REDIRECTS_MAX):
            driver = await self.stage.driver(name)
            found = await driver.request("LOOKUP", topic=topic)
            await driver.close()
            name = self.stage.world.host_at(found.brokerServiceUrl).name
            if found.response == pb.CommandLookupTopicResponse.Connect:
                return name
        raise AssertionError(f"nobody has {topic}")

    async def leader(self, coordinator: int = 0) -> str:
        """The host of the broker that leads a coordinator, as v5 clients find it."""
        driver = await self.stage.driver(self.stage.world.ready[0].name)
        driver.send("WATCH_TC_ASSIGNMENTS", watch_id=1)
        while True:
            update = await told(driver, "WATCH_TC_ASSIGNMENTS_UPDATE", 60.0)
            for each in update.snapshot.assignments:
                if each.tc_id == coordinator:
                    await driver.close()
                    return self.stage.world.host_at(each.broker_service_url).name


class KeyedSender:
    """A producer of a scalable topic: each message goes to the active segment of its key."""

    def __init__(self, stage: TxnStage, client: TxnClient, name: str = "p") -> None:
        self._stage = stage
        self._client = client
        self._name = name
        self._senders: dict[str, Sender] = {}

    async def send(self, key: str, text: str, txn: TxnId | None = None) -> None:
        segment = await self._stage.segment(key)
        if segment not in self._senders:
            name = f"{self._name}-seg-{segment.rpartition('-')[2]}"
            self._senders[segment] = await self._client.sender(segment, name)
        await self._senders[segment].send(text, txn, key=key)


class Queue:
    """One subscription of all segments of a scalable topic, sealed ones too."""

    def __init__(self, stage: TxnStage, client: TxnClient, subscription: str = "q") -> None:
        self._stage = stage
        self._client = client
        self._subscription = subscription
        self.readers: dict[str, Reader] = {}
        self._given: dict[str, Reader] = {}

    async def follow(self) -> Queue:
        """Read from all segments that there are now."""
        for segment in await self._stage.segments():
            if segment not in self.readers:
                reader = await self._client.reader(segment, self._subscription, kind=SHARED)
                self.readers[segment] = reader
        return self

    async def take(self, count: int, seconds: float = PATIENCE_S) -> list[Got]:
        """So many messages, of any segment."""
        found: list[Got] = []

        def has_enough() -> bool:
            for reader in self.readers.values():
                while len(reader.driver.pushes) and len(found) < count:
                    push = reader.driver.pushes.get_nowait()
                    if isinstance(push, Delivered):
                        got = Got.of(push)
                        self._given[got.text] = reader
                        found.append(got)
            return len(found) == count

        await until(has_enough, seconds, f"{count} messages come ({len(found)} have)")
        return found

    async def texts(self, count: int) -> list[str]:
        """Sorted: segments have no order among them."""
        return sorted(each.text for each in await self.take(count))

    async def nothing(self, seconds: float = 3.0) -> None:
        await asyncio.sleep(seconds)
        for reader in self.readers.values():
            await reader.nothing(0.01)

    async def ack(self, *got: Got, txn: TxnId | None = None) -> None:
        for each in got:
            await self._given[each.text].ack(each, txn=txn)


Story = Callable[[TxnStage], Coroutine[Any, Any, None]]


def act(
    story: Story, *, brokers: str = "a", disk: bool = True, kind: str = "auto", **limits: float
) -> None:
    """Run a story: on one broker with a disk, or on several that share their storage."""

    async def on_stage(stage: Stage) -> None:
        await story(TxnStage(stage))

    alone = brokers == "a" and disk
    play(on_stage, brokers=brokers, disk=alone, checked=False, transaction_kind=kind, **limits)


def act_v4(story: Story, kind: str) -> None:
    """As `act`, on a broker that keeps the transactions of v4 clients in one of the `KINDS`."""
    assert kind in KINDS
    act(story, kind=kind)
