"""The compaction of a topic: what is left of it, what readers get, and what is kept for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from magnetar.broker.compact.compaction_state import CompactionState
from magnetar.broker.dispatch.consumer import News
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.values import DispatchRate
from magnetar.broker.subscribe.ack import Ack
from magnetar.broker.topic.topic import Topic, TopicParts
from magnetar.errors import Conflict, CorruptMetadata, DiskFailed, LedgerMissing, NotAllowed
from magnetar.ledger.api import NO_ENTRY
from magnetar.ledger.memory import Operation
from magnetar.managed_ledger.managed_ledger import EARLIEST
from magnetar.model.ids import MessageId, Position
from magnetar.model.subscriptions import COMPACTION, SubscriptionType
from magnetar.runtime.limits import Limits
from magnetar.testing.virtual.virtual_time import run
from magnetar.wire.compression import Compression
from magnetar.wire.messages import metadata_of
from tests.unit.broker.compact_world import (
    Row,
    Table,
    compact,
    compacted,
    folded,
    read,
    rows_in,
    trim,
)
from tests.unit.broker.world import World, consumer, entry, settled

SMALL = Limits(managed_ledger_ledger_entries=5)


def with_table(scenario: Callable[[World, Table], Awaitable[None]], limits: Limits = SMALL) -> None:
    async def main() -> None:
        world = World(limits)
        topic = await world.topic()
        await scenario(world, await Table.of(topic))
        await topic.close()

    run(main())


async def ledgers_in(parts: TopicParts) -> set[int]:
    return {each async for each in parts.ledgers.list()}


async def check_no_orphans(topic: Topic, parts: TopicParts) -> None:
    known = {span.ledger_id for span in topic.ledger.ledger_spans} | set(topic.compaction.ledgers)
    # One that was made in the instant before a kill has nothing in it (ARCHITECTURE.md).
    for ledger_id in await ledgers_in(parts) - known:
        assert (await parts.ledgers.info(ledger_id)).last_entry == NO_ENTRY
    assert known <= await ledgers_in(parts)


def test_a_reader_gets_the_last_message_of_each_key_and_then_the_log() -> None:
    async def scenario(world: World, table: Table) -> None:
        topic = table.topic
        assert topic.compaction.report.status == "NOT_RUN"
        await table.put(("a", b"1"), ("b", b"1"), ("a", b"2"), (None, b"x"))
        second = await table.put(("c", b"1"), ("b", b""), ("d", b"1"), kind=Compression.ZSTD)
        third = await table.put(("e", b"1"))
        await table.put((None, b"dropped"))
        await table.put(("c", b"2"))
        await compact(topic)
        assert topic.stats().compaction.last_compaction_removed_event_count == 10 - 4
        late = await table.put(("e", b"2"))
        found = await read(topic)
        assert [(*row[:2], row.place) for row in found] == [
            ("a", b"2", 2),
            ("d", b"1", 2),
            ("e", b"1", -1),
            ("c", b"2", -1),
            ("e", b"2", -1),
        ]
        assert [row.position for row in found][1:3] == [second, third]
        assert found[-1].position == late
        # Others get everything.
        await topic.create_subscription("all", EARLIEST)
        assert topic.subscriptions["all"].backlog() == 6

    with_table(scenario)


def test_a_reader_begins_in_the_view_though_the_log_was_trimmed() -> None:
    async def scenario(world: World, table: Table) -> None:
        topic = table.topic
        await table.put_all((f"k{number % 7}", b"%d" % number) for number in range(23))
        await compact(topic)
        await settled(lambda: topic.ledger.ledger_spans[0].closed)
        assert await trim(topic)
        assert topic.ledger.first_position() > Position(1, 4)
        found = await read(topic)
        assert folded(found) == table.values
        assert len(found) == 7
        # From a message on that the log has no more: that one, and what is later.
        first, second = found[0].position, found[1].position
        assert first < topic.ledger.first_position()
        for start, expected in ((first, found), (second, found[1:]), (first.next, found[1:])):
            request = compacted(start=MessageId(start.ledger_id, start.entry_id))
            assert await read(topic, request) == expected
        # From the end on: nothing.
        request = compacted("tail", start=MessageId(*found[-1].position))
        assert await read(topic, request) == found[-1:]

    with_table(scenario)


def test_the_last_message_id_is_one_that_a_compacted_reader_gets() -> None:
    async def scenario(world: World, table: Table) -> None:
        topic = table.topic
        assert await topic.last_message(compacted=True) == (Position(-1, -1), -1)
        place = await table.put(("a", b"1"), ("b", b"1"), ("c", b"1"), ("c", b""))
        last = await table.put(("d", b""))
        assert await topic.last_message(compacted=True) == (last, -1), "not compacted yet"
        await compact(topic)
        assert await topic.last_message(compacted=True) == (place, 1)
        assert await topic.last_message() == (last, -1)
        later = await table.put(("e", b"1"))
        assert await topic.last_message(compacted=True) == (later, -1)
        await table.put(("e", b""))
        await table.put(("a", b""), ("b", b""))
        await compact(topic)
        assert await topic.last_message(compacted=True) == (Position(-1, -1), -1)
        assert await read(topic) == []

    with_table(scenario)


def test_a_run_without_news_changes_nothing_and_two_at_once_are_refused() -> None:
    async def scenario(world: World, table: Table) -> None:
        topic = table.topic
        await compact(topic)
        assert topic.compacted is None
        await table.put(("a", b"1"))
        topic.compaction.begin()
        assert topic.compaction.report.status == "RUNNING"
        with pytest.raises(Conflict):
            topic.compaction.begin()
        with pytest.raises(NotAllowed, match="is being compacted"):
            await topic.delete_subscription(COMPACTION)
        await topic.compaction.ended()
        view = topic.compacted
        assert view is not None
        await compact(topic)
        assert topic.compacted is view

    with_table(scenario)


def test_what_is_not_committed_is_not_compacted() -> None:
    async def scenario(world: World, table: Table) -> None:
        topic = table.topic
        for number in range(4):
            await table.put((f"k{number}", b"1"))
        positions = [each.position for each in await topic.ledger.read(Position(0, 0), 10)]
        hidden, end = positions[1], positions[2]
        topic.max_read_position = lambda: end
        topic.is_visible = lambda entry: entry.position != hidden
        await compact(topic)
        assert topic.compacted is not None
        assert topic.compacted.horizon == end
        found = [each async for page in topic.compacted.pages() for each in page]
        assert [each.position for each in found] == [positions[0], positions[2]]

    with_table(scenario)


def test_what_cannot_be_read_stays() -> None:
    async def scenario(world: World, table: Table) -> None:
        topic = table.topic
        await table.put(("a", b"1"))
        broken = entry(7, "no batch of two", batch=2)
        position = await topic.ledger.append(broken)
        await topic.ledger.append(b"no metadata")
        await table.put(("a", b"2"))
        await compact(topic)
        assert topic.compacted is not None
        found = [each async for page in topic.compacted.pages() for each in page]
        assert [each.payload for each in found][:2] == [broken, b"no metadata"]
        assert found[0].position == position
        assert len(found) == 3
        # Once more, from the view.
        await table.put(("a", b"3"))
        await compact(topic)
        again = [each async for page in topic.compacted.pages() for each in page]
        assert again[:2] == found[:2]
        assert len(again) == 3

    with_table(scenario)


@pytest.mark.parametrize("seed", range(8))
def test_histories_of_compactions_trims_and_restarts(seed: int) -> None:
    """A reader knows the last value of every key, whatever came between."""

    async def main() -> None:
        chance = Random(seed)
        world = World(SMALL)
        parts = world.parts()
        topic = await world.topic(parts)
        table = await Table.of(topic)
        kinds = list(Compression)
        for step in range(60):
            match chance.choice(
                ("put", "put", "put", "compact", "trim", "restart", "kill", "read")
            ):
                case "put":
                    rows = [
                        (f"k{chance.randrange(9)}", chance.choice((b"", b"%d" % step)))
                        for _ in range(chance.choice((1, 1, 3, 8)))
                    ]
                    await table.put(*rows, kind=chance.choice(kinds))
                case "compact":
                    await compact(topic)
                case "trim" if COMPACTION in topic.subscriptions:
                    await trim(topic)
                case "restart" | "kill" as how:
                    known = table.values
                    if how == "restart":
                        await topic.close()
                    world.kill(parts)
                    parts = world.parts()
                    topic = await world.topic(parts)
                    table = await Table.of(topic)
                    table.values = known
                case "read":
                    found = await read(topic)
                    assert folded(found) == table.values
        await compact(topic)
        found = await read(topic)
        assert {row.key: row.value for row in found} == table.values
        await check_no_orphans(topic, parts)
        await topic.close()

    run(main())


def test_nothing_is_trimmed_before_it_was_compacted() -> None:
    async def scenario(world: World, table: Table) -> None:
        topic = table.topic
        await topic.compaction.keep_all()
        await table.put_all((f"k{number}", b"1") for number in range(12))
        assert await trim(topic) == []
        await compact(topic)
        await table.put_all((f"l{number}", b"1") for number in range(12))
        gone = await trim(topic)
        assert gone
        assert folded(await read(topic)) == table.values
        # It goes with its cursor, and the log is free again.
        view = topic.compacted
        assert view is not None
        await topic.delete_subscription(COMPACTION)
        assert topic.compacted is None
        assert topic.compaction.ledgers == ()
        with pytest.raises(LedgerMissing):
            await view.read(Position(0, 0), 1)

    with_table(scenario)


def test_who_reads_while_the_view_is_replaced_misses_nothing() -> None:
    async def scenario(world: World, table: Table) -> None:
        topic = table.topic
        await table.put_all((f"k{number}", b"1") for number in range(30))
        await compact(topic)
        request = compacted()
        subscription = await topic.subscription(request)
        reader = subscription.add_consumer(request)
        rows: list[Row] = []
        while not rows or rows[-1].position != topic.max_read_position():
            reader.flow(1)
            await settled(lambda: reader.outbox_entries > 0)
            rows += [row for each in reader.take() for row in rows_in(each)]
            if len(rows) % 10 == 4 and len(rows) < 30:
                await table.put((f"k{len(rows) + 2}", b"2"))
                await compact(topic)
                await trim(topic)
        assert folded(rows) == table.values

    with_table(scenario)


def test_a_durable_subscription_reads_on_where_it_was() -> None:
    async def scenario(world: World, table: Table) -> None:
        topic = table.topic
        await table.put_all((f"k{number}", b"1") for number in range(12))
        await compact(topic)
        kind = SubscriptionType.FAILOVER
        assert len(await read(topic, compacted("s", kind, durable=True))) == 12
        await table.put(("k0", b"2"))
        await compact(topic)
        found = await read(topic, compacted("s", kind, durable=True))
        assert [row[:2] for row in found] == [("k0", b"2")]

    with_table(scenario)


def test_clients_are_told_twice_what_was_compacted_out() -> None:
    async def scenario(world: World, table: Table) -> None:
        topic = table.topic
        rows = [(f"k{number}", b"1") for number in range(5)]
        await table.put(*rows)
        await table.put(("k1", b"2"))
        await table.put(("k3", b""), ("k9", b"1"))
        await compact(topic)
        request = compacted("s", durable=True)
        subscription = await topic.subscription(request)
        reader = subscription.add_consumer(request)
        reader.flow(100)
        await settled(lambda: reader.outbox_entries == 3)
        first, second, third = reader.take()
        told = [(each.num_messages, each.ack_set) for each in (first, second, third)]
        assert told == [(3, (0b10101,)), (1, ()), (1, (0b10,))]
        # Of what was acknowledged before, only the rest that there is.
        subscription.ack(reader, [Ack(first.position, 0b10000)])
        subscription.redeliver(reader)
        await settled(lambda: reader.outbox_entries == 3)
        assert [each.ack_set for each in reader.take()] == [(0b10000,), (), (0b10,)]
        subscription.ack(reader, [Ack(first.position, 0b01010)])
        subscription.redeliver(reader)
        await settled(lambda: reader.outbox_entries == 2)

    with_table(scenario)


def test_a_seek_by_time_finds_what_only_the_view_has() -> None:
    async def scenario(world: World, table: Table) -> None:
        topic = table.topic
        await table.put_all((f"k{number}", b"1") for number in range(23))
        await compact(topic)
        assert await trim(topic)
        found = await read(topic)
        request = compacted("seeking")
        subscription = await topic.subscription(request)
        subscription.add_consumer(request)
        wanted = found[3]
        assert wanted.position < topic.ledger.first_position()
        assert topic.compacted is not None
        (stored,) = await topic.compacted.read(wanted.position, 1)
        await subscription.seek_time(metadata_of(stored.payload).publish_time)
        reader = subscription.add_consumer(request)
        reader.flow(1000)
        rows: list[object] = []

        def has_all() -> bool:
            rows.extend(row for each in reader.take() for row in rows_in(each))
            return len(rows) == len(found) - 3

        await settled(has_all)
        assert rows == found[3:]

    with_table(scenario)


@pytest.mark.parametrize("rate", [0, 1000])
def test_a_terminated_topic_ends_behind_its_view(rate: int) -> None:
    async def scenario(world: World, table: Table) -> None:
        topic = table.topic
        await topic.apply(TopicPolicies(dispatch_rate=DispatchRate(rate)))
        await table.put_all((f"k{number}", b"1") for number in range(12))
        await compact(topic)
        await topic.terminate()
        await topic.trim()
        assert topic.ledger.entries == 0
        request = compacted()
        subscription = await topic.subscription(request)
        reader = subscription.add_consumer(request)
        reader.flow(5)
        await settled(lambda: reader.outbox_entries == 5)
        assert News.REACHED_END not in reader.take_news()
        rows = [row for each in reader.take() for row in rows_in(each)]
        reader.flow(50)
        await settled(lambda: reader.outbox_entries == 7)
        rows += [row for each in reader.take() for row in rows_in(each)]
        assert folded(rows) == table.values
        await settled(lambda: News.REACHED_END in reader.take_news())

    with_table(scenario)


@pytest.mark.parametrize("operation", ["create", "append", "read"])
def test_a_failed_run_leaves_everything_as_it_was(operation: Operation) -> None:
    async def scenario(world: World, table: Table) -> None:
        topic = table.topic
        await table.put_all((f"k{number % 3}", b"1") for number in range(12))
        await compact(topic)
        await table.put(("k0", b"2"))
        before = topic.compaction.ledgers
        world.ledgers.fail_next(DiskFailed("no"), operation=operation)
        topic.compaction.begin()
        await topic.compaction.ended()
        report = topic.compaction.report
        assert (report.status, report.failures) == ("ERROR", 1)
        assert report.last_error.startswith("no (")
        assert topic.stats().compaction.last_compaction_failed_timestamp
        assert topic.compaction.ledgers == before
        assert folded(await read(topic)) == table.values
        await compact(topic)
        assert report.failures == 0

    with_table(scenario)


def test_a_bug_in_a_run_is_reported_and_no_end_of_it_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(world: World, table: Table) -> None:
        topic = table.topic
        await table.put(("a", b"1"))
        visible, topic.is_visible = topic.is_visible, lambda entry: bool(1 // 0)
        topic.compaction.begin()
        await topic.compaction.ended()
        assert topic.compaction.report.status == "ERROR"
        assert "ZeroDivisionError" in topic.compaction.report.last_error
        assert "compaction-crashed" in caplog.text
        topic.is_visible = visible
        await compact(topic)

    with_table(scenario)


def test_a_view_that_could_not_be_deleted_goes_later() -> None:
    async def scenario(world: World, table: Table) -> None:
        topic = table.topic
        await table.put(("a", b"1"))
        await compact(topic)
        await table.put(("a", b"2"))
        world.ledgers.fail_next(DiskFailed("no"), operation="delete")
        await compact(topic)
        assert len(topic.compaction.ledgers) == 2
        assert folded(await read(topic)) == table.values
        await compact(topic)
        assert len(topic.compaction.ledgers) == 1

    with_table(scenario)


def test_a_topic_with_too_many_keys_says_so() -> None:
    async def scenario(world: World, table: Table) -> None:
        await table.put_all((f"k{number}", b"1") for number in range(12))
        table.topic.compaction.begin()
        await table.topic.compaction.ended()
        report = table.topic.compaction.report
        assert report.status == "ERROR"
        assert "more than 10 keys" in report.last_error
        assert table.topic.compaction.ledgers == ()

    with_table(scenario, Limits(compaction_keys=10))


def test_one_topic_is_compacted_at_a_time_and_unloading_ends_it() -> None:
    async def main() -> None:
        world = World(Limits(compaction_messages_per_second=100))
        parts = world.parts()
        topic = await world.topic(parts)
        table = await Table.of(topic)
        for number in range(20):
            await table.put(*((f"k{each}", b"%d" % number) for each in range(100)))
        async with parts.compaction_turns:
            topic.compaction.begin()
            await asyncio.sleep(60)
            assert topic.compaction.running, "it waits for its turn"
        await asyncio.sleep(1)
        assert topic.compaction.running
        await topic.close()
        assert topic.compaction.report.status == "ERROR"
        assert "being unloaded" in topic.compaction.report.last_error
        topic = await world.topic(parts)
        async with parts.compaction_turns:
            topic.compaction.begin()
            await asyncio.sleep(0.1)
            await topic.close()
        topic = await world.topic(parts)
        await check_no_orphans(topic, parts)
        await topic.delete()
        assert not await ledgers_in(parts)

    run(main())


def test_a_deleted_topic_takes_its_view_along() -> None:
    async def main() -> None:
        world = World(SMALL)
        parts = world.parts()
        topic = await world.topic(parts)
        table = await Table.of(topic)
        await table.put(("a", b"1"))
        await compact(topic)
        assert len(await ledgers_in(parts)) == 2
        await topic.delete(force=True)
        assert not await ledgers_in(parts)

    run(main())


def test_the_state_is_what_the_cursor_says() -> None:
    state = CompactionState(7, Position(3, 4), (5, 6))
    kept = {"mine": "1"}
    assert CompactionState.of(state.within(kept)) == state
    assert CompactionState().within(state.within(kept)) == kept
    assert CompactionState(dropping=(9,)).within({}) == {"CompactionDropping": "9"}
    assert state.ledgers == (5, 6, 7)
    for broken in ({"CompactedTopicLedger": "7"}, {"CompactionDropping": "x"}):
        with pytest.raises(CorruptMetadata):
            CompactionState.of(broken)


def test_its_position_is_nobodys_subscription() -> None:
    async def scenario(world: World, table: Table) -> None:
        topic = table.topic
        await topic.compaction.keep_all()
        with pytest.raises(NotAllowed, match="position of the topic's compaction"):
            await topic.subscription(consumer(COMPACTION))
        with pytest.raises(NotAllowed, match="properties of its own"):
            await topic.subscriptions[COMPACTION].change_properties({})
        with pytest.raises(NotAllowed, match="compaction alone"):
            await topic.subscriptions[COMPACTION].move_to(Position(1, 0))

    with_table(scenario)
