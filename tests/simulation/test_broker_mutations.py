"""The simulation of the broker finds what it is for: each test takes one rule away.

A rule is taken away by patching it from here; the broker has no switch for it. That the same seeds
find nothing with the rule in place is shown by `test_broker_seeds.py` and `make sim`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from harness.simulation.broker.run import simulate_broker
from magnetar.broker.api import Receipt, ReceiptRun
from magnetar.broker.dispatch.consumer import Consumer
from magnetar.broker.dispatch.delayed_index import DelayedIndex
from magnetar.broker.dispatch.delays import Delays
from magnetar.broker.dispatch.dispatch_state import DispatchState
from magnetar.broker.dispatch.key_shared import HashHolds
from magnetar.broker.dispatch.members import Member, Members
from magnetar.broker.dispatch.redelivery import RedeliveryCounts
from magnetar.broker.publish.dedup import Dedup, SendVerdict
from magnetar.broker.publish.producer import Producer
from magnetar.broker.subscribe.ack import Ack
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.errors import InvariantBroken
from magnetar.journal.files import JournalFile
from magnetar.journal.format import FILE_HEADER_BYTES, encode_file_header
from magnetar.managed_ledger.cursor_state import CursorState
from magnetar.model.ids import Position
from tests.simulation.search import first_violation

SEEDS = 40


def _first_violation(first: int = 0) -> str:
    return first_violation(simulate_broker, SEEDS, first)


def test_receipts_before_the_sync_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def sync_one_late(file: JournalFile, buffers: Sequence[bytes]) -> None:
        file._file.sync()
        if file.end == FILE_HEADER_BYTES:
            file._file.write(0, [encode_file_header(file.header)])
        file._file.write(file.end, buffers)

    monkeypatch.setattr(JournalFile, "write_synced", sync_one_late)
    assert _first_violation(first=4)


def test_swapped_receipts_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    take_receipts = Producer.take_receipts

    def swapped(producer: Producer) -> list[Receipt | ReceiptRun]:
        due = take_receipts(producer)
        return [due[1], due[0], *due[2:]] if len(due) > 1 else due

    monkeypatch.setattr(Producer, "take_receipts", swapped)
    assert "receipt of" in _first_violation()


def test_permits_that_are_not_counted_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    charge = Members.charge
    give_active: Callable[..., int] = DispatchState._give_active

    def charge_nothing(members: Members, member: Member, messages: int) -> None:
        charge(members, member, messages)
        member.permits += messages

    def give_for_nothing(state: DispatchState, entries: Sequence[Any]) -> int:
        permits = 0 if state._active is None else state._active.permits
        taken = give_active(state, entries)
        if state._active is not None:
            state._active.permits = permits
        return taken

    monkeypatch.setattr(Members, "charge", charge_nothing)
    monkeypatch.setattr(DispatchState, "_give_active", give_for_nothing)
    assert "without a permit" in _first_violation()


def test_an_answer_before_the_cursor_is_durable_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def at_once(subscription: Subscription) -> None:
        return None

    monkeypatch.setattr(Subscription, "ack_durable", at_once)
    assert "was acknowledged" in _first_violation(first=2)


def test_acknowledged_entries_that_come_again_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CursorState, "is_acked", lambda *_: False)
    assert "was acknowledged" in _first_violation()


def test_forgotten_batch_indexes_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    ack = Subscription.ack

    def whole(subscription: Subscription, consumer: Consumer, acks: Any, **options: Any) -> None:
        ack(subscription, consumer, [Ack(position) for position, _ in acks], **options)

    monkeypatch.setattr(Subscription, "ack", whole)
    assert "is open" in _first_violation()


def test_doubles_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = Dedup.decide

    def careless(
        dedup: Dedup, name: str, sequence_id: int, *rest: Any, **options: Any
    ) -> SendVerdict:
        if sequence_id <= dedup.last_sequence_id(name):
            return SendVerdict.STORE
        return decide(dedup, name, sequence_id, *rest, **options)

    monkeypatch.setattr(Dedup, "decide", careless)
    monkeypatch.setattr(Dedup, "persisted", lambda *_, **__: None)
    monkeypatch.setattr(Dedup, "failed", lambda *_, **__: None)
    found = _first_violation()
    # In the log, or by what the producer is told when it comes again.
    assert "sent " in found or "last sequence" in found


def test_keys_at_two_consumers_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HashHolds, "allows", lambda *_: True)
    monkeypatch.setattr(HashHolds, "take", lambda *_: None)
    monkeypatch.setattr(HashHolds, "release", lambda *_: False)
    monkeypatch.setattr(HashHolds, "release_all", lambda *_: None)
    assert "key k" in _first_violation(first=4)


def test_redelivery_counts_of_what_nobody_asked_for_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_many(counts: RedeliveryCounts, position: Position) -> int:
        return counts._counts.get(position, 0) + 1

    monkeypatch.setattr(RedeliveryCounts, "of", too_many)
    assert "redelivery count" in _first_violation()


def test_messages_before_their_time_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    first_due = DelayedIndex.first_due

    def two_seconds_early(
        index: DelayedIndex, count: int, now_ms: int, rule: Any
    ) -> list[Position]:
        return first_due(index, count, now_ms + 2000, rule)

    monkeypatch.setattr(DelayedIndex, "first_due", two_seconds_early)
    assert "s early" in _first_violation()


def test_messages_that_are_forgotten_while_they_wait_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DelayedIndex, "add", lambda *_: None)
    assert "is open" in _first_violation()


def test_messages_that_wait_again_once_they_were_handed_out_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remove_all = Delays.remove_all

    def and_once_more(delays: Delays, positions: Any) -> None:
        gone = list(positions)
        remove_all(delays, gone)
        rule, at_ms = delays._rule(), delays._clock.now_ms() + 1500
        for position in gone:
            with suppress(InvariantBroken):
                delays._add(position, at_ms, rule)

    monkeypatch.setattr(Delays, "remove_all", and_once_more)
    found = _first_violation(first=17)
    assert "again" in found or "which c" in found
