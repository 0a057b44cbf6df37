"""What applications forget, cancel and lose: every line of the table in docs/client/errors.md.

Each story ends by itself in virtual time, raises the one error that the table names or none, leaves
no error that nobody could catch, and no message is lost without a word.
"""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import pytest

from magnetar import CheckpointConsumer, Consumer, QueueConsumer, Reader, StreamConsumer
from magnetar.client.client import Client
from magnetar.client.transaction.state import TransactionState
from magnetar.errors import (
    AlreadyClosed,
    DeadlineExceeded,
    InvalidSetting,
    InvalidValue,
    MagnetarError,
    NotAllowed,
    ServerDiskFull,
    TransactionEnded,
)
from magnetar.model.subscriptions import InitialPosition
from tests.integration.client.stage import new_client, play, stored
from tests.integration.client.test_consuming import drain, numbers, send, silence
from tests.integration.server.scalable_stage import NAME, Stage
from tests.unit.client.fake_broker import FakeBroker
from tests.unit.client.fake_broker import play as play_with_fake
from tests.unit.client.produce.test_segment_producer import client_of

PAGE: Final = Path(__file__).parents[3] / "docs" / "client" / "errors.md"
FIRST: Final = InitialPosition.EARLIEST
AWAY_S: Final = 30.0
NO_REQUEST: Final = 2**64 - 1

Story = Callable[[Stage], Awaitable[None]]
STORIES: dict[str, Story] = {}


def table() -> dict[str, str]:
    """By what goes wrong, the name of the error; `none`: there is none."""
    text = PAGE.read_text("utf-8")
    rows = re.findall(r"^\| (.+?) \| .+ \| `?([a-z-]+)`? \|$", text, re.MULTILINE)
    return {what: error for what, error in rows if error != "error"}


def mistake(what: str) -> Callable[[Story], Story]:
    """The story of a line of the table."""

    def keep(story: Story) -> Story:
        STORIES[what] = story
        return story

    return keep


def test_every_line_has_its_story() -> None:
    assert table().keys() == STORIES.keys() | {WRONG_TOKEN}


@pytest.mark.parametrize("what", STORIES)
def test_a_line(what: str) -> None:
    named = table()[what]
    raised: list[str] = []
    unraised: list[dict[str, Any]] = []

    async def story(stage: Stage) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, each: unraised.append(each))
        await stage.create(1)
        try:
            async with asyncio.timeout(600):
                await STORIES[what](stage)
        except MagnetarError as error:
            raised.append(error.name)
        gc.collect()
        await asyncio.sleep(0)

    play(story)
    assert raised == ([] if named == "none" else [named])
    assert not unraised


async def payloads(stage: Stage) -> list[bytes]:
    return [each.payload for each in await stored(stage)]


@mistake("to await a send")
async def _(stage: Stage) -> None:
    async with new_client(stage) as client:
        producer = await client.producer(NAME)
        for number in range(10):
            await producer.submit(b"%d" % number, key="k")
    assert await payloads(stage) == [b"%d" % number for number in range(10)]


@mistake("to await an acknowledgement")
async def _(stage: Stage) -> None:
    async with new_client(stage) as client:
        await send(client, 10)
        consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
        await drain(consumer, 10, consumer.ack)
        await consumer.close()
        async with await client.queue_consumer(NAME, "s") as again:
            await silence(again)


@mistake("to acknowledge")
async def _(stage: Stage) -> None:
    async with new_client(stage) as client:
        await send(client, 50, batching=False)
        async with await client.queue_consumer(
            NAME, "s", initial_position=FIRST, unacked_max=20, queue_size=5
        ) as consumer:
            found = await drain(consumer, 20)
            while more := await consumer.receive_many(100, timeout=30.0):
                found += more
            assert 20 <= len(found) < 40
        async with await client.queue_consumer(NAME, "s") as again:
            assert numbers(await drain(again, 50)) == list(range(50))


@mistake("to close a producer or consumer")
async def _(stage: Stage) -> None:
    async with new_client(stage) as client:
        producer = await client.producer(NAME)
        await producer.submit(b"1", key="k")
        consumer = await client.stream_consumer(NAME, "s", initial_position=FIRST)
        assert (await consumer.receive(timeout=10.0)).value == b"1"
        await producer.submit(b"2", key="k")
    assert client._connections.count == 0
    assert await payloads(stage) == [b"1", b"2"]


@mistake("the disk of the server is full")
async def _(stage: Stage) -> None:
    gate = stage.host.server.storage.publish_gate
    async with new_client(stage) as client:
        producer = await client.producer(NAME)
        await producer.send(b"before", key="k")
        gate.refusal = ServerDiskFull("the disk of the server is full: a test says so")
        gate.changed.advance()
        with pytest.raises(ServerDiskFull):
            await producer.send(b"meanwhile", key="k")
        async with await client.queue_consumer(NAME, "s", initial_position=FIRST) as consumer:
            await drain(consumer, 1, consumer.ack)
        gate.refusal = None
        gate.changed.advance()
        await producer.send(b"after", key="k")
        assert await payloads(stage) == [b"before", b"after"]
        gate.refusal = ServerDiskFull("the disk of the server is full: a test says so")
        gate.changed.advance()
        await client.producer(NAME)


@mistake("to close the client")
async def _(stage: Stage) -> None:
    client = new_client(stage)
    producer = await client.producer(NAME)
    await producer.submit(b"1", key="k")
    await asyncio.sleep(5)
    assert await payloads(stage) == [b"1"]
    for link in stage.host.network.links:
        link.cut()  # as the end of its process does
    await stage.host.stop()
    assert await stage.host.start()
    assert await payloads(stage) == [b"1"]
    await client.close()


@mistake("to commit")
async def _(stage: Stage) -> None:
    async with new_client(stage) as client, await client.producer(NAME) as producer:
        txn = await client.transaction(timeout=5)
        await producer.send(b"1", key="k", txn=txn)
        await asyncio.sleep(20)
        assert txn.state is TransactionState.TIMED_OUT
        assert await payloads(stage) == []
        await producer.send(b"2", key="k", txn=txn)


@mistake("to begin a new transaction after a commit")
async def _(stage: Stage) -> None:
    async with new_client(stage) as client, await client.producer(NAME) as producer:
        consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
        async with client.transaction() as txn:
            await producer.send(b"1", txn=txn)
        message = await consumer.receive(timeout=5.0)
        with pytest.raises(TransactionEnded):
            await consumer.ack(message, txn=txn)
        with pytest.raises(TransactionEnded, match=r"committed.*not to be sent again"):
            await producer.send(b"2", txn=txn)
        assert await payloads(stage) == [b"1"]
        await producer.submit(b"2", txn=txn)


@mistake("to await a producer or consumer before `async with`")
async def _(stage: Stage) -> None:
    async with new_client(stage) as client:
        async with client.producer(NAME) as producer:
            await producer.send(b"1")
        with pytest.raises(AlreadyClosed):
            await producer.send(b"2")
        async with client.queue_consumer(NAME, "s", initial_position=FIRST) as consumer:
            assert (await consumer.receive(timeout=5.0)).value == b"1"
        # And it is a coroutine to whoever runs one.
        await asyncio.create_task(client.producer(NAME))


async def cancelled(work: Awaitable[Any], after_s: float) -> None:
    task = asyncio.ensure_future(work)
    await asyncio.sleep(after_s)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@mistake("a task is cancelled in `send`")
async def _(stage: Stage) -> None:
    async with new_client(stage) as client, await client.producer(NAME) as producer:
        await cancelled(producer.send(b"1", key="k"), 0)
        await producer.send(b"2", key="k")
    assert await payloads(stage) == [b"1", b"2"]


@mistake("a task is cancelled in `receive`")
async def _(stage: Stage) -> None:
    async with new_client(stage) as client:
        consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
        for number in range(10):
            receiving = asyncio.ensure_future(consumer.receive())
            await asyncio.sleep(0.001 * number)
            sending = asyncio.ensure_future(send(client, 1))
            await asyncio.sleep(0.002 * number)
            receiving.cancel()
            await sending
            if receiving.done() and not receiving.cancelled():
                consumer.ack(receiving.result())
                continue
            message = await consumer.receive(timeout=10.0)
            consumer.ack(message)


@mistake("a task is cancelled in `commit`")
async def _(stage: Stage) -> None:
    async with new_client(stage) as client, await client.producer(NAME) as producer:
        txn = await client.transaction()
        await producer.submit(b"1", key="k", txn=txn)
        await cancelled(txn.commit(), 0)
        await txn.commit()
        assert txn.state is TransactionState.COMMITTED
    assert await payloads(stage) == [b"1"]


async def away(stage: Stage) -> None:
    await stage.host.kill()
    await asyncio.sleep(AWAY_S)
    assert await stage.host.start()


@mistake("the server is away for 30 s, with `send_timeout=60`")
async def _(stage: Stage) -> None:
    async with new_client(stage) as client:
        consumer = await client.stream_consumer(NAME, "s", initial_position=FIRST)
        producer = await client.producer(NAME, send_timeout=60)
        receipts = [await producer.submit(b"%d" % number, key="k") for number in range(20)]
        absence = asyncio.ensure_future(away(stage))
        receipts += [await producer.submit(b"%d" % number, key="k") for number in range(20, 40)]
        await absence
        await producer.flush()
        assert all(receipt.exception() is None for receipt in receipts)
        found = await drain(consumer, 40, consumer.ack_cumulative)
        assert [int(each.value) for each in found] == list(range(40))
        await silence(consumer)


@mistake("the server is away for 30 s, with the default of 30 s")
async def _(stage: Stage) -> None:
    async with new_client(stage) as client, await client.producer(NAME) as producer:
        await producer.send(b"1", key="k")
        await stage.host.kill()
        try:
            await producer.send(b"2", key="k")
        finally:
            assert await stage.host.start()
            await producer.send(b"3", key="k")
            assert await payloads(stage) == [b"1", b"3"]


@mistake("the server is away for 30 s in a commit")
async def _(stage: Stage) -> None:
    async with (
        new_client(stage, operation_timeout=60) as client,
        await client.producer(NAME, send_timeout=60) as producer,
    ):
        txn = await client.transaction(timeout=300)
        await producer.send(b"1", key="k", txn=txn)
        absence = asyncio.ensure_future(away(stage))
        await asyncio.sleep(1)
        await txn.commit()
        await absence
        assert txn.state is TransactionState.COMMITTED
    assert await payloads(stage) == [b"1"]


@mistake("the server is away while nothing is sent")
async def _(stage: Stage) -> None:
    async with new_client(stage) as client:
        consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
        producer = await client.producer(NAME)
        await producer.send(b"0", key="k")
        await away(stage)
        await producer.send(b"1", key="k")
        assert numbers(await drain(consumer, 2, consumer.ack)) == [0, 1]


@mistake("a URL that is none")
async def _(stage: Stage) -> None:
    Client("localhost:6650")


@mistake("an address where nobody listens")
async def _(stage: Stage) -> None:
    async with Client("pulsar://nobody:6650", connect=stage.world.connect) as client:
        began = stage.world.now()
        try:
            await client.producer(NAME)
        finally:
            assert 2 < stage.world.now() - began < 10


WRONG_TOKEN: Final = "a wrong token"


def test_a_wrong_token() -> None:
    assert table()[WRONG_TOKEN] == "authentication-failed"

    async def story(broker: FakeBroker) -> None:
        broker.handlers["CONNECT"] = lambda peer, body: peer.say(
            "ERROR", request_id=NO_REQUEST, error=3, message="the token has expired"
        )
        async with client_of(broker, auth="a.wrong.token") as client:
            began = asyncio.get_running_loop().time()
            with pytest.raises(MagnetarError, match="the token has expired") as told:
                await client.producer("persistent://public/default/t")
            assert told.value.name == "authentication-failed"
            assert "a.wrong.token" not in str(told.value)
            assert asyncio.get_running_loop().time() - began < 5

    play_with_fake(story)


@mistake("a topic in a namespace that does not exist")
async def _(stage: Stage) -> None:
    async with new_client(stage) as client:
        began = stage.world.now()
        try:
            await client.producer("persistent://nobody/nowhere/t")
        finally:
            assert stage.world.now() - began < 5


@mistake("something is used after it was closed")
async def _(stage: Stage) -> None:
    async with new_client(stage) as client:
        producer = await client.producer(NAME)
    await producer.send(b"1")


@mistake("nothing comes within `timeout` of a receive")
async def _(stage: Stage) -> None:
    async with new_client(stage) as client:
        consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
        try:
            await consumer.receive(timeout=3.0)
        finally:
            await send(client, 1)
            assert (await consumer.receive(timeout=3.0)).value == b"0"


def test_receive_and_receive_many_end_their_waits_as_their_texts_say() -> None:
    """One has nothing to return and raises, the others return nothing: pages and docstrings too."""
    for kind in (Consumer, QueueConsumer, StreamConsumer, CheckpointConsumer, Reader):
        assert "Raises `DeadlineExceeded`" in (kind.receive.__doc__ or "")
        for other in (kind.receive_many, kind.receive_arrow):
            assert "where `receive` raises" in (other.__doc__ or "")
    for page in (PAGE.with_name("consume.md"), PAGE.parents[1] / "reference" / "consuming.md"):
        (line,) = (each for each in page.read_text("utf-8").splitlines() if "rows" in each
                   if "within `timeout`" in each)  # fmt: skip
        assert "`receive` raises `DeadlineExceeded`" in line
        assert "`receive_many`" in line

    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client, client.queue_consumer(NAME, "s") as consumer:
            with pytest.raises(DeadlineExceeded):
                await consumer.receive(timeout=1.0)
            assert await consumer.receive_many(5, timeout=1.0) == []
            assert (await consumer.receive_arrow(5, timeout=1.0)).num_rows == 0

    play(story)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [({"key": 5}, "a key is text or bytes"), ({"key": ["a"]}, "a key is text or bytes"),
     ({"properties": {"a": 1}}, "is not text"), ({"properties": {1: "a"}}, "is not text"),
     ({"ordering_key": "a"}, "ordering key is bytes"), ({"event_time": "now"}, "is no time"),
     ({"sequence_id": "1"}, "is a whole number"), ({"replicate_to": "us"}, "list of clusters"),
     ({"replicate_to": [5]}, "list of clusters"), ({"txn": "7"}, "not a transaction")],
)  # fmt: skip
def test_what_goes_with_a_message_is_refused_where_it_is_given(
    wrong: dict[str, Any], told: str
) -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client, client.producer(NAME) as producer:
            with pytest.raises(InvalidValue, match=told):
                await producer.submit(b"1", **wrong)
            assert producer.pending == 0
            await producer.send(b"2", key="k", properties={"a": "1"})

    play(story)


def test_a_transaction_that_was_not_begun_is_refused_where_it_is_given() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client, client.queue_consumer(NAME, "s") as consumer:
            txn: Any = client.transaction()
            with pytest.raises(InvalidValue, match=r"not a transaction that was begun .*await"):
                consumer.ack_many([], txn=txn)
            async with client.producer(NAME) as producer:
                with pytest.raises(InvalidValue, match="not a transaction that was begun"):
                    await producer.send(b"1", txn=txn)

    play(story)


def test_what_was_not_awaited_says_so_when_it_is_used() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            producer: Any = client.producer(NAME)
            for value, options in ((b"1", {}), (None, {"key": "k"})):
                with pytest.raises(NotAllowed, match=r"producer is not open yet .*await"):
                    producer.send(value, **options)
            consumer: Any = client.queue_consumer(NAME, "s")
            with pytest.raises(AttributeError, match=r"queue consumer is not open yet .*await"):
                consumer.receive()
            # It can be awaited still.
            await (await producer).send(b"1")
            consumer.close()

    play(story)


@pytest.mark.parametrize("schema", ["json", str])
def test_a_schema_that_is_none_is_refused_where_it_is_given(schema: Any) -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            with pytest.raises(InvalidSetting, match="JsonSchema"):
                await client.producer(NAME, schema=schema)
            with pytest.raises(InvalidSetting, match="JsonSchema"):
                await client.queue_consumer(NAME, "s", schema=schema)

    play(story)


def test_a_type_of_subscription_by_its_name_is_told_how_it_is_given() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            kind: Any = "shared"
            with pytest.raises(InvalidSetting, match=r"SubscriptionType\.SHARED"):
                await client.consumer("t", "s", subscription_type=kind)

    play(story)
