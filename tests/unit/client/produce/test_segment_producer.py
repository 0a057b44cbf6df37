"""A producer with a broker that answers badly, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from harness.simulation.seeds import EPOCH_MS
from magnetar.client.client import Client
from magnetar.client.connection.server_errors import refusal
from magnetar.client.connection.settings import TokenAuth
from magnetar.errors import (
    AuthorizationFailed,
    BacklogFull,
    ConnectionLost,
    InvalidSetting,
    NotAllowed,
    NotConnected,
    ProducerFenced,
    SendTimedOut,
    ServerDiskFull,
    TopicNotFound,
    WireCode,
)
from magnetar.model.ids import MessageId
from magnetar.runtime.clock import LoopClock
from magnetar.wire.messages import Send
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.client.fake_broker import SEED, URL, FakeBroker, Peer, play

REGULAR = "persistent://public/default/t"


def client_of(broker: FakeBroker, **options: Any) -> Client:
    return Client(
        URL,
        connect=broker.network.connect,
        chance=Random(SEED),
        clock=LoopClock(EPOCH_MS),
        **options,
    )


def older(broker: FakeBroker, partitions: int = 0) -> None:
    """A broker that knows regular topics only, and stores everything."""
    broker.connected = {"protocol_version": 20}
    handlers: dict[str, Callable[[Peer, Any], None]] = {
        "PARTITIONED_METADATA": lambda peer, body: peer.say(
            "PARTITIONED_METADATA_RESPONSE", request_id=body.request_id, partitions=partitions,
            response=pb.CommandPartitionedTopicMetadataResponse.Success,
        ),
        "LOOKUP": lambda peer, body: peer.say(
            "LOOKUP_RESPONSE", request_id=body.request_id, brokerServiceUrl=URL,
            response=pb.CommandLookupTopicResponse.Connect, authoritative=True,
        ),
        "PRODUCER": lambda peer, body: peer.say(
            "PRODUCER_SUCCESS", request_id=body.request_id, producer_name=body.producer_name
        ),
        "CLOSE_PRODUCER": lambda peer, body: peer.say("SUCCESS", request_id=body.request_id),
        "SEND": receipt,
    }  # fmt: skip
    broker.handlers.update(handlers)


def receipt(peer: Peer, send: Send) -> None:
    peer.say(
        "SEND_RECEIPT",
        producer_id=send.producer_id,
        sequence_id=send.sequence_id,
        message_id={"ledgerId": 5, "entryId": send.sequence_id},
    )


def refuse(code: int) -> Callable[[Peer, Send], None]:
    def handler(peer: Peer, send: Send) -> None:
        peer.say(
            "SEND_ERROR", producer_id=send.producer_id, sequence_id=send.sequence_id,
            error=code, message="no",
        )  # fmt: skip

    return handler


def test_an_older_broker_is_asked_for_its_partitions() -> None:
    async def story(broker: FakeBroker) -> None:
        older(broker, partitions=2)
        async with client_of(broker) as client:
            producer = await client.producer(REGULAR)
            assert sorted(each.topic for each in broker.said("PRODUCER")) == [
                f"{REGULAR}-partition-0",
                f"{REGULAR}-partition-1",
            ]
            sent = await producer.send(b"x", key="k")
            assert isinstance(sent, MessageId)
            assert sent.partition in (0, 1)
            with pytest.raises(NotAllowed, match="has no scalable topics"):
                await client.producer("topic://public/default/t")

    play(story)


def test_a_refusal_of_one_message_fails_that_message_alone() -> None:
    async def story(broker: FakeBroker) -> None:
        older(broker)

        def second_is_refused(peer: Peer, send: Send) -> None:
            (refuse(22) if send.sequence_id == 1 else receipt)(peer, send)

        broker.handlers["SEND"] = second_is_refused
        async with client_of(broker) as client:
            producer = await client.producer(REGULAR, batching=False)
            sends = [await producer.submit(b"%d" % number) for number in range(3)]
            with pytest.raises(NotAllowed):
                await producer.flush()
            assert [type(each.exception()) for each in sends] == [
                type(None),
                NotAllowed,
                type(None),
            ]
            assert len(broker.said("PRODUCER")) == 1
            await producer.flush()

    play(story)


def test_a_failure_before_the_flush_is_raised_by_it_once() -> None:
    async def story(broker: FakeBroker) -> None:
        older(broker)
        broker.handlers["SEND"] = refuse(22)
        async with client_of(broker) as client:
            producer = await client.producer(REGULAR, batching=False)
            refused = await producer.submit(b"refused")
            await asyncio.wait([refused])
            broker.handlers["SEND"] = receipt
            await producer.send(b"stored")
            with pytest.raises(NotAllowed):
                await producer.flush()
            await producer.flush()

    play(story)


def test_each_of_two_flushes_raises_what_both_waited_for_and_a_cancelled_one_forgets_nothing() -> (
    None
):
    async def story(broker: FakeBroker) -> None:
        older(broker)
        broker.handlers["SEND"] = lambda peer, send: None
        async with client_of(broker) as client:
            producer = await client.producer(REGULAR, batching=False, send_timeout=5)
            await producer.submit(b"late")
            first = asyncio.create_task(producer.flush())
            await asyncio.sleep(1)
            await producer.submit(b"later")
            second = asyncio.create_task(producer.flush())
            cancelled = asyncio.create_task(producer.flush())
            await asyncio.sleep(1)
            cancelled.cancel()
            for flush in (first, second):
                with pytest.raises(SendTimedOut):
                    await flush
            await producer.flush()

            await producer.submit(b"late as well")
            cancelled = asyncio.create_task(producer.flush())
            await asyncio.sleep(1)
            cancelled.cancel()
            await asyncio.sleep(10)
            with pytest.raises(SendTimedOut):
                await producer.flush()

    play(story)


@pytest.mark.parametrize("trouble", ["refused", "closed", "out of order", "cut", "silence"])
def test_after_any_trouble_everything_is_sent_again_in_order(trouble: str) -> None:
    async def story(broker: FakeBroker) -> None:
        older(broker)

        def troubled(peer: Peer, send: Send) -> None:
            if send.sequence_id == 1:
                broker.handlers["SEND"] = after
                if trouble == "refused":
                    refuse(2)(peer, send)
                elif trouble == "closed":
                    peer.say("CLOSE_PRODUCER", producer_id=send.producer_id, request_id=2**64 - 1)
                elif trouble == "out of order":
                    receipt(peer, Send(send.producer_id, 3, 1, b""))
                elif trouble == "cut":
                    peer.transport.abort()
                else:
                    broker.network.links[-1].fall_silent()
            else:
                receipt(peer, send)

        def after(peer: Peer, send: Send) -> None:
            if len(broker.said("PRODUCER")) > 1:
                receipt(peer, send)

        broker.handlers["SEND"] = troubled
        async with client_of(broker, keepalive=5) as client:
            producer = await client.producer(REGULAR, batching=False, send_timeout=100)
            for number in range(5):
                await producer.submit(b"%d" % number)
            await producer.flush()
            assert len(broker.said("PRODUCER")) == 2
            assert [each.epoch for each in broker.said("PRODUCER")] == [0, 1]
            numbers = [each.sequence_id for each in broker.said("SEND")]
            assert numbers[-4:] == [1, 2, 3, 4]

    play(story)


def test_receipts_that_come_after_the_broker_closed_the_producer_count() -> None:
    """Pulsar closes the producers of what takes no more, and then says what it has stored."""

    async def story(broker: FakeBroker) -> None:
        older(broker)
        loop = asyncio.get_running_loop()
        arrived: list[Send] = []

        def closing(peer: Peer, send: Send) -> None:
            if len(broker.said("PRODUCER")) > 1:
                receipt(peer, send)
                return
            arrived.append(send)
            if len(arrived) < 5:
                return
            peer.say("CLOSE_PRODUCER", producer_id=send.producer_id, request_id=2**64 - 1)
            refuse(pb.TopicTerminatedError)(peer, arrived[4])
            loop.call_later(0.1, late, peer)

        def late(peer: Peer) -> None:
            for each in arrived[:4]:
                receipt(peer, each)

        broker.handlers["SEND"] = closing
        async with client_of(broker) as client:
            producer = await client.producer(REGULAR, batching=False)
            sends = [await producer.submit(b"%d" % number) for number in range(5)]
            await producer.flush()
            assert [each.exception() for each in sends] == [None] * 5
        assert [each.sequence_id for each in broker.said("SEND")] == [0, 1, 2, 3, 4, 4]

    play(story)


@pytest.mark.parametrize(
    ("code", "error"), [(4, AuthorizationFailed), (11, TopicNotFound), (25, ProducerFenced)]
)
def test_a_refusal_to_open_again_ends_the_producer(code: int, error: type[Exception]) -> None:
    async def story(broker: FakeBroker) -> None:
        older(broker)
        async with client_of(broker) as client:
            producer = await client.producer(REGULAR)
            await producer.send(b"x")
            broker.handlers["PRODUCER"] = lambda peer, body: peer.say(
                "ERROR", request_id=body.request_id, error=code, message="no"
            )
            broker.handlers["SEND"] = lambda peer, send: peer.transport.abort()
            waiting = await producer.submit(b"y")
            with pytest.raises(error):
                await waiting
            with pytest.raises(error):
                await producer.send(b"z")

    play(story)


def test_what_is_given_up_is_not_sent_again_but_later_messages_are() -> None:
    async def story(broker: FakeBroker) -> None:
        older(broker)
        broker.handlers["SEND"] = lambda peer, send: None
        async with client_of(broker) as client:
            producer = await client.producer(REGULAR, batching=False, send_timeout=5)
            late = await producer.submit(b"late")
            await asyncio.sleep(3)
            in_time = await producer.submit(b"in time")
            broker.handlers["SEND"] = lambda peer, send: (
                receipt(peer, send) if len(broker.said("PRODUCER")) > 1 else None
            )
            with pytest.raises(SendTimedOut):
                await late
            assert isinstance(await in_time, MessageId)
            assert [each.sequence_id for each in broker.said("SEND")] == [0, 1, 1]

    play(story)


def test_writing_stops_while_the_transport_is_full() -> None:
    async def story(broker: FakeBroker) -> None:
        older(broker)
        async with client_of(broker) as client:
            producer = await client.producer(REGULAR, batching=False)
            await producer.send(b"x")
            link = broker.network.links[-1]
            link.server.pause_reading()
            for _ in range(100):
                await producer.submit(bytes(100_000))
            await asyncio.sleep(1)
            assert link.client.get_write_buffer_size() < 1_000_000
            link.server.resume_reading()
            await producer.flush()

    play(story)


def test_what_waited_for_a_full_transport_goes_out_on_the_next_connection() -> None:
    async def story(broker: FakeBroker) -> None:
        older(broker)
        async with client_of(broker) as client:
            producer = await client.producer(REGULAR, batching=False)
            await producer.send(b"x")
            link = broker.network.links[-1]
            link.server.pause_reading()
            for _ in range(100):
                await producer.submit(bytes(100_000))
            await asyncio.sleep(1)
            link.cut()
            await producer.flush()
            assert producer.last_sequence_id == 100

    play(story)


def test_a_token_function_that_fails_is_asked_again() -> None:
    tokens: list[Any] = ["good"]

    def token() -> str:
        if not tokens:
            raise KeyError("no token now")
        return str(tokens[-1])

    async def story(broker: FakeBroker) -> None:
        older(broker)
        async with client_of(broker, auth=TokenAuth(token)) as client:
            producer = await client.producer(REGULAR)
            await producer.send(b"x")
            tokens.clear()
            broker.peers[-1].transport.abort()
            waiting = await producer.submit(b"y")
            await asyncio.sleep(5)
            tokens.append("good again")
            assert isinstance(await waiting, MessageId)
            assert broker.said("CONNECT")[-1].auth_data == b"good again"

    play(story)


@pytest.mark.parametrize(
    ("token", "error", "text"),
    [
        (lambda: Path("/no/such/file").read_text("utf-8"), NotConnected, "No such file"),
        (lambda: dict[str, str]()["token"], NotConnected, "KeyError"),
        (lambda: b"bytes", InvalidSetting, "must be a str"),
    ],
)
def test_the_error_of_a_token_function_is_told(
    token: Callable[[], Any], error: type[Exception], text: str
) -> None:
    async def story(broker: FakeBroker) -> None:
        older(broker)
        async with client_of(broker, auth=TokenAuth(token), operation_timeout=5.0) as client:
            with pytest.raises(error, match=text):
                await client.producer(REGULAR)
            assert not broker.said("CONNECT")

    play(story)


FULL = "the disk of the server is full: 0.5 of 40.0 MiB are left (free some space on it)"


def full(broker: FakeBroker) -> None:
    """From now on PRODUCER is refused, for the disk is full."""
    broker.handlers["PRODUCER"] = lambda peer, body: peer.say(
        "ERROR",
        request_id=body.request_id,
        error=pb.ProducerBlockedQuotaExceededException,
        message=FULL,
    )


def test_a_full_disk_fails_each_message_by_name_and_at_once_until_there_is_room() -> None:
    async def story(broker: FakeBroker) -> None:
        older(broker)
        broker.handlers["SEND"] = receipt
        opens = broker.handlers["PRODUCER"]
        loop = asyncio.get_running_loop()
        async with client_of(broker) as client:
            producer = await client.producer(REGULAR)
            await producer.send(b"stored")
            full(broker)
            number = broker.said("PRODUCER")[-1].producer_id
            broker.peers[-1].say("CLOSE_PRODUCER", producer_id=number, request_id=2**64 - 1)
            await asyncio.sleep(1)
            before = len(broker.said("PRODUCER"))
            for _ in range(20):
                begun = loop.time()
                with pytest.raises(ServerDiskFull, match="the disk of the server is full"):
                    await producer.send(b"refused")
                assert loop.time() - begun < 0.5
            # One question for each message: no loop without a breath.
            assert len(broker.said("PRODUCER")) - before <= 25
            with pytest.raises(ServerDiskFull):
                await client.producer(REGULAR)
            # Nothing to send, and hours on the full disk: the pauses grow.
            before = len(broker.said("PRODUCER"))
            await asyncio.sleep(3600)
            assert len(broker.said("PRODUCER")) - before < 200
            broker.handlers["PRODUCER"] = opens
            begun = loop.time()
            await producer.send(b"goes on")
            assert loop.time() - begun < 1

    play(story)


def test_on_a_full_disk_what_may_be_stored_is_not_called_refused() -> None:
    async def story(broker: FakeBroker) -> None:
        older(broker)
        async with client_of(broker) as client:
            producer = await client.producer(REGULAR, batching=False)
            broker.handlers["SEND"] = lambda peer, send: None
            in_doubt = await producer.submit(b"in doubt")
            await asyncio.sleep(1)
            full(broker)
            broker.peers[-1].transport.abort()
            with pytest.raises(ConnectionLost, match="the disk of the server is full"):
                await in_doubt

    play(story)


def test_a_quota_of_another_broker_is_not_called_a_full_disk() -> None:
    error = refusal("PRODUCER", pb.ProducerBlockedQuotaExceededException, "the backlog is full")
    assert type(error) is BacklogFull
    assert error.wire_code is WireCode.PRODUCER_BLOCKED_QUOTA_EXCEPTION
