"""Acknowledgements in legacy transactions: the log, ends, recovery, seeks, deletion."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.broker.subscribe.legacy_txn_acks import LegacyTxnAcks
from magnetar.broker.topic.topic import Topic
from magnetar.errors import DiskFailed, ServiceNotReady, TooManyRequests, TransactionConflict
from magnetar.managed_ledger.names import CURSORS, MANAGED_LEDGERS
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.runtime.limits import Limits
from magnetar.txn.acks.ack_cleanup import AckCleanup
from magnetar.txn.legacy.pending_ack_log import PendingAckLog
from magnetar.wire.messages import TxnId
from tests.unit.broker.subscription_world import EXCLUSIVE, SHARED, Client, body_of, numbered
from tests.unit.broker.txn_ack_world import Stage, ack, play
from tests.unit.broker.txn_world import T1, cut, heal, quiet

L1, L2, L3 = (TxnId(0, number) for number in (1, 2, 3))


async def took(client: Client) -> list[str]:
    """What a client has got since the last time."""
    await quiet()
    return [body_of(each) for each in client.take()]


async def end(stage: Stage, txn: TxnId, *, commit: bool, low: int = -1) -> None:
    await stage.subscription.end_legacy(txn, commit=commit, low_watermark=low)
    await quiet()


def acks_of(stage: Stage) -> LegacyTxnAcks:
    assert stage.subscription._txn_acks is not None
    legacy = stage.subscription._txn_acks._legacy
    assert legacy is not None
    return legacy


async def log_entries(stage: Stage) -> int:
    """How many entries the subscription's log still has."""
    legacy = acks_of(stage)
    if legacy._log is None:
        return 0
    return len([each async for each in legacy._log.replay()])


async def ledgers(stage: Stage) -> list[str]:
    metadata = stage.world.metadata.connect()
    found = list(await metadata.scan_keys(MANAGED_LEDGERS))
    await metadata.close()
    return found


# --- commands and ends


def test_a_commit_acknowledges_and_an_abort_delivers_again() -> None:
    async def scenario(stage: Stage) -> None:
        client = stage.client(SHARED)
        assert await took(client) == numbered(5)
        await ack(client, L1, "0", "1")
        await ack(client, L2, "2")
        assert stage.subscription.backlog() == 5
        await end(stage, L1, commit=True)
        assert stage.subscription.backlog() == 3
        await end(stage, L2, commit=False)
        assert await took(client) == ["2"]
        assert await log_entries(stage) == 0
        await end(stage, L3, commit=True)  # it has acknowledged nothing
        assert stage.subscription._txn_acks is not None
        assert stage.subscription._txn_acks.ends == {"COMMITTED": 1, "ABORTED": 1}

    play(scenario)


def test_a_cumulative_one_reaches_up_to_its_message() -> None:
    async def scenario(stage: Stage) -> None:
        client = stage.client(EXCLUSIVE)
        await took(client)
        await ack(client, L1, "2", cumulative=True)
        with pytest.raises(TransactionConflict):
            await ack(client, L2, "3", cumulative=True)
        await end(stage, L1, commit=True)
        assert stage.subscription.backlog() == 2
        with pytest.raises(TransactionConflict):  # as v4 has it
            await ack(client, L2, "1", cumulative=True)

    play(scenario)


def test_the_kinds_stand_in_each_others_way() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client(SHARED)
        await took(client)
        await ack(client, L1, "0")
        await ack(client, T1, "1")
        for txn, body in ((T1, "0"), (L1, "1"), (L2, "0")):
            with pytest.raises(TransactionConflict):
                await ack(client, txn, body)
        await end(stage, L1, commit=True)
        await stage.broker.commit(T1)
        await quiet()
        assert stage.subscription.backlog() == 3

    play(scenario)


def test_what_has_ended_acknowledges_nothing_more() -> None:
    async def scenario(stage: Stage) -> None:
        client = stage.client(SHARED)
        await took(client)
        await ack(client, L1, "0")
        await end(stage, L1, commit=True)
        await end(stage, L1, commit=True)
        await end(stage, L3, commit=False, low=2)
        for txn in (L1, L2, L3):
            with pytest.raises(TransactionConflict):
                await ack(client, txn, "1")
        assert stage.subscription.backlog() == 4

    play(scenario)


def test_what_its_coordinator_knows_to_be_over_acknowledges_nothing() -> None:
    async def scenario(stage: Stage) -> None:
        client = stage.client(SHARED)
        await took(client)
        await ack(client, L1, "0")
        stage.broker.legacy.over = {L1, L2}
        for txn in (L1, L2):
            with pytest.raises(TransactionConflict, match="not open"):
                await ack(client, txn, "1")
        await end(stage, L1, commit=True)  # what it had acknowledged before counts
        assert stage.subscription.backlog() == 4
        await ack(client, L3, "1")

    play(scenario)


def test_the_acknowledgements_of_one_transaction_are_limited() -> None:
    async def scenario(stage: Stage) -> None:
        client = stage.client(SHARED)
        await took(client)
        await ack(client, L1, "0")
        second = asyncio.create_task(ack(client, L1, "1"))
        await asyncio.sleep(0)  # it is in flight, and counts
        with pytest.raises(TooManyRequests, match="txn_ack_records_max"):
            await ack(client, L1, "2")
        await second
        with pytest.raises(TooManyRequests, match="txn_ack_records_max"):
            await ack(client, L1, "2")
        await ack(client, L2, "2")
        await end(stage, L1, commit=True)
        assert stage.subscription.backlog() == 3

    play(scenario, limits=Limits(txn_ack_records_max=2))


def test_the_low_watermark_aborts_what_was_left() -> None:  # 59
    async def scenario(stage: Stage) -> None:
        client = stage.client(SHARED)
        await took(client)
        await ack(client, L1, "0")
        await ack(client, L3, "1")
        await end(stage, L3, commit=True, low=2)
        assert await took(client) == ["0"]
        assert await log_entries(stage) == 0

    play(scenario)


def test_messages_of_a_batch_are_acknowledged_one_by_one() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.publish("batch", batch=4)
        client = stage.client(SHARED)
        await took(client)
        await ack(client, L1, "batch", unacked=0b1100)
        await ack(client, L2, "batch", unacked=0b0111)
        with pytest.raises(TransactionConflict):
            await ack(client, L3, "batch", unacked=0b1110)
        position = client.position_of("batch")
        stage = await stage.moved()
        await quiet()
        await end(stage, L1, commit=True)
        assert stage.subscription.cursor.unacked_indexes(position) == 0b1100
        await end(stage, L2, commit=True)
        assert stage.subscription.cursor.unacked_indexes(position) == 0b0100

    play(scenario, messages=0)


def test_segments_have_no_log() -> None:
    async def scenario(stage: Stage) -> None:
        client = stage.client(SHARED)
        await took(client)
        with pytest.raises(TransactionConflict) as refused:
            await ack(client, L1, "0")
        assert refused.value.hint
        await end(stage, L1, commit=True)
        assert stage.subscription.backlog() == 5

    play(scenario, name=TopicName.parse("segment://public/default/t/0000-ffff-0"))


# --- recovery


@pytest.mark.parametrize("clean", [True, False])
def test_acknowledgements_survive_a_restart(clean: bool) -> None:  # 58
    async def scenario(stage: Stage) -> None:
        async def moved(old: Stage) -> Stage:
            if not clean:
                return await old.moved()
            await old.topic.close()
            return await old.world_stage()

        client = stage.client(SHARED)
        await took(client)
        await ack(client, L1, "0")
        await ack(client, L2, "1")
        await ack(client, L3, "2")
        await end(stage, L1, commit=True)
        stage = await moved(stage)
        client = stage.client(SHARED)
        assert await took(client) == ["3", "4"]
        await end(stage, L2, commit=True)
        stage = await moved(stage)
        await end(stage, L3, commit=False)
        client = stage.client(SHARED)
        assert await took(client) == ["2", "3", "4"]

    play(scenario)


def test_a_commit_counts_although_the_cursor_was_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(stage: Stage) -> None:
        client = stage.client(SHARED)
        await took(client)
        await ack(client, L1, "0", "1")
        monkeypatch.setattr(LegacyTxnAcks, "_settle", lambda _: None)
        await end(stage, L1, commit=True)
        monkeypatch.undo()
        stage = await stage.moved()
        await quiet()
        assert stage.subscription.backlog() == 3
        assert await log_entries(stage) == 0

    play(scenario, limits=Limits(cursor_flush_seconds=1000.0))


def test_discarding_before_the_cursor_is_durable_would_lose_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why entries wait for the cursor."""

    async def hasty(self: AckCleanup[Any]) -> None:
        await self._discard([*self._merged, *self._dropped])
        self._merged.clear()
        self._dropped.clear()

    async def scenario(stage: Stage) -> None:
        client = stage.client(SHARED)
        await took(client)
        await ack(client, L1, "0", "1")
        await end(stage, L1, commit=True)
        log = acks_of(stage)._log
        assert log is not None
        await log.ledger.cursor("__pending_ack_state").flush()
        stage = await stage.moved()
        await quiet()
        assert stage.subscription.backlog() == 5

    monkeypatch.setattr(AckCleanup, "settle", hasty)
    play(scenario, limits=Limits(cursor_flush_seconds=1000.0))


def test_a_subscription_without_a_log_opens_none() -> None:
    async def scenario(stage: Stage) -> None:
        await end(stage, L1, commit=True)
        await stage.topic.close()
        stage = await stage.world_stage()
        await quiet()
        assert len(await ledgers(stage)) == 1

    play(scenario)


def test_the_log_is_trimmed_behind_what_the_cursor_has() -> None:  # 58
    async def scenario(stage: Stage) -> None:
        client = stage.client(SHARED)
        await took(client)
        for number in range(40):
            await ack(client, TxnId(0, number), str(number))
            await end(stage, TxnId(0, number), commit=True, low=number - 1)
        assert await log_entries(stage) == 0
        log = acks_of(stage)._log
        assert log is not None
        assert log.ledger.entries < 20

    play(scenario, messages=40, limits=Limits(managed_ledger_ledger_entries=4))


# --- seeks, races, failures


def test_a_seek_ends_all_that_is_held() -> None:
    async def scenario(stage: Stage) -> None:
        client = stage.client(SHARED)
        await took(client)
        await ack(client, L1, "0", "1")
        await stage.subscription.seek(stage.topic.ledger.first_position())
        client = stage.client(SHARED)
        assert await took(client) == numbered(5)
        await end(stage, L1, commit=True)
        assert stage.subscription.backlog() == 5
        stage = await stage.moved()
        await quiet()
        assert stage.subscription.backlog() == 5
        assert await log_entries(stage) == 0

    play(scenario)


@pytest.mark.parametrize("commit", [True, False])
def test_an_end_during_a_seek_applies_nothing_of_before_it(commit: bool) -> None:
    async def scenario(stage: Stage) -> None:
        client = stage.client(SHARED)
        await took(client)
        await ack(client, L1, "0", "1")
        stage.world.slow = 0.1
        first = stage.topic.ledger.first_position()
        seek = asyncio.create_task(stage.subscription.seek(first))
        await quiet(0.05)
        await end(stage, L1, commit=commit)
        assert not seek.done()
        await seek
        stage.world.slow = 0
        client = stage.client(SHARED)
        assert await took(client) == numbered(5)
        await quiet(1)
        assert await log_entries(stage) == 0
        stage = await stage.moved()
        await quiet()
        assert stage.subscription.backlog() == 5

    play(scenario)


def test_an_end_covers_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stage: Stage) -> None:
        client = stage.client(SHARED)
        await took(client)
        await ack(client, L1, "0")
        submit, gate = PendingAckLog.submit, asyncio.Event()

        def slow(self: PendingAckLog, entry: object) -> asyncio.Future[Position]:
            async def later() -> Position:
                await gate.wait()
                return await submit(self, entry)  # type: ignore[arg-type]

            return asyncio.ensure_future(later())

        monkeypatch.setattr(PendingAckLog, "submit", slow)
        acking = asyncio.create_task(ack(client, L1, "1"))
        await quiet()
        ending = asyncio.create_task(end(stage, L1, commit=True))
        await quiet()
        with pytest.raises(TransactionConflict):
            await ack(client, L1, "2")
        gate.set()
        await acking
        await ending
        assert stage.subscription.backlog() == 3
        stage = await stage.moved()
        await quiet()
        assert stage.subscription.backlog() == 3

    play(scenario)


def test_what_could_not_be_written_is_held_no_more() -> None:
    async def scenario(stage: Stage) -> None:
        client = stage.client(SHARED)
        await took(client)
        cut(stage.broker)
        failed = asyncio.create_task(ack(client, L1, "0"))
        await asyncio.wait({failed})
        assert failed.exception() is not None
        heal(stage.broker)
        await ack(client, L2, "0")
        await end(stage, L2, commit=True)
        assert stage.subscription.backlog() == 4

    play(scenario)


def test_an_end_that_failed_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stage: Stage) -> None:
        client = stage.client(SHARED)
        await took(client)
        await ack(client, L1, "0")

        def refuse(*_: object) -> None:
            raise ServiceNotReady("no ledger now")

        with monkeypatch.context() as patch:
            patch.setattr(PendingAckLog, "submit", refuse)
            with pytest.raises(ServiceNotReady):
                await end(stage, L1, commit=True)
        with pytest.raises(TransactionConflict):  # it is over all the same
            await ack(client, L1, "1")
        assert stage.subscription.backlog() == 5
        await end(stage, L1, commit=True)
        assert stage.subscription.backlog() == 4

    play(scenario)


def test_a_log_that_failed_has_the_topic_loaded_anew() -> None:
    async def scenario(stage: Stage) -> None:
        client = stage.client(SHARED)
        await took(client)
        await ack(client, L1, "0")
        legacy = acks_of(stage)
        assert legacy._log is not None
        legacy._log.ledger._appender.stop(DiskFailed("broken"))
        for _ in range(2):
            with pytest.raises(ServiceNotReady, match="broken"):
                await end(stage, L1, commit=True)
        await quiet()
        assert isinstance(stage.topic.lost, DiskFailed)
        await stage.topic.close()
        stage = await stage.world_stage()
        await quiet()
        await end(stage, L1, commit=True)
        assert stage.subscription.backlog() == 4

    play(scenario)


# --- the end


def test_the_log_goes_with_its_subscription() -> None:
    async def scenario(stage: Stage) -> None:
        before = await ledgers(stage)
        client = stage.client(SHARED)
        await took(client)
        await ack(client, L1, "0")
        assert len(await ledgers(stage)) == len(before) + 1
        await stage.topic.delete_subscription("s", force=True)
        assert await ledgers(stage) == before
        assert stage.topic.legacy_transactions is not None
        assert stage.topic.legacy_transactions.ack_logs == []

    play(scenario)


def test_a_log_that_its_subscription_left_behind_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stage: Stage) -> None:
        before = await ledgers(stage)
        client = stage.client(SHARED)
        await took(client)
        await ack(client, L1, "0")

        async def nothing(_: LegacyTxnAcks) -> None:
            return

        with monkeypatch.context() as patch:
            patch.setattr(LegacyTxnAcks, "forget", nothing)
            await stage.topic.delete_subscription("s", force=True)
        stage = await stage.moved()
        assert await ledgers(stage) == before
        assert stage.topic.legacy_transactions is not None
        assert stage.topic.legacy_transactions.ack_logs == []

    play(scenario)


def test_everything_goes_with_the_topic() -> None:
    async def scenario(stage: Stage) -> None:
        client = stage.client(SHARED)
        await took(client)
        await ack(client, L1, "0")
        await stage.topic.delete(force=True)
        assert await ledgers(stage) == []
        metadata = stage.world.metadata.connect()
        assert await metadata.scan_keys("/txn/legacy") == []
        assert await metadata.scan_keys(CURSORS) == []
        await metadata.close()

    play(scenario)


def test_terminated_topics_take_acknowledgements() -> None:
    async def scenario(stage: Stage) -> None:
        client = stage.client(SHARED)
        await took(client)
        topic: Topic = stage.topic
        await topic.terminate()
        await ack(client, L1, "0")
        await ack(client, L2, "1")
        stage = await stage.moved()
        await end(stage, L1, commit=True)
        await end(stage, L2, commit=False)
        client = stage.client(SHARED)
        assert await took(client) == ["1", "2", "3", "4"]

    play(scenario)
