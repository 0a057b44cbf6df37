"""What connections write in one turn of the loop: once each, whatever happens to another one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.api import Delivery, Receipt, ReceiptRun
from magnetar.broker.publish.producer import Producer
from magnetar.errors import MagnetarError
from magnetar.model.ids import Position
from magnetar.server.handles import _frames_of
from magnetar.server.outbound import Outbound, WriteTurn
from magnetar.testing.virtual.driver import build_message
from magnetar.testing.virtual.virtual_time import run
from magnetar.wire.frames import encode_message
from tests.unit.server.link import Wire
from tests.unit.server.serving import connected, serving
from tests.unit.server.serving import run as run_on_real_time


class BrokenWire(Wire):
    """A transport with a bug."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        raise ZeroDivisionError(len(data))


def test_frames_of_one_turn_leave_in_one_write_per_connection() -> None:
    async def scene() -> None:
        turn = WriteTurn()
        wires = [Wire(), Wire()]
        outs = [Outbound(each, 1000, turn) for each in wires]
        for number in range(3):
            outs[0].write(b"a%d" % number)
            outs[1].write_all([b"b%d" % number, b"-"])
        assert [each.writes for each in wires] == [[], []]
        await asyncio.sleep(0)
        assert [each.writes for each in wires] == [[b"a0a1a2"], [b"b0-b1-b2-"]]
        outs[0].write(b"later")
        await asyncio.sleep(0)
        assert wires[0].writes == [b"a0a1a2", b"later"]
        assert len(wires[1].writes) == 1

    run(scene())


def test_a_connection_that_fails_takes_nobody_along() -> None:
    async def scene() -> None:
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what))
        turn, wires = WriteTurn(), [Wire(), BrokenWire(), Wire()]
        outs = [Outbound(each, 1000, turn) for each in wires]
        for each in outs:
            each.write(b"frame")
        for _ in range(3):
            await asyncio.sleep(0)
        assert [each.writes for each in wires] == [[b"frame"], [], [b"frame"]]
        assert len(told) == 1
        # Nor does it keep later turns from coming.
        outs[0].write(b"more")
        await asyncio.sleep(0)
        assert wires[0].writes == [b"frame", b"more"]

    run(scene())


@pytest.mark.parametrize("is_flushed_before", [True, False])
def test_a_flush_before_the_turn_ends_writes_nothing_twice(is_flushed_before: bool) -> None:
    async def scene() -> None:
        turn, wire = WriteTurn(), Wire()
        out = Outbound(wire, 1000, turn)
        out.write(b"1")
        if is_flushed_before:
            out.flush()
        out.write(b"2")
        await asyncio.sleep(0)
        assert b"".join(wire.writes) == b"12"
        assert len(wire.writes) == 1 + is_flushed_before

    run(scene())


DELIVERIES = st.lists(
    st.builds(
        Delivery,
        st.builds(Position, st.integers(1, 3), st.integers(0, 2**30)),
        st.binary(max_size=8),
        st.just(1),
        st.integers(0, 1),
        st.sampled_from([(), (5,)]),
        st.sampled_from([None, 1]),
    ),
    max_size=8,
)


@given(DELIVERIES, st.sampled_from([-1, 4]))
def test_frames_of_deliveries_keep_their_order_and_what_they_say(
    deliveries: list[Delivery], partition: int
) -> None:
    expected = [
        piece
        for position, payload, _, count, ack_set, epoch in deliveries
        for piece in encode_message(9, position, partition, count, ack_set, payload, epoch)
    ]
    assert _frames_of(deliveries, 9, partition) == expected


def test_receipts_that_cannot_be_given_end_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug: the client would wait for ever, so it is made to come again."""

    def broken(_: Producer) -> list[Receipt | ReceiptRun]:
        raise ZeroDivisionError

    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await driver.request("PRODUCER", topic="topic", producer_id=1)
            monkeypatch.setattr(Producer, "take_receipts", broken)
            with pytest.raises((MagnetarError, OSError)):
                await driver.publish(1, 0, build_message(b"x", sequence_id=0))
            monkeypatch.undo()
            other = await connected(server)
            await other.request("PRODUCER", topic="topic", producer_id=1)
            await other.publish(1, 0, build_message(b"x", sequence_id=0))
            await other.close()

    run_on_real_time(scene())
