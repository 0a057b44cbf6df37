"""What was found in Apache Pulsar 5.0.0-M1 by running it does not happen here.

One test for each finding, through the wire; those that came with a restart have a real one here: a
server process that is killed with SIGKILL, or whose topics are unloaded, and its data folder.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from magnetar.errors import WireCode
from magnetar.testing.virtual.driver import Driver
from magnetar.txn.ids import METADATA_BIT
from magnetar.wire.commands import TYPES
from magnetar.wire.messages import Received, TxnId
from tests.integration.server.txn_stage import (
    COMMIT,
    EXCLUSIVE,
    SHARED,
    KeyedSender,
    Place,
    Queue,
    Reader,
    T,
    TxnClient,
    TxnStage,
    U,
    act,
    refusal,
)
from tests.interop.serving import ServerProcess

# --- with real processes

SEGMENT = "segment://public/default/x/0000-ffff-0"

interruptions = pytest.mark.parametrize("how", ["unload", "kill"])


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path)
    server.start()
    yield server
    server.stop()


def run(process: ServerProcess, scene: Callable[[TxnClient], Awaitable[None]]) -> None:
    """A client of the process, from its connection to its end."""
    url = urlsplit(process.service_url)
    drivers: list[Driver] = []

    async def connect() -> Driver:
        assert url.hostname is not None
        assert url.port is not None
        drivers.append(await Driver.connect(url.hostname, url.port))
        return drivers[-1]

    async def go() -> None:
        try:
            await scene(await TxnClient.begun(connect, scalable=True))
        finally:
            for driver in drivers:
                await driver.close()

    asyncio.run(go())


def interrupt(process: ServerProcess, how: str, *topics: str) -> None:
    if how == "unload":
        for topic in topics:
            process.admin("PUT", f"{topic.replace('://', '/')}/unload")
        return
    process.signal(signal.SIGKILL)
    process.ended(code=-signal.SIGKILL)
    process.start()


async def is_empty(reader: Reader) -> bool:
    """Nothing was given to a reader, though it asked twice for something since."""
    for _ in range(2):
        assert await reader.backlog() == 0
    return len(reader.driver.pushes) == 0


@pytest.mark.slow
@interruptions
def test_f1_acks_then_another_owner_then_the_commit(process: ServerProcess, how: str) -> None:
    txns: list[TxnId] = []

    async def begin(client: TxnClient) -> None:
        sender, reader = await client.sender(), await client.reader(kind=SHARED)
        for number in range(5):
            await sender.send(f"{number}")
        txns.append(await client.begin())
        await reader.ack(*await reader.take(5), txn=txns[0])

    async def finish(client: TxnClient) -> None:
        await client.commit(txns[0])
        reader = await client.reader(kind=SHARED)
        await (await client.sender()).send("sentinel")
        assert await reader.texts(1) == ["sentinel"]
        assert await reader.backlog() == 1

    run(process, begin)
    interrupt(process, how, T)
    run(process, finish)


@pytest.mark.slow
def test_f2_killed_right_after_five_commits(process: ServerProcess) -> None:
    kinds = {T: EXCLUSIVE, U: SHARED}

    async def begin(client: TxnClient) -> None:
        for topic, kind in kinds.items():
            sender, reader = await client.sender(topic), await client.reader(topic, kind=kind)
            for number in range(5):
                await sender.send(f"{number}")
            for each in await reader.take(5):
                txn = await client.begin()
                await reader.ack(each, txn=txn)
                await client.commit(txn)

    async def finish(client: TxnClient) -> None:
        for topic, kind in kinds.items():
            await (await client.sender(topic)).send("sentinel")
            reader = await client.reader(topic, kind=kind)
            assert await reader.texts(1) == ["sentinel"]

    run(process, begin)
    interrupt(process, "kill")
    run(process, finish)


@pytest.mark.slow
@interruptions
def test_f3_an_open_transaction_on_a_fresh_topic(process: ServerProcess, how: str) -> None:
    """And on one that had a plain message before."""
    txns: list[TxnId] = []

    async def begin(client: TxnClient) -> None:
        txns.append(await client.begin())
        for topic in (T, U):
            sender, reader = await client.sender(topic), await client.reader(topic)
            if topic == U:
                await sender.send("plain")
                await reader.ack(await reader.get())
            await sender.send("open", txns[0])

    async def finish(client: TxnClient) -> None:
        readers = [await client.reader(topic) for topic in (T, U)]
        assert [await is_empty(reader) for reader in readers] == [True, True]
        await client.commit(txns[0])
        assert [await reader.texts(1) for reader in readers] == [["open"], ["open"]]

    run(process, begin)
    interrupt(process, how, T, U)
    run(process, finish)


@pytest.mark.slow
@interruptions
def test_f20_messages_of_a_batch_over_a_restart(process: ServerProcess, how: str) -> None:
    """Acknowledged in a transaction, and beside one."""

    async def begin(client: TxnClient) -> None:
        for topic in (T, U):
            sender, reader = await client.sender(topic), await client.reader(topic, kind=SHARED)
            await sender.send("batch", num_messages_in_batch=5)
            entry = await reader.get()
            txn = await client.begin() if topic == T else None
            await reader.ack(entry, txn=txn, ack_set=0b10101)
            if txn is not None:
                await client.commit(txn)

    async def finish(client: TxnClient) -> None:
        for topic in (T, U):
            reader = await client.reader(topic, kind=SHARED)
            assert (await reader.get()).ack_set == (0b10101,)

    run(process, begin)
    interrupt(process, how, T, U)
    run(process, finish)


@pytest.mark.slow
def test_f17_a_v5_transaction_on_a_regular_and_a_scalable_topic(process: ServerProcess) -> None:
    """33: committed on both, visible on both, over a kill, and nobody is stuck behind it."""
    txns: list[TxnId] = []
    process.admin("PUT", "scalable/public/default/x?numInitialSegments=1")

    async def begin(client: TxnClient) -> None:
        txns.append(await client.begin())
        for topic in (T, SEGMENT):
            sender = await client.sender(topic)
            await sender.send("in it", txns[0])
            await sender.send("behind")

    async def finish(client: TxnClient) -> None:
        await client.commit(txns[0])
        for topic in (T, SEGMENT):
            reader = await client.reader(topic)
            assert await reader.texts(2) == ["in it", "behind"]

    run(process, begin)
    interrupt(process, "kill")
    run(process, finish)


# --- on virtual time


@pytest.mark.parametrize("segment", [False, True])
def test_f7_asynchronous_transactional_and_plain_sends_keep_their_order(segment: bool) -> None:
    """27: one connection, nothing waits for a receipt; receipts and messages come in order."""

    async def story(stage: TxnStage) -> None:
        await stage.stage.create()
        topic = (await stage.segments())[0] if segment else T
        client = await stage.client()
        sender, reader = await client.sender(topic), await client.reader(topic)
        txns = [None, await client.begin(), await client.begin(coordinator=1)]
        for number in range(60):
            sender.post(f"{number}", txns[number % 3 if number > 5 else 1], number)
        receipts: list[int] = []
        while len(receipts) < 60:
            push = await client.driver.pushes.get()
            assert isinstance(push, Received)
            assert push.type == TYPES["SEND_RECEIPT"], push
            receipts.append(getattr(push.body, "sequence_id"))  # noqa: B009  any message
        assert receipts == list(range(60))
        for txn in txns[1:]:
            assert txn is not None
            await client.commit(txn)
        assert await reader.texts(60) == [f"{number}" for number in range(60)]

    act(story)


def test_f13_subscriptions_and_transactions_with_related_names() -> None:
    """31: F13 and F14: `job` beside `job-retry` and `job2`, and ids that begin alike."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        names = ("job", "job-retry", "job2", "job:x", "job%2D")
        sender = await client.sender()
        readers = {name: await client.reader(subscription=name) for name in names}
        txns = [await client.begin() for _ in range(12)]
        for number in range(12):
            await sender.send(f"{number}")
        got = {name: await reader.take(12) for name, reader in readers.items()}
        for number, txn in enumerate(txns):
            for name, reader in readers.items():
                if name != "job2":
                    await reader.ack(got[name][number], txn=txn)
        for txn in txns[:3]:
            await client.commit(txn)
        await stage.until_ops(9 * (len(names) - 1))
        for name, reader in readers.items():
            assert await reader.backlog() == (12 if name == "job2" else 9)
        for txn in txns[3:]:
            await client.commit(txn)
        await stage.settled()
        for name, reader in readers.items():
            assert await reader.backlog() == (12 if name == "job2" else 0)
        await stage.killed()
        client = await stage.client()
        for name in names:
            reader = await client.reader(subscription=name)
            if name == "job2":
                assert len(await reader.texts(12)) == 12
            await reader.nothing(0.5)

    act(story)


def test_ids_of_v4_and_v5_clients_are_never_taken_for_one_another() -> None:
    """33: commits of v4 clients on the same topic and coordinator leave v5 ones alone."""

    async def story(stage: TxnStage) -> None:
        v4, v5 = await stage.client(v4=True), await stage.client()
        old, new = await v4.sender(name="old"), await v5.sender(name="new")
        reader = await v5.reader()
        mine = await v5.begin()
        await new.send("v5", mine)
        for number in range(5):
            txn = await v4.begin()
            await v4.writes_to(txn, T)
            await old.send(f"v4 {number}", txn)
            assert (txn.most, txn.least) != (mine.most, mine.least)
            await v4.commit(txn)
        await v5.commit(mine)
        assert await reader.texts(6) == ["v5", *(f"v4 {number}" for number in range(5))]
        foreign = TxnId(mine.most, (mine.least & ~METADATA_BIT) + 10**6)
        for client in (v4, v5):
            assert await client.ended(foreign, COMMIT) == WireCode.TRANSACTION_NOT_FOUND

    act(story)


def test_f18_a_stream_consumer_acks_three_segments_in_many_transactions() -> None:
    """34: each acknowledgement names its place in every segment, moved since or not."""

    async def story(stage: TxnStage) -> None:
        await stage.stage.create(3)
        client = await stage.client()
        sender = KeyedSender(stage, client)
        readers = {each: await client.reader(each, "s") for each in await stage.segments()}
        vector: dict[str, Place] = {}
        for number in range(30):
            key = f"k{number}"
            segment = await stage.segment(key)
            await sender.send(key, f"{number}")
            got = await readers[segment].get()
            vector[segment] = got.place
            txn = await client.begin()
            for name, place in vector.items():
                await client.acknowledges_on(txn, name, "s")
                await readers[name].ack(got._replace(place=place), txn=txn, cumulative=True)
            await client.commit(txn)
        for reader in readers.values():
            assert await reader.backlog() == 0
        assert len(vector) == 3

    act(story)


@pytest.mark.parametrize("change", ["split", "merge"])
def test_f19_a_split_amid_the_sends_of_a_transaction(change: str) -> None:
    """35: what was refused because its segment is sealed goes to a child; the commit stands."""

    async def story(stage: TxnStage) -> None:
        await stage.stage.create(1 if change == "split" else 2)
        client = await stage.client()
        queue = await Queue(stage, client).follow()
        txn = await client.begin()
        changing = asyncio.create_task(
            stage.stage.split(0) if change == "split" else stage.stage.merge(0, 1)
        )

        async def stream(name: str) -> int:
            """One of several that send without pause; how often it was refused."""
            own = await stage.client()
            sender, refused = KeyedSender(stage, own, name), 0
            for number in range(40):
                while True:
                    work = sender.send(f"{name}{number}", f"{name}{number:02}", txn)
                    if await refusal(work) is None:
                        break
                    refused += 1
                    await asyncio.sleep(0.01)
            return refused

        await asyncio.gather(*(stream(name) for name in "abcd"))
        await changing
        await queue.follow()
        await queue.nothing()
        await client.commit(txn)
        expected = sorted(f"{name}{number:02}" for name in "abcd" for number in range(40))
        assert await queue.texts(len(expected)) == expected
        await queue.nothing()

    act(story)
