"""Runs of acknowledgements."""

from __future__ import annotations

from magnetar.broker.subscribe.ack import Ack, run_end
from magnetar.model.ids import Position


def test_a_run_is_of_whole_consecutive_entries_of_one_ledger() -> None:
    acks = [Ack(Position(1, 5)), Ack(Position(1, 6)), Ack(Position(1, 8)), Ack(Position(2, 9))]
    assert run_end(acks, 0) == 2
    assert run_end(acks, 2) == 3
    assert run_end(acks, 3) == 4
    assert run_end([Ack(Position(1, 5), 1), Ack(Position(1, 6))], 0) == 0
    assert run_end([Ack(Position(1, 5)), Ack(Position(1, 6), 1)], 0) == 1
