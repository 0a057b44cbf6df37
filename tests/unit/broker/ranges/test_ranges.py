"""Ranges of one topic: what is trimmed or sealed meanwhile, counts, cuts, times, cursors."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.broker.ranges import sizes
from magnetar.broker.ranges.cursors import move_cursor
from magnetar.broker.ranges.read import read_page
from magnetar.broker.ranges.view import RangeView
from magnetar.broker.topic.topic import Topic
from magnetar.errors import ConsumerBusy, NotAllowed, RangeLost
from magnetar.ledger.api import Entry
from magnetar.managed_ledger.ledger_list import Retention
from magnetar.managed_ledger.managed_ledger import EARLIEST, ManagedLedger
from magnetar.model.ids import Position
from magnetar.model.isolation import ReadIsolation
from magnetar.model.ranges import ORIGIN, RangePosition
from magnetar.runtime.limits import Limits
from tests.unit.broker.txn_world import (
    T1,
    TxnWorld,
    attach,
    in_txn_world,
    joined,
    publish,
    quiet,
    text_of,
)
from tests.unit.broker.world import EPOCH_MS, entry, message, receipts

SMALL = Limits(managed_ledger_ledger_entries=2)


def view_of(topic: Topic) -> RangeView:
    return RangeView(topic, ReadIsolation.COMMITTED)


def keep_nothing(topic: Topic) -> None:
    topic.policies = topic.policies.__class__(retention=Retention(0, 0))


async def texts(view: RangeView, start: RangePosition, end: RangePosition) -> list[str]:
    page = await read_page(view, start, end, Limits())
    assert page.is_exhausted
    return [text_of(each.payload) for each in page.entries]


async def send_many(topic: Topic, count: int, *, batch: int | None = None) -> None:
    producer = await joined(topic)
    for number in range(count):
        producer.send(message(number, f"m{number}", batch=batch))
    await receipts(producer, count)
    await topic.remove_producer(producer)


# --- what happens while a range is read


@pytest.mark.parametrize("checked", [True, False])
def test_what_is_trimmed_while_it_is_read_is_not_skipped(
    checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check after the read, committed messages would be missing silently."""

    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        await broker.begin(T1)
        await publish(await joined(topic), T1, "a", "b", "c", "d", "e", "f")
        await broker.commit(T1)
        await quiet()
        keep_nothing(topic)
        view, read = view_of(topic), ManagedLedger.read
        stable = view.stable()
        assert await texts(view, ORIGIN, stable) == list("abcdef")

        async def trimmed_meanwhile(
            self: ManagedLedger, at: Position, entries_max: int, bytes_max: int
        ) -> list[Entry]:
            found = await read(self, at, entries_max, bytes_max)
            await topic.trim()
            return found

        with monkeypatch.context() as patch:
            patch.setattr(ManagedLedger, "read", trimmed_meanwhile)
            if checked:
                with pytest.raises(RangeLost):
                    await texts(view, ORIGIN, stable)
                return
            patch.setattr(RangeView, "check_kept", lambda *_: None)
            assert await texts(view, ORIGIN, stable) != list("abcdef"), "that is the harm"

    in_txn_world(scenario, SMALL)


def test_a_position_at_the_end_of_what_was_trimmed_is_not_lost() -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        await send_many(topic, 4)
        behind = view_of(topic).stable()
        keep_nothing(topic)
        await topic.close()
        topic = await world.broker().topic()
        keep_nothing(topic)
        await topic.trim()
        view = view_of(topic)
        assert topic.ledger.entries == 0
        assert (view.first(), view.stable()) == (behind, behind)
        assert not view.has_more(behind)
        await send_many(topic, 1)
        assert view.first() == behind
        assert view.has_more(behind)
        assert await texts(view, behind, view.stable()) == ["m0"]
        with pytest.raises(RangeLost, match="begins at"):
            await texts(view, RangePosition(behind.ledger, behind.entry - 1), view.stable())

    in_txn_world(scenario, SMALL)


def test_a_sealed_topic_is_final_once_nothing_in_it_is_undecided() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        await broker.begin(T1)
        producer = await joined(topic)
        await publish(producer, None, "a")
        await publish(producer, T1, "b", first=1)
        view = view_of(topic)
        before = view.state()
        await topic.terminate()
        assert view.state() == before
        assert not before.is_sealed
        seen = topic.readable.version
        await broker.commit(T1)
        await topic.readable.past(seen)
        after = view.state()
        assert after.is_sealed
        assert await texts(view, before.stable, after.stable) == ["b"]

    in_txn_world(scenario)


def test_an_end_that_cannot_be_read_is_refused() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        await broker.begin(T1)
        producer = await joined(topic)
        await publish(producer, None, "a")
        await publish(producer, T1, "b", first=1)
        view = view_of(topic)
        with pytest.raises(NotAllowed, match="undecided"):
            await texts(view, ORIGIN, view.tail())
        with pytest.raises(RangeLost, match="made anew"):
            await texts(view, ORIGIN, RangePosition(view.tail().ledger + 1, 0))
        with pytest.raises(NotAllowed, match="cannot begin"):
            await texts(view, view.stable(), ORIGIN)

    in_txn_world(scenario)


# --- how much there is


@pytest.mark.parametrize("batch", [None, 7])
def test_long_ranges_are_estimated(batch: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "EXACT_ENTRIES", 100)

    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        await send_many(topic, 1000, batch=batch)
        view = view_of(topic)
        found = await sizes.count(view, ORIGIN, view.stable())
        assert not found.is_exact
        assert found.messages == 1000 * (batch or 1)
        assert found.bytes == pytest.approx(topic.ledger.size_bytes, rel=0.01)
        middle = sizes.pieces(view, ORIGIN, view.stable(), 2)[0]
        exact = 50 * (batch or 1)
        found = await sizes.count(view, middle, RangePosition(middle.ledger, middle.entry + 50))
        assert (found.messages, found.is_exact) == (exact, True)

    in_txn_world(scenario)


def test_a_long_range_of_aborted_messages_does_not_count_as_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It might hold a message that no sample met."""
    monkeypatch.setattr(sizes, "EXACT_ENTRIES", 10)

    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        await broker.begin(T1)
        await publish(await joined(topic), T1, *map(str, range(50)))
        await broker.abort(T1)
        await quiet()
        view = view_of(topic)
        assert (await sizes.count(view, ORIGIN, view.stable())).messages == 1
        assert await texts(view, ORIGIN, view.stable()) == []

    in_txn_world(scenario)


def test_others_have_their_turn_while_a_range_is_walked() -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        await send_many(topic, 3000)
        view = view_of(topic)
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await sizes.cut(view, ORIGIN, view.stable(), Limits(), messages_max=3000, bytes_max=None)
        assert turns >= 5
        task.cancel()

    in_txn_world(scenario)


def test_a_walk_that_takes_long_answers_with_a_part() -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        await send_many(topic, 100, batch=3)
        view, limits = view_of(topic), Limits(range_scan_entries=30)
        at, taken, parts = ORIGIN, 0, 0
        while True:
            found = await sizes.cut(
                view, at, view.stable(), limits, messages_max=200 - taken, bytes_max=None
            )
            at, taken, parts = found.position, taken + found.messages, parts + 1
            if not found.is_partial:
                break
        assert (taken, at.batch_index, parts) == (200, 2, 3)

    in_txn_world(scenario)


def test_positions_by_time() -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        positions = [
            await topic.ledger.append(entry(number, publish_time=EPOCH_MS + number * 10))
            for number in range(10)
        ]
        view = view_of(topic)
        at = [await sizes.at_time(view, EPOCH_MS + ms) for ms in (-5, 0, 1, 40, 90, 91)]
        assert at == [
            *map(RangePosition.before, (positions[0], positions[0], positions[1], positions[4])),
            RangePosition.before(positions[9]),
            view.stable(),
        ]

    in_txn_world(scenario, SMALL)


# --- a cursor that follows


def test_a_cursor_follows_and_never_goes_back() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        await send_many(topic, 4, batch=3)
        view = view_of(topic)
        at = view.stable()
        await topic.create_subscription("spark", EARLIEST)
        subscription = topic.subscriptions["spark"]
        assert subscription.backlog() == 4

        async def move(position: RangePosition | None) -> int:
            await move_cursor(view, topic.name, subscription, position)
            return subscription.backlog()

        assert await move(ORIGIN) == 4
        assert await move(RangePosition(at.ledger, 1, 2)) == 3
        assert subscription.cursor.unacked_indexes(Position(at.ledger, 1)) == 0b100
        assert await move(RangePosition(at.ledger, 1)) == 3
        assert subscription.cursor.unacked_indexes(Position(at.ledger, 1)) == 0b100
        assert await move(RangePosition(at.ledger, 3)) == 1
        assert await move(RangePosition(at.ledger, 2)) == 1, "never back"
        broker.kill()
        other = await world.broker().topic()
        assert other.subscriptions["spark"].backlog() == 1, "it was durable"

    in_txn_world(scenario)


def test_a_cursor_moves_to_an_end_that_there_is() -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        await send_many(topic, 2)
        view = view_of(topic)
        await topic.create_subscription("spark", EARLIEST)
        subscription = topic.subscriptions["spark"]
        beyond = RangePosition(view.stable().ledger, 9)
        with pytest.raises(NotAllowed, match="no cursor can be moved"):
            await move_cursor(view, topic.name, subscription, beyond)
        with pytest.raises(NotAllowed, match="has no end yet"):
            await move_cursor(view, topic.name, subscription, None)
        assert subscription.backlog() == 2
        await topic.terminate()
        seen = topic.ends.version
        await move_cursor(view, topic.name, subscription, None)
        assert subscription.backlog() == 0
        assert await topic.ends.past(seen)

    in_txn_world(scenario)


def test_a_subscription_with_consumers_moves_by_itself() -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        await send_many(topic, 1)
        await attach(topic, "s")
        view = view_of(topic)
        with pytest.raises(ConsumerBusy, match="of its own"):
            await move_cursor(view, topic.name, topic.subscriptions["s"], view.stable())

    in_txn_world(scenario)
