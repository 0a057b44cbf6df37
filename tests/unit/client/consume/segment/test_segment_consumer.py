"""A consumer with a broker that answers badly, or not at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.errors import AuthorizationFailed, DeadlineExceeded, InvalidSetting
from magnetar.model.ids import EARLIEST, MessageId
from tests.unit.client.fake_broker import FakeBroker, Handler, Peer, play
from tests.unit.client.produce.test_segment_producer import REGULAR, client_of, older


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


def last_message(peer: Peer, body: Any) -> None:
    peer.say(
        "GET_LAST_MESSAGE_ID_RESPONSE",
        request_id=body.request_id,
        last_message_id={"ledgerId": 3, "entryId": 4},
    )


@pytest.mark.parametrize("request_name", ["SEEK", "UNSUBSCRIBE", "GET_LAST_MESSAGE_ID"])
@pytest.mark.parametrize("trouble", ["cut", "not ready", "not connected"])
def test_a_request_is_repeated_on_the_next_connection(request_name: str, trouble: str) -> None:
    async def story(broker: FakeBroker) -> None:
        consumable(broker)
        answer = last_message if request_name == "GET_LAST_MESSAGE_ID" else succeed

        def troubled(peer: Peer, body: Any) -> None:
            broker.handlers[request_name] = answer
            if trouble == "not ready":
                refuse(6)(peer, body)
            elif trouble == "cut":
                peer.transport.abort()
            else:
                answer(peer, body)

        broker.handlers[request_name] = troubled
        async with client_of(broker) as client:
            consumer = await client.consumer(REGULAR, "s")
            if trouble == "not connected":
                broker.handlers["SUBSCRIBE"] = refuse(6)
                broker.peers[-1].transport.abort()
                await asyncio.sleep(5)
                handlers = broker.handlers
                asyncio.get_running_loop().call_later(5, handlers.update, {"SUBSCRIBE": succeed})
            if request_name == "SEEK":
                await consumer.seek(EARLIEST)
            elif request_name == "UNSUBSCRIBE":
                await consumer.unsubscribe()
            else:
                assert await consumer.last_message_ids() == {REGULAR: MessageId(3, 4)}
            assert len(broker.said(request_name)) == (1 if trouble == "not connected" else 2)

    play(story)


def test_a_request_that_cannot_be_carried_out_is_refused_at_once_or_in_the_end() -> None:
    async def story(broker: FakeBroker) -> None:
        consumable(broker)
        async with client_of(broker, operation_timeout=5.0) as client:
            consumer = await client.consumer(REGULAR, "s")
            broker.handlers["SEEK"] = refuse(4)
            with pytest.raises(AuthorizationFailed):
                await consumer.seek(EARLIEST)
            broker.handlers["SEEK"] = refuse(6)
            with pytest.raises(DeadlineExceeded, match=r"SEEK .* not succeed within 5"):
                await consumer.seek(EARLIEST)

    play(story)


def listed(filtered: bool) -> Handler:
    names = ["persistent://public/default/t1-partition-0", "persistent://public/default/other"]
    return lambda peer, body: peer.say(
        "GET_TOPICS_OF_NAMESPACE_RESPONSE",
        request_id=body.request_id,
        topics=names[:1] if filtered else names,
        filtered=filtered,
    )


@pytest.mark.parametrize("pattern", ["public/default/t.*", f"persistent://.*/t({'x' * 60}|.)"])
@pytest.mark.parametrize("filtered", [True, False])
def test_a_list_that_the_broker_did_not_filter_is_filtered_here(
    filtered: bool, pattern: str
) -> None:
    async def story(broker: FakeBroker) -> None:
        consumable(broker)
        broker.handlers["GET_TOPICS_OF_NAMESPACE"] = listed(filtered)
        async with client_of(broker) as client:
            consumer = await client.consumer(None, "s", pattern=pattern)
            assert consumer.topics == ("persistent://public/default/t1",)
            (asked,) = broker.said("GET_TOPICS_OF_NAMESPACE")
            assert asked.HasField("topics_pattern") == (len(pattern) <= 50)

    play(story)


def test_a_pattern_that_is_none_is_refused_before_anything_is_connected() -> None:
    async def story(broker: FakeBroker) -> None:
        async with client_of(broker) as client:
            with pytest.raises(InvalidSetting, match="regular expression"):
                await client.consumer(None, "s", pattern="public/default/(")
            assert not broker.peers

    play(story)
