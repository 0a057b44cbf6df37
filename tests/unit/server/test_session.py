"""A session by itself: handshake, keepalive, order, back-pressure, refusals, end."""

from __future__ import annotations

import asyncio
import struct
from typing import Any, Final

import pytest

from magnetar.errors import WireCode
from magnetar.runtime.limits import Limits
from magnetar.server.handlers.table import HANDLERS
from magnetar.server.keepalive import is_alive
from magnetar.server.replies import NO_REQUEST, refusal
from magnetar.server.session import Handlers, Session
from magnetar.testing.virtual.virtual_time import run
from magnetar.wire.commands import NAMES, SENT_BY, TYPES, Side
from magnetar.wire.frames import base_command, command
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.server.link import Link

MANY_COMMANDS: Final = 4_000


def test_the_handshake_announces_what_there_is() -> None:
    async def scene() -> None:
        link = Link()
        connected = await link.connect()
        assert connected.server_version.startswith("Magnetar-")
        assert connected.protocol_version == 20
        assert connected.max_message_size == 5 * 1024 * 1024
        assert connected.feature_flags.supports_topic_watchers
        assert not connected.feature_flags.supports_scalable_topics
        await link.close()

    run(scene())


def test_a_client_that_says_nothing_is_closed_at_the_deadline() -> None:
    async def scene() -> None:
        link = Link()
        await link.session.ended.wait()
        assert asyncio.get_running_loop().time() == pytest.approx(30)

    run(scene())


def test_another_command_before_the_handshake_closes() -> None:
    async def scene() -> None:
        link = Link()
        link.send("LOOKUP", topic="x", request_id=1)
        ((name, _),) = await link.received()
        assert name == "ERROR"
        assert link.wire.is_closing()
        await link.session.ended.wait()

    run(scene())


def test_a_huge_frame_before_the_handshake_is_refused_at_once() -> None:
    async def scene() -> None:
        link = Link()
        link.session.data_received(struct.pack(">I", 2**31 - 1))
        await link.session.ended.wait()
        assert link.session.wire.buffered_bytes == 0

    run(scene())


def test_a_ping_is_answered() -> None:
    async def scene() -> None:
        link = Link()
        await link.connect()
        link.send("PING")
        assert [name for name, _ in await link.received()] == ["PONG"]
        await link.close()

    run(scene())


def test_a_client_that_does_not_answer_a_ping_is_closed_after_one_interval() -> None:
    async def scene() -> None:
        link = Link()
        await link.connect()
        await asyncio.sleep(31)
        assert [name for name, _ in await link.received()] == ["PING"]
        link.send("PONG")
        await asyncio.sleep(31)
        assert [name for name, _ in await link.received()] == ["PING"]
        await link.session.ended.wait()
        assert asyncio.get_running_loop().time() == pytest.approx(90)

    run(scene())


def test_a_client_that_is_asked_for_anothers_sake_has_five_seconds() -> None:
    async def scene() -> None:
        silent, lively = Link(), Link()
        await silent.connect()
        await lively.connect()
        asked = asyncio.create_task(is_alive(lively.session, Limits()))
        await asyncio.sleep(1)
        lively.send("PONG")
        assert await asked
        assert not await is_alive(silent.session, Limits())
        assert asyncio.get_running_loop().time() == pytest.approx(6)
        await silent.session.ended.wait()
        assert not await is_alive(silent.session, Limits())
        await lively.close()

    run(scene())


def test_an_unknown_command_is_answered_and_the_connection_lives() -> None:
    async def scene() -> None:
        link = Link()
        await link.connect()
        body = b"\x08\x7f"  # type 127
        link.session.data_received(struct.pack(">II", 4 + len(body), len(body)) + body)
        ((name, error),) = await link.received()
        assert (name, error.error) == ("ERROR", WireCode.NOT_ALLOWED)
        assert error.request_id == NO_REQUEST
        assert not link.wire.is_closing()
        await link.close()

    run(scene())


def test_a_send_without_a_producer_closes() -> None:
    async def scene() -> None:
        link = Link()
        await link.connect()
        frame = base_command("SEND", producer_id=1, sequence_id=0).SerializeToString()
        rest = struct.pack(">I", 0)
        link.session.data_received(
            struct.pack(">II", 4 + len(frame) + len(rest), len(frame)) + frame + rest
        )
        await link.session.ended.wait()

    run(scene())


@pytest.mark.parametrize(
    ("type_name", "fields", "reply"),
    [
        ("TC_CLIENT_CONNECT_REQUEST", {"request_id": 7, "tc_id": 0}, "TC_CLIENT_CONNECT_RESPONSE"),
        ("NEW_TXN", {"request_id": 7}, "NEW_TXN_RESPONSE"),
        ("END_TXN", {"request_id": 7, "txn_action": 0}, "END_TXN_RESPONSE"),
        ("GROUP_STATUS", {"request_id": 7, "application": "a"}, "GROUP_STATUS_RESPONSE"),
        ("SCALABLE_TOPIC_LOOKUP", {"session_id": 7, "topic": "topic://a/b/c"}, None),
        ("WATCH_SCALABLE_TOPICS", {"watch_id": 7, "namespace": "a/b"}, None),
        ("WATCH_TC_ASSIGNMENTS", {"watch_id": 7}, None),
    ],
)
def test_what_is_not_there_is_refused(
    type_name: str, fields: dict[str, object], reply: str | None
) -> None:
    async def scene() -> None:
        link = Link()
        await link.connect()
        link.send(type_name, **fields)
        ((name, body),) = await link.received()
        assert reply in (None, name)
        assert body.error == WireCode.NOT_ALLOWED
        assert 7 in [getattr(body, each) for each in fields if hasattr(body, each)]
        assert not link.wire.is_closing()
        await link.close()

    run(scene())


def test_every_request_has_a_refusal_and_every_command_a_handler() -> None:
    handled = HANDLERS.at_once.keys() | HANDLERS.requests.keys() | {TYPES["SEND"]}
    assert handled == SENT_BY[Side.CLIENT]
    unanswered = {
        TYPES["SCALABLE_TOPIC_CLOSE"],
        TYPES["WATCH_SCALABLE_TOPICS_CLOSE"],
        TYPES["WATCH_TC_ASSIGNMENTS_CLOSE"],
    }
    for number in HANDLERS.requests.keys() - unanswered:
        body = getattr(pb.BaseCommand(), NAMES[number].lower())
        assert refusal(number, body, ValueError("a bug")), NAMES[number]


def test_a_bug_in_a_handler_is_answered_as_unknown() -> None:
    async def broken(session: Session, body: Any) -> None:
        raise ValueError("never shown to a client")

    async def scene() -> None:
        handlers = Handlers(HANDLERS.at_once, {TYPES["LOOKUP"]: broken})
        link = Link(handlers=handlers)
        await link.connect()
        link.send("LOOKUP", topic="x", request_id=3)
        ((name, body),) = await link.received()
        assert (name, body.request_id, body.error) == ("LOOKUP_RESPONSE", 3, WireCode.UNKNOWN)
        assert "never" not in body.message
        await link.close()

    run(scene())


def test_requests_stop_the_reading_at_their_limit_until_half_are_answered() -> None:
    gate = asyncio.Semaphore(0)

    async def slow(session: Session, body: Any) -> None:
        await gate.acquire()
        session.succeed(body.request_id)

    async def scene() -> None:
        handlers = Handlers(HANDLERS.at_once, {TYPES["LOOKUP"]: slow})
        link = Link(handlers=handlers, limits=Limits(connection_requests_max=4))
        await link.connect()
        for number in range(4):
            assert link.wire.is_read
            link.send("LOOKUP", topic="x", request_id=number)
        assert not link.wire.is_read
        gate.release()
        assert len(await link.received()) == 1
        assert not link.wire.is_read
        gate.release()
        assert len(await link.received()) == 1
        assert link.wire.is_read
        gate.release()
        gate.release()
        await link.close()

    run(scene())


def test_one_read_of_many_commands_is_carried_out_over_several_turns() -> None:
    handled: list[int] = []

    def note(session: Session, body: Any) -> None:
        handled.append(body.consumer_id)

    async def scene() -> None:
        handlers = Handlers({**HANDLERS.at_once, TYPES["FLOW"]: note}, HANDLERS.requests)
        link = Link(handlers=handlers)
        await link.connect()
        flows = [
            command("FLOW", consumer_id=each, messagePermits=1) for each in range(1, MANY_COMMANDS)
        ]
        begun = _begun_frame(5_000_000, 600)
        link.session.data_received(b"".join(flows) + begun)
        # Neither parsed nor handled at once, and nothing more is read meanwhile.
        assert 0 < len(handled) <= MANY_COMMANDS // 4
        assert not link.wire.is_read
        turns = 0
        while len(handled) < len(flows):
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 3
        assert handled == list(range(1, MANY_COMMANDS))
        # What is left is an unfinished frame, and counts as one.
        await asyncio.sleep(0)
        assert link.context.frames.held_bytes == len(begun)
        assert link.wire.is_read
        await link.close()

    run(scene())


def test_a_client_that_takes_nothing_is_not_read_nor_judged() -> None:
    async def scene() -> None:
        link = Link()
        await link.connect()
        link.session.pause_writing()
        assert not link.wire.is_read
        assert await is_alive(link.session, Limits())
        link.session.resume_writing()
        assert link.wire.is_read
        await link.close()

    run(scene())


def test_a_client_that_takes_nothing_for_an_interval_is_closed() -> None:
    async def scene() -> None:
        link = Link()
        await link.connect()
        link.session.pause_writing()
        await asyncio.sleep(59)
        link.wire.writes.clear()  # it took something
        await asyncio.sleep(30)
        assert not link.wire.is_closing()
        await link.session.ended.wait()
        assert asyncio.get_running_loop().time() == pytest.approx(90)

    run(scene())


def test_what_one_turn_brings_is_one_write() -> None:
    async def scene() -> None:
        link = Link()
        await link.connect()
        before = len(link.wire.writes)
        for _ in range(5):
            link.send("PING")
        assert len(await link.received()) == 5
        assert len(link.wire.writes) == before + 1
        await link.close()

    run(scene())


def test_connections_above_the_limit_are_closed() -> None:
    async def scene() -> None:
        limits = Limits(connections_max=1)
        first = Link(limits=limits)
        second = Link(context=first.context)
        await second.session.ended.wait()
        assert first.context.sessions == {first.session}
        await first.connect()
        await first.close()
        assert not first.context.sessions

    run(scene())


def _begun_frame(total: int, sent: int) -> bytes:
    return struct.pack(">I", total) + bytes(sent - 4)


def test_unfinished_frames_of_all_connections_have_one_budget() -> None:
    async def scene() -> None:
        limits = Limits(unfinished_frame_bytes=1_000_000)
        links = [Link(limits=limits)]
        links += [Link(context=links[0].context) for _ in range(9)]
        for link in links:
            await link.connect()
            link.session.data_received(_begun_frame(5_000_000, 300_000))
        # Three fit: the frames that began first are the ones that do not come to an end.
        assert [link.wire.is_closing() for link in links] == [True] * 7 + [False] * 3
        assert links[0].context.frames.held_bytes == 900_000
        assert sum(link.session.wire.buffered_bytes for link in links) == 900_000
        ((name, error),) = await links[0].received()
        assert (name, error.error) == ("ERROR", WireCode.TOO_MANY_REQUESTS)
        assert "unfinished_frame_bytes" in error.message
        for link in links[7:]:
            await link.close()
        assert links[0].context.frames.held_bytes == 0

    run(scene())


def test_a_frame_that_ends_leaves_the_budget_and_is_young_again() -> None:
    async def scene() -> None:
        ping = base_command("PING").SerializeToString()
        frame = struct.pack(">II", 4 + len(ping), len(ping)) + ping
        first = Link(limits=Limits(unfinished_frame_bytes=1000))
        second = Link(context=first.context)
        for link in (first, second):
            await link.connect()
        first.session.data_received(frame[:6])
        second.session.data_received(_begun_frame(5000, 600))
        assert first.context.frames.held_bytes == 606
        first.session.data_received(frame[6:])
        assert [name for name, _ in await first.received()] == ["PONG"]
        assert first.context.frames.held_bytes == 600
        # Now the second one's is the older, whichever brings the bytes that are too many.
        first.session.data_received(_begun_frame(5000, 600))
        assert (first.wire.is_closing(), second.wire.is_closing()) == (False, True)
        await first.close()

    run(scene())


def test_back_pressure_is_not_held_against_an_unfinished_frame() -> None:
    async def scene() -> None:
        held = Link(limits=Limits(unfinished_frame_bytes=1000))
        other = Link(context=held.context)
        for link in (held, other):
            await link.connect()
        held.session.data_received(_begun_frame(5000, 600))
        held.session.pause_writing()  # and it is not read
        other.session.data_received(_begun_frame(5000, 600))
        assert (held.wire.is_closing(), other.wire.is_closing()) == (False, True)
        await held.close()

    run(scene())


def test_a_byte_now_and_then_does_not_keep_a_frame_beyond_its_deadline() -> None:
    async def scene() -> None:
        link = Link(limits=Limits(connection_frame_seconds=100))
        await link.connect()
        link.session.data_received(_begun_frame(5000, 5))
        # The wait for a frame begins anew where the server did not read.
        await asyncio.sleep(50)
        link.session.pause_writing()
        link.session.resume_writing()
        while not link.wire.is_closing():
            link.session.data_received(b"x")
            await asyncio.sleep(10)
        # With the first ping behind the deadline.
        assert 150 <= asyncio.get_running_loop().time() <= 190

    run(scene())
