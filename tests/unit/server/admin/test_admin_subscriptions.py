"""Subscriptions: made, moved, looked into and removed over HTTP."""

from __future__ import annotations

import zlib
from pathlib import Path

from magnetar.cli.link import ServerConnection
from magnetar.model.names import TopicName
from magnetar.wire.commands import TYPES
from magnetar.wire.frames import base_command, encode_with_payload
from magnetar.wire.messages import Received, encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.server.admin.world import FULL, PUBLISHED_MS, TOPIC, World, run

SUB = f"{TOPIC}/subscription/s"
EARLIEST = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}
LATEST = {"ledgerId": 2**63 - 1, "entryId": 2**63 - 1, "partitionIndex": -1}


async def backlog(world: World, topic: str = TOPIC, subscription: str = "s") -> int:
    found = await world.get(f"{topic}/stats")
    number: int = found["subscriptions"][subscription]["msgBacklog"]
    return number


def as_id(text: str) -> dict[str, int]:
    ledger, entry = text.split(":")
    return {"ledgerId": int(ledger), "entryId": int(entry), "partitionIndex": -1}


def test_create_and_delete(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        ids = await world.produce(FULL, 4)
        await world.change("PUT", SUB)
        await world.refuse(409, "PUT", SUB)
        starts = {"latest": LATEST, "earliest": EARLIEST, "at": as_id(ids[1])}
        starts["behind"] = {**as_id(ids[1]), "excluded": True}
        for name, start in starts.items():
            await world.change("PUT", f"{TOPIC}/subscription/{name}", start)
        assert await world.get(f"{TOPIC}/subscriptions") == [
            *("at", "behind", "earliest", "latest", "s")
        ]
        found = {name: await backlog(world, subscription=name) for name in [*starts, "s"]}
        assert found == {"latest": 0, "earliest": 4, "at": 3, "behind": 2, "s": 0}
        await world.change("DELETE", SUB)
        await world.refuse(404, "DELETE", SUB)
        await world.refuse(404, "PUT", "persistent/public/default/none/subscription/s")
        await world.refuse(404, "GET", "persistent/public/default/none/subscriptions")
        await world.refuse(412, "PUT", SUB, {"ledgerId": "first"})

    run(tmp_path, scenario)


def test_a_used_subscription_is_deleted_by_force_only(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        async with world.link() as link:
            await world.subscribe(link, FULL, "s", 1)
            await world.refuse(412, "DELETE", SUB)
            await world.change("DELETE", SUB, force="true")
        assert await world.get(f"{TOPIC}/subscriptions") == []

    run(tmp_path, scenario)


def test_skip_and_expire(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.produce(FULL, 5)
        await world.change("PUT", SUB, EARLIEST)
        await world.change("POST", f"{SUB}/skip/2")
        assert await backlog(world) == 3
        await world.refuse(412, "POST", f"{SUB}/skip/0")
        await world.refuse(412, "POST", f"{SUB}/skip/some")
        await world.change("POST", f"{SUB}/skip_all")
        assert await backlog(world) == 0
        await world.change("POST", f"{SUB}/resetcursor", EARLIEST)
        await world.change("POST", f"{SUB}/expireMessages/1")
        assert await backlog(world) == 0
        await world.refuse(412, "POST", f"{SUB}/expireMessages/0")
        for verb in ("skip/1", "skip_all", "expireMessages/1", "resetcursor/0"):
            await world.refuse(404, "POST", f"{TOPIC}/subscription/none/{verb}")
            await world.refuse(404, "POST", f"{TOPIC}x/subscription/s/{verb}")

    run(tmp_path, scenario)


def test_reset(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        ids = await world.produce(FULL, 5)
        await world.change("PUT", SUB)
        await world.change("POST", f"{SUB}/resetcursor/{PUBLISHED_MS + 2000}")
        assert await backlog(world) == 3
        await world.change("POST", f"{SUB}/resetcursor/{PUBLISHED_MS + 90_000}")
        assert await backlog(world) == 0
        await world.change("POST", f"{SUB}/resetcursor", as_id(ids[1]))
        assert await backlog(world) == 4
        await world.change("POST", f"{SUB}/resetcursor", {**as_id(ids[1]), "excluded": True})
        assert await backlog(world) == 3
        await world.change("POST", f"{SUB}/resetcursor", LATEST)
        assert await backlog(world) == 0
        await world.change("POST", f"{SUB}/resetcursor", EARLIEST)
        assert await backlog(world) == 5
        await world.refuse(412, "POST", f"{SUB}/resetcursor")
        await world.refuse(412, "POST", f"{SUB}/resetcursor/yesterday")

    run(tmp_path, scenario)


def test_a_reset_moves_a_connected_consumer(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.produce(FULL, 2)
        async with world.link() as link:
            await world.subscribe(link, FULL, "s", 1)
            await world.change("POST", f"{SUB}/resetcursor", EARLIEST)
            closed = await link.next()
            assert isinstance(closed, Received)
            assert closed.type == TYPES["CLOSE_CONSUMER"]
            await world.subscribe(link, FULL, "s", 2)
            found = await world.deliver(link, 2, 2)
            assert [payload[-2:] for payload in found] == [b"m0", b"m1"]

    run(tmp_path, scenario)


def test_partitions_move_together(tmp_path: Path) -> None:
    path = "persistent/public/default/p"
    name = "persistent://public/default/p"

    async def scenario(world: World) -> None:
        await world.change("PUT", f"{path}/partitions", 2)
        ids = await world.produce(f"{name}-partition-0", 2)
        await world.produce(f"{name}-partition-1", 3)
        sub = f"{path}/subscription/s"

        async def backlogs() -> list[int]:
            return [await backlog(world, f"{path}-partition-{number}") for number in range(2)]

        await world.refuse(412, "PUT", sub, as_id(ids[0]))
        await world.change("PUT", sub, EARLIEST)
        assert await world.get(f"{path}/subscriptions") == ["s"]
        assert await backlogs() == [2, 3]
        await world.change("POST", f"{sub}/skip_all")
        assert await backlogs() == [0, 0]
        await world.change("POST", f"{sub}/resetcursor/{PUBLISHED_MS + 1000}")
        assert await backlogs() == [1, 2]
        await world.change("POST", f"{sub}/resetcursor", EARLIEST)
        assert await backlogs() == [2, 3]
        await world.change("POST", f"{sub}/expireMessages/1")
        assert await backlogs() == [0, 0]
        await world.refuse(412, "POST", f"{sub}/resetcursor", as_id(ids[0]))
        await world.refuse(405, "POST", f"{sub}/skip/1")
        await world.refuse(405, "GET", f"{sub}/position/1")
        await world.change("DELETE", sub)
        assert await world.get(f"{path}/subscriptions") == []

    run(tmp_path, scenario)


def test_peek(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        ids = await world.produce(FULL, 3, key="k")
        await world.change("PUT", SUB, EARLIEST)
        await world.change("POST", f"{SUB}/skip/1")
        answer = await world.ask("GET", f"{SUB}/position/2")
        assert (answer.status, answer.data) == (200, b"m2")
        headers = answer.headers
        assert headers["X-Pulsar-Message-ID"] == ids[2]
        assert headers["X-Pulsar-partition-key"] == "k"
        assert headers["X-Pulsar-PROPERTY-colour"] == "red"
        assert headers["X-Pulsar-PROPERTY"] == '{"colour": "red"}'
        assert headers["X-Pulsar-publish-time"] == "2023-11-14T22:13:22.000+00:00"
        assert headers["Content-Type"] == "application/octet-stream"
        assert "X-Pulsar-num-batch-message" not in headers
        ledger, _, entry = ids[2].partition(":")
        same = await world.ask("GET", f"{TOPIC}/ledger/{ledger}/entry/{entry}")
        shown = [name for name in headers if name.startswith("X-Pulsar")]
        assert same.data == b"m2"
        assert [same.headers[name] for name in shown] == [headers[name] for name in shown]
        await world.refuse(404, "GET", f"{SUB}/position/3")
        await world.refuse(412, "GET", f"{SUB}/position/0")
        assert await backlog(world) == 2

    run(tmp_path, scenario)


def test_an_entry_that_there_is_not_is_not_the_next_one(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        ids = await world.produce(FULL, 2)
        ledger = int(ids[0].partition(":")[0])
        for place in (f"{ledger - 1}/entry/0", f"{ledger}/entry/2", f"{10**30}/entry/0"):
            await world.refuse(404, "GET", f"{TOPIC}/ledger/{place}")
        await world.refuse(412, "GET", f"{TOPIC}/ledger/{ledger}/entry/-1")
        await world.refuse(412, "GET", f"{TOPIC}/ledger/x/entry/0")
        await world.refuse(404, "GET", f"persistent/public/default/none/ledger/{ledger}/entry/0")
        await world.change("PUT", "persistent/public/default/parts/partitions", 2)
        await world.refuse(405, "GET", f"persistent/public/default/parts/ledger/{ledger}/entry/0")
        loose = "non-persistent/public/default/loose"
        await world.server.topics.get(TopicName.parse("non-persistent://public/default/loose"))
        await world.refuse(405, "GET", f"{loose}/ledger/{ledger}/entry/0")

    run(tmp_path, scenario)


def test_an_entry_of_a_transaction_says_so(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC)
        async with world.link() as link:
            await link.request("PRODUCER", topic=FULL, producer_id=1, producer_name="p")
            begun = await link.request("NEW_TXN", tc_id=0, txn_ttl_millis=60_000)
            txn = {"txnid_most_bits": begun.txnid_most_bits}
            txn["txnid_least_bits"] = begun.txnid_least_bits
            await link.request("ADD_PARTITION_TO_TXN", partitions=[FULL], **txn)
            metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=1, **txn)
            send = {"producer_id": 1, "sequence_id": 0, **txn}
            for piece in encode_with_payload(
                base_command("SEND", **send), encode_entry(metadata, b"m")
            ):
                link.write(piece)
            receipt = await link.next()
            assert isinstance(receipt, Received)
            where = getattr(receipt.body, "message_id")  # noqa: B009  typed as any message
            path = f"{TOPIC}/ledger/{where.ledgerId}/entry/{where.entryId}"
            undecided = await world.ask("GET", path)
            assert undecided.data == b"m"
            assert undecided.headers["X-Pulsar-txn-uncommitted"] == "true"
            await link.request("END_TXN", txn_action=pb.ABORT, **txn)
            aborted = await world.ask("GET", path)
            assert aborted.headers["X-Pulsar-txn-aborted"] == "true"
            assert "X-Pulsar-txn-uncommitted" not in aborted.headers

    run(tmp_path, scenario)


def test_peek_shows_batches_and_compression(tmp_path: Path) -> None:
    async def send(link: ServerConnection, sequence: int, payload: bytes, **fields: object) -> None:
        metadata = pb.MessageMetadata(
            producer_name="p", sequence_id=sequence, publish_time=1, uncompressed_size=5
        )
        for name, value in fields.items():
            setattr(metadata, name, value)
        metadata.properties.add(key="näme", value="line\nline")
        claimed = metadata.num_messages_in_batch
        ids = {"producer_id": 1, "sequence_id": sequence, "num_messages": claimed}
        entry = encode_entry(metadata, payload)
        for piece in encode_with_payload(base_command("SEND", **ids), entry):
            link.write(piece)
        await link.next()

    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC)
        await world.change("PUT", SUB)
        async with world.link() as link:
            await link.request("PRODUCER", topic=FULL, producer_id=1, producer_name="p")
            await send(link, 0, zlib.compress(b"hello"), compression=pb.ZLIB)
            await send(link, 1, b"?????", compression=pb.LZ4, num_messages_in_batch=3)
            rare = {"ordering_key": b"o", "highest_sequence_id": 9, "encryption_algo": "AES"}
            chunk = {"num_chunks_from_msg": 1, "chunk_id": 0}
            await send(link, 2, b"?????", compression=pb.ZLIB, **rare, **chunk)
        opened, closed, damaged = [
            await world.ask("GET", f"{SUB}/position/{number}") for number in (1, 2, 3)
        ]
        for name, value in (
            ("Base64-ordering-key", "bw=="),
            ("highest-sequence-id", "9"),
            ("encryption-algo", "AES"),
            ("PROPERTY-TOTAL-CHUNKS", "1"),
            ("PROPERTY-CHUNK-ID", "0"),
            ("uncompressed-size", "5"),
        ):
            assert damaged.headers[f"X-Pulsar-{name}"] == value
        assert closed.headers["X-Pulsar-batch-size"] == "5"
        assert "X-Pulsar-Base64-ordering-key" not in opened.headers
        place = opened.headers["X-Pulsar-Message-ID"].replace(":", "/entry/")
        assert (await world.ask("GET", f"{TOPIC}/ledger/{place}")).data == b"hello"
        assert opened.data == b"hello"
        assert "X-Pulsar-compression" not in opened.headers
        assert closed.data == b"?????"
        assert closed.headers["X-Pulsar-compression"] == "LZ4"
        assert closed.headers["X-Pulsar-num-batch-message"] == "3"
        assert damaged.headers["X-Pulsar-compression"] == "ZLIB"
        assert "line\\nline" in damaged.headers["X-Pulsar-PROPERTY"]

    run(tmp_path, scenario)
