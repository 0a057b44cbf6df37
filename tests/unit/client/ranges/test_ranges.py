"""Ranges of a client: servers that have none, segments that moved, answers that go back."""

from __future__ import annotations

from typing import Any

import pytest

from magnetar.client.ranges.ranges import ORIGIN, Ranges
from magnetar.errors import NotAllowed, RangeLost, WireCode
from magnetar.model.names import TopicName
from magnetar.model.ranges import RangePosition
from tests.unit.client.fake_broker import URL, FakeBroker, Peer, play

TOPIC = TopicName.parse("topic://public/default/orders")
FLAGS = {"supports_scalable_topics": True, "supports_ranges": True}
AT = {"ledger_id": 7, "entry_id": 3}


def able(broker: FakeBroker, *epochs: int) -> Ranges:
    """Its topic has two segments; layouts are answered with these epochs, one after the other."""
    broker.connected["feature_flags"] = FLAGS
    left = list(epochs or (0,))

    def layout(peer: Peer, body: Any) -> None:
        segments = [{"number": n, "topic": f"{TOPIC}/{n}"} for n in (0, 1)]
        peer.say(
            "RANGE_LAYOUT_RESPONSE",
            request_id=body.request_id,
            topic=str(TOPIC),
            creation_id="1",
            epoch=left.pop(0) if len(left) > 1 else left[0],
            segments=segments,
        )

    def lookup(peer: Peer, body: Any) -> None:
        found = {"response": 1, "brokerServiceUrl": URL, "authoritative": True}
        peer.say("LOOKUP_RESPONSE", request_id=body.request_id, **found)

    broker.handlers |= {"RANGE_LAYOUT": layout, "LOOKUP": lookup}
    return Ranges(broker.connections(), TOPIC)


def test_a_server_without_ranges_is_not_asked() -> None:
    async def story(broker: FakeBroker) -> None:
        with pytest.raises(NotAllowed, match="connect to a Magnetar server"):
            await Ranges(broker.connections(), TOPIC).layout()
        assert not broker.said("RANGE_LAYOUT")

    play(story)


def test_an_older_layout_is_asked_for_again() -> None:
    async def story(broker: FakeBroker) -> None:
        ranges = able(broker, 5, 4, 4, 6)
        assert (await ranges.layout()).epoch == 5
        assert (await ranges.layout()).epoch == 6
        assert len(broker.said("RANGE_LAYOUT")) == 4

    play(story)


def test_only_the_segment_that_moved_is_asked_for_again() -> None:
    async def story(broker: FakeBroker) -> None:
        ranges = able(broker)
        moved = {"error": int(WireCode.SERVICE_NOT_READY), "message": "moved"}
        state = {"first": AT, "end": AT}

        def states(peer: Peer, body: Any) -> None:
            is_first = len(broker.said("RANGE_STATES")) == 1
            found = [state, moved] if is_first else [state] * len(body.topics)
            peer.say("RANGE_STATES_RESPONSE", request_id=body.request_id, states=found)

        broker.handlers["RANGE_STATES"] = states
        found = await ranges.states([0, 1])
        assert {number: each.stable for number, each in found.items()} == {
            0: RangePosition(7, 3),
            1: RangePosition(7, 3),
        }
        assert [list(each.topics) for each in broker.said("RANGE_STATES")] == [
            [f"{TOPIC}/0", f"{TOPIC}/1"],
            [f"{TOPIC}/1"],
        ]
        assert len(broker.said("LOOKUP")) == 3

    play(story)


def test_what_is_gone_is_left_out_or_lost() -> None:
    async def story(broker: FakeBroker) -> None:
        ranges = able(broker)
        gone = {"error": int(WireCode.TOPIC_NOT_FOUND), "message": "pruned"}
        lost = {"error": int(WireCode.RANGE_LOST), "message": "trimmed"}

        def answer(what: str, **fields: Any) -> None:
            broker.handlers[what] = lambda peer, body: peer.say(
                f"{what}_RESPONSE", request_id=body.request_id, **fields
            )

        answer("RANGE_STATES", states=[{"first": AT, "end": AT}, gone])
        assert list(await ranges.states([0, 1])) == [0]
        answer("RANGE_COUNTS", counts=[gone])
        with pytest.raises(RangeLost, match="segment 0"):
            await ranges.counts({0: (ORIGIN, ORIGIN)})
        answer("RANGE_COUNTS", counts=[lost])
        with pytest.raises(RangeLost, match="trimmed"):
            await ranges.counts({0: (ORIGIN, ORIGIN)})
        answer("RANGE_READ", **lost)
        with pytest.raises(RangeLost, match="trimmed"):
            [page async for page in ranges.read(0, ORIGIN, ORIGIN)]
        with pytest.raises(RangeLost, match="segment 9"):
            await ranges.at_time(9, 0)

    play(story)


def test_a_partial_cut_is_asked_on_with_what_is_left() -> None:
    async def story(broker: FakeBroker) -> None:
        ranges = able(broker)

        def cut(peer: Peer, body: Any) -> None:
            is_last = body.span.start.entry_id == 20
            at = {"ledger_id": 1, "entry_id": body.span.start.entry_id + 10}
            peer.say(
                "RANGE_CUT_RESPONSE",
                request_id=body.request_id,
                position=at,
                messages=10,
                bytes=100,
                is_partial=not is_last,
            )

        broker.handlers["RANGE_CUT"] = cut
        end = RangePosition(1, 99)
        found = await ranges.cut(0, RangePosition(1, 0), end, messages=35, bytes=1000)
        assert found == RangePosition(1, 30)
        asked = [(each.messages_max, each.bytes_max) for each in broker.said("RANGE_CUT")]
        assert asked == [(35, 1000), (25, 900), (15, 800)]

    play(story)


def test_an_end_never_goes_back() -> None:
    async def story(broker: FakeBroker) -> None:
        ranges = able(broker)
        ends = [5, 3, 6]

        def states(peer: Peer, body: Any) -> None:
            state = {"first": AT, "end": {"ledger_id": 7, "entry_id": ends.pop(0)}}
            peer.say("RANGE_STATES_RESPONSE", request_id=body.request_id, states=[state])

        broker.handlers["RANGE_STATES"] = states
        found = [(await ranges.states([0]))[0].stable.entry for _ in range(3)]
        assert found == [5, 5, 6]

    play(story)
