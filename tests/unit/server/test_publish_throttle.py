"""The server's own back-pressure: closed when half the queue is full, open again at a quarter."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from magnetar.runtime.limits import Limits
from magnetar.runtime.signal import Signal
from magnetar.server.handles import ConsumerHandle
from magnetar.server.publish_throttle import ITEMS_PER_LOOP_TURN, PublishThrottle, ReadTurn
from magnetar.testing.virtual.virtual_time import run
from magnetar.wire.frames import command
from tests.unit.server.link import Link

LIMITS = Limits(journal_queue_bytes=1000)


class Queue:
    def __init__(self) -> None:
        self.progress = Signal()
        self.queued_bytes = 0

    def drain_to(self, size: int) -> None:
        self.queued_bytes = size
        self.progress.advance()


def test_it_closes_at_half_and_opens_at_a_quarter() -> None:
    async def scene() -> None:
        queue, changes = Queue(), list[bool]()
        publish_throttle = PublishThrottle(
            queue, LIMITS, lambda: changes.append(publish_throttle.is_open)
        )
        reopening = asyncio.create_task(publish_throttle.reopen_when_drained())
        for _ in range(2):
            queue.queued_bytes = 499
            assert publish_throttle.has_room()
            queue.queued_bytes = 500
            assert not publish_throttle.has_room()
            queue.drain_to(251)
            await asyncio.sleep(1)
            assert not publish_throttle.has_room()
            queue.drain_to(250)
            await asyncio.sleep(1)
            assert publish_throttle.has_room()
        assert changes == [False, True, False, True]
        reopening.cancel()

    run(scene())


def test_only_connections_with_producers_are_held() -> None:
    async def scene() -> None:
        publisher, other = Link(), Link()
        other.session.context = publisher.context
        publisher.context.admit(other.session)
        await publisher.connect()
        await other.connect()
        publisher.session.producers[1] = object()  # type: ignore[assignment]
        publish_throttle = publisher.context.publish_throttle
        publish_throttle.is_open = False
        publisher.send("PING")
        other.send("PING")
        assert not publisher.wire.is_read
        assert other.wire.is_read
        publish_throttle.is_open = True
        publisher.session.judge_reading()
        assert publisher.wire.is_read
        del publisher.session.producers[1]
        await publisher.close()
        await other.close()

    run(scene())


# --- a turn of the loop


def test_who_comes_late_in_a_turn_goes_on_in_the_next_ones_in_order() -> None:
    async def scene() -> None:
        turn, done = ReadTurn(), list[int]()

        def go_on(number: int) -> None:
            done.append(number)
            turn.spend(ITEMS_PER_LOOP_TURN // 2)

        turn.spend(ITEMS_PER_LOOP_TURN - 1)
        assert turn.has_room
        turn.spend(1)
        assert not turn.has_room
        for number in range(5):
            turn.later(partial(go_on, number))
        for expected in ([], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]):
            assert done == expected
            await asyncio.sleep(0)
        assert turn.has_room

    run(scene())


def test_one_that_fails_in_its_turn_takes_nobody_along() -> None:
    async def scene() -> None:
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what))
        turn, done = ReadTurn(), list[int]()
        turn.spend(ITEMS_PER_LOOP_TURN)
        turn.later(lambda: done.append(1 // 0))
        turn.later(lambda: done.append(1))
        for _ in range(3):
            await asyncio.sleep(0)
        assert done == [1]
        assert len(told) == 1

    run(scene())


@pytest.mark.parametrize("pieces", [1, 3])
def test_many_connections_share_a_turn(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each brings less than it may alone; all together bring ten turns' worth."""

    async def scene() -> int:
        first = Link()
        links = [first, *(Link(context=first.context) for _ in range(50))]
        for each in links:
            await each.connect()
            await each.received()
        handled: list[tuple[int, int]] = []
        monkeypatch.setattr(
            Consumers, "get", lambda held, number: handled.append((held.owner, number))
        )
        count = ITEMS_PER_LOOP_TURN // 5
        for owner, each in enumerate(links):
            each.session.consumers = Consumers(owner)
            sent = b"".join(
                command("FLOW", consumer_id=number, messagePermits=1) for number in range(count)
            )
            # In one read, or in several that end within frames.
            size = -(-len(sent) // pieces)
            for at in range(0, len(sent), size):
                each.session.data_received(sent[at : at + size])
        most = len(handled)
        while len(handled) < count * len(links):
            before = len(handled)
            await asyncio.sleep(0)
            most = max(most, len(handled) - before)
        for owner in range(len(links)):
            assert [each for who, each in handled if who == owner] == list(range(count))
        await asyncio.sleep(0)
        assert all(each.wire.is_read for each in links)
        assert first.context.frames.held_bytes == 0
        for each in links:
            await each.close()
        return most

    assert run(scene()) < 2 * ITEMS_PER_LOOP_TURN
    # Without the rule all of it is one turn.
    monkeypatch.setattr(ReadTurn, "has_room", True)
    assert run(scene()) > 5 * ITEMS_PER_LOOP_TURN


class Consumers(dict[int, ConsumerHandle]):
    """The consumers of a connection; they are asked for once for each FLOW."""

    def __init__(self, owner: int) -> None:
        super().__init__()
        self.owner = owner
