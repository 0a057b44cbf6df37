"""Connections, lookups, and operations that outlive passing trouble."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from magnetar.client.connection.pool import retrying
from magnetar.errors import (
    AlreadyClosed,
    DeadlineExceeded,
    NotConnected,
    RequestError,
    ServiceNotReady,
    TopicNotFound,
)
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.client.fake_broker import URL, FakeBroker, Peer, play

CONNECT = pb.CommandLookupTopicResponse.Connect
REDIRECT = pb.CommandLookupTopicResponse.Redirect


def test_one_connection_serves_all_and_a_lost_one_is_replaced() -> None:
    async def story(broker: FakeBroker) -> None:
        connections = broker.connections()
        found = await asyncio.gather(*(connections.service() for _ in range(5)))
        assert len(set(found)) == len(broker.peers) == 1
        broker.network.links[0].cut()
        await found[0].closed.past(0)
        assert await connections.service() is not found[0]
        assert (len(broker.peers), connections.count) == (2, 1)
        await connections.close()
        with pytest.raises(AlreadyClosed):
            await connections.service()

    play(story)


def test_addresses_take_turns_and_a_broker_may_have_several_connections() -> None:
    async def story(broker: FakeBroker) -> None:
        connections = broker.connections("pulsar://broker:1,broker:6650", connections_per_broker=2)
        found = {await connections.service() for _ in range(6)}
        assert len(found) == 2
        await connections.close()

    play(story)


def test_lookups_follow_redirects_up_to_a_limit() -> None:
    async def story(broker: FakeBroker) -> None:
        left = [3]

        def redirects(peer: Peer, body: Any) -> None:
            left[0] -= 1
            assert body.authoritative == (left[0] < 2)
            peer.say("LOOKUP_RESPONSE", request_id=body.request_id, authoritative=True,
                     brokerServiceUrl=URL, response=REDIRECT if left[0] else CONNECT)  # fmt: skip

        broker.handlers["LOOKUP"] = redirects
        connections = broker.connections(redirects_max=5)
        assert (await connections.lookup("t")).is_open
        left[0] = 1_000_000

        def always(peer: Peer, body: Any) -> None:
            peer.say("LOOKUP_RESPONSE", request_id=body.request_id, response=REDIRECT,
                     brokerServiceUrl=URL)  # fmt: skip

        broker.handlers["LOOKUP"] = always
        with pytest.raises(RequestError, match="more than 5 times"):
            await connections.lookup("t")

        def refused(peer: Peer, body: Any) -> None:
            peer.say("LOOKUP_RESPONSE", request_id=body.request_id, error=11, message="none",
                     response=pb.CommandLookupTopicResponse.Failed)  # fmt: skip

        broker.handlers["LOOKUP"] = refused
        with pytest.raises(TopicNotFound):
            await connections.lookup("t")
        await connections.close()

    play(story)


def test_an_operation_is_tried_again_while_trouble_passes() -> None:
    async def story(broker: FakeBroker) -> None:
        connections = broker.connections()
        failures = [ServiceNotReady("moving"), NotConnected("down"), None]

        async def attempt() -> int:
            failure = failures.pop(0)
            if failure is not None:
                raise failure
            return 5

        assert await retrying("it", attempt, connections.backoff(), 10) == 5

        async def never() -> int:
            raise ServiceNotReady("moving")

        with pytest.raises(DeadlineExceeded, match="it did not succeed within 10 s: moving"):
            await retrying("it", never, connections.backoff(), 10)

        async def refused() -> int:
            raise TopicNotFound("no")

        with pytest.raises(TopicNotFound):
            await retrying("it", refused, connections.backoff(), 10)

    play(story)


def test_a_broker_behind_a_proxy_is_named_in_the_handshake() -> None:
    async def story(broker: FakeBroker) -> None:
        def proxied(url: str) -> Callable[[Peer, Any], None]:
            return lambda peer, body: peer.say(
                "LOOKUP_RESPONSE", request_id=body.request_id, response=CONNECT,
                brokerServiceUrl=url, proxy_through_service_url=True,
            )  # fmt: skip

        connections = broker.connections()
        service = await connections.service()
        broker.handlers["LOOKUP"] = proxied(URL)
        assert await connections.lookup("t") is service, "it means itself"
        broker.handlers["LOOKUP"] = proxied("pulsar://inside:7000")
        found = await connections.lookup("t")
        assert found is not service
        assert found.address == service.address
        assert await connections.lookup("t") is found
        assert [each.proxy_to_broker_url for each in broker.said("CONNECT")] == ["", "inside:7000"]
        await connections.close()

    play(story)
