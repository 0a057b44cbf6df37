"""One connection: requests, pushes, keepalive, credentials, and the end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.client.connection.connection import CONSUMER, PRODUCER
from magnetar.client.connection.server_errors import is_passing, may_open, refusal
from magnetar.client.connection.settings import TokenAuth
from magnetar.errors import (
    AlreadyClosed,
    AuthenticationFailed,
    ConnectionLost,
    DeadlineExceeded,
    MagnetarError,
    NotConnected,
    ProducerBusy,
    RequestError,
    TooManyRequests,
    TransactionConflict,
    WireCode,
)
from magnetar.wire.commands import NAMES
from magnetar.wire.messages import Command, Received
from tests.unit.client.fake_broker import FakeBroker, Peer, play


class Listener:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def take(self, command: Command) -> None:
        assert isinstance(command, Received)
        self.heard.append(NAMES[command.type])

    def lost(self, error: MagnetarError) -> None:
        self.heard.append(error.name)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_request_gets_its_answer_whatever_comes_before_it() -> None:
    async def story(broker: FakeBroker) -> None:
        kept: list[Any] = []
        broker.handlers["SEEK"] = lambda peer, body: kept.append((peer, body))
        connection = await broker.connections().service()
        asked = [
            asyncio.create_task(connection.request("SEEK", consumer_id=number))
            for number in range(3)
        ]
        await asyncio.sleep(5)
        for peer, body in reversed(kept):
            if body.consumer_id == 1:
                peer.say("ERROR", request_id=body.request_id, error=16, message="taken")
            else:
                peer.say("SUCCESS", request_id=body.request_id)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(answers[1], ProducerBusy)
        assert [answers[0].request_id, answers[2].request_id] == [1, 3]  # type: ignore[union-attr]
        await connection.close()
        assert broker.commands[0][1].client_version.startswith("Magnetar-")

    play(story)


def test_a_request_without_an_answer_ends_at_its_deadline_and_a_late_answer_is_dropped() -> None:
    async def story(broker: FakeBroker) -> None:
        kept: list[Any] = []
        broker.handlers["SEEK"] = lambda peer, body: kept.append((peer, body))
        connection = await broker.connections(operation_timeout=5).service()
        begun = now()
        with pytest.raises(DeadlineExceeded, match="SEEK"):
            await connection.request("SEEK", consumer_id=0)
        assert now() - begun == pytest.approx(5)
        peer, body = kept[0]
        peer.say("SUCCESS", request_id=body.request_id)
        await asyncio.sleep(5)
        assert connection.is_open
        await connection.close()

    play(story)


def test_requests_are_limited() -> None:
    async def story(broker: FakeBroker) -> None:
        connection = await broker.connections(requests_max=2, operation_timeout=1).service()
        asked = [asyncio.create_task(connection.request("SEEK", consumer_id=0)) for _ in range(3)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(each) for each in answers] == [DeadlineExceeded, DeadlineExceeded,
                                                    TooManyRequests]  # fmt: skip
        await connection.close()

    play(story)


def test_an_answer_that_is_not_the_last_lifts_the_deadline() -> None:
    async def story(broker: FakeBroker) -> None:
        kept: list[Any] = []

        def waits(peer: Peer, body: Any) -> None:
            kept.append((peer, body))
            peer.say("PRODUCER_SUCCESS", request_id=body.request_id, producer_name="p",
                     producer_ready=False)  # fmt: skip

        broker.handlers["PRODUCER"] = waits
        connection = await broker.connections(operation_timeout=5).service()
        asked = asyncio.create_task(
            connection.request(
                "PRODUCER",
                on_answer=lambda body: bool(body.producer_ready),
                topic="t",
                producer_id=1,
            )
        )
        await asyncio.sleep(1000)
        peer, body = kept[0]
        peer.say("PRODUCER_SUCCESS", request_id=body.request_id, producer_name="p")
        assert (await asked).producer_ready
        await connection.close()

    play(story)


def test_owners_hear_what_is_theirs_and_of_the_end_once() -> None:
    async def story(broker: FakeBroker) -> None:
        connection = await broker.connections().service()
        owners = [Listener(), Listener(), Listener()]
        first = connection.register(PRODUCER, owners[0])
        second = connection.register(PRODUCER, owners[1])
        third = connection.register(CONSUMER, owners[2])
        assert (first, second, third) == (0, 1, 0)
        peer = broker.peers[0]
        peer.say("CLOSE_PRODUCER", producer_id=second, request_id=2**64 - 1)
        peer.say("REACHED_END_OF_TOPIC", consumer_id=third)
        peer.say("CLOSE_PRODUCER", producer_id=77, request_id=2**64 - 1)
        asked = asyncio.create_task(connection.request("SEEK", consumer_id=0))
        await asyncio.sleep(1)
        broker.network.links[0].cut()
        with pytest.raises(ConnectionLost):
            await asked
        assert [each.heard for each in owners] == [
            ["connection-lost"],
            ["CLOSE_PRODUCER", "connection-lost"],
            ["REACHED_END_OF_TOPIC", "connection-lost"],
        ]
        with pytest.raises(ConnectionLost):
            connection.register(PRODUCER, owners[0])
        with pytest.raises(ConnectionLost):
            connection.tell("PING")

    play(story)


def test_a_silent_broker_is_given_up_after_two_intervals() -> None:
    async def story(broker: FakeBroker) -> None:
        connection = await broker.connections(keepalive=10).service()
        await asyncio.sleep(1000)
        assert connection.is_open, "it answers pings"
        broker.network.links[0].fall_silent(client=False)
        begun = now()
        await connection.closed.past(0)
        assert 10 <= now() - begun <= 20
        assert "said nothing" in str(connection.failure)

    play(story)


def test_a_ping_is_answered_and_credentials_are_shown_again() -> None:
    tokens = iter(["first", "second"])

    async def story(broker: FakeBroker) -> None:
        auth = TokenAuth(lambda: next(tokens))
        connection = await broker.connections(auth=auth).service()
        (connect,) = broker.said("CONNECT")
        assert (connect.auth_method_name, connect.auth_data) == ("token", b"first")
        broker.peers[0].say("PING")
        broker.peers[0].say("AUTH_CHALLENGE", challenge={"auth_data": b"PulsarAuthRefresh"})
        await asyncio.sleep(1)
        assert broker.said("PONG")
        (response,) = broker.said("AUTH_RESPONSE")
        assert response.response.auth_data == b"second"
        broker.peers[0].say("AUTH_CHALLENGE", challenge={"auth_data": b"PulsarAuthRefresh"})
        await connection.closed.past(0)
        assert "no credentials" in str(connection.failure), "its function has no more tokens"

    play(story)


def test_a_refused_handshake_is_told_as_what_it_is() -> None:
    async def story(broker: FakeBroker) -> None:
        def refuses(peer: Peer, body: Any) -> None:
            peer.say("ERROR", request_id=2**64 - 1, error=3, message="who?")

        broker.handlers["CONNECT"] = refuses
        with pytest.raises(AuthenticationFailed, match="who"):
            await broker.connections().service()
        broker.handlers["CONNECT"] = lambda peer, body: peer.transport.abort()
        with pytest.raises(NotConnected, match="broke the handshake off"):
            await broker.connections().service()
        broker.handlers["CONNECT"] = lambda peer, body: None
        with pytest.raises(NotConnected, match="did not answer within 3 s"):
            await broker.connections(connect_timeout=3).service()
        with pytest.raises(NotConnected, match="cannot be reached"):
            await broker.connections("pulsar://broker:1").service()

    play(story)


def test_broken_bytes_end_the_connection() -> None:
    async def story(broker: FakeBroker) -> None:
        connection = await broker.connections().service()
        broker.peers[0].transport.write(b"\x00\x00\x00\x02hi")
        await connection.closed.past(0)
        assert connection.failure is not None
        assert connection.failure.name == "remote-protocol-error"

    play(story)


def test_what_a_server_advises_is_said_once() -> None:
    said = TransactionConflict("message 1:2 is taken")
    assert str(refusal("ACK", said.wire_code, str(said))) == f"ACK: {said}"
    other = TransactionConflict("it has ended", hint="begin another one")
    assert str(refusal("ACK", other.wire_code, str(other))) == f"ACK: {other}"
    assert refusal("ACK", said.wire_code, "as Pulsar says it").hint == said.hint


def test_refusals_have_the_class_of_their_code() -> None:
    for code in WireCode:
        error = refusal("it", code, "text")
        assert error.wire_code == code
        assert str(error).startswith("it: text")
    assert type(refusal("it", 99, "new")) is RequestError
    assert is_passing(refusal("it", WireCode.METADATA, ""))
    assert not is_passing(refusal("it", WireCode.AUTHORIZATION, ""))


def test_what_was_open_is_opened_again_unless_the_application_has_to_change_something() -> None:
    open_again = {code for code in WireCode if may_open(refusal("it", code, ""), was_open=True)}
    at_first = {code for code in WireCode if may_open(refusal("it", code, ""), was_open=False)}
    assert at_first == {
        WireCode.UNKNOWN,
        WireCode.METADATA,
        WireCode.PERSISTENCE,
        WireCode.SERVICE_NOT_READY,
        WireCode.TOO_MANY_REQUESTS,
        WireCode.PRODUCER_BLOCKED_QUOTA_ERROR,
        WireCode.TRANSACTION_COORDINATOR_NOT_FOUND,
    }
    assert open_again - at_first == {
        WireCode.CONSUMER_ASSIGN,
        WireCode.CONSUMER_BUSY,
        WireCode.PRODUCER_BLOCKED_QUOTA_EXCEPTION,
        WireCode.PRODUCER_BUSY,
    }
    assert may_open(ConnectionLost("gone"), was_open=False)
    assert not may_open(AlreadyClosed("closed"), was_open=True)
