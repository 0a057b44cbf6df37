"""A server killed under load: a sample passes, and a server that breaks a rule is caught.

The comparison itself is tested on histories made by hand: a check that sees nothing says nothing.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from harness.crash.server.check import ServerFault, ServerVerdict, compare_log, compare_subscription
from harness.crash.server.history import (
    Entry,
    ProducerHistory,
    Sent,
    SubscriptionHistory,
    TopicHistory,
    payload_of,
    sent_of,
)
from harness.crash.server.run import ServerKills, ServerOutcome
from magnetar.model.ids import Position
from magnetar.model.subscriptions import SubscriptionType

SEED = 21
KILLS_MAX = 10
BROKEN_SERVER = Path(__file__).with_name("broken_server.py")

# --- the whole, with real processes


@pytest.mark.slow
def test_server_crash_sample(tmp_path: Path) -> None:
    outcome = asyncio.run(ServerKills(tmp_path, 4, SEED).run())
    assert outcome.texts == []
    assert outcome.kills == 4
    assert outcome.messages > 1000
    assert outcome.acknowledged > 500


@pytest.mark.slow
def test_ack_answers_before_the_flush_are_caught(tmp_path: Path) -> None:
    _catch(tmp_path, "ack_answers_before_the_flush", ServerFault.CAME_BACK)


@pytest.mark.slow
def test_receipts_before_the_sync_are_caught(tmp_path: Path) -> None:
    _catch(tmp_path, "receipts_before_the_sync", ServerFault.LOST)


@pytest.mark.slow
def test_dedup_that_forgets_is_caught(tmp_path: Path) -> None:
    outcome = _catch(tmp_path, "no_replay_of_dedup", ServerFault.FAILED, ServerFault.DOUBLED)
    assert outcome.faults[ServerFault.LOST] == 0


def _catch(folder: Path, rule: str, *faults: ServerFault) -> ServerOutcome:
    """Kill until one of the faults is seen: not every kill meets what shows it."""
    serve = (sys.executable, str(BROKEN_SERVER), rule, "serve")
    kills = ServerKills(folder, KILLS_MAX, SEED, serve=serve, at_points=False, looks_for=faults)
    outcome = asyncio.run(kills.run())
    assert any(outcome.faults[each] for each in faults), (outcome.kills, outcome.texts)
    return outcome


# --- the comparison


def _topic(*, deduplicates: bool = False) -> TopicHistory:
    return TopicHistory.make("t", [ProducerHistory("p")], [], deduplicates=deduplicates)


def _at(entry_id: int, sent: Sent | None, unacked: int = 1) -> Entry:
    return Entry(Position(1, entry_id), sent, unacked)


def _faults(topic: TopicHistory, entries: list[Entry]) -> list[ServerFault]:
    verdict = ServerVerdict()
    compare_log(topic, entries, verdict)
    return [each.fault for each in verdict.violations]


def _sent(topic: TopicHistory, sequence_id: int, attempt: int = 1) -> Sent:
    sent = Sent("p", sequence_id, 1, attempt)
    topic.producers["p"].send(sent)
    return sent


def test_a_payload_names_what_was_sent() -> None:
    sent = Sent("p", 7, 3, 2)
    assert sent_of(payload_of(sent)) == sent
    assert sent_of(payload_of(sent)[:-1]) is None
    assert sent_of(b"anything") is None


def test_a_receipted_message_must_be_at_its_place() -> None:
    topic = _topic()
    first, second = _sent(topic, 0), _sent(topic, 1)
    topic.receipt(first, Position(1, 0))
    assert _faults(topic, [_at(0, first), _at(1, second)]) == []
    assert ServerFault.LOST in _faults(topic, [_at(0, second)])
    assert ServerFault.LOST in _faults(topic, [])


def test_a_message_may_be_there_as_often_as_it_was_sent() -> None:
    topic, once = _topic(), _topic(deduplicates=True)
    for each in (topic, once):
        first, again = _sent(each, 0), _sent(each, 0, attempt=2)
    assert _faults(topic, [_at(0, first), _at(1, again)]) == []
    assert ServerFault.DOUBLED in _faults(once, [_at(0, first), _at(1, again)])
    assert ServerFault.DOUBLED in _faults(topic, [_at(n, first) for n in range(3)])


def test_what_nobody_sent_is_unexplained() -> None:
    topic = _topic()
    assert _faults(topic, [_at(0, None)]) == [ServerFault.UNEXPLAINED]
    assert _faults(topic, [_at(0, Sent("p", 4, 1, 1))]) == [ServerFault.UNEXPLAINED]


def test_messages_of_a_producer_keep_their_order() -> None:
    topic = _topic()
    first, second = _sent(topic, 0), _sent(topic, 1)
    assert ServerFault.DISORDERED in _faults(topic, [_at(0, second), _at(1, first)])


def test_acknowledged_messages_stay_away_and_others_come() -> None:
    topic = _topic()
    batch = Sent("p", 0, 3, 1)
    log = {Position(1, n): batch._replace(sequence_id=3 * n) for n in range(4)}

    def compare(delivered: dict[int, int]) -> list[ServerFault]:
        subscription = SubscriptionHistory("s", SubscriptionType.EXCLUSIVE)
        subscription.sent_cumulative_ack(Position(1, 1))
        subscription.cumulative_ack_is_durable(Position(1, 1))
        subscription.sent_ack(Position(1, 2), 0b011)
        subscription.ack_is_durable(Position(1, 2), 0b001)
        verdict = ServerVerdict()
        entries = [_at(n, log[Position(1, n)], bits) for n, bits in delivered.items()]
        compare_subscription(topic, subscription, log, entries, verdict)
        if not verdict.violations:
            left = {n: subscription.surely_acked(Position(1, n), 3) for n in range(4)}
            assert left == {n: 0b111 & ~delivered.get(n, 0) for n in range(4)}
        return [each.fault for each in verdict.violations]

    assert compare({1: 0b111, 2: 0b110, 3: 0b111}) == []
    assert compare({1: 0b111, 2: 0b100, 3: 0b111}) == []
    assert compare({0: 0b001, 1: 0b111, 2: 0b100, 3: 0b111}) == [ServerFault.CAME_BACK]
    assert compare({1: 0b111, 2: 0b101, 3: 0b111}) == [ServerFault.CAME_BACK]
    assert compare({1: 0b111, 2: 0b010, 3: 0b111}) == [ServerFault.SKIPPED]
    assert compare({1: 0b111, 2: 0b110}) == [ServerFault.SKIPPED]
