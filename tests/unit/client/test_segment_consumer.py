"""A consumer with a broker that answers badly, or not at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.errors import AuthorizationFailed, DeadlineExceeded
from tests.unit.client.fake_broker import FakeBroker, Handler, Peer, play
from tests.unit.client.test_segment_producer import REGULAR, client_of, older


def succeed(peer: Peer, body: Any) -> None:
    peer.say("SUCCESS", request_id=body.request_id)


def refuse(code: int) -> Handler:
    return lambda peer, body: peer.say(
        "ERROR", request_id=body.request_id, error=code, message="no"
    )


def consumable(broker: FakeBroker, partitions: int = 0) -> None:
    """A broker that knows regular topics only, and does what consumers ask."""
    older(broker, partitions)
    broker.handlers.update(
        dict.fromkeys(("SUBSCRIBE", "UNSUBSCRIBE", "SEEK", "CLOSE_CONSUMER"), succeed)
    )


def test_a_consumer_outlives_trouble_that_the_broker_has_no_name_for() -> None:
    async def story(broker: FakeBroker) -> None:
        consumable(broker)
        async with client_of(broker) as client:
            consumer = await client.consumer(REGULAR, "s")
            broker.handlers["SUBSCRIBE"] = refuse(0)
            broker.peers[-1].transport.abort()
            receiving = asyncio.create_task(consumer.receive())
            await asyncio.sleep(60)
            broker.handlers["SUBSCRIBE"] = succeed
            await asyncio.sleep(60)
            assert not receiving.done()
            last = broker.said("SUBSCRIBE")[-1].consumer_id
            assert broker.said("FLOW")[-1].consumer_id == last, "it is open again"
            receiving.cancel()

    play(story)


def test_unknown_trouble_at_first_is_told_in_the_end_and_a_clear_refusal_at_once() -> None:
    async def story(broker: FakeBroker) -> None:
        consumable(broker)
        async with client_of(broker, operation_timeout=5.0) as client:
            now = asyncio.get_running_loop().time
            for code, error, seconds in ((0, DeadlineExceeded, 5.0), (4, AuthorizationFailed, 0.0)):
                broker.handlers["SUBSCRIBE"] = refuse(code)
                begun = now()
                with pytest.raises(error, match="no"):
                    await client.consumer(REGULAR, "s")
                assert seconds <= now() - begun < seconds + 1

    play(story)
